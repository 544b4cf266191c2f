"""Numbers that a client may send over the wire and that no client of ours does: they cost its reply, never
the run."""

import re

import pytest
import torch

from tests.federated.tiny import arm, federation, finish, settings
from uefl.algorithms.fedavg import FedAvg
from uefl.engines.codec import decode, encode, packed_reply, reply_of
from uefl.errors import RunError
from uefl.report.run_folder import summarize
from uefl.report.words import means


class Changed:
    """An engine that changes the replies of some clients."""

    def __init__(self, engine, change, clients):
        self.engine, self.change, self.names = engine, change, clients

    def clients(self):
        return self.engine.clients()

    def round(self, messages, deadline):
        for reply in self.engine.round(messages, deadline):
            if reply.client in self.names:
                self.change(reply)
            yield reply_of(decode(encode(packed_reply(reply))))


def outcome(change, clients=("silo-1",)):
    one, _, notices = arm(
        settings("uefl", quorum=0.5),
        federation((16, 16, 16)),
        wrap=lambda engine: Changed(engine, change, clients),
    )
    records = finish(one)
    assert means(records)
    assert summarize(records)
    return notices, {record["client"] for record in records if record["accuracy"] is not None}


def measured(name, value):
    def change(reply):
        if reply.metrics:
            reply.metrics[name] = value

    return change


def more(part, value):
    """Unrequested tensors in addition to the requested ones."""

    def change(reply):
        getattr(reply, part).update(value)

    return change


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("metrics", {f"m{i}": 0.5 for i in range(1000)}, r"it sends 1\d\d\d metrics, more than 1000"),
        ("training", {f"m{i}": 0.5 for i in range(1000)}, r"it sends 1\d\d\d metrics, more than 1000"),
        ("metrics", {201 * "x": 0.5}, "it sends a name of 201 characters, more than 200"),
        ("private", {201 * "x": torch.zeros(1)}, "it sends a name of 201 characters, more than 200"),
        (
            "metrics",
            {"a": [0] * 12_000, "b": [0] * 12_000},
            r"it sends lists of 24\d\d\d numbers, more than 20000",
        ),
        (
            "private",
            {f"p{i}": torch.zeros(0) for i in range(1001)},
            "it keeps 1001 private tensors; it had 0",
        ),
        ("private", {"p": torch.zeros(2**20)}, r"it keeps 4194304 bytes of private tensors, more than \d+"),
    ],
)
def test_more_than_was_asked_for(part, value, reason):
    notices, there = outcome(more(part, value))
    assert any(re.match(f"round 2: rejected silo-1: {reason}", line) for line in notices), notices
    assert there == {"silo-0", "silo-2"}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("accuracy", [0.5], "its accuracy is a list, expected one number"),
        ("holdout_entropy", [0.5], "its holdout_entropy is a list, expected one number"),
        ("accuracy", 10**400, "its accuracy is 1000"),
        ("nll", 1e300, "its nll is 1e+300"),
        ("confusion", [1, 2], "its confusion is no list of 9 numbers"),
        ("reliability", 0.5, "its reliability is no list of 30 numbers"),
    ],
)
def test_metrics(name, value, reason):
    notices, there = outcome(measured(name, value))
    assert any(line.startswith(f"round 2: rejected silo-1: {reason}") for line in notices)
    assert there == {"silo-0", "silo-2"}


@pytest.mark.parametrize("claim", [10**400, 10**30])
def test_a_number_of_examples(claim):
    notices, _ = outcome(lambda reply: setattr(reply, "examples", claim))
    assert any(line.startswith("round 1: rejected silo-1: it claims 1000") for line in notices)


def test_a_training_loss():
    notices, _ = outcome(lambda reply: reply.training.update(train_loss=10**400))
    assert any(line.startswith("round 1: rejected silo-1: its train_loss is 1000") for line in notices)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "a\nb"])
def test_a_private_tensor_that_no_file_holds(name):
    notices, _ = outcome(lambda reply: reply.private.update({name: torch.zeros(2)}))
    assert f"round 1: rejected silo-1: it keeps a tensor called {name!r}" in notices


