"""Clients that train at once have the results of clients one after the other, up to rounding."""

import importlib
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.federated.tiny import KEYS, again, arm, federation, finish, settings, workspace_of
from tests.federated.whole_run import Watcher, start
from uefl import train
from uefl.algorithms.base import Algorithm
from uefl.client import together
from uefl.errors import RunError, UserError
from uefl.models.flat import FlatModule
from uefl.models.net import Net

SIZES = (24, 17, 24)
NAMES = ("fedavg", "fedavg-wide", "fedbn", "fedper", "local", "tpt", "uefl", "uefl-published")
SGD = {"optimizer": "sgd", "momentum": 0.9}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def trained(at_once, name="fedavg", sizes=SIZES, algorithm=None, **keys):
    """Return the records and the arm after all rounds."""
    cfg = settings(name, clients_at_once=at_once, **{**SGD, **keys})
    fed = federation(sizes, test_is_holdout=name == "uefl-published")
    one, _, notices = arm(cfg, fed, algorithm=algorithm)
    return finish(one), one, notices


def check_close(found, expected):
    """Compare numbers in nested records."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            check_close(value, expected[key])
    elif isinstance(found, list):
        for one, other in zip(found, expected, strict=True):
            check_close(one, other)
    elif isinstance(found, float):
        assert math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5)
    else:
        assert found == expected


def check_alike(at_once=3, **options):
    """Train at once and one after the other, and compare records and states."""
    (records, one, _), (expected, other, _) = trained(at_once, **options), trained(1, **options)
    check_close(records, expected)
    for mine, theirs in zip(one.members, other.members, strict=True):
        for name, tensor in theirs.state.tensors.items():
            torch.testing.assert_close(mine.state.tensors[name], tensor, **CLOSE)
    return one, other


@pytest.mark.parametrize("name", NAMES)
def test_clients_at_once_train_as_alone(name):
    check_alike(name=name, rounds=[2, 1], max_iterations=2)


@pytest.mark.parametrize(
    "keys",
    [
        {"augment": "rotate"},
        {"augment": "photo", "frozen_batch_norm": True},
        {"local_steps": 3},
        {"personalized": True},
        {"uncertainty": "ensemble", "members": 2},
        {"norm_layer": "group", "weight_decay": 0.1},
    ],
    ids=lambda keys: " ".join(keys),
)
def test_keys_of_training_hold_for_clients_at_once(keys):
    check_alike(rounds=[2], **keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"extend": "all", "rounds": [1, 1], "max_iterations": 2},
        {"search": "cosine", "estimator": "rotation"},
        {"segment_codebooks": True, "codebook_lr": 3.0},
        {"personal": True},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_codebooks_of_clients_at_once(keys):
    check_alike(name="uefl", **keys)


def test_codebooks_in_one_search(monkeypatch):
    """On a GPU, one search has the codebooks of all clients."""
    monkeypatch.setattr(importlib.import_module("uefl_kernels.ops.vq"), "_JOINED_ON", ("cpu",))
    check_alike(name="uefl", rounds=[2])


def test_default_is_one_client_after_the_other():
    assert together.together({}, workspace_of(settings())) is None


def test_resumed_run_has_the_same_bits():
    cfg, fed = settings("uefl", clients_at_once=2, **SGD), federation(SIZES)
    assert again(cfg, fed) == finish(arm(cfg, fed)[0])


class CountsCalls(Algorithm):
    """Counts the calls of its loss by the shape of the batch."""

    stacked_step = True
    calls: ClassVar = Counter()

    def loss(self, work, batch):
        self.calls[tuple(batch.labels.shape)] += 1
        return super().loss(work, batch)


def test_loss_runs_once_for_all_clients_of_a_stack():
    CountsCalls.calls.clear()
    trained(3, algorithm=CountsCalls(), rounds=[1], sizes=(24, 24, 24))
    assert CountsCalls.calls == {(16,): 1, (8,): 1}
    CountsCalls.calls.clear()
    trained(3, algorithm=CountsCalls(), rounds=[1], sizes=(24, 20, 24))
    assert CountsCalls.calls == {(16,): 2, (8,): 1, (4,): 1}


class Convolutions(nn.Module):
    """A given network with dropout of feature maps."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.Dropout2d(0.3))
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, images):
        return self.head(self.body(images).flatten(1))


