"""Codewords that depend on what was quantised before (Huijben et al. 2024, "Residual Quantization with Implicit Neural Codebooks")."""

from __future__ import annotations

import torch
from torch import nn

from ._float32 import no_autocast


class ImplicitCodebook(nn.Module):
    """A residual MLP from a codeword and the sum of the codewords before it to the codeword of that position; the peer's ``MLP``."""

    def __init__(self, dim: int, dim_hidden: int | None = None, depth: int = 4, l2norm_output: bool = False) -> None:
        super().__init__()
        hidden = dim if dim_hidden is None else dim_hidden
        self.proj_in = nn.Linear(2 * dim, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim)) for _ in range(depth))
        self.l2norm_output = l2norm_output

    def forward(self, codes: torch.Tensor, *, condition: torch.Tensor) -> torch.Tensor:
        """A codeword of codes ``[..., d]`` for each condition ``[..., d]``."""
        with no_autocast(codes.device):
            x = self.proj_in(torch.cat((condition, codes), -1))
            for layer in self.layers:
                x = layer(x) + x
        return nn.functional.normalize(x, dim=-1) if self.l2norm_output else x

    def of_all(self, codes: torch.Tensor, *, condition: torch.Tensor) -> torch.Tensor:
        """All codes ``[h, K, d]`` for each condition ``[..., d]`` -> ``[h, ..., K, d]``."""
        books, k, d = codes.shape
        lead = condition.shape[:-1]
        codes = codes.reshape(books, *(1,) * len(lead), k, d).expand(books, *lead, k, d)
        found: torch.Tensor = self(codes, condition=condition.unsqueeze(-2).expand(books, *lead, k, d))
        return found
