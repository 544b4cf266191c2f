"""Find the dropouts of a model, switch them on, insert more, and cut the model before the first one."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_FUNCTIONS: dict[Any, tuple[str, ...]] = dict.fromkeys(  # function -> its arguments by position
    (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    ("input", "p", "training", "inplace"),
) | dict.fromkeys(
    (
        *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
        *(torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_, torch.feature_alpha_dropout_),
        torch.native_dropout,
    ),
    ("input", "p", "train"),
)
_FUNCTIONS[F.scaled_dot_product_attention] = ("query", "key", "value", "attn_mask", "dropout_p")
_FUNCTIONS[F.multi_head_attention_forward] = (*inspect.signature(F.multi_head_attention_forward).parameters,)
_VIEWS = (
    *("view", "view_as", "reshape", "flatten", "unflatten", "transpose", "swapaxes", "permute", "movedim"),
    *("t", "squeeze", "unsqueeze", "select", "narrow", "expand", "chunk", "split", "unbind", "detach"),
    *("getitem", "getattr"),
)
_ACTIVATIONS: dict[Any, str] = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh"} | {
    F.gelu: "gelu",
    F.relu: "relu",
    torch.relu: "relu",
    F.silu: "silu",
    torch.tanh: "tanh",
}
_ASSIGNMENTS = (
    *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv, operator.ifloordiv),
    *(operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor),
)


class FunctionalDropoutMode(TorchFunctionMode):
    """Switch functional dropouts on, and remember whether one was called, and whether one had the rate 0."""

    training, called, idle = True, False, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _FUNCTIONS:
            bound, rate = _arguments(function, args, kwargs)
            switch = next((name for name in ("training", "train") if name in _FUNCTIONS[function]), None)
            # never read here: for each value that is read, torch.compile would compile the model again
            if rate != 0:
                self.called = True
            elif bound.get(switch or "", switch or "dropout_p" in bound):  # not an nn.Dropout(0)
                self.idle = True
            _require_rate(function, rate)
            value = bound["input" if "input" in bound else "query"]
            if not value.is_floating_point():
                raise TypeError(
                    f"MCDropout: a dropout got a tensor of {value.dtype}, expected floating point"
                )
            setting = {switch: self.training} if switch else {"dropout_p": rate if self.training else 0.0}
            return function(**bound | setting)
        return function(*args, **kwargs)


def _arguments(function: Any, args: Any, kwargs: Any) -> tuple[dict[str, Any], Any]:
    """Return the arguments of a functional dropout by name, and its rate."""
    bound = dict(zip(_FUNCTIONS[function], args, strict=False)) | dict(kwargs)
    attention = "query" in _FUNCTIONS[function]
    return bound, bound.get("dropout_p", 0.0) if attention else bound.get("p", 0.5)


def _require_rate(dropout: Any, rate: Any) -> None:
    if isinstance(rate, (int, float)) and rate == 1:
        raise ValueError(f"MCDropout: {dropout.__name__} drops everything (p = 1); use a rate in [0, 1)")


def drops(module: nn.Module) -> bool:
    """Return whether a module is an active dropout, or a module of torch.nn with an active built-in one."""
    rate: Any = 0.0
    if isinstance(module, _DropoutNd) or "Dropout" in getattr(module, "original_name", ""):  # scripted
        rate = getattr(module, "p", 0.0)  # a dropout without p comes from torch.jit.trace; its mode is fixed
    elif isinstance(module, nn.MultiheadAttention) or (
        isinstance(module, nn.RNNBase) and module.num_layers > 1
    ):
        rate = module.dropout
    _require_rate(type(module), rate)
    return bool(rate > 0)


def altered(module: nn.Module) -> bool:
    """Return True if the module has hooks, which may change values or compute the weight (spectral_norm)."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(hooks) or "forward" in vars(module)


@contextmanager
def dropouts_on(model: nn.Module) -> Iterator[FunctionalDropoutMode]:
    """Switch to evaluation mode with the dropouts on, and restore all modes at the end."""
    modes = [(module, module.training) for module in model.modules()]
    functional = FunctionalDropoutMode()
    try:
        model.eval()
        for module, _ in modes:
            # A transformer layer in evaluation mode takes a fast path without its dropouts.
            transformer = isinstance(
                module, (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer)
            )
            module.training = drops(module) or (transformer and any(map(drops, module.modules())))
        with functional:
            yield functional
    finally:
        restore(modes)


