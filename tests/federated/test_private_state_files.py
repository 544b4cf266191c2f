"""A run that is stopped at any step has the private states that its checkpoint names.

Nothing piles up on the disk.
"""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

import uefl
from uefl import checkpoint, extend, run
from uefl.errors import UserError
from uefl.lazy import Lazy
from uefl.server.private import StateFiles

from . import tiny
from .interrupted import KEYS, Killer, outcome
from .whole_run import Watcher, killed
from .whole_run import start as start_demo


def train(out, **overrides):
    keys = {"arms": {"fedper": {}, "fedbn": {}}, "data": KEYS["data"] | {"clients": 3}}
    keys["training"] = KEYS["training"] | {"rounds": [1, 1]}
    return uefl.train(KEYS | keys, out=out, **overrides)


def files(out):
    return {path.stem: path for path in (out / "private").glob("*")}


def named(out):
    index = json.loads((out / "checkpoint.json").read_text())
    return {name for member in index["state"]["state"]["members"] for name in member["private"].values()}


def start(out, observer=None):
    """Return the start of the process that is killed.

    Its images are not turned, because turned images need torchvision.
    """
    return start_demo(out, "arms=fedper", "angles=[]", observer=observer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("private") / "whole"
    train(out)
    return out


def test_only_files_of_a_checkpoint_are_flushed(tmp_path, monkeypatch):
    files, flushed = StateFiles(tmp_path / "private"), []
    kept, _ = (files.write({"x": torch.full((2,), value)}, "silo-0", None) for value in (1.0, 2.0))
    monkeypatch.setattr("uefl.server.private._fsync", lambda path: flushed.append(path.name))
    files.sync([kept])
    assert flushed == [f"{kept}.safetensors", "private"]


@pytest.mark.parametrize(
    ("step", "call"),
    [
        pytest.param(
            step, call, marks=() if (step, call) in (("write", 3), ("save", 3)) else pytest.mark.slow
        )
        for step in ("write", "sync", "save", "sweep")
        for call in (1, 3, 5)
    ],
)
def test_run_stopped_at_any_step_resumes_bit_for_bit(whole, tmp_path, monkeypatch, step, call):
    place = (checkpoint, "save") if step == "save" else (StateFiles, step)
    original, calls = getattr(*place), []

    def stopped(*arguments):
        calls.append(step)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(*place, stopped)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    monkeypatch.undo()
    if (tmp_path / "run" / "checkpoint.json").exists():
        assert named(tmp_path / "run") <= files(tmp_path / "run").keys()
    uefl.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(whole)
    ends = extend.private_files(tmp_path / "run", uefl.load(tmp_path / "run").config)
    assert files(tmp_path / "run").keys() == named(tmp_path / "run") | ends  # nothing else is left


@pytest.mark.slow
def test_kill_9_during_a_round(tmp_path):
    """The process ends after some clients of the round have written their states."""
    start(tmp_path / "whole")
    killed(__name__, tmp_path / "run", "fedper", 1, "silo-2")
    assert named(tmp_path / "run") < files(tmp_path / "run").keys()
    run.resume(tmp_path / "run", device="cpu", data_root=None, observer=Watcher())
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_only_changed_states_are_written(tmp_path, monkeypatch):
    written = []
    original = StateFiles.write

    def counted(self, tensors, owner, before):
        name = original(self, tensors, owner, before)
        written.append((owner, name != before))
        return name

    monkeypatch.setattr(StateFiles, "write", counted)
    one = tiny.arm(tiny.settings("fedper", participation=0.3, rounds=[4]))[0]
    tiny.finish(one)
    assert len(written) == 4  # one participant in each of the four rounds
    states = one.members[0].private
    before = dict(states.named)
    states.put("silo-0", states["silo-0"])
    states.put("silo-0", states["silo-0"])
    assert written[-1] == ("silo-0", False)
    assert {k: v for k, v in states.named.items() if k != "silo-0"} == {
        k: v for k, v in before.items() if k != "silo-0"
    }


def test_clients_without_private_state_have_no_file(tmp_path):
    uefl.train(KEYS | {"arms": {"fedavg": {}}}, out=tmp_path / "run")
    assert not (tmp_path / "run" / "private").exists()


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_state_is_an_error_that_names_the_client(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", observer=Killer(("fedper", 1, "silo-0")))
    for path in files(tmp_path / "run").values():
        path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{tmp_path}/run/private/.*silo-\d, "):
        uefl.resume(tmp_path / "run")


def test_lazy_mapping_has_one_value_in_memory():
    alive = weakref.WeakSet()

    def make(name):
        assert not alive
        tensor = torch.zeros(3)
        alive.add(tensor)
        return tensor

    lazy = Lazy("abc", make)
    assert [lazy[name].tolist() for name in lazy] == [[0.0] * 3] * 3
    with pytest.raises(KeyError):
        lazy["d"]


def test_separate_parts_write_the_same_file(tmp_path):
    parts = [
        {"b": torch.arange(3), "a": torch.ones(2, 2)},
        {"c": torch.zeros(0), "d": torch.tensor(True)},
        {},
        {"e": torch.ones(3).half()},
    ]
    checkpoint.save_groups(tmp_path / "parts", lambda: parts, {"about": "x"})
    whole = {name: tensor for part in parts for name, tensor in part.items()}
    found = load_file(tmp_path / "parts")
    assert found.keys() == whole.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in whole.items()
    )
    header = json.loads((tmp_path / "parts").read_bytes()[8:].partition(b"}}")[0] + b"}}")
    assert all(header[name]["data_offsets"][0] % whole[name].element_size() == 0 for name in "abde")
