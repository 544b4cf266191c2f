"""``ema_update``: move the codewords of a VQ layer by moving averages, in one pass.

The op is private: the layers call it after the search. For each codeword, with the number and the sum of the
rows that chose it::

    size     <- size + step (count - size)
    average  <- average + step (sum - average)
    smoothed  = (size + eps) / (total + K eps) * total, where total is the sum of the K sizes
    codeword <- average / smoothed, scaled to length 1 if ``unit``

If the sum of a codeword has NaN, its count and its sum are zero instead. If the smoothed size of a codeword
is zero, the codeword stays. This is so for all codewords of a codebook with a total of zero.

The operations of torch would run some twenty small kernels. With one row for each codeword, these kernels
took more time than the search. Bytes that must move: each array once.

Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", appendix A.1.
"""

from __future__ import annotations

import torch

from ..._library import define, define_portable
from . import composed

define(
    __name__,
    "ema_update",
    composed.Arguments,
    ["new_sizes", "new_averages", "new_codewords"],
    fake=lambda given: tuple(torch.empty_like(tensor) for tensor in given[:3]),
    fallback=composed.ema_update,
)
define_portable("ema_update")
