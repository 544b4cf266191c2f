"""Every random draw of a run has its own seed, derived from its place in the run.

So a checkpoint need not save the state of a generator.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic

from .devices import gpus_of, is_gpu


def derive(seed: int, *place: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``derive(seed, "train", 12, "silo-3")``."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(device: torch.device, seed: int, *place: str | int) -> Iterator[None]:
    """Seed torch's generators on the CPU and on ``device``, and restore them afterwards."""
    with torch.random.fork_rng(devices=gpus_of(device)):
        seed_torch(derive(seed, *place))
        yield


def make_repeatable(threads: int, device: torch.device) -> None:
    """Set the CPU threads and :func:`deterministic`, so that this process computes the same bits again."""
    torch.set_num_threads(threads)
    deterministic(device)


def deterministic(device: torch.device) -> None:
    """Make a GPU repeat its bits: no time chooses an algorithm, and no sum depends on the order of threads.

    Call this function before the first product of a process, because cuBLAS reads its setting at this
    product. If an operation of a user's network has no such algorithm, torch warns, and the bits may differ
    in every run.
    """
    if not is_gpu(device):
        return
    # without it cuBLAS promises the same bits on a single stream only
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    # otherwise the result of every convolution is first filled with NaN
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_torch(number: int) -> None:
    """Seed torch's generators on the CPU and, if a GPU is in use, on the GPU.

    ``torch.manual_seed`` would format a stack trace at every call as long as no GPU is in use: a tenth of the
    time of a small network.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
