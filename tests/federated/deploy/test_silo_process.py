"""A silo in a process of its own: its bytes, and its private state after ``kill -9``."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.federated.deploy.silos_in_memory import NAMES, SilosInMemory, program
from tests.federated.tiny import arm, federation, finish, settings
from uefl.deploy import silo_folder
from uefl.deploy.silo_folder import SiloFolder
from uefl.engines.codec import decode, encode

pytestmark = pytest.mark.slow
CONTEXT = multiprocessing.get_context("forkserver")  # a process that used autograd must not be forked
CONTEXT.set_forkserver_preload([__name__])
HEADER = 8000  # bytes of JSON in a message or a reply of these runs, at most


@pytest.fixture(scope="session", autouse=True)
def forkserver():
    """Start the fork server before the first test marks its processes.

    The fork server lives as long as the session, and the fixtures of a test wait for marked processes to end.
    """
    multiprocessing.forkserver.ensure_running()


def silos_data():
    """Return a federation with enough images for a new state of a silo in three rounds."""
    return federation(sizes=(48, 48, 48))


class SiloProcess:
    """A program of a silo in a child process.

    It is called with a packet, as the program is.

    Args:
        name: name of the silo.
        folder: folder of its state.
        dies: a function of :mod:`uefl.deploy.silo_folder`; at its third call the process kills itself.
    """

    def __init__(self, name, folder, dies=None):
        self._start = lambda dies: self._begin(name, folder, dies)
        self._start(dies)

    def _begin(self, name, folder, dies):
        self._pipe, theirs = CONTEXT.Pipe()
        self.child = CONTEXT.Process(target=_serve, args=(theirs, name, folder, dies), daemon=True)
        self.child.start()
        theirs.close()
        self.restarts = getattr(self, "restarts", -1) + 1

    def __call__(self, packet):
        frame = bytes(encode(packet))
        try:
            self._pipe.send_bytes(frame)
            return decode(bytearray(self._pipe.recv_bytes()))
        except EOFError:  # the engine sends the message again
            self.child.join()
            assert self.child.exitcode == -signal.SIGKILL
            self._start(None)
            return self(packet)

    def io(self):
        """Return the bytes that the process has read and written, including its files."""
        lines = Path(f"/proc/{self.child.pid}/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["rchar"]), int(counts["wchar"])

    def close(self):
        self.child.kill()
        self.child.join()


def _serve(pipe, name, folder, dies):
    if dies is not None:
        _die_in(dies)
    one = program(silos_data(), name, kept=SiloFolder(folder, simulated=True))
    while True:
        frame = bytearray(pipe.recv_bytes())
        pipe.send_bytes(encode(one(decode(frame))))


def _die_in(step):
    place, calls = (silo_folder, []) if step == "write_json" else (silo_folder.StateFiles, [])
    original = getattr(place, step)

    def dying(*arguments):
        calls.append(step)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    setattr(place, step, dying)


@contextmanager
def silos(cfg, folder, processes=NAMES, dies=None):
    """Return an engine over three silos.

    The silos in ``processes`` run in separate processes, which kill themselves in ``dies``.
    """

    class ProcessSilos(SilosInMemory):
        def program(self, name, fed):
            if name not in processes:
                return super().program(name, fed)
            return SiloProcess(name, self.folder / name, dies)

        def round(self, messages, deadline=None):
            for reply in super().round(messages, deadline):
                self.sizes |= {path.stem: path.stat().st_size for path in folder.rglob("*.safetensors")}
                yield reply

    engine = ProcessSilos(cfg, silos_data(), folder)
    engine.sizes = {"": 0}
    try:
        yield engine
    finally:
        for name in processes:
            engine.programs[name].close()


def states(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("step", ["write", "sync", "write_json"])
@pytest.mark.parametrize("algorithm", ["scaffold", "uefl"])
def test_a_silo_killed_in_its_third_round_resumes_bit_for_bit(algorithm, step, tmp_path):
    keys = {"extend": "all", "rounds": [2, 2]} if algorithm == "uefl" else {"rounds": [4]}
    cfg, found = settings(algorithm, **keys), []
    for name, processes in (("whole", ()), ("killed", ("silo-1",))):
        with silos(cfg, tmp_path / name, processes, step) as engine:
            one = arm(cfg, silos_data(), lambda _, engine=engine: engine, clients_keep_states=True)[0]
            records = repr(finish(one))
            names = [member.private.named for member in one.members]
            found.append((records, names, states(tmp_path / name)))
            assert [engine.programs[silo].restarts for silo in processes] == [1] * len(processes)
    assert found[0] == found[1]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper", "uefl"])
def test_reported_bytes_are_those_a_silo_reads_and_writes(algorithm, tmp_path):
    """The process only reads messages, writes replies, and reads and writes its state."""
    keys = {
        "fedavg": {},
        "fedper": {"private_mean": False, "personal": "all", "hidden": 4096},
        "uefl": {"extend": "all", "codewords": 4000, "rounds": [2, 2], "new_codewords": "normal"},
    }[algorithm]
    cfg = settings(algorithm, **keys)
    with silos(cfg, tmp_path) as engine:
        for _ in range(2):  # the first runs import modules, which counts as reading
            finish(arm(cfg, silos_data(), lambda _: engine, clients_keep_states=True)[0])
        engine.said.clear()
        before = {name: engine.programs[name].io() for name in NAMES}
        records = finish(arm(cfg, silos_data(), lambda _: engine, clients_keep_states=True)[0])
        for name in NAMES:
            after = engine.programs[name].io()
            names = [reply.states[0] for reply in engine.said if reply.client == name]
            sizes = [engine.sizes[name] for name in names]
            assert (max(sizes) > len(names) * HEADER) == (algorithm != "fedavg")
            # each message except the first names the previous state; a turn that trains writes a new state
            files = sum(sizes[:-1]), sum(engine.sizes[name] for name in {*names})
            for i, key in enumerate(("bytes_sent", "bytes_received")):
                reported = sum(record[key] for record in records if record["client"] == name)
                assert reported <= after[i] - before[name][i] - files[i] < reported + len(names) * HEADER
