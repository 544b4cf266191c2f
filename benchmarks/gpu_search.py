"""Predict the time of the redesigned search on a Hopper GPU: ``python -m benchmarks.gpu_search``.

Prints a table of docs/measured.md: expected microseconds, not measured ones, for each row of the suite, with
the times of the old search and of flash-kmeans on the H100. The counts come from
sketches of the new kernels, compiled for sm_90a.

A wall is the least time of a row by one limit: the bytes of device memory, the products, the bytes of the
second-level cache, or the instructions. "overlap" is the largest wall at a rate that kernels reach, increased
by the effect of the second largest wall. "apart" is the time when products and comparisons run one after the
other. A measurement is expected between "overlap" and "apart".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import gpu_model, results

LAUNCHES = 4.0  # microseconds of a call's launches that nothing hides
TODAY = "NVIDIA H100 80GB HBM3"  # the machine of the saved results


@dataclass(frozen=True)
class Search:
    """A row: N rows of d elements against K codewords."""

    n: int
    d: int
    k: int
    itemsize: int  # bytes of an element of x
    forward: bool = False  # vq: the codewords, the loss and the counts too
    starts_first: bool = False  # the sums begin at the starts of the scores, which saves an addition a score
    blocks: int = 1  # in a cluster, which read the codebook once from the second-level cache

    @property
    def name(self) -> str:
        """Return the name of the row in the table."""
        rows = {1_000_000: "1M", 1_048_576: "1Mi", 65_536: "65k"}[self.n]
        return f"{'vq ' * self.forward}{rows} x {self.d} x {self.k} {'f32' if self.itemsize == 4 else 'f16'}"

    @property
    def shape(self) -> str:
        """Return the shape as the results name it."""
        return f"{self.n}x{self.d}x{self.k}" + ("" if self.itemsize == 4 else "xfloat16")


class RowTime(NamedTuple):
    """Microseconds of a row."""

    bytes: float
    tensor: float
    l2: float
    issue: float
    overlap: float
    apart: float

    @property
    def wall(self) -> float:
        """Return the least time that the bytes or the products of the task allow."""
        return max(self.bytes, self.tensor)


_HALF = tuple(Search(1_048_576, d, k, 2) for d in (64, 128, 256, 512) for k in (256, 1024, 16384))
ROWS = (
    *(Search(1_000_000, 64, k, 4) for k in (256, 1024, 8192)),
    Search(1_000_000, 64, 256, 2),
    *_HALF,
    *(Search(65_536, d, k, 2) for d, k in ((64, 4096), (512, 256), (512, 1024))),
    *(Search(1_000_000, 64, k, 4, forward=True) for k in (256, 1024, 8192)),
)


def instructions(row: Search) -> tuple[float, float]:
    """Return the instructions of a scheduler for 64 rows, and the comparisons among them.

    Counted in the machine code of the sketches: prepare 75 and 225 or 80 for 64 elements, a tile 195 with the
    least of every four codewords and 289 with all scores packed, 56 less where the sums begin at the starts,
    finish 300 or 130.
    """
    chunks, tiles = -(-row.d // 64), -(-row.k // 128)
    groups = row.k >= 1024  # the least of every four codewords; else every score has its number
    prepare = 75 + (225 if row.itemsize == 4 else 80) * chunks + 40
    compare = (195 if groups else 289) - 56 * row.starts_first + (20 * (chunks - 1) if chunks <= 2 else -20)
    tile = compare + (52 * chunks if chunks > 2 else 0)
    finish: float = 300 + 52 * (chunks - 1) if groups else 130
    if row.forward:
        finish += 340 * chunks * (row.itemsize / 4 * 0.75 + 0.25)
    return prepare + tiles * tile + finish, tiles * compare


def expect(machine: gpu_model.Gpu, row: Search) -> RowTime:
    """Return the expected time of the row on the machine."""
    n, d, k, size = row.n, row.d, row.k, row.itemsize
    # clocks: of all multiprocessors in a microsecond
    clocks, chunks = machine.multiprocessors * machine.gigahertz * 1e3, -(-d // 64)
    each, compare = (count * n / 64 / clocks for count in instructions(row))
    # products that score four codewords of a row again
    resolve = n / 64 * 52 * d / 16 / clocks if k >= 1024 else 0.0
    moved = n * (d * size * (2 if row.forward else 1) + 8) / machine.copy * 1e6
    tensor = 2.0 * n * d * k / machine.product * 1e6
    resident = k * d * 2 <= 132 * 1024 and chunks <= 2
    rows = 192 if d <= 256 else 128  # of a block, for which the codebook is read once
    l2 = 0.0 if resident else (n / rows * k * d * 2 / row.blocks + n * d * size) / machine.l2 * 1e6
    second, first = sorted((moved / 0.92, (tensor + resolve) / 0.9, l2, each / 0.72))[-2:]
    overlap = (first**4 + second**4) ** 0.25 + LAUNCHES  # if both are close, each slows the other
    apart = max(moved / 0.9, l2, tensor + resolve + compare / 0.9, each / 0.6) * 1.05 + LAUNCHES + 2
    return RowTime(moved, tensor, l2, each, overlap, max(apart, overlap))


def variant(row: Search) -> tuple[str, Search] | None:
    """Return the name of a variant that may be faster, and the row with it."""
    if row.d == 512:
        return "multicast", replace(row, blocks=2)
    if row.itemsize == 2 and row.d == 64 and row.n > 100_000:
        return "starts first", replace(row, starts_first=True)
    return None


def measured() -> dict[tuple[str, str, str], float]:
    """Return the microseconds of the saved results of the H100 by op, shape and provider."""
    rows = results.load(results.path_of(TODAY, results.FOLDER))
    return {(row["op"], row["shape"], row["provider"]): 1e3 * float(row["median_ms"]) for row in rows}


def summary() -> str:
    """Return a Markdown table: a line for each row, with the expected times of an H100 and of an H200."""
    machines = [machine for machine in gpu_model.MACHINES if re.fullmatch("H[12]00", machine.name)]
    found = measured()
    names = [
        f"{machine.name}: {column}"
        for machine in machines
        for column in ("wall", "issue", "L2", "expected, not measured")
    ]
    lines = [
        f"| N x d x K | measured before | flash-kmeans | {' | '.join(names)} |",
        "|---" + "|--:" * (2 + len(names)) + "|",
    ]

    def span(row: Search, machine: gpu_model.Gpu) -> str:
        low, high = (round(us) for us in expect(machine, row)[4:])
        return f"{low} .. {high}" if high > low else f"{low}"

    for row in ROWS:
        op, other = "vq" if row.forward else "vq_assign", variant(row)
        clocks = (found.get((op, row.shape, provider)) for provider in ("uefl", "flash-kmeans"))
        cells = [row.name, *("-" if us is None else f"{us:.0f}" for us in clocks)]
        for machine in machines:
            of = expect(machine, row)
            cells += [f"{of.wall:.0f}", f"{of.issue:.0f}", f"{of.l2:.0f}" if of.l2 else "-"]
            cells.append(span(row, machine) + (f"; {other[0]} {span(other[1], machine)}" if other else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary())
