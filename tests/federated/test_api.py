"""The Python interface: presets with overrides, and the user's own clients, network and algorithm."""

import logging
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

import uefl
from tests.federated.interrupted import Killer
from tests.fresh import python
from uefl import config
from uefl.algorithms import base
from uefl.client.work import Batch, Work
from uefl.data import from_arrays
from uefl.report.plots import write_plots
from uefl.report.write import write_report

STEPS = {"local_epochs": 1, "batch_size": 16, "lr": 1e-2}
KEYS = {"threads": 1, "precision": "fp32", "passes": 2, "rounds": [1, 1], **STEPS}
SMALL = {"width": 4, "hidden": 8}


def part(count, seed):
    """Return stripes at the position of their class, with some noise: uint8 [count, 8, 8], and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = rng.integers(0, 60, (count, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 2 * label : 2 * label + 3] += 180
    return images, labels


class ImageDataset(torch.utils.data.Dataset):
    """A torch Dataset of images [1, 8, 8] in [0, 1]."""

    def __init__(self, images, labels):
        self.images, self.labels = torch.from_numpy(images).float()[:, None] / 255, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], int(self.labels[i])


def clients():
    """Return a client of arrays, one of tensors, and one of a Dataset without a test part."""
    return {
        "arrays": (part(30, 0), part(12, 1)),
        "tensors": tuple(tuple(map(torch.from_numpy, part(n, s))) for n, s in ((30, 2), (12, 3))),
        "dataset": (ImageDataset(*part(42, 4)), None),
    }


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


class Stateful(nn.Sequential):
    """A network with a state that is not a tensor."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 3))

    def get_extra_state(self):
        return {"calls": 1}


class Shrunk(uefl.Algorithm):
    """FedAvg with a penalty on the weights of the network."""

    class Parameters(base.Parameters):
        penalty: float = Field(0.1, ge=0, description="weight of the term")

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        weights = work.workspace.flat.values
        return super().loss(work, batch) + self.parameters.penalty * weights.square().mean()


def own(out, **keys):
    arms = {"mine": Shrunk(penalty=0.5), "fedavg": {}}
    return uefl.train(out=out, **{"clients": clients(), "model": network, "arms": arms, **KEYS, **keys})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:  # this run draws its plots, unlike others
        patch.setattr("uefl.report.write.write_plots", write_plots)
        return own(tmp_path_factory.mktemp("api") / "run")


def test_submodules_are_imported_when_they_are_used():
    done = python(
        "import sys, uefl; print('uefl.data' in sys.modules); uefl.data.from_arrays, uefl.data.rotate.resize;"
        " print({*uefl.__all__, 'data'} <= set(dir(uefl)), 'from_arrays' in dir(uefl.data))"
    )
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def test_a_preset_with_overrides_writes_all_results(tmp_path, caplog):
    caplog.set_level(logging.INFO, "uefl")
    keys = {
        **KEYS,
        **SMALL,
        "data": {"train_per_client": 30, "test_per_client": 10, "partition": {"angles": []}},
        "clients": 2,
    }
    run = uefl.train("demo", out=tmp_path / "run", arms=["fedavg", "uefl"], codewords=4, **keys)
    assert repr(run) == f"Run({str(tmp_path / 'run')!r}, finished: fedavg, uefl)"
    assert run.config.data.clients == 2
    frame = run.metrics
    assert len(frame) == 2 * 2 * 2
    last = frame[(frame.arm == "uefl") & (frame["round"] == run.summary["uefl"]["rounds"])]
    assert last.accuracy.mean() == pytest.approx(run.summary["uefl"]["accuracy"])
    images = np.zeros((3, 28, 28), dtype=np.uint8)
    probs = run.model("uefl").predict(images, client="silo-0")
    assert probs.shape == (3, 10)
    torch.testing.assert_close(probs.sum(1), torch.ones(3))
    assert run.model("fedavg").predict(images).shape == (3, 10)
    assert re.search("fedavg, uefl: 2 rounds .*2 clients", caplog.text)
    assert [line.message.split("  ")[0] for line in caplog.records if " round " in line.message] == [
        f"{arm} round {i}/2" for arm in ("fedavg", "uefl") for i in (1, 2)
    ]


