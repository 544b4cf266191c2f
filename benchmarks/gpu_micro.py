"""Measure nine properties of a GPU that the plans of the kernels assume.

``python -m benchmarks.gpu_variants micro`` runs the measurements:

- M1: Do products and comparisons slow each other down? The rate of each, and of both together.
- M2: Does one warpgroup compare while another one multiplies? The share of the comparison time.
- M3: The unknown rates of instructions: IMAD.WIDE, SHF, F2FP, VIADDMNMX, PRMT.
- M4: Does a warp load 16 bytes from four addresses in one pass or in four? A lane loads in this way the
  values with which its sums start.
- M5: Atomic additions of 32 lanes to shared memory: to neighbors, to a random codeword, to one cell. Also
  exchanges of neighbors.
- M6: The rate of the L2 cache if all thread blocks read one codebook, with one to six copies in flight.
- M7: The rate of mma.sync, without and with products of warpgroups.
- M8: The precision of small terms next to a large term on the tensor cores: the number of bits, the number of
  terms that are aligned at once, and whether bits are cut off or rounded.
- M9: The clocks of barriers, and the time of a launch with and without an early start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .gpu_driver import AnyDriver, Int
from .gpu_layout import SearchVariant, SearchWork, tiles

BLOCKS = 132
ROUNDS, LANES = 256, 16  # kRounds and kLanes of micro.cu
PRODUCT_BYTES = 128 * 128
ALONE = ("fadd", "ffma", "vimnmx", "vimnmx3", "lop3", "imad")  # streams of M1
UNKNOWN = ("imad_wide", "shf", "f2fp", "viaddmnmx", "prmt")  # streams of M3
WIDTH = {"imad_wide": 0.5, "hmma": 0.25}  # instructions per result of a thread, if not 1
MARKED = ("cross_3_1_marked", "g4_3_1_marked")
COPIED = 64  # tiles of 16 KB in the codebook of M6, one megabyte
HIGHEST, LOWEST = 20, 31  # M8: small terms are 2^-20 to 2^-31
COUNTS = (1, 2, 3, 4, 7, 8, 12, 15)  # M8: numbers of small terms

MeasuredRow = dict[str, Any]
Found = Iterator[tuple[str, float | list[float], str]]  # name, value, unit


def _streams(
    driver: AnyDriver, path: Path, kernel: str, kinds: tuple[str, ...], warpgroups: int = 2
) -> Found:
    """Measure the lanes per clock of each stream, without and with products, and the clocks of a product."""
    for kind in kinds:
        for with_products in (False, True):
            clocks = driver.zeros(BLOCKS, 4, 2)
            name = f"{'beside' if with_products else 'stream'}_{kind}"
            threads = 128 * (1 + warpgroups)
            driver.launch(
                path,
                name,
                BLOCKS,
                threads,
                PRODUCT_BYTES + 1024,
                [clocks.data_ptr(), Int(0x3F800000), Int(0x00010203)],
            )
            mean = clocks.double().mean(0)
            lanes = 128 * ROUNDS * 4 * LANES * WIDTH.get(kind, 1)
            rate = sum(
                lanes / float(mean[group, 0]) if mean[group, 0] else 0.0 for group in range(1, 1 + warpgroups)
            )
            yield f"{kernel} {name}", rate, "lanes a clock"
            if with_products:
                yield f"{kernel} product with {kind}", float(mean[0, 0] / mean[0, 1].clamp_min(1)), "clocks"


def products(driver: AnyDriver, path: Path) -> Found:
    """Measure M1: products and comparisons."""
    clocks = driver.zeros(BLOCKS, 4, 2)
    driver.launch(path, "beside_none", BLOCKS, 128, PRODUCT_BYTES + 1024, [clocks.data_ptr(), Int(0), Int(0)])
    mean = clocks[:, 0].double().mean(0)
    yield "product alone", float(mean[0] / mean[1].clamp_min(1)), "clocks"
    yield from _streams(driver, path, "", ALONE)


def overlap(driver: AnyDriver, path: Path) -> Found:
    """Measure M2: products of one warpgroup during comparisons of another one, over 64 tiles."""
    search = path.with_name("search.cubin")
    for name in MARKED:
        variant, tiles_of_k, blocks = SearchVariant(name), 64, BLOCKS * 3 * 2
        marks = driver.zeros(BLOCKS, 3, 64, 3)
        tensors = (
            driver.zeros(blocks * 64 * 64, dtype=torch.float16),
            driver.zeros(tiles_of_k * 128 * 64, dtype=torch.float16),
            driver.zeros(tiles_of_k, 4, variant.starts, dtype=torch.float32),
            driver.zeros(blocks * 64, 4, 4, dtype=torch.int32),
            marks,
        )
        work = SearchWork(*(tensor.data_ptr() for tensor in tensors))
        work.blocks, work.tiles, work.places, work.shift = blocks, tiles_of_k, 6, variant.shift
        driver.launch(search, name, BLOCKS, variant.threads, variant.shared(6), [work])
        yield (
            f"{name}: clocks of a round",
            float((marks[:, :, -1, 2] - marks[:, :, 8, 2]).double().mean() / 55),
            "clocks",
        )
        yield f"{name}: products", float((marks[..., 1] - marks[..., 0]).double().mean()), "clocks"
        yield f"{name}: comparison", float((marks[..., 2] - marks[..., 1]).double().mean()), "clocks"
        yield f"{name}: comparing while another multiplies", shared_time(marks[:8].cpu()), "share"


def shared_time(marks: torch.Tensor) -> float:
    """Return the share of the time of comparisons in which products of another warpgroup are in flight.

    Args:
        marks: ``[blocks, groups, tiles, 3]`` int64, the clocks at the start of the products, at their end,
            and at the end of the comparison.
    """
    groups, total, both = marks.shape[1], 0, 0
    for block in marks:
        for group in range(groups):
            begin, end = block[group, :, 1], block[group, :, 2]
            total += int((end - begin).sum())
            others = torch.cat([block[other] for other in range(groups) if other != group])
            # Products of two other warpgroups may overlap: merge their intervals, so no time counts twice.
            merged: list[list[int]] = []
            for first, last in sorted(others[:, :2].tolist()):
                if merged and first <= merged[-1][1]:
                    merged[-1][1] = max(merged[-1][1], last)
                else:
                    merged.append([first, last])
            busy = torch.tensor(merged)
            low = torch.maximum(begin[:, None], busy[None, :, 0])
            both += int((torch.minimum(end[:, None], busy[None, :, 1]) - low).clamp_min(0).sum())
    return both / max(1, total)


def instructions(driver: AnyDriver, path: Path) -> Found:
    """Measure M3: rates of instructions."""
    yield from _streams(driver, path, "", UNKNOWN)


def loads(driver: AnyDriver, path: Path) -> Found:
    """Measure M4: loads of 16 bytes."""
    for pattern, name in enumerate(("side by side", "four addresses", "one address")):
        for warps in (1, 12):
            clocks = driver.zeros(BLOCKS, warps)
            driver.launch(path, "loads", BLOCKS, 32 * warps, 16384 + 1024, [clocks.data_ptr(), Int(pattern)])
            yield (
                f"LDS.128, {name}, {warps} warps",
                float(clocks.double().mean()) / (ROUNDS * 8 * warps),
                "clocks",
            )


def additions(driver: AnyDriver, path: Path) -> Found:
    """Measure M5: atomic additions to shared memory."""
    for pattern, name in enumerate(
        ("neighbors", "a codeword at random", "one cell", "exchange of neighbors")
    ):
        for warps in (1, 16):
            clocks = driver.zeros(BLOCKS, warps)
            driver.launch(
                path,
                "additions",
                BLOCKS,
                32 * warps,
                256 * 64 * 4 + 1024,
                [clocks.data_ptr(), Int(pattern), Int(256)],
            )
            yield (
                f"ATOMS, {name}, {warps} warps",
                float(clocks.double().mean()) / (ROUNDS * 2 * warps),
                "clocks",
            )


def cache(driver: AnyDriver, path: Path) -> Found:
    """Measure M6: the rate of bytes that arrive in shared memory."""
    codewords, clocks, times = driver.zeros(COPIED * 16384, dtype=torch.uint8), driver.zeros(BLOCKS), 20
    for ahead in (1, 2, 3, 4, 6):
        given = [codewords.data_ptr(), Int(COPIED), Int(times), Int(ahead), clocks.data_ptr()]

        def call(number: int, ahead: int = ahead, given: list[int] = given) -> None:
            driver.launch(path, "read_codebook", BLOCKS, 32, ahead * 16384 + 2048, given)

        us = driver.us(call, 5)
        yield f"read_codebook, {ahead} under way", BLOCKS * COPIED * times * 16384 / us / 1e6, "TB/s"


def small_products(driver: AnyDriver, path: Path) -> Found:
    """Measure M7: mma.sync."""
    yield from _streams(driver, path, "", ("hmma",))


def experiments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the inputs and the exact results of M8.

    A row determines the number of small terms (8 choices) and their sign. It also determines whether the
    large term 1 is the start or a product, and the sign of the large term. A column determines the magnitude
    of the small terms: 2^-20 to 2^-31 in columns 0 to 11, then always 2^-31.

    Returns:
        ``a [64, 16]``, ``b [128, 16]``, ``start [64, 128]`` and ``a b^T + start``, all float64. The elements
        of a and b are float16 numbers.
    """
    a, b, start = torch.zeros(64, 16).double(), torch.zeros(128, 16).double(), torch.zeros(64, 128).double()
    powers = torch.arange(128).clamp_max(LOWEST - HIGHEST) + HIGHEST
    b[:, 0], b[:, 1:] = 1, 2.0 ** (12 - powers.double())[:, None]
    for row in range(64):
        count, sign, in_start, large = COUNTS[row % 8], 1 - row // 8 % 2 * 2, row // 16 % 2, 1 - row // 32 * 2
        a[row, 1 : 1 + count] = sign * 2.0**-12
        if in_start:
            start[row] = large
        else:
            a[row, 0] = large
    return a, b, start, a @ b.T + start


