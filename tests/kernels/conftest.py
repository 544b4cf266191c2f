from __future__ import annotations

import torch

from uefl_kernels import backend, vq_assign

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wrong_indices(x: torch.Tensor, codebook: torch.Tensor, metric: str = "l2") -> int:
    """How many indices of the active backend differ from the reference."""
    with backend("reference"):
        expected = vq_assign(x, codebook, metric=metric)
    got = vq_assign(x, codebook, metric=metric)
    assert got.dtype == torch.int64
    assert got.shape == expected.shape
    return int((got != expected).sum())


def normal(*shape: int, seed: int = 0, offset: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + offset).to(dtype)
