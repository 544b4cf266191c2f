"""``MCDropout``: Monte-Carlo dropout around any classifier, with the part before the first dropout computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from operator import index
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from .._numbers import is_count, is_seed
from ..ops.mc_dropout_mlp import MCStats
from ._dropouts import Functional, cut_model, dropouts_on, drops, no_dropout, restore


class MCDropout(nn.Module):
    """Turn a classifier with dropout into one that says how uncertain it is.

    The model is traced (``torch.fx``) and cut: what no dropout reaches runs once, the rest ``passes`` times. If the rest is a
    chain of Linear, GELU (exact), ReLU, SiLU or Tanh, and ``nn.Dropout``, it runs in :func:`~uefl_kernels.mc_dropout_mlp`, which
    stores neither masks nor passes. Otherwise the passes are folded into batches of at most ``max_rows`` rows. A model that
    cannot be traced runs as a whole, once per pass, and a warning says so.

    During a call everything is in evaluation mode (batch norm uses its running statistics) but the dropouts; afterwards every
    mode is as before. Functional dropouts (``F.dropout`` and its like) count as dropouts and are switched on, whatever
    ``training`` they were called with; their rates stay what they were when the model was traced. Modules of torch.nn that hold
    dropouts (attention, recurrent and transformer layers) are run in training mode as a whole. Not switched on: ``dropout_p`` of a
    model's own ``F.scaled_dot_product_attention``, and layers that draw for themselves. A model is traced anew by the next call when its
    modules are replaced, get hooks or begin or cease to drop, or when a parameter or buffer that its own ``forward`` reads is replaced
    (``load_state_dict(assign=True)``; new values in place are seen without). Other changes of its ``forward``, and of what it computes from
    tensors that are neither, need another ``MCDropout``.

    Args:
        model: takes a batch, returns logits ``[B, ..., C]``. Kept as the submodule ``model``; its parameters stay its own.
        passes: T, at least 1; with one, variance and mutual_info are 0 whatever the model, so they say nothing.
        consistent: one mask per pass for the whole batch (BatchBALD); for the chain above only.
        max_rows: of a folded batch; a batch that is larger is not cut.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``passes`` or ``max_rows`` below 1, the model has no dropout with p > 0, a rate is 1, or ``consistent``
            with another model than the chain above; also in a call, where the model was changed so.

    Shapes: the arguments of ``model`` -> :class:`~uefl_kernels.MCStats`, ``[B, ..., C]`` and ``[B, ...]``. Differentiable.

    Source: Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation".

    Equivalent to (with dropouts in training mode, the rest in evaluation mode)::

        probs = torch.stack([model(x).softmax(-1) for _ in range(passes)])
        mean = probs.mean(0)
        entropy, expected_entropy = torch.special.entr(mean).sum(-1), torch.special.entr(probs).sum(-1).mean(0)
        MCStats(mean, entropy, expected_entropy, entropy - expected_entropy, probs.var(0, correction=0))
    """

    def __init__(self, model: nn.Module, passes: int = 20, *, consistent: bool = False, max_rows: int = 4096) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"MCDropout: model must be a torch.nn.Module, got {type(model).__name__}")
        for name, value in (("passes", passes), ("max_rows", max_rows)):
            _count(name, value)
        self.model, self.passes, self.consistent, self.max_rows = model, passes, consistent, max_rows
        self._trace()

    @property
    def fused(self) -> bool:
        """True when everything from the first dropout on runs in ``mc_dropout_mlp``."""
        return self._parts is not None and self._parts.chain is not None

    def extra_repr(self) -> str:
        """What print shows."""
        return f"passes={self.passes}, consistent={self.consistent}, fused={self.fused}"

    def _apply(self, *args: Any, **kwargs: Any) -> MCDropout:
        super()._apply(*args, **kwargs)
        if self._parts is not None:
            self._trace()  # tensors that the forward makes for a device or dtype may be others now
        return self

    def _trace(self) -> None:
        """Cut the model as it is now."""
        parts, problem = cut_model(self.model)
        if problem:
            warnings.warn(f"MCDropout: {problem}; the whole model runs for every pass", stacklevel=3)
        if self.consistent and (parts is None or parts.chain is None):
            raise ValueError("MCDropout: consistent=True needs a model that ends in a chain of Linear, activation and nn.Dropout")
        self._parts, self._seen = parts, _modules(self.model)
        self._foldable: dict[tuple[Any, ...], bool] = {}  # by the shapes of what the suffix takes

    def forward(self, *args: Any, seed: int | None = None, **kwargs: Any) -> MCStats:
        """The statistics of the passes; ``seed`` of the masks, or None: they follow torch's generator."""
        passes, max_rows = _count("passes", self.passes), _count("max_rows", self.max_rows)
        if seed is not None and not is_seed(seed):
            raise ValueError(f"MCDropout: seed must be an integer in [0, 2^63) or None, got {seed!r}")
        if self._seen != _modules(self.model) or (self._parts is not None and not self._parts.reads_from(self.model)):
            self._trace()  # a module was replaced, has hooks now or drops where it did not, or a tensor was replaced
        parts = self._parts
        if parts is not None and any(isinstance(value, np.ndarray) for value in (*args, *kwargs.values())):
            raise TypeError("MCDropout: the model takes tensors, got a NumPy array; give torch.from_numpy(x), in the dtype of the model")
        with dropouts_on(self.model) as functional:
            if parts is None:
                stats = _statistics(lambda _: _logits(self.model(*args, **kwargs)).unsqueeze(0), passes, 1, seed)
                if functional.calls == 0 and all(isinstance(module, _DropoutNd) for module in self.model.modules() if drops(module)):
                    raise RuntimeError(no_dropout(self.model))
                return stats
            boundary = parts.prefix(*args, **kwargs)
            if parts.chain is not None:
                return parts.chain.run(boundary[0], passes, self.consistent, seed)
            rows = next((len(value) for value in boundary if isinstance(value, torch.Tensor) and value.dim() > 0), 0)
            if not self._folds(parts.suffix, boundary, rows, functional):
                return _statistics(lambda _: _logits(parts.suffix(*map(_copy, boundary))).unsqueeze(0), passes, 1, seed)

            def draw(count: int) -> torch.Tensor:
                stacked = _logits(parts.suffix(*_repeat(boundary, count)))
                return stacked.reshape(count, rows, *stacked.shape[1:])

            return _statistics(draw, passes, max(1, max_rows // max(1, rows)), seed)

    @torch.no_grad()
    def _folds(self, suffix: fx.GraphModule, boundary: tuple[Any, ...], rows: int, functional: Functional) -> bool:
        """Whether the passes may be stacked along the first dimension: tried once per shape, with the dropouts off.

        The second half of the trial holds other numbers: rows that see each other's mean would not notice a copy.
        """
        if not all(isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows for value in boundary) or rows == 0:
            return False
        shapes = tuple(value.shape for value in boundary)
        if shapes not in self._foldable:
            modes = [(module, module.training) for module in self.model.modules()]
            self.model.eval()
            functional.training = False
            other = [value / 2 if value.is_floating_point() else value for value in boundary]
            alone = [_logits(suffix(*map(_copy, values))) for values in (boundary, other)]
            together = _logits(suffix(*map(torch.cat, zip(boundary, other, strict=True))))
            functional.training = True
            restore(modes)
            expected = torch.cat(alone)
            same = together.shape == expected.shape and torch.allclose(
                together.float(), expected.float(), rtol=1e-2, atol=1e-3, equal_nan=True
            )
            self._foldable[shapes] = same
        return self._foldable[shapes]


def _modules(model: nn.Module) -> list[tuple[str, nn.Module, bool, bool]]:
    """What a cut depends on, to be compared (modules are equal to themselves alone): which modules, whether hooked, whether they drop."""
    return [
        (name, module, bool(module._forward_pre_hooks or module._forward_hooks), drops(module)) for name, module in model.named_modules()
    ]


def _count(name: str, value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"MCDropout: {name} must be an integer of at least 1, got {value!r}")
    return index(value)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value  # the suffix may write in place


def _repeat(values: tuple[Any, ...], times: int) -> list[torch.Tensor]:
    return [value.repeat(times, *[1] * (value.dim() - 1)) for value in values]


def _logits(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor) or output.dim() < 2 or not output.is_floating_point():
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise TypeError(f"MCDropout: the model must return logits [B, ..., C], got {got}")
    return output


def _statistics(draw: Callable[[int], torch.Tensor], passes: int, fold: int, seed: int | None) -> MCStats:
    """Means and variances over the passes, ``fold`` at a time; draw(n) gives the logits of n passes, [n, B, ..., C]."""
    mean = moment = expected = torch.zeros(())
    with nullcontext() if seed is None else torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        for done in range(0, passes, fold):
            logits = draw(min(fold, passes - done))
            probs = logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
            if done == 0:
                mean = moment = torch.zeros_like(probs[0])
                expected = torch.zeros_like(probs[0, ..., 0])
            share, part = len(probs) / (done + len(probs)), probs.mean(0)
            step = part - mean
            moment = moment + (probs - part).square().sum(0) + step.square() * (done * share)
            mean = mean + step * share
            expected = expected + torch.special.entr(probs).sum(-1).sum(0)
    entropy, expected = torch.special.entr(mean).sum(-1), expected / passes
    return MCStats(mean, entropy, expected, (entropy - expected).clamp_min(0), moment / passes)
