"""Time variants of the search on a Hopper GPU, and measure the assumptions.

Usage: ``python -m benchmarks.gpu_variants --help``.

``compile`` needs nvcc and no GPU: it writes the kernels of benchmarks/variants as machine code for sm_90a,
less than a megabyte, which travels to a machine with a GPU. ``micro`` answers nine questions there
(benchmarks/gpu_micro.py), ``search`` times every variant at every shape and compares its indices with
float64. Both print one table and write one JSON file, after every line. ``--dry`` rehearses them without a
GPU.

A variant has packed rows and codewords, so its time is the time of products and comparisons. ``uefl`` in the
table is the whole call.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from uefl_kernels import vq_assign

from . import gpu_micro, sass
from .gpu_driver import AnyDriver, Driver, DryRunDriver
from .gpu_layout import FOLDER, SearchVariant, SearchWork, columns, tiles, variants
from .ops.vq import nearest

SOURCES = ("search", "micro")
BLOCKS = 132  # multiprocessors of an H100 and an H200
CHECKED = 32_768  # rows at the beginning, and the same number at the end
MOST_WRONG = 2e-3  # share of rows with a float16 product that may prefer another codeword
OUTSIDE_L2 = 100e6  # bytes of rows that are read before any of them is read again
SHAPES = (
    *((1_000_000, 64, k) for k in (256, 1024, 8192)),
    *((65_536, 64, k) for k in (256, 1024)),
    *((1_000_000, d, k) for d in (128, 256, 512) for k in (256, 1024)),
    (65_536, 512, 256),
)


def compile_all(target: Path) -> None:
    """Compile the sources to machine code.

    Raise RuntimeError where nvcc fails, spills registers or serializes products.
    """
    if sass.NVCC is None:
        raise RuntimeError(
            "nvcc is not installed; install a CUDA toolkit of 12.8 or newer, or bring the .cubin files along"
        )
    target.mkdir(parents=True, exist_ok=True)
    options = [
        "-cubin",
        "-gencode",
        "arch=compute_90a,code=sm_90a",
        "-std=c++20",
        "-O3",
        "-Xptxas=-v",
        f"-I{FOLDER.parents[1] / 'csrc'}",
    ]
    running = {
        source: subprocess.Popen(
            [sass.NVCC, *options, str(FOLDER / f"{source}.cu"), "-o", str(target / f"{source}.cubin")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for source in SOURCES
    }
    for source, process in running.items():
        _, said = process.communicate()
        wrong = re.findall(r".*(?:error|warning|C75\d\d|serialized|\b[1-9]\d* bytes spill).*", said)
        if process.returncode or wrong:
            raise RuntimeError(f"{source}.cu: {wrong[0] if wrong else said[-500:]}")


class SearchData:
    """Rows and codewords of a shape, packed, and the right answers for some of the rows."""

    def __init__(self, n: int, d: int, k: int, device: str = "cuda") -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.x, self.codebook = (
            torch.randn(size, generator=generator, device=device, dtype=torch.float16)
            for size in ((n, d), (k, d))
        )
        copies = max(1, math.ceil(OUTSIDE_L2 / (2 * n * d)))
        self.rows = [tiles(self.x, 64) for _ in range(copies)]
        self.codewords = tiles(-self.codebook, 128)
        codewords = self.codebook.float()
        half = codewords.square().sum(1) / 2
        largest = float(half.max() + self.x.float().norm(dim=1).max() * codewords.norm(dim=1).max())
        # all scores have one exponent then
        self._scores = half + 1.5 * 2.0 ** (math.floor(math.log2(largest)) + 2)
        self.some = torch.cat((torch.arange(CHECKED), torch.arange(n - CHECKED, n))).to(device)
        self.right = nearest(self.x[self.some], self.codebook)
        self.found = torch.empty(n, 4, 4, dtype=torch.int32, device=device)

    def starts(self, variant: SearchVariant) -> torch.Tensor:
        """Return the starts of the scores as the lanes read them, [tiles, 4, starts]."""
        of_lanes = self._scores.view(-1, 128)[:, columns("first" in variant.options).to(self.x.device)]
        return torch.nn.functional.pad(of_lanes, (0, 4)).contiguous()

    def wrong(self, variant: SearchVariant) -> float:
        """Return the share of checked rows whose nearest codeword the variant misses.

        A variant names several codewords for each row.
        """
        best, _, tile, _ = self.found[self.some].unbind(2)
        least, lane = best.min(1)
        number = (least & (variant.shift - 1)).long()[:, None] * variant.group + torch.arange(
            variant.group, device=least.device
        )
        named = tile.gather(1, lane[:, None]) * 128 + number // 2 * 8 + 2 * lane[:, None] + number % 2
        return float((named != self.right[:, None]).all(1).double().mean())


def timed(
    driver: AnyDriver,
    path: Path,
    variant: SearchVariant,
    shape: tuple[int, int, int],
    places: int,
    data: SearchData | None,
) -> dict[str, Any]:
    """Return the microseconds of a variant and its share of wrong rows."""
    n, _, k = shape
    starts = data.starts(variant) if data else None

    def call(number: int) -> None:
        pointers = (
            (data.rows[number % len(data.rows)], data.codewords, starts, data.found, data.found)
            if data and starts is not None
            else ()
        )
        work = SearchWork(*(tensor.data_ptr() for tensor in pointers)) if pointers else SearchWork()
        work.blocks, work.tiles, work.places, work.shift = n // 64, k // 128, places, variant.shift
        driver.launch(path, variant.name, BLOCKS, variant.threads, variant.shared(places), [work])

    if data:
        data.found.fill_(0x7FFFFFFF)
    us = driver.us(call)
    return {"us": us, "wrong": data.wrong(variant) if data else math.nan}


def whole_call(data: SearchData | None, driver: AnyDriver) -> float:
    """Return the microseconds of ``vq_assign`` as it is built here, NaN where it cannot be timed."""
    try:
        return driver.us(lambda _: vq_assign(data.x, data.codebook), 3) if data else math.nan
    except RuntimeError as error:
        print(f"uefl: {str(error).splitlines()[0]}")
        return math.nan


def search(driver: AnyDriver, cubins: Path, out: Path, only: str, seconds: float) -> int:
    """Time the variants, and return how many were wrong or did not run."""
    begun, rows, bad, left = time.perf_counter(), list[dict[str, Any]](), 0, 0
    print(f"{'shape':<18} {'variant':<28} {'places':>6} {'us':>9} {'TFLOP/s':>8} {'wrong':>9}")
    for shape in SHAPES:
        n, d, k = shape
        name = f"{n}x{d}x{k}"
        data = None if driver.dry or time.perf_counter() - begun > seconds else SearchData(*shape)
        if not driver.dry and data:
            print(f"{name:<18} {'uefl':<28} {'':>6} {whole_call(data, driver):9.1f}", flush=True)
        chosen = [
            v
            for v in variants()
            if v.chunks * 64 == d and "marked" not in v.options and re.search(only, f"{name} {v.name}")
        ]
        for variant, places in ((v, places) for v in chosen for places in v.rings(k)):
            if time.perf_counter() - begun > seconds:
                left += 1
                continue
            row: dict[str, Any] = {"shape": name, "variant": variant.name, "places": places}
            try:
                row |= timed(driver, cubins / "search.cubin", variant, shape, places, data)
            except RuntimeError as error:  # an error that stays on the device also ends the other variants
                row |= {"us": math.nan, "wrong": math.nan, "error": str(error).splitlines()[0]}
            failed = "error" in row or row["wrong"] > MOST_WRONG
            bad += failed
            rows.append(row)
            flops = 2 * n * d * k / row["us"] / 1e6
            note = row.get("error", "WRONG" if failed else "")
            print(
                f"{name:<18} {variant.name:<28} {places:6d} {row['us']:9.1f} {flops:8.0f} {row['wrong']:9.1e}"
                f" {note}".rstrip(),
                flush=True,
            )
            write(out / "variants.json", rows)
    print(
        f"{len(rows)} timed, {left} left out for want of time, {bad} wrong or failed;"
        f" {time.perf_counter() - begun:.0f} s"
    )
    return bad


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the results so far, with the machine."""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=1))


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_variants", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("step", choices=("compile", "micro", "search"))
    parser.add_argument(
        "--cubins",
        type=Path,
        default=Path("build/variants"),
        help="folder of the machine code (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/gpu-check/out"),
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="only measurements, or shapes and variants, with a name that matches",
    )
    parser.add_argument(
        "--seconds", type=float, default=220.0, help="start nothing after this time (default: %(default)s)"
    )
    parser.add_argument(
        "--dry", action="store_true", help="launch nothing; needs the machine code and no GPU"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns the exit code: 1 where something was wrong or did not run.
    """
    options = options_of(arguments)
    if options.step == "compile":
        compile_all(options.cubins)
        print(
            f"{options.cubins}:"
            f" {sum(path.stat().st_size for path in options.cubins.glob('*.cubin')) / 1e6:.1f} MB"
        )
        return 0
    missing = [source for source in SOURCES if not (options.cubins / f"{source}.cubin").exists()]
    if missing:
        print(
            f"{options.cubins} lacks {missing[0]}.cubin; run python -m benchmarks.gpu_variants compile"
            f" --cubins {options.cubins}"
        )
        return 2
    driver: AnyDriver = DryRunDriver() if options.dry else Driver()
    if options.step == "search":
        return int(search(driver, options.cubins, options.out, options.only, options.seconds) > 0)
    target = options.out / "micro.json"
    before = json.loads(target.read_text())["rows"] if target.exists() else []

    def save(found: list[dict[str, Any]]) -> None:  # next to the results of another call of the command
        measured = {row["measurement"] for row in found}
        write(target, [row for row in before if row["measurement"] not in measured] + found)

    rows, failed = gpu_micro.measure(driver, options.cubins, options.only, save)
    print(f"{len(rows)} measured, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
