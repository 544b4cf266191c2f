"""Inputs that every backend of the transition ops must agree on."""

from __future__ import annotations

import torch

PRIORS = torch.tensor(
    [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.2, 0.5, 0.3]], dtype=torch.float64
)
SETS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
LOGITS = torch.tensor([[2, -1, 0.5], [0, 0, 0], [-3, 4, 1]], dtype=torch.float64)
TARGETS = torch.tensor([0, 2, 3])


def equal(found, expected):
    """Compare up to the digits of the worked numbers."""
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


# B, K, M, G (None: one matrix, no groups), scale of the logits
CASES = {
    "one": (1, 1, 1, None, 1.0),
    "no rows": (0, 4, 3, None, 1.0),
    "classes fill a vector": (18, 16, 16, None, 3.0),
    "small": (30, 10, 10, None, 3.0),
    "odd": (7, 13, 17, None, 3.0),
    "groups": (20, 10, 6, 3, 3.0),
    "many classes": (9, 131, 5, 2, 3.0),
    "many classes and sets": (13, 150, 37, None, 3.0),
    "more sets than rows": (3, 5, 30, 2, 1.0),
    "confident": (20, 10, 8, 2, 40.0),
    "extreme": (20, 10, 8, None, 1e4),
}


def transition_case(name, dtype=torch.float32, seed=0):
    """Return logits, targets, log_transition and groups, with a fifth of the priors zero.

    Later groups have fewer sets, the rest is -inf.
    """
    b, k, m, g, scale = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(b, k, generator=generator, dtype=torch.float64) * scale).to(dtype)
    priors = torch.rand(g or 1, m, k, generator=generator, dtype=torch.float64)
    priors[torch.rand(priors.shape, generator=generator) < 0.2] = 0
    priors[:, torch.arange(m), torch.arange(m) % k] += 0.2
    if k > 3:
        priors[0, :, 3] = 0  # a class that no set has
        priors[0, :, 0] += 0.1
    groups = None if g is None else torch.randint(g, (b,), generator=generator)
    sets = torch.tensor([max(1, m - i) for i in range(g or 1)])
    for i, count in enumerate(sets.tolist()):
        priors[i, count:] = 0
    of_row = torch.zeros(b, dtype=torch.int64) if groups is None else groups
    targets = (torch.rand(b, generator=generator) * sets[of_row]).long()
    if b > 2:
        targets[2] = -100
    log_transition = priors.log().to(torch.float64 if dtype == torch.float64 else torch.float32)
    return logits, targets, log_transition if g else log_transition[0], groups


def proportion_case(dtype=torch.float32, n=100, k=7, scale=3.0, seed=0):
    """Return logits, offsets, and proportions of four sets, which have zeros and sum to one."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, k, generator=generator, dtype=torch.float64) * scale).to(dtype)
    proportions = torch.rand(4, k, generator=generator)
    proportions[proportions < 0.2] = 0
    proportions[:, 0] += 0.1  # not zero, also for a single class
    return logits, torch.tensor([0, 1, n // 3, n // 2, n]), proportions / proportions.sum(1, keepdim=True)


def assert_near(found, expected, dtype, terms=1.0, units=1):
    """Check that the error is within some ulp of the largest term that was added.

    Terms were added in float32, and the result was rounded to the dtype that it is stored in.
    """
    epsilon = torch.finfo(found.dtype).eps
    atol = terms * (1e-12 if dtype == torch.float64 else 2e-6)
    torch.testing.assert_close(found, expected, rtol=max(units * epsilon, atol), atol=atol, equal_nan=True)


# Logits of one set, in which one row has no softmax, and the proportions of the set.
NO_DISTRIBUTION = [
    ([[torch.inf, 0], [0, 0]], [0, 1]),
    ([[torch.inf, 0, 0], [0, 0, 0]], [0, 1, 0]),
    ([[torch.nan, 0]], [0.5, 0.5]),
    ([[torch.inf, 0]], [0.5, 0.5]),
    ([[torch.inf, torch.inf]], [1, 0]),
    ([[-torch.inf, -torch.inf], [0, 0]], [0.5, 0.5]),
]
