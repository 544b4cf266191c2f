"""Load, show and save rows of results.

``results/<machine>.csv`` keeps the newest row of each kind.

``python -m benchmarks.results FILE.csv`` prints a Markdown table of ours, the fastest peer and the lower
bounds.
Without a file it prints the page docs/measured.md with all saved results.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from .cases import ours

FOLDER = Path(__file__).with_name("results")
ROUNDS = FOLDER / "rounds"
KEY = ("op", "shape", "provider", "variant", "threads")
ROUNDS_KEY = ("round", "loop", "threads")
COLUMNS = (
    "op",
    "shape",
    "provider",
    "variant",
    "median ms",
    "spread",
    "ratio",
    "error",
    "peak MB",
    "GB/s",
    "GFLOP/s",
    "cores",
)
# the second is a minimum, because a shape of your own may be longer
WIDTHS = (25, 20, 24, 10, 10, 7, 7, 8, 8, 7, 8, 6)


def about(device: str, threads: int, held: str | None = None) -> dict[str, Any]:
    """Return the conditions of a measurement.

    A machine with a restricted instruction set counts as another machine.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)

    # A copy of the sources has no history, and its machine may have no git. Then UEFL_COMMIT names the
    # commit.
    commit, changed = os.environ.get("UEFL_COMMIT", ""), False
    if not commit and shutil.which("git"):
        commit = git("describe", "--always").stdout.strip()
        changed = (
            bool(commit) and git("diff", "--quiet", "HEAD", "--", ":/", ":(exclude)*.csv").returncode != 0
        )  # the code, not the results
    return {
        "threads": threads,
        "machine": (
            (torch.cuda.get_device_name() if device == "cuda" else _cpu_name())
            + (f", held to {held}" if held else "")
        ),
        "torch": torch.__version__,
        "commit": f"{commit}{'-dirty' if changed else ''}" or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = (
        dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)", info.read_text(), re.MULTILINE))
        if info.exists()
        else {}
    )
    name = found.get("model name") or platform.processor() or platform.machine()
    # the name that virtual machines of any generation may have
    if name == "AMD EPYC" and {"cpu family", "model"} <= set(found):
        name += f" family {found['cpu family']} model {found['model']}"
    return name


class ResultTable:
    """Print the rows of one case after another, under one header per op.

    The ratio is the provider's time divided by the time of "uefl" in its best variant. Above 1, ours is
    faster.
    """

    def __init__(self, shapes: list[str]) -> None:
        self._op = ""
        self._widths = (WIDTHS[0], max(WIDTHS[1], *map(len, shapes)), *WIDTHS[2:])

    def add(self, rows: list[dict[str, Any]], error: str) -> None:
        """Print the rows of one case, ours among them, below a header if the op is another one.

        ``error`` describes the column of errors.
        """
        if rows and rows[0]["op"] != self._op:
            self._op = rows[0]["op"]
            print(f"{self._op}: error = {error}")
            self._line(COLUMNS)
        baseline = next((row["median_ms"] for row in rows if row["provider"] == "uefl"), None)
        for row in rows:
            self._line(
                (
                    *(row[key] for key in ("op", "shape", "provider", "variant")),
                    f"{row['median_ms']:.4g}",
                    "-" if row["spread"] is None else f"{row['spread']:.0%}",
                    f"{row['median_ms'] / baseline:.2f}" if baseline else "-",
                    "-" if row["error"] is None else f"{row['error']:.1e}",
                    "-" if row["peak_mb"] is None else f"{row['peak_mb']:.1f}",
                    f"{row['gb_s']:.1f}",
                    f"{row['gflop_s']:.0f}",
                    f"{row['cores']:.2f}",
                )
            )
        print(flush=True)

    def _line(self, cells: tuple[str, ...]) -> None:
        pairs = enumerate(zip(cells, self._widths, strict=True))
        print(
            " ".join(
                f"{cell:<{width}}" if i < 4 else f"{cell:>{width}}" for i, (cell, width) in pairs
            ).rstrip()
        )


def path_of(machine: str, folder: Path) -> Path:
    return folder / (re.sub(r"\W+", "-", machine.lower()).strip("-") + ".csv")


def load(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file as text, or none without a file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(rows: list[dict[str, Any]], folder: Path, key: tuple[str, ...] = KEY) -> Path:
    """Write the rows into the file of their machine.

    They replace older rows with the same values in the columns ``key``.
    """
    path = path_of(rows[0]["machine"], folder)
    written = [
        {name: "" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for name, v in row.items()}
        for row in rows
    ]
    fresh = {tuple(row[name] for name in key): row for row in written}
    kept = [fresh.pop(tuple(row[name] for name in key), row) for row in load(path)]
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *fresh.values()])
    return path


