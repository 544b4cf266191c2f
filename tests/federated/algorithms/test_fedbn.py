"""FedBN: batch norm is never sent, and networks without it train as with FedAvg."""

import torch
from torch import nn

from tests.federated.engine_wrappers import lies
from tests.federated.tiny import again, arm, federation, finish, message_to, settings, values
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fedbn import FedBN
from uefl.models.net import Net


class _WithoutNorm:
    """The usual network, its batch norm replaced by group norm."""

    def build_model(self, spec):
        net = Net(spec.settings, spec.shape, spec.classes)
        for owner in list(net.modules()):
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.BatchNorm2d):
                    setattr(owner, name, nn.GroupNorm(1, child.num_features))
        return net


class PlainFedBN(_WithoutNorm, FedBN):
    pass


class PlainFedAvg(_WithoutNorm, FedAvg):
    pass


def test_without_batch_norm_it_is_fedavg_bit_for_bit():
    cfg = settings("fedavg")
    own, average = (arm(cfg, algorithm=algorithm)[0] for algorithm in (PlainFedBN(), PlainFedAvg()))
    assert finish(own) == finish(average)
    assert torch.equal(values(own), values(average))


def norms(net):
    return {name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)}


def test_only_batch_norm_differs_between_clients():
    one, workspace, _ = arm(settings("fedbn"))
    one.turn()
    models = [
        workspace.named(one.members[0].state.tensors, one.members[0].private[client])
        for client in one.context.clients
    ]
    private = set(workspace.private_names())
    assert {name.rpartition(".")[0] for name in private} == norms(workspace.net)
    for name in models[0]:
        assert torch.equal(models[0][name], models[1][name]) == (name not in private)


def test_the_server_sends_and_keeps_no_batch_norm():
    one, workspace, _ = arm(settings("fedbn"))
    sent = sum(
        p.numel()
        for m in workspace.net.modules()
        if isinstance(m, nn.BatchNorm2d)
        for p in m.parameters(recurse=False)
    )
    whole = sum(p.numel() for p in workspace.net.parameters())
    assert len(values(one)) == whole - sent
    assert len(one.members[0].state.tensors["buffers"]) == 0
    message = message_to(one, "silo-0", train=True)
    assert {name: len(tensor) for name, tensor in message.tensors.items()} == {
        "values": whole - sent,
        "buffers": 0,
    }
    assert {name: expected.shape for name, expected in message.expects.items()} == {
        "values": (whole - sent,),
        "buffers": (0,),
    }
    assert one.engine._clients["silo-0"](message).tensors.keys() == {"values", "buffers"}


def test_layers_are_recognized_by_their_type():
    algorithm = FedBN()
    assert algorithm.is_private("downsample.1.weight", nn.BatchNorm2d(3))
    assert not algorithm.is_private("bn.weight", nn.Linear(3, 3))


def test_unseen_clients_and_global_model_use_the_mean_layers():
    fed = federation(unseen=1)
    one, _, _ = arm(settings("fedbn"), fed)
    one.turn()
    record = next(r for r in one.turn() if r["client"] == "unseen-0")
    assert record["unseen"] is True
    assert "global_accuracy" not in record
    mean = one.members[0].private.mean(one.members[0].algorithm, one.have_trained)
    for name, tensor in mean.items():
        assert torch.allclose(
            tensor, torch.stack([own[name] for own in one.members[0].private.values()]).mean(0)
        )
    sent = message_to(one, "unseen-0", train=False).private
    assert all(torch.equal(sent[name], tensor) for name, tensor in mean.items())


def test_a_saved_client_that_never_trained_has_the_mean_layers():
    one, workspace, _ = arm(settings("fedbn", participation=0.6, quorum=0.5))
    one.turn()
    (absent,) = set(one.context.clients) - set(one.have_trained)
    model, own = one.networks(workspace)[0]
    names = workspace.private_names()
    assert names
    for name in names:
        assert torch.equal(own[absent][name], model[name])
        mean = torch.stack([own[client][name] for client in one.have_trained]).double().mean(0)
        torch.testing.assert_close(model[name].double(), mean, rtol=1e-6, atol=1e-7)


def test_global_and_personalized_accuracy_survive_resume():
    cfg = settings("fedbn", personalized=True)
    records = finish(arm(cfg)[0])
    assert all(
        0 <= r[key] <= 1 for r in records for key in ("accuracy", "global_accuracy", "personalized_accuracy")
    )
    assert again(cfg) == records


def test_a_client_with_a_rejected_reply_keeps_its_layers():
    def breaks(reply):
        if reply.tensors:
            reply.tensors["values"] = reply.tensors["values"] * torch.nan

    one, _, _ = arm(settings("fedbn", quorum=0.5), wrap=lies(breaks))
    before = {name: tensor.clone() for name, tensor in one.members[0].private["silo-1"].items()}
    one.turn()
    assert all(torch.equal(tensor, one.members[0].private["silo-1"][name]) for name, tensor in before.items())
