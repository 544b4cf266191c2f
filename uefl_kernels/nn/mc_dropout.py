"""``MCDropout``: Monte-Carlo dropout around any classifier, with the part before the first dropout computed once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from .._numbers import is_count, is_seed
from ..ops.mc_dropout_mlp import MCStats, mc_dropout_mlp

_F = nn.functional
_FUNCTIONS: dict[Any, str] = dict.fromkeys(  # and their argument that switches them on
    (_F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d, _F.alpha_dropout, _F.feature_alpha_dropout), "training"
) | dict.fromkeys((torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout), "train")
_ACTIVATIONS: dict[Any, str] = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh"} | {
    _F.gelu: "gelu",
    _F.relu: "relu",
    torch.relu: "relu",
    _F.silu: "silu",
    torch.tanh: "tanh",
}


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
        parts, problem = _cut(self.model)
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
        with _dropouts_on(self.model) as functional:
            if parts is None:
                stats = _statistics(lambda _: _logits(self.model(*args, **kwargs)).unsqueeze(0), passes, 1, seed)
                if functional.calls == 0 and all(isinstance(module, _DropoutNd) for module in self.model.modules() if _drops(module)):
                    raise RuntimeError(_no_dropout(self.model))
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
    def _folds(self, suffix: fx.GraphModule, boundary: tuple[Any, ...], rows: int, functional: _Functional) -> bool:
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
            _restore(modes)
            expected = torch.cat(alone)
            same = together.shape == expected.shape and torch.allclose(
                together.float(), expected.float(), rtol=1e-2, atol=1e-3, equal_nan=True
            )
            self._foldable[shapes] = same
        return self._foldable[shapes]


def _modules(model: nn.Module) -> list[tuple[str, nn.Module, bool, bool]]:
    """What a cut depends on, to be compared (modules are equal to themselves alone): which modules, whether hooked, whether they drop."""
    return [
        (name, module, bool(module._forward_pre_hooks or module._forward_hooks), _drops(module)) for name, module in model.named_modules()
    ]


def _count(name: str, value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"MCDropout: {name} must be an integer of at least 1, got {value!r}")
    return index(value)


def _no_dropout(model: nn.Module) -> str:
    """Why a model whose output no dropout reaches has none."""
    for name, module in model.named_modules():
        if _drops(module):
            kind = type(module).__name__
            return (
                f"MCDropout: {kind} {name!r} is not reached in evaluation mode; call it whatever self.training is, it is switched on here"
            )
    return (
        "MCDropout: the model has no dropout with p > 0; add nn.Dropout (dropout_p of F.scaled_dot_product_attention is not switched on), "
        "or use the model as it is"
    )


@dataclass(frozen=True)
class _Chain:
    """A tail that mc_dropout_mlp can run: dropout, Linear, activation, dropout, ..., Linear, and perhaps a dropout."""

    linears: list[nn.Linear]
    dropouts: list[nn.Dropout | None]  # before each Linear and after the last one
    activation: str

    def run(self, hidden: torch.Tensor, passes: int, consistent: bool, seed: int | None) -> MCStats:
        return mc_dropout_mlp(
            hidden,
            [linear.weight for linear in self.linears],
            [linear.bias for linear in self.linears],
            p=[0.0 if dropout is None else dropout.p for dropout in self.dropouts],  # as they are now
            passes=passes,
            activation=self.activation,
            input_dropout=True,
            logit_dropout=True,
            consistent=consistent,
            seed=seed,
        )


@dataclass(frozen=True)
class _Parts:
    prefix: fx.GraphModule  # arguments -> the values that the suffix takes
    suffix: fx.GraphModule
    chain: _Chain | None
    tensors: dict[str, Any]  # that the model's own forward reads, by name: prefix and suffix hold these very ones

    def reads_from(self, model: nn.Module) -> bool:
        """Whether they still are the model's."""
        return all(_attribute(model, name) is tensor for name, tensor in self.tensors.items())


class _Functional(TorchFunctionMode):
    """Switches functional dropouts on, and counts them."""

    training, calls = True, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _FUNCTIONS:
            self.calls += 1
            switch = _FUNCTIONS[function]
            bound = dict(zip(("input", "p", switch, "inplace"), args, strict=False)) | kwargs
            _require_rate(function, bound.get("p"))
            return function(**bound | {switch: self.training})
        return function(*args, **kwargs)


def _require_rate(dropout: Any, rate: Any) -> None:
    if isinstance(rate, (int, float)) and rate == 1:
        raise ValueError(f"MCDropout: {dropout.__name__} drops everything (p = 1); use a rate in [0, 1)")