@contextmanager
def dropouts_off(model: nn.Module, functional: FunctionalDropoutMode) -> Iterator[None]:
    """Turn the dropouts off for a while inside a ``dropouts_on`` block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        functional.training = False
        yield
    finally:
        functional.training = True
        restore(modes)


def restore(modes: list[tuple[nn.Module, bool]]) -> None:
    """Restore the modes of modules."""
    for module, mode in modes:
        module.training = mode


def insertions(model: nn.Module, insert: float | Mapping[str, float] | None) -> dict[nn.Module, float]:
    """Return the rates of the dropouts to insert before modules, or raise."""
    named = dict(model.named_modules())
    if insert is None:
        return {}
    if not isinstance(insert, Mapping):
        linears = [name for name, module in named.items() if isinstance(module, nn.Linear)]
        if not linears:
            raise ValueError(
                "MCDropout: the model has no nn.Linear, so the place of the dropout is unknown; name a"
                " module: insert={name: rate}"
            )
        insert = {linears[-1]: insert}
    for name, rate in insert.items():
        if name not in named:
            raise ValueError(
                f"MCDropout: insert names {name!r}, which is not a module of the model, expected one of"
                f" {', '.join(named)[2:]}"
            )
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1:
            raise ValueError(f"MCDropout: insert must be a rate in (0, 1), or {{name: rate}}, got {rate!r}")
    return {named[name]: rate for name, rate in insert.items()}


def not_called(model: nn.Module, module: nn.Module) -> str:
    """Explain why no dropout precedes a module."""
    name = next(name for name, other in model.named_modules() if other is module)
    return (
        f"MCDropout: the model never calls {type(module).__name__} {name!r} with a tensor as its first"
        " argument, so no dropout can be put before it; name another module: insert={name: rate}"
    )


@contextmanager
def inserted_before(model: nn.Module, rates: Mapping[nn.Module, float]) -> Iterator[None]:
    """Insert dropouts before modules of a model that runs as a whole, without a cut."""
    called = set()

    def drop(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        called.update([module] if args else [])
        return tuple(
            nn.functional.dropout(value, rates[module]) if i == 0 else value for i, value in enumerate(args)
        )

    handles = [module.register_forward_pre_hook(drop) for module in rates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for module in rates:
        if module not in called:
            raise RuntimeError(not_called(model, module))


class NoDropoutError(ValueError, RuntimeError):
    """No dropout with p > 0 reaches the output of a model."""

    __module__ = "uefl_kernels.nn"  # the name in a traceback is the one to import
    inactive = False
    """True: the model has a dropout, but does not call it"""


def no_dropout(model: nn.Module) -> NoDropoutError:
    """Return the error that explains why no dropout reaches the output of a model."""
    for name, module in model.named_modules():
        if drops(module):
            error = NoDropoutError(
                f"MCDropout: {type(module).__name__} {name!r} is not called in evaluation mode; call it also"
                " if self.training is False: MCDropout switches it on"
            )
            error.inactive = True
            return error
    return NoDropoutError(
        "MCDropout: the model calls no dropout with p > 0 in evaluation mode; add nn.Dropout, call it also"
        " if self.training is False, or give insert=0.1"
    )


@dataclass(frozen=True)
class Chain:
    """A head that mc_dropout_mlp can run.

    It is dropout, Linear, activation, dropout, ..., Linear, and perhaps a dropout.
    """

    linears: list[nn.Linear]
    # one before each Linear and one after the last; a functional dropout is given by its rate
    dropouts: list[nn.Dropout | float]
    activation: str


@dataclass(frozen=True)
class CutModel:
    """The two parts of a model: the part before every dropout, and the rest."""

    prefix: fx.GraphModule  # arguments -> the values that the suffix takes
    suffix: fx.GraphModule
    chain: Chain | None
    # parameters and buffers that forward reads directly, by name; prefix and suffix refer to the same objects
    tensors: dict[str, Any]

    def reads_from(self, model: nn.Module) -> bool:
        """Return True if the tensors still belong to the model."""
        return all(_attribute(model, name) is tensor for name, tensor in self.tensors.items())


class _Tracer(fx.Tracer):
    """Record reads of parameters and buffers in the graph.

    So values computed from them are not constants.
    """

    proxy_buffer_attributes = True

    def __init__(self, rates: Mapping[nn.Module, float]) -> None:
        super().__init__()
        self.rates, self.called = rates, set[nn.Module]()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True also for our own layers and scripted modules, which take no proxies."""
        whole = type(m).__module__.startswith(__package__) or isinstance(m, torch.jit.ScriptModule)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if m in self.rates and args:
            self.called.add(m)
            args = (F.dropout(args[0], self.rates[m]), *args[1:])
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        for name, parameter in self.root.named_parameters() if type(attr_val) is torch.Tensor else ():
            if parameter is attr_val:  # functional_call replaces parameters by plain tensors
                return self.create_proxy("get_attr", name, (), {})
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def cut_model(model: nn.Module, rates: Mapping[nn.Module, float]) -> tuple[CutModel | None, str]:
    """Return the two parts of a model, or None and the reason why it cannot be cut.

    ``rates`` has the modules to insert a dropout before, with its rate. A model without dropout is a
    ValueError.
    """
    tracer = _Tracer(rates)
    problem, graph = _traced(model, tracer)
    if graph is None:
        return None, f"{type(model).__name__} cannot be traced ({problem})"
    for module in rates:
        if module not in tracer.called:
            raise ValueError(not_called(model, module))
    random, written, before = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        target = _overwritten(node, model)
        names = set() if target is None else _aliases(target, model) & before
        readers = {user for name in names for user in name.users}
        before.add(node)
        given = random.union(written).intersection(node.all_input_nodes)
        if node.op == "output" or not (given or _draws(node, model) or random & readers):
            continue
        random.add(node)
        if target is not None and target not in random:
            written.add(target)  # its later readers get what this node writes
            if not before.issuperset(user for name in names - {target} for user in name.users):
                return None, f"{type(model).__name__} writes into a tensor that it reads by another name"
    output = next(node for node in graph.nodes if node.op == "output")
    if not random.union(written).intersection(output.all_input_nodes):
        raise no_dropout(model)
    taken = {
        source: None for node in (*random, output) for source in node.all_input_nodes if source not in random
    }
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
    tensors = {
        name: _attribute(model, name)
        for name in (str(node.target) for node in graph.nodes if node.op == "get_attr")
    }
    return CutModel(fx.GraphModule(model, prefix), fx.GraphModule(model, suffix), chain, tensors), ""


