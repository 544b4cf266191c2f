"""FedPer keeps the head at the client, and with all layers private it is local training."""

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.federated.engine_wrappers import tampered
from tests.federated.tiny import arm, finish, settings, values, without
from uefl.algorithms.fedper import FedPer
from uefl.errors import UserError


def test_all_personal_is_training_apart():
    """Each client continues from its own model, so nothing of the other clients reaches it."""
    together = arm(settings("fedper", personal="all", rounds=[3]))[0]
    records = finish(together)

    def worse(reply):
        if reply.client != "silo-0":
            reply.private = {name: torch.zeros_like(tensor) for name, tensor in reply.private.items()}

    alone = arm(settings("fedper", personal="all", rounds=[3], participation=1.0), wrap=tampered(worse))[0]
    mine = [r for r in finish(alone) if r["client"] == "silo-0"]
    assert without(mine, "global_accuracy", "bytes") == without(
        [r for r in records if r["client"] == "silo-0"], "global_accuracy", "bytes"
    )
    assert len(values(together)) == 0


@pytest.mark.parametrize(("personal", "names"), [("last", {"fc2"}), ("head", {"fc1", "fc2"})])
def test_the_head_never_appears_in_the_upload(personal, names):
    one, workspace, _ = arm(settings("fedper", personal=personal))
    assert {name.split(".")[1] for name in workspace.private_names()} == names
    hidden = sum(p.numel() for name in names for p in getattr(workspace.net.head, name).parameters())
    sizes = []
    original = one.engine._clients["silo-0"]

    def spy(message):
        reply = original(message)
        sizes.append((len(message.tensors["values"]), len(reply.tensors["values"])))
        return reply

    one.engine._clients["silo-0"] = spy
    one.turn()
    whole = sum(p.numel() for p in workspace.net.parameters())
    assert sizes == [(whole - hidden, whole - hidden)]


class Own(FedPer):
    """A network with a head of one layer."""

    def build_model(self, spec):
        return super().build_model(replace(spec, given=lambda: copy.deepcopy(self.own)))


def own(net, **keys):
    return type("SourceInMemory", (Own,), {"own": net})(**keys)


def sequential():
    return nn.Sequential(
        OrderedDict(body=nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU()), head=nn.Linear(5, 3))
    )


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (sequential(), {"head.weight", "head.bias"}),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3)), {"2.weight", "2.bias"}),
    ],
    ids=["a head of one layer", "no head"],
)
def test_the_last_linear_layer_of_any_network_is_personal(net, names):
    assert set(arm(settings("fedper"), algorithm=own(net))[1].private_names()) == names


def test_a_network_without_a_personal_part_is_rejected():
    convolutions = nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    with pytest.raises(UserError, match=r"key 'personal': .*'last'"):
        arm(settings("fedper"), algorithm=own(convolutions))
    with pytest.raises(UserError, match=r"personal.*'head'"):
        arm(settings("fedper"), algorithm=own(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), personal="head"))
    assert arm(settings("fedper"), algorithm=own(convolutions, personal="none"))[1].private_names() == []
