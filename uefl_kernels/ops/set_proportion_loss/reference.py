"""The definition of ``set_proportion_loss`` in float64.

Per set, it is the mean of the softmax of its rows and a cross-entropy.
"""

from __future__ import annotations

import itertools

import torch

from ..._dtypes import result_dtype
from . import Arguments

_TOLERANCE = 1e-3  # percentages and counts, not what rounding and clamping leave


def set_proportion_loss(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss ``[S]`` and gradient ``[N, K]``, or ``[0]`` without it.

    With p_n = softmax(z_n), the share w_nk = p_nk / (sum of p_nk over the set) and t the proportions of n's
    set:
      loss_s      = -sum_k t_sk log(mean of p_nk over the set), 0 where t_sk is 0
      gradient_nk = p_nk sum_j t_j w_nj - t_k w_nk
    """
    logits, offsets, proportions, with_gradient = given
    z, t = logits.detach().double(), proportions.double()
    _require(offsets, t, logits.shape[0])
    log_p = z.log_softmax(1)
    loss = t.new_empty(t.shape[0])
    gradient = torch.zeros_like(z)
    bounds = offsets.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(bounds)):
        total = log_p[begin:end].logsumexp(0)
        term = t[s] * (total - torch.tensor(end - begin).double().log())
        loss[s] = -torch.where(t[s] == 0, 0.0, term).sum()
        if with_gradient:
            pull = torch.where(t[s] == 0, 0.0, t[s] * (log_p[begin:end] - total).exp())
            gradient[begin:end] = log_p[begin:end].exp() * pull.sum(1, keepdim=True) - pull
    return loss.to(result_dtype(logits)), gradient.to(logits.dtype) if with_gradient else logits.new_empty(0)


def _require(offsets: torch.Tensor, proportions: torch.Tensor, n: int) -> None:
    """Raise RuntimeError if the sets do not cover the rows, or if proportions are invalid.

    This is checked on the CPU only.
    """
    if offsets.device.type != "cpu":
        return
    op = "set_proportion_loss"
    if int(offsets[0]) != 0 or int(offsets[-1]) != n:
        raise RuntimeError(
            f"{op}: offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected from 0 to the {n} rows"
            " of logits"
        )
    short = offsets.diff() <= 0
    if bool(short.any()):
        s = int(short.nonzero()[0])
        raise RuntimeError(
            f"{op}: set {s} has {int(offsets[s + 1] - offsets[s])} rows, expected at least one; leave empty"
            " sets out"
        )
    wrong = ~((proportions >= 0) & (proportions < torch.inf))
    if bool(wrong.any()):
        s, k = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"{op}: proportions[{s}, {k}] is {float(proportions[s, k]):g}, expected a finite number of at"
            " least 0"
        )
    off = (proportions.sum(1) - 1).abs() > _TOLERANCE
    if bool(off.any()):
        s = int(off.nonzero()[0])
        total = float(proportions[s].sum())
        raise RuntimeError(
            f"{op}: proportions of set {s} sum to {total:g}, expected 1 within {_TOLERANCE:g}; divide each"
            " row by its sum"
        )
