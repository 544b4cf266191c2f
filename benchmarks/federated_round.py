"""Measure the seconds of a federated round of a preset: training and evaluation in every client.

python -m benchmarks.federated_round [PRESET] [--arm uefl] [--threads 1] [--rounds 3] [--set key=value]...
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from uefl import config
from uefl.algorithms.base import Context, find
from uefl.client.client import Clients
from uefl.client.together import together
from uefl.client.workspace import Workspace
from uefl.config import Config
from uefl.data import Federation, build
from uefl.engines.base import Engine
from uefl.engines.in_process import LocalEngine
from uefl.server.rounds import ServerLoop
from uefl.server.teacher import Teacher

_FOLDER = TemporaryDirectory()


def arm_of(
    cfg: Config,
    name: str,
    federation: Federation,
    device: str = "cpu",
    engine: Engine | None = None,
    network: Callable[[], nn.Module] | None = None,
) -> tuple[ServerLoop, Workspace]:
    """Return an arm of a configuration without an ensemble.

    Its clients are in this process or where ``engine`` has them. ``network`` builds the network instead of
    the configuration's.
    """
    names = tuple(sorted(client.name for client in federation.clients))
    context = Context(
        cfg.run.seed, cfg.run, cfg.model, cfg.training, federation.classes, federation.shape, names, network
    )
    algorithm = find(cfg.arms[name].algorithm)(cfg.arms[name].parameters).bound(context)
    workspace = Workspace(algorithm, cfg.data, federation, torch.device(device))
    if engine is None:
        clients = Clients(federation.clients, workspace.device).handlers(workspace)
        engine = LocalEngine(clients, group=together(clients, workspace))
    teacher = (
        Teacher(federation.server, workspace)
        if federation.server is not None and federation.server.labeled is not None
        else None
    )
    return ServerLoop(
        name, workspace, [cfg.run.seed], engine, Path(_FOLDER.name) / "private", teacher
    ), workspace


def main() -> None:
    """Time a few rounds after an uncounted one, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="demo")
    parser.add_argument("--arm", default="uefl")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cfg = config.load(args.preset, args.set)
    federation = build(cfg.data, kind=cfg.kind, seed=cfg.run.seed)
    arm, workspace = arm_of(cfg, args.arm, federation)
    times: dict[str, list[float]] = {"train": [], "measure": []}
    for _ in range(1 + args.rounds):
        for what in times:
            begun = time.perf_counter()
            arm.exchange(measure=what == "measure", train=what == "train")
            times[what].append(time.perf_counter() - begun)
    medians = {what: statistics.median(values[1:]) for what, values in times.items()}
    table = Table(
        title=(
            f"{args.preset}, arm {args.arm}, {len(federation.clients)} clients, {args.threads} thread(s),"
            f" bf16 {workspace.autocast}"
        )
    )
    for column in ("train s", "measure s", "round s"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{seconds:.2f}" for seconds in (*medians.values(), sum(medians.values()))))
    Console().print(table)


if __name__ == "__main__":
    main()
