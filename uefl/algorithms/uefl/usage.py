"""Usage of codewords: averages weighted by usage, and the perplexity."""

from __future__ import annotations

import torch

from uefl_kernels.metrics import entropy


class CodewordMean:
    """Average codewords ``[..., V, d]`` weighted by each client's usage, and keep unused ones.

    An average by examples would pull a codeword towards clients that do not use it, where it has not moved.
    """

    def __init__(self, old: torch.Tensor) -> None:
        self._old = old
        self._sum = torch.zeros_like(old, dtype=torch.float64)
        self._usage = torch.zeros(old.shape[:-1], dtype=torch.float64, device=old.device)

    def add(self, codewords: torch.Tensor, usage: torch.Tensor) -> None:
        """Add the codewords ``[..., V, d]`` of one client, with the weights ``usage [..., V]``."""
        usage = usage.double()
        self._sum += codewords.double() * usage[..., None]
        self._usage += usage

    def result(self) -> torch.Tensor:
        """Return the averages ``[..., V, d]`` float32."""
        mean = self._sum / self._usage.clamp_min(1)[..., None]  # weights are whole numbers
        return torch.where(self._usage[..., None] > 0, mean, self._old.double()).float()


def perplexity(counts: torch.Tensor) -> torch.Tensor:
    """Return the effective number of codewords, exp of the entropy of their ``counts [..., V]``."""
    usage = counts.double() / counts.sum(-1, keepdim=True).clamp_min(1)
    return entropy(usage).exp()
