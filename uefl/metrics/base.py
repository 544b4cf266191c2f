"""The registry of metrics, and the check of the key ``run.metrics``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from ..errors import UserError, nearest
from ..registry import Registry

if TYPE_CHECKING:
    import torch

MetricFunction = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor | float"]
"""a function that takes the probabilities ``[N, classes]`` float32 and the labels ``[N]`` int64 of one
client's test split, and returns one finite number. The first line of its docstring describes it in
reports."""

METRICS: Registry[MetricFunction] = Registry(__package__, "metric", "uefl.metrics")


def metric(name: str) -> Callable[[MetricFunction], MetricFunction]:
    """Register a metric under the name that ``run.metrics`` gives it."""
    return METRICS.decorator(name)


def check(names: Iterable[str], taken: Collection[str]) -> None:
    """Refuse names of metrics that do not exist, or that a run uses for something else.

    Raises:
        UserError: the names have such a name, or one name twice.
    """
    seen: set[str] = set()
    for name in names:
        if name not in METRICS:
            listed = ", ".join(METRICS)
            raise UserError(
                f"key 'run.metrics': no metric {name!r}{nearest(name, METRICS)}; there are {listed}"
            )
        if name in taken or name in seen:
            raise UserError(f"key 'run.metrics': {name!r} exists already; omit it, or rename your metric")
        seen.add(name)


def measured(name: str, probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the value of a metric, ``[]``.

    The metric gets copies, which it may change.

    Raises:
        TypeError: the metric does not return one number.
    """
    import torch

    found = METRICS[name](probs.clone(), labels.clone())
    try:
        value = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        value = torch.empty(0)
    if value.ndim or value.is_complex():
        raise TypeError(f"metric {name!r}: expected one number, got {found!r:.80}")
    return value


def described(name: str) -> str:
    """Return the description of a metric for a report."""
    about = (METRICS[name].__doc__ or "").strip() if name in METRICS else ""
    line = about.partition("\n")[0].rstrip(".").removeprefix("Return ")
    return f"{line or 'a metric of another package'}; the mean over all test inputs"
