"""From features to codewords, and how codewords learn.

A codebook is ``[V, d]``, one for all segments of a feature vector, or ``[s, V, d]`` with codewords of its own
for each segment.

Codewords learn by the gradient of the loss (eq. 5), with the network. Or they are moving averages of the
features that they replace: then ``moving [..., V, d + 1]`` are the averaged sums, and in the last column the
averaged counts; a codeword is the quotient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import uefl_kernels

_SEGMENT, _ROW = 0, -2
# of an averaged count: that of a codeword which nobody has used for long, so that the quotient says nothing
_FEW = 1e-12


class Quantized(NamedTuple):
    """What a quantiser makes of features ``[B, H', W', D]``."""

    values: torch.Tensor
    """``[B, H', W', D]``; passes its gradient to the features"""
    codes: torch.Tensor
    """``[B, n]`` positions in ``counts.flatten()``"""
    loss: torch.Tensor
    """a scalar, the two terms of eq. 5 behind the cross-entropy"""
    counts: torch.Tensor
    """``[..., V]`` int64, how many segments took each codeword"""
    sums: torch.Tensor | None
    """``[..., V, d]`` float64, the sums of those segments; None unless asked for"""


class Quantizer(NamedTuple):
    """A way to search codewords, and to train around them; callable.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning"; Lee et al. 2022,
        "Autoregressive Image Generation using
    Residual Quantization" (stages); Fifty et al. 2024 (rotation).
    """

    commitment: float = 0.25
    search: str = "l2"
    """``l2`` or ``cosine``, what the nearest codeword is the nearest by"""
    estimator: str = "straight_through"
    """of the gradient of ``values``; or ``rotation``"""
    stage: int = 0
    """every so many codewords quantise what those before them left over; 0: all are searched together"""
    segment_codebooks: bool = False
    lr: float = 1.0
    """of the codewords, as a multiple of the network's"""
    decay: float = 0.0
    """of moving averages, per step; 0: codewords learn by gradient"""

    def __call__(self, tokens: torch.Tensor, codebook: torch.Tensor, with_sums: bool = False) -> Quantized:
        """Quantise ``tokens [B, H', W', D]``."""
        rest, outs, codes, sums, first = tokens, [], [], [], 0
        options = {"metric": self.search, "commitment_weight": self.commitment, "estimator": self.estimator}
        for book in codebook.split(self.stage or codebook.shape[_ROW], _ROW):
            if with_sums:
                out, of_book = uefl_kernels.vq_with_sums(rest, book, codebook_weight=0.0, **options)  # type: ignore[arg-type]
                sums.append(of_book)
            else:
                out = uefl_kernels.vq(rest, book, **options)  # type: ignore[arg-type]
            outs.append(out)
            codes.append(self._positions(out.indices, codebook.shape) + first)
            rest, first = rest - out.quantized.detach(), first + book.shape[_ROW]
        values, loss = outs[0].quantized, outs[0].loss
        for out in outs[1:]:  # the gradient of the values passes with the first
            values, loss = values + out.quantized.detach(), loss + out.loss
        counts = torch.cat([out.counts for out in outs], -1)
        return Quantized(values, torch.cat(codes, 1), loss, counts, torch.cat(sums, _ROW) if sums else None)

    def _positions(self, indices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        if self.segment_codebooks:
            indices = indices + shape[_ROW] * torch.arange(shape[_SEGMENT], device=indices.device)
        return indices.flatten(1)

    def rows(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """The segments of ``tokens [B, H', W', D]`` as k-means takes them: ``[N, d]``, or ``[s, N, d]``."""
        if not self.segment_codebooks:
            return tokens.reshape(-1, length)
        return tokens.reshape(-1, tokens.shape[-1] // length, length).transpose(0, 1)


def joined(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Codebooks ``[..., V_i, d]``, or their moving averages ``[..., V_i, d + 1]``, as one with sum V_i
    rows."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, _ROW)


def placed(codebook: torch.Tensor, block: torch.Tensor, at: int) -> torch.Tensor:
    """A codebook ``[..., V, d]`` in which ``block`` ``[..., v, d]`` stands from row ``at`` on; what was there
    is gone."""
    before, _, after = codebook.tensor_split([at, at + block.shape[_ROW]], _ROW)
    return torch.cat([before, block, after], _ROW)


def moving_start(codebook: torch.Tensor) -> torch.Tensor:
    """The moving averages ``[..., V, d + 1]`` of new codewords ``[..., V, d]``: as if each had replaced one
    segment, equal to it.

    The last column is the count of the segments, the others their sum.
    """
    return torch.cat([codebook, torch.ones_like(codebook[..., :1])], -1)


def moved(moving: torch.Tensor, batch: Quantized, decay: float) -> torch.Tensor:
    """The moving averages ``[..., V, d + 1]`` after a batch.

    Source: van den Oord et al. 2017, appendix A.1.
    """
    assert batch.sums is not None
    new = torch.cat([batch.sums, batch.counts[..., None]], -1).to(moving.dtype)
    return decay * moving + (1 - decay) * new


def codewords(moving: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The codewords ``[..., V, d]`` of moving averages ``[..., V, d + 1]``; one without counts stays as it
    was ``before``."""
    counts = moving[..., -1:]
    return torch.where(counts > _FEW, moving[..., :-1] / counts.clamp_min(_FEW), before)


def revived(codebook: torch.Tensor, usage: torch.Tensor, below: float) -> torch.Tensor:
    """Codewords ``[..., V, d]``, those in little use moved beside those in the most, 1 % of their length
    away, to share their segments.

    Args:
        usage: ``[..., V]``, how often each was taken.
        below: the share of the mean use under which a codeword is in little use.

    Source: the splitting of Linde, Buzo and Gray 1980. No feature has to leave a client for it.
    """
    if codebook.dim() == 3:
        return torch.stack([revived(book, use, below) for book, use in zip(codebook, usage, strict=True)])
    dead = (usage < below * usage.double().mean()).nonzero().flatten()
    if len(dead) == 0:
        return codebook
    most = usage.argsort(descending=True, stable=True)[: len(usage) - len(dead)]
    model = codebook[most[torch.arange(len(dead), device=dead.device) % len(most)]]
    step = 0.01 * model.square().mean(1, keepdim=True).sqrt()
    result = codebook.clone()
    result[dead] = model + step * torch.randn_like(model)
    return result