class Given(Algorithm):
    """Trains a network of its own."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def build_model(self, spec):
        return self.network()


def test_dropout_of_maps_has_the_masks_of_each_client():
    check_alike(algorithm=Given(Convolutions), rounds=[2])


class DropsInPlace(Convolutions):
    """Uses the tensor that dropout changes in place, not the result of the call."""

    def forward(self, images):
        maps = self.body(images)
        nn.functional.dropout(maps, 0.5, self.training, inplace=True)
        return self.head(maps.flatten(1))


def test_dropout_in_place_has_the_masks_of_each_client():
    check_alike(algorithm=Given(DropsInPlace), rounds=[2])


class Fails(Algorithm):
    """Fails for a client, before its training or in it."""

    stacked_step = True

    def __init__(self, inside=False):
        super().__init__()
        self.inside = inside

    def before_round(self, work):
        if work.client == "silo-1" and not self.inside:
            raise RuntimeError("first-words")

    def loss(self, work, batch):
        if self.inside and batch.labels.shape == (4,):
            raise RuntimeError("second-words")
        return super().loss(work, batch)


@pytest.mark.parametrize(("inside", "words"), [(False, "first-words"), (True, "second-words")])
def test_an_error_rejects_only_its_clients(inside, words):
    one = trained(3, algorithm=Fails(inside), sizes=(24, 20, 24), rounds=[1], quorum=0.5)[1]
    (rejected,) = one.rejected
    assert (rejected["client"], words in rejected["reason"]) == ("silo-1", True)


def test_late_groups_are_rejected():
    one, _, _ = arm(settings(clients_at_once=2, deadline=1e-9), federation(SIZES))
    with pytest.raises(RunError):
        one.turn()
    assert [each["client"] for each in one.rejected] == ["silo-0", "silo-1", "silo-2"]


def refused(algorithm=None, name="fedavg", **keys):
    """Return the message of the refusal."""
    workspace = workspace_of(settings(name, clients_at_once=2, **keys), algorithm=algorithm)
    with pytest.raises(UserError, match=r"run\.clients_at_once") as error:
        together.check(workspace, "arm")
    return str(error.value)


def test_algorithms_that_train_at_once_are_listed():
    for name in NAMES:
        together.check(workspace_of(settings(name, clients_at_once=2)), "arm")


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    "encoder", ["cnn", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cnn5x5", "resnet18", "vgg16_bn"))]
)
def test_networks_train_at_once(encoder, norm):
    base = {**KEYS, "model": {"encoder": encoder, "norm_layer": norm}}
    fed = replace(federation(), shape=(1, 32, 32))
    together.check(workspace_of(settings("fedavg", base, clients_at_once=2), fed), "arm")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("encoder", ["cnn", "cnn5x5", "resnet18", "vgg16_bn"])
def test_stack_on_a_gpu_asks_for_no_layout(encoder, norm):
    """The tensors claim to be on a GPU, and have shapes and layouts, but no values."""
    model = {"encoder": encoder, "norm_layer": norm}
    if encoder != "cnn5x5":
        model |= {"dropout": 0.0}  # with dropout, the tensors include states of generators, which need values
    cfg = settings("fedavg", {**KEYS, "model": model}).model
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        net = Net(cfg, (1, 32, 32), 3)
        flat = FlatModule(net)
        workspace = SimpleNamespace(flat=flat, net=net, device=torch.device("cpu"))
        stack = together._Stack(workspace, [flat.values.detach()] * 2, [flat.buffers] * 2)
        images = torch.zeros(2 * 3, 1, 32, 32).contiguous(memory_format=torch.channels_last)
        logits = stack.mapped(net, images.unflatten(0, (2, 3)))
    assert (logits.device.type, logits.shape) == ("cuda", (2, 3, 3))


@pytest.mark.parametrize(
    ("name", "method"), [("fedprox", "regularize"), ("fedgate", "loss"), ("fedsr", "loss")]
)
def test_algorithm_with_a_step_of_its_own_is_refused(name, method):
    assert method in refused(name=name)


def test_moving_averages_are_refused():
    assert "stacked_step" in refused(name="uefl", ema_decay=0.9)


class Branches(Convolutions):
    """Branches on a value."""

    def forward(self, images):
        return super().forward(images) if images.sum() > 0 else super().forward(-images)


class DrawsNoise(Convolutions):
    """Draws noise that no seed of a client determines."""

    def forward(self, images):
        return super().forward(images + torch.rand_like(images))


@pytest.mark.parametrize("network", [Branches, DrawsNoise])
def test_network_that_vmap_does_not_take_is_refused(network):
    assert "vmap" in refused(Given(network))


class DropsTransposed(Convolutions):
    """Drops elements of maps in another order."""

    def forward(self, images):
        maps = self.body(images).contiguous().flatten(2).transpose(1, 2)
        return self.head(nn.functional.dropout(maps, 0.5, self.training).flatten(1))


class DropsViewed(Convolutions):
    """Drops elements of maps that are not channels-last."""

    def forward(self, images):
        maps = self.body(images).flatten(1).view(-1, 4, 6, 6)
        return self.head(nn.functional.dropout(maps, 0.5, self.training).flatten(1))


@pytest.mark.parametrize(("network", "shape"), [(DropsTransposed, [2, 36, 4]), (DropsViewed, [2, 4, 6, 6])])
def test_masks_of_other_layouts_are_refused(network, shape):
    assert str(shape) in refused(Given(network))


class ReplacesBuffer(Convolutions):
    """Keeps a mean in a buffer, and makes a new tensor of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, images):
        self.level = 0.9 * self.level + images.detach().mean()
        return super().forward(images)