def accumulator(driver: AnyDriver, path: Path) -> Found:
    """Measure M8: the error of each sum in units of its small term, and the smallest term kept by a sum."""
    a, b, start, exact = experiments()
    device = "cpu" if driver.dry else "cuda"
    wide = [torch.nn.functional.pad(values, (0, 48)).half().to(device) for values in (a, b)]
    left, right = tiles(wide[0], 64), tiles(wide[1], 128)
    begin, sums = start.float().to(device), driver.zeros(64, 128, dtype=torch.float32)
    pointers = [tensor.data_ptr() for tensor in (left, right, begin, sums)]
    driver.launch(path, "product_wgmma", 1, 128, 64 * 128 + 128 * 128 + 1024, pointers)
    yield from _kept("wgmma", sums, exact)
    # mma.sync computes blocks of 16 rows and 8 columns; the first 16 columns contain all powers.
    blocks = [(row, column) for row in range(0, 64, 16) for column in (0, 8)]
    pieces = [
        torch.stack([values[at : at + size] for at in starts]).contiguous()
        for values, size, starts in (
            (a.half().to(device), 16, [row for row, _ in blocks]),
            (b.half().to(device), 8, [column for _, column in blocks]),
        )
    ]
    begins = torch.stack([begin[row : row + 16, column : column + 8] for row, column in blocks]).contiguous()
    found = driver.zeros(len(blocks), 16, 8, dtype=torch.float32)
    driver.launch(
        path, "product_mma", len(blocks), 32, 0, [tensor.data_ptr() for tensor in (*pieces, begins, found)]
    )
    whole = torch.zeros(64, 16)
    for block, (row, column) in zip(found.cpu(), blocks, strict=True):
        whole[row : row + 16, column : column + 8] = block
    yield from _kept("mma.sync", whole, exact)


