import re
from dataclasses import replace

import pytest
import torch

from tests.federated import tiny_sets
from tests.federated.engine_wrappers import RecordingEngine, TamperingEngine
from tests.federated.tiny import again, arm, federation, finish, settings, values, workspace_of
from uefl.algorithms.base import Algorithm, registry
from uefl.client.client import Clients
from uefl.client.workspace import Workspace
from uefl.engines.base import Reply
from uefl.errors import RunError
from uefl.server.checks import check_course, check_quorum


def test_r_rounds_take_r_plus_one_exchanges_and_r_measurements():
    exchanges = []

    def record(messages):
        exchanges.append(next((m.options["evaluate"], m.options["train"]) for m in messages.values()))

    algorithm, _, _ = arm(settings("fedavg"), wrap=lambda e: RecordingEngine(e, record))
    records = finish(algorithm)
    assert exchanges == [(False, True), (True, True), (True, False), (False, True), (True, False)]
    assert [(r["iteration"], r["round"], r["client"]) for r in records] == [
        (i, n, f"silo-{k}") for i, n in ((0, 0), (0, 1), (1, 2)) for k in range(3)
    ]


def test_the_average_is_weighted_by_examples():
    sent = {}

    def meddle(reply):
        if "values" in reply.tensors:
            reply.tensors["values"] = torch.full_like(
                reply.tensors["values"], {"silo-0": 0.01, "silo-1": 0.02, "silo-2": 0.05}[reply.client]
            )
            sent[reply.client] = reply.examples
        return reply

    algorithm, _, _ = arm(
        settings("fedavg"), federation(sizes=(10, 20, 30)), wrap=lambda e: TamperingEngine(e, meddle)
    )
    algorithm.turn()
    assert sent == {"silo-0": 10, "silo-1": 20, "silo-2": 30}
    torch.testing.assert_close(
        values(algorithm), torch.full_like(values(algorithm), (10 * 1 + 20 * 2 + 30 * 5) / 6000)
    )


@pytest.mark.slow
def test_training_learns_and_runs_repeat_bit_for_bit():
    runs = [
        arm(settings("fedavg", rounds=[6], local_epochs=3), federation(noise=(0.1, 0.1, 0.1)))
        for _ in range(2)
    ]
    records = [finish(algorithm) for algorithm, _, _ in runs]
    assert records[0] == records[1]
    assert torch.equal(values(runs[0][0]), values(runs[1][0]))
    assert records[0][-1]["accuracy"] > 0.9
    assert records[0][-1]["train_loss"] < records[0][0]["train_loss"]


def test_seeds_matter():
    one, two = (finish(arm(settings("fedavg", seed=seed))[0]) for seed in (0, 1))
    assert one != two


def test_every_client_draws_its_own_batches_in_every_round():
    orders = []

    class Orders(Algorithm):
        def epoch(self, work):
            batches = list(super().epoch(work))
            orders.append(torch.cat(batches).tolist())
            return iter(batches)

    finish(arm(settings("fedavg", rounds=[2]), algorithm=Orders())[0])
    assert len(orders) == len(set(map(tuple, orders))) == 6


ONE_ENSEMBLE = "fedsr, ensemble"
ENSEMBLE = {"uncertainty": "ensemble", "members": 2, "precision": "bf16"}
STATES = {name: (name, {}) for name in registry()} | {
    "fedavg-wide": ("fedavg-wide", {"more_parameters": 50}),
    "local": ("local", {"personalized": True}),
    "tpt": ("tpt", {"threshold": 0.5, "rounds": [1], "max_iterations": 4}),
    "uefl-published": ("uefl-published", {"max_iterations": 2}),
    "fedavg, best on the holdout": ("fedavg", {"select": "holdout"}),
    ONE_ENSEMBLE: ("fedsr", {"class_gaussians": "shared", **ENSEMBLE}),
    "fediir, ensemble": ("fediir", {"layers": "head", **ENSEMBLE}),
    "distrans, ensemble": ("distrans", {"offsets": "mean", **ENSEMBLE}),
    "fedcr, ensemble": ("fedcr", {"samples": 2, **ENSEMBLE}),
}
"""an algorithm and the keys with which it has the most state"""