def _drops(module: nn.Module) -> bool:
    """A dropout that drops, or a module of torch.nn with one built in."""
    rate: Any = 0.0
    if isinstance(module, _DropoutNd):
        rate = module.p
    elif isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
        rate = module.dropout
    _require_rate(type(module), rate)
    return bool(rate > 0)


@contextmanager
def _dropouts_on(model: nn.Module) -> Iterator[_Functional]:
    """Evaluation mode but for what drops; all modes as before at the end."""
    modes = [(module, module.training) for module in model.modules()]
    functional = _Functional()
    try:
        model.eval()
        for module, _ in modes:
            # A transformer layer in evaluation mode takes a fast path without its dropouts.
            transformer = isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer))
            module.training = _drops(module) or (transformer and any(map(_drops, module.modules())))
        with functional:
            yield functional
    finally:
        _restore(modes)


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, mode in modes:
        module.training = mode


class _Tracer(fx.Tracer):
    """Reads parameters and buffers where the graph runs; what a forward computes from them must be no constant."""

    proxy_buffer_attributes = True

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        for name, parameter in self.root.named_parameters() if type(attr_val) is torch.Tensor else ():
            if parameter is attr_val:  # functional_call puts plain tensors in their places
                return self.create_proxy("get_attr", name, (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def _cut(model: nn.Module) -> tuple[_Parts | None, str]:
    """The parts, or None and why there are none. Raises ValueError for a model without dropout."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        graph = _Tracer().trace(model.eval())
    except Exception as error:  # whatever the model's forward raises when it meets a proxy
        return None, f"{type(model).__name__} cannot be traced ({str(error).strip().splitlines()[0]})"
    finally:
        _restore(modes)
    random: set[fx.Node] = set()
    for node in graph.nodes:
        if _draws(node, model) or (node.op != "output" and any(source in random for source in node.all_input_nodes)):
            random.add(node)
    output = next(node for node in graph.nodes if node.op == "output")
    if not any(source in random for source in output.all_input_nodes):
        raise ValueError(_no_dropout(model))
    taken = {source: None for node in (*random, output) for source in node.all_input_nodes if source not in random}
    boundary = [node for node in graph.nodes if node in taken and node.op != "get_attr"]

    prefix, suffix = fx.Graph(), fx.Graph()
    first: dict[fx.Node, fx.Node] = {}
    second = {node: suffix.placeholder(node.name) for node in boundary}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node in random or (node in taken and node.op == "get_attr"):
            second[node] = suffix.node_copy(node, second.__getitem__)
        if node not in random:
            first[node] = prefix.node_copy(node, first.__getitem__)
    prefix.output(tuple(first[node] for node in boundary))
    suffix.node_copy(output, second.__getitem__)
    chain = _chain([node for node in graph.nodes if node in random], boundary, output, model)
    tensors = {name: _attribute(model, name) for name in (str(node.target) for node in graph.nodes if node.op == "get_attr")}
    return _Parts(fx.GraphModule(model, prefix), fx.GraphModule(model, suffix), chain, tensors), ""


def _attribute(model: nn.Module, name: str) -> Any:
    """What the model has under a dotted name, or None."""
    owner: Any = model
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner


def _draws(node: fx.Node, model: nn.Module) -> bool:
    """Whether the node itself is a dropout."""
    if node.op == "call_module":
        return any(map(_drops, model.get_submodule(str(node.target)).modules()))
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return False
    rate: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    _require_rate(node.target, rate)
    return bool(rate != 0)


def _chain(nodes: list[fx.Node], boundary: list[fx.Node], output: fx.Node, model: nn.Module) -> _Chain | None:
    """The nodes as a chain for mc_dropout_mlp, or None."""
    linears: list[nn.Linear] = []
    dropouts: list[nn.Dropout | None] = []
    activations: set[str] = set()
    pending: nn.Dropout | None = None
    activated, previous = True, boundary[0]
    for node in nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind = node.target if module is None else type(module)
        if node.args != (previous,) or any(value not in (False, "none") for value in node.kwargs.values()):
            return None
        previous = node
        if module is not None and (module._forward_pre_hooks or module._forward_hooks):
            return None  # a hook may see or change what passes, or make the weight, as spectral_norm does
        if isinstance(module, nn.Identity):
            continue
        if type(module) is nn.Dropout and pending is None and (activated or node is nodes[-1]):
            pending = module
        elif type(module) is nn.Linear and activated:
            linears.append(module)
            dropouts.append(pending)
            pending, activated = None, False
        elif kind in _ACTIVATIONS and not activated and pending is None and getattr(module, "approximate", "none") == "none":
            activations.add(_ACTIVATIONS[kind])
            activated = True
        else:
            return None
    if len(boundary) > 1 or not linears or activated or len(activations) > 1 or output.args != (previous,):
        return None
    return _Chain(linears, [*dropouts, pending], *(activations or {"gelu"}))


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
