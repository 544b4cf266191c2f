"""Small classifiers for MCDropout, with dropouts in many places."""

from __future__ import annotations

import torch
from torch import nn


class Counted(nn.Module):
    """Counts its calls and its rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls, self.rows = inner, 0, 0

    def forward(self, x):
        self.calls, self.rows = self.calls + 1, self.rows + len(x)
        return self.inner(x)


class Opaque(Counted):
    """A leaf for the tracer: its calls are counted."""


Opaque.__module__ = "torch.nn.opaque"


class FunctionalDropoutNet(nn.Module):
    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.first, self.second, self.p = Opaque(nn.Linear(6, 20)), Opaque(nn.Linear(20, 4)), p

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x).relu(), self.p, self.training))


class Residual(nn.Module):
    """A dropout in a branch, an in-place one, and batch norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = (
            Opaque(nn.Linear(6, 8)),
            nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(8, 8)),
        )
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.norm(x + self.branch(x)))


class Branching(nn.Module):
    """A model that cannot be traced: it branches on the data."""

    def __init__(self, dropout: bool = True) -> None:
        super().__init__()
        self.body, self.p = nn.Linear(6, 4), 0.5 if dropout else 0.0

    def forward(self, x):
        x = x if x.sum() > 1e9 else x * 2
        return self.body(nn.functional.dropout(x, self.p, self.training) if self.p else x)


class Transposed(nn.Module):
    """The batch is the second dimension at the dropout: passes cannot be stacked along the first."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):  # [B, S, 4]
        return self.mix(self.drop(x.transpose(0, 1)).mean(0))


class Coupled(nn.Module):
    """Rows see each other after the dropout, in ways that a batch of copies does not show."""

    def __init__(self, attention: bool, normalized: bool = False) -> None:
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.5), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2) if attention else None
        self.norm = nn.LayerNorm(8) if normalized else nn.Identity()

    def forward(self, x):
        x = self.norm(self.drop(x))
        return 4 * self.mix(x - x.mean(0) if self.attention is None else self.attention(x, x, x)[0])


def classifier(logit_dropout=False, activation=nn.GELU):
    head = [nn.Dropout(0.3), nn.Linear(16, 12), activation(), nn.Dropout(0.2), nn.Linear(12, 5)]
    return nn.Sequential(
        nn.Sequential(Opaque(nn.Linear(6, 16)), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Sequential(*head, *([nn.Dropout(0.1)] if logit_dropout else [])),
    )


class OnlyInTraining(nn.Module):
    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.body, self.inner, self.branches = nn.Linear(6, 4), nn.Sequential(nn.Dropout(0.5)), branches

    def forward(self, x):
        if self.branches and x.sum() > 1e9:
            return self.body(x)
        return self.body(self.inner(x) if self.training else x)


class Applied(nn.Module):
    """A function between two layers, traced or not."""

    def __init__(self, function, branches: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.function, self.branches = (
            nn.Linear(6, 20),
            nn.Linear(20, 4),
            function,
            branches,
        )

    def forward(self, x):
        if self.branches and x.sum() > 1e9:
            return self.second(x)
        return self.second(self.function(self.first(x)))


class ScaledNet(nn.Module):
    """A model whose forward reads two parameters (one of a layer) and computes with a buffer.

    It does so before and after the dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1, 4))
        self.register_buffer("shift", torch.zeros(1, 4))

    def forward(self, x):
        x = self.drop(nn.functional.linear(x, self.first.weight) * self.scale)
        return self.last(x.sigmoid() * self.shift.exp() - self.shift)
