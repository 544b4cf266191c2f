"""A workaround for torch's vector mathematics on x86.

Without this workaround, some processes compute different numbers.

MKL, which torch calls for the functions below, chooses a function's code at its first call. If several
threads make that call at once, one of them can get the code of low accuracy for its whole part: errors near
3e-4 in ``sqrt``, once in thousands of processes, and correct again at the second call
(https://github.com/pytorch/pytorch/issues/188792). Adam's first step calls ``sqrt``, and every entropy calls
``log``, so two runs with one seed would differ. A call on one element runs in one thread and fixes the
choice."""

import torch

# For which libtorch_cpu exports MKL's vms... and vmd...
FUNCTIONS = [
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]


def warm_up() -> None:
    """Call each of the functions once, in either precision, on one element."""
    for dtype in (torch.float32, torch.float64):
        half = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(half, name)()
