from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, settings

from uefl_kernels import backend, vq_assign
from uefl_kernels._library import cuda_architecture_built, has_kernel

# The same examples every time, and none refused because the machine was slow.
SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=SLOWNESS
)
settings.load_profile("repeatable")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
T = TypeVar("T")


def wrong_indices(x: torch.Tensor, codebook: torch.Tensor, metric: str = "l2") -> int:
    """Count the indices of the active backend that differ from the reference."""
    with backend("reference"):
        expected = vq_assign(x, codebook, metric=metric)
    got = vq_assign(x, codebook, metric=metric)
    assert got.dtype == torch.int64
    assert got.shape == expected.shape
    return int((got != expected).sum())


def normal(
    *shape: int, seed: int = 0, offset: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + offset).to(dtype)


def cuda_built(op: str) -> bool:
    """Return True if csrc/cuda has the op for the GPU here."""
    return has_kernel("uefl_cuda", op, "CUDA") and cuda_architecture_built(torch.device("cuda"))


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def full_graph(request) -> functools.partial[Callable[..., Any]]:
    """Return ``torch.compile`` without graph breaks.

    Inductor takes seconds: one fast test uses it.
    """
    torch._dynamo.reset()
    return functools.partial(torch.compile, fullgraph=True, backend=request.param)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Make a synchronization with the GPU an error in this context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a CUDA graph of a call and its results, which a replay overwrites.

    One call before compiles Triton.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found
