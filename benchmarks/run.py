"""Measure the ops beside their peers: ``python -m benchmarks.run [--op OP] [--shape NxDxK] [--peers A,B] [--save] [--smoke]``.

Correctness comes first: every provider's answer is compared with the float64 definition, and an answer of ours that is further off
than the op's gate allows ends the run with exit code 1. Times are medians of repeated calls, after warming up. Nothing here asserts
a time.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.benchmark import Timer

from .ops import REGISTRY
from .registry import Case, Op, Skip, ours

RESULTS = Path(__file__).with_name("results")


def measure(
    name: str, op: Op[Any], case: Case, device: str, peers: set[str] | None, seconds: float, skipped: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """One row of results per provider of one op and case; ``seconds`` = 0 times a single call. ``skipped``: provider -> why."""
    inputs = op.inputs(case, device)
    error = op.gate.against(inputs)
    for provider, prepare in op.providers.items():
        if peers is not None and provider not in peers and not ours(provider):
            continue
        try:
            call = prepare(inputs)
        except (ImportError, Skip) as why:
            skipped[provider] = str(why)
            continue
        row: dict[str, Any] = {"op": name, "shape": case.name, "provider": provider, "gate": op.gate.figure}
        found = call()
        row["error"] = None if found is None else error(found)
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        time = (timer.blocked_autorange(min_run_time=seconds) if seconds else timer.timeit(1)).median
        yield row | {"median_ms": time * 1e3, "gb_s": op.bytes(case) / time / 1e9, "gflop_s": op.flops(case) / time / 1e9}


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "machine": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def show(rows: list[dict[str, Any]]) -> None:
    """One table; the ratio is the provider's time over ours of the same op and shape: above 1, we are faster."""
    baseline = {(row["op"], row["shape"]): row["median_ms"] for row in rows if row["provider"] == "uefl"}
    table = Table("op", "shape", "provider", "median ms", "ratio", "error", "GB/s", "GFLOP/s")
    for row in rows:
        error = "-" if row["error"] is None else f"{row['error']:.1e}"
        numbers = (f"{row['median_ms']:.3f}", f"{row['median_ms'] / baseline[row['op'], row['shape']]:.2f}", error)
        table.add_row(row["op"], row["shape"], row["provider"], *numbers, f"{row['gb_s']:.1f}", f"{row['gflop_s']:.0f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def save(rows: list[dict[str, Any]], about: dict[str, Any]) -> Path:
    """Append to results/<machine>.csv."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / (re.sub(r"\W+", "-", about["machine"].lower()).strip("-") + ".csv")
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        if new:
            writer.writeheader()
        writer.writerows({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in (row | about).items()} for row in rows)
    return path


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="measure the ops beside their peers")
    parser.add_argument("--op", choices=REGISTRY, help="only this op")
    parser.add_argument("--shape", help="only this shape, named as in the table")
    parser.add_argument("--peers", help="only these peers, separated by commas; ours are always measured")
    parser.add_argument("--save", action="store_true", help="append the numbers to benchmarks/results/<machine>.csv")
    parser.add_argument("--smoke", action="store_true", help="one tiny shape, one call: that it runs and is right, not how fast")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    peers = set(options.peers.split(",")) if options.peers else None
    known = dict.fromkeys(provider for name, op in REGISTRY.items() if options.op in (None, name) for provider in op.providers)
    if unknown := sorted((peers or set()) - set(known)):
        parser.error(f"no peer {', '.join(map(repr, unknown))}; there are {', '.join(known)}")

    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name, op in REGISTRY.items():
        for case in (op.smoke,) if options.smoke else op.cases:
            if options.op in (None, name) and options.shape in (None, case.name):
                rows.extend(measure(name, op, case, device, peers, 0 if options.smoke else 1, skipped))
    if not rows:
        parser.error(f"no shape {options.shape!r}; there are {', '.join(case.name for op in REGISTRY.values() for case in op.cases)}")
    show(rows)
    for provider, why in skipped.items():
        print(f"skipped: {provider} ({why})")
    if options.save:
        print(save(rows, machine(device)))
    wrong = [row for row in rows if ours(row["provider"]) and row["provider"] not in REGISTRY[row["op"]].loose and not passes(row)]
    for row in wrong:
        print(f"WRONG: {row['op']} {row['shape']} {row['provider']}: {row['gate']} {row['error']:.1e} beside the float64 answer")
    return 1 if wrong else 0


def passes(row: dict[str, Any]) -> bool:
    """No NaN passes; an answer that was not given does not either."""
    return row["error"] is not None and row["error"] <= REGISTRY[row["op"]].gate.limit


if __name__ == "__main__":
    sys.exit(main())