@pytest.mark.parametrize(
    "case",
    [  # the fast tests have one ensemble, and each of its algorithms without an ensemble
        pytest.param(case, marks=pytest.mark.slow if keys.get("members") and case != ONE_ENSEMBLE else ())
        for case, (_, keys) in STATES.items()
    ],
)
def test_a_run_that_is_resumed_is_the_uninterrupted_one(case):
    """The run has few participants and a client that never trains."""
    name, keys = STATES[case]
    if registry()[name].kind == "sets":
        cfg, fed, make = (
            tiny_sets.settings(name, rounds=[2], select="validation"),
            tiny_sets.federation(images=40),
            tiny_sets.arm,
        )
    else:
        cfg, make = settings(name, participation=0.6, quorum=0.5, **keys), arm
        images = 48 if name == "fedbr" else 16  # FedBR needs more images for its means
        fed = federation((images,) * 3, test_is_holdout=name == "uefl-published", unseen=int(name != "local"))
    records = finish(make(cfg, fed)[0])
    assert again(cfg, fed, make) == records
    assert cfg.kind == "sets" or name == "local" or any(record.get("unseen") for record in records)


def broken(reply):
    if reply.client == "silo-1" and "values" in reply.tensors:
        reply.tensors["values"] = torch.full_like(reply.tensors["values"], float("nan"))
    return reply


def test_a_non_finite_update_is_rejected_counted_and_noted():
    algorithm, _, notices = arm(settings("fedavg", quorum=0.6), wrap=lambda e: TamperingEngine(e, broken))
    algorithm.turn()
    assert bool(torch.isfinite(values(algorithm)).all())
    (line,) = algorithm.rejected
    reason = line.pop("reason")
    assert re.match("values .*finite", reason)
    assert line == {"arm": "arm", "iteration": 0, "round": 0, "client": "silo-1"}
    assert notices == [f"round 1: rejected silo-1: {reason}"]


def test_a_client_with_a_rejected_update_has_not_trained():
    algorithm, _, _ = arm(settings("fedavg", quorum=0.6), wrap=lambda e: TamperingEngine(e, broken))
    algorithm.turn()
    assert algorithm.have_trained == ["silo-0", "silo-2"]


def test_below_the_quorum_the_run_ends_with_an_error():
    algorithm, _, _ = arm(settings("fedavg", quorum=1.0), wrap=lambda e: TamperingEngine(e, broken))
    with pytest.raises(RunError, match=r"\b2 .*\b3 .*quorum .*\b3; .*\(silo-1: values .*finite\)"):
        algorithm.turn()


def test_an_update_that_is_too_long_is_rejected():
    algorithm, _, notices = arm(settings("fedavg", quorum=0.1, max_update_norm=1e-9))
    with pytest.raises(RunError, match=r"\b0 .*\b3 .*quorum"):
        algorithm.turn()
    assert all("max_update_norm" in notice for notice in notices)
    assert len(notices) == 3


def silent(reply):
    return (
        Reply(reply.client, error="gone")
        if reply.client == "silo-2" and "accuracy" in reply.metrics
        else reply
    )


def test_silent_client_counts_against_the_quorum():
    strict, _, _ = arm(settings("fedavg"), wrap=lambda e: TamperingEngine(e, silent))
    strict.turn()
    with pytest.raises(RunError, match=r"\b2 .*\b3 .*quorum .*\b3\b"):
        strict.turn()
    lenient, _, notices = arm(settings("fedavg", quorum=0.5), wrap=lambda e: TamperingEngine(e, silent))
    records = finish(lenient)
    assert {r["client"] for r in records} == {"silo-0", "silo-1"}
    assert notices[0] == "round 2: rejected silo-2: gone"
    assert [line["round"] for line in lenient.rejected] == [1, 1, 2]
    assert len(notices) == 3


