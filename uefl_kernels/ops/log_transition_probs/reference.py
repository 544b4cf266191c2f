"""The definition of ``log_transition_probs`` in float64.

The function computes one sum over classes at a time, so no array has the size B x M x K.
"""

from __future__ import annotations

import torch

from ..._dtypes import result_dtype
from ..transition_nll.value_checks import require_groups, require_logarithms, require_matrix
from . import Arguments, Gradient


def log_transition_probs(given: Arguments) -> torch.Tensor:
    """Compute log g [B, M] from logits [B, K] and the transition.

    The others are log_transition [G, M, K], log_marginal [G, K], and groups [B] | None.

    log g_bm = LSE_k(z_bk + log_transition_gmk) - LSE_k(z_bk + log_marginal_gk)
    """
    logits, log_transition, log_marginal, groups = given
    z, matrix = logits.detach().double(), log_transition.double()
    require_matrix("log_transition_probs", log_marginal)
    group = require_groups("log_transition_probs", groups, logits.shape[0], log_transition)
    require_logarithms("log_transition_probs", log_transition)
    scores = [(z + matrix[:, m][group]).logsumexp(1) for m in range(matrix.shape[1])]
    log_g = torch.stack(scores, 1) - (z + log_marginal.double()[group]).logsumexp(1, keepdim=True)
    return log_g.to(result_dtype(logits))


def log_transition_probs_backward(gradient: Gradient, given: Arguments) -> torch.Tensor:
    """Return the gradient with respect to the logits.

    With G = grad [B, M]: dz_b = sum_m G_bm softmax(z_b + log_transition_gm)
                                 - (sum_m G_bm) softmax(z_b + log_marginal_g).
    A set with a row of -inf has log g = -inf and no gradient.
    """
    logits, log_transition, log_marginal, groups = given
    z, matrix, weight = logits.detach().double(), log_transition.double(), gradient.grad.double()
    group = require_groups("log_transition_probs", groups, logits.shape[0], log_transition)
    total = torch.zeros_like(z)
    counted = torch.zeros_like(z[:, 0])
    for m in range(matrix.shape[1]):
        rows = matrix[:, m][group]
        present = (rows > -torch.inf).any(1)
        share = torch.where(present, weight[:, m], 0.0)
        total += torch.where(present[:, None], share[:, None] * (z + rows).softmax(1), 0.0)
        counted += share
    return (total - counted[:, None] * (z + log_marginal.double()[group]).softmax(1)).to(logits.dtype)
