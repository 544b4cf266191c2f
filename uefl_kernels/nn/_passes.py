"""What the passes of a model say, together or each: of a chain in the kernel, of any other by blocks of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.mc_dropout_mlp import MCStats, mc_dropout_mlp, mc_dropout_probs
from ._dropouts import Chain


@dataclass(frozen=True)
class ChainPasses:
    """Passes of a chain, in the kernel."""

    chain: Chain
    hidden: torch.Tensor
    consistent: bool

    def statistics(self, passes: int, seed: int | None) -> MCStats:
        """What they say together."""
        return mc_dropout_mlp(*self._layers(), **self._options(), passes=passes, input_dropout=True, logit_dropout=True, seed=seed)

    def probs(self, passes: int, seed: int | None) -> torch.Tensor:
        """Each of them, ``[passes, B, ..., C]``."""
        return mc_dropout_probs(*self._layers(), **self._options(), passes=passes, seed=seed)

    def _layers(self) -> tuple[Any, ...]:
        linears = self.chain.linears
        return self.hidden, [linear.weight for linear in linears], [linear.bias for linear in linears]

    def _options(self) -> dict[str, Any]:
        rates = [dropout.p if isinstance(dropout, nn.Dropout) else dropout for dropout in self.chain.dropouts]  # as they are now
        return {"p": rates, "activation": self.chain.activation, "consistent": self.consistent}


@dataclass(frozen=True)
class ModelPasses:
    """Passes of any model, ``fold`` at a time; draw(n) gives the logits of n passes, ``[n, B, ..., C]``."""

    draw: Callable[[int], torch.Tensor]
    fold: int

    def statistics(self, passes: int, seed: int | None) -> MCStats:
        """What they say together; of the passes before there is no more than their sums."""
        mean = moment = expected = torch.zeros(())
        done = 0
        with _seeded(seed):
            for probs in self._blocks(passes):
                if done == 0:
                    mean = moment = torch.zeros_like(probs[0])
                    expected = torch.zeros_like(probs[0, ..., 0])
                share, part = len(probs) / (done + len(probs)), probs.mean(0)
                step = part - mean
                moment = moment + (probs - part).square().sum(0) + step.square() * (done * share)
                mean = mean + step * share
                expected = expected + torch.special.entr(probs).sum(-1).sum(0)
                done += len(probs)
        entropy, expected = torch.special.entr(mean).sum(-1), expected / passes
        return MCStats(mean, entropy, expected, (entropy - expected).clamp_min(0), moment / passes)

    def probs(self, passes: int, seed: int | None) -> torch.Tensor:
        """Each of them, ``[passes, B, ..., C]``."""
        with _seeded(seed):
            return torch.cat([*self._blocks(passes)])

    def _blocks(self, passes: int) -> Iterator[torch.Tensor]:
        for done in range(0, passes, self.fold):
            logits = self.draw(min(self.fold, passes - done))
            yield logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Torch's generators begin at the seed and go on afterwards as if nothing were drawn; without one nothing is changed."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def of_one_row(run: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """``run`` of every row alone, each with the same draws: one mask for all of them, whatever the layout of what drops."""

    def one(*row: torch.Tensor) -> torch.Tensor:
        return run(*(value.unsqueeze(0) for value in row))[0]

    if len(values[0]) == 0:
        return run(*values)
    try:
        together: torch.Tensor = torch.vmap(one, randomness="same")(*values)
        return together
    except RuntimeError:  # an op without a batching rule, or a forward that looks at values
        pass
    *others, last = zip(*values, strict=True)
    outputs = []
    for row in others:
        with torch.random.fork_rng():
            outputs.append(one(*row))
    return torch.stack([*outputs, one(*last)])