@pytest.mark.parametrize(
    ("quorum", "clients", "needed"), [(0.07, 100, 7), (0.14, 50, 7), (0.5, 3, 2), (1.0, 9, 9), (0.01, 3, 1)]
)
def test_the_quorum_is_rounded_up_without_float_noise(quorum, clients, needed):
    check_quorum(quorum, 1, needed, clients, "replied", [])
    with pytest.raises(RunError, match=rf"quorum .*\b{needed};"):
        check_quorum(quorum, 1, needed - 1, clients, "replied", [])


def test_the_deadline_of_a_round_reaches_the_engine():
    seen = []

    class DeadlineRecorder(TamperingEngine):
        def round(self, messages, deadline=None):
            seen.append(deadline)
            return self.inner.round(messages, deadline)

    for value in (0.0, 60.0):
        arm(settings("fedavg", deadline=value), wrap=lambda e: DeadlineRecorder(e, None))[0].turn()
    assert seen == [None, 60.0]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_loss_far_above_its_beginning_is_divergence(resumed):
    losses = iter([2.0] * 3 + [5.0e3] * 6)

    def meddle(reply):
        if "train_loss" in reply.training:
            reply.training["train_loss"] = next(losses)
        return reply

    algorithm, other = (
        arm(settings("fedavg", rounds=[4]), wrap=lambda e: TamperingEngine(e, meddle))[0] for _ in range(2)
    )
    algorithm.turn()
    algorithm.turn()
    if resumed:
        other.restore(*algorithm.state())
        algorithm = other
    with pytest.raises(RunError, match=r"diverged: .*5e\+03 .*round 2, .*\b2; .*\blr$"):
        algorithm.turn()


def test_false_losses_of_half_of_the_clients_do_not_end_the_run():
    losses = [{"train_loss": loss} for loss in (1e30, 1.0, 1e30, 1.0)]
    assert check_course([], losses, 1.0, 2) == 1.0
    with pytest.raises(RunError, match=r"diverged: .*1e\+30"):
        check_course([], losses[:3], 1.0, 2)


def measures(**values):
    def meddle(reply):
        if reply.client == "silo-1" and "nll" in reply.metrics:
            reply.metrics |= values
        return reply

    return lambda engine: TamperingEngine(engine, meddle)


@pytest.mark.parametrize(
    "values", [{"nll": float("nan")}, {"accuracy": float("-inf")}, {"confidence": [0.5, float("inf")]}]
)
def test_a_client_that_measures_nan_is_rejected(values):
    algorithm, _, notices = arm(settings("fedavg", quorum=0.5), wrap=measures(**values))
    records = finish(algorithm)
    assert {record["client"] for record in records} == {"silo-0", "silo-2"}
    assert len(records) == 3 * 2
    (key, value), *_ = values.items()
    value = value[-1] if isinstance(value, list) else value
    assert re.match(rf"round 2: rejected silo-1: .*{key} .*{value}; .*\blr$", notices[0])
    assert len(algorithm.rejected) == len(notices) == 3
    assert bool(torch.isfinite(algorithm.members[0].state.tensors["values"]).all())


def test_update_with_nan_metrics_is_not_averaged():
    algorithm, _, _ = arm(settings("fedavg", quorum=0.5), wrap=measures(nll=float("nan")))
    algorithm.turn()
    assert "train_loss" in algorithm.last["silo-1"]
    algorithm.turn()
    assert "train_loss" not in algorithm.last["silo-1"]
    assert "train_loss" in algorithm.last["silo-0"]


def test_below_the_quorum_of_measurements_the_run_ends():
    algorithm, _, _ = arm(settings("fedavg"), wrap=measures(nll=float("nan")))
    algorithm.turn()
    with pytest.raises(RunError, match=r"\b2 .*\b3 .*\(silo-1: .*nll .*nan; .*\blr\)"):
        algorithm.turn()


