"""The address of a SuperLink, and its transport."""

from __future__ import annotations

import ipaddress
import os
import ssl
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

_ABSENT = (502, 503, 504)
"""statuses of HTTP of a proxy before a SuperLink that does not run; Flower retries the same ones"""


class Unreachable(ConnectionError):
    """No SuperLink replies at an address, or its certificate is not valid."""


@dataclass(frozen=True)
class Address:
    """A SuperLink.

    Args:
        place: ``HOST:PORT``.
        insecure: without TLS.
        root_certificates: PEM file of the authorities that sign its certificate; None: the system's.
    """

    place: str
    insecure: bool = False
    root_certificates: bytes | None = None

    @property
    def host(self) -> str:
        """Return the name or number of the machine."""
        return self.place.rpartition(":")[0].strip("[]")

    @property
    def is_loopback(self) -> bool:
        """Return True if nothing that is sent there leaves the machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def avoid_proxy(self) -> None:
        """Bypass the proxy of the environment in this process if all traffic stays on this machine."""
        hosts = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))  # as they are read
        if self.is_loopback and self.host not in hosts.split(","):
            os.environ["no_proxy"] = f"{hosts},{self.host}".strip(",")

    def options(self, folder: Path) -> list[str]:
        """Return the options of Flower's commands that name the trusted certificates.

        Write the certificates to the folder.
        """
        if self.insecure:
            return ["--insecure"]
        if self.root_certificates is None:
            return []
        file = folder / "roots.pem"
        file.write_bytes(self.root_certificates)
        return ["--root-certificates", str(file)]

    def wait(
        self, seconds: float, alive: object = None, notice: Callable[[str], object] = lambda line: None
    ) -> None:
        """Wait until a SuperLink replies at the address with a valid certificate, or raise Unreachable.

        Args:
            seconds: how long to wait until it replies. A bad certificate raises at once.
            alive: a process (``poll()``). Its end also ends the wait.
            notice: called with a line for the user that says why the wait goes on.
        """
        end, told = time.monotonic() + seconds, None
        while True:
            try:
                return self._connect()
            except ssl.SSLError as error:
                why = getattr(error, "verify_message", "") or error.reason or "no TLS there"
                raise Unreachable(
                    f"the SuperLink at {self.place} cannot be trusted: {why}; check the certificates"
                ) from None
            except OSError as error:
                why = f"no SuperLink at {self.place}: {error.strerror or error}"
                ended = alive is not None and alive.poll() is not None  # type: ignore[attr-defined]
                if ended or time.monotonic() > end:
                    raise Unreachable(why) from None
                if why != told:
                    notice(f"{why}; waiting for it")
                told = why
            time.sleep(0.1)

    def _connect(self) -> None:
        """Ask for a page, and raise OSError if no server, or only a proxy, replies."""
        if self.insecure:
            connection = HTTPConnection(self.place, timeout=5)
        else:
            roots = None if self.root_certificates is None else self.root_certificates.decode("ascii")
            context = ssl.create_default_context(cadata=roots)
            connection = HTTPSConnection(self.place, timeout=5, context=context)
        with closing(connection):
            connection.connect()
            status = 0
            with suppress(OSError, HTTPException):  # of a server that is not a SuperLink; Flower says what
                connection.request("GET", "/")
                status = connection.getresponse().status
            if status in _ABSENT:
                raise OSError(f"HTTP {status}")
