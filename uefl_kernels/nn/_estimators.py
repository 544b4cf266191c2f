"""How a gradient passes a codeword that was chosen otherwise than by ``vq``, whose own estimators are closed forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def straight_through(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The codeword; its gradient goes to x unchanged."""
    return x + (codes - x).detach()


def rotate(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The codeword; its gradient goes to x turned and scaled as the codeword is (Fifty et al. 2024, section 4.2). Last dimension."""
    length, target = x.norm(dim=-1, keepdim=True), codes.norm(dim=-1, keepdim=True)
    u, q = (x / length.clamp(min=1e-6)).detach(), (codes / target.clamp(min=1e-6)).detach()
    w = F.normalize(u + q, dim=-1, eps=1e-6)
    turned = x - 2 * (x * w).sum(-1, keepdim=True) * w + 2 * (x * u).sum(-1, keepdim=True) * q
    result: torch.Tensor = turned * (target / length.clamp(min=1e-6)).detach()
    return result


def directional(x: torch.Tensor, codes: torch.Tensor, variance: float) -> torch.Tensor:
    """x moved by its distance to the codeword in nearly its direction: both get a gradient (DiVeQ, figure 1)."""
    error = codes - x
    noised = error + variance**0.5 * torch.randn_like(error)
    result: torch.Tensor = x + F.normalize(noised, dim=-1, eps=1e-6).detach() * error.norm(dim=-1, keepdim=True)
    return result