def _traced(model: nn.Module, tracer: _Tracer) -> tuple[str, fx.Graph | None]:
    """Return the graph of a model, or the reason why it has none.

    A forward that stores tensors, as for counts or attention maps, would store proxies in the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
    except NotImplementedError:
        raise TypeError(
            "MCDropout: model is a program of torch.export, whose dropouts cannot be switched on; give the"
            " module that was exported"
        ) from None
    own = [vars(module) for module in model.modules()]
    inner = (value for each in own for value in each.values() if isinstance(value, (dict, list)))
    kept: list[tuple[Any, Any]] = [(values, copy(values)) for values in (*own, *inner)]
    problem, graph = "its forward stores tensors in the model", None
    try:
        graph = tracer.trace(model)
        if idle := _idle(graph, model):
            for module in idle:
                module.training = True
            graph = tracer.trace(model)
    except Exception as error:  # the forward of a model may raise any error for a proxy
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    finally:
        stored = any(isinstance(value, fx.Proxy) for value in tree_leaves(own))
        for values, before in kept if stored else ():
            values.clear()
            (values.extend if isinstance(values, list) else values.update)(before)
        restore(modes)
    return problem, None if stored else graph


def _idle(graph: fx.Graph, model: nn.Module) -> list[nn.Module]:
    """Return the modules that call a functional dropout with rate 0, which may depend on their mode."""
    return [
        model.get_submodule(next(reversed(node.meta.get("nn_module_stack", {"": None}))))
        for node in graph.nodes
        if node.target in _FUNCTIONS and not _draws(node, model)
    ]


def _attribute(model: nn.Module, name: str) -> Any:
    """Return the attribute of the model under a dotted name, or None."""
    owner: Any = model
    for attribute in name.split("."):
        owner = getattr(owner, attribute, None)
    return owner


def _draws(node: fx.Node, model: nn.Module) -> bool:
    """Return True if the node is a dropout."""
    if node.op == "call_module":
        return any(map(drops, model.get_submodule(str(node.target)).modules()))
    if node.op != "call_function" or node.target not in _FUNCTIONS:
        return False
    rate = _arguments(node.target, node.args, node.kwargs)[1]
    _require_rate(node.target, rate)
    return bool(rate != 0)


def _overwritten(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the node whose tensor this node writes into, or None."""
    target: Any = node.target
    if isinstance(node.kwargs.get("out"), fx.Node):
        return cast(fx.Node, node.kwargs["out"])
    if node.op == "call_module":
        inplace = getattr(model.get_submodule(target), "inplace", False)
    elif node.op in ("call_method", "call_function"):
        name = target if isinstance(target, str) else target.__name__
        inplace = (name.endswith("_") and not name.endswith("__")) or _inplace(node)
    else:
        inplace = False
    return node.all_input_nodes[0] if inplace and node.all_input_nodes else None


