"""Time the search on a GPU by replays of a graph.

Usage: ``python -m benchmarks.gpu_replay --help``.

This is the quickest way to compare two builds of the kernels. Each shape takes a third of a second. A line
has the times of the exact search, of the fast search and of ``vq``. The first time minus the second is the
cost of exactness. ``--check`` also compares every index with the search of another kernel
(``UEFL_CUDA_SEARCH=mma``). Copy the library of a build to uefl_kernels/ before you time the build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from uefl_kernels import vq, vq_assign

from .cases import case_of
from .gpu_driver import Driver
from .gpu_profile import median_us
from .ops.vq import SearchCase

_MANY, _FEW = 1_048_576, 65_536
SHAPES = (
    *(f"{_MANY}x{d}x{k}xfloat16" for d in (64, 128, 256, 512) for k in (256, 1024, 4096)),
    *(f"{_FEW}x{d}x{k}xfloat16" for d in (64, 128, 512) for k in (256, 1024)),
    *(f"1000000x64x{k}" for k in (256, 1024, 8192)),
    f"{_FEW}x64x256",
    f"{_MANY}x512x256",
    f"{_MANY}x32x64",
    f"{_MANY}x64x256xbfloat16",
    "9216x512x64",
)


def us(call: Callable[[], object], device: str) -> float:
    """Return the microseconds of a call in a graph of ten, or of a call on the CPU."""
    return Driver().us(lambda _: call(), 10) if device == "cuda" else median_us(call, device)[0]


def wrong(x: torch.Tensor, codebook: torch.Tensor) -> int:
    """Return how many indices differ from those of the kernel for other GPUs."""
    found = vq_assign(x, codebook)
    chosen = os.environ.pop("UEFL_CUDA_SEARCH", None)
    os.environ["UEFL_CUDA_SEARCH"] = "mma"
    try:
        return int((found != vq_assign(x, codebook)).sum())
    finally:
        del os.environ["UEFL_CUDA_SEARCH"]
        if chosen is not None:
            os.environ["UEFL_CUDA_SEARCH"] = chosen


def measured(shape: str, device: str, check: bool) -> dict[str, float | int | None]:
    """Return the times of a shape."""
    case = case_of(SearchCase, shape)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x, codebook = (
        torch.randn(rows, case.dim, generator=generator, device=device).to(dtype) for rows in (case.n, case.k)
    )
    return {
        "exact": us(lambda: vq_assign(x, codebook), device),
        "fast": us(lambda: vq_assign(x, codebook, precision="fast"), device),
        "vq": us(lambda: vq(x, codebook), device),
        "wrong": wrong(x, codebook) if check else None,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns the exit code: 1 if an index is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_replay", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tests the command")
    parser.add_argument("--only", default="", metavar="REGEX", help="only shapes that match")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=SHAPES, help="other shapes")
    parser.add_argument("--check", action="store_true", help="compare every index with another kernel's")
    parser.add_argument("--out", type=Path, help="a JSON file for the times")
    options = parser.parse_args(arguments)
    rows = {}
    print(f"{'shape':<28} {'exact us':>10} {'fast us':>10} {'vq us':>10} {'wrong':>6}")
    for shape in (shape for shape in options.shapes if re.search(options.only, shape)):
        row = rows[shape] = measured(shape, options.device, options.check)
        print(
            f"{shape:<28} {row['exact']:10.1f} {row['fast']:10.1f} {row['vq']:10.1f}"
            f" {'-' if row['wrong'] is None else row['wrong']:>6}",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
