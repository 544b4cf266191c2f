"""Silos and servers with faults.

Usage: ``python -m tests.federated.deploy.chaos.faulty FILE silo OPTIONS...``, or ``... FAULT train
OPTIONS...``.

In the second round, a silo reads the file and causes the fault that it names. If the file is empty, the silo
works as usual. A server with the fault ``checkpoint`` dies between the tensors and the index of its second
checkpoint, and a server with ``sending`` in the middle of a message.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch

from uefl import checkpoint
from uefl.deploy import silo
from uefl.deploy.silo import SiloProgram
from uefl.engines.base import Message, Reply
from uefl.engines.codec import Header, Packet, packed_reply, reply_of
from uefl.engines.flower import link
from uefl.engines.processes import Processes

from .cluster import SECRET

SERVER_PROCESS = "UEFL_TEST_SERVER"
"""names the process of a run in the environment of its messenger"""
SENDING = "UEFL_TEST_SENDING"
"""names a file in the environment of a SuperNode, which says how the SuperNode sends its next reply"""


def _raises(message: Message) -> Reply:
    raise RuntimeError(SECRET)


def kill_this_process() -> None:
    """Kill this process, as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _dies(reply: Reply) -> None:
    kill_this_process()


def _sent(how: str) -> Callable[[Reply], None]:
    def send(reply: Reply) -> None:
        Path(os.environ[SENDING]).write_text(how)

    return send


def _after(seconds: float) -> Callable[[Reply], None]:
    return lambda reply: time.sleep(seconds)  # the deadline of the run is 15 seconds


def _of_another(reply: Reply) -> None:
    reply.client = "silo-0"


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        reply.tensors["values"] = change(reply.tensors["values"])

    return damage


def _nan(values: torch.Tensor) -> torch.Tensor:
    values[0] = torch.nan
    return values


def _large(reply: Reply) -> None:
    """Return a reply of half a gibibyte.

    All its parts are equal, so Flower sends one of them.
    """
    reply.private["more"] = torch.zeros(2**27)


DAMAGE: dict[str, Callable[[Reply], None]] = {
    "nan": _changed(_nan),
    "shape": _changed(lambda values: values[:-1]),
    "dtype": _changed(lambda values: values.double()),
    "norm": _changed(lambda values: values * 1e6),
    "large": _large,
    "late": _after(20),
    "edge": _after(8),
    "silent": _after(10**6),
    "name": _of_another,
    "dies": _dies,
    "replying": _sent("dies"),
    "parts": _sent("parts"),
    "twice": _sent("twice"),
    "earlier": lambda reply: None,
}
ALWAYS = {"edge", "twice"}
"""faults of every round"""


class Faulty(SiloProgram):
    """Like any silo but in the second round."""

    file = Path()
    """names the fault"""
    first: Packet
    """the reply of the first round"""

    def __call__(self, packet: Packet | None) -> Packet:
        """Return the reply, damaged."""
        sent = super().__call__(packet)
        if packet is None:
            return sent
        header, fault = packet.header, self.file.read_text()
        if header["ask"] != "work" or fault not in DAMAGE or not header["options"]["train"]:
            return sent
        if header["options"]["round"] != 1 and fault not in ALWAYS:
            self.first = sent
            return sent
        reply = reply_of(self.first if fault == "earlier" else sent)
        DAMAGE[fault](reply)
        return packed_reply(reply)

    def _client(self, header: Header) -> Callable[[Message], Reply]:
        return (
            _raises
            if self.file.read_text() == "raises" and header["options"]["round"] == 1
            else super()._client(header)
        )


def _die_in_a_checkpoint() -> None:
    """Kill this process where the tensors of its second checkpoint are written and the index is not."""
    write = checkpoint.write_json

    def write_or_die(path: Path, value: Any) -> None:
        if path.name == "checkpoint.json" and path.exists():
            kill_this_process()
        write(path, value)

    checkpoint.write_json = write_or_die


def _die_sending() -> None:
    """Kill this process as its messenger dies, in the middle of a message: :mod:`.dying`."""
    os.environ[SERVER_PROCESS] = str(os.getpid())
    link._APP = link._APP.replace("uefl.deploy.app:server", f"{__spec__.parent}.dying:server")


def dying(push_objects: Callable[..., None], die: Callable[[], None]) -> Callable[..., None]:
    """Return Flower's function, but the process dies after the first part of the message."""

    def push_one(objects: Any, push_object_fn: Callable[[str, bytes], None], **keys: Any) -> None:
        def push_and_die(*arguments: Any) -> None:
            push_object_fn(*arguments)
            die()

        push_objects(objects, push_and_die, **keys)

    return push_one


def _start_faulty(self: Processes, name: str, *command: str) -> Popen[bytes]:
    """Start a process of Flower, the SuperNode with the changes of :mod:`.supernode`."""
    return _start(self, name, *([f"{__spec__.parent}.supernode"] if name == "supernode" else []), *command)


_start = Processes.start


SERVER: dict[str, Callable[[], None]] = {"checkpoint": _die_in_a_checkpoint, "sending": _die_sending}

if __name__ == "__main__":
    fault = sys.argv.pop(1)
    if fault in SERVER:
        SERVER[fault]()
    else:
        Faulty.file = Path(fault)
        os.environ[SENDING] = f"{fault}.sending"
        silo.SiloProgram = Faulty  # type: ignore[misc]
        Processes.start = _start_faulty  # type: ignore[method-assign, assignment]
    from uefl.cli import main

    main()
