"""Robust rules replace the mean.

They are compared with plain formulas and Flower's functions, meet clients that lie, and are resumed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.federated import tiny_sets
from tests.federated.engine_wrappers import tampered
from tests.federated.tiny import CODEBOOK, again, arm, federation, finish, settings, updates, values
from uefl.aggregation import Updates, WeightedMean, check_rule, choose, robust
from uefl.algorithms.base import registry
from uefl.data.federation import ClientData
from uefl.errors import RunError, UserError

RULES = {"median": {}, "trimmed_mean": {"attackers": 1}, "krum": {"attackers": 1}}
FIVE = {"sizes": (48,) * 5, "noise": (0.1,) * 5}


def result(sent, rule, attackers):
    averages = robust(
        {name: WeightedMean(torch.zeros_like(x)) for name, x in sent[0].items()}, rule, attackers
    )
    for one in sent:
        for name, x in one.items():
            averages[name].add(x, 1)
    if rule == "krum":
        choose(averages, attackers)
    return {name: mean.result() for name, mean in averages.items()}


def plain(sent, rule, attackers):
    """Compute the definitions of the rules in float64."""
    rows = np.array(
        [np.concatenate([x.numpy().ravel() for x in one.values()]) for one in sent], dtype=np.float64
    )
    if rule == "krum":
        far = ((rows[:, None] - rows[None]) ** 2).sum(-1)
        scores = [sorted(np.delete(line, i))[: len(rows) - attackers - 2] for i, line in enumerate(far)]
        return rows[np.argmin([sum(score) for score in scores])]
    ordered = np.sort(rows, 0)
    cut = attackers if rule == "trimmed_mean" else (len(rows) - 1) // 2
    return ordered[cut : len(rows) - cut].mean(0)


def flat(found):
    return np.concatenate([x.numpy().ravel() for x in found.values()])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [5, 6, 10])
def test_a_rule_is_its_definition(rule, n):
    attackers = RULES[rule].get("attackers", 0)
    for seed in range(8):
        sent = updates(n, seed=seed)
        found = flat(result(sent, rule, attackers))
        np.testing.assert_allclose(found, plain(sent, rule, attackers), atol=1e-6)


@pytest.mark.parametrize("attackers", [0, 1, 2, 3])
def test_trimmed_mean_cuts_the_requested_number(attackers):
    for n in range(2 * attackers + 1, 30):
        sent = [{"a": torch.full((1,), float(i**2))} for i in range(n)]
        np.testing.assert_allclose(
            flat(result(sent, "trimmed_mean", attackers)), plain(sent, "trimmed_mean", attackers), rtol=1e-6
        )


@pytest.mark.parametrize("n", [5, 6, 10])
def test_rules_equal_flower(n):
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate")
    sent = updates(n, seed=n)
    results = [([x.numpy() for x in one.values()], 1) for one in sent]
    theirs = {
        "median": aggregate.aggregate_median(results),
        "trimmed_mean": aggregate.aggregate_trimmed_avg(results, 1.5 / n),
        "krum": aggregate.aggregate_krum(results, 1, 0),
    }
    for rule, expected in theirs.items():
        found = result(sent, rule, RULES[rule].get("attackers", 0))
        np.testing.assert_allclose(flat(found), np.concatenate([x.ravel() for x in expected]), atol=1e-6)


def test_krum_chooses_all_tensors_of_one_client():
    sent = updates(6)
    found = result(sent, "krum", 1)
    assert sum(all(torch.equal(found[name], one[name]) for name in one) for one in sent) == 1


def test_without_updates_the_model_is_unchanged():
    x = torch.tensor([1.0])
    one = Updates(torch.tensor([3.0]), "median", 0)
    assert one.result().tolist() == [3.0]
    one.add(x, 1)
    x.fill_(9)
    assert one.result().tolist() == [1.0]


def turned(sent):
    return -10 * sent


def noise(sent):
    return sent + 30 * torch.randn(sent.shape, generator=torch.Generator().manual_seed(0))


LEARNS = {"rounds": [4], "local_epochs": 3}


def accuracies(cfg, how):
    def meddle(reply):
        if reply.client == "silo-4" and "values" in reply.tensors:
            reply.tensors = reply.tensors | {"values": how(reply.tensors["values"])}

    try:
        records = finish(arm(cfg, federation(**FIVE), wrap=tampered(meddle))[0])
    except RunError:  # it has diverged
        return [0.0]
    return [r["accuracy"] for r in records if r["round"] == records[-1]["round"]]


@pytest.mark.slow
@pytest.mark.parametrize("how", [turned, noise])
def test_malicious_client_spoils_only_the_mean(how):
    assert min(accuracies(settings("fedavg", **LEARNS), how)) < 0.7
    for rule, keys in RULES.items():
        assert min(accuracies(settings("fedavg", **LEARNS, aggregation=rule, **keys), how)) > 0.9, rule


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("fedavg", "median"),
        ("fedavg", "trimmed_mean"),
        ("scaffold", "krum"),
        ("uefl", "krum"),
        ("uefl", "median"),
    ],
)
def test_a_run_that_is_resumed_is_the_uninterrupted_one(name, rule):
    own = {"usage_aware": False} if name == "uefl" else {}
    cfg = settings(name, aggregation=rule, **RULES[rule], **own)
    assert again(cfg, federation(**FIVE)) == finish(arm(cfg, federation(**FIVE))[0])


def test_clients_have_equal_weights_for_any_claim():
    def greedy(reply):
        if reply.client == "silo-4":
            reply.examples = 1

    cfg = settings("fedavg", aggregation="median")
    runs = [arm(cfg, federation(**FIVE), wrap=wrap)[0] for wrap in (lambda e: e, tampered(greedy))]
    for one in runs:
        one.turn()
    assert torch.equal(*map(values, runs))


def test_list_of_algorithms_that_use_only_means():
    def plain(name, **keys):
        kind = registry()[name]
        fields = kind.Parameters.model_fields
        return kind(**{k: v for k, v in CODEBOOK.items() if k in fields} | keys).plain_means

    for name in ("fedcr", "fediir", "fedbr", "uefl-published", "centralized", "uefl"):
        assert not plain(name), name
    for name in ("fedavg", "fedprox", "fedbn", "fedper", "scaffold", "fedul", "vhl"):
        assert plain(name), name
    assert plain("uefl", usage_aware=False)
    for keys in (
        {"ema_decay": 0.9},
        {"codebook_after": 1},
        {"reinit": True},
        {"ext_share": "group"},
        {"revive_below": 0.1},
        {"keep": "better"},
    ):
        assert not plain("uefl", usage_aware=False, **keys), keys


@pytest.mark.parametrize(
    ("keys", "clients", "line"),
    [
        ({"aggregation": "median"}, 2, r"\b3 updates .*quorum .*participation .*\b2 of 2"),
        ({"aggregation": "krum", "attackers": 1}, 4, r"\b5\b"),
        ({"aggregation": "krum", "attackers": 1, "quorum": 0.7, "participation": 0.3}, 9, r"\b3 .*\b9"),
        ({"aggregation": "trimmed_mean", "attackers": 2}, 4, r"\b5\b"),
    ],
)
def test_too_few_clients_are_refused(keys, clients, line):
    with pytest.raises(UserError, match=line):
        check_rule(settings("fedavg", **keys).run, "arm", True, clients)


def test_useless_robust_rule_is_refused():
    with pytest.raises(UserError, match=r"arm 'arm', .*means"):
        check_rule(settings("uefl", aggregation="median").run, "arm", False, 9)
    with pytest.raises(UserError, match=r"key 'run\.attackers'"):
        settings("fedavg", attackers=1)
    check_rule(settings("fedavg").run, "arm", False, 1)


def test_on_unlabeled_sets():
    cfg = tiny_sets.settings("fedul", aggregation="median")
    assert finish(tiny_sets.arm(cfg)[0])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_flipped_labels_do_not_spoil_a_robust_rule(rule):
    fed = federation(**FIVE)
    liar = fed.clients[4].load()
    train = replace(liar.train, labels=(liar.train.labels + 1) % 3)
    clients = (*fed.clients[:4], ClientData.of("silo-4", replace(liar, train=train)))
    records = finish(
        arm(settings("fedavg", **LEARNS, aggregation=rule, **RULES[rule]), replace(fed, clients=clients))[0]
    )
    assert min(r["accuracy"] for r in records if r["round"] == records[-1]["round"]) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", registry())
def test_every_algorithm_declares_its_means(name):
    """An algorithm trains with a robust rule only if it has ``plain_means``."""
    make, fed = (tiny_sets.arm, None) if registry()[name].kind == "sets" else (arm, federation(**FIVE))
    cfg = (tiny_sets.settings if fed is None else settings)(name, aggregation="median")
    one = make(cfg, fed)[0]
    if one.members[0].algorithm.plain_means:
        for _ in range(2):
            one.turn()
        assert all(bool(torch.isfinite(t).all()) for t in one.members[0].state.tensors.values())
    else:
        with pytest.raises(UserError, match=r"arm 'arm', .*means"):
            check_rule(cfg.run, "arm", one.members[0].algorithm.plain_means, 9)