def test_a_number_of_the_server_that_is_not_finite_ends_the_run():
    class NanRecord(registry()["fedavg"]):
        def record(self, state, client, turn):
            return {"drift": float("nan")}

    algorithm, _, _ = arm(settings("fedavg"), algorithm=NanRecord())
    algorithm.turn()
    with pytest.raises(RunError, match=r"diverged .*round 1: silo-0: .*drift .*nan; .*\blr$"):
        algorithm.turn()


@pytest.mark.parametrize(("examples", "batch", "steps"), [(48, 16, 3), (50, 16, 4)])
def test_the_last_partial_batch_is_trained_on(examples, batch, steps, monkeypatch):
    taken = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: (taken.append(1), step(self)))
    algorithm, _, _ = arm(
        settings("fedavg", batch_size=batch), federation(sizes=(examples, examples, examples))
    )
    algorithm.turn()
    assert len(taken) == 3 * steps


def test_bf16_autocast_is_used_if_requested():
    dtypes = set()
    for precision in ("fp32", "bf16"):
        workspace = workspace_of(settings("fedavg", precision=precision))
        with workspace.amp():
            images = workspace.normalize(federation().clients[0].load().train.images[:2])
            dtypes.add((precision, workspace.net(images).dtype))
    assert dtypes == {("fp32", torch.float32), ("bf16", torch.bfloat16)}


@pytest.mark.parametrize("has", [True, False])
def test_auto_takes_bf16_where_the_cpu_multiplies_it(has, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has)
    assert workspace_of(settings("fedavg", precision="auto")).autocast == has


@pytest.mark.parametrize("name", ["reason", "unseen", "round"])
def test_client_cannot_set_the_round_of_its_metrics(name):
    algorithm, _, notices = arm(settings("fedavg", quorum=0.5), wrap=measures(**{name: 1}))
    records = finish(algorithm)
    assert {record["client"] for record in records} == {"silo-0", "silo-2"}
    assert re.match(rf"round 2: rejected silo-1: .*\b{name}$", notices[0])


def test_tensor_names_of_a_client_are_sanitized_and_shortened():
    def colorful(reply):
        if reply.client == "silo-1":
            reply.tensors["\x1b[31m\n" + "x" * 1000] = torch.zeros(1)
        return reply

    algorithm, _, notices = arm(settings("fedavg", quorum=0.5), wrap=lambda e: TamperingEngine(e, colorful))
    algorithm.turn()
    (line,) = algorithm.rejected
    assert "?[31m?xxx" in line["reason"]
    assert len(line["reason"]) < 210
    assert line["reason"] in notices[0]


def test_a_round_copies_no_model():
    algorithm, workspace, _ = arm(settings("fedavg"))
    pointers = [p.data_ptr() for p in workspace.net.parameters()]
    finish(algorithm)
    assert [p.data_ptr() for p in workspace.net.parameters()] == pointers


@pytest.mark.parametrize("keys", [{}, {"uncertainty": "ensemble", "members": 2}], ids=["one", "ensemble"])
def test_a_model_is_loaded_once_in_a_turn(keys, monkeypatch):
    loads = []
    load = Workspace.load
    monkeypatch.setattr(Workspace, "load", lambda self, message: (loads.append(1), load(self, message)))
    algorithm, _, _ = arm(settings("uefl", **keys))
    for _ in range(2):  # the second measures and trains
        loads.clear()
        algorithm.turn()
        # once for each client, and once to check that the mean of their updates is a valid model
        assert len(loads) == (3 + 1) * keys.get("members", 1)


def test_data_of_a_client_are_read_once_when_needed():
    read = []
    recorded = [
        replace(client, load=lambda client=client: (read.append(client.name), client.load())[1])
        for client in federation().clients
    ]
    clients = Clients(tuple(recorded), torch.device("cpu"))
    clients.data("silo-1")
    clients.data("silo-1")
    assert read == ["silo-1"]
