"""A silo's end of Flower: which failures of a SuperLink and of Flower's processes it survives."""

import ast
import os
import resource
import socket
import subprocess
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("flwr")

from uefl.engines import frames, processes
from uefl.engines.codec import Packet, decode, encode
from uefl.engines.flower import QUIET, SILO, node
from uefl.engines.flower.address import Address, Unreachable

ADDRESS = Address("127.0.0.1:1", insecure=True)


class Enough(Exception):
    """Ends a loop that otherwise never ends."""


@pytest.fixture
def supernodes(monkeypatch):
    """Define for each SuperNode whether it passes a message before it ends."""
    acts = []

    @contextmanager
    def supernode(address, key, folder):
        if not acts:
            raise Enough
        yield acts.pop(0)

    monkeypatch.setattr(node, "_supernode", supernode)
    monkeypatch.setattr(node, "_reply_to_all", lambda listener, program, heard: heard)
    monkeypatch.setattr(node, "_AGAIN", 0.0)
    monkeypatch.setattr(Address, "wait", lambda self, seconds, **keys: None)
    return acts


def serve(key=None, patience=60.0):
    node.serve(ADDRESS, lambda packet: packet, key, patience=patience)


def test_a_supernode_that_ends_after_messages_is_started_again(supernodes):
    supernodes += [True] * 4 + [False, True, False]
    with pytest.raises(Enough):
        serve()
    assert not supernodes


def test_a_refusal_without_a_key_is_final_the_second_time(supernodes, caplog):
    supernodes += [False] * 3
    with pytest.raises(Unreachable, match=r"127.0.0.1:1 .*--key"):
        serve()
    assert len(supernodes) == 1
    assert [record.levelname for record in caplog.records if record.name == "uefl.silo"] == ["WARNING"]


@pytest.mark.parametrize(("patience", "left"), [(60.0, 0), (-1.0, 3)])
def test_refused_key_is_retried_for_some_time(supernodes, tmp_path, patience, left):
    supernodes += [False] * 5
    with pytest.raises(Enough if left == 0 else Unreachable):
        serve(tmp_path / "key", patience)
    assert len(supernodes) == left


def test_a_late_end_is_no_refusal(supernodes, monkeypatch):
    monkeypatch.setattr(node, "_SETTLED", -1.0)
    supernodes += [False] * 4
    with pytest.raises(Enough):
        serve()


def test_local_traffic_bypasses_the_proxy(supernodes, monkeypatch):
    monkeypatch.setenv("no_proxy", "example.org")
    with pytest.raises(Enough):
        serve()
    assert os.environ["no_proxy"] == "example.org,127.0.0.1"


LINE = "tests.federated.engines.line"
STAYS = "import time; print('a line', flush=True); time.sleep(60)"
ENDS = "raise SystemExit(1)"
FAILS = "import time; print('Traceback (most recent call last):', flush=True); time.sleep(60)"
LOSES = (
    "import time; print('ERROR : Failed to se', end='', flush=True); time.sleep(0.5);"
    " print('nd message 1: 500', flush=True); time.sleep(60)"
)


@pytest.fixture
def started(monkeypatch):
    """Return the lines that play Flower's commands, and the arguments of each command."""
    found, start = {}, processes.Processes.start

    def play(self, name, module, *arguments):
        found[name] = arguments
        play.lines.setdefault(name, f"open({arguments[-1]!r}, 'w'); {STAYS}")
        return start(self, name, LINE, play.lines[name])

    play.lines = {"supernode": STAYS, "superexec": STAYS}
    monkeypatch.setattr(processes.Processes, "start", play)
    monkeypatch.setattr(processes, "_GRACE", 1.0)
    return play.lines, found


@pytest.mark.parametrize("name", ["supernode", "superexec"])
@pytest.mark.parametrize("line", [STAYS, ENDS, FAILS, LOSES])
def test_processes_are_watched_and_end_with_the_context(started, tmp_path, name, line):
    """A SuperNode without a heartbeat keeps running, with a traceback in its log.

    So does one that has lost a message.
    """
    lines, found = started
    lines[name] = line
    (tmp_path / "key").touch()
    with node._supernode(ADDRESS, tmp_path / "key", tmp_path) as healthy:
        end = time.monotonic() + 60
        survives = line == STAYS or (line in (FAILS, LOSES) and name != "supernode")
        while healthy() != survives or (survives and time.monotonic() < end - 59):
            assert time.monotonic() < end
            time.sleep(0.05)
    supernode = found["supernode"]
    assert supernode[supernode.index("--auth-supernode-private-key") + 1] == str(tmp_path / "key")
    assert "--insecure" in supernode
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_processes_of_flower_are_small_and_contact_no_one(started, monkeypatch, tmp_path):
    """The silo turns off telemetry, checks for updates and installation of packages."""
    lines, _ = started
    told, limits, prlimit = tmp_path / "told", [], resource.prlimit
    lines["supernode"] = f"import os; open({str(told)!r}, 'w').write(repr(dict(os.environ))); {STAYS}"
    monkeypatch.setattr(resource, "prlimit", lambda pid, *limit: limits.append(limit) or prlimit(pid, *limit))
    with node._supernode(ADDRESS, None, tmp_path):
        while not told.exists() or not told.read_text():
            time.sleep(0.05)
    assert limits == [(resource.RLIMIT_DATA, (17 * 2**30,) * 2)] * 3
    environment = ast.literal_eval(told.read_text())
    assert environment.items() >= QUIET.items()
    assert set(QUIET.values()) == {"0", "1"}


def test_messages_get_replies_until_a_process_ends(monkeypatch, tmp_path):
    """A connection without a message does not end the loop."""
    states, given = iter([True, True, False]), []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silo"))
        listener.listen()
        listener.settimeout(1.0)
        monkeypatch.setenv(SILO, str(tmp_path / "silo"))
        ends = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for end in ends:
            end.connect(os.environ[SILO])
        ends[0].close()
        frames.send(ends[1], None, encode(Packet({"ask": 1}, {})))
        heard = node._reply_to_all(
            listener, lambda packet: given.append(packet) or packet, lambda: next(states)
        )
        assert heard
        _, frame = frames.receive(ends[1])
        ends[1].close()
    assert decode(frame).header == {"ask": 1}
    assert given == [Packet({"ask": 1}, {})]
