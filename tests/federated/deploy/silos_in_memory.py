"""Silos with their data in memory: their programs, the packets to them, and an engine over them."""

from __future__ import annotations

from dataclasses import replace

import torch

from uefl.deploy.setting import Setting, task
from uefl.deploy.silo import SiloProgram
from uefl.deploy.silo_folder import SiloFolder
from uefl.engines.codec import decode, encode, packed_message, reply_of

NAMES = [f"silo-{i}" for i in range(3)]


class SourceInMemory:
    """A source in memory.

    ``fail`` is raised instead of returning data.
    """

    def __init__(self, name, federation, fail=None):
        self.name, self._federation, self._fail = name, federation, fail

    def federation(self, cfg):
        return replace(self._federation, manifest={"silos": {}, "unseen": {}})

    def data(self, client, cfg, classes, channels):
        if self._fail is not None:
            raise self._fail
        return self._federation.by_name[client].load()


def program(federation, name="silo-0", fail=None, **keys):
    """Return the program of a silo with its part of a federation."""
    return SiloProgram(SourceInMemory(name, federation, fail), torch.device("cpu"), **keys)


def asked(message, cfg, federation, client="silo-0", threads=1):
    """Return the packet of a message to a client in the only arm of a run."""
    return packed_message(message, task(Setting.of(cfg, federation, threads), "arm") | {"client": client})


class SilosInMemory:
    """An engine over a program for each client, which keeps its state in a folder.

    The engine counts the bytes of packets.
    """

    def __init__(self, cfg, fed, folder):
        self._cfg, self._fed, self.folder = cfg, fed, folder
        self.sent, self.received, self.said = 0, 0, []
        self.programs = {name: self.program(name, fed) for name in NAMES}

    def program(self, name, fed):
        return program(fed, name, kept=SiloFolder(self.folder / name, simulated=True))

    def clients(self):
        return sorted(self.programs)

    def round(self, messages, deadline=None):
        for name in sorted(messages):
            sent = encode(asked(messages[name], self._cfg, self._fed, name, torch.get_num_threads()))
            found = self.programs[name](decode(sent))
            assert found.groups["private"] == {}
            frame = encode(found)
            self.sent, self.received = self.sent + len(sent), self.received + len(frame)
            reply = reply_of(decode(frame))
            self.said.append(reply)
            yield reply
