"""Participants, measurements in addition to the global model, and their summary."""

from collections import Counter

import pytest
import torch

from tests.federated import sample_runs
from tests.federated.engine_wrappers import RecordingEngine, TamperingEngine
from tests.federated.tiny import arm, federation, finish, same_bits, settings, state, values, workspace_of
from uefl.config import Config
from uefl.errors import RunError, UserError
from uefl.report.run_folder import read_run, summarize
from uefl.report.tables import protocol_table
from uefl.server.participants import Participants, check_joins

NAMES = tuple(f"silo-{i}" for i in range(10))


def test_participants_are_drawn_by_seed_and_round():
    drawn = [Participants(NAMES, 0.3, seed).of(round) for seed in (0, 1) for round in range(20)]
    assert all(len(set(one)) == 3 and list(one) == sorted(one) for one in drawn)
    assert [Participants(NAMES, 0.3, 0).of(round) for round in range(20)] == drawn[:20]
    assert drawn[:20] != drawn[20:]
    assert set().union(*drawn[:20]) == set(NAMES)
    assert Participants(NAMES, 1.0, 0).of(3) == NAMES


def test_evaluators_are_drawn_independently_of_participants():
    train, measure = (
        [Participants(NAMES, 0.3, 0, purpose).of(round) for round in range(20)]
        for purpose in ("participants", "evaluators")
    )
    assert sum(map(tuple.__eq__, train, measure)) < 3


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.3, 3), (0.31, 4), (1.0, 10)])
def test_a_share_is_rounded_up_to_a_whole_client(share, count):
    assert len(Participants(NAMES, share, 0).of(0)) == count


def test_only_participants_train_and_all_are_measured():
    trained = []

    def record(messages):
        trained.append({name for name, message in messages.items() if message.options["train"]})

    one, _, _ = arm(
        settings("fedavg", participation=0.5, rounds=[4]), wrap=lambda e: RecordingEngine(e, record)
    )
    records = finish(one)
    assert [len(names) for names in trained] == [2, 2, 2, 2, 0]
    assert trained[:4] == [
        set(Participants(("silo-0", "silo-1", "silo-2"), 0.5, 0).of(round)) for round in range(4)
    ]
    for record in records:
        took_part = record["client"] in trained[record["round"]]
        assert (record["train_loss"] is not None) == (record["bytes_received"] > 0) == took_part
    assert len(records) == 4 * 3


def test_quorum_is_a_share_of_the_participants():
    def broken(reply):
        if "values" in reply.tensors and reply.client != "silo-2":
            reply.tensors["values"] = reply.tensors["values"] * torch.nan
        return reply

    one, _, _ = arm(
        settings("fedavg", participation=0.5, quorum=1.0, seed=3), wrap=lambda e: TamperingEngine(e, broken)
    )
    with pytest.raises(RunError, match=r"\b2 .*quorum .*\b2\b"):
        one.turn()


def test_extension_waits_for_its_client_to_participate():
    one, _, _ = arm(settings("uefl", participation=0.3, rounds=[1, 6], seed=1))
    one.turn()
    one.turn()
    waiting = list(state(one).plain["pending"])
    assert waiting
    while not one.finished:
        one.turn()
        (client,) = one.participants.of(one.round - 1)
        assert client not in state(one).plain["pending"]


def test_bytes_are_the_sizes_of_the_tensors():
    one, _, _ = arm(settings("uefl", extend="none"))
    record = finish(one)[-1]
    model = 4 * (len(values(one)) + len(state(one).tensors["buffers"]))
    codebook = 4 * state(one).tensors["part.0"].numel()
    assert record["bytes_sent"] == 2 * (model + codebook)  # to train, and to measure the last round
    assert record["bytes_received"] == model + codebook + 8 * 4  # and how often each codeword was used


