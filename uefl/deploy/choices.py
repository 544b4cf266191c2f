"""The engines that ``--engine`` and ``uefl.train(engine=...)`` name.

The module has their options and the checks before a run begins. An engine imports its packages when it is
used.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RunError, UserError
from ..paths import read_bytes

if TYPE_CHECKING:
    from ..engines.flower.address import Address
    from .deployment import Deployment


@dataclass(frozen=True)
class Distributed:
    """A run with clients dealt over workers, processes of this machine.

    Usage: ``uefl.train(..., engine=uefl.Distributed(workers=2))``.

    Args:
        workers: number of processes; None: one for each GPU, or one for each core if the clients train on the
            CPU.
    """

    workers: int | None = None

    def deployment(
        self, device: str, notice: Callable[[str], None], go_on: str
    ) -> AbstractContextManager[Deployment]:
        """Return the clients of a run.

        Args:
            device: device of the workers: ``auto``, ``cpu`` or ``cuda``.
            notice: called with a line for the user.
            go_on: the command that continues the run.

        Raises:
            UserError: the device does not exist, or the number of workers is below 1.
        """
        import torch

        from ..run import chosen_device
        from .workers import on_workers

        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers: expected 1 or more, got {self.workers}")
        where = chosen_device(device).type
        most = torch.cuda.device_count() if where == "cuda" else len(os.sched_getaffinity(0))
        return on_workers(self.workers or most, where, notice, go_on)


@dataclass(frozen=True)
class Flower:
    """A run with each client in a process of its own, over Flower.

    Usage: ``uefl.train(..., engine=uefl.Flower(...))``.

    Without a ``superlink``, a SuperLink and all clients start on this machine and end with the run, as with
    ``engine="flower"``.

    Args:
        superlink: ``HOST:PORT`` of a running SuperLink. Its silos take part.
        silos: number of silos; the run begins when this number is connected.
        root_certificates: file with the root certificates for the SuperLink; None: the system's.
        secret: file that the SuperLink was started with as ``--superexec-auth-secret-file``.
        insecure: use no TLS, even between machines.
        wait: seconds to wait for the SuperLink, and for the silos.
        strict: whether to refuse a secret that other users of this machine may read. Otherwise a notice
            reports it.
    """

    superlink: str | None = None
    silos: int | None = None
    root_certificates: str | Path | None = None
    secret: str | Path | None = None
    insecure: bool = False
    wait: float = 600.0
    strict: bool = False

    @contextmanager
    def deployment(self, device: str, notice: Callable[[str], None], go_on: str) -> Iterator[Deployment]:
        """Return the clients of a run, with the arguments of :meth:`Distributed.deployment`.

        Raises:
            UserError: options exclude each other, or an option is missing.
            RunError: no SuperLink replies at the address.
        """
        check_installed()
        from ..engines.flower.address import Unreachable
        from .deployment import joined, on_this_machine

        if self.superlink is None:
            if self.insecure or {self.silos, self.root_certificates, self.secret} != {None}:
                raise UserError(
                    "--silos, --root-certificates, --secret and --insecure need --superlink; without"
                    " --superlink, all processes start on this machine"
                )
            run = on_this_machine(device, notice)
        else:
            address = checked_address(self.superlink, self.root_certificates, self.insecure)
            if self.silos is None:
                raise UserError(
                    "--superlink: give the number of silos with --silos; the run begins when all silos are"
                    " connected"
                )
            if self.silos < 1:
                raise UserError(f"--silos: expected 1 or more silos, got {self.silos}")
            if self.secret is None and not address.insecure and not address.is_loopback:
                raise UserError(
                    "--superlink: give the file of the SuperLink's secret with --secret, or use --insecure;"
                    " see `uefl train --help`"
                )
            if self.secret is not None:
                content(self.secret, "--secret")
                check_private(self.secret, "--secret", self.strict, notice)
            secret = None if self.secret is None else Path(self.secret)
            run = joined(address, self.silos, secret, self.wait, notice)
        try:
            with run as deployment:
                yield deployment
        except Unreachable as error:
            raise RunError(f"{error}; continue with: {go_on}") from None


Choice = Distributed | Flower
CHOICES: dict[str, type[Choice]] = {"distributed": Distributed, "flower": Flower}
"""options by the name of ``--engine``; ``local`` has none"""


def check_installed() -> None:
    """Raise UserError if Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise UserError(
            "Flower is not installed; install it in a clone of uefl with: pip install '.[flower]'"
        )


def checked_address(superlink: str, root_certificates: str | Path | None, insecure: bool) -> Address:
    """Return the address of a SuperLink, with TLS unless the user disables TLS or nothing leaves the machine.

    Raises:
        UserError: the address is not ``HOST:PORT``, or a certificate is missing or given without need.
    """
    from ..engines.flower.address import Address

    host, _, port = superlink.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--superlink: expected HOST:PORT, got {superlink!r}")
    if insecure and root_certificates is not None:
        raise UserError("--root-certificates and --insecure exclude each other")
    root = None if root_certificates is None else content(root_certificates, "--root-certificates")
    if root is not None and b"BEGIN CERTIFICATE" not in root:
        raise UserError(
            f"--root-certificates: {root_certificates} holds no certificate; expected PEM, with BEGIN"
            " CERTIFICATE in its first line"
        )
    return Address(superlink, insecure or (root is None and Address(superlink).is_loopback), root)


def check_private(path: str | Path, option: str, strict: bool, warn: Callable[[str], None]) -> None:
    """Warn if other users of this machine may read the file or folder of a key or a secret.

    Raises:
        UserError: with ``strict``, if they may read it.
    """
    if Path(path).stat().st_mode & 0o077:
        advice = f"remove their access with: chmod {700 if Path(path).is_dir() else 600} {path}"
        line = f"{option}: other users of this machine may read {path}; {advice}"
        if strict:
            raise UserError(line)
        warn(line)


def content(path: str | Path, option: str) -> bytes:
    """Return the content of the file that an option names."""
    try:
        return read_bytes(Path(path))
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read ({error.strerror})") from None
