"""Clients that lie in their replies to an exchange of an algorithm, and in metrics that an algorithm uses."""

import math
import re

import pytest
import torch

from tests.federated.engine_wrappers import lies
from tests.federated.tiny import arm, finish, settings
from uefl.errors import RunError

LIAR = "silo-1"


def of(name, value):
    """Fill a tensor of a reply, or only its first element for a pair."""

    def change(reply):
        if name in reply.tensors:
            tensor = reply.tensors[name] = reply.tensors[name].clone()
            (tensor.view(-1)[:1] if isinstance(value, tuple) else tensor).fill_(
                value[0] if isinstance(value, tuple) else value
            )

    return change


POOLED = [("uefl", {"reinit": True}), ("uefl", {"codebook_after": 1}), ("uefl", {"ext_share": "group"})]
NEEDED = [
    *(("tpt", {}, "counts", value) for value in (-1, (-16,), 2**62)),
    *(("tpt", {}, "hits", value) for value in (-1, 2**62)),
    *(("tpt", {}, name, 1e300) for name in ("sums", "spread", "own", "geometry")),
    *((*arm_of, "mass", value) for arm_of in POOLED for value in (-1.0, (-5.0,), 0.0, 3e38)),
    *((*arm_of, "part", 3e38) for arm_of in POOLED),
    *(("fedbr", {}, "pseudo", value) for value in (-1.0, 255.5, 3e38)),
]


@pytest.mark.parametrize(("algorithm", "keys", "name", "value"), NEEDED)
def test_false_reply_ends_the_run_and_names_its_client(algorithm, keys, name, value):
    """The algorithm needs the reply, and with a false one honest clients would fail and be named."""
    lying, *_ = arm(settings(algorithm, quorum=0.5, **keys), wrap=lies(of(name, value)))
    with pytest.raises(RunError, match=rf"^{LIAR} .*\b({name}|measures)\b"):
        finish(lying)
    assert {one["client"] for one in lying.rejected} == {LIAR}


@pytest.mark.parametrize(
    ("name", "value"), [("sum", 1e38), ("batches", 0), ("batches", 3), ("batches", 2**62)]
)
def test_false_gradient_of_the_head_is_rejected(name, value):
    """The number of batches is a weight, and a client has 24 images in batches of 16."""
    lying, _, notices = arm(settings("fediir", quorum=0.5), wrap=lies(of(name, value)))
    finish(lying)
    assert notices
    assert all(re.match(rf"round \d+: rejected {LIAR}: .*\b(sum|batches)\b", line) for line in notices)
    assert bool(torch.isfinite(lying.members[0].state.tensors["gradient"]).all())


@pytest.mark.parametrize(
    ("algorithm", "keys", "name"),
    [
        ("fedcr", {}, "weighted_mean"),
        ("fedbr", {}, "projection"),
        ("fedsr", {"class_gaussians": "shared"}, "class_mean"),
        ("scaffold", {}, "control"),
    ],
)
def test_tensors_sent_with_the_model_are_bounded_as_it_is(algorithm, keys, name):
    lying, _, notices = arm(settings(algorithm, quorum=0.5, **keys), wrap=lies(of(name, 1e15)))
    finish(lying)
    assert {one["client"] for one in lying.rejected} == {LIAR}
    assert re.search(rf"\brejected {LIAR}: .*\b{name}\b", notices[0])


def test_honest_replies_are_accepted():
    for algorithm, keys in [("tpt", {}), ("fedbr", {}), ("fediir", {}), ("fedcr", {}), *POOLED]:
        honest, *_ = arm(settings(algorithm, **keys))
        finish(honest)
        assert not honest.rejected


@pytest.mark.parametrize("part", ["metrics", "training"])
@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ("uefl", "threshold"),
        ("uefl", "deciding_loss"),
        ("uefl", "extended"),
        ("tpt", "nc1"),
        ("tpt", "nc2b_silo"),
    ],
)
def test_columns_of_the_server_are_rejected(algorithm, name, part):
    def change(reply):
        if values := getattr(reply, part):
            values[name] = 1.0

    lying, _, notices = arm(settings(algorithm, quorum=0.5), wrap=lies(change))
    finish(lying)
    assert re.search(rf"\brejected {LIAR}: .*\b{name}$", notices[0])


@pytest.mark.parametrize("name", ["confusion", "accuracy", "bytes_sent"])
def test_training_sends_no_measurement(name):
    """Such a metric would replace a measurement, or the server's own count of bytes."""

    def change(reply):
        if reply.training:
            reply.training[name] = 5.0

    lying, _, notices = arm(settings("fedavg", quorum=0.5), wrap=lies(change))
    assert 5.0 not in [record.get(name) for record in finish(lying)]
    assert re.search(rf"\brejected {LIAR}: .*\b{name}$", notices[0])


def test_client_without_its_entropy_is_not_extended():
    def change(reply):
        reply.metrics.pop("entropy_deterministic", None)

    cfg = settings("uefl-published", max_iterations=2, rounds=[1])
    lying, _, notices = arm(cfg, wrap=lies(change))
    finish(lying)
    assert any(re.search(rf"{LIAR} .*entropy_deterministic", line) for line in notices)
    assert LIAR not in lying.members[0].state.plain["uncertain"]


@pytest.mark.parametrize("entropy", [0.0, -0.0, -1e-3, 5e-324])
def test_false_entropy_extends_by_no_more_than_the_codewords(entropy):
    """With it, a client decides that all others are uncertain."""

    def change(reply):
        if "holdout_entropy" in reply.metrics:
            reply.metrics["holdout_entropy"] = entropy

    lying, _, notices = arm(settings("uefl", rounds=[1, 1, 1]), wrap=lies(change))
    records = finish(lying)
    assert not any(re.search(r"\(-|inf|nan", line) for line in notices)
    sizes = {
        one["client"]: [r["codewords"] for r in records if r["client"] == one["client"]] for one in records
    }
    assert sizes["silo-0"] == sizes["silo-2"] == [4, 8, 12]
    assert max(sizes[LIAR]) <= 12


def test_one_false_loss_does_not_end_the_run():
    calls = iter([1.0] + [1e30] * 9)

    def change(reply):
        if "train_loss" in reply.training:
            reply.training["train_loss"] = next(calls)

    lying, *_ = arm(settings("fedavg", rounds=[3]), wrap=lies(change))
    assert len(finish(lying)) == 9
    assert math.isfinite(lying.first_loss)
