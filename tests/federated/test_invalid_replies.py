"""The server rejects a reply with invalid numbers, and the run continues.

Our clients do not send such numbers, but another program may send them over the network.
"""

import itertools
import re

import pytest
import torch

from tests.federated import tiny_sets
from tests.federated.deploy.silos_in_memory import SilosInMemory
from tests.federated.engine_wrappers import TamperingEngine, lies
from tests.federated.tiny import arm, federation, finish, settings
from uefl.algorithms.base import registry
from uefl.algorithms.fedavg import FedAvg
from uefl.engines.base import Message, Reply
from uefl.engines.bounds import size_rejection
from uefl.engines.codec import decode, encode, packed_reply, reply_of
from uefl.errors import RunError
from uefl.report.run_folder import summarize
from uefl.report.words import means
from uefl.server.checks import blame


def changed(engine, changes):
    """Return an engine that changes the replies of some clients, each by its function."""

    def change(reply):
        if reply.client in changes:
            changes[reply.client](reply)
        return reply_of(decode(encode(packed_reply(reply))))

    return TamperingEngine(engine, change)


def outcome(changes, honest=2, rounds=(2,)):
    """Run with a client for each change, and with clients that change nothing.

    Return the notices, and the clients with an accuracy.
    """
    count = len(changes) + honest
    named = {f"silo-{i}": change for i, change in enumerate(changes)}
    one, _, notices = arm(
        settings("uefl", quorum=0.1, rounds=list(rounds), passes=2),
        federation((16,) * count, (0.1,) * (count - 1) + (0.9,)),
        wrap=lambda engine: changed(engine, named),
    )
    records = finish(one)
    assert means(records)
    assert summarize(records)
    return notices, {record["client"] for record in records if record["accuracy"] is not None}


def rejected(changes, round, honest=2):
    """Return why each change was rejected in a round."""
    notices, measured_by = outcome(changes, honest)
    if round > 1:  # measurements are rejected, too
        assert measured_by == {f"silo-{len(changes) + i}" for i in range(honest)}
    start = f"round {round}: rejected silo-"
    found = dict(notice.removeprefix(start).split(": ", 1) for notice in notices if notice.startswith(start))
    return [found[str(i)] for i in range(len(changes))]


def measured(name, value):
    def change(reply):
        if reply.metrics:
            reply.metrics[name] = value

    return change


def more(part, value):
    """Send unrequested tensors in addition to the requested ones."""

    def change(reply):
        getattr(reply, part).update(value)

    return change


UNREQUESTED = [
    ("metrics", {f"m{i}": 0.5 for i in range(1000)}, r"1\d\d\d metrics, .*\b1000\b"),
    ("training", {f"m{i}": 0.5 for i in range(1000)}, r"1\d\d\d metrics, .*\b1000\b"),
    ("metrics", {201 * "x": 0.5}, r"\b201 characters, .*\b200\b"),
    ("private", {201 * "x": torch.zeros(1)}, r"\b201 characters, .*\b200\b"),
    ("metrics", {"a": [0] * 12_000, "b": [0] * 12_000}, r"24\d\d\d numbers, .*\b20000\b"),
    ("private", {f"p{i}": torch.zeros(0) for i in range(1001)}, r"\b1001 private .*\b0$"),
    ("private", {"p": torch.zeros(2**20)}, r"\b4194304 bytes .*\d+$"),
]


def test_unrequested_tensors_are_rejected():
    reasons = rejected([more(part, value) for part, value, _ in UNREQUESTED], round=2)
    for reason, (*_, expected) in zip(reasons, UNREQUESTED, strict=True):
        assert re.match(f".*{expected}", reason), reason


def test_lists_are_as_long_as_a_received_tensor():
    reply = Reply("silo-0", metrics={"counts": [0] * 30_000})
    assert size_rejection(reply, Message({"codebook": torch.zeros(15_000, 2)})) is None
    assert re.search(r"\b30000 .*\b20000\b", size_rejection(reply, Message({"codebook": torch.zeros(2, 2)})))


METRICS = [
    ("accuracy", [0.5], "accuracy .*list"),
    ("holdout_entropy", [0.5], "holdout_entropy .*list"),
    ("accuracy", 10**400, r"accuracy .*\b1000"),
    ("nll", 1e300, r"nll .*\b1e\+300"),
    ("confusion", [1, 2], "confusion .*9 numbers"),
    ("reliability", 0.5, "reliability .*30 numbers"),
    # a value that no measurement has
    ("accuracy", 3e38, r"accuracy .*\b3e\+38, .*\b0 to 1$"),
    ("accuracy", -0.5, r"accuracy .*-0\.5, .*\b0 to 1$"),
    ("global_accuracy", 1.5, r"global_accuracy .*\b1\.5"),
    ("entropy", -1.0, r"entropy .*-1\b"),
    ("holdout_entropy", 1.2, r"holdout_entropy .*\b1\.0986"),  # above log(3), for three classes
    ("epsilon", 0.1, r"metric .*\bepsilon"),
    ("brier", 2.5, r"brier .*\b2\.5"),
    ("a\x1b[31m", 0.5, r"metric .*\ba\b"),
    ("reliability", [-1] * 30, r"reliability .*\b0$"),
]


