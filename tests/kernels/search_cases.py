"""Small searches that are hard to get right, as name -> (x, codebook), also for GPU kernels."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((1, 1), (2, 3), (15, 7), (33, 16), (64, 33), (129, 5), (257, 2), (9, 100))

LAYOUTS = {
    "vector": lambda: torch.randn(12),
    "empty": lambda: torch.randn(0, 12),
    "four dimensions": lambda: torch.randn(2, 3, 2, 12),
    "channels first": lambda: torch.randn(2, 12, 3, 5).permute(0, 2, 3, 1),
    "transposed": lambda: torch.randn(12, 9).T,
    "sliced": lambda: torch.randn(9, 5, 30)[::2, :, 3:27:2],
    "expanded": lambda: torch.randn(1, 12).expand(9, 12),
    "not collapsible": lambda: torch.randn(3, 5, 4, 12)[:, ::2, ::3],
}


def _with_value(value):
    x = torch.randn(8, 6)
    x[2] = value
    x[5, 3] = value
    return x, torch.randn(70, 6)


def _nearly_equal_codewords():
    codebook = torch.randn(16, 8, dtype=torch.float64)
    return torch.randn(30, 8, dtype=torch.float64), torch.cat(
        [codebook, codebook + 1e-9 * torch.randn_like(codebook)]
    )


CASES = {
    **{f"K={k} d={d}": lambda k=k, d=d: (torch.randn(70, d), torch.randn(k, d)) for k, d in SHAPES},
    **{
        f"offset {v:g}": lambda v=v: (torch.randn(40, 8) + v, torch.randn(33, 8) + v)
        for v in (10.0, 1e3, 1e6)
    },
    **{f"rows far away {v:g}": lambda v=v: (torch.randn(20, 8) + v, torch.randn(17, 8)) for v in (1e6, 1e10)},
    **{
        f"scale {v:g}": lambda v=v: (torch.randn(12, 6) * v, torch.randn(9, 6) * v)
        for v in (1e-42, 1e-30, 1e-18, 1e18, 1e36)
    },
    **{
        f"row of {v:g}": lambda v=v: _with_value(v) for v in (float("nan"), float("inf"), float("-inf"), 3e38)
    },
    **{
        f"{x} by {c}": lambda x=x, c=c: (torch.randn(20, 6).to(x), torch.randn(18, 6).to(c))
        for x in FLOATS
        for c in FLOATS
    },
    **{
        f"{name}, shared": lambda layout=layout: (layout(), torch.randn(10, 4))
        for name, layout in LAYOUTS.items()
    },
    **{
        f"{name}, per segment": lambda layout=layout: (layout(), torch.randn(3, 10, 4))
        for name, layout in LAYOUTS.items()
    },
    "ties": lambda: (
        torch.randint(-3, 4, (40, 3)).float() / 2,
        torch.randint(-2, 3, (20, 3)).float().repeat(2, 1),
    ),
    "zero codeword": lambda: (torch.randn(20, 4), torch.cat([torch.randn(5, 4), torch.zeros(1, 4)])),
    "nearly equal codewords": _nearly_equal_codewords,
}


def codebook_with(value):
    """Return a codebook with a value that is not finite in codewords 3 and 11.

    Also return the numbers of the others.
    """
    codebook = torch.randn(20, 4)
    codebook[3, 1], codebook[11] = value, value
    return codebook, torch.tensor([k for k in range(20) if k not in (3, 11)])
