"""FedBR: its contrast and its pseudo-images follow the paper."""

import pytest
import torch

from tests.federated.engine_wrappers import lies, recorded
from tests.federated.interrupted import killed_and_resumed
from tests.federated.tiny import arm, federation, first_turn, settings, state, values
from uefl.algorithms.fedbr import FedBR, contrast, most_means
from uefl.errors import RunError, UserError

OFF = {"contrast": 0.0, "uniform": 0.0}
MANY = federation((148, 148, 148))
"""federation of clients that make at most three pseudo-images each"""


@pytest.mark.parametrize(
    ("received", "own", "expected"), [(1, -1, 0.0181499), (0.5, 0.5, 0.6931472), (0, 1, 2.1269280)]
)
def test_the_contrast_at_given_similarities(received, own, expected):
    """``received`` and ``own`` are the cosines with the features of the pseudo-images."""
    pseudo = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    at = [torch.tensor([[cosine, (1 - cosine**2) ** 0.5]], dtype=torch.float64) for cosine in (own, received)]
    assert float(contrast(pseudo, *at, pull=2.0, push=2.0)) == pytest.approx(expected, abs=1e-6)


def test_the_contrast_is_differentiable():
    generator = torch.Generator().manual_seed(0)
    features = [
        torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    assert torch.autograd.gradcheck(lambda *x: contrast(*x, pull=2.0, push=0.5), features)


def watched(monkeypatch, name):
    """Return the arguments and the work of every call of one method of FedBR."""
    calls, original = [], getattr(FedBR, name)

    def spy(self, work, *rest):
        before = {"values": work.values.clone(), "projection": work.memory["projection"].detach().clone()}
        result = original(self, work, *rest)
        after = {"values": work.values.clone(), "projection": work.memory["projection"].detach().clone()}
        calls.append((before, after, rest))
        return result

    monkeypatch.setattr(FedBR, name, spy)
    return calls


def test_the_projection_step_ascends_and_keeps_the_network(monkeypatch):
    calls = watched(monkeypatch, "ascend")
    one, workspace, _ = arm(settings("fedbr", projection_lr=1e-3, local_epochs=2))
    one.turn()
    assert len(calls) == 3 * 2 * 2  # clients, passes, batches
    for before, after, _ in calls:
        assert torch.equal(before["values"], after["values"])
        assert not torch.equal(before["projection"], after["projection"])
    projector = one.members[0].algorithm.projector(workspace.net).requires_grad_(False)
    for before, after, (features,) in calls:
        worth = []
        for at in (before, after):
            torch.nn.utils.vector_to_parameters(at["projection"], projector.parameters())
            worth.append(
                float(contrast(*map(projector, (each.detach() for each in features)), pull=2.0, push=2.0))
            )
        assert worth[1] > worth[0]


def test_the_network_does_not_move_the_projection_head():
    """With a learning rate of almost zero, the client returns the projection head that it received."""
    one = arm(settings("fedbr", projection_lr=1e-30))[0]
    before = state(one).tensors["projection"].clone()
    one.turn()
    assert torch.allclose(state(one).tensors["projection"], before, rtol=1e-6, atol=0)


def test_first_pseudo_features_come_from_the_global_model(monkeypatch):
    calls = watched(monkeypatch, "ascend")
    arm(settings("fedbr", local_epochs=1), MANY)[0].turn()
    pseudo, own, received = calls[0][2][0]
    assert torch.equal(pseudo, received)
    assert pseudo.shape == own.shape == (9, 16)  # nine pseudo-images of three clients, with 16 features
    pseudo, _, received = calls[2][2][0]
    assert not torch.equal(pseudo, received)


def test_pseudo_images_do_not_change_running_statistics():
    """After one step from the same model, the running statistics equal FedAvg's."""
    own, average = (arm(settings(name, local_steps=1))[0] for name in ("fedbr", "fedavg"))
    own.turn(), average.turn()
    assert torch.equal(state(own).tensors["buffers"], state(average).tensors["buffers"])
    assert not torch.equal(values(own), values(average))


def test_pseudo_features_do_not_depend_on_running_statistics():
    """The network could otherwise learn to be uncertain only when running statistics are in use."""
    work = first_turn(settings("fedbr", pseudo=8), MANY)
    found = []
    for scale in (1.0, 50.0):
        work.workspace.flat.buffers.fill_(scale)
        found.append(torch.cat(work.workspace.algorithm.of_pseudo(work), 1))
        assert set(work.workspace.flat.buffers.tolist()) == {scale}
    assert torch.equal(*found)


def test_pseudo_images_are_shared_means_of_ten_images():
    sent = []

    def record(messages):
        training = [message for message in messages.values() if message.options.get("train")]
        sent.extend(message.tensors["pseudo"].clone() for message in training)

    one = arm(settings("fedbr", pseudo=6), MANY, recorded(record))[0]
    one.turn(), one.turn()
    first = sent[0]
    assert (first.shape, len(sent)) == ((6, 1, 8, 8), 6)
    assert all(torch.equal(each, first) for each in sent)
    assert torch.allclose(first * 10, (first * 10).round(), atol=1e-3)
    assert all(not torch.allclose(first * n, (first * n).round(), atol=1e-3) for n in range(1, 10))
    assert first.flatten(1).unique(dim=0).shape[0] == 6


@pytest.mark.parametrize(("images", "most"), [(1, 0), (19, 0), (20, 1), (50, 1), (51, 2), (1000, 20)])
def test_a_client_makes_few_means(images, most):
    assert most_means(images) == most
    assert 10 * most <= max(images / 2, 20)


def test_clients_with_too_few_images_are_refused():
    fed = federation((12, 12, 12))
    _, workspace, _ = arm(settings("fedbr"), fed)
    with pytest.raises(UserError, match=r"\b20 training"):
        workspace.algorithm.check(fed, "arm", workspace.net)


def test_client_without_pseudo_images_ends_the_run():
    one = arm(settings("fedbr"), wrap=lies(lambda reply: reply.tensors.pop("pseudo", None)))[0]
    with pytest.raises(RunError, match=r"silo-1.*pseudo-images.*pseudo\b"):
        one.turn()


def test_the_projection_heads_have_the_sizes_of_paper_and_code():
    net = arm(settings("fedbr", hidden=512))[1].net
    sizes = {
        kind: sum(p.numel() for p in FedBR(projection=kind).projector(net).parameters())
        for kind in ("paper", "code")
    }
    assert sizes == {"paper": 230_016, "code": 2_099_712}


def test_a_network_without_such_a_head_is_refused():
    with pytest.raises(UserError, match=r"arm 'arm'.*fedbr.*encoder = 'cnn'"):
        FedBR().check(None, "arm", torch.nn.Linear(2, 2))


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """Kill the run in two rounds and while clients make pseudo-images, before there is a checkpoint."""
    killed_and_resumed(tmp_path, {"fedbr": {"pseudo": 8}}, (2, 4, 6))