def test_messages_that_only_measure_are_counted():
    """Count models by hand, in rounds 0 and 1 of one iteration and in round 2 of another.

    Two of three clients train in each round.
    """
    one, _, _ = arm(settings("fedavg", participation=0.6), federation(unseen=1))
    records = finish(one)
    model = 4 * (len(values(one)) + len(state(one).tensors["buffers"]))
    of = [set(Participants(("silo-0", "silo-1", "silo-2"), 0.6, 0).of(round)) for round in range(3)]
    for record in records:
        client, round = record["client"], record["round"]
        trains = client in of[round]
        # the message that trains round 1 also measures round 0
        measured_by_training = round == 0 and client in of[1]
        assert record["bytes_sent"] == (trains + (not measured_by_training)) * model
        assert record["bytes_received"] == trains * model
    total = summarize(records)["arm"]
    assert total["bytes_received"] == 3 * 2 * model
    assert total["bytes_sent"] == (3 * 2 + 3 * 4 - 2) * model


def test_bytes_include_state_instead_of_private_layers():
    plain, private = (finish(arm(settings(name))[0])[-1] for name in ("fedavg", "fedper"))
    head = 4 * (3 * 16 + 3)
    assert plain["bytes_received"] - private["bytes_received"] == head
    # saved where it trains; where it measures the mean of the heads is sent
    assert plain["bytes_sent"] - private["bytes_sent"] == head


def test_bytes_include_exchanges_of_the_algorithm():
    plain, asked = (arm(settings("uefl", extend="none", codebook_after=after))[0] for after in (0, 1))
    sent = [[r["bytes_sent"] for r in finish(one) if r["round"] == 1] for one in (plain, asked)]
    assert all(more > less for less, more in zip(*sent, strict=True))


@pytest.mark.parametrize("name", ["fedavg", "uefl", "fedper", "uefl-published"])
def test_unseen_clients_are_measured_and_decide_nothing(name):
    cfg = settings(name, max_iterations=2)
    test_is_holdout = name == "uefl-published"
    alone, _, said = arm(cfg, federation((16,) * 3, test_is_holdout=test_is_holdout))
    beside, _, also = arm(cfg, federation((16,) * 3, test_is_holdout=test_is_holdout, unseen=2))
    records, more = finish(alone), finish(beside)
    assert [r for r in more if not r.get("unseen")] == records
    assert said == also
    unseen = [r for r in more if r.get("unseen")]
    assert {r["client"] for r in unseen} == {"unseen-0", "unseen-1"}
    assert len(unseen) == 2 * 3
    assert all(0 <= r["accuracy"] <= 1 and r["bytes_sent"] > 0 and r["train_loss"] is None for r in unseen)
    assert all(r["bytes_received"] == 0 for r in unseen)
    assert torch.equal(values(alone), values(beside))


def test_a_round_is_selected_by_the_validation_images():
    """The run selects the first of the best rounds, although the test accuracy is higher later."""
    validation = (0.5, 0.8, 0.8, 0.6)
    lines = [
        line | {"validation_accuracy": validation[line["round"]]} for line in sample_runs.records(("fedavg",))
    ]
    assert summarize(lines)["fedavg"]["selected"] == {"round": 2, "accuracy": pytest.approx(0.21)}


def with_holdout(line):
    """Add holdout accuracies that are best in the second and the third of four rounds."""
    best = (0.5, 0.8, 0.8, 0.6)[line["round"]]
    return line | {"holdout_accuracy": 0.1 if line.get("unseen") else best}


def test_results_are_those_of_the_round_that_is_best_on_holdouts():
    lines = [with_holdout(line) for line in sample_runs.records(("fedavg",))]
    unseen = [with_holdout(line | {"client": "new", "unseen": True}) for line in lines[::3]]
    found = summarize(lines + unseen, select="holdout")["fedavg"]
    assert found["selected"] == {"round": 2, "accuracy": pytest.approx(0.21)}
    assert found["accuracy"] == pytest.approx(0.21)
    assert found["entropy"] == pytest.approx(0.9)
    assert found["unseen_accuracy"] == pytest.approx(0.2)
    assert found["clients"]["silo-2"]["accuracy"] == pytest.approx(0.22)
    assert found["accuracy_last4"]["mean"] == pytest.approx(0.26)
    assert summarize(lines + unseen)["fedavg"]["accuracy"] == pytest.approx(0.41)


