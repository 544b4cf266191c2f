"""Measure the slowdown of a run by another run on the same cores.

python -m benchmarks.two_runs [PRESET | kmeans | layer] [--runs 2] [--turns 3] [--most 2.2]
    [--set key=value]...

Each run is a process of its own, as ``uefl train`` is. ``kmeans`` fits ``KMeans`` to each batch of a
DataLoader with two workers, and ``layer`` trains a ``VectorQuantize`` on each batch. Both take ``--set
batches=20`` and ``--set rows=20000``. Waiting threads spin briefly, as under the command ``uefl``. The
processes wait for each other before they train, so that all of them train at the same time. The exit code is
1 if the median of the ratios is above ``--most``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from uefl.errors import UserError


class Times(NamedTuple):
    """The seconds of all arms of a run, its CPU seconds and its threads."""

    wall: float
    cpu: float
    threads: int


def _train(preset: str, keys: list[str], ready: Callable[[], None]) -> Times:
    """Train a preset."""
    import uefl
    from uefl import config

    cfg = config.load(preset, keys)
    ready()
    with tempfile.TemporaryDirectory() as folder:
        run = uefl.train(cfg, out=f"{folder}/run", device="cpu")
        made = json.loads((run.path / "made.json").read_text())
        arms = run.summary.values()
        return Times(
            sum(arm["seconds"] for arm in arms), sum(arm["cpu_seconds"] for arm in arms), made["threads"]
        )


def _from_loader(work: str, keys: list[str], ready: Callable[[], None]) -> Times:
    """Fit or train on the batches of a DataLoader with workers."""
    import torch
    from torch.utils.data import DataLoader

    from uefl_kernels import KMeans
    from uefl_kernels.nn import VectorQuantize

    sizes = {"batches": 20, "rows": 20000} | {
        key: int(value) for key, value in (piece.split("=") for piece in keys)
    }
    layer = VectorQuantize(64, 256)
    optimizer = torch.optim.SGD([weight := torch.eye(64, requires_grad=True)], 0.1)

    def fit(x: torch.Tensor) -> None:
        KMeans(64, n_init=1, max_iter=10, random_state=0).fit(x)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        quantized, _, loss = layer(x @ weight)
        ((quantized - x).square().mean() + loss).backward()
        optimizer.step()

    rows = torch.randn(sizes["rows"], 64, generator=torch.Generator().manual_seed(0))
    each = {"kmeans": fit, "layer": step}[work]
    each(rows)
    batches: Any = [rows] * (sizes["batches"] + 1)  # a DataLoader takes a list, but its annotation does not
    loader = iter(DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    next(loader)  # the workers have started
    ready()
    wall, cpu = time.perf_counter(), time.process_time()
    for x in loader:
        each(x)
    return Times(time.perf_counter() - wall, time.process_time() - cpu, torch.get_num_threads())


def _run(work: str, keys: list[str], runs: int, waiting: str) -> Times:
    """Run in this process as soon as ``runs`` processes are ready.

    Each process has a file in ``waiting``.
    """
    from uefl_kernels.__main__ import spin_briefly

    spin_briefly()

    def ready() -> None:
        (Path(waiting) / str(os.getpid())).touch()
        while len(list(Path(waiting).iterdir())) < runs:
            time.sleep(0.01)

    return (_from_loader if work in ("kmeans", "layer") else _train)(work, keys, ready)


def at_once(preset: str, keys: list[str], runs: int) -> list[Times]:
    """Train this number of runs at the same time, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as waiting, ProcessPoolExecutor(runs, spawn) as pool:
        started = [pool.submit(_run, preset, keys, runs, waiting) for _ in range(runs)]
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
    try:
        turns = [
            (at_once(args.preset, args.set, 1), at_once(args.preset, args.set, args.runs))
            for _ in range(args.turns)
        ]
    except UserError as error:
        parser.error(str(error))
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
