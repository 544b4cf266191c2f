"""Metrics of a run: those of a classifier, which ``uefl_kernels.metrics`` has, and those of a codebook."""

from __future__ import annotations

import torch

from uefl_kernels.metrics import accuracy, brier, ece, entropy, nll

__all__ = ["accuracy", "brier", "ece", "entropy", "nll", "perplexity"]


def perplexity(counts: torch.Tensor) -> torch.Tensor:
    """exp of the entropy of codeword usage: how many codewords are in effective use; ``[..., V]`` counts -> ``[...]``."""
    usage = counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)
    return entropy(usage).exp()
