"""Beam search through a stack of quantisers: keep the few sums of codewords that are best so far."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Beams(NamedTuple):
    """``j`` candidates of each position: what is left of it, the sum of its codewords, indices, losses, what each layer was given."""

    residual: torch.Tensor  # [..., j, d]
    total: torch.Tensor  # [..., j, d]
    scores: torch.Tensor  # [..., j]
    indices: torch.Tensor  # [..., j, layers]
    losses: torch.Tensor  # [..., j, layers]
    inputs: torch.Tensor  # [..., j, layers, d]


def begin(x: torch.Tensor) -> Beams:
    """One candidate, which is all of x ``[..., d]``."""
    lead = x.shape[:-1]
    return Beams(
        x.unsqueeze(-2),
        torch.zeros_like(x).unsqueeze(-2),
        x.new_zeros(*lead, 1),
        torch.zeros(*lead, 1, 0, dtype=torch.int64, device=x.device),
        x.new_zeros(*lead, 1, 0, dtype=torch.float32),
        x.new_zeros(*lead, 1, 0, x.shape[-1]),
    )


def extend(
    beams: Beams, codes: torch.Tensor, indices: torch.Tensor, losses: torch.Tensor, passed: torch.Tensor, weight: float, keep: int
) -> Beams:
    """Every candidate with each of its k codewords ``[..., j, k, d]``, of which the ``keep`` with the least loss stay.

    ``passed`` is the codewords as they are subtracted, and ``weight`` that of this layer's loss in the score.
    """
    k = indices.shape[-1]

    def times(held: torch.Tensor, dims: int) -> torch.Tensor:  # [..., j, *] -> [..., j, k, *]
        shape = list(held.unsqueeze(-1 - dims).shape)
        shape[-1 - dims] = k
        return held.unsqueeze(-1 - dims).expand(shape)

    inputs = torch.cat([beams.inputs, beams.residual.unsqueeze(-2)], -2)
    grown = (
        (times(beams.residual, 1) - passed, 1),
        (times(beams.total, 1) + codes, 1),
        (times(beams.scores, 0) - losses * weight, 0),
        (torch.cat([times(beams.indices, 1), indices.unsqueeze(-1)], -1), 1),
        (torch.cat([times(beams.losses, 1), losses.unsqueeze(-1)], -1), 1),
        (times(inputs, 2), 2),
    )
    flat = [held.flatten(-2 - dims, -1 - dims) for held, dims in grown]
    if flat[2].shape[-1] > keep:
        best = flat[2].topk(keep, dim=-1).indices
        for place, (_, dims) in enumerate(grown):
            chosen = best.reshape(*best.shape, *(1,) * dims)
            flat[place] = torch.take_along_dim(flat[place], chosen, dim=-1 - dims)
    return Beams(*flat)


def end(beams: Beams) -> Beams:
    """The best candidate, without its dimension."""
    best = beams.scores.argmax(-1, keepdim=True)

    def pick(held: torch.Tensor, dims: int) -> torch.Tensor:
        return torch.take_along_dim(held, best.reshape(*best.shape, *(1,) * dims), dim=-1 - dims).squeeze(-1 - dims)

    return Beams(*(pick(held, dims) for held, dims in zip(beams, (1, 1, 0, 1, 1, 2), strict=True)))
