"""Receive the messages of a silo through Flower.

``flower-supernode`` receives messages. For each message, ``flower-superexec`` starts ``flwr-clientapp``. It
runs the ClientApp of :mod:`uefl.deploy.app`, which passes the message to this process. This process loads the
data and the network of the silo once. All ports of these processes are on 127.0.0.1.
"""

from __future__ import annotations

import logging
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ..base import Reply
from ..codec import Packet, Unreadable, decode, encode, packed_reply
from ..frames import ConnectionLost, receive, send
from ..processes import Processes, temporary
from . import MESSAGE, QUIET, SILO, commands, fork_server
from .address import Address, Unreachable

_LOG = logging.getLogger("uefl.silo")
_AGAIN = 3.0  # seconds before a SuperNode that has ended is started again
_SETTLED = 60.0  # a SuperNode that runs for more seconds than this has been accepted
_PAUSE = 0.2  # seconds between two checks of the processes
_MEMORY = 2**30 + 4 * MESSAGE  # most bytes of a process of Flower: its own data and 4 copies of a message
_LINE = 100  # bytes
_LOST = (b"Traceback", b"Failed to receive message", b"Failed to send message")
"""text in the log of a SuperNode that has lost its connection or a message. The SuperNode does not end, and
does not try again"""

Program = Callable[[Packet | None], Packet]
"""returns the reply to a message; gets None for a message that cannot be read; must not raise"""


def serve(address: Address, program: Program, key: Path | None = None, *, patience: float) -> None:
    """Reply to messages until the process ends, or raise Unreachable.

    Args:
        key: the file of a private key, which identifies this node at the SuperLink. None: a new key for each
            connection, for a SuperLink that has no registered keys.
        patience: seconds to wait for a SuperLink that cannot be reached, at the start or later, or that does
            not accept this node. Flower needs up to a minute to notice that a process has ended. Until then,
            it does not accept another process with the same key.
    """
    address.avoid_proxy()
    refused: float | None = None
    with ExitStack() as stack:
        folder = stack.enter_context(temporary("uefl-silo-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "silo"))
        listener.listen()
        listener.settimeout(_PAUSE)
        while True:
            address.wait(patience, notice=_LOG.warning)
            begun = time.monotonic()
            with _supernode(address, key, folder) as healthy:
                had_message = _reply_to_all(listener, program, healthy)
            if had_message or time.monotonic() - begun > _SETTLED:
                refused = None
            elif refused is None:
                refused = begun
                _LOG.warning(
                    "not accepted yet by the SuperLink: the key of this silo is not registered, an earlier"
                    " process with this key still counts as connected, or the clock of this machine is wrong"
                )
            elif key is None or time.monotonic() - refused > patience:
                advice = (
                    "give the silo's private key with --key, if the silo has a key"
                    if key is None
                    else "register its public key there"
                )
                raise Unreachable(
                    f"the SuperLink at {address.place} does not accept this silo; {advice}, and check the"
                    " clock of this machine"
                )
            time.sleep(_AGAIN)


@contextmanager
def _supernode(address: Address, key: Path | None, folder: Path) -> Iterator[Callable[[], bool]]:
    """Start a SuperNode and the processes that work for it, and end them with the context.

    Yield a function that returns whether all of them are healthy.
    """
    with TemporaryDirectory(dir=folder) as place, ExitStack() as stack:
        home, port = Path(place), str(commands.free_port())
        (home / "secret").write_bytes(secrets.token_bytes(64))
        secret = ("--superexec-auth-secret-file", str(home / "secret"))
        path = commands.folder_of_commands(home / "bin")
        (home / "bin" / fork_server.NAME).write_text(fork_server.script(home / "forks"))
        environment = {"FLWR_HOME": place, "TMPDIR": place, "PATH": path, SILO: str(folder / "silo")}
        environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.1"
        processes = Processes(home, **QUIET, **environment)
        stack.callback(processes.end)

        def start(name: str, module: str, *arguments: str) -> None:
            process = processes.start(name, module, *arguments)
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (_MEMORY, _MEMORY))

        trust = address.options(home)
        trust += [] if key is None else ["--auth-supernode-private-key", str(key.resolve())]
        listen = ("--isolation", "process", "--host", "127.0.0.1", "--port", port)
        node = ("flower-supernode", "--superlink", address.place)
        start("supernode", commands.__name__, *node, *trust, *listen, *secret)
        new_output, seen = stack.enter_context(processes.log("supernode").open("rb")).read, bytearray()

        def healthy() -> bool:
            seen.extend(new_output())
            if any(words in seen for words in _LOST):
                return False
            del seen[:-_LINE]  # the text may arrive in two parts
            return all(one.poll() is None for one in processes.all.values())

        start("forks", fork_server.__name__, str(home / "forks"))
        while healthy() and not (home / "forks").exists():
            time.sleep(_PAUSE)
        api = ("--runtime-api-address", f"127.0.0.1:{port}", "--insecure")
        start("superexec", commands.__name__, "flower-superexec", *api, *secret)
        yield healthy


def _reply_to_all(listener: socket.socket, program: Program, healthy: Callable[[], bool]) -> bool:
    """Reply to messages while the processes are healthy, and return whether there was one."""
    had_message = False
    while healthy():
        with suppress(TimeoutError, ConnectionLost):
            end, _ = listener.accept()
            had_message = True
            with end:
                end.settimeout(None)
                _, frame = receive(end)
                send(end, None, reply_to(program, frame))
    return had_message


def reply_to(program: Program, frame: bytearray) -> bytearray:
    """Return the reply to a message, both as frames."""
    try:
        packet = decode(frame)
    except Unreadable:
        packet = None
    reply = program(packet)
    try:
        return encode(reply)
    except Exception:  # a user's algorithm may put any object into a reply
        _LOG.exception("the reply cannot be encoded; the server gets an error in its place")
        client = str(reply.header.get("client", ""))
        return encode(packed_reply(Reply(client, error="program")))
