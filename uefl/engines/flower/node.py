"""A silo's end of Flower.

``flower-supernode`` receives messages. For each of them ``flower-superexec`` starts ``flwr-clientapp``, and
the ClientApp of :mod:`uefl.deploy.app` passes it to this process, which loads its data and its network once.
All ports of these processes are on 127.0.0.1.
"""

from __future__ import annotations

import logging
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from .. import faults
from ..base import Reply
from ..codec import Packet, Unreadable, decode, encode, packed_reply
from ..frames import ConnectionLost, receive, send
from . import MESSAGE, SILO, commands, fork_server
from .address import Address, Unreachable

_LOG = logging.getLogger("uefl.silo")
_AGAIN = 3.0  # seconds before a SuperNode that has ended is started again
_SETTLED = 60.0  # seconds after which a SuperNode that ends was accepted before
_PAUSE = 0.2  # seconds between two looks at the processes
_GRACE = 5.0  # seconds for processes to end before they are killed
_MEMORY = 2**30 + 4 * MESSAGE  # bytes of each process of Flower: itself, and the copies of a message

Program = Callable[[Packet | None], Packet]
"""answers a message, or None if it cannot be read; must not raise"""


def serve(address: Address, program: Program, key: Path | None = None, *, patience: float) -> None:
    """Answer messages until the process ends.

    Args:
        address: of the SuperLink.
        program: answers a message.
        key: the file of a private key, which identifies this node at the SuperLink. None: a new key for each
            connection, for a SuperLink that has no registered keys.
        patience: seconds to wait for a SuperLink that is not there, at first or after it was lost, or that
            does not accept this node. Flower needs up to a minute to notice that a process has ended. Before
            that, it does not accept another process with the same key.

    Raises:
        Unreachable: the SuperLink is not there, cannot be trusted, or does not know the key.
    """
    address.avoid_proxy()
    refused: float | None = None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="uefl-silo-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "silo"))
        listener.listen()
        listener.settimeout(_PAUSE)
        while True:
            address.wait(patience)
            begun = time.monotonic()
            with _supernode(address, key, folder) as healthy:
                heard = _answer_all(listener, program, healthy)
            if heard or time.monotonic() - begun > _SETTLED:
                refused = None
            elif refused is None:
                refused = begun
                _LOG.warning(
                    "not accepted yet: its key is not registered, the SuperLink still knows an "
                    "earlier process, or its clock is wrong"
                )
            elif key is None or time.monotonic() - refused > patience:
                raise _not_accepted(address, key)
            time.sleep(_AGAIN)


def _not_accepted(address: Address, key: Path | None) -> Unreachable:
    why = (
        "give its private key with --key, if it has one, and"
        if key is None
        else "register its public key there, and"
    )
    return Unreachable(
        f"the SuperLink at {address.place} does not let this silo in; {why} check the clock of this machine"
    )


@contextmanager
def _supernode(address: Address, key: Path | None, folder: Path) -> Iterator[Callable[[], bool]]:
    """Start a SuperNode and the processes that work for it; yield a function that returns whether all of them
    are healthy. They end with the context."""
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
        home, port = Path(place), str(commands.free_port())
        said = stack.enter_context((home / "supernode.log").open("wb"))
        read = stack.enter_context((home / "supernode.log").open("rb")).read
        log = stack.enter_context((home / "log").open("wb"))
        (home / "secret").write_bytes(secrets.token_bytes(64))
        secret = ("--superexec-auth-secret-file", str(home / "secret"))
        path = commands.folder_of_commands(home / "bin")
        (home / "bin" / fork_server.NAME).write_text(fork_server.script(home / "forks"))
        environment = {"FLWR_HOME": place, "TMPDIR": place, "PATH": path, SILO: str(folder / "silo")}
        environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
        stack.callback(_end, processes)

        def healthy() -> bool:  # a SuperNode does not end when its heartbeat fails, but logs a traceback
            return all(one.poll() is None for one in processes) and b"Traceback" not in read()

        def start(*command: str, log: IO[bytes] = log) -> None:
            processes.append(commands.start(command, log, environment))
            resource.prlimit(processes[-1].pid, resource.RLIMIT_DATA, (_MEMORY, _MEMORY))

        trust = address.options(home)
        trust += [] if key is None else ["--auth-supernode-private-key", str(key.resolve())]
        listen = ("--isolation", "process", "--host", "127.0.0.1", "--port", port)
        node = (*commands.named("flower-supernode"), "--superlink", address.place)
        start(*node, *trust, *listen, *secret, log=said)
        start(sys.executable, "-m", fork_server.__name__, str(home / "forks"))
        while healthy() and not (home / "forks").exists():
            time.sleep(_PAUSE)
        api = ("--runtime-api-address", f"127.0.0.1:{port}", "--insecure")
        start(*commands.named("flower-superexec"), *api, *secret)
        yield healthy


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for one in processes:
        one.terminate()
    end = time.monotonic() + _GRACE
    for one in processes:
        with suppress(subprocess.TimeoutExpired):
            one.wait(max(end - time.monotonic(), 0))
        one.kill()
        one.wait()


def _answer_all(listener: socket.socket, program: Program, healthy: Callable[[], bool]) -> bool:
    """Answer messages as long as the processes are healthy; return whether there was a message."""
    heard = False
    while healthy():
        with suppress(TimeoutError, ConnectionLost):
            end, _ = listener.accept()
            heard = True
            with end:
                end.settimeout(None)
                _, frame = receive(end)
                send(end, None, reply_to(program, frame))
    return heard


def reply_to(program: Program, frame: bytearray) -> bytes:
    """Return the frame of a reply to a frame."""
    try:
        packet = decode(frame)
    except Unreadable:
        packet = None
    found = program(packet)
    try:
        return encode(found).numpy().tobytes()
    except Exception:  # a user's algorithm may put anything there
        _LOG.exception("a reply cannot be packed")
        client = str(found.header.get("client", ""))
        return encode(packed_reply(Reply(client, error=faults.PROGRAM))).numpy().tobytes()
