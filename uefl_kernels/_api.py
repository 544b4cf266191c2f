"""Public names that need torch.

``uefl_kernels`` imports them on first use. The estimators are imported when they are asked for, since
scikit-learn comes with them where it is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _flops
from ._decompositions import decompositions
from ._library import COMPILED, backend
from .ops import ema_update, fsq, lfq_entropy  # noqa: F401  (define ops of the layers)
from .ops.kmeans import KMeansResult, kmeans, kmeans_batched
from .ops.kmeans_step import KMeansStep, KMeansUnits, kmeans_step
from .ops.log_transition_probs import log_transition_probs, transition_double_softmax
from .ops.mc_dropout_mlp import MCStats, mc_dropout_mlp
from .ops.rvq import RVQOutput, rvq, rvq_with_sums
from .ops.set_proportion_loss import set_proportion_loss
from .ops.transition_nll import transition_nll
from .ops.vq import VQOutput, vq, vq_with_sums
from .ops.vq_assign import vq_assign
from .transition import log_transition_matrix

if TYPE_CHECKING:
    from .estimator import CollisionReport, KMeans, ResidualKMeans, collision_report

_ESTIMATORS = ("CollisionReport", "KMeans", "ResidualKMeans", "collision_report")

_flops.register()

__all__ = [
    "COMPILED",
    "CollisionReport",
    "KMeans",
    "KMeansResult",
    "KMeansStep",
    "KMeansUnits",
    "MCStats",
    "RVQOutput",
    "ResidualKMeans",
    "VQOutput",
    "backend",
    "collision_report",
    "decompositions",
    "kmeans",
    "kmeans_batched",
    "kmeans_step",
    "log_transition_matrix",
    "log_transition_probs",
    "mc_dropout_mlp",
    "rvq",
    "rvq_with_sums",
    "set_proportion_loss",
    "transition_double_softmax",
    "transition_nll",
    "vq",
    "vq_assign",
    "vq_with_sums",
]


def __getattr__(name: str) -> Any:
    if name in _ESTIMATORS:
        return getattr(import_module(".estimator", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