def test_own_clients_network_and_algorithm(finished):
    assert list(finished.summary) == ["mine", "fedavg"]
    assert finished.config.arms["mine"].parameters.penalty == 0.5
    assert (finished.config.data.source, finished.config.model.encoder) == ("arrays", "given")
    assert set(finished.metrics.client) == {"arrays", "tensors", "dataset"}
    model = finished.model("mine")
    assert isinstance(model.members[0].net, nn.Sequential)
    images, _ = part(12, 1)
    probs = model.predict(images)
    assert probs.shape == (12, 3)
    torch.testing.assert_close(uefl.load(finished.path, model=network).model("mine").predict(images), probs)
    for name in ("report.md", "report.html", "plots/confusion.png", "plots/samples.png"):
        assert (finished.path / name).exists(), name


def test_a_run_starts_from_the_weights_of_a_given_module(tmp_path):
    one = network()
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    keys = {"arms": ["fedavg"], "rounds": [1]}
    first = own(tmp_path / "a", model=one, **keys)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, before[name])  # it was copied
    again = own(tmp_path / "b", model=one, **keys)
    other = own(tmp_path / "c", model=network(), **keys)
    assert (first.path / "metrics.jsonl").read_bytes() == (again.path / "metrics.jsonl").read_bytes()
    assert (first.path / "metrics.jsonl").read_bytes() != (other.path / "metrics.jsonl").read_bytes()


class Killed(Exception):
    pass


class KillAfter(Killer):
    """Ends the process, as it were, when an arm has measured a number of rounds."""

    def round(self, arm, round, records):
        if (arm, round + 1) == self.when:
            raise Killed