def on_holdouts(*history):
    """Return an engine wrapper that gives the clients' holdout accuracies, one for each round."""
    left = Counter()

    def change(reply):
        if "holdout_accuracy" in reply.metrics:
            reply.metrics["holdout_accuracy"] = history[left[reply.client]]
            left[reply.client] += 1

    return lambda engine: TamperingEngine(engine, change)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *((name, {}) for name in ("fedavg", "fedprox", "fedsr", "fediir", "centralized", "scaffold")),
        ("uefl", {"passes": 1}),
        ("fedavg", {"uncertainty": "ensemble", "members": 2}),
    ],
)
def test_the_saved_model_is_the_best_one_on_holdouts(name, keys):
    """A run that stops after the chosen round, the first one in a tie, ends with the same bits."""
    keys = {"rounds": [1, 3], **keys}
    best, workspace, _ = arm(
        settings(name, select="holdout", **keys | {"max_iterations": 2}),
        federation(unseen=1),
        on_holdouts(0.3, 0.7, 0.7, 0.2),
    )
    short, other, _ = arm(settings(name, **keys | {"rounds": [1, 1]}), federation(unseen=1))
    finish(best)
    finish(short)
    pairs = zip(best.networks(workspace), short.networks(other), strict=True)
    for (mine, clients), (expected, own) in pairs:
        same_bits(mine, expected)
        for client in best.context.clients:
            same_bits(clients[client], own[client])
    assert not any("best" in each for each in state(best).tensors)


def test_the_own_model_is_measured_after_training():
    plain, own = (
        finish(arm(settings("uefl", personalized=on, dropout=0.0, rounds=[3]))[0]) for on in (False, True)
    )
    assert [{k: v for k, v in r.items() if not k.startswith("personalized_")} for r in own] == plain
    assert all(0 <= r["personalized_accuracy"] <= 1 for r in own)


def test_the_own_model_of_a_single_client_is_the_average():
    cfg = settings("fedavg", personalized=True, dropout=0.0, rounds=[4], local_epochs=3, lr=2e-2)
    records = finish(arm(cfg, federation((24,), (0.1,)))[0])
    for key in ("accuracy", "entropy"):
        found = [r[key] for r in records]
        assert len(set(found)) > 1
        assert [r[f"personalized_{key}"] for r in records] == pytest.approx(found, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])  # all other tests use adam
def test_optimizers_train(optimizer):
    keys = {"momentum": 0.9, "lr": 5e-2} if optimizer == "sgd" else {"lr": 2e-2}
    cfg = settings("fedavg", optimizer=optimizer, weight_decay=1e-3, rounds=[4], local_epochs=3, **keys)
    records = finish(arm(cfg, federation(noise=(0.1, 0.1, 0.1)))[0])
    assert records[-1]["train_loss"] < 0.7 * records[0]["train_loss"]


def test_a_budget_of_steps_is_the_same_for_clients_of_any_size():
    records = finish(arm(settings("fedavg", local_steps=7, rounds=[2]), federation(sizes=(10, 40, 90)))[0])
    assert {r["steps"] for r in records} == {7}
    by_epochs = finish(arm(settings("fedavg", rounds=[2]), federation(sizes=(10, 40, 90)))[0])
    assert {r["steps"] for r in by_epochs} == {1, 3, 6}


def test_steps_of_three_epochs():
    budgets = {"local_epochs": 3}, {"local_steps": 6}
    epochs, steps = (arm(settings("fedavg", rounds=[1], **keys))[0] for keys in budgets)
    assert finish(epochs) == finish(steps)
    assert torch.equal(values(epochs), values(steps))


def lines(accuracies, **more):
    """Return records, one round per row, with an accuracy for each client."""
    first = sample_runs.records(("fedavg",), len(accuracies[0]))[: len(accuracies[0])]
    return [
        line | {"round": i, "iteration": 0, "accuracy": value, "bytes_sent": 3, "bytes_received": 2} | more
        for i, row in enumerate(accuracies)
        for line, value in zip(first, row, strict=True)
    ]


