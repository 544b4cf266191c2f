"""``vq_forward``: the pass of ``vq`` over the rows.

It is private: ``vq`` calls it on GPUs.

Inputs: x [..., D], codebook [K, d] or [S, K, d], and for sums the units of each codeword, scales [C] float64,
where C is K or S * K. Results:

* quantized [..., D] in the dtype of x
* indices [..., S] int64
* error, the sum of (x - codeword)^2 in float64
* counts [C] int64
* largest [C] int64: the largest |x| of the rows of a codeword as the bits of a float64, infinity for a
  row that is not finite
* fixed [C, d] int64: the sum of round(x * scale), ties to even; it has no meaning if x * scale reaches
  2^62 or is not finite

Bytes that must move: x and quantized once each, 8 an index.
"""

from __future__ import annotations

import torch

from ...._library import define, define_triton
from . import composed


def _fake(given: composed.Arguments) -> composed.Result:
    x, codebook, scales = given[:3]
    count, d = codebook.shape[:-1].numel(), codebook.shape[-1]
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        x.new_empty(*x.shape[:-1], x.shape[-1] // d, dtype=torch.int64),
        x.new_empty((), dtype=torch.float64),
        x.new_empty(count, dtype=torch.int64),
        x.new_empty(count if scales is not None else 0, dtype=torch.int64),
        x.new_empty(count if scales is not None else 0, d, dtype=torch.int64),
    )


define(
    __name__,
    "vq_forward",
    composed.Arguments,
    ["quantized", "indices", "error", "counts", "largest", "fixed"],
    fake=_fake,
    fallback=composed.fallback,
)
define_triton("vq_forward")
