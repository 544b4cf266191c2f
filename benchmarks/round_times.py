"""Time loops of federated rounds in turns, and print a table.

All loops have the same data, threads and instruction set.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from uefl.config import Config
from uefl.data import Federation
from uefl.engines.base import Engine

from . import results
from .federated_round import arm_of
from .held import add_options

TurnTimes = tuple[float, float, float, float]
"""seconds of training, of measuring, of both, and of CPU"""


class Loop(Protocol):
    """A way to run a federated round."""

    def train(self) -> None:
        """Train every client, and average."""

    def measure(self) -> None:
        """Evaluate the model on the test images of every client."""


class UeflLoop:
    """An arm as ``uefl train`` runs it.

    Args:
        cfg, name: the configuration, and which of its arms.
        federation: the clients.
        device: ``cpu`` or ``cuda``.
        engine: where the clients are, if not in this process.
        network: builds the network, instead of the one of the configuration.
    """

    def __init__(
        self,
        cfg: Config,
        name: str,
        federation: Federation,
        device: str = "cpu",
        engine: Engine | None = None,
        network: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.arm, self.workspace = arm_of(cfg, name, federation, device, engine, network)

    def train(self) -> None:
        """Train every client, and average."""
        self.arm.exchange(measure=False, train=True)
        self.arm.trained += 1
        self.arm.round += 1

    def measure(self) -> None:
        """Evaluate the model on the test images of every client."""
        self.arm.exchange(measure=True, train=False)


def parser(description: str | None, preset: str | None = None) -> argparse.ArgumentParser:
    """Return the parser with the options of every comparison of rounds.

    Args:
        description: description of the comparison.
        preset: the default preset; None: the comparison takes no preset and has no published loop.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if preset is not None:
        made.add_argument("preset", nargs="?", default=preset)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--turns", type=int, default=3)
    add_options(made, results.ROUNDS, "the medians")
    if preset is not None:
        made.add_argument("--bf16", action="store_true", help="the published loop also with bfloat16")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return made


def compare(loops: Mapping[str, Loop], title: str, args: argparse.Namespace) -> None:
    """Time a few rounds of every loop in turn, after an uncounted one, and print the medians.

    The first loop is uefl.
    """
    console = Console(width=120)
    timed: dict[str, list[TurnTimes]] = {name: [] for name in loops}
    for turn in range(1 + args.turns):
        for name, loop in loops.items():
            timed[name].append(_time(loop))
        line = ", ".join(
            f"{name} {values[-1][2]:.1f} s (CPU {values[-1][3]:.1f})" for name, values in timed.items()
        )
        console.print(f"turn {turn or 'not counted'}: {line}", highlight=False)
    about = results.about(getattr(args, "device", "cpu"), args.threads, args.held)
    counted = {name: values[1:] for name, values in timed.items()}
    rows = [{"round": " ".join([args.preset, *args.set])} | row | about for row in medians(counted)]
    console.print(table(rows, f"{title}, {args.threads} thread(s)"))
    if args.save:
        console.print(results.save(rows, args.save, results.ROUNDS_KEY))


def medians(timed: Mapping[str, list[TurnTimes]]) -> list[dict[str, Any]]:
    """Return the medians of each loop over the turns.

    Ratios are relative to the first loop and are taken turn by turn. The CPU ratio has its range.
    """
    ours, *_ = timed.values()
    rows: list[dict[str, Any]] = []
    for name, values in timed.items():
        train, measure, whole, cpu = (statistics.median(piece) for piece in zip(*values, strict=True))
        wall_ratio, cpu_ratio = (
            sorted(theirs[i] / mine[i] for theirs, mine in zip(values, ours, strict=True)) for i in (2, 3)
        )
        row = {
            "loop": name,
            "turns": len(values),
            "train_s": train,
            "measure_s": measure,
            "wall_s": whole,
            "cpu_s": cpu,
        }
        ratios = {"wall_ratio": statistics.median(wall_ratio), "cpu_ratio": statistics.median(cpu_ratio)}
        rows.append(row | ratios | {"cpu_least": cpu_ratio[0], "cpu_most": cpu_ratio[-1]})
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the rows as a table for the terminal."""
    made = Table(
        title=title,
        caption="{machine}, torch {torch}, commit {commit}, {date}; medians of {turns} turns".format(
            **rows[0]
        ),
    )
    for column in (
        "loop",
        "train s",
        "measure s",
        "wall s",
        "rounds/min",
        "of ours",
        "CPU s",
        "of ours",
        "turns",
    ):
        made.add_column(column, justify="left" if column == "loop" else "right")
    for row in rows:
        numbers = (
            row["train_s"],
            row["measure_s"],
            row["wall_s"],
            60 / row["wall_s"],
            row["wall_ratio"],
            row["cpu_s"],
            row["cpu_ratio"],
        )
        made.add_row(
            row["loop"], *(f"{x:.2f}" for x in numbers), f"{row['cpu_least']:.2f} to {row['cpu_most']:.2f}"
        )
    return made


def _time(loop: Loop) -> TurnTimes:
    other_cpu: Callable[[], float] = getattr(
        loop, "other_cpu", float
    )  # CPU seconds of other processes of the loop

    def cpu() -> float:
        return _cpu() + other_cpu()

    moments = [(time.perf_counter(), cpu())]
    for work in (loop.train, loop.measure):
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        moments.append((time.perf_counter(), cpu()))
    (begin, cpu), (trained, _), (end, cpu_end) = moments
    return trained - begin, end - trained, end - begin, cpu_end - cpu


def _cpu() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)
