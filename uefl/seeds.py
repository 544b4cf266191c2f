"""Every random draw of a run has its own seed, derived from its place in the run.

So a checkpoint need not save the state of a generator.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *place: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive(seed, "train", 12, "silo-3")``."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(device: torch.device, seed: int, *place: str | int) -> Iterator[None]:
    """Seed torch's generators on the CPU and on ``device`` inside the context.

    Afterwards they continue as before.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_torch(derive(seed, *place))
        yield


def make_repeatable(threads: int, device: torch.device) -> None:
    """Set the CPU threads, and the deterministic kernels of a GPU.

    So this process computes the same bits again.
    """
    torch.set_num_threads(threads)
    if device.type == "cuda":
        # cuBLAS reads it at its first product, and without it promises the same bits on a single stream only
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)


def seed_torch(number: int) -> None:
    """Seed torch's generators on the CPU and, once there is one in use, on the GPU.

    ``torch.manual_seed`` would format a stack trace at every call as long as no GPU is in use: a tenth of the
    time of a small network.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
