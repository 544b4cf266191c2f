"""``uefl.train(engine=...)`` runs with clients elsewhere, from Python.

It raises the errors of the command line.
"""

from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest

import uefl
from tests.federated.interrupted import KEYS, outcome
from uefl.deploy import choices, workers
from uefl.errors import RunError, UserError

ARMS = {"fedavg": {}}
ENGINES = ["distributed", "flower", uefl.Distributed(2), uefl.Flower()]
needs_flower = pytest.mark.skipif(
    find_spec("flwr") is None, reason="Flower is not installed: make test-flower has it"
)


class Mine(uefl.Algorithm):
    """Only of this process."""


def train(out, **keys):
    keys = {"arms": ARMS} | keys
    return uefl.train(KEYS, out=out, device="cpu", **keys)


@pytest.mark.slow
def test_worker_gives_the_numbers_of_one_process(tmp_path):
    for engine, out in (("local", "here"), (uefl.Distributed(workers=1), "there")):
        train(tmp_path / out, engine=engine)
    assert outcome(tmp_path / "there") == outcome(tmp_path / "here")


@pytest.mark.parametrize(
    ("engine", "shown"),
    [("distributed", "'distributed'"), (uefl.Distributed(3), "uefl.Distributed(workers=3)")],
)
def test_worker_count_and_resume_command_follow_the_engine(tmp_path, monkeypatch, engine, shown):
    asked = []

    @contextmanager
    def on_workers(count, device, notice, go_on):
        asked.append((count, device, go_on))
        yield None  # no deployment, so the clients train in this process

    monkeypatch.setattr(workers, "on_workers", on_workers)
    monkeypatch.setattr(choices.os, "sched_getaffinity", lambda process: range(7))
    train(tmp_path / "run", engine=engine)
    uefl.resume(tmp_path / "run", engine=engine, device="cpu")
    go_on = f"uefl.resume({str(tmp_path / 'run')!r}, engine={shown})"
    assert asked == [(7 if engine == "distributed" else 3, "cpu", go_on)] * 2


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_objects_from_python_are_refused_by_other_processes(tmp_path, engine):
    clients = {"a": ((np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2), None)}
    for keys, line in (
        ({"clients": clients}, "clients .*federation: .*Python"),
        ({"arms": {"stranger": Mine()}}, "arm 'stranger': .*package"),
    ):
        with pytest.raises(UserError, match=line):
            train(tmp_path / "run", engine=engine, **keys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("spark", r"engine: expected 'local', 'distributed', 'flower', .*got 'spark'"),
        (uefl.Distributed(0), r"workers: .*\b1 or .*\b0$"),
        pytest.param(
            uefl.Flower(silos=2),
            "--silos, --root-certificates, --secret .*--insecure .*--superlink",
            marks=needs_flower,
        ),
        pytest.param(uefl.Flower("10.77.9.9:8000"), r"--silos\b", marks=needs_flower),
        pytest.param(
            uefl.Flower("127.0.0.1:8000", silos=0, insecure=True), r"\b1 .*silos.*\b0$", marks=needs_flower
        ),
        pytest.param(
            uefl.Flower("10.77.9.9:8000", silos=2, secret="nowhere"), "--secret: nowhere", marks=needs_flower
        ),
    ],
    ids=str,
)
def test_an_invalid_engine_is_refused_before_writing(tmp_path, engine, line):
    with pytest.raises(UserError, match=line):
        train(tmp_path / "run", engine=engine)
    assert not (tmp_path / "run").exists()


@needs_flower
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(UserError, match=r"config\.toml"):
        uefl.resume(tmp_path / "run", engine="flower")


def test_without_flower_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'\.\[flower\]'"):
        train(tmp_path / "run", engine="flower")
    assert not (tmp_path / "run").exists()


@needs_flower
@pytest.mark.parametrize(
    "engine", [uefl.Flower(), uefl.Flower("127.0.0.1:1", silos=1)], ids=["here", "elsewhere"]
)
def test_a_lost_superlink_names_the_resume_command(engine):
    from uefl.engines.flower.address import Unreachable

    with pytest.raises(RunError, match=r"\blost;.*: this$"), engine.deployment("cpu", print, "this"):
        raise Unreachable("lost")
