import pytest
import torch

from tests.federated.tiny import arm, federation, finish, settings
from uefl.engines.base import Reply
from uefl.errors import RunError


class Meddler:
    """An engine that lets a function change the replies on their way."""

    def __init__(self, inner, meddle):
        self.inner, self.meddle = inner, meddle

    def clients(self):
        return self.inner.clients()

    def round(self, requests, deadline=None):
        for reply in self.inner.round(requests, deadline):
            yield self.meddle(reply)


def test_an_iteration_of_r_rounds_is_r_plus_one_exchanges_and_every_round_is_measured_once():
    exchanges = []

    class Counter(Meddler):
        def round(self, requests, deadline=None):
            exchanges.append(next((r.options["evaluate"], r.options["train"]) for r in requests.values()))
            return self.inner.round(requests, deadline)

    algorithm, _, _ = arm("fedavg", settings(), wrap=lambda e: Counter(e, None))
    records = finish(algorithm)
    assert exchanges == [(False, True), (True, True), (True, False), (False, True), (True, False)]
    assert [(r["iteration"], r["round"], r["client"]) for r in records] == [
        (i, n, f"silo-{k}") for i, n in ((0, 0), (0, 1), (1, 2)) for k in range(3)
    ]


def test_the_average_is_weighted_by_examples():
    sent = {}

    def meddle(reply):
        if "values" in reply.tensors:
            reply.tensors["values"] = torch.full_like(reply.tensors["values"], {"silo-0": 1.0, "silo-1": 2.0, "silo-2": 5.0}[reply.client])
            sent[reply.client] = reply.examples
        return reply

    algorithm, _, _ = arm("fedavg", settings(), federation(sizes=(10, 20, 30)), wrap=lambda e: Meddler(e, meddle))
    algorithm.turn()
    assert sent == {"silo-0": 10, "silo-1": 20, "silo-2": 30}
    torch.testing.assert_close(algorithm.values, torch.full_like(algorithm.values, (10 * 1 + 20 * 2 + 30 * 5) / 60))


def test_training_learns_and_runs_repeat_bit_for_bit():
    runs = [arm("fedavg", settings(rounds=[6], local_epochs=3), federation(noise=(0.1, 0.1, 0.1))) for _ in range(2)]
    records = [finish(algorithm) for algorithm, _, _ in runs]
    assert records[0] == records[1]
    assert torch.equal(runs[0][0].values, runs[1][0].values)
    assert records[0][-1]["accuracy"] > 0.9
    assert records[0][-1]["train_loss"] < records[0][0]["train_loss"]


def test_seeds_matter():
    one, two = (finish(arm("fedavg", settings(seed=seed))[0]) for seed in (0, 1))
    assert one != two


def test_a_resumed_arm_is_the_uninterrupted_one():
    whole, _, _ = arm("uefl", settings())
    expected = finish(whole)
    records, (algorithm, _, _) = [], arm("uefl", settings())
    while not algorithm.finished:  # a new process after every turn
        tensors, plain = algorithm.state()
        tensors = {k: v.clone() for k, v in tensors.items()}
        algorithm, _, _ = arm("uefl", settings())
        algorithm.restore(tensors, plain)
        records += algorithm.turn()
    assert records == expected
    assert torch.equal(algorithm.values, whole.values)
    assert all(torch.equal(a.codewords, b.codewords) for a, b in zip(algorithm.blocks, whole.blocks, strict=True))


def broken(reply):
    if reply.client == "silo-1" and "values" in reply.tensors:
        reply.tensors["values"] = torch.full_like(reply.tensors["values"], float("nan"))
    return reply


def test_an_update_that_is_not_finite_is_left_out_counted_and_said():
    algorithm, _, notices = arm("fedavg", settings(quorum=0.6), wrap=lambda e: Meddler(e, broken))
    algorithm.turn()
    assert bool(torch.isfinite(algorithm.values).all())
    assert algorithm.rejected == 1
    assert notices == ["rejected the update of silo-1: values is not finite"]


def test_below_the_quorum_the_run_ends_with_an_error():
    algorithm, _, _ = arm("fedavg", settings(quorum=1.0), wrap=lambda e: Meddler(e, broken))
    with pytest.raises(RunError, match="2 of 3 clients sent a sound update, the quorum is 3"):
        algorithm.turn()


def test_an_update_that_is_too_long_is_left_out():
    algorithm, _, notices = arm("fedavg", settings(quorum=0.1, max_update_norm=1e-9))
    with pytest.raises(RunError, match="0 of 3"):
        algorithm.turn()
    assert all("max_update_norm" in notice for notice in notices)
    assert len(notices) == 3


def test_a_client_that_cannot_measure_ends_the_run():
    def silent(reply):
        return Reply(reply.client, error="gone") if reply.client == "silo-2" and "accuracy" in reply.metrics else reply

    algorithm, _, _ = arm("fedavg", settings(), wrap=lambda e: Meddler(e, silent))
    algorithm.turn()
    with pytest.raises(RunError, match="silo-2 could not measure"):
        algorithm.turn()


def test_a_round_copies_no_model():
    algorithm, device, _ = arm("fedavg", settings())
    pointers = [p.data_ptr() for p in device.net.parameters()]
    finish(algorithm)
    assert [p.data_ptr() for p in device.net.parameters()] == pointers
    assert all(
        p.grad.data_ptr() != 0 and p.grad.untyped_storage().data_ptr() == device.flat.values.grad.data_ptr()
        for p in device.net.parameters()
    )
