"""Measure the slowdown of a run by another run on the same cores.

python -m benchmarks.two_runs [PRESET] [--runs 2] [--turns 3] [--most 2.2] [--set key=value]...

Each run is a process of its own, as ``uefl train`` is. The processes wait for each other before they train,
so that all of them train at the same time. The exit code is 1 if the median of the ratios is above
``--most``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from rich.console import Console
from rich.table import Table


class Times(NamedTuple):
    """The seconds of all arms of a run, its CPU seconds and its threads."""

    wall: float
    cpu: float
    threads: int


def _train(preset: str, keys: list[str], runs: int, waiting: str) -> Times:
    """Train in this process as soon as ``runs`` processes are ready.

    Each process has a file in ``waiting``.
    """
    import json
    import time
    from pathlib import Path

    from uefl_kernels.__main__ import spin_briefly

    spin_briefly()
    import uefl
    from uefl import config

    cfg = config.load(preset, keys)
    (Path(waiting) / str(os.getpid())).touch()
    while len(list(Path(waiting).iterdir())) < runs:
        time.sleep(0.01)
    with tempfile.TemporaryDirectory() as folder:
        run = uefl.train(cfg, out=f"{folder}/run", device="cpu")
        made = json.loads((run.path / "made.json").read_text())
        arms = run.summary.values()
        return Times(
            sum(arm["seconds"] for arm in arms), sum(arm["cpu_seconds"] for arm in arms), made["threads"]
        )


def at_once(preset: str, keys: list[str], runs: int) -> list[Times]:
    """Train this number of runs at the same time, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as waiting, ProcessPoolExecutor(runs, spawn) as pool:
        started = [pool.submit(_train, preset, keys, runs, waiting) for _ in range(runs)]
        return [one.result() for one in started]


def main(arguments: list[str] | None = None) -> int:
    """Time one run by itself and several runs at once, in turns.

    Print the medians and return the exit code.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="demo")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--most", type=float, default=2.2, help="the largest ratio that passes (2.2)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(arguments)
    turns = [
        (at_once(args.preset, args.set, 1), at_once(args.preset, args.set, args.runs))
        for _ in range(args.turns)
    ]
    table = Table(title=f"{args.preset}, {len(os.sched_getaffinity(0))} cores; medians of {args.turns} turns")
    for column in ("runs at once", "seconds of each", "CPU seconds of each", "threads of each"):
        table.add_column(column, justify="right")
    for runs in zip(*turns, strict=True):
        times = [one for turn in runs for one in turn]
        wall, cpu = (statistics.median(one[i] for one in times) for i in (0, 1))
        table.add_row(str(len(runs[0])), f"{wall:.2f}", f"{cpu:.2f}", str(times[0].threads))
    ratios = [max(one.wall for one in together) / single[0].wall for single, together in turns]
    ratio = statistics.median(ratios)
    console = Console()
    console.print(table)
    console.print(
        f"{args.runs} runs at once take {ratio:.2f} times as long each ({min(ratios):.2f} to"
        f" {max(ratios):.2f}); wanted: at most {args.most:g}"
    )
    return int(ratio > args.most)


if __name__ == "__main__":
    raise SystemExit(main())
