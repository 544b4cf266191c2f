"""A silo that does wrong on purpose in the second round: ``python -m uefl.deploy.faulty FAULT OPTIONS OF uefl silo...``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import torch
from flwr.app import RecordDict

from ..engines.base import Message, Reply
from ..engines.flower.codec import Header, pack_reply, unpack, unpack_reply
from . import silo
from .chaos import SECRET
from .silo import SiloProgram


def _raises(message: Message) -> Reply:
    raise RuntimeError(SECRET)


def _dies(reply: Reply) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _late(reply: Reply) -> None:
    time.sleep(40)


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Reply], None]:
    def damage(reply: Reply) -> None:
        reply.tensors["values"] = change(reply.tensors["values"])

    return damage


def _nan(values: torch.Tensor) -> torch.Tensor:
    values[0] = torch.nan
    return values


DAMAGE: dict[str, Callable[[Reply], None]] = {
    "nan": _changed(_nan),
    "shape": _changed(lambda values: values[:-1]),
    "dtype": _changed(lambda values: values.double()),
    "norm": _changed(lambda values: values * 1e6),
    "late": _late,
    "dies": _dies,
}


class Faulty(SiloProgram):
    """Like any silo but in the second round."""

    fault = ""

    def __call__(self, records: RecordDict) -> RecordDict:
        """The answer, damaged."""
        answer = super().__call__(records)
        header, _ = unpack(records)
        if header["ask"] != "work" or header["options"]["round"] != 1 or self.fault not in DAMAGE:
            return answer
        reply = unpack_reply(answer)
        DAMAGE[self.fault](reply)
        return pack_reply(reply)

    def _client(self, header: Header) -> Callable[[Message], Reply]:
        return _raises if self.fault == "raises" and header["options"]["round"] == 1 else super()._client(header)


if __name__ == "__main__":
    Faulty.fault = sys.argv.pop(1)
    silo.SiloProgram = Faulty  # type: ignore[misc]
    sys.argv.insert(1, "silo")
    from ..cli import main

    main()
