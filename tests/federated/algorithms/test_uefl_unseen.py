"""Clients that are only measured: their messages, and the codebook that they choose."""

from types import SimpleNamespace

import pytest
import torch

from tests.federated.engine_wrappers import recorded
from tests.federated.tiny import arm, federation, finish, settings, state, visible
from uefl.algorithms.uefl import unseen
from uefl.algorithms.uefl.quantizer import Quantizer
from uefl.algorithms.uefl.server import UEFL
from uefl.engines.base import Message
from uefl.models.heads import Head
from uefl.report.run_folder import summarize


@pytest.mark.parametrize(
    "keys", [{}, {"personal": True}, {"ext_share": "group"}], ids=["private", "personal", "group"]
)
def test_unseen_clients_are_measured_with_three_codebooks(keys):
    algorithm, _, _ = arm(settings(extend="all", rounds=[3, 2], **keys), federation(unseen=1))
    records = finish(algorithm)
    others = [r for r in records if r.get("unseen")]
    assert len(others) == 5
    assert all(0 <= r[name] <= 1 for r in others for name in ("accuracy", "accuracy_union", "accuracy_best"))
    assert not any("accuracy_best" in r for r in records if not r.get("unseen"))
    summary = summarize(records, 0.0, {"arm": UEFL.columns})["arm"]
    assert summary["accuracy_best"] == others[-1]["accuracy_best"]
    assert summary["perplexity"] == pytest.approx(sum(r["perplexity"] for r in records[-4:-1]) / 3)
    if not keys:
        assert {r["codewords"] for r in others} == {4}
        assert records[-2]["codewords"] == 8


def test_the_best_codebook_has_the_least_quantization_error():
    tokens = torch.tensor([[[[1.0]]], [[[3.0]]]])
    torch.manual_seed(0)
    net = torch.nn.Module()
    net.head = Head(1, 4, 2, 0.0, False)
    parts, codebooks = (
        torch.tensor([[9.0], [0.0], [2.9]]),
        torch.tensor([[True, True, False], [True, False, True]]),
    )
    found = unseen.choices(Quantizer(), net, tokens, Message({"parts": parts, "codebooks": codebooks}))
    torch.testing.assert_close(found["error"], torch.tensor([[1.0, 3.61], [9.0, 0.01]]))
    of_union = net.head.stochastic(net.head.prefix(torch.tensor([[0.0], [2.9]]))).softmax(-1)
    torch.testing.assert_close(found["probs.union"], of_union)
    # the first codebook says class 0, the second class 1
    by_class = found | {"probs.codebooks": torch.eye(2).expand(2, 2, 2)}
    work = SimpleNamespace(test=SimpleNamespace(labels=torch.tensor([1, 1])))
    assert unseen.measured(work, [by_class])["accuracy_best"] == 1
    assert "probs.union" not in unseen.choices(
        Quantizer(stage=1), net, tokens, Message({"parts": parts, "codebooks": codebooks})
    )


@pytest.mark.parametrize(
    ("keys", "parts", "codebooks"),
    [
        ({}, 4, 3),  # the shared part, and one of each client
        ({"personal": True}, 6, 3),
        ({"personal": [["silo-0", "silo-2"], ["silo-1"]]}, 5, 3),
        ({"ext_share": "group"}, 2, 1),
        ({"growth": "double", "rounds": [1, 1, 1]}, 7, 3),  # of several sizes
    ],
    ids=["private", "personal", "lists", "group", "doubled"],
)
def test_unseen_clients_get_every_part_and_codebook(keys, parts, codebooks):
    overheard = []

    def record(messages):
        if "unseen-0" in messages:
            overheard.append(messages["unseen-0"])

    fed = federation(unseen=1)
    cfg = settings(**{"extend": "all", "rounds": [2, 1], **keys})
    algorithm, _, _ = arm(cfg, fed, recorded(record))
    finish(algorithm)
    sent = overheard[-1].tensors
    every = [state(algorithm).tensors[f"part.{i}"] for i in range(parts)]
    assert torch.equal(sent["parts"], torch.cat(every))
    assert f"part.{parts}" not in state(algorithm).tensors
    assert len({tuple(part.flatten().tolist()) for part in every}) == parts, "no part stands for another one"
    shared = [
        part for part, names in zip(every, state(algorithm).plain["part_clients"], strict=True) if names[2:]
    ]
    assert torch.equal(sent["codebook"], torch.cat(shared or every))
    seen = [sent["parts"][chosen] for chosen in sent["codebooks"]]
    assert len(seen) == codebooks
    for client in fed.clients:
        assert sum(torch.equal(codebook, visible(algorithm, client.name)) for codebook in seen) == 1
