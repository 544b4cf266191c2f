"""SCAFFOLD: its control variates follow option II."""

import pytest
import torch

from tests.federated.tiny import arm, finish, settings, state, values
from uefl.algorithms.scaffold import Scaffold

SGD = {"optimizer": "sgd", "lr": 1e-2}


def test_only_the_first_round_equals_fedavg():
    own, average = arm(settings("scaffold", **SGD))[0], arm(settings("fedavg", **SGD))[0]
    for expected in (True, False):
        own.turn(), average.turn()
        assert torch.equal(values(own), values(average)) is expected


def replies(one):
    """Return the reply of every client in the next turn, with its message."""
    found = {}
    for name, original in one.engine._clients.items():

        def spy(message, original=original, name=name):
            reply = original(message)
            tensors, private = (
                {n: t.clone() for n, t in piece.items()} for piece in (reply.tensors, reply.private)
            )
            found[name] = (message, tensors, private, reply.training["steps"])
            return reply

        one.engine._clients[name] = spy
    return found


def test_control_variates_follow_option_two():
    """Check c_k - c + (x - y) / (K lr) in the third round, in which c and c_k are not zero."""
    one = arm(settings("scaffold", rounds=[3], local_epochs=2, **SGD))[0]
    one.turn(), one.turn()
    seen = replies(one)
    before = {client: own["control"].clone() for client, own in one.members[0].private.items()}
    one.turn()
    assert len(seen) == 3
    for client, (message, tensors, private, steps) in seen.items():
        c, c_k, x = message.tensors["control"], before[client], message.tensors["values"]
        assert c.norm() > 0
        assert c_k.norm() > 0
        expected = c_k - c + (x - tensors["values"]) / (steps * SGD["lr"])
        assert torch.allclose(private["control"], expected, atol=2e-4)
        assert torch.allclose(tensors["control"], private["control"] - c_k, atol=1e-6)


def test_the_server_variate_is_the_mean_with_all_clients():
    one = arm(settings("scaffold", rounds=[3], **SGD))[0]
    finish(one)
    mean = torch.stack([own["control"] for own in one.members[0].private.values()]).mean(
        0
    )  # clients of one size
    assert torch.allclose(state(one).tensors["control"], mean, atol=1e-6)


def test_absent_clients_keep_their_control_variates():
    one = arm(settings("scaffold", rounds=[4], participation=0.4, **SGD))[0]
    one.turn()
    absent = sorted(set(one.context.clients) - set(one.have_trained))
    assert absent
    assert all("control" not in one.members[0].private[client] for client in absent)
    total = sum(one.members[0].private[client]["control"] for client in one.have_trained)
    assert torch.allclose(state(one).tensors["control"], total / 3, atol=1e-6)


def test_the_global_step_scales_parameters_only():
    ways, buffers = [], []
    for step in (1.0, 0.5, 2.0):
        one = arm(settings("scaffold", global_step=step, **SGD))[0]
        before = values(one).clone()
        one.turn()
        ways.append(values(one) - before)
        buffers.append(state(one).tensors["buffers"])
    assert torch.allclose(ways[1], 0.5 * ways[0], atol=1e-6)
    assert torch.allclose(ways[2], 2 * ways[0], atol=1e-6)
    assert torch.equal(buffers[0], buffers[1])
    assert torch.equal(buffers[0], buffers[2])


class Parabolas(Scaffold):
    """Client k minimizes slope_k |w - target_k|^2 / 2: with several local steps FedAvg misses the optimum."""

    slopes, targets = (1.0, 2.0, 6.0), (3.0, 0.0, -1.0)

    def loss(self, work, batch):
        k = int(work.client[-1])
        return self.slopes[k] / 2 * (work.workspace.flat.values - self.targets[k]).square().sum()


@pytest.mark.slow
def test_drifting_clients_converge_to_the_optimum_of_their_mean():
    """FedAvg with 5 local steps does not reach the optimum (1 * 3 + 2 * 0 + 6 * -1) / 9 = -1/3."""
    cfg = settings("scaffold", rounds=[60], local_steps=5, optimizer="sgd", lr=0.1)
    ends = []
    for correction in (1.0, 0.0):
        one = arm(cfg, algorithm=Parabolas(correction=correction))[0]
        for _ in range(60):
            one.exchange(measure=False, train=True)
        ends.append(float(values(one).mean()))
    assert ends[0] == pytest.approx(-1 / 3, abs=1e-4)
    assert abs(ends[1] + 1 / 3) > 0.05
