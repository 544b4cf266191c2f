"""The server's end of Flower: a run at a SuperLink.

``flwr run`` asks for the run. ``flower-superexec`` starts its program, the ServerApp of
:mod:`uefl.deploy.app`, which connects to this process. This process keeps the run folder, the progress and
the end by Ctrl-C. A SuperLink with ``--isolation process`` does not start the program itself. The programs of
all runs are the same. So if several programs begin at the same time, a process may get any of them.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from .. import faults
from ..codec import Packet, Unreadable, decode, encode
from ..frames import ConnectionLost, receive, send
from ..processes import Processes, temporary
from . import QUIET, RUN, commands
from .address import Address, Unreachable

_PATIENCE = 60.0  # seconds for the program of a run to be started
_ABSENCE = 120.0  # seconds for which a SuperLink may be unreachable in a run
_END = 10.0  # seconds for the program of a run to report its end to the SuperLink
_AGAIN = 3.0  # seconds between two requests of a run, if the SuperLink fails
_SERVER_ERROR = re.compile("Server error '(5[^']*)'")  # as httpx, and so `flwr`, words it
_APP = """[project]
name = "uefl"
version = "1.0.0"
description = "Names programs that uefl has installed, and holds none."
license = { text = "Apache-2.0" }
dependencies = []
[tool.flwr.app]
publisher = "uefl"
[tool.flwr.app.components]
serverapp = "uefl.deploy.app:server"
clientapp = "uefl.deploy.app:client"
"""


class Node(NamedTuple):
    """A node that is connected."""

    number: int
    activation: str
    """another number after its process was started again"""
    key: str
    """its public key, as hexadecimal digits; empty without a key"""


class Link:
    """A run at the SuperLink of a place, as the engine sees it, over a connection to its ServerApp.

    Raises:
        Unreachable: every method raises it if the SuperLink has lost the run, or is unreachable for long.
    """

    def __init__(self, end: socket.socket, place: str) -> None:
        self._end, self._place = end, place
        self._inbox: dict[str, Packet | str] = {}

    def nodes(self) -> list[Node]:
        """Return the connected nodes."""
        return [Node(*fields) for fields in self._ask({"do": "nodes"})]

    def push(self, node: int, packet: Packet, life: float | None, most: int) -> str | None:
        """Send a message to a node.

        Returns the number of the message, or None if the SuperLink does not know the node any more.

        Args:
            life: seconds after which a message that was not fetched, or a reply to it, is dropped.
            most: bytes that the reply may have.
        """
        self._ask({"do": "expect", "most": most})  # the message and its copies need memory, too
        what = {"do": "push", "node": node, "life": life, "most": most}
        number: str | None = self._ask(what, encode(packet))
        return number

    def arrived(self, numbers: Collection[str], seconds: float) -> dict[str, Packet | str]:
        """Wait some seconds, and return by number each reply, or the reason why no reply will come."""
        end = time.monotonic() + seconds
        while wait([self._end], 0 if self._inbox.keys() & numbers else max(end - time.monotonic(), 0)):
            self._take()
        return {number: self._inbox.pop(number) for number in [*self._inbox] if number in numbers}

    def forget(self, numbers: Collection[str]) -> None:
        """Ignore replies to the messages with these numbers, and do not read them."""
        if numbers:
            self._ask({"do": "forget", "numbers": list(numbers)})
        for number in numbers:
            self._inbox.pop(number, None)

    def fail(self) -> None:
        """Let the SuperLink know that the run has failed."""
        with suppress(ConnectionLost):
            send(self._end, {"do": "fail"})

    def close(self) -> None:
        """End the run."""
        with self._end, suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)
            self._end.settimeout(_END)
            while self._end.recv(2**16):
                pass

    def _ask(self, what: dict[str, Any], frame: bytes | bytearray = b"") -> Any:
        try:
            send(self._end, what, frame)
        except ConnectionLost:
            raise self._lost() from None
        end = time.monotonic() + _ABSENCE
        while wait([self._end], max(end - time.monotonic(), 0)):
            header = self._take()
            if header is not None:
                return header["done"]
        raise Unreachable(f"lost the SuperLink at {self._place}: it does not reply")

    def _take(self) -> dict[str, Any] | None:
        """Read a frame, and return its header, or None for a reply of a client."""
        try:
            header, frame = receive(self._end)
        except ConnectionLost:
            raise self._lost() from None
        if "reply_to" not in header:
            return dict(header)
        self._inbox[header["reply_to"]] = header["error"] or _read(frame)
        return None

    def _lost(self) -> Unreachable:
        why = "it has ended the run, or has lost the run during an interruption of the connection"
        return Unreachable(f"lost the SuperLink at {self._place}: {why}")


def _read(frame: bytearray) -> Packet | str:
    try:
        return decode(frame)
    except Unreadable:
        return faults.NOT_READ


@contextmanager
def connect(
    address: Address, secret: Path | None = None, notice: Callable[[str], object] = lambda line: None
) -> Iterator[Link]:
    """Open a run at a SuperLink for as long as the context lasts.

    Args:
        secret: the file that the SuperLink was started with (``--superexec-auth-secret-file``); without it,
            everyone who can connect to the SuperLink may start the program of a run.

    Raises:
        Unreachable: the SuperLink refuses, or does not leave the program of the run to this process.
    """
    address.avoid_proxy()
    with ExitStack() as stack:
        folder = stack.enter_context(temporary("uefl-run-"))
        link = Link(stack.enter_context(_begun(address, secret, folder, notice)), address.place)
        try:
            yield link
        except BaseException:
            link.fail()
            raise
        finally:
            link.close()


@contextmanager
def _begun(
    address: Address, secret: Path | None, folder: Path, notice: Callable[[str], object]
) -> Iterator[socket.socket]:
    """Start a run and its program, and return the connection between the program and this process."""
    path = commands.folder_of_commands(folder / "bin")
    environment = {"FLWR_HOME": str(folder), "PATH": path, RUN: str(folder / "run")}
    # ``flower-superexec`` must take one task, and takes the first one at once
    environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "60"
    processes, trust = Processes(folder, **QUIET, **environment), address.options(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(environment[RUN])
        listener.listen(1)
        (folder / "app").mkdir()
        (folder / "app" / "pyproject.toml").write_text(_APP)
        (folder / "config.toml").write_text(_connection(address, trust))
        until = time.monotonic() + _PATIENCE
        while processes.start("flwr", commands.__name__, "flwr", "run", str(folder / "app"), "here").wait():
            log = processes.log("flwr")
            failure = _SERVER_ERROR.search(log.read_text(errors="replace"))
            if failure is None or time.monotonic() > until:
                why = failure[1] if failure else processes.ended("flwr")
                raise Unreachable(f"the SuperLink at {address.place} refuses a run: {why}")
            notice(f"the SuperLink at {address.place} replies {failure[1]}; trying again")
            log.unlink()
            time.sleep(_AGAIN)
        options = ["--runtime-api-address", address.place, *trust]
        options += [] if secret is None else ["--superexec-auth-secret-file", str(secret.resolve())]
        superexec = processes.start("superexec", commands.__name__, "flower-superexec", *options)
        try:
            end = _accepted(listener, processes, address)
            # ``flower-superexec`` would take tasks of other runs. The program ends when the number of that
            # process is free, so this process must wait for its end first.
            superexec.kill()
            yield end
        finally:
            processes.end()


def _accepted(listener: socket.socket, processes: Processes, address: Address) -> socket.socket:
    """Wait for the program to connect."""
    until = time.monotonic() + _PATIENCE
    listener.settimeout(0.2)
    while (why := processes.ended("superexec")) is None and time.monotonic() < until:
        with suppress(TimeoutError):
            end, _ = listener.accept()
            end.settimeout(None)
            return end
    if why is None:
        raise Unreachable(
            f"the SuperLink at {address.place} does not let this process execute the run; start the"
            " SuperLink with --isolation process"
        )
    raise Unreachable(
        f"the SuperLink at {address.place} refuses a run: {why}; give the file of the SuperLink's secret"
        " with --secret, and check the clock of this machine"
    )


def _connection(address: Address, trust: list[str]) -> str:
    """Return the file that names the SuperLink for ``flwr``, from :meth:`.Address.options`."""
    lines = ["[superlink]", 'default = "here"', "[superlink.here]", f'address = "{address.place}"']
    if trust:
        lines.append(f"{trust[0].removeprefix('--')} = {json.dumps(trust[1]) if trust[1:] else 'true'}")
    return "\n".join(lines)
