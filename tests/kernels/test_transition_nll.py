"""transition_nll, log_transition_probs and the loss of the published code, against worked numbers and each other."""

from __future__ import annotations

import torch

from uefl_kernels import log_transition_matrix, log_transition_probs, transition_double_softmax, transition_nll

PRIORS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.2, 0.5, 0.3]], dtype=torch.float64)
SETS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
LOGITS = torch.tensor([[2, -1, 0.5], [0, 0, 0], [-3, 4, 1]], dtype=torch.float64)
TARGETS = torch.tensor([0, 2, 3])


def equal(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


def test_worked_example():
    matrix, logits = log_transition_matrix(PRIORS, SETS, TARGET), LOGITS.clone().requires_grad_()
    equal(matrix.exp().sum(0), [0.76, 1.2, 1.3])
    loss = transition_nll(logits, TARGETS, matrix)
    equal(loss, [0.5856166203, 1.4474303611, 1.9831176379])
    loss.sum().backward()
    equal(
        logits.grad,
        [
            [-0.2214921016, 0.0323464133, 0.1891456884],
            [0.1026940517, 0.1507068552, -0.2534009069],
            [0.0003382479, -0.0086082968, 0.0082700489],
        ],
    )
    equal(
        log_transition_probs(LOGITS, matrix).exp(),
        [
            [0.5567624449, 0.1714529337, 0.1981079588, 0.0736766626],
            [0.3149284254, 0.3404907975, 0.2351738241, 0.1094069530],
            [0.2190067821, 0.4919005180, 0.1514532421, 0.1376394577],
        ],
    )


def test_worked_example_with_uniform_target_prior():
    matrix, logits = log_transition_matrix(PRIORS, SETS), LOGITS.clone().requires_grad_()
    equal(transition_nll(LOGITS, TARGETS, matrix), [0.4424958973, 1.6094379124, 1.9805468137])
    loss = transition_double_softmax(logits, TARGETS, matrix)
    equal(loss, [1.0222038047, 1.4425355295, 1.5092377050])
    loss.sum().backward()
    equal(
        logits.grad,
        [
            [-0.0674020356, 0.0140862260, 0.0533158096],
            [0.0310144318, 0.0201259806, -0.0511404124],
            [5.1824624e-5, -3.2327367e-4, 2.7144905e-4],
        ],
    )


def test_extreme_logits_and_a_zero_prior():
    matrix = log_transition_matrix(PRIORS, SETS, TARGET)
    matrix[0, 2] = -torch.inf
    logits = torch.tensor([[1000, -1000, 0], [-1e4, -1e4, 1e4]], dtype=torch.float64)
    loss = transition_nll(logits, torch.tensor([1, 0]), matrix)
    torch.testing.assert_close(loss, torch.tensor([2.5389738711, 20000.285664], dtype=torch.float64), rtol=1e-9, atol=0)
