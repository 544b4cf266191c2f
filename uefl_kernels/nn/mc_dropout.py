"""``MCDropout``: Monte Carlo dropout around any classifier.

The part before the first dropout is computed once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.dropout import _DropoutNd

from .._library import exporting_to_onnx, not_in_onnx
from .._numbers import as_integer, is_count, is_seed
from ..metrics import entropy
from ..ops.mc_dropout_mlp import MCStats, mc_dropout_mlp, mc_dropout_probs
from ._model_cut import (
    Chain,
    CutModel,
    FunctionalDropoutMode,
    altered,
    cut_model,
    dropouts_off,
    dropouts_on,
    drops,
    inserted_before,
    insertions,
    no_dropout,
)
from ._shared import no_torchscript

_MOST_LOGITS = 2**22  # of a folded batch
_LOCK = threading.RLock()  # guards the modes of a model and torch's generators during a call
PassCall = tuple[Callable[..., torch.Tensor], Sequence[Any]]


class MCDropout(nn.Module):
    """Turn a classifier with dropout into one that measures its uncertainty.

    The model is traced (``torch.fx``) and cut: the part before any dropout runs once, the rest ``passes``
    times. If the rest is a chain of Linear, GELU (exact), ReLU, SiLU or Tanh, and dropout, it runs in
    :func:`~uefl_kernels.mc_dropout_mlp`, which stores neither masks nor passes. Otherwise the passes are
    folded into batches of at most ``max_rows`` rows, and of at most 2^22 logits: without a gradient, memory
    holds a few passes at a time (autograd keeps all of them). A model that cannot be traced runs as a whole,
    once per pass, and a warning says so.

    During a call, all modules except the dropouts are in evaluation mode (batch norm uses its running
    statistics). After the call, every mode is as before. Functional dropouts (``F.dropout`` and its like, and
    ``F.scaled_dot_product_attention``) count as dropouts and are switched on, with any argument ``training``;
    their rates are fixed when the model is traced, and are those of training mode if they depend on it.
    Modules of torch.nn that hold dropouts (attention, recurrent and transformer layers) are run in training
    mode as a whole. Not switched on: layers with their own random draws, as for stochastic depth.

    The next call traces the model again if its modules are replaced or get hooks, if a dropout is switched on
    or off, or if a parameter or buffer that its own ``forward`` reads is replaced, as by
    ``load_state_dict(assign=True)``. New values in place need no new trace. After other changes of its
    ``forward``, or of tensors that are neither parameters nor buffers, make another ``MCDropout``.

    A model that ``torch.compile`` made runs as a whole, and is compiled once for all passes and seeds.
    Inductor draws from its own generator. With ``torch.compile(model, options={"fallback_random": True})``
    the masks of a seed equal those of a plain model that runs as a whole. A model that is cut may have
    others.

    Calls from several threads run one after the other, as they change the modes of the model and, with a
    seed, torch's generators. A plain call of the model in another thread at that time sees the dropouts on.

    Args:
        model: takes a batch, returns logits ``[B, ..., C]``. Kept as the submodule ``model``; its parameters
            stay its own.
        passes: T, at least 1; with one pass, variance and mutual_info are 0 for any model.
        consistent: one mask per pass for the whole batch, so that a pass is one sampled network (BatchBALD);
            of the chain above also for all positions of a row ``[B, ..., D]``. Outside the chain every row
            runs as its own batch with the same draws: by ``torch.vmap`` if that is possible, else row by row,
            which is slow.
        max_rows: most rows of a folded batch; a larger batch is not cut. Outside the chain, the masks of a
            seed depend on it.
        class_dim: dimension of the classes in the output of the model, 1 for segmentation models ``[B, C, H,
            W]``; ``mean_probs``, ``variance`` and the probabilities have them there as well.
        insert: for a model without dropout: the rate of a dropout before its last ``nn.Linear``, or ``{name:
            rate}`` for dropouts before the modules of these names (see ``named_modules``), on their first
            argument. Dropouts of the model itself stay on. The model is not changed.

    Raises:
        TypeError: ``model`` is not a module; a dropout is reached by integers.
        ValueError: ``passes`` or ``max_rows`` below 1; ``class_dim`` is 0 or no integer; a rate is 1;
            ``insert`` is not a rate in (0, 1), names no module or one that the model does not call; also in a
            call, where the model was changed so. In a call with ``consistent``: rows see each other, or a
            tensor does not have the batch first.
        NoDropoutError: the model has no dropout with p > 0, or does not call it; in a call if the model
            cannot be traced.
        RuntimeError: in a call, for a model that cannot be traced: a module of ``insert`` is not called.
        NotImplementedError: in a call by ``torch.onnx.export``, which raises its own error for a program of
            ``torch.export.export``.

    Shapes: the arguments of ``model`` -> :class:`~uefl_kernels.MCStats`, ``[B, ..., C]`` and ``[B, ...]``.
        Differentiable.

    Source: Gal and Ghahramani 2016, "Dropout as a Bayesian Approximation"; ``consistent`` and :meth:`probs`:
    Kirsch et al. 2019, "BatchBALD".

    Equivalent to (with dropouts in training mode, the rest in evaluation mode)::

        probs = torch.stack([model(x).softmax(-1) for _ in range(passes)])
        mean = probs.mean(0)
        entropy = torch.special.entr(mean).sum(-1)
        expected_entropy = torch.special.entr(probs).sum(-1).mean(0)
        MCStats(mean, entropy, expected_entropy, entropy - expected_entropy, probs.var(0, correction=0))
    """

    def __init__(
        self,
        model: nn.Module,
        passes: int = 20,
        *,
        consistent: bool = False,
        max_rows: int = 4096,
        class_dim: int = -1,
        insert: float | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"MCDropout: model must be a torch.nn.Module, got {type(model).__name__}")
        for name, value in (("passes", passes), ("max_rows", max_rows)):
            _count(name, value)
        if not isinstance(consistent, (int, np.bool_)) or consistent not in (0, 1):
            raise ValueError(f"MCDropout: consistent must be True or False, got {consistent!r}")
        if as_integer(class_dim) in (None, 0):
            raise ValueError(
                "MCDropout: class_dim must be the dimension of the classes, an integer and not 0, got"
                f" {class_dim!r}"
            )
        self.model, self.passes, self.consistent, self.max_rows, self.insert = (
            model,
            passes,
            bool(consistent),
            max_rows,
            insert,
        )
        self.class_dim = index(class_dim)
        self._trace()

    __prepare_scriptable__ = no_torchscript

    @property
    def fused(self) -> bool:
        """Return True if everything from the first dropout on runs in ``mc_dropout_mlp``."""
        return self._cut is not None and self._cut.chain is not None

    def extra_repr(self) -> str:
        """Return the text that print shows."""
        return f"passes={self.passes}, consistent={self.consistent}, fused={self.fused}"

    def _apply(self, *args: Any, **kwargs: Any) -> MCDropout:
        super()._apply(*args, **kwargs)
        if self._cut is not None:
            self._trace()  # tensors that the forward makes for a device or dtype may be others now
        return self

    def _trace(self) -> None:
        """Cut the model as it is now."""
        self._rates = insertions(self.model, self.insert)
        with _locked():
            self._cut, problem = cut_model(self.model, self._rates)
        if problem:
            warnings.warn(f"MCDropout: {problem}; the whole model runs for every pass", stacklevel=3)
        self._seen = _modules(self.model)
        self._tried: dict[tuple[Any, ...], int] = {}  # by the shapes of the input

    def forward(self, *args: Any, seed: int | None = None, **kwargs: Any) -> MCStats:
        """Return the statistics of the passes.

        ``seed`` fixes the masks, None uses torch's generator.
        """
        _refuse_onnx()
        with _locked(), self._open(args, kwargs, seed) as passes:
            found = passes.statistics(_count("passes", self.passes), seed)
        if self.class_dim == -1:
            return found
        return found._replace(
            mean_probs=self._outward(found.mean_probs, 0), variance=self._outward(found.variance, 0)
        )

    def probs(self, *args: Any, seed: int | None = None, **kwargs: Any) -> torch.Tensor:
        """Return the probabilities of every pass, ``[passes, B, ..., C]``.

        The dtype is float32, or float64 if the logits are.

        Those of the masks of a call with the same seed. With ``consistent=True``, ``probs[t]`` is one sampled
        network on all rows: the joint entropy of a batch needs it (BatchBALD, eq. 12). The errors are the
            same as of a call.
        """
        _refuse_onnx()
        with _locked(), self._open(args, kwargs, seed) as passes:
            return self._outward(passes.probs(_count("passes", self.passes), seed), 1)

    def _outward(self, values: torch.Tensor, passes: int) -> torch.Tensor:
        """Move the classes from the last dimension to ``class_dim``.

        It counts behind the given number of dimensions of passes.
        """
        return values.movedim(-1, self.class_dim + passes if self.class_dim > 0 else self.class_dim)

    def _logits(self, output: Any) -> torch.Tensor:
        """Move the classes last, and refuse outputs that are not logits of several classes."""
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"MCDropout: the model must return logits, got {type(output).__name__}; wrap it in a module"
                " that returns only the logits"
            )
        dims = output.dim()
        if dims < 2 or not output.is_floating_point():
            raise TypeError(
                "MCDropout: the model must return logits [B, ..., C], got"
                f" {output.dtype} {list(output.shape)}"
            )
        if not -dims < self.class_dim < dims or self.class_dim == 0:
            raise TypeError(
                f"MCDropout: class_dim={self.class_dim} is not a dimension of the logits {list(output.shape)}"
                f" behind the batch; expected 1 to {dims - 1}, or {1 - dims} to -1"
            )
        # the softmax of one number is 1, and its entropy 0, whatever the number is
        if output.shape[self.class_dim] == 1:
            raise ValueError(
                f"MCDropout: with the logits {list(output.shape)} there is one class; let the model return"
                " two logits, torch.cat([-z, z], -1) / 2"
            )
        logits: torch.Tensor = output.movedim(self.class_dim, -1)
        return logits

    @contextmanager
    def _open(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None
    ) -> Iterator[ChainPasses | ModelPasses]:
        """Yield the passes of one call, with the dropouts on."""
        max_rows = _count("max_rows", self.max_rows)
        if seed is not None and not is_seed(seed):
            raise ValueError(f"MCDropout: seed must be an integer in [0, 2^63) or None, got {seed!r}")
        if self._seen != _modules(self.model) or (
            self._cut is not None and not self._cut.reads_from(self.model)
        ):
            # a module was replaced, has hooks now or drops where it did not, or a tensor was replaced
            self._trace()
        cut = self._cut
        if cut is not None and any(isinstance(value, np.ndarray) for value in (*args, *kwargs.values())):
            raise TypeError(
                "MCDropout: the model takes tensors, got a NumPy array; give torch.from_numpy(x), in the"
                " dtype of the model"
            )
        with dropouts_on(self.model) as functional:
            boundary: tuple[Any, ...] = cut.prefix(*args, **kwargs) if cut is not None else ()
            if cut is not None and cut.chain is not None and self.class_dim in (-1, boundary[0].dim() - 1):
                yield ChainPasses(cut.chain, boundary[0], self.consistent)
            elif self.consistent:
                run, values = self._independent(cut, boundary, args, kwargs, functional)
                yield ModelPasses(lambda _: of_one_row(run, values).unsqueeze(0), 1)
            elif cut is None:
                yield ModelPasses(lambda _: self._whole(*args, **kwargs).unsqueeze(0), 1)
            else:
                yield self._folded(cut.suffix, boundary, max_rows, functional)
            if (
                cut is None
                and not functional.called
                and all(isinstance(m, _DropoutNd) for m in self.model.modules() if drops(m))
            ):
                raise no_dropout(self.model)
        if cut is None and functional.idle:
            warnings.warn(
                "MCDropout: the model calls a functional dropout with rate 0 in evaluation mode; if the rate"
                " depends on self.training, pass the same rate in both modes: MCDropout switches it on",
                stacklevel=6,
            )

    def _whole(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the logits of the whole model, with the dropouts of ``insert``."""
        with inserted_before(self.model, self._rates):
            return self._logits(
                self.model(*map(_copy, args), **{name: _copy(value) for name, value in kwargs.items()})
            )

    def _folded(
        self,
        suffix: fx.GraphModule,
        boundary: tuple[Any, ...],
        max_rows: int,
        functional: FunctionalDropoutMode,
    ) -> ModelPasses:
        """Run the passes stacked along the first dimension if a trial allows it, else one by one."""
        rows = _rows(boundary) or 0
        logits = self._folds(suffix, boundary, functional) if rows > 0 else 0
        if logits == 0:
            return ModelPasses(lambda _: self._logits(suffix(*map(_copy, boundary))).unsqueeze(0), 1)

        def draw(count: int) -> torch.Tensor:
            stacked = self._logits(suffix(*_repeat(boundary, count)))
            return stacked.reshape(count, len(stacked) // count, *stacked.shape[1:])

        return ModelPasses(draw, max(1, min(max_rows // rows, _MOST_LOGITS // logits)))

    @torch.no_grad()
    def _folds(
        self, suffix: fx.GraphModule, boundary: tuple[Any, ...], functional: FunctionalDropoutMode
    ) -> int:
        """Return the logits of a pass if passes may be stacked along the first dimension, else 0.

        This is tried once per shape, with the dropouts off.

        The second half of the trial holds other numbers, in another order: rows that see each other's mean
        would not notice a copy, and behind a normalization not a scaled one. Tensors without values allow no
        trial.
        """
        if _without_values(boundary):
            return 0
        shapes = tuple(value.shape for value in boundary)
        if shapes not in self._tried:
            with dropouts_off(self.model, functional):
                other = [value.flip(-1) / 2 if value.is_floating_point() else value for value in boundary]
                alone = [self._logits(suffix(*map(_copy, values))) for values in (boundary, other)]
                stacked = [torch.cat(pair) for pair in zip(boundary, other, strict=True)]
                fits = _agree(torch.cat(alone), lambda: self._logits(suffix(*stacked)))
            self._tried[shapes] = alone[0].numel() if fits else 0
        return self._tried[shapes]

    def _independent(
        self,
        cut: CutModel | None,
        boundary: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        functional: FunctionalDropoutMode,
    ) -> PassCall:
        """Return the callable of a pass and its tensors: the suffix, or else the whole model.

        Rows must be independent; otherwise an error is raised.
        """
        given = [*args, *kwargs.values()]

        def whole(*values: torch.Tensor) -> torch.Tensor:
            left = iter(values)
            filled = [next(left) if isinstance(value, torch.Tensor) else value for value in given]
            return self._whole(*filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))

        calls: list[PassCall] = [(whole, [value for value in given if isinstance(value, torch.Tensor)])]
        if cut is not None:
            calls.insert(0, (lambda *values: self._logits(cut.suffix(*map(_copy, values))), boundary))
        for run, values in calls:
            rows = _rows(values)
            if rows == 0:
                return run, values
            if _without_values(values):
                self._require_trial(run is whole)
                return run, values
            if rows is not None:
                key = (run is whole, *(value.shape for value in values))
                if key not in self._tried:
                    with torch.no_grad(), dropouts_off(self.model, functional):
                        self._tried[key] = int(_agree(run(*values), of_one_row, run, values))
                if self._tried[key]:
                    return run, values
        raise ValueError(
            "MCDropout: consistent=True needs rows that do not affect each other, and every"
            " tensor with the batch first"
        )

    def _require_trial(self, whole: bool) -> None:
        """Raise RuntimeError if no call before has found that rows do not affect each other."""
        if not any(independent and key[0] is whole for key, independent in self._tried.items()):
            raise RuntimeError(
                "MCDropout: consistent=True tests with the values of a call whether rows affect each other,"
                " but meta or fake tensors have no values; call the module once before, as before"
                " torch.export"
            )


@dataclass(frozen=True)
class ChainPasses:
    """Passes of a chain, in the kernel."""

    chain: Chain
    hidden: torch.Tensor
    consistent: bool

    def statistics(self, passes: int, seed: int | None) -> MCStats:
        """Return the result of all passes."""
        return mc_dropout_mlp(
            *self._layers(),
            **self._options(),
            passes=passes,
            input_dropout=True,
            logit_dropout=True,
            seed=seed,
        )

    def probs(self, passes: int, seed: int | None) -> torch.Tensor:
        """Return the probabilities of each pass, ``[passes, B, ..., C]``."""
        return mc_dropout_probs(*self._layers(), **self._options(), passes=passes, seed=seed)

    def _layers(self) -> tuple[Any, ...]:
        linears = self.chain.linears
        return self.hidden, [linear.weight for linear in linears], [linear.bias for linear in linears]

    def _options(self) -> dict[str, Any]:
        # as they are now
        rates = [dropout.p if isinstance(dropout, nn.Dropout) else dropout for dropout in self.chain.dropouts]
        return {"p": rates, "activation": self.chain.activation, "consistent": self.consistent}


@dataclass(frozen=True)
class ModelPasses:
    """Passes of any model, ``fold`` at a time.

    ``draw(n)`` gives the logits of n passes, ``[n, B, ..., C]``.
    """

    draw: Callable[[int], torch.Tensor]
    fold: int

    def statistics(self, passes: int, seed: int | None) -> MCStats:
        """Return the result of all passes.

        It keeps only the sums of earlier passes.
        """
        mean = moment = expected = torch.zeros(())
        done = 0
        with _seeded(seed):
            for probs in self._blocks(passes):
                if done == 0:
                    mean = moment = torch.zeros_like(probs[0])
                    expected = torch.zeros_like(probs[0, ..., 0])
                share, batch_mean = len(probs) / (done + len(probs)), probs.mean(0)
                step = batch_mean - mean
                moment = moment + (probs - batch_mean).square().sum(0) + step.square() * (done * share)
                mean = mean + step * share
                expected = expected + entropy(probs).sum(0)
                done += len(probs)
        total, expected = entropy(mean), expected / passes
        return MCStats(mean, total, expected, (total - expected).clamp_min(0), moment / passes)

    def probs(self, passes: int, seed: int | None) -> torch.Tensor:
        """Return the probabilities of each pass, ``[passes, B, ..., C]``."""
        with _seeded(seed):
            return torch.cat([*self._blocks(passes)])

    def _blocks(self, passes: int) -> Iterator[torch.Tensor]:
        for done in range(0, passes, self.fold):
            logits = self.draw(min(self.fold, passes - done))
            yield logits.softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's generators inside the context and restore them afterwards.

    Without a seed the context does nothing.
    """
    if seed is None:
        yield
        return
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "MCDropout: a seed sets torch's generators, but an exported program cannot set them; export"
            " without a seed, or a model whose dropouts are all in a chain (see fused)"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def of_one_row(run: Callable[..., torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Call ``run`` on every row alone, with the same draws: all rows get one mask."""

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


def _refuse_onnx() -> None:  # a runtime of ONNX may leave dropouts out
    if exporting_to_onnx():
        raise not_in_onnx("MCDropout")


def _locked() -> contextlib.AbstractContextManager[object]:
    """Keep other threads' calls away, except in a compiled graph, which has no threads."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _LOCK


def _free_in_child() -> None:
    """Replace the lock after a fork: the child does not have the thread that would release it."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free_in_child)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module, bool, bool]]:
    """Return the key of a cut: the modules, whether they were altered, and whether they drop."""
    return [(name, module, altered(module), drops(module)) for name, module in model.named_modules()]


def _count(name: str, value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"MCDropout: {name} must be an integer of at least 1, got {value!r}")
    return index(value)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value  # a pass may write in place


def _rows(values: Sequence[Any]) -> int | None:
    """Return the number of rows that all values have, or None if they differ."""
    sizes = {len(value) if isinstance(value, torch.Tensor) and value.dim() > 0 else None for value in values}
    return sizes.pop() if len(sizes) == 1 else None


def _without_values(values: Sequence[Any]) -> bool:
    """Return True for tensors on the meta device, of vmap, and fake ones, as in torch.export."""
    return any(
        isinstance(value, FakeTensor) or value.is_meta or torch._C._functorch.is_batchedtensor(value)
        for value in values
        if isinstance(value, torch.Tensor)
    )


def _agree(expected: torch.Tensor, call: Callable[..., torch.Tensor], *args: Any) -> bool:
    """Return True if a call returns what is expected.

    It fails where a model takes a tensor without a batch, such as a mask ``[N, N]``.
    """
    try:
        found = call(*args)
    except RuntimeError:
        return False
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected.float(), rtol=1e-2, atol=1e-3, equal_nan=True
    )


def _repeat(values: tuple[Any, ...], times: int) -> list[torch.Tensor]:
    return [value.repeat(times, *[1] * (value.dim() - 1)) for value in values]