class ReplacesData(Convolutions):
    """Clips a weight into new memory."""

    def forward(self, images):
        self.head.weight.data = self.head.weight.data.clamp(-0.1, 0.1)
        return super().forward(images)


@pytest.mark.parametrize(
    ("network", "name", "at_once"),
    [(ReplacesBuffer, "'level'", "'level'"), (ReplacesData, "'weight'", "vmap")],
)
def test_network_that_replaces_a_tensor_is_refused(network, name, at_once):
    """The saved model would lack the new tensor, and a client would pass it on to the next client."""
    assert at_once in refused(Given(network))
    with pytest.raises(TypeError, match=name):
        trained(1, algorithm=Given(network), rounds=[1])


def test_bfloat16_is_refused():
    """In a run in bfloat16, vmap would compute convolutions in float32."""
    assert "run.precision" in refused(precision="bf16")


def test_loss_cannot_use_the_data_of_one_client():
    class Uses(Algorithm):
        stacked_step = True

        def loss(self, work, batch):
            return super().loss(work, batch) / work.examples

    with pytest.raises(AttributeError):
        trained(3, algorithm=Uses(), rounds=[1])


def test_other_engines_refuse_clients_at_once(tmp_path):
    with pytest.raises(UserError, match=r"run\.clients_at_once"):
        train("demo", out=tmp_path / "run", engine="distributed", clients_at_once=2)
    assert not (tmp_path / "run").exists()


def test_algorithms_are_checked_before_a_run(tmp_path):
    with pytest.raises(UserError, match=r"run\.clients_at_once"):
        start(tmp_path / "run", 'arms=["scaffold"]', "clients_at_once=2")
    assert not (tmp_path / "run").exists()


def test_run_with_clients_at_once_reports_every_client(tmp_path):
    watcher = Watcher()
    start(tmp_path / "run", 'arms=["fedavg"]', "clients_at_once=2", "precision=fp32", observer=watcher)
    clients = [call[3] for call in watcher.calls if call[0] == "client"]
    assert set(Counter(clients)) == {"silo-0", "silo-1", "silo-2"}
