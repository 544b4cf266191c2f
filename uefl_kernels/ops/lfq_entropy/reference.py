"""The definition of ``lfq_entropy`` and its gradient in float64."""

from __future__ import annotations

import torch

from . import composed


def lfq_entropy(given: composed.Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean entropy of a row, and the mean probability ``[C, 2^d]`` of each code."""
    (rows,) = given
    entropy, mean = _entropy_and_mean(rows.double())
    return entropy.to(rows.dtype), mean.to(rows.dtype)


def lfq_entropy_backward(given: composed.GradientArguments) -> torch.Tensor:
    """Return the gradient of the results with respect to the rows, ``[N, C, d]``."""
    rows, grad_entropy, grad_mean = given
    with torch.enable_grad():
        leaf = rows.detach().double().requires_grad_()
        results = _entropy_and_mean(leaf)
        grads = (grad_entropy.double(), grad_mean.double())
        (gradient,) = torch.autograd.grad(results, leaf, grads)
    return gradient.to(rows.dtype)


def _entropy_and_mean(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    probs = (rows @ composed.signs(rows.shape[-1], rows.dtype, rows.device).t()).softmax(-1)
    entropies = -(probs * probs.clamp(min=1e-5).log()).sum(-1)
    count, codebooks = max(len(rows), 1), max(rows.shape[1], 1)
    return entropies.sum() / (count * codebooks), probs.sum(0) / count