def test_metrics():
    reasons = rejected([measured(name, value) for name, value, _ in METRICS], round=2)
    for reason, (*_, expected) in zip(reasons, METRICS, strict=True):
        assert re.match(f".*{expected}", reason), reason
        assert reason.isprintable()


BEYOND_FLOATS = {"train_loss": 10**400, "train_accuracy": 10**400, "steps": -(10**400)}


def test_training_results_beyond_floats_are_rejected():
    def change(name, value):
        return lambda reply: reply.training.update({name: value})

    reasons = rejected([change(name, value) for name, value in BEYOND_FLOATS.items()], round=1)
    for reason, name in zip(reasons, BEYOND_FLOATS, strict=True):
        assert re.match(rf".*{name} .*\b1000", reason), reason


def test_a_number_of_examples():
    claims = [lambda reply, claim=claim: setattr(reply, "examples", claim) for claim in (10**400, 10**30)]
    for reason in rejected(claims, round=1):
        assert re.match(r".*\b1000", reason)


UNSAVED = ("__metadata__", "\ud800", "a\nb")


def test_private_tensor_that_cannot_be_saved_is_rejected():
    reasons = rejected([more("private", {name: torch.zeros(2)}) for name in UNSAVED], round=1)
    assert all(repr(name) in reason for name, reason in zip(UNSAVED, reasons, strict=True))


def without_entropy(reply):
    reply.metrics.pop("holdout_entropy", None)


def test_client_without_entropy_is_not_extended():
    notices, _ = outcome([without_entropy], rounds=[2, 1])
    assert any(re.match("after iteration 1: silo-0 .*holdout_entropy", line) for line in notices)


def test_run_without_any_entropy_stops():
    with pytest.raises(RunError, match="holdout_entropy"):
        outcome([without_entropy] * 3, honest=0)


def constant(part, value):
    """Set every element of each trained tensor to this finite number."""

    def change(reply):
        if part in reply.tensors:
            reply.tensors[part] = torch.full_like(reply.tensors[part], value)

    return change


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("values", 3e38, r"values .*\b3e\+38, .*\b1e\+15"),
        ("values", -3e38, r"values .*\b3e\+38, .*\b1e\+15"),
        ("values", 1e14, r"values .*\b1e\+14, .*e\+03\b"),
        ("values", -1e4, r"values .*\b1e\+04, .*e\+03\b"),  # it predicts, and training with it overflows
        ("buffers", 3e38, r"buffers .*\b3e\+38, .*\b1e\+15"),
        ("buffers", -1.0, r"variance .*\b0\b"),
        ("codebook", 3e38, r"codebook .*\b3e\+38, .*\b1e\+15"),
    ],
)
def test_finite_updates_that_break_the_model_are_rejected(part, value, reason):
    """The mean of such updates would overflow in float32, and so would the model of every later round."""
    notices, measured_by = outcome([constant(part, value)])
    assert measured_by == {"silo-0", "silo-1", "silo-2"}
    found = [notice for notice in notices if "rejected" in notice]
    for round, notice in zip((1, 2), found, strict=True):
        assert re.match(f"round {round}: rejected silo-0: .*{reason}", notice)


def test_large_running_statistics_are_valid():
    """Variances are as large as the squares of the activations of a client."""
    change = constant("buffers", 1e6)
    one, _, notices = arm(settings("fedavg"), wrap=lambda engine: changed(engine, {"silo-1": change}))
    one.turn()
    assert not notices


class Overflows(FedAvg):
    """Its aggregate raises the values to a power."""

    def aggregate(self, state, averages):
        super().aggregate(state, averages)
        state.tensors["values"] = state.tensors["values"] ** 21


def large_bias(reply):
    """Set the bias of the last class to a value that predictions and training bear."""
    if "values" in reply.tensors:
        reply.tensors["values"][-1] = 500.0


def test_an_invalid_state_ends_the_run_and_names_its_method():
    one, _, notices = arm(
        settings("fedavg"), wrap=lambda engine: changed(engine, {"silo-1": large_bias}), algorithm=Overflows()
    )
    before = one.state()[0]
    with pytest.raises(RunError, match=r"round 1: .*silo-1 .*\b500"):
        one.turn()
    assert not notices
    assert one.round == 0
    assert set(before) == set(one.state()[0])


