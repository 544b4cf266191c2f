"""Steps are recorded once and replayed.

The bits are the same as without a recording, for every algorithm with static steps.
"""

import pytest
import torch

from tests.federated import tiny_sets
from tests.federated.tape import Tape
from tests.federated.tiny import arm, federation, finish, settings, values
from tests.federated.whole_run import Watcher, start
from uefl.algorithms.base import Algorithm, registry
from uefl.client.recording import CudaRecorder, is_static
from uefl.isolation import isolated
from uefl.seeds import make_repeatable

SIZES = (40, 40, 40)  # in batches of 16: two of one size in every pass, and one of eight
STATIC = sorted(
    name
    for name, kind in registry().items()
    if kind.trains_clients and kind.kind == "labeled" and is_static(kind())
)


def trained(recorder, name, algorithm=None, fed=None, **keys):
    """Return the arm's records and parameters, the arm, and the recorder."""
    keys = {"local_epochs": 6, "rounds": [1], "max_iterations": 1, **keys}
    one, workspace, _ = arm(settings(name, **keys), fed or federation(SIZES), algorithm=algorithm)
    workspace.recorder = recorder if is_static(workspace.algorithm) else None  # as a Workspace has it
    return finish(one), values(one).clone(), one, recorder


def both(name, algorithm=None, fed=None, tape=None, same=True, **keys):
    """Train without and with a recording, which gives the ``same`` bits."""
    plain, taped = (trained(recorder, name, algorithm, fed, **keys) for recorder in (None, tape or Tape()))
    assert (taped[0] == plain[0], torch.equal(taped[1], plain[1])) == (same, same)
    return plain, taped


def test_list_of_algorithms_with_a_static_step():
    """An algorithm that does not override the step is static by default."""
    assert {
        "fedavg",
        "fedavg-wide",
        "fedbn",
        "fedper",
        "fedprox",
        "local",
        "scaffold",
        "tpt",
        "uefl",
        "uefl-published",
    } <= set(STATIC)
    assert not {"fedsr", "fediir", "fedcr", "distrans", "vhl", "fedbr"} & set(STATIC)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATIC)
def test_a_replay_has_the_same_bits(name):
    plain, taped = both(name, fed=federation(SIZES, test_is_holdout=name == "uefl-published"), rounds=[2])
    for state, other in zip(
        (m.state for m in taped[2].members), (m.state for m in plain[2].members), strict=True
    ):
        assert all(torch.equal(tensor, other.tensors[key]) for key, tensor in state.tensors.items())
    tape, turns = taped[3], 2 * (1 if name == "centralized" else 3)
    assert tape.recorded == turns
    assert tape.replayed >= turns * (2 * 6 - 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"extend": "all", "rounds": [1, 1], "max_iterations": 2},
        {"extension": "residual", "extend": "all", "rounds": [1, 1], "max_iterations": 2},
        {"search": "cosine", "estimator": "rotation"},
        {"segment_codebooks": True, "codebook_lr": 3.0},
        {"codebook_after": 1, "revive_below": 0.5, "rounds": [2]},
        {"personal": True},
        {"ema_decay": 0.9},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_replay_is_exact_for_every_kind_of_codebook(keys):
    _, taped = both("uefl", **keys)
    assert bool(taped[3].recorded) == ("ema_decay" not in keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"augment": "rotate", "optimizer": "sgd", "momentum": 0.9},
        pytest.param({"augment": "flip", "optimizer": "adamw"}, marks=pytest.mark.slow),
    ],
)
def test_replay_is_exact_for_optimizers_and_augmentation(keys):
    _, taped = both("fedavg", **keys)
    assert taped[3].recorded