def test_the_summary_of_a_run():
    records = lines([[0.1] * 20, [0.9] * 20, [0.9] * 20, [0.5, 0.7] + [0.8] * 18])
    unseen = [
        r | {"client": "far", "unseen": True, "accuracy": 0.25} for r in records if r["client"] == "silo-0"
    ]
    summary = summarize(
        [r for r in records if r["round"] == 0]
        + unseen[:1]
        + [r for r in records if r["round"] > 0]
        + unseen[1:],
        0.85,
    )
    arm = summary["fedavg"]
    assert arm["best"] == {"round": 2, "accuracy": pytest.approx(0.9)}  # the first of equal rounds
    assert arm["accuracy"] == pytest.approx((0.5 + 0.7 + 18 * 0.8) / 20)
    assert arm["worst_tenth"] == pytest.approx(0.6)
    assert arm["unseen_accuracy"] == 0.25
    assert (arm["bytes_sent"], arm["bytes_received"]) == (4 * 21 * 3, 4 * 21 * 2)
    assert arm["rounds_to_target"] == 2
    assert "far" in arm["clients"]
    assert summarize(records, 0.95)["fedavg"]["rounds_to_target"] is None
    assert "rounds_to_target" not in summarize(records)["fedavg"]
    own = summarize(lines([[0.5, 0.7]], personalized_accuracy=0.75, global_accuracy=0.4))["fedavg"]
    assert (own["personalized_accuracy"], own["global_accuracy"]) == (pytest.approx(0.75), pytest.approx(0.4))


def test_the_table_shows_what_was_measured(tmp_path):
    records = lines([[0.1, 0.3], [0.9, 0.7]], personalized_accuracy=0.75)
    sample_runs.write(tmp_path, records, target_accuracy=0.95, rounds=[2])
    table = protocol_table(read_run(tmp_path))
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["best"], row["worst 10 %"], row["personalized"]) == ("0.800 @ 2", "0.700", "0.750")
    assert "global" not in row
    assert isinstance(read_run(tmp_path).config, Config)


def test_late_client_is_measured_before_it_trains():
    one, _, _ = arm(settings("uefl", joins={"silo-2": 3}, rounds=[2, 2], extend="all"))
    records = finish(one)
    clients = [{r["client"] for r in records if r["round"] == round} for round in range(4)]
    assert clients == [{"silo-0", "silo-1"}] + 3 * [{"silo-0", "silo-1", "silo-2"}]
    trained = [r["round"] for r in records if r["client"] == "silo-2" and r["train_loss"] is not None]
    assert trained == [2, 3]
    grown = {r["round"]: r["codewords"] for r in records if r["client"] == "silo-2"}
    # the client arrives at the end of an iteration, and gets an extension immediately
    assert grown[3] == 2 * grown[1]


def test_a_run_without_late_clients_draws_as_before():
    names = ("a", "b", "c", "d")
    plain, late = (Participants(names, 0.5, 0, joins=joins) for joins in ({}, {"d": 4}))
    assert all("d" not in late.of(round) for round in range(3))
    assert [late.of(round) for round in range(3, 9)] == [plain.of(round) for round in range(3, 9)]


@pytest.mark.parametrize(
    ("algorithm", "joins", "word"),
    [
        ("fedavg", {"silo-9": 2}, "silo-9"),
        ("fedavg", {"silo-2": 9}, "silo-2"),
        ("fedavg", {"silo-0": 2, "silo-1": 2, "silo-2": 2}, "run.joins"),
        ("fedbr", {"silo-2": 2}, "'arm'"),
    ],
)
def test_clients_that_cannot_join_later_are_refused(algorithm, joins, word):
    cfg = settings(algorithm, joins=joins, rounds=[4])
    with pytest.raises(UserError, match=word):
        check_joins("arm", workspace_of(cfg).algorithm)


def test_summary_of_clients_that_join_later():
    def line(round, client, accuracy):
        own = {"personalized_accuracy": accuracy + 0.1} if round == 4 else {}
        return {"arm": "a", "round": round, "client": client, "accuracy": accuracy, **own}

    late = {2: 0.2, 3: 0.6, 4: 0.77}
    records = [
        line(round, client, late[round] if client == "late" else 0.8)
        for round in (1, 2, 3, 4)
        for client in ("one", "two", "late")
        if client != "late" or round in late
    ]
    found = summarize(records, joins={"late": 3})["a"]
    assert (found["arrival_accuracy"], found["late_accuracy"]) == (0.2, 0.77)
    assert found["rounds_to_catch_up"] == 2
    assert found["late_personalized_accuracy"] == pytest.approx(0.87)
    assert summarize(records[:-3], joins={"late": 3})["a"]["late_personalized_accuracy"] is None
    assert summarize(records[:-1], joins={"late": 3})["a"]["rounds_to_catch_up"] is None
    assert "late_accuracy" not in summarize(records)["a"]
