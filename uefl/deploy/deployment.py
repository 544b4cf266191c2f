"""The server's side of a run with clients in other processes.

The clients are processes of this machine, or silos at a running SuperLink.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from ..config import Config
from ..data.federation import Federation
from ..engines.base import Engine
from ..engines.codec import Header, Packet
from ..engines.flower import QUIET, commands
from ..engines.flower.address import Address, Unreachable
from ..engines.flower.engine import ClientNodes, FlowerEngine
from ..engines.flower.link import Link, connect
from ..engines.processes import Processes
from ..errors import RunError, UnfitClient, UserError, listed
from ..folder import Silos
from ..server.checks import printable
from .agreement import agree, check_asked, fitting
from .report import SiloReport, read
from .setting import Setting, greeting, task, without_files
from .sources import simulated

_START = 120.0  # seconds that processes on this machine have to connect
Notice = Callable[[str], None]
Started = Callable[[str], None]
Check = Callable[[Federation], object]
Joined = tuple[Federation, Callable[[Header, Started], Engine], Silos]
"""a federation, a function that returns an engine for its clients, and the stored facts about the silos"""


class Deployment:
    """A run with clients in other processes: its federation, and an engine for each of its arms.

    Args:
        join: waits for the clients, given the stored facts of a resumed run.
        own_data: whether the clients are silos with their own data. A silo chooses its number of threads,
            gets no names of files, and keeps its private state itself.
    """

    def __init__(
        self, join: Callable[[Config, Path | None, Silos, Check], Joined], *, own_data: bool = False
    ) -> None:
        self._join, self.clients_keep_states = join, own_data
        self.silos: Silos = {}

    def federation(
        self, cfg: Config, data_root: Path | None, known: Silos, check: Check = lambda federation: None
    ) -> Federation:
        """Wait for all clients and return their federation.

        The arguments are as for :class:`uefl.run.ClientPool`. If ``check`` raises UnfitClient for a silo, the
        silo is refused, and another one may take its place.
        """
        if self.clients_keep_states:
            check_asked(cfg)
        self._federation, self._engine, self.silos = self._join(cfg, data_root, known, check)
        if not self.clients_keep_states:
            check(self._federation)
        self._cfg = without_files(cfg) if self.clients_keep_states else cfg
        return self._federation

    def engine(self, arm: str, started: Started) -> Engine:
        """Return an engine for the clients in one arm."""
        threads = 0 if self.clients_keep_states else torch.get_num_threads()
        setting = Setting.of(self._cfg, self._federation, threads)
        return self._engine(task(setting, arm), started)


@contextmanager
def on_this_machine(device: str, notice: Notice) -> Iterator[Deployment]:
    """Start a SuperLink and a process for each client on 127.0.0.1, and end them with the context."""
    folder = Path(mkdtemp(prefix="uefl-flower-"))
    processes = Processes(folder, FLWR_HOME=str(folder / "flwr"), **QUIET)
    with ExitStack() as stack:
        stack.callback(processes.stop, notice, "clients")
        yield Deployment(lambda cfg, root, *_: _start(cfg, root, device, processes, stack))


def _start(cfg: Config, root: Path | None, device: str, processes: Processes, stack: ExitStack) -> Joined:
    federation = simulated(cfg, root)
    names = list(federation.by_name)
    port = commands.free_port()
    address = Address(f"127.0.0.1:{port}", insecure=True)
    listen = ("--insecure", "--isolation", "process", "--host", "127.0.0.1", "--port", str(port))
    superlink = processes.start("superlink", commands.__name__, "flower-superlink", *listen)
    for name in names:
        where = ("--superlink", address.place, "--device", device)
        root_option = () if root is None else ("--data-root", str(root))
        processes.start(name, "uefl", "silo", "--simulate", name, *where, *root_option)

    silos: Silos = {}

    def admit(report: Packet) -> str | None:
        try:
            found = read(report)
        except UserError as error:
            return str(error)
        if report.header.get("federation") != federation.digest or found.client not in names:
            return "it has other images than the server expects"
        silos[found.client] = found.program
        return None

    try:
        address.wait(_START, superlink)
        link = stack.enter_context(connect(address))
    except Unreachable as error:
        raise RunError(f"{error}; {processes.ended('superlink') or 'see its log'}") from None
    roster = ClientNodes(link, greeting(cfg), admit)
    end = time.monotonic() + _START + 5 * len(names)
    while missing := [name for name in names if name not in roster.nodes]:
        roster.refresh()
        for name in missing:
            if (last := processes.ended(name)) is not None:
                raise RunError(f"the process of {name} ended before the run began: {last}")
        if roster.refused or time.monotonic() > end:
            why = next(iter(roster.refused.values()), "it did not report")
            raise RunError(f"{missing[0]} cannot take part: {why}")
        time.sleep(0.05)
    return federation, partial(FlowerEngine, link, roster), silos


@contextmanager
def joined(
    address: Address, silos: int, secret: Path | None, patience: float, notice: Notice
) -> Iterator[Deployment]:
    """Wait for a number of silos at a running SuperLink, and yield a deployment with them.

    Args:
        secret: the file with the secret of the SuperLink.
        patience: seconds to wait for the silos.
    """
    with ExitStack() as stack:

        def join(cfg: Config, root: Path | None, known: Silos, check: Check) -> Joined:
            try:
                address.wait(patience, notice=notice)
                link = stack.enter_context(connect(address, secret, notice))
            except Unreachable as error:
                raise UserError(str(error)) from None
            return gather(cfg, link, address, silos, patience, notice, known, check)

        yield Deployment(join, own_data=True)


class _Admission:
    """Admit silos by their reports to a run that waits for a number of them."""

    def __init__(self, cfg: Config, silos: int, notice: Notice) -> None:
        self._cfg, self._silos, self._notice = cfg, silos, notice
        self.reports: dict[str, SiloReport] = {}
        """the report of each admitted silo, by name"""
        self.begun = False
        """whether the run has its silos"""

    def __call__(self, packet: Packet) -> str | None:
        """Take a report, or return why its silo is refused."""
        name = packet.header["client"]
        try:
            report = read(packet)
        except UserError as error:
            return printable(f"silo {name!r}: {error}")
        if name in self.reports:
            if not report.has_data_of(self.reports[name]):
                return f"silo {name!r} connected again with other data"
            before = self.reports[name].program
            self.note_change(name, before, report.program, "before it connected again")
            self.reports[name] = report
            return None
        if self.begun:
            return self.late(name)
        if report.kind != self._cfg.kind:
            return f"silo {name!r} has {report.kind} data, the arms need {self._cfg.kind}"
        self.reports[name] = report
        there, why_not = fitting(self.reports, self._cfg)
        self._notice(
            f"silo {name} is connected ({len(there)} of {self._silos})"
            if name in there
            else f"silo {name} cannot take part: {why_not[name]}"
        )
        return None

    def late(self, name: str) -> str:
        """Return the reason to refuse a silo that the run does not need."""
        return f"silo {name!r} connected after the run had its {self._silos} silos"

    def note_change(self, name: str, before: Mapping[str, str], now: Mapping[str, str], when: str) -> None:
        """Note that a silo has another precision or version of torch than before."""
        for key, words in (("precision", "in"), ("torch", "with torch")):
            if before.get(key, now[key]) != now[key]:
                self._notice(
                    f"silo {name} computes {words} {now[key]}, {when} {words} {before[key]}: the results"
                    " differ in the last bits from a run without this change"
                )


def gather(
    cfg: Config,
    link: Link,
    address: Address,
    silos: int,
    patience: float,
    notice: Notice,
    known: Silos,
    check: Check,
) -> Joined:
    """Wait for silos and return their federation, with the stored facts of a resumed run in ``known``."""
    notice(f"waiting for {silos} silos at {address.place}")
    bound = None if address.insecure else {name: silo["key"] for name, silo in known.items() if "key" in silo}
    admission = _Admission(cfg, silos, notice)
    reports = admission.reports
    roster = ClientNodes(link, greeting(without_files(cfg)), admission, bound=bound)
    reported: dict[int, str] = {}
    end = time.monotonic() + patience
    federation = None
    while federation is None:
        roster.refresh()
        together, unfit = fitting(reports, cfg)
        for node, why in roster.refused.items():
            if reported.get(node) != why:
                notice(f"refused: {why}")
        reported = dict(roster.refused)
        if len(together) < silos and time.monotonic() > end:
            refused = listed(dict.fromkeys([*roster.refused.values(), *unfit.values()]))
            raise UserError(
                f"{listed(sorted(together)) or 'none'} of {silos} silos came to {address.place} in"
                f" {patience:g} s"
                + (f"; refused: {refused}; remove the cause" if refused else "; start the others")
                + ", or lower --silos"
            )
        time.sleep(0.05)
        if len(together) >= silos:
            taken = {name: reports[name] for name in together[:silos]}
            federation = agree(taken, cfg, address.place)
            try:
                check(federation)
            except UnfitClient as error:
                roster.refuse(error.client, str(error))
                del reports[error.client]
                federation = None
    admission.begun = True
    for name in reports.keys() - taken.keys():
        roster.refuse(name, unfit.get(name, admission.late(name)))
        del reports[name]
    found = {name: report.program for name, report in sorted(reports.items())}
    for name, key in (roster.keys or {}).items():
        if name in found:
            found[name]["key"] = key
    for name, facts in found.items():
        admission.note_change(name, known.get(name, {}), facts, "before the run was resumed")
    return federation, partial(FlowerEngine, link, roster), found