def without_entropy(reply):
    reply.metrics.pop("holdout_entropy", None)


def test_who_does_not_say_its_entropy_is_not_extended():
    notices, _ = outcome(without_entropy)
    assert "after iteration 1: silo-1 sent no holdout_entropy, and cannot be extended" in notices


def test_where_nobody_says_it_the_run_stops_with_a_line():
    with pytest.raises(RunError, match="holdout_entropy"):
        outcome(without_entropy, ("silo-0", "silo-1", "silo-2"))


def constant(part, value):
    """Every element of a tensor that trains is this number, which is finite."""

    def change(reply):
        if part in reply.tensors:
            reply.tensors[part] = torch.full_like(reply.tensors[part], value)

    return change


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("values", 3e38, "values has an element of 3e+38, more than 1e+15"),
        ("values", -3e38, "values has an element of 3e+38, more than 1e+15"),
        ("values", 1e14, "its predictions are not finite"),
        ("buffers", 3e38, "buffers has an element of 3e+38, more than 1e+15"),
        ("buffers", -1.0, "a running variance is below 0"),
        ("codebook", 3e38, "codebook has an element of 3e+38, more than 1e+15"),
    ],
)
def test_finite_updates_that_break_the_model_are_rejected(part, value, reason):
    """The attack on the mean: in float32 it overflows, and the model of every later round with it."""
    notices, measured = outcome(constant(part, value))
    assert measured == {"silo-0", "silo-1", "silo-2"}
    assert [notice for notice in notices if "rejected" in notice] == [
        f"round {round}: rejected silo-1: {reason}" for round in (1, 2, 3)
    ]


class Overflows(FedAvg):
    """Its aggregate squares the tensors."""

    def aggregate(self, state, averages):
        super().aggregate(state, averages)
        state.tensors["values"] = state.tensors["values"] ** 5


def test_an_invalid_state_ends_the_run_and_names_its_method():
    one, _, notices = arm(
        settings("fedavg"),
        wrap=lambda engine: Changed(engine, constant("values", 500.0), ["silo-1"]),
        algorithm=Overflows(),
    )
    before = one.state()[0]
    with pytest.raises(RunError, match=r"round 1: .*silo-1 .*\b500"):
        one.turn()
    assert not notices
    assert one.round == 0
    assert set(before) == set(one.state()[0])


def test_nobody_is_named_where_all_diverge():
    one = arm(
        settings("fedavg"),
        wrap=lambda e: Changed(e, constant("values", 1e9), ("silo-0", "silo-1", "silo-2")),
        algorithm=Overflows(),
    )[0]
    with pytest.raises(RunError) as error:
        one.turn()
    assert "sent elements" not in str(error.value)


def test_more_examples_than_reported_are_rejected():
    """The attack on the weights: with 2**53 examples the others would have no weight."""

    def change(reply):
        if reply.tensors:
            reply.examples = 2**53

    one, _, notices = arm(
        settings("fedavg", quorum=0.5), wrap=lambda engine: Changed(engine, change, ["silo-1"])
    )
    one.turn()
    assert notices == [f"round 1: rejected silo-1: it claims {2**53} examples, and reported 48"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("accuracy", 3e38, "its accuracy is 3e+38, expected a number from 0 to 1"),
        ("accuracy", -0.5, "its accuracy is -0.5, expected a number from 0 to 1"),
        ("global_accuracy", 1.5, "its global_accuracy is 1.5"),
        ("entropy", -1.0, "its entropy is -1"),
        ("brier", 2.5, "its brier is 2.5"),
        ("a\x1b[31m", 0.5, "it sends a metric called a"),
        ("reliability", [-1] * 30, "its reliability has a number below 0"),
    ],
)
def test_metrics_that_no_measurement_has_are_rejected(name, value, reason):
    notices, measured_by = outcome(measured(name, value))
    assert measured_by == {"silo-0", "silo-2"}
    lines = [notice for notice in notices if "rejected" in notice]
    assert len(lines) == 3
    assert all(reason in line and line.isprintable() for line in lines)