def test_no_client_is_named_if_all_diverge():
    one = arm(
        settings("fedavg"),
        wrap=lambda e: changed(e, dict.fromkeys(("silo-0", "silo-1", "silo-2"), constant("values", 1e9))),
        algorithm=Overflows(),
    )[0]
    with pytest.raises(RunError) as error:
        one.turn()
    assert "median" not in str(error.value)


def test_no_client_is_named_for_small_elements():
    assert "silo-0" not in blame({"silo-0": 0.5, "silo-1": 1e-3, "silo-2": 0.0})


@pytest.mark.parametrize("claimed", [25, 2**53])
def test_more_examples_than_reported_are_rejected(claimed):
    """A client with 2**53 examples would leave the others without weight."""

    def change(reply):
        if reply.tensors:
            reply.examples = claimed

    one, _, notices = arm(
        settings("fedavg", quorum=0.5), wrap=lambda engine: changed(engine, {"silo-1": change})
    )
    one.turn()
    (notice,) = notices
    assert re.match(rf"round 1: rejected silo-1: .*\b{claimed} examples, .*\b24$", notice)


@pytest.mark.parametrize(
    ("keys", "name", "value"),
    [
        ({}, "usage", 2**62),
        ({}, "usage", -1),
        ({"ema_decay": 0.9}, "moving", 1e14),
        ({"ema_decay": 0.9}, "moving", -1.0),
    ],
)
def test_counts_that_no_training_has_are_rejected(keys, name, value):
    """Counts are weights of codewords.

    With 2**62, the codewords of the other clients would have no weight.
    """

    def change(reply):
        if name in reply.tensors:
            reply.tensors[name][..., -1] = value

    one, _, notices = arm(
        settings("uefl", quorum=0.5, **keys), wrap=lambda engine: changed(engine, {"silo-1": change})
    )
    one.turn()
    (notice,) = notices
    assert re.match(rf"round 1: rejected silo-1: {name} ", notice)


def test_a_client_that_claims_no_training_images_ends_no_run():
    """The measurements of the terminal phase divide by the number of images."""

    def change(reply):
        if "counts" in reply.tensors:
            reply.tensors["counts"].zero_()
            reply.tensors["hits"].zero_()

    one, _, _ = arm(settings("tpt"), wrap=lambda engine: changed(engine, {"silo-1": change}))
    assert {record["client"] for record in finish(one)} == {"silo-0", "silo-1", "silo-2"}


@pytest.mark.parametrize(("algorithm", "norm"), [("fedavg", "batch"), ("uefl", "group")])
@pytest.mark.parametrize("value", [-999.0, -100.0, 3.0, 300.0])
def test_update_that_spoils_the_training_of_others_is_rejected(algorithm, norm, value, tmp_path):
    """The mean of the round would be the state of the run for good, and the other silos would be named."""
    cfg, fed = settings(algorithm, quorum=0.5, norm_layer=norm, rounds=[3]), federation()
    one, *_ = arm(
        cfg,
        fed,
        lambda _: changed(SilosInMemory(cfg, fed, tmp_path), {"silo-1": constant("values", value)}),
        clients_keep_states=True,
    )
    assert means(finish(one))
    assert [line["client"] for line in one.rejected] == ["silo-1"] * 3
    assert {line["client"] for line in one.rejected} == {"silo-1"}


def false_updates():
    """Return a function that spoils each update in another way, within the limits of elements."""
    ways = itertools.cycle([("values", 3.0), ("values", -100.0), ("buffers", 1e14)])

    def change(reply):
        if "values" in reply.tensors:
            constant(*next(ways))(reply)

    return change


TRAINING = [
    name
    for name, kind in registry().items()
    # local sends no values
    if kind.__module__.startswith("uefl.") and kind.trains_clients and name != "local"
]


@pytest.mark.parametrize("name", TRAINING)
def test_no_algorithm_continues_with_a_spoiled_model(name):
    """The update is left out in every engine, its client is named, and no other client is."""
    if registry()[name].kind == "sets":
        cfg, fed, liar = tiny_sets.settings(name, quorum=0.3), tiny_sets.federation(), "client-1"
    else:
        images = 48 if name == "fedbr" else 24  # FedBR needs more images for its means
        end = {"max_iterations": 3, "rounds": [1]} if name == "uefl-published" else {"rounds": [3]}
        cfg, liar = settings(name, quorum=0.3, **end), "silo-1"
        fed = federation((images,) * 3, test_is_holdout=name == "uefl-published")
    one, *_ = arm(cfg, fed, lies(false_updates(), liar))
    finish(one)
    assert {line["client"] for line in one.rejected} == {liar}
    assert len(one.rejected) >= 2  # FedBN sends no buffers