def summary(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table with a line per op, shape and number of threads."""
    cases: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in ("op", "shape", "threads")), []).append(row)
    lines = [
        (
            "| op | shape | threads | ours ms | MB | fastest peer | its ms | times faster | lower bounds:"
            " times faster |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (op, shape, threads), found in cases.items():
        mains = [row for row in found if row["provider"] == "uefl"]
        others = sorted(
            (row for row in found if not ours(row["provider"])), key=lambda row: float(row["median_ms"])
        )
        peer = next((row for row in others if row["error"]), None)
        if mains and peer:
            bounds = ", ".join(
                f"{row['provider']} {_times(row, mains)}" for row in others if not row["error"]
            )
            took = " / ".join(f"{float(row['median_ms']):.3g} {row['variant']}".strip() for row in mains)
            cells = (
                op,
                shape,
                threads,
                took,
                f"{float(mains[0]['peak_mb'] or 'nan'):.3g}",
                peer["provider"],
                f"{float(peer['median_ms']):.3g}",
                _times(peer, mains),
                bounds,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(folder: Path) -> str:
    """Return docs/measured.md: results by machine, and the expected times of GPUs."""
    from . import gpu_model  # imported here, because it imports this module

    pieces = [
        "# Measured",
        (
            "`python -m benchmarks.results > docs/measured.md` writes this page from"
            " [benchmarks/results](../benchmarks/results), which also has all peers, the errors of their"
            ' answers, and their versions. The column "ours ms" names the instruction sets, the best one'
            ' first; "times faster" has one number for each of them.'
            " [benchmarks/README.md](../benchmarks/README.md) explains rows and lower bounds."
            " `eager`, `compiled`, `addmm+argmin` and `torch-…` are compositions of PyTorch operations, not"
            " packages."
            " [Peers](peers.md) compares the features of the packages, and [Profile your"
            " shapes](guides/profile.md) measures your own shapes."
        ),
    ]
    for path in sorted(folder.glob("*.csv")):
        rows = load(path)
        dates = sorted({row["date"] for row in rows})
        pieces.append(f"## {_named(rows[0])}\n\n{dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}.")
        pieces.append(summary(rows))
    if rounds := sorted((folder / ROUNDS.name).glob("*.csv")):
        pieces.append(rounds_page(rounds))
    pieces += [
        "## Expected times of the CUDA kernels",
        (
            "`python -m benchmarks.gpu_model` computes them from the bytes, products and instructions of the"
            " kernels.\n\n"
            "- Expected: the time of the slowest unit at its full rate. The name of the unit follows the"
            " microseconds. The units are the bytes of device memory, of the second-level cache (L2) and"
            " of shared memory, products, pipes, the issue of instructions, and the launch.\n"
            "- Apart: the time if products and other instructions do not overlap. The latency of memory and"
            " barriers are left out.\n"
            "- Target: set for an H200 before any kernel had run.\n"
            '- Measured: a call in the results above, or "not yet" for a GPU that has not run it.\n\n'
            "The rates of the H100 and the H200 are measured, except the L2 of the H100, which gets the rate"
            " of the H200. The rates of other GPUs are vendors' figures, scaled by the ratio that the H100"
            " reaches. The H100 has run an earlier search."
        ),
        gpu_model.summary(),
    ]
    return "\n".join(_wrapped(line) for line in "\n\n".join(pieces).split("\n"))


def rounds_page(files: list[Path]) -> str:
    """Return the part of the page with the times of federated rounds by machine."""
    pieces = [
        "## Federated rounds",
        (
            "`python -m benchmarks.uefl_round --save`, `fedul_round` and `simulation` write them: seconds"
            " of a round, medians of turns, and the time relative to ours. Keys after the name of the preset"
            " were set with `--set`. The name of a row `fedavg` has clients x images, the clients of a round"
            " and the batch size. In these rows the clients only train. `two_runs` writes the rows `two"
            " runs`: seconds of one program alone, and of each of two programs at once on the same cores,"
            " with the number of threads that is chosen automatically and with one thread."
        ),
    ]
    for path in files:
        rows = load(path)
        lines = [
            "| round | threads | loop | train s | measure s | round s | times ours |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            numbers = (f"{float(row[name]):.3g}" for name in ("train_s", "measure_s", "wall_s", "wall_ratio"))
            lines.append(f"| {' | '.join((row['round'], row['threads'], row['loop'], *numbers))} |")
        pieces += [f"{_named(rows[0])}, {rows[0]['date']}:", "\n".join(lines)]
    return "\n\n".join(pieces)


def _wrapped(line: str) -> str:
    if line.startswith("|"):
        return line
    hanging = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 100, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)


def _named(row: dict[str, str]) -> str:
    return row["machine"].replace(", held to ", ", restricted to ")


def _times(other: dict[str, str], mains: list[dict[str, str]]) -> str:
    return " / ".join(f"{float(other['median_ms']) / float(row['median_ms']):.2g}" for row in mains)


if __name__ == "__main__":
    named = [Path(argument) for argument in sys.argv[1:]]
    print(summary([row for path in named for row in load(path)]) if named else page(FOLDER))
