"""Measure the slowdown of a run by another run on the same cores.

python -m benchmarks.two_runs [PRESET | kmeans | layer] [--runs 2] [--turns 3] [--most 2.2]
    [--held avx2] [--save] [--set key=value]...

Each run is a process of its own, as ``uefl train`` is. ``kmeans`` fits ``KMeans`` to each batch of a
DataLoader with two workers, and ``layer`` trains a ``VectorQuantize`` on each batch. Both take ``--set
batches=20`` and ``--set rows=20000``. Waiting threads spin briefly, as under the command ``uefl``. The
processes wait for each other before they train, so that all of them train at the same time. Every comparison
is made with the number of threads that is chosen automatically, and with one thread. The exit code is 1 if,
with the automatic number, the median of the ratios is above ``--most``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from uefl.errors import UserError
from uefl_kernels.__main__ import spin_briefly

from . import held, results, round_times


class Times(NamedTuple):
    """The seconds of all arms of a run, its CPU seconds and its threads."""

    wall: float
    cpu: float
    threads: int


def _train(preset: str, keys: list[str], threads: int, ready: Callable[[], None]) -> Times:
    """Train a preset."""
    import uefl
    from uefl import config

    cfg = config.load(preset, [*keys, f"threads={threads}"])
    ready()
    with tempfile.TemporaryDirectory() as folder:
        run = uefl.train(cfg, out=f"{folder}/run", device="cpu")
        made = json.loads((run.path / "made.json").read_text())
        arms = run.summary.values()
        return Times(
            sum(arm["seconds"] for arm in arms), sum(arm["cpu_seconds"] for arm in arms), made["threads"]
        )


def _from_loader(work: str, keys: list[str], threads: int, ready: Callable[[], None]) -> Times:
    """Fit or train on the batches of a DataLoader with workers."""
    import torch
    from torch.utils.data import DataLoader

    from uefl_kernels import KMeans
    from uefl_kernels.nn import VectorQuantize

    if threads:
        torch.set_num_threads(threads)
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


def _run(work: str, keys: list[str], threads: int, runs: int, waiting: str) -> Times:
    """Run in this process as soon as ``runs`` processes are ready.

    Each process has a file in ``waiting``.
    """

    def ready() -> None:
        (Path(waiting) / str(os.getpid())).touch()
        while len(list(Path(waiting).iterdir())) < runs:
            time.sleep(0.01)

    return (_from_loader if work in ("kmeans", "layer") else _train)(work, keys, threads, ready)


def at_once(work: str, keys: list[str], threads: int, runs: int) -> list[Times]:
    """Do the same work in this number of processes at the same time.

    With ``threads`` 0, the number of threads is chosen automatically.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as waiting, ProcessPoolExecutor(runs, spawn) as pool:
        started = [pool.submit(_run, work, keys, threads, runs, waiting) for _ in range(runs)]
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
    held.add_options(parser, results.ROUNDS, "the medians")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(arguments)
    held.restrict(args.held, "benchmarks.two_runs", arguments)
    ways = {
        f"{runs} at once{of_one}": (threads, runs)
        for threads, of_one in ((0, ""), (1, ", one thread"))
        for runs in (1, args.runs)
    }
    timed: dict[str, list[round_times.TurnTimes]] = {way: [] for way in ways}
    used = 1
    spin_briefly()  # here, because a process imports torch before its first line
    try:
        for _ in range(args.turns):
            for way, (threads, runs) in ways.items():
                times = at_once(args.preset, args.set, threads, runs)
                used = times[0].threads if threads == 0 else used
                wall, cpu = max(one.wall for one in times), max(one.cpu for one in times)
                timed[way].append((wall, 0.0, wall, cpu))
    except UserError as error:
        parser.error(str(error))
    name = " ".join(["two runs:", args.preset, *args.set])
    rows = [
        {"round": name} | row | results.about("cpu", ways[row["loop"]][0] or used, args.held)
        for row in round_times.medians(timed)
    ]
    console = Console(width=120)
    console.print(round_times.table(rows, f"{name}, {len(os.sched_getaffinity(0))} cores, {used} thread(s)"))
    ratio = rows[1]["wall_ratio"]
    console.print(f"{args.runs} at once take {ratio:.2f} times as long each; wanted: at most {args.most:g}")
    if args.save:
        console.print(results.save(rows, args.save, results.ROUNDS_KEY))
    return int(ratio > args.most)


if __name__ == "__main__":
    raise SystemExit(main())
