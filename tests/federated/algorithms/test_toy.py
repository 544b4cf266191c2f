"""A third party can write an algorithm in one class outside of the package.

It has a model, server state and client state of its own.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from pydantic import Field
from torch import nn

import uefl
from tests import fresh
from tests.federated.interrupted import Killer, outcome
from uefl.algorithms import base
from uefl.algorithms.base import Algorithm, Parameters, find, registry
from uefl.errors import UserError


@uefl.register("toy")
class Toy(Algorithm):
    """Server momentum, with a trained offset of the images of every client."""

    columns: ClassVar = {"speed": "length of the server's last step"}
    private_predicts = ("offset",)

    class Parameters(Parameters):
        """Parameters of the toy."""

        beta: float = Field(0.5, ge=0, lt=1, description="momentum of the server")

    def build_model(self, spec):
        size = spec.shape[0] * spec.shape[1] * spec.shape[2]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, spec.classes)
        )

    def server_state(self, values, buffers, net):
        state = super().server_state(values, buffers, net)
        state.tensors["velocity"] = torch.zeros_like(values)
        state.plain["rounds"] = 0
        return state

    def aggregate(self, state, averages):
        before = state.tensors["values"]
        super().aggregate(state, averages)
        state.tensors["velocity"] = (
            self.parameters.beta * state.tensors["velocity"] + state.tensors["values"] - before
        )
        state.tensors["values"] = before + state.tensors["velocity"]
        state.plain["rounds"] += 1

    def record(self, state, client, turn):
        return {"speed": float(state.tensors["velocity"].norm())}

    def client_state(self, client):
        return {"offset": torch.zeros(self.context.shape), "turns": torch.zeros((), dtype=torch.int64)}

    def private_mean(self, states):
        return {"offset": sum(state["offset"] for state in states.values()) / len(states)}

    def before_round(self, work):
        noise = torch.randn(work.private["offset"].shape, generator=work.generator)
        work.trained["offset"] = (work.private["offset"] + 1e-3 * noise).requires_grad_()

    def loss(self, work, batch):
        return nn.functional.cross_entropy(work.logits(batch.images + work.trained["offset"]), batch.labels)

    def update(self, work):
        work.private = {"offset": work.trained["offset"].detach().clone(), "turns": work.private["turns"] + 1}
        return super().update(work)

    def predict(self, work, images):
        return super().predict(work, images + work.private["offset"])

    def infer(self, net, images, tensors):
        return net(images + tensors["offset"])


KEYS = {
    "run": {"threads": 1, "passes": 3, "precision": "fp32", "participation": 0.7},
    "data": {"clients": 3, "train_per_client": 48, "test_per_client": 20},
    "model": {"width": 4, "hidden": 16},
    "training": {"rounds": [2, 1], "local_epochs": 1, "batch_size": 16, "lr": 1e-2},
    "arms": {"toy": {"beta": 0.3}, "fedavg": {}},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy") / "whole"
    uefl.train(KEYS, out=out)
    return out


def test_it_trains_and_is_reported(finished):
    run = uefl.load(finished)
    metrics = run.metrics
    assert set(metrics.arm) == {"toy", "fedavg"}
    assert metrics[metrics.arm == "toy"].speed.notna().all()
    report = (finished / "report.md").read_text()
    assert "- arm toy: toy, beta 0.3" in report
    assert "| toy |" in report
    assert "`speed`: length of the server's last step." in report
    header, _, toy, fedavg = (
        line.split(" | ") for line in report[report.index("| arm |") :].splitlines()[:4]
    )
    at = next(i for i, name in enumerate(header) if name.strip(" |") == "speed")
    last = metrics[(metrics.arm == "toy") & (metrics["round"] == metrics["round"].max())]
    assert toy[at].strip(" |") == f"{last.speed.mean():.4g}"
    assert fedavg[at].strip(" |") == "-"
    assert 0 <= run.summary["toy"]["global_accuracy"] <= 1


def test_its_saved_model_predicts_as_it_was_measured(finished):
    run = uefl.load(finished)
    model = run.model("toy")
    assert model.clients == ("silo-0", "silo-1", "silo-2")
    from uefl.data import build

    test = build(run.config.data, kind="labeled", seed=0).clients[1].load().test
    hits = (model.predict(test.images, "silo-1").argmax(1) == test.labels).double().mean()
    # dropout off here
    assert float(hits) == pytest.approx(run.summary["toy"]["clients"]["silo-1"]["accuracy"], abs=0.2)


@pytest.mark.parametrize(
    "when",
    [
        ("toy", 1, "silo-1"),
        *(
            pytest.param(when, marks=pytest.mark.slow)
            for when in (("toy", 3, "silo-2"), ("fedavg", 1, "silo-0"))
        ),
    ],
    ids=str,
)
def test_it_resumes_bit_for_bit(finished, tmp_path, when):
    with pytest.raises(KeyboardInterrupt):
        uefl.train(KEYS, out=tmp_path / "run", observer=Killer(when))
    uefl.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(finished)


@pytest.mark.slow
def test_it_resumes_after_a_kill(finished, tmp_path):
    out, when = str(tmp_path / "run"), ("toy", 2, "silo-1")
    code = (
        f"import uefl; from {__name__} import KEYS, Killer; uefl.train(KEYS, out={out!r},"
        f" observer=Killer({when!r}, True))"
    )
    done = fresh.python(code)
    assert done.returncode == -signal.SIGKILL, done.stderr
    uefl.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(finished)


def test_client_state_is_private_and_counts_its_own_turns():
    from tests.federated.tiny import arm, settings

    one, _, _ = arm(settings("toy", participation=0.5, rounds=[4]))
    while not one.finished:
        one.turn()
    turns = {client: int(own["turns"]) for client, own in one.members[0].private.items()}
    assert sum(turns.values()) == 4 * 2  # two of three clients in each of four rounds
    assert len(set(turns.values())) > 1
    assert "offset" not in one.members[0].state.tensors


def test_an_instance_may_be_given_for_an_arm(tmp_path):
    run = uefl.train(
        KEYS, out=tmp_path / "run", arms={"mine": Toy(beta=0.1), "other": {"algorithm": "toy", "beta": 0.2}}
    )
    assert {name: (arm.algorithm, arm.parameters.beta) for name, arm in run.config.arms.items()} == {
        "mine": ("toy", 0.1),
        "other": ("toy", 0.2),
    }


def test_names_are_unique_and_suggested_by_similarity():
    assert registry()["toy"] is Toy
    with pytest.raises(ValueError, match=r"register\('fedavg'\): .*FedAvg"):
        uefl.register("fedavg", Toy)
    with pytest.raises(TypeError, match=r"uefl\.Algorithm"):
        uefl.register("other", object)
    with pytest.raises(UserError, match=r"key 'betta' .*\[Toy\] .*'beta'"):
        Toy(betta=0.1)
    with pytest.raises(UserError, match=r"'toyy'.*'toy'"):
        find("toyy")


def test_an_instance_with_an_unwritable_parameter_is_rejected(tmp_path):
    class ScaledToy(Toy):
        def __init__(self, scale=1.0):
            super().__init__()
            self.scale = scale

    with pytest.raises(UserError, match=r"'scale'.*ScaledToy.*parameter"):
        uefl.train(KEYS, out=tmp_path / "run", arms={"mine": ScaledToy(scale=5.0)})
    assert not (tmp_path / "run").exists()


def test_algorithms_are_named_only_in_their_files():
    """The framework does not know any algorithm by name: no list and no comparison contains one."""
    root = Path(base.__file__).parents[1]
    names = [name for name in registry() if registry()[name].__module__.startswith("uefl.")]
    assert len(names) >= 12
    for path in root.rglob("*.py"):
        if path.is_relative_to(root / "algorithms"):
            continue
        text = path.read_text()
        found = [
            name for name in names if f'"{name}"' in text.replace("import uefl", "") or f"'{name}'" in text
        ]
        assert [name for name in found if path.name not in ALLOWED.get(name, ())] == [], path


def test_modules_of_the_core_do_not_mention_algorithms():
    """Modules of the core mention no algorithm, not even in a comment, however it is written.

    Names that are also words of English, and the name of the package, cannot be told apart.

    Data sets, partitions and networks name their papers, and the command line the purpose of the package.
    """
    root = Path(base.__file__).parents[1]
    names = {name for name, kind in registry().items() if kind.__module__.startswith("uefl.")} - {
        "local",
        "centralized",
        "supervised",
    }
    pattern = re.compile(rf"\b({'|'.join(sorted(names, key=len, reverse=True))})\b", re.IGNORECASE)
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] not in ("algorithms", "data", "models", "cli.py"):
            assert {match.group().lower() for match in pattern.finditer(path.read_text())} <= {"uefl"}, path


ALLOWED = {
    "uefl": {
        *("cli.py", "load.py", "isolation.py", "__init__.py", "runner.py", "suite.py", "deployment.py"),
        *("command.py", "setting.py", "silo.py", "link.py", "messenger.py", "node.py"),
    },
    "local": {
        "api.py",
        "cli.py",
        "stage.py",
        *("client.py", "config.py", "model.py", "privacy_floor.py", "privacy.py", "sections.py"),
    },
}
"""names of algorithms that also name something else (the package, an engine, a kind of privacy), and the
files with that name"""


@pytest.mark.slow
def test_the_example_of_the_document_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(base.__file__).parents[2] / "docs" / "algorithms.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert f'[project.entry-points."{base.ALGORITHMS._group}"]' in text
    arms = 'arms={"shrink": {"rate": 0.05}, "fedavg": {}}'
    small = 'data={"train_per_client": 40, "test_per_client": 10}, width=4, rounds=[1], threads=1'
    exec(code.replace(arms, f"{arms}, {small}"), found := {})
    assert set(found["run"].summary) == {"shrink", "fedavg"}


@pytest.mark.slow
def test_name_in_the_package_is_reserved_from_the_first_call():
    code = "import uefl; uefl.register('fedprox', type('Mine', (uefl.Algorithm,), {}))"
    done = fresh.python(code)
    assert "register('fedprox'): uefl.algorithms.fedprox.FedProx" in done.stderr
    with pytest.raises(TypeError, match=r"register\(3\): .*name"):
        uefl.register(3, Algorithm)
