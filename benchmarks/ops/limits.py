"""Measure the limits of the machine for the roofline.

These are torch's copy, sum and matrix products, and the arithmetic units.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cases import BenchmarkCase, Call, Gate, Op, ProviderUnavailable, needs

PEAK = Path(__file__).parent.with_name("peak.cpp")
SOURCES = PEAK.parents[1] / "csrc"  # the vectors of our kernels
AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma")
FLAGS: dict[str, tuple[str, ...]] = {
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}  # compiler flags for each value of --held

OpInputs = tuple[str, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Limit(BenchmarkCase):
    """An operation that shows a limit of the machine.

    ``what`` is "copy", "read", or the dtype of a square product. ``size`` is the number of elements moved, or
    the side of the matrices.
    """

    what: str
    size: int

    @property
    def name(self) -> str:
        """Return the name, without the size."""
        return self.what


def inputs(case: Limit, device: str) -> OpInputs:
    """Return two float32 vectors, or two matrices."""
    generator = torch.Generator().manual_seed(0)
    if case.what in ("copy", "read"):
        return (
            case.what,
            torch.randn(case.size, generator=generator).to(device),
            torch.empty(case.size, device=device),
        )
    a, b = (
        torch.randn(case.size, case.size, generator=generator).to(device, getattr(torch, case.what))
        for _ in range(2)
    )
    return case.what, a, b


def by_torch(inputs: OpInputs) -> Call:
    what, a, b = inputs
    if not a.is_floating_point():
        raise ProviderUnavailable(f"torch has no fast product of {what}")
    if what == "copy":
        return lambda: b.copy_(a)
    if what == "read":
        return lambda: a.sum()
    if what == "bfloat16" and a.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise ProviderUnavailable("without AVX-512, torch takes minutes for a bfloat16 product")
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def units(inputs: OpInputs) -> Call:
    """Run the operations of the product on registers only: no method on these units can be faster."""
    what, a, _ = inputs
    needs("cpu", a)
    run = getattr(_compiled(), f"{what}_units", None)
    each = run(1) if run else 0
    if not each:
        raise ProviderUnavailable("no such arithmetic units here" if run else f"{what} is not arithmetic")
    threads = torch.get_num_threads()
    rounds = 2 * len(a) ** 3 // each // threads
    pool = ThreadPoolExecutor(threads)

    def call() -> None:
        list(pool.map(run, [rounds] * threads))

    return call


@functools.cache
def _compiled() -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if not compiler:
        raise ProviderUnavailable("needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        flags = FLAGS.get(os.environ.get("UEFL_CPU", ""), ("-march=native",))
        command = [
            compiler,
            "-O3",
            "-std=c++20",
            *flags,
            "-shared",
            "-fPIC",
            f"-I{SOURCES}",
            PEAK,
            "-o",
            library,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ProviderUnavailable(f"peak.cpp does not compile: {done.stderr.strip().splitlines()[-1]}")
        loaded = ctypes.CDLL(str(library))
    for function in (loaded.float32_units, loaded.int16_units, loaded.bfloat16_units):
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return loaded


def error(inputs: OpInputs) -> Callable[[torch.Tensor], float]:
    """Return the relative error of a few rows of a product."""
    what, a, b = inputs
    right = {"copy": lambda: a.double(), "read": lambda: a.double().sum()}.get(
        what, lambda: a[:4].double() @ b.double()
    )()
    return lambda found: float(
        ((found[:4] if what not in ("copy", "read") else found).double() - right).norm() / right.norm()
    )


def bytes_of(case: Limit) -> int:
    if case.what in ("copy", "read"):
        return 4 * case.size * (2 if case.what == "copy" else 1)
    return 3 * case.size**2 * getattr(torch, case.what).itemsize


OPS = {
    "limits": Op(
        cases=(
            Limit("copy", 1 << 26),
            Limit("read", 1 << 26),
            Limit("float32", 2048),
            Limit("int16", 2048),
            Limit("bfloat16", 4096),
        ),
        cuda_cases=(
            Limit("copy", 1 << 28),
            Limit("read", 1 << 28),
            Limit("float32", 8192),
            Limit("bfloat16", 8192),
        ),
        smoke=Limit("float32", 64),
        inputs=inputs,
        providers={"torch": by_torch, "units": units},
        gate=Gate("relative error", limit=1e-2, against=error),
        bytes=bytes_of,
        flops=lambda case: 0 if case.what in ("copy", "read") else 2 * case.size**3,
    )
}
