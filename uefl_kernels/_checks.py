"""Input checks that the ops share; the message says what was wrong, what was expected and what to do."""

from __future__ import annotations

import torch

METRICS = ("l2", "cosine")
PRECISIONS = ("exact", "fast")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_search(op: str, x: torch.Tensor, codebook: torch.Tensor, metric: str, precision: str) -> None:
    """Validate what every codeword search takes; raises TypeError or ValueError before any work."""
    for name, tensor in (("x", x), ("codebook", codebook)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected float32, bfloat16, float16 or float64")
    if metric not in METRICS:
        raise ValueError(f"{op}: metric {metric!r} is not known, expected one of {METRICS}")
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision {precision!r} is not known, expected one of {PRECISIONS}")
    if x.device != codebook.device:
        raise ValueError(f"{op}: x is on {x.device} and codebook on {codebook.device}; move one of them")
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have shape [..., D], got a scalar")
    if codebook.dim() not in (2, 3):
        raise ValueError(f"{op}: codebook must have shape [K, d] or [S, K, d], got {list(codebook.shape)}")
    k, d = codebook.shape[-2:]
    if k == 0 or d == 0:
        raise ValueError(f"{op}: codebook {list(codebook.shape)} is empty; it needs at least one codeword of one element")
    dim = x.shape[-1]
    if codebook.dim() == 3:
        s = codebook.shape[0]
        if s == 0 or s * d != dim:
            raise ValueError(
                f"{op}: codebook {list(codebook.shape)} has {s} segments of {d}, which needs x [..., {s * d}], got [..., {dim}]"
            )
    elif dim == 0 or dim % d != 0:
        raise ValueError(f"{op}: x [..., {dim}] cannot be cut into segments of the codeword length {d}; make D a multiple of d")
