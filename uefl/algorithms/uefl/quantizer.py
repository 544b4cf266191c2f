"""Quantize features, and update codewords.

A codebook is ``[V, d]``, one for all segments of a feature vector, or ``[s, V, d]``, one for each segment.

Codewords learn by the gradient of the loss (eq. 5), with the network, or they are moving averages of their
features. Then ``moving [..., V, d + 1]`` holds the averaged sums and, in the last column, the averaged
counts. A codeword is the quotient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import uefl_kernels

_SEGMENT, _ROW = 0, -2
# below this averaged count a codeword has been unused for long, and the quotient has no meaning
_FEW = 1e-12


class QuantizedMap(NamedTuple):
    """The result of quantizing features ``[B, H', W', D]``."""

    values: torch.Tensor
    """``[B, H', W', D]``; passes its gradient to the features"""
    codes: torch.Tensor
    """``[B, n]`` positions in ``counts.flatten()``"""
    loss: torch.Tensor
    """scalar: codebook and commitment losses of eq. 5"""
    counts: torch.Tensor
    """``[..., V]`` int64, number of segments assigned to each codeword"""
    sums: torch.Tensor | None
    """``[..., V, d]`` float64, sum of these segments; None unless requested"""


class Quantizer(NamedTuple):
    """A callable way to search codewords, and to train around them.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning"; Lee et al. 2022,
    "Autoregressive Image Generation using Residual Quantization" (stages); Fifty et al. 2024 (rotation).
    """

    commitment: float = 0.25
    search: str = "l2"
    """distance of the search: ``l2`` or ``cosine``"""
    estimator: str = "straight_through"
    """gradient of ``values``: ``straight_through`` or ``rotation``"""
    stage: int = 0
    """number of codewords of a stage; each stage quantizes the residuals of the one before; 0: a single
    stage"""
    segment_codebooks: bool = False
    lr: float = 1.0
    """learning rate of the codewords, as a multiple of the network's"""
    decay: float = 0.0
    """decay of moving averages per step; 0: codewords learn by gradient"""

    def __call__(self, tokens: torch.Tensor, codebook: torch.Tensor, with_sums: bool = False) -> QuantizedMap:
        """Quantize ``tokens [B, H', W', D]``."""
        rest, outs, codes, sums, first = tokens, [], [], [], 0
        options = {"metric": self.search, "commitment_weight": self.commitment, "estimator": self.estimator}
        for part in codebook.split(self.stage or codebook.shape[_ROW], _ROW):
            if with_sums:
                out, added = uefl_kernels.vq_with_sums(rest, part, codebook_weight=0.0, **options)  # type: ignore[arg-type]
                sums.append(added)
            else:
                out = uefl_kernels.vq(rest, part, **options)  # type: ignore[arg-type]
            outs.append(out)
            codes.append(self._positions(out.indices, codebook.shape) + first)
            rest, first = rest - out.quantized.detach(), first + part.shape[_ROW]
        values, loss = outs[0].quantized, outs[0].loss
        for out in outs[1:]:  # the gradient of the values passes with the first
            values, loss = values + out.quantized.detach(), loss + out.loss
        counts = torch.cat([out.counts for out in outs], -1)
        return QuantizedMap(
            values, torch.cat(codes, 1), loss, counts, torch.cat(sums, _ROW) if sums else None
        )

    def _positions(self, indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if self.segment_codebooks:
            indices = indices + shape[_ROW] * torch.arange(shape[_SEGMENT], device=indices.device)
        return indices.flatten(1)

    def rows(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """Return the segments of ``tokens [B, H', W', D]`` for k-means: ``[N, d]``, or ``[s, N, d]``."""
        if not self.segment_codebooks:
            return tokens.reshape(-1, length)
        return tokens.reshape(-1, tokens.shape[-1] // length, length).transpose(0, 1)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate codebooks ``[..., V_i, d]`` or moving averages ``[..., V_i, d + 1]``."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, _ROW)


def placed(codebook: torch.Tensor, part: torch.Tensor, at: int) -> torch.Tensor:
    """Return a codebook ``[..., V, d]`` with the rows from ``at`` replaced by ``part [..., v, d]``."""
    before, _, after = codebook.tensor_split([at, at + part.shape[_ROW]], _ROW)
    return torch.cat([before, part, after], _ROW)


def moving_start(codebook: torch.Tensor) -> torch.Tensor:
    """Return moving averages ``[..., V, d + 1]`` of new codewords ``[..., V, d]``: one equal segment each."""
    return torch.cat([codebook, torch.ones_like(codebook[..., :1])], -1)


def moved(moving: torch.Tensor, batch: QuantizedMap, decay: float) -> torch.Tensor:
    """Return the moving averages ``[..., V, d + 1]`` after a batch.

    Source: van den Oord et al. 2017, appendix A.1.
    """
    assert batch.sums is not None
    new = torch.cat([batch.sums, batch.counts[..., None]], -1).to(moving.dtype)
    return decay * moving + (1 - decay) * new


def codewords(moving: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return codewords ``[..., V, d]`` of ``moving [..., V, d + 1]``, or ``before`` without counts."""
    counts = moving[..., -1:]
    return torch.where(counts > _FEW, moving[..., :-1] / counts.clamp_min(_FEW), before)


def revived(codebook: torch.Tensor, usage: torch.Tensor, below: float) -> torch.Tensor:
    """Move rarely used codewords ``[..., V, d]`` next to often used ones, by 1 % of their length.

    Args:
        usage: ``[..., V]``, number of assignments of each codeword.
        below: a codeword is rarely used below this share of the mean usage.

    Source: the splitting of Linde, Buzo and Gray 1980. No feature leaves a client.
    """
    if codebook.dim() == 3:
        return torch.stack([revived(part, use, below) for part, use in zip(codebook, usage, strict=True)])
    dead = (usage < below * usage.double().mean()).nonzero().flatten()
    if len(dead) == 0:
        return codebook
    most = usage.argsort(descending=True, stable=True)[: len(usage) - len(dead)]
    model = codebook[most[torch.arange(len(dead), device=dead.device) % len(most)]]
    step = 0.01 * model.square().mean(1, keepdim=True).sqrt()
    result = codebook.clone()
    result[dead] = model + step * torch.randn_like(model)
    return result
