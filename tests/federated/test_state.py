"""State of an algorithm between turns, on the server and at a client, and its draws."""

import pytest
import torch

from tests.federated.engine_wrappers import RecordingEngine
from tests.federated.tiny import arm, federation, finish, settings
from uefl.algorithms.base import Algorithm
from uefl.engines.base import Message


def make(cfg, algorithm):
    return arm(cfg, algorithm=algorithm)[0]


def again(cfg, kind):
    """Return all records of a run that continues in a new arm after every turn, and the last arm."""
    records, one = [], make(cfg, kind())
    while not one.finished:
        tensors, plain = one.state()
        one = make(cfg, kind())
        one.restore({name: tensor.clone() for name, tensor in tensors.items()}, plain)
        records += one.turn()
    return records, one


class Grower(Algorithm):
    """A state of another shape for each client.

    One tensor exists only after a client has trained.
    """

    def client_state(self, client):
        return {
            "own": torch.zeros(1 + self.context.clients.index(client))
            if client in self.context.clients
            else torch.zeros(1)
        }

    def before_round(self, work):
        work.private["own"] = work.private["own"] + 1
        work.private["seen"] = work.private.get("seen", torch.zeros((), dtype=torch.int64)) + 1


def test_state_of_any_shape_and_name_round_trip():
    cfg = settings("fedavg", participation=0.5, rounds=[4])
    one = make(cfg, Grower())
    records = finish(one)
    # the algorithm has no private_mean, so there is no global accuracy
    assert all("global_accuracy" not in record for record in records)
    for client, own in one.members[0].private.items():
        assert (client in one.have_trained) == ("seen" in own)
        assert own["own"].tolist() == [float(own.get("seen", 0))] * (1 + one.context.clients.index(client))
    assert again(cfg, Grower)[0] == records


def test_counters_do_not_change_what_is_averaged():
    cfg = settings("fedavg", participation=0.5, rounds=[4])
    assert finish(make(cfg, Grower())) == finish(make(cfg, None))


def test_server_methods_get_no_private_state():
    seen = []

    class Curious(Grower):
        def prepare(self, state, turn):
            message = super().broadcast(state, "silo-0", turn)
            message.expects = {}
            seen.extend(turn.ask({"silo-0": message}))

        def reply(self, work):
            return {}

        def rejection(self, message, reply):
            seen.extend((message, reply))

        def add(self, state, averages, update):
            seen.append(update)
            super().add(state, averages, update)

    one = make(settings("fedavg", rounds=[2]), Curious())
    finish(one)
    exchanges, updates = 3, 2 * 3
    # rejection gets a message and a reply each time, and add gets an update
    assert len(seen) == 3 * (exchanges + updates)
    assert not any(piece.private for piece in seen)
    assert all("seen" in own for own in one.members[0].private.values())


class Drawer(Algorithm):
    """Draws from torch's generator in every method of both halves that the framework calls."""

    def server_state(self, values, buffers, net):
        state = super().server_state(values, buffers, net)
        state.plain = {"drawn": [torch.rand(()).item()]}
        return state

    def client_state(self, client):
        return {"own": torch.rand(2)}

    def prepare(self, state, turn):
        state.plain["drawn"].append(torch.rand(()).item())
        for _ in range(2):
            replies = turn.ask({name: Message(dict(state.tensors)) for name in turn.participants})
            assert [reply.error for reply in replies] == [None] * len(turn.participants)

    def reply(self, work):
        work.private["asked"] = torch.stack([torch.rand(()), torch.rand((), generator=work.generator)])
        return {}

    def before_round(self, work):
        work.private["own"] = work.private["own"] + torch.rand(2) + work.private["asked"]

    def aggregate(self, state, averages):
        super().aggregate(state, averages)
        state.plain["drawn"].append(torch.rand(()).item())

    def end_round(self, state, turn, server):
        state.plain["drawn"].append(torch.rand(()).item())

    def end_iteration(self, state, records, turn):
        state.plain["drawn"].append(torch.rand(()).item())
        return False


def test_draws_do_not_depend_on_the_previous_generator_state():
    cfg = settings("fedavg", participation=0.6, rounds=[2, 1])
    torch.manual_seed(1)
    whole = make(cfg, Drawer())
    records = finish(whole)
    torch.manual_seed(2)
    resumed, last = again(cfg, Drawer)
    assert resumed == records
    assert last.members[0].state.plain == whole.members[0].state.plain
    assert len(set(whole.members[0].state.plain["drawn"])) == len(whole.members[0].state.plain["drawn"])
    for client, own in whole.members[0].private.items():
        assert all(torch.equal(own[name], last.members[0].private[client][name]) for name in own)


def test_each_request_has_its_own_draws_and_private_state():
    one = make(settings("fedavg"), Drawer())
    seen = []
    original = one.engine._clients["silo-0"]

    def spy(message):
        reply = original(message)
        if "ask" in message.options:
            seen.append(reply.private["asked"].tolist())
        return reply

    one.engine._clients["silo-0"] = spy
    one.turn()
    assert len(seen) == 2
    assert len({number for draws in seen for number in draws}) == 4
    assert one.members[0].private["silo-0"]["asked"].tolist() == seen[-1]


class IntegerKeys(Algorithm):
    """Plain values that JSON changes."""

    def server_state(self, values, buffers, net):
        state = super().server_state(values, buffers, net)
        state.plain = {"by_round": {0: (1, 2)}}
        return state

    def end_round(self, state, turn, server):
        state.plain["by_round"][turn.round] = (turn.round, 0)


def test_plain_values_pass_through_json_in_every_turn():
    one = make(settings("fedavg"), IntegerKeys())
    assert one.members[0].state.plain == {"by_round": {"0": [1, 2]}}
    one.turn()
    one.turn()
    assert one.members[0].state.plain["by_round"] == {"0": [0, 0], "1": [1, 0]}


class Seeds(Algorithm):
    def update(self, work):
        assert self.context.seed == work.seed
        return super().update(work)


def test_the_client_half_of_a_member_has_the_seed_of_the_member():
    one = make(settings("fedavg", uncertainty="ensemble", members=2), Seeds())
    finish(one)
    assert not one.rejected


@pytest.mark.parametrize("name", ["fedper", "fedbn"])
def test_an_untrained_client_is_measured_with_the_mean_state(name):
    own = {"personal": "head"} if name == "fedper" else {}
    cfg, fed = settings(name, participation=0.6, rounds=[2], seed=1, **own), federation((48,) * 3)
    one = arm(cfg, fed)[0]
    sent = []

    one.engine = RecordingEngine(one.engine, lambda messages: sent.append(dict(messages)))
    one.turn()
    first = list(one.have_trained)
    (never,) = set(one.context.clients) - set(first)
    assert len(first) == 2
    one_private = {client: dict(own) for client, own in one.members[0].private.items()}
    records = {record["client"]: record for record in one.turn()}
    for piece, tensor in sent[1][never].private_mean.items():
        torch.testing.assert_close(tensor, sum(one_private[client][piece] for client in first) / 2)
        assert sent[1][first[0]].private_mean[piece].equal(tensor)
    assert sent[1][never].options["newcomer"] is True
    assert "newcomer" not in sent[1][first[0]].options
    # the two measurements differ only in the draws of dropout
    assert abs(records[never]["accuracy"] - records[never]["global_accuracy"]) < 0.2
    resumed = arm(cfg, fed)[0]
    resumed.restore(*one.state())
    assert resumed.have_trained == one.have_trained