def _kept(name: str, sums: torch.Tensor, exact: torch.Tensor) -> Found:
    count = LOWEST - HIGHEST + 1
    lacking = (exact[:, :count] - sums.cpu().double()[:, :count]) * 2.0 ** torch.arange(HIGHEST, LOWEST + 1)
    yield f"{name}: error in small terms, by experiment and power", lacking.flatten().tolist(), "terms"
    for row, what in ((0, "product"), (16, "start")):
        kept = [power for power in range(count) if lacking[row, power] == 0]
        yield (
            f"{name}: smallest term that a {what} of 1 keeps",
            float(HIGHEST + max(kept, default=-1)),
            "power of 1/2",
        )


def barriers(driver: AnyDriver, path: Path) -> Found:
    """Measure M9: barriers and launches."""
    clocks = driver.zeros(3)
    driver.launch(path, "barriers", 1, 256, 0, [clocks.data_ptr()])
    names = ("named barrier, one way", "wait for a completed mbarrier", "mbarrier, one way")
    for name, value in zip(names, clocks.tolist(), strict=True):
        yield name, float(value), "clocks"
    for name, early in (("nothing", False), ("nothing_early", True)):

        def call(number: int, name: str = name, early: bool = early) -> None:
            driver.launch(path, name, BLOCKS, 128, 0, [clocks.data_ptr()], early=early)

        yield f"launch of {name}", driver.us(call, 100), "us"


MEASUREMENTS: dict[str, Callable[[AnyDriver, Path], Found]] = {
    "M1 products with comparisons": products,
    "M2 overlap in the loop": overlap,
    "M3 rates of instructions": instructions,
    "M4 loads of 16 bytes": loads,
    "M5 additions in shared memory": additions,
    "M6 second-level cache": cache,
    "M7 mma.sync with products": small_products,
    "M8 accumulator": accumulator,
    "M9 barriers and launches": barriers,
}


def measure(
    driver: AnyDriver, cubins: Path, only: str, save: Callable[[list[MeasuredRow]], None]
) -> tuple[list[MeasuredRow], int]:
    """Run the measurements, and print a line for each number.

    Args:
        driver: launches the kernels.
        cubins: the folder with the compiled kernels.
        only: a regular expression; a measurement runs if its title matches.
        save: gets all rows so far after each measurement.

    Returns:
        the rows, and the number of failed measurements.
    """
    rows, failed = list[MeasuredRow](), 0
    for title, measurement in MEASUREMENTS.items():
        if not re.search(only, title):
            continue
        try:
            for name, value, unit in measurement(driver, cubins / "micro.cubin"):
                rows.append({"measurement": title, "name": name.strip(), "value": value, "unit": unit})
                text = f"{value:10.3f}" if isinstance(value, float) else f"{len(value):6d} numbers"
                print(f"{title[:2]} {name.strip():<56} {text} {unit}", flush=True)
        except RuntimeError as error:
            failed += 1
            rows.append(
                {"measurement": title, "name": "error", "value": str(error).splitlines()[0], "unit": ""}
            )
            print(f"{title}: {str(error).splitlines()[0]}", flush=True)
        save(rows)
    return rows, failed
