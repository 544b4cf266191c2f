"""The server's side of a run with clients dealt over workers on this machine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp

import torch

from ..config import Config
from ..data import build
from ..data.federation import Federation
from ..engines import faults
from ..engines.codec import Packet
from ..engines.distributed.engine import DistributedEngine
from ..engines.distributed.worker_pool import WorkerPool
from ..engines.frames import ConnectionLost
from ..engines.processes import Processes
from ..errors import RunError
from ..folder import Silos
from .setting import Setting, greeting, task

Notice = Callable[[str], None]
_MOMENT = 5.0  # seconds


@contextmanager
def on_workers(
    count: int, device: str, notice: Notice, go_on: str, module: str = "uefl.deploy.worker"
) -> Iterator[Workers]:
    """Start worker processes that end with the context.

    Args:
        count: of the workers.
        device: theirs, ``cpu`` or ``cuda``.
        notice: called with a line for the user.
        go_on: the command that continues the run.
        module: the program of a worker.

    Raises:
        RunError: a worker has ended in the middle of the run.
    """
    processes = Processes(Path(mkdtemp(prefix="uefl-workers-")))
    with ExitStack() as stack:
        try:
            yield Workers(count, device, notice, processes, stack, module)
        except ConnectionLost as error:
            raise RunError(f"{_ended_process(processes) or error}; continue with: {go_on}") from None
        finally:  # before the stack is left: its threads wait for the workers' last lines
            logs = processes.stop()
            if logs is not None:
                notice(f"the logs of the failed workers are in {logs}")


def _ended_process(processes: Processes) -> str | None:
    """Return which process has ended and why, or None. Wait a moment: its connection closes first."""
    until = time.monotonic() + _MOMENT
    while time.monotonic() < until:
        for name in processes.all:
            if (why := processes.ended(name)) is not None:
                return f"{name} has ended: {why}"
        time.sleep(0.02)
    return None


class Workers:
    """A run over workers: its federation, and an engine for each of its arms.

    Args:
        count: of the workers.
        device: theirs, ``cpu`` or ``cuda``.
        notice: called with a line for the user.
        processes: starts them.
        stack: closed after the workers have ended.
        module: their program.
    """

    def __init__(
        self, count: int, device: str, notice: Notice, processes: Processes, stack: ExitStack, module: str
    ) -> None:
        self._count, self._device, self._notice = count, device, notice
        self._processes, self._stack, self._module = processes, stack, module
        self._workers: WorkerPool | None = None
        self.clients_keep_states = False
        self.silos: Silos = {}

    def federation(self, cfg: Config, data_root: Path | None, known: Silos) -> Federation:
        """Build the federation here, and check that the workers build the same one.

        Raises:
            UserError: the clients cannot be built.
            RunError: a worker does not start, or has other images.
        """
        federation = build(cfg.data, kind=cfg.kind, seed=cfg.run.seed, data_root=data_root)  # type: ignore[arg-type]
        self.take(cfg, federation, data_root)
        return federation

    def take(self, cfg: Config, federation: Federation, data_root: Path | None = None) -> None:
        """Give the workers the clients of a federation. The first call starts the workers."""
        if self._workers is None:
            self._workers = self._start(data_root)
        for _ in [self._workers.ask(rank, Packet(greeting(cfg), {})) for rank in self._workers.ranks]:
            while (found := self._workers.reply(1.0)) is None:
                pass
            header, _ = found[1]
            if header["error"] is not None or header["federation"] != federation.digest:
                why = (
                    "it has other images than the server"
                    if header["error"] is None
                    else faults.describe(header["error"])
                )
                raise RunError(f"a worker takes no part: {why}")
        self._names = [client.name for client in (*federation.clients, *federation.unseen)]
        self._cfg, self._federation = cfg, federation

    def engine(self, arm: str, started: Callable[[str], None]) -> DistributedEngine:
        """Return an engine for the clients in one arm."""
        assert self._workers is not None
        # not before the run has chosen its threads
        setting = Setting.of(self._cfg, self._federation, torch.get_num_threads())
        return DistributedEngine(self._workers, self._names, task(setting, arm), started)

    def _start(self, data_root: Path | None) -> WorkerPool:
        _note_oversubscription(self._count, self._device, self._notice)
        root = [] if data_root is None else [str(data_root)]
        ends = []
        for rank in range(1, self._count + 1):
            end, theirs = socket.socketpair()
            place = (str(theirs.fileno()), str(rank), self._device)
            self._processes.start(f"worker-{rank}", self._module, *place, *root, inherited=[theirs.fileno()])
            theirs.close()
            ends.append(end)
        workers = WorkerPool(ends)
        self._stack.callback(workers.close)
        return workers


def _note_oversubscription(processes: int, device: str, notice: Notice) -> None:
    """Note that the processes have more threads than there are cores."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if device == "cpu" and threads > 1 and processes * threads > cores:
        crowd = f"{processes} processes with {threads} threads each on {cores} cores slow each other down"
        notice(f"note: {crowd}; set threads = {max(1, cores // processes)}")