@pytest.mark.parametrize(
    "name",
    [
        "fedul",
        "fedllp",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedavg-labeled", "fedpl", "fedllp-vat")),
    ],
)
def test_replay_is_exact_for_unlabeled_sets(name):
    found = []
    for recorder in (None, Tape()):
        one, workspace, _ = tiny_sets.arm(tiny_sets.settings(name, local_epochs=6, rounds=[1], penalty=1e-4))
        workspace.recorder = recorder if is_static(workspace.algorithm) else None
        found.append((finish(one), values(one).clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert bool(recorder.recorded) == (name in ("fedul", "fedavg-labeled"))


class Fixed(Algorithm):
    """A part of its network is not trained, not even by weight decay."""

    def build_model(self, spec):
        net = super().build_model(spec)
        next(net.parameters()).requires_grad_(False)
        return net

    def weight_decay(self, work):
        return 0.1


def test_replay_is_exact_for_a_partly_frozen_network():
    _, taped = both("fedavg", algorithm=Fixed(), rounds=[1])
    assert taped[3].recorded
    flat = arm(settings("fedavg"), federation(SIZES), algorithm=Fixed())[1].flat
    change = (taped[1] - flat.values.detach()).abs()
    of_parameter = dict(zip(flat.module.parameters(), flat.split(change), strict=True))
    fixed = [piece for parameter, piece in of_parameter.items() if not parameter.requires_grad]
    assert max(piece.max() for piece in fixed) < 1e-6  # the rounding of an average
    assert torch.cat([of_parameter[parameter].flatten() for parameter in flat.trained]).mean() > 1e-4


def test_replay_is_exact_for_pooled_images():
    """The server's own training can be recorded like the turn of a client."""
    _, taped = both("centralized")
    assert taped[3].recorded == 1


class Waits(Algorithm):
    """Makes a false claim: its loss reads a number on the host."""

    static_step = True

    def loss(self, work, batch):
        loss = super().loss(work, batch)
        return loss * float(loss.detach())


class Draws(Algorithm):
    """Makes a false claim: the host draws its random numbers."""

    static_step = True

    def loss(self, work, batch):
        return super().loss(work, batch) * torch.rand((), generator=work.generator)


class Chooses(Algorithm):
    """Makes a false claim: only the device knows the number of images."""

    static_step = True

    def loss(self, work, batch):
        even = batch.labels % 2 == 0
        return work.cross_entropy(work.logits(batch.images)[even], batch.labels[even])


class Renews(Algorithm):
    """Makes a false claim: it keeps a new tensor in every step."""

    static_step = True

    def loss(self, work, batch):
        loss = super().loss(work, batch)
        work.memory["mean"] = 0.9 * work.memory.get("mean", 0) + 0.1 * loss.detach()
        return loss * work.memory["mean"]


class FollowsCount(Algorithm):
    """Makes a false claim: its loss depends on a counter in Python."""

    static_step = True

    def loss(self, work, batch):
        return super().loss(work, batch) * work.step


def test_false_claim_of_recording_is_detected():
    for claim, operation in ((Waits, "_local_scalar_dense"), (Draws, "rand"), (Chooses, "index")):
        with pytest.raises(Exception, match=rf"\b0 .*\b3 .*capturing: {operation}"):
            trained(Tape(), "fedavg", claim(), rounds=[1])
    for claim in (FollowsCount, Renews):
        both("fedavg", algorithm=claim(), same=False, rounds=[1])


def test_class_that_changes_the_step_must_declare_recording():
    class UndeclaredStep(Algorithm):
        def loss(self, work, batch):
            return super().loss(work, batch)

    class Below(UndeclaredStep):
        pass

    class Says(UndeclaredStep):
        static_step = True

    class AlsoChanges(Says):
        def after_batch(self, work, batch):
            pass

    class OtherMethods(Algorithm):
        def before_round(self, work):
            pass

    class AlsoSilent(Algorithm):
        def before_step(self, work, gradient):
            pass

    class Behind(Says, AlsoSilent):
        """A claim of one class does not hold for another one."""

    kinds = (UndeclaredStep, Below, Says, AlsoChanges, OtherMethods, Behind)
    assert [is_static(kind()) for kind in kinds] == [False, False, True, False, True, False]


def test_frequent_batch_sizes_are_recorded():
    _, taped = both("fedavg", local_epochs=10, rounds=[1])  # twenty batches of 16 and ten of 8
    assert (taped[3].recorded, taped[3].replayed) == (3 * 2, 3 * (18 + 8))


def test_few_steps_of_one_size_are_not_recorded():
    tape = Tape()
    both("fedavg", tape=tape, local_epochs=4)  # eight batches of 16 and four of 8
    assert tape.recorded == 0


def test_recording_without_a_gpu_is_noted(tmp_path):
    assert arm(settings("fedavg", cuda_graphs=True))[1].recorder is None
    watcher = Watcher()
    start(tmp_path / "run", 'arms=["fedavg"]', "cuda_graphs=true", observer=watcher)
    (notice,) = (notice for notice in watcher.notices if "run.cuda_graphs" in notice)
    assert "arm 'fedavg'" in notice


@pytest.fixture
def repeatable():
    """Select the kernels that a run uses on a GPU."""
    with isolated():
        make_repeatable(torch.get_num_threads(), torch.device("cuda"))
        yield


@pytest.mark.cuda
@pytest.mark.usefixtures("repeatable")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fedavg", "uefl", "scaffold"])
def test_a_cuda_graph_has_the_same_bits(name):
    found = []
    for graphs in (False, True):
        one, workspace, _ = arm(
            settings(name, local_epochs=6, rounds=[2], cuda_graphs=graphs), federation(SIZES), device="cuda"
        )
        assert isinstance(workspace.recorder, CudaRecorder) == graphs
        found.append((finish(one), values(one).clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
