"""``ema_update``: move the codewords of a VQ layer by moving averages, in one pass.

The op is private: the layers call it after the search. For each codeword, with the number and the sum of the
rows that took it::

    size     <- size + step (count - size)
    average  <- average + step (sum - average)
    smoothed  = (size + eps) / (total + K eps) * total, where total is the sum of the K sizes
    codeword <- average / smoothed, scaled to length 1 if ``unit``

A codeword that has NaN in its sum takes no part in the batch. A codeword without any size stays. In torch's
operations these are some twenty small kernels; with one row for each codeword they took more time than the
search. Bytes that must move: each array once.

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
