"""The term of FedProx follows the paper."""

from types import SimpleNamespace

import pytest
import torch

from tests.federated.tiny import arm, settings, state, values
from uefl.algorithms.fedprox import FedProx


def test_the_first_step_is_the_same_for_any_mu():
    first = [arm(settings("fedprox", mu=mu, local_steps=1))[0] for mu in (0.0, 10.0)]
    second = [arm(settings("fedprox", mu=mu, local_steps=2))[0] for mu in (0.0, 10.0)]
    for one in (*first, *second):
        one.turn()
    assert torch.equal(values(first[0]), values(first[1]))
    assert not torch.equal(values(second[0]), values(second[1]))


def test_a_larger_mu_stays_nearer():
    moved = []
    for mu in (0.0, 1.0, 100.0):
        one = arm(settings("fedprox", mu=mu, local_epochs=5, optimizer="sgd", lr=1e-2))[0]
        before = values(one).clone()
        one.turn()
        moved.append(float((values(one) - before).norm()))
    assert moved[0] > moved[1] > moved[2]


def test_gradient_is_of_half_the_squared_distance():
    algorithm, gradient = FedProx(mu=0.5), torch.empty(2)
    work = SimpleNamespace(values=torch.tensor([3.0, -1.0]), memory={"sent": torch.tensor([1.0, 1.0])})
    assert algorithm.regularize(work, gradient)
    assert gradient.tolist() == [1.0, -1.0]


def test_the_fixed_point_on_a_parabola():
    """For the loss |w - a|^2 / 2, the local solution is (a + mu w_t) / (1 + mu)."""
    algorithm, w, sent, a = FedProx(mu=0.5), torch.zeros(1), torch.zeros(1), 3.0
    gradient = torch.empty(1)
    for _ in range(200):
        algorithm.regularize(SimpleNamespace(values=w, memory={"sent": sent}), gradient)
        w -= 0.1 * (gradient + (w - a))
    assert float(w) == pytest.approx(2.0, abs=1e-5)


def test_penalty_does_not_apply_to_running_statistics():
    one = arm(settings("fedprox", mu=1e6, optimizer="sgd", lr=1e-9))[0]
    before = state(one).tensors["buffers"].clone()
    one.turn()
    assert not torch.equal(state(one).tensors["buffers"], before)
