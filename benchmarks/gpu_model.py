"""Model the costs of the CUDA kernels from their work and the rates of a GPU.

Usage: ``python -m benchmarks.gpu_model --help``.

A kernel moves bytes, multiplies on tensor cores and issues instructions to pipes, each at a known rate. Each
kind of work gives a lower bound of the time, a *wall*. The highest wall is the expected time. There are walls
for the bytes of device memory, of the second-level cache and of shared memory, for products, for each pipe,
for the issue of instructions and for the launch. Another column has the time of a kernel if products and
instructions never overlap. The last one has the measured time, if a profile of ``benchmarks.gpu_profile`` or
a row in results/ has it. Latency of memory, barriers, the order of instructions and part-filled waves are not
in the model. They explain the difference to the measured time. On an H200, calls of ``vq_assign`` and ``vq``
with a million rows took 1.4 to 2.3 times the expected time, and 0.9 to 1.6 times the time without overlap.
With 65,536 rows, the calls took 2.0 to 7.8 times the expected time, and 1.4 to 5.2 times the time without
overlap.

If nvcc is installed, the program counts the instructions in the machine code, which takes some minutes.
Otherwise it takes the counts from the constants below.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import results, sass
from .cases import case_of
from .ops import REGISTRY
from .ops.kmeans import ITERATIONS

PipeCounts = Mapping[str, float]  # instructions of one lane, by pipe; "issue" counts them all


# Lanes per clock and multiprocessor. A multiply-add of integers takes one of the two halves of the pipe of
# floats. While products ran, alu and imad reached 40 lanes on an H200.
HOPPER = {"issue": 128, "alu": 62.8, "imad": 63.5, "fma": 124.6, "f64": 64, "convert": 15}


@dataclass(frozen=True)
class Gpu:
    """The size and rates of a GPU.

    The rates of the H100 and the H200 are measured. The H100 reaches a share of the rates that its vendor
    publishes. The rates of other GPUs are the published ones, multiplied by this share.
    """

    name: str
    multiprocessors: int
    gigahertz: float
    copy: float  # bytes a second, read and written
    l2: float  # bytes a second that the second-level cache gives to all multiprocessors
    product: float  # operations a second of a dense bfloat16 or float16 product
    mma: float  # the share of `product` that mma.sync reaches
    code: str  # the architecture of its machine code; sm_90a has wgmma
    lanes: PipeCounts = field(default_factory=lambda: HOPPER)

    def walls(self, kernel: KernelWork) -> dict[str, float]:
        """Return the least microseconds that each hardware unit needs."""
        by_mma = kernel.flops_again + (0 if kernel.name == WGMMA else kernel.flops)
        by_wgmma = kernel.flops if kernel.name == WGMMA else 0
        counts = dict(kernel.counts)
        counts["fma"] = counts.get("fma", 0) + counts.get("imad", 0)
        clocks = self.multiprocessors * self.gigahertz * 1e9
        pipes = {pipe: count / (self.lanes[pipe] * clocks) for pipe, count in counts.items()}
        walls = {
            "bytes": kernel.bytes / self.copy,
            "tensor": (by_wgmma + by_mma / self.mma) / self.product,
            "L2": kernel.l2 / self.l2,
            "reductions": kernel.reductions / REDUCTIONS,
        } | pipes
        walls |= {"shared": kernel.shared / (SHARED * clocks)}
        return {wall: 1e6 * seconds for wall, seconds in walls.items()} | {"launch": LAUNCH * kernel.launched}


MACHINES = (
    Gpu("H100", 132, 1.755, 3.0e12, 7.2e12, 796e12, 0.62, "90a"),  # l2: of the H200, which has the same chip
    Gpu("H200", 132, 1.755, 4.256e12, 7.2e12, 790e12, 0.62, "90a"),
    Gpu("A100", 108, 1.41, 1.8e12, 4.0e12, 265e12, 1.0, "80", HOPPER | {"fma": 64, "f64": 32}),
    Gpu("B200", 148, 1.85, 7.2e12, 9.0e12, 1800e12, 0.3, "100"),
    Gpu("L4", 58, 1.6, 0.27e12, 1.8e12, 97e12, 1.0, "80", HOPPER | {"f64": 2, "convert": 2}),
)

MEMORIES = ("bytes", "L2", "shared")
SHARED = 128.0  # bytes a clock that the shared memory of a multiprocessor gives
REDUCTIONS = 360e9  # a second, on the H100
LAUNCH = 0.84  # microseconds of an empty kernel in a graph, on an H200

# The op and shape, and the target of an H200 in microseconds, if there is one.
TARGETS: dict[tuple[str, str], float | None] = {
    ("vq", "1000000x64x256"): 200,
    ("vq", "1000000x64x1024"): 330,
    ("vq", "1000000x64x8192"): 2400,
    ("vq_assign", "1000000x64x256xfloat16"): 100,
    ("vq_assign", "1000000x128x1024xfloat16"): 450,
    ("kmeans_step", "1048576x64x256"): None,
    ("kmeans_lloyd", "1048576x64x256"): 200,
    ("mc_dropout_mlp", "10000x512x512x10x100"): 300,
}
PARTS = {"kmeans_lloyd": ITERATIONS}  # equal parts of a call; the times are for one part

# Counts of sm_90a unless the name has another architecture. Other architectures have nearly the same counts.
# If nvcc is installed, the counts up to "square" are read from the machine code.
COUNTS: dict[str, PipeCounts] = {
    # a score. For search_wgmma: all instructions of the loop over codewords. For search_mma: the instructions
    # after the product
    "cross, sm_90a": {"issue": 4.53, "alu": 1.83, "imad": 1.16, "fma": 1.0},
    # search_wgmma: a score, for each 64 elements after the first 64; preparing an element of a float32
    # row, or of a float16 row; finishing a row with a certain index
    "chunk": {"issue": 1.47, "alu": 0.36, "imad": 0.31},
    "prepare, 4": {"issue": 15.0, "alu": 3.3, "imad": 1.7, "fma": 6.4},
    "prepare, 2": {"issue": 9.3, "alu": 2.6, "imad": 1.3, "fma": 2.4},
    "finish": {"issue": 306, "alu": 136, "imad": 54, "fma": 12},
    "cross, sm_80": {"issue": 6.56, "alu": 3.5, "imad": 1.28, "fma": 1.0},
    "four, sm_80": {"issue": 4.41, "alu": 2.12, "imad": 0.53, "fma": 1.0},
    "cross, sm_100": {"issue": 5.34, "alu": 2.34, "imad": 1.28, "fma": 1.0},
    "four, sm_100": {"issue": 3.97, "alu": 1.72, "imad": 0.53, "fma": 1.0},
    # search_mma: scoring the best four codewords of a row again, for 64 elements
    "again": {"issue": 904, "alu": 376, "imad": 336, "fma": 32},
    # head: 32 units of two rows and two passes
    "masks": {"issue": 311, "alu": 164, "imad": 75, "fma": 16},
    # k-means: an element of row_sums, and of row_squares
    "sum": {"issue": 13.9, "alu": 4.6, "imad": 2.9, "f64": 2, "convert": 2},
    "square": {"issue": 10.8, "alu": 2.0, "imad": 1.5, "f64": 3, "convert": 2},
    # Counted by hand in the listing, without the instructions that branches skip. search_mma: the products of
    # 64 elements for a score, with loads and addresses; converting an element of a row to float16; all other
    # work for a row. Then: an element of gather, a score of the second phase, an element of a candidate of
    # the second phase, and the softmax of a row in two passes of the head.
    "product, sm_80": {"issue": 6.1, "alu": 2.3, "imad": 1.7},
    "product, sm_100": {"issue": 4.3, "alu": 1.4, "imad": 0.8},
    "element": {"issue": 13.5, "alu": 3.3, "imad": 2.0, "fma": 6.0},
    "row": {"issue": 800, "alu": 260, "imad": 100, "fma": 40},
    "gather": {"issue": 17, "alu": 5, "imad": 5.6, "fma": 2, "f64": 0.25, "convert": 0.25},
    "second": {"issue": 10, "alu": 2, "imad": 1, "fma": 1.5},
    "candidate": {"issue": 8, "f64": 3, "convert": 1},
    "softmax": {"issue": 1090, "alu": 280, "imad": 60, "fma": 500},
}
PIPES = (
    ("imad", r"IMAD"),
    ("fma", r"F(FMA|ADD|MUL)|H(ADD|MUL|FMA)2"),
    ("f64", r"D(ADD|MUL|FMA|SETP)"),
    ("convert", r"(F2F|F2I|I2F)\b.*64"),
    ("alu", r"VIMNMX|VIADD|IMNMX|LOP3|IADD|ISETP|FSETP|FMNMX|F?SEL\b|SHF|LEA|PRMT|F2FP|PLOP3|POPC"),
)


def by_pipe(operations: list[str], times: float) -> PipeCounts:
    """Return the number of instructions of each pipe, divided by a number of scores or elements."""
    found = Counter(
        next((pipe for pipe, pattern in PIPES if re.match(pattern, name)), "other") for name in operations
    )
    return {pipe: found[pipe] / times for pipe, _ in PIPES if found[pipe]} | {
        "issue": len(operations) / times
    }


def counted() -> dict[str, PipeCounts]:
    """Count the instructions in the machine code of the kernels, by default for sm_90a and float32."""

    def loop(
        stem: str,
        kernel: str,
        instance: str,
        inside: str | tuple[str, ...],
        but: str = "$^",
        code: str = "90a",
    ) -> list[str]:
        return sass.operations(sass.innermost_loop(sass.instances(stem, code, kernel)[instance], inside, but))

    def comparison(code: str, instance: str) -> PipeCounts:
        # The loop of the first phase: the second phase has atomics, and scoring again has shuffles.
        search = loop("vq_assign", "search_mma", instance, "HMMA", "ATOMS|SHFL", code=code)
        return by_pipe(search[max(i for i, name in enumerate(search) if name.startswith("HMMA")) + 1 :], 32)

    searches = sass.instances("vq_assign", "90a", "search_wgmma")
    return {
        "cross, sm_90a": by_pipe(sass.tile_loop(searches["fLi3ELb0E"]), sass.SCORES),
        "chunk": by_pipe(sass.tile_loop(searches["fLi3ELb1E"]), sass.SCORES),
        # a warp takes 16 rows, 64 elements of each at a time
        "prepare, 4": by_pipe(sass.preparing(searches["fLi3ELb0E"]), 16 * 64 / 32),
        "prepare, 2": by_pipe(sass.preparing(searches["6__halfLi3ELb0E"]), 16 * 64 / 32),
        "finish": by_pipe(sass.finishing(searches["fLi3ELb0E"]), 16 / 32),
        **{
            f"{way}, sm_{code}": comparison(code, instance)
            for code in ("80", "100")
            for way, instance in MMA_WAYS.items()
        },
        # an iteration scores the codewords of two rows in each half of a warp's 16 rows
        "again": by_pipe(
            loop("vq_assign", "search_mma", MMA_WAYS["four"], ("HMMA", "SHFL"), "ATOMS"), 4 / 32
        ),
        "masks": by_pipe(loop("mc_dropout_mlp", "head", "Li2ELb0E", "HMMA"), 1),
        "sum": by_pipe(loop("kmeans", "row_sums", "fLb0Ef", r"F2I\.S64"), 16),  # eight rows, two columns
        "square": by_pipe(loop("kmeans", "row_squares", "ff", "DADD"), 4),
    }


@dataclass(frozen=True)
class KernelWork:
    """The least work of one launch."""

    name: str  # a pattern for the beginning of the kernel's name
    bytes: float
    flops: float = 0
    counts: PipeCounts = field(default_factory=dict)
    l2: float = 0  # bytes read from the second-level cache
    shared: float = 0  # bytes read from shared memory
    reductions: float = 0  # additions of 64-bit integers in the second-level cache
    launched: bool = True  # False: a part of the work of the kernel before it in the list
    flops_again: float = 0  # operations of mma.sync to score codewords again


def total(*pieces: tuple[float, PipeCounts]) -> PipeCounts:
    """Return the sum of the counts, each times its factor."""
    found: dict[str, float] = {}
    for times, counts in pieces:
        for pipe, count in counts.items():
            found[pipe] = found.get(pipe, 0) + times * count
    return found


def open_share(k: int, itemsize: int, d: int) -> float:
    """Return the share of Gaussian rows that the first phase leaves open.

    tests/kernels/test_flagged_rows.py computes these shares from the certificate.
    """
    if itemsize == 2:
        return 0.002 if d <= 64 else 0.006
    return 0.027 if k <= 256 else 0.038 if k <= 1024 else 0.05


# The two ways in which search_mma compares scores, and the template arguments of each, for float32.
MMA_WAYS = {"cross": "fLb1ELb0E", "four": "fLb0ELb0E"}
# Share of Gaussian rows that an iteration after the first gives another label: mean of ten at 262144 x 64, K
# 256, on the CPU. The second iteration gives half of the rows another label, the eleventh 4 %.
CHANGED = 0.12
# share of the open rows that search_wgmma decides between two codewords: 0.71 to 0.85 in simulations
SETTLED = 0.75
# Operations and bytes to score four codewords of a row again, for 64 elements of the row. 16 rows take 32
# products of 16 x 8 x 16.
AGAIN_FLOPS, AGAIN_BYTES = 32 / 16 * 4096.0, 4 * 128.0
PACK, WGMMA, MMA, OPEN = "pack_codebook", "search_wgmma", "search_mma<", "open rows"
PRODUCT = "gemm"  # a product of torch in float32, which has the same multiply-adds
SHOWN = {PRODUCT: "product of torch"}


def shown(kernel: str) -> str:
    return SHOWN.get(kernel, kernel.removesuffix("<"))


def room_for_codewords(groups: int, d: int, itemsize: int) -> int:
    """Return the bytes of shared memory that rows leave free, with this number of multiplying warpgroups."""
    chunks = -(-d // 64)
    return 226 * 1024 - groups * (chunks * 8192 + 4608) - (4 - groups) * 64 * 64 * itemsize


def groups_of(d: int, k: int, itemsize: int) -> int:
    """Return the number of multiplying warpgroups of search_wgmma, as csrc/cuda/vq_assign_wgmma_plan.h does.

    If two warpgroups multiply, two others prepare rows. The model does not cover rows that are too long for
    shared memory.
    """
    few = k <= 128 or (k <= 512 and (d > 64 or itemsize == 4))
    return 2 if few or room_for_codewords(3, d, itemsize) < 4 * 128 * 128 else 3


def search(n: float, d: int, k: int, itemsize: int, code: str, of: dict[str, PipeCounts]) -> list[KernelWork]:
    some = n * open_share(k, itemsize, d)
    chunks, padded_k, dense = -(-d // 64), -(-k // 128) * 128, n * d * itemsize
    way = "four" if k > 512 * chunks and code != "90a" else "cross"
    again = n * chunks if way == "four" else 0.0  # blocks of 64 elements that are scored again
    moved, flops = n * (d * itemsize + 8), 2.0 * n * d * k
    halves = padded_k * chunks * 64 * 2  # bytes of the packed codebook
    counts = [(n * k, of[f"{way}, sm_{code}"])]
    if code == "90a":
        counts += [(n * k * (chunks - 1), of["chunk"])]
        counts += [(n * chunks * 64, of[f"prepare, {min(itemsize, 4)}"]), (n, of["finish"])]
        # A thread block reads the codebook for the rows of its warpgroups, or once if the codebook stays.
        groups = groups_of(d, k, itemsize)
        stays = halves <= room_for_codewords(groups, d, itemsize)
        streamed = 0 if stays else n / (64 * groups) * halves
        # Products read the whole codebook once for each 64 rows. They read rows of more than 64 elements once
        # for each 128 codewords. Before the products, rows are copied to shared memory, read, and written as
        # tiles.
        shared = n / 64 * (halves + 64 * chunks * 128 * (padded_k / 128) * (chunks > 1)) + 3 * dense
        found = KernelWork(WGMMA, moved, flops, total(*counts), streamed + dense, shared)
    else:
        counts += [(n * d, of["element"]), (n, of["row"]), (again, of["again"])]
        counts += [(n * k * chunks, of[f"product, sm_{code}"])]
        # A thread block of 64 rows streams the codebook. Two of its warps read the same rows, and four the
        # same codewords.
        l2 = n / 64 * halves + dense + again * AGAIN_BYTES
        found = KernelWork(MMA, moved, flops, total(*counts), l2, n / 64 * 4 * halves + again * 128)
    found = replace(found, flops_again=again * AGAIN_FLOPS)
    pack = KernelWork(PACK, k * d * (itemsize + 10))
    # A thread block decides the other open rows after the first phase. They usually have two candidates.
    between_two = some * SETTLED if code == "90a" else 0.0
    scored = some - between_two
    second = total((scored * k, of["second"]), (scored * d, of["element"]), (2.1 * some * d, of["candidate"]))
    bytes_again = some * (d * itemsize + 20)
    return [pack, found, KernelWork(OPEN, bytes_again, 2.0 * scored * d * k, second, launched=False)]


def kernels(op: str, case: Any, code: str, of: dict[str, PipeCounts]) -> list[KernelWork]:
    """Return the kernel launches of one part of an op.

    The preparation of codewords, a few microseconds, is left out.
    """
    if op == "mc_dropout_mlp":
        pairs = -(-case.batch // 16) * -(-case.passes // 2)  # pairs of passes, each for the 16 rows of a warp
        blocks = -(-case.hidden // 32)
        counts = total((32 * pairs * blocks, of["masks"]), (16 * pairs, of["softmax"]))
        # products of 16 x 8 x 16
        head = KernelWork("head<", case.batch * case.hidden * 4, pairs * blocks * 24 * 4096.0, counts)
        multiplied = float(case.batch * case.inputs * case.hidden)
        return [
            KernelWork(
                PRODUCT,
                4 * case.batch * (case.inputs + case.hidden),
                counts={"fma": multiplied, "issue": multiplied},
            ),
            head,
        ]
    d, itemsize = (case.d, 4) if op.startswith("kmeans") else (case.dim, case.itemsize)
    searched = case.n * (1 + 1 / ITERATIONS if op == "kmeans_lloyd" else 1)  # one more search for the labels
    found = search(searched, d, case.k, itemsize, code, of)
    size, rows = case.n * d, case.n * d * itemsize
    if op == "vq":
        quantize = total((size, of["gather"]))
        found.append(KernelWork("gather<", 2 * rows + 8 * case.n, counts=quantize))
    if op == "kmeans_lloyd":
        moved, changed = 16 * case.n + CHANGED * rows, CHANGED * size
        counts = total((changed, of["sum"]))
        found.append(KernelWork("advance<", moved, counts=counts, reductions=2 * changed))
    if op == "kmeans_step":
        found.append(KernelWork("row_sums<", rows + 8 * case.n, counts=total((size, of["sum"]))))
        found.append(KernelWork("row_squares<", rows + 16 * case.n, counts=total((size, of["square"]))))
    return found


@dataclass(frozen=True)
class KernelTime:
    """A kernel on a machine, in microseconds."""

    kernel: str
    us: float
    wall: str
    apart: float  # products and instructions one after the other


def expected(machine: Gpu, op: str, shape: str, of: dict[str, PipeCounts]) -> list[KernelTime]:
    rows = []
    for kernel in kernels(op, case_of(type(REGISTRY[op].smoke), shape), machine.code, of):
        walls = machine.walls(kernel)
        wall = max(walls, key=lambda name: walls[name])
        instructions = max(
            us for name, us in walls.items() if name not in MEMORIES and name not in ("tensor", "launch")
        )
        apart = max(*(walls[name] for name in MEMORIES), walls["tensor"] + instructions, walls[wall])
        rows.append(KernelTime(kernel.name, walls[wall], wall, apart))
    return rows


def measured(machine: Gpu, profiles: list[Path]) -> dict[str, dict[str, float]]:
    """Return the microseconds of each target's kernels, and of a whole call under the empty name.

    Later profiles replace earlier ones.
    """
    found: dict[str, dict[str, float]] = {}
    for row in (row for path in results.FOLDER.glob("*.csv") for row in results.load(path)):
        if machine.name in row["machine"] and row["provider"] == "uefl":
            found[f"{row['op']} {row['shape']}"] = {
                "": 1e3 * float(row["median_ms"]) / PARTS.get(row["op"], 1)
            }
    for profile in map(json.loads, (path.read_text() for path in profiles)):
        for target in profile["targets"] if machine.name in profile["machine"] else ():
            call = {"": target["graph_us"] or target["events_us"]}
            found[target["target"]] = call | {
                row["kernel"]: row["launches"] * row["us"] for row in target["kernels"]
            }
    return found


def summary() -> str:
    """Return a Markdown table of every target on every machine.

    The numbers come from the constants of this file and the saved results.
    """
    lines = [
        "| GPU | work | expected us | of which | apart us | target us | measured us |",
        "|---|---|--:|---|--:|--:|--:|",
    ]
    for machine in MACHINES:
        clocks = measured(machine, [])
        for (op, shape), target in TARGETS.items():
            rows = expected(machine, op, shape, COUNTS)
            most = max(row.us for row in rows)
            pieces = "; ".join(
                f"{shown(row.kernel)} {row.us:.0f} ({row.wall})" for row in rows if row.us > most / 20
            )
            clock = clocks.get(f"{op} {shape}")
            cells = (
                machine.name,
                f"{op} {shape}" + (", an iteration" if op in PARTS else ""),
                f"{sum(row.us for row in rows):.0f}",
                pieces,
                f"{sum(row.apart for row in rows):.0f}",
                f"{target}" if target and machine.name == "H200" else "",
                f"{clock['']:.0f}" if clock else "not yet",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def line(name: str, us: float, wall: str, apart: float, clock: float | None) -> str:
    seen = "" if clock is None else f"{clock:11.1f} {clock / us:8.2f}"
    return f"{name:<38} {us:9.1f}  {wall:<8} {apart:8.1f} {seen}".rstrip()


def show(machine: Gpu, of: dict[str, PipeCounts], profiles: list[Path]) -> None:
    print(
        f"{machine.name}: copy {machine.copy / 1e12:.2f} TB/s, product {machine.product / 1e12:.0f} TFLOP/s"
    )
    print(f"{'microseconds':<38} {'expected':>9}  {'wall':<8} {'apart':>8} {'measured':>11} {'ratio':>8}")
    clocks = measured(machine, profiles)
    for op, shape in TARGETS:
        rows, seen = expected(machine, op, shape, of), clocks.get(f"{op} {shape}", {})
        print(
            line(
                f"{op} {shape}", sum(row.us for row in rows), "", sum(row.apart for row in rows), seen.get("")
            )
        )
        for row in rows:
            clock = sum(us for name, us in seen.items() if name and re.search(row.kernel, name))
            print(line(f"    {shown(row.kernel)}", row.us, row.wall, row.apart, clock or None))
    print(flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_model", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--machine",
        default="",
        metavar="REGEX",
        help=f"only the GPUs with a matching name: {', '.join(machine.name for machine in MACHINES)}",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a profile.json of benchmarks.gpu_profile",
    )
    parser.add_argument(
        "--constants",
        action="store_true",
        help="compile nothing; take the counts of instructions in this file",
    )
    options = parser.parse_args(arguments)
    compiler = sass.NVCC is not None and sass.disassembler() is not None and not options.constants
    print(
        "instructions:"
        f" {'counted in the machine code for sm_90a' if compiler else 'the constants of this file'}",
        file=sys.stderr,
    )
    of = COUNTS | (counted() if compiler else {})
    for machine in MACHINES:
        if re.search(options.machine, machine.name):
            show(machine, of, options.profile)


if __name__ == "__main__":
    main()