def _inplace(node: fx.Node) -> bool:
    """Return True for an operator such as ``+=``, and for a function that is called with ``inplace=True``."""
    target: Any = node.target
    if target in _ASSIGNMENTS:
        return True
    try:
        return inspect.signature(target).bind(*node.args, **node.kwargs).arguments.get("inplace") is True
    except (TypeError, ValueError):  # a method, or a function of C++ without signature
        return False


def _aliases(node: fx.Node, model: nn.Module) -> set[fx.Node]:
    """Return the nodes that may share the memory of a node: itself, those that it views, and its views."""
    found, queue = {node}, [node]
    while queue:
        near = queue.pop()
        neighbors = [other for other in near.users if _is_view(other, model)]
        neighbors += near.all_input_nodes[:1] if _is_view(near, model) else []
        queue += [other for other in neighbors if other not in found]
        found.update(neighbors)
    return found


def _is_view(node: fx.Node, model: nn.Module) -> bool:
    target: Any = node.target
    if node.op == "call_module":
        return isinstance(model.get_submodule(target), (nn.Identity, nn.Flatten, nn.Unflatten))
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in _VIEWS


def _chain(nodes: list[fx.Node], boundary: list[fx.Node], output: fx.Node, model: nn.Module) -> Chain | None:
    """Return the nodes as a chain for mc_dropout_mlp, or None."""
    linears: list[nn.Linear] = []
    dropouts: list[nn.Dropout | float] = []
    activations: set[str] = set()
    pending: nn.Dropout | float = 0.0
    activated, previous = True, boundary[0]
    for node in nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        kind = node.target if module is None else type(module)
        functional = kind is F.dropout
        if node.args != (previous,) or not (
            functional or all(value in (False, "none") for value in node.kwargs.values())
        ):
            return None
        previous = node
        if module is not None and altered(module):
            return None
        if isinstance(module, nn.Identity):
            continue
        if (functional or type(module) is nn.Dropout) and pending == 0 and (activated or node is nodes[-1]):
            pending = cast(float, node.kwargs["p"]) if functional else cast(nn.Dropout, module)
        elif type(module) is nn.Linear and activated:
            linears.append(module)
            dropouts.append(pending)
            pending, activated = 0.0, False
        elif (
            kind in _ACTIVATIONS
            and not activated
            and pending == 0
            and getattr(module, "approximate", "none") == "none"
        ):
            activations.add(_ACTIVATIONS[kind])
            activated = True
        else:
            return None
    if len(boundary) > 1 or not linears or activated or len(activations) > 1 or output.args != (previous,):
        return None
    return Chain(linears, [*dropouts, pending], *(activations or {"gelu"}))
