"""The server's side of a run whose clients are other processes: on this machine, started here, or at a SuperLink that is there already."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from flwr.serverapp import Grid

from ..config import Config
from ..data import build
from ..data.federation import Federation
from ..engines.flower import QUIET
from ..engines.flower.address import Address, Unreachable
from ..engines.flower.engine import FlowerEngine
from ..engines.flower.link import connect
from ..engines.flower.members import Members, Report, Roster
from ..errors import RunError, UserError
from .agreement import agree, check_asked, refused
from .processes import Processes, free_port
from .setting import Setting, greeting, task

_START = 120.0  # seconds for processes on this machine to be there
Notice = Callable[[str], None]


class Deployment:
    """A run over Flower: its federation, and an engine for each of its arms.

    Args:
        join: waits for the clients; returns the federation, the Grid and who is there.
        threads: CPU threads of every client; 0: each decides.
    """

    def __init__(self, join: Callable[[Config, Path | None], tuple[Federation, Grid, Roster]], threads: Callable[[], int]) -> None:
        self._join, self._threads = join, threads

    def federation(self, cfg: Config, data_root: Path | None) -> Federation:
        """Wait for all clients; their federation.

        Raises:
            UserError: clients that do not come, or do not go together.
        """
        federation, self._grid, self._members = self._join(cfg, data_root)
        self._setting = Setting.of(cfg, federation, self._threads())
        return federation

    def engine(self, arm: str, started: Callable[[str], None]) -> FlowerEngine:
        """The clients in one arm."""
        return FlowerEngine(self._grid, self._members, task(self._setting, arm), started)


@contextmanager
def on_this_machine(device: str, notice: Notice) -> Iterator[Deployment]:
    """A SuperLink and a process for each client on 127.0.0.1, which end with the context.

    Args:
        device: of the clients.
        notice: called with a line for the user.
    """
    processes = Processes("uefl-flower-")
    processes.environment |= QUIET | {"FLWR_HOME": str(processes.folder / "flwr")}
    processes.environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")

    def stop() -> None:
        logs = processes.stop()
        if logs is not None:
            notice(f"what the clients say of their failures is in {logs}")

    with ExitStack() as stack:
        stack.callback(stop)
        yield Deployment(lambda cfg, root: _start(cfg, root, device, processes, stack), torch.get_num_threads)


def _start(cfg: Config, root: Path | None, device: str, processes: Processes, stack: ExitStack) -> tuple[Federation, Grid, Members]:
    federation = build(cfg.data, kind=cfg.kind, seed=cfg.run.seed, data_root=root)  # type: ignore[arg-type]
    names = [silo.name for silo in (*federation.silos, *federation.unseen)]
    port, parent = free_port(), str(os.getpid())
    address = Address(f"127.0.0.1:{port}", insecure=True)
    listen = ("--insecure", "--isolation", "process", "--host", "127.0.0.1", "--port", str(port))
    superlink = processes.start("superlink", "uefl.deploy.superlink", parent, *listen)
    for name in names:
        where = ("--superlink", address.place, "--device", device, "--parent", parent)
        root_option = () if root is None else ("--data-root", str(root))
        processes.start(name, "uefl", "silo", "--simulate", name, *where, *root_option)

    def admit(report: Report) -> str | None:
        same = report[0].get("federation") == federation.digest
        return refused(report) or (None if same and report[0]["client"] in names else "it has other images than the server expects")

    try:
        address.wait(_START, superlink)
        grid = stack.enter_context(connect(address))
    except Unreachable as error:
        raise RunError(f"{error}; {processes.ended('superlink') or 'see its log'}") from None
    members = Members(grid, greeting(cfg), admit)
    end = time.monotonic() + _START + 5 * len(names)
    while missing := [name for name in names if name not in members.nodes]:
        members.look()
        for name in missing:
            if (last := processes.ended(name)) is not None:
                raise RunError(f"the process of {name} ended before the run began: {last}")
        if members.refused or time.monotonic() > end:
            why = next(iter(members.refused.values()), "it did not report")
            raise RunError(f"{missing[0]} takes no part: {why}")
        time.sleep(0.05)
    return federation, grid, members


@contextmanager
def joined(address: Address, silos: int, secret: bytes | None, patience: float, notice: Notice) -> Iterator[Deployment]:
    """The silos that come to a SuperLink which is there already.

    Args:
        address: of the SuperLink.
        silos: how many take part; the run begins when so many have reported.
        secret: of the SuperLink.
        patience: seconds to wait for them.
        notice: called with a line for the user.
    """
    with ExitStack() as stack:

        def join(cfg: Config, root: Path | None) -> tuple[Federation, Grid, Members]:
            check_asked(cfg)
            try:
                address.wait(patience)
                grid = stack.enter_context(connect(address, secret))
            except Unreachable as error:
                raise UserError(str(error)) from None
            return _gather(cfg, grid, address, silos, patience, notice)

        yield Deployment(join, lambda: 0)


def _gather(cfg: Config, grid: Grid, address: Address, silos: int, patience: float, notice: Notice) -> tuple[Federation, Grid, Members]:
    reports: dict[str, Report] = {}

    def admit(report: Report) -> str | None:
        why = refused(report)
        name = str(report[0]["client"])
        if why is not None:
            return f"silo {name!r}: {why}"
        if name in reports:
            same = reports[name][0]["content"] == report[0]["content"]
            return None if same else f"silo {name!r} came again with other images"
        if len(reports) == silos:
            return f"silo {name!r} came after the run had its {silos} silos"
        reports[name] = report
        notice(f"silo {name} is there ({len(reports)} of {silos})")
        return None

    notice(f"waiting for {silos} silos at {address.place}")
    members, told = Members(grid, greeting(cfg), admit, bound=not address.insecure), 0
    end = time.monotonic() + patience
    while len(reports) < silos:
        members.look()
        for why in list(members.refused.values())[told:]:
            notice(f"left out: {why}")
        told = len(members.refused)
        if time.monotonic() > end:
            there = f"{', '.join(sorted(reports))} of" if reports else "none of"
            raise UserError(f"{there} {silos} silos came to {address.place} in {patience:g} s; start the others, or lower --silos")
        time.sleep(0.05)
    federation = agree(reports, cfg, address.place)
    return federation, grid, members
