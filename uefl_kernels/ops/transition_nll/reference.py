"""The definition of ``transition_nll``: the difference of two log-sum-exps in float64, and its gradient."""

from __future__ import annotations

import torch

from ..._dtypes import result_dtype
from . import Arguments
from .value_checks import require_groups, require_matrix, require_rows


def transition_nll(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss ``[B]``, and its gradient ``[B, K]``, which is ``[0]`` without ``with_gradient``.

    With the logits z, and for each sample b its target y and its group g::

        loss_b = LSE_k(z_bk + log_marginal_gk) - LSE_k(z_bk + log_transition_gyk)
        gradient_b = softmax(z_b + log_marginal_g) - softmax(z_b + log_transition_gy)

    Both are 0 for ignored targets. Other targets outside of 0 to M - 1 raise RuntimeError on the CPU, and
    give NaN on other devices.
    """
    logits, targets, log_transition, log_marginal, groups, ignore_index, with_gradient = given
    z = logits.detach().double()
    ignored = targets == ignore_index
    require_matrix("transition_nll", log_marginal)
    group = require_groups("transition_nll", groups, logits.shape[0], log_transition)
    rows, inside = require_rows("transition_nll", targets, ignored, group, log_transition)
    with_marginal = z + log_marginal.double()[group]
    with_row = z + log_transition.double()[group, rows]
    loss = torch.where(inside, with_marginal.logsumexp(1) - with_row.logsumexp(1), torch.nan)
    loss = torch.where(ignored, 0.0, loss).to(result_dtype(logits))
    if not with_gradient:
        return loss, logits.new_empty(0)
    gradient = torch.where(inside[:, None], with_marginal.softmax(1) - with_row.softmax(1), torch.nan)
    return loss, torch.where(ignored[:, None], 0.0, gradient).to(logits.dtype)