def test_a_run_of_own_parts_resumes_only_with_the_same_parts(tmp_path, finished, monkeypatch):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        own(out, observer=KillAfter(("mine", 2)))
    with pytest.raises(uefl.UserError, match=r"'arrays' .*Python.*uefl.resume\(out, clients=...\)"):
        uefl.resume(out)
    with pytest.raises(uefl.UserError, match=r"network .*Python; .*uefl.resume\(out, model=...\)"):
        uefl.resume(out, clients=clients())
    with pytest.raises(uefl.UserError, match=r"network .*changed"):
        uefl.resume(out, clients=clients(), model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    others = clients() | {"arrays": (part(30, 9), part(12, 1))}
    with pytest.raises(uefl.UserError, match=r"images .*clients"):
        uefl.resume(out, clients=others, model=network)
    monkeypatch.setattr(
        base.ALGORITHMS,
        "_entries",
        {name: kind for name, kind in base.registry().items() if kind is not Shrunk},
    )
    with pytest.raises(
        uefl.UserError, match=r"'mine'.*uefl.register: .*Python"
    ):  # the values in a new process
        uefl.resume(out, clients=clients(), model=network)
    run = uefl.resume(out, clients=clients(), model=network, arms={"mine": Shrunk(penalty=0.5)})
    assert (run.path / "metrics.jsonl").read_text() == (finished.path / "metrics.jsonl").read_text()
    assert run.model("fedavg").predict(part(3, 1)[0]).shape == (3, 3)


class Wordless(nn.Linear):
    """Refuses every image without a word."""

    def __init__(self):
        super().__init__(64, 3)

    def forward(self, images):
        raise ValueError


class OfTheBatch(nn.BatchNorm1d):
    """Normalizes by the batch, also in evaluation."""

    def __init__(self):
        super().__init__(3, track_running_stats=False)


class Squeezed(nn.Sequential):
    """Drops the axis of a batch of one."""

    def forward(self, images):
        return super().forward(images).squeeze()


def not_finite():
    layer = nn.Linear(64, 3)
    nn.init.constant_(layer.weight, float("nan"))
    return layer


@torch.inference_mode()
def of_inference():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def with_a_result():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    net.last = net(torch.zeros(1, 64))  # torch copies no tensor that has a gradient to give
    return net


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": of_inference()}, "model: '1.weight' .*inference_mode"),
        ({"model": with_a_result()}, "model: .*copied.*function"),
        ({"model": nn.Linear(64, 3, device="meta")}, "model: 'weight' .*meta"),
        ({"model": nn.Sequential(*network(), nn.BatchNorm1d(3, device="meta"))}, r"'\d.weight' .*meta"),
        ({"model": nn.Flatten()}, "model: .*parameters"),
        ({"model": nn.Linear(64, 3).double()}, "model: 'weight' .*torch.float64; .*float32"),
        ({"model": not_finite()}, "model: 'weight' .*finite"),
        ({"model": Wordless}, r"model: .*\[2, 1, 8, 8\]: ValueError"),
        ({"model": nn.LazyLinear(3)}, "model: 'weight' .*shape"),
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3))}, r"model: .*\[2, 1, 8, 8\]"),
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4))}, r"model: .*\[2, 3\] .*\[2, 4\]"),
        ({"model": lambda: nn.Sequential(*network(), nn.Softmax(-1))}, "model: .*logits.*softmax"),
        ({"model": Stateful}, "model: '_extra_state'"),
        ({"model": lambda: nn.Sequential(*network(), OfTheBatch())}, r"model: .*\[1, 1, 8, 8\]: .*channel"),
        ({"model": lambda: Squeezed(*network())}, r"model: .*\[1, 3\] .*\[1, 1, 8, 8\].* \[3\]"),
        ({"model": lambda: 3}, r"model: .*\bint; .*module"),
        ({"model": 3}, "model: .*module, .*dict"),
        ({"model": network(), "uncertainty": "ensemble", "passes": None}, "model: .*members"),
        ({"arms": ["uefl"]}, "model: .*tokens.*; Sequential .*'tokens'"),
        ({"arms": {"mine": Shrunk}}, "arm 'mine': .*uefl.Algorithm .*class;"),
        ({"arms": {"mine": 3}}, r"arm 'mine': .*uefl.Algorithm .*dict.*\bint$"),
        ({"arms": {"fedprox": Shrunk()}}, "arm 'fedprox': .*name"),
        ({"arms": ["fedavg"], "lr": -1}, r"key 'training.lr': .*\b0\b"),
        ({"clients": {}}, "clients .*empty"),
        ({"clients": [1, 2]}, r"clients: .*\(train, test\).*\blist$"),
        ({"clients": {"a": (part(9, 0)[0], None)}}, "a/train"),
        ({"source": 3}, "preset"),
        ({"source": "demoo"}, "'demoo' .*'demo'"),
        ({"gama": 1}, "key 'gama' .*'gamma'"),
        ({"federation": from_arrays(clients())}, r"clients .*federation"),
        ({"source": config.load("demo")}, r"configuration .*overrides"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_one_line_and_write_nothing(tmp_path, monkeypatch, keys, message):
    monkeypatch.setattr(
        base.ALGORITHMS,
        "_entries",
        {name: kind for name, kind in base.registry().items() if kind is not Shrunk},
    )
    with pytest.raises(uefl.UserError, match=message) as error:
        own(tmp_path / "run", **{"arms": ["fedavg"], **keys})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_parameters_of_an_instance_are_checked():
    with pytest.raises(uefl.UserError, match=r"key 'Shrunk.penalty': .*\b0; .*-1"):
        Shrunk(penalty=-1)
    with pytest.raises(uefl.UserError, match=r"key 'penalti' .*Shrunk.*'penalty'"):
        Shrunk(penalti=1)


def test_models_are_looked_up_by_existing_arms(finished):
    with pytest.raises(uefl.UserError, match=r"arm 'absent' .*mine, fedavg"):
        finished.model("absent")
    with pytest.raises(uefl.UserError, match="fedavg, mine"):
        finished.model()
    with pytest.raises(uefl.UserError, match=r"network .*Python; .*uefl.load\(out, model=...\)"):
        uefl.load(finished.path).model("mine")


def test_counts_of_the_last_round_equal_its_metrics(finished):
    """Confusion and reliability use the same predictions as accuracy and ECE."""
    for line in (r for r in finished._read.records if r["round"] == 2):
        confusion = np.reshape(line["confusion"], (3, 3))
        assert confusion.trace() / confusion.sum() == pytest.approx(line["accuracy"])
        right = np.reshape(line["reliability"], (-1, 2))
        assert right.sum(0).tolist() == [confusion.sum(), confusion.trace()]
        gap = np.abs(right[:, 1] - line["confidence"]).sum() / confusion.sum()
        assert gap == pytest.approx(line["ece"], abs=1e-6)


def test_a_run_inside_of_a_run_is_refused(finished):
    for inside in (finished.path / "again", finished.path / "plots" / "deep" / "er"):
        with pytest.raises(uefl.UserError, match=rf"{finished.path}; .*--out"):
            own(inside)
        assert not inside.exists()


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_an_error_on_a_client_names_client_and_method(tmp_path, caplog, kind):
    class Broken(Shrunk):
        def _term(self):
            raise kind("mistake")

        def loss(self, work: Work, batch: Batch) -> torch.Tensor:
            if work.client == "dataset":
                self._term()
            return super().loss(work, batch)

    end = uefl.RunError if kind is RuntimeError else KeyError
    with pytest.raises(end, match="mistake"):
        own(tmp_path / "run", arms={"broken": Broken()})
    (said,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert re.search(rf"dataset: Broken\.loss .*{kind.__name__}", said.getMessage())
    # other exceptions end the run and have a traceback of their own
    assert (said.exc_info is not None) == (kind is RuntimeError)
    if said.exc_info:
        assert "in _term" in caplog.text


def test_a_network_that_raises_on_a_client_is_named_too(tmp_path, caplog):
    class EvalOnlyNet(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1) if not self.training else x)

    with pytest.raises(uefl.RunError, match=r"\b0 .*\b3 .*quorum"):
        own(tmp_path / "run", model=lambda: EvalOnlyNet(64, 3), arms={"fedavg": {}})
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(r"arrays: FedAvg\.loss .*RuntimeError", said[0])


@pytest.mark.parametrize(
    ("source", "keys", "message"),
    [
        ("demo", {"width": 4}, r"key 'model.width': .*network .*\b4$"),
        ({"model": {"hidden": 8}, "arms": {"fedavg": {}}}, {}, r"key 'model.hidden': .*network .*\b8$"),
        ({"base": "demo", "model": {"encoder": "cnn"}}, {}, "network .*encoder 'cnn'"),
        ("file", {}, "network .*encoder 'resnet18'"),
        ("config", {}, "network .*encoder 'cnn'"),
    ],
    ids=["key", "mapping", "base", "file", "config"],
)
def test_a_network_and_a_section_that_names_another_are_refused(tmp_path, source, keys, message):
    if source == "file":
        source = tmp_path / "mine.toml"
        source.write_text('[model]\nencoder = "resnet18"\n[arms.fedavg]\n')
    if source == "config":
        source = config.load("demo", width=4)
    with pytest.raises(uefl.UserError, match=message):
        uefl.train(source, out=tmp_path / "run", clients=clients(), model=network, **keys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("source", ["demo", {"base": "demo"}], ids=str)
def test_given_network_replaces_the_network_of_a_preset(source):
    assert config.load(source).model.width != 128
    assert (
        config.load(source, given=True).model
        == config.load({"model": {"encoder": "given"}, "arms": {"fedavg": {}}}).model
    )


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_report_of_own_parts_can_be_written_again(finished):
    before = (finished.path / "report.html").read_text()
    (finished.path / "report.html").unlink()
    write_report(finished.path)
    assert (finished.path / "report.html").read_text() == before


def test_name_of_the_training_server_is_reserved(tmp_path):
    from tests.federated.tiny import federation, split
    from uefl.data.federation import ServerData

    fed = federation(server=ServerData(split(12, 5, 0.1), None))
    named = replace(fed, clients=(replace(fed.clients[0], name="server"), *fed.clients[1:]))
    with pytest.raises(uefl.UserError, match=r"client 'server' .*name"):
        uefl.train("demo", out=tmp_path / "run", federation=named)
    assert not (tmp_path / "run").exists()
