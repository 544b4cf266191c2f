"""What ``uefl train --engine ...`` and ``uefl silo`` do, and what they ask for before they do it."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RunError, UserError

if TYPE_CHECKING:
    from ..engines.flower.address import Address
    from ..report.tables import Table
    from ..run import Deployment as RunDeployment
    from .deployment import Deployment
    from .floor import Floor
    from .workers import Workers

ABOUT_FAULTS = """# What faults do to a deployed run

`uefl chaos --table docs/faults.md` writes this page. Each row was played with real processes on one machine: a SuperLink,
three silos and a run of three rounds. The table holds no times and nothing that depends on the machine: it says what was
broken, what is wanted, what was found, and the exit code. metrics.jsonl and the report name every answer that was left out,
with its round and the reason, but have no text of an exception. A row with "bit for bit" ended with the metrics of the same
run in one process.

"""


@dataclass(frozen=True)
class Flower:
    """A run whose clients are processes of their own, over Flower: ``uefl.train(..., engine=uefl.Flower(...))``.

    Without a ``superlink`` all are started on this machine and end with the run, as with ``engine="flower"``.

    Args:
        superlink: ``HOST:PORT`` of a SuperLink that is there, whose silos take part.
        silos: how many of them; the run begins when so many are there.
        root_certificates: file of those who vouch for the SuperLink; None: the system's.
        secret: file that the SuperLink was started with as ``--superexec-auth-secret-file``.
        insecure: without TLS, off loopback too.
        wait: seconds to wait for the SuperLink, and for the silos.
    """

    superlink: str | None = None
    silos: int | None = None
    root_certificates: str | Path | None = None
    secret: str | Path | None = None
    insecure: bool = False
    wait: float = 600.0

    def deployment(self, device: str, notice: Callable[[str], None]) -> AbstractContextManager[Deployment]:
        """Where a run finds its clients; arguments and errors as of :func:`deployment`."""
        files = {name: None if (path := getattr(self, name)) is None else Path(path) for name in ("root_certificates", "secret")}
        keys = {"superlink": self.superlink, "silos": self.silos, "insecure": self.insecure, "wait": self.wait}
        return deployment(**keys, **files, device=device, notice=notice)  # type: ignore[arg-type]


@contextmanager
def deployment(
    *,
    superlink: str | None,
    silos: int | None,
    root_certificates: Path | None,
    secret: Path | None,
    insecure: bool,
    wait: float,
    device: str,
    notice: Callable[[str], None],
    go_on: str = "uefl train --resume",
) -> Iterator[Deployment]:
    """Where ``uefl train`` finds its clients.

    Args:
        superlink: ``HOST:PORT``; None: one is started on this machine, and a process for each client.
        silos: how many are waited for at a SuperLink that is there already.
        root_certificates: file of those who vouch for the SuperLink; None: the system's.
        secret: file that the SuperLink was started with as ``--superexec-auth-secret-file``.
        insecure: without TLS, off loopback too.
        wait: seconds.
        device: of clients that are started here.
        notice: called with a line for the user.
        go_on: the command that goes on with the run.

    Raises:
        UserError: options that do not go together, or a missing one.
    """
    _check_installed()
    from ..engines.flower.address import Unreachable
    from .deployment import joined, on_this_machine

    if superlink is None:
        if silos is not None or root_certificates is not None or secret is not None or insecure:
            raise UserError("--silos, --root-certificates, --secret and --insecure are for a --superlink; without one all is started here")
        with on_this_machine(device, notice) as started:
            yield started
        return
    address = _address(superlink, root_certificates, insecure)
    if silos is None:
        raise UserError("--superlink: say with --silos how many silos take part; the run begins when so many are there")
    if secret is None and not address.insecure and not address.is_loopback:
        raise UserError("--superlink: give the file of its secret with --secret; see docs/deploy.md, or --insecure to do without")
    try:
        with joined(address, silos, None if secret is None else _content(secret, "--secret"), wait, notice) as found:
            yield found
    except Unreachable as error:
        raise RunError(f"{error}; go on with: {go_on}") from None


def crew(workers: int | None, device: str, notice: Callable[[str], None], go_on: str) -> AbstractContextManager[Workers]:
    """Workers on this machine, for ``uefl train --engine distributed``.

    Args:
        workers: how many; None: one for each GPU, or for each core where the work is done on the CPU.
        device: ``auto``, ``cpu`` or ``cuda``.
        notice: called with a line for the user.
        go_on: the command that goes on with the run.

    Raises:
        UserError: torch has no gloo here, or there is no such device.
    """
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise UserError("this torch was built without gloo, which --engine distributed needs; use --engine local")
    from .workers import on_workers

    return on_workers(*_processes(workers, device), notice, go_on)


def simulation(workers: int | None, device: str, notice: Callable[[str], None], go_on: str) -> AbstractContextManager[Deployment]:
    """Flower's simulation, for ``uefl train --engine ray``; arguments as of :func:`crew`.

    Raises:
        UserError: Flower or Ray is not installed, or there is no such device.
    """
    _check_installed()
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed; install it with: pip install 'uefl[ray]'")
    from .simulation import in_simulation

    return in_simulation(*_processes(workers, device), notice, go_on)


def _processes(workers: int | None, device: str) -> tuple[int, str]:
    """How many processes do the work of all clients, and on what."""
    import torch

    from ..run import chosen_device

    where = chosen_device(device).type
    return workers or (torch.cuda.device_count() if where == "cuda" else len(os.sched_getaffinity(0))), where


def silo(
    *,
    data: Path | None,
    simulate: str | None,
    superlink: str,
    name: str | None,
    root_certificates: Path | None,
    key: Path | None,
    insecure: bool,
    wait: float,
    device: str,
    noise_multiplier: float | None,
    delta: float,
    max_epsilon: float,
    spent: Path | None,
    data_root: Path | None,
    parent: int | None,
) -> None:
    """Serve one client until the process ends.

    Args:
        data: its folder.
        simulate: in the place of a folder, the client of the run's own configuration that this process is.
        superlink: ``HOST:PORT``.
        name: of the silo; None: that of the folder.
        root_certificates: file of those who vouch for the SuperLink; None: the system's.
        key: file of the private key by which the SuperLink knows this silo.
        insecure: without TLS and key, off loopback too.
        wait: seconds for the SuperLink to be there.
        device: ``auto``, ``cpu`` or ``cuda``.
        noise_multiplier: the least noise that this silo works with, as of :class:`.floor.Floor`; None: what the server says.
        delta, max_epsilon: as of :class:`.floor.Floor`.
        spent: the file that counts its updates; None: beside the folder.
        data_root: where torchvision's data sets lie.
        parent: a process with which this one ends.

    Raises:
        UserError: options that do not go together, data that cannot be read, a SuperLink that is not there.
    """
    _check_installed()
    from flwr.supercore.app_utils import start_parent_process_monitor

    from ..engines.flower.address import Unreachable
    from ..engines.flower.codec import on_records
    from ..engines.flower.node import read_key, serve
    from ..run import chosen_device
    from .silo import SiloProgram
    from .sources import Dealt, Source, own

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("uefl").setLevel(logging.INFO)
    if parent is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # by which the monitor ends this; a shell's background jobs ignore it
        start_parent_process_monitor(parent)
    address = _address(superlink, root_certificates, insecure)
    if key is None and not address.is_loopback and not address.insecure:
        raise UserError("--superlink: give this silo's private key with --key; see docs/deploy.md, or --insecure to do without key and TLS")
    if key is not None and address.insecure:
        raise UserError("--key: keys need TLS; leave out --insecure, and give --root-certificates")
    if (data is None) == (simulate is None):
        raise UserError("--data: name the folder of this silo's images")
    where = chosen_device(device)
    source: Source
    if simulate is not None:
        source = Dealt(simulate, data_root)
    else:
        assert data is not None
        source = own(data, name)
    floor = _floor(noise_multiplier, delta, max_epsilon, spent, data)
    try:
        print(f"silo {source.name}, for runs at {address.place}; Ctrl-C ends it", flush=True)
        if floor is not None:
            print(f"silo {source.name} insists on its own noise: {floor.describe()}", flush=True)
        with nullcontext() if floor is None else floor.held():
            serve(address, on_records(SiloProgram(source, where, floor)), None if key is None else read_key(key), patience=wait)
    except (Unreachable, ValueError) as error:
        raise UserError(str(error)) from None


def _floor(noise_multiplier: float | None, delta: float, max_epsilon: float, spent: Path | None, data: Path | None) -> Floor | None:
    from .floor import Floor

    if noise_multiplier is None:
        if max_epsilon or spent is not None:
            raise UserError("--max-epsilon and --spent are for a silo that insists on noise of its own: add --noise-multiplier")
        return None
    if spent is None:
        if data is None:
            raise UserError("--noise-multiplier: name the file that counts the updates with --spent")
        spent = data.resolve().with_name(f"{data.resolve().name}.spent.json")
    return Floor(noise_multiplier, delta, max_epsilon, spent)


ENGINES: dict[str, Callable[..., AbstractContextManager[RunDeployment]]] = {"distributed": crew, "flower": deployment, "ray": simulation}
"""by the name of ``--engine``, where ``uefl train`` finds its clients"""


def play_all(names: list[str], file: Path | None, progress: Callable[[str], None]) -> tuple[Table, int]:
    """Play scenarios of :mod:`.chaos.scenarios`, all where none is named.

    Args:
        names: of the scenarios.
        file: a Markdown file that gets the table; None: none is written.
        progress: called with a line as each scenario begins.

    Returns:
        What became of each, and how many are not as wanted.

    Raises:
        UserError: a name that no scenario has.
    """
    _check_installed()
    from ..report.tables import Table
    from .chaos.scenarios import SCENARIOS, theatre

    for name in names:
        if name not in SCENARIOS:
            raise UserError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    rows, failed = [], 0
    with theatre() as play:
        for name in dict.fromkeys(names or SCENARIOS):
            scenario = SCENARIOS[name]
            progress(f"{name}: {scenario.fault} ...")
            try:
                found, right = play(name), "yes"
            except AssertionError as error:
                found, right = str(error), "NO"
                failed += 1
                progress(f"{name}: not as wanted: {found}")
            rows.append([name, scenario.fault, scenario.wanted, found, right])
    table = Table("faults", ["name", "fault", "wanted", "found", "as wanted"], rows, numeric=False)
    if file is not None:
        file.write_text(ABOUT_FAULTS + table.markdown(), encoding="utf-8")
    return table, failed


def _check_installed() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UserError("Flower is not installed; install it with: pip install 'uefl[flower]'")


def _address(superlink: str, root_certificates: Path | None, insecure: bool) -> Address:
    """TLS but where the user says otherwise, or nothing leaves the machine."""
    from ..engines.flower.address import Address, parse

    try:
        place = parse(superlink)
    except ValueError as error:
        raise UserError(f"--superlink: {error}") from None
    if insecure and root_certificates is not None:
        raise UserError("--root-certificates and --insecure exclude each other")
    root = None if root_certificates is None else _content(root_certificates, "--root-certificates")
    if root is not None and b"BEGIN CERTIFICATE" not in root:
        raise UserError(f"--root-certificates: {root_certificates} holds no certificate; expected PEM, as server.pem in docs/deploy.md")
    return Address(place, insecure or (root is None and Address(place).is_loopback), root)


def _content(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read ({error.strerror})") from None
