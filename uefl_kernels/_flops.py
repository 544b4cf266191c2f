"""FLOP formulas of the ops for ``torch.utils.flop_counter``.

As with torch's own formulas, matrix products count and elementwise work does not.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from ._library import _libraries

_COUNTER = "torch.utils.flop_counter"


def _search(x: torch.Tensor, codebook: torch.Tensor, *_: Any, out_val: Any) -> int:
    """Count the products of every segment with every codeword of its codebook."""
    return 2 * x.numel() * codebook.shape[-2]


def _residual_search(x: torch.Tensor, codebooks: Sequence[torch.Tensor], *_: Any, out_val: Any) -> int:
    """Count a search in each stage."""
    return sum(_search(x, codebook, out_val=None) for codebook in codebooks)


def _kmeans(
    x: torch.Tensor,
    weights: Any,
    init: Any,
    sizes: Sequence[int],
    clusters: Sequence[int],
    seeds: Any,
    method: str,
    spherical: bool,
    n_init: int,
    max_iter: int,
    tol: float,
    *,
    out_val: Any,
) -> int:
    """Count a search in each of ``max_iter`` iterations of all restarts.

    This number is an upper bound, because bounds and convergence save work.
    """
    pairs = sum(rows * k for rows, k in zip(sizes, clusters, strict=True))
    return int(2 * pairs * x.shape[1] * (max_iter + 1) * max(1, n_init))


def _lloyd(x: torch.Tensor, centers: torch.Tensor, *arguments: Any, out_val: Any) -> int:
    """Count a search in each iteration, at most ``max_iter``, and one after the last."""
    return _search(x, centers, out_val=None) * (int(arguments[-1]) + 1)


def _sparse_search(
    values: torch.Tensor, _c: Any, _o: Any, centers: torch.Tensor, *_: Any, out_val: Any
) -> int:
    """Count the products of every nonzero value with its column of every center."""
    return 2 * values.numel() * centers.shape[0]


def _sparse_kmeans(*arguments: Any, out_val: Any) -> int:
    """Count a search in each iteration, at most ``max_iter``, and one after the last."""
    return _sparse_search(*arguments, out_val=None) * (int(arguments[-2]) + 1)


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: Any, out_val: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


def _mlp(
    x: torch.Tensor, parameters: Any, widths: Sequence[int], p: Any, passes: int, *_: Any, out_val: Any
) -> int:
    """Count all layers in every pass."""
    return 2 * x.shape[0] * passes * sum(a * b for a, b in pairwise(widths))


def _mlp_backward(_m: Any, _e: Any, _v: Any, _p: Any, *arguments: Any, out_val: Any) -> int:
    """Count the passes again, and two products per layer."""
    return 3 * _mlp(*arguments, out_val=None)


def _transition(logits: torch.Tensor, log_transition: torch.Tensor, *_: Any, out_val: Any) -> int:
    """Count a product of each row with its matrix ``[M, K]``."""
    return 2 * logits.numel() * log_transition.shape[-2]


def _transition_backward(_grad: Any, *arguments: Any, out_val: Any) -> int:
    """Count the forward pass again, and a product with the transposed matrix."""
    return 2 * _transition(*arguments, out_val=None)


def _lfq(rows: torch.Tensor, *_: Any, out_val: Any) -> int:
    """Count the products of every row with every code, as the definition computes them."""
    return 2 * rows.numel() << rows.shape[-1]


def _lfq_backward(rows: torch.Tensor, *_: Any, out_val: Any) -> int:
    """Count the forward pass again, and a product with the codes."""
    return 2 * _lfq(rows, out_val=None)


_FORMULAS: dict[str, Callable[..., int]] = {
    "lfq_entropy": _lfq,
    "lfq_entropy_backward": _lfq_backward,
    **dict.fromkeys(
        ("vq", "vq_assign", "vq_forward", "kmeans_step", "kmeans_labels", "kmeans_distances"), _search
    ),
    "rvq": _residual_search,
    "kmeans": _kmeans,
    "kmeans_lloyd": _lloyd,
    **dict.fromkeys(
        ("kmeans_sparse_labels", "kmeans_sparse_distances", "kmeans_sparse_products"), _sparse_search
    ),
    "kmeans_sparse": _sparse_kmeans,
    "linear": _linear,
    "mc_dropout_mlp": _mlp,
    "mc_dropout_mlp_backward": _mlp_backward,
    "log_transition_probs": _transition,
    "log_transition_probs_backward": _transition_backward,
}


def _register(counter: ModuleType) -> None:
    from .ops import kmeans_labels, kmeans_sparse, linear  # noqa: F401 - define ops on import

    for name, formula in _FORMULAS.items():
        targets = [getattr(getattr(torch.ops, namespace), name) for namespace in _libraries]
        counter.register_flop_formula(targets, get_raw=True)(formula)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the formulas when the counter is imported.

    An import of the counter here would also import Triton.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def execute(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register the formulas now if the counter is imported, otherwise when it is imported."""
    if _COUNTER in sys.modules:
        _register(sys.modules[_COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())
