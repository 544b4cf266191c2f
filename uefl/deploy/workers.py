"""A run with clients dealt over workers, processes of this machine: the server's side, and a worker's.

A worker is ``python -m uefl.deploy.workers SOCKET RANK DEVICE [DATA_ROOT]``.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from ..config import Config
from ..engines import faults
from ..engines.codec import Packet, decode
from ..engines.distributed import DistributedEngine, Worker, serve
from ..engines.frames import ConnectionLost
from ..engines.processes import Processes, end_with_parent
from ..errors import RunError
from .deployment import Deployment, Joined, Notice
from .setting import greeting
from .silo import SiloProgram
from .sources import ClientSource, simulated

_MOMENT = 5.0  # seconds


@contextmanager
def on_workers(
    count: int, device: str, notice: Notice, go_on: str, module: str = "uefl.deploy.workers"
) -> Iterator[Deployment]:
    """Start worker processes that end with the context.

    The first federation starts the workers. Each worker builds each federation too, and must get the same
    one.

    Args:
        count: number of workers.
        device: theirs, ``cpu`` or ``cuda``.
        go_on: the command that continues the run.
        module: the program of a worker.
    """
    processes = Processes(Path(mkdtemp(prefix="uefl-workers-")))
    workers: list[Worker] = []

    def join(cfg: Config, data_root: Path | None, *rest: object) -> Joined:
        federation = simulated(cfg, data_root)
        if not workers:
            _note_oversubscription(count, device, notice)
            root = [] if data_root is None else [str(data_root)]
            workers.extend(_start(processes, module, rank, device, *root) for rank in range(1, count + 1))
        for reply in [worker.ask(Packet(greeting(cfg), {})) for worker in workers]:
            header, _ = decode(reply.result())
            why = None if header["error"] is None else faults.describe(header["error"])
            if why is not None or header["federation"] != federation.digest:
                raise RunError(f"a worker cannot take part: {why or 'it has other images than the server'}")
        return federation, partial(DistributedEngine, workers, federation.by_name), {}

    try:
        yield Deployment(join)
    except ConnectionLost as error:
        raise RunError(f"{_ended_process(processes) or error}; continue with: {go_on}") from None
    finally:
        processes.stop(notice, "workers")
        for worker in workers:
            worker.close()


def _start(processes: Processes, module: str, rank: int, *arguments: str) -> Worker:
    end, theirs = socket.socketpair()
    with theirs:
        file = theirs.fileno()
        processes.start(f"worker-{rank}", module, str(file), str(rank), *arguments, inherited=[file])
    return Worker(end)


def _ended_process(processes: Processes) -> str | None:
    """Return which process has ended and why, or None after a moment: its connection closes first."""
    until = time.monotonic() + _MOMENT
    while time.monotonic() < until:
        for name in processes.all:
            if (why := processes.ended(name)) is not None:
                return f"{name} has ended: {why}"
        time.sleep(0.02)
    return None


def _note_oversubscription(processes: int, device: str, notice: Notice) -> None:
    """Note that the processes have more threads than there are cores."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if device == "cpu" and threads > 1 and processes * threads > cores:
        crowd = f"{processes} processes with {threads} threads each on {cores} cores slow each other down"
        notice(f"note: {crowd}; set threads = {max(1, cores // processes)}")


def work(end: int, rank: int, device: str, source: ClientSource) -> None:
    """Reply to the server at the socket with this descriptor, until one of the two ends.

    With the device ``cuda`` and enough GPUs, worker i, counted from 1, takes GPU i.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    end_with_parent(interrupted=False)  # even in the middle of a client's work
    where = torch.device(device)
    if device != "cpu":
        where = torch.device("cuda", (rank - 1) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    serve(socket.socket(fileno=end), SiloProgram(source, where))


if __name__ == "__main__":
    end, rank, device, *root = sys.argv[1:]
    work(int(end), int(rank), device, ClientSource(None, Path(root[0]) if root else None))
