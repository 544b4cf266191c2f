"""Define ops: one schema, one reference and one fake each.

Compiled kernels attach by dispatch key. Each backend has a dispatcher namespace, and an op has the same name
and schema in all of them:

=================  =====================================================================================
``uefl``           the default: the compiled CPU kernel on CPU tensors, CUDA C++ or Triton on CUDA tensors.
                   Without a kernel (no compiler, another architecture, XPU, ROCm without Triton) the
                   fallback runs: plain PyTorch with the same results as the reference
``uefl_reference`` plain PyTorch, the definition of correct
``uefl_triton``    the Triton kernel (on CPU tensors under ``TRITON_INTERPRET=1``)
``uefl_cuda``      the CUDA C++ kernel
``uefl_portable``  what ``uefl`` runs on CUDA tensors where C++ leaves it to Python: on a GPU that the library
                   has no machine code for, and ops composed of others
=================  =====================================================================================

C++ registers its kernels for CUDA under ``uefl`` too, so no Python function runs between a call, eager or
compiled, and such a kernel.

A forced backend costs one look-up in a dictionary. Reference and fallback need float64, so tensors on MPS are
refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import torch

from . import _vector_math

_vector_math.warm_up()  # every op imports this module

BACKENDS = ("auto", "reference", "triton", "cuda", "cpu")
_NAMESPACE = {
    "auto": "uefl",
    "cpu": "uefl",
    "reference": "uefl_reference",
    "triton": "uefl_triton",
    "cuda": "uefl_cuda",
}
_PORTABLE = "uefl_portable"
_libraries = {name: torch.library.Library(name, "DEF") for name in sorted({*_NAMESPACE.values(), _PORTABLE})}
_overloads: dict[tuple[str, str], Any] = {}
_functions: dict[tuple[str, str], type[torch.autograd.Function]] = {}
_packages: dict[str, str] = {}
_arguments: dict[str, tuple[type[Any], ...]] = {}
_fakes: dict[str, Callable[..., Any]] = {}
_fallbacks: dict[str, Callable[..., Any]] = {}
# (namespace, op, dispatch key) -> the op inside of a composed one
_composed: dict[tuple[str, str, str], str] = {}
plain: dict[str, Callable[..., Any]] = {}
"""Ops in plain PyTorch, which run while ``torch.onnx.export`` traces a model: ONNX has no custom ops."""
_load_error: str | None = None
_cuda_architectures: tuple[str, ...] = ()


SymInts = Annotated[Sequence[int], "SymInt[]"]
"""Sizes of tensors, which ``torch.compile`` may leave open."""
_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    int: "int",
    float: "float",
    Sequence[int]: "int[]",
    Sequence[float]: "float[]",
    Sequence[torch.Tensor]: "Tensor[]",
}
ArgumentsClass = type[tuple[Any, ...]]


def schema(name: str, arguments: Sequence[ArgumentsClass], results: Sequence[str]) -> str:
    """Write the schema of an op.

    Args:
        name: the name of the op.
        arguments: named tuples, which hold the arguments one after the other.
        results: names of the tensors that the op returns.
    """
    hints = [hint for group in arguments for hint in get_type_hints(group, include_extras=True).items()]
    taken = ", ".join(f"{_type_of(kind)} {argument}" for argument, kind in hints)
    returned = ", ".join(f"Tensor {result}" for result in results)
    return f"{name}({taken}) -> " + (f"({returned})" if len(results) > 1 else returned)


def _type_of(kind: Any) -> str:
    """Return the type of an argument in the language of schemas."""
    return str(kind.__metadata__[0]) if get_origin(kind) is Annotated else _TYPES[kind]


def _grouped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which takes named tuples, as a function of the arguments of an op."""
    only, *others = _arguments[name]
    if not others:
        return lambda *args: function(only(*args))
    ends = list(accumulate(len(group._fields) for group in _arguments[name]))  # type: ignore[attr-defined]

    def grouped(*args: Any) -> Any:
        return function(
            *(
                group(*args[end - len(group._fields) : end])
                for group, end in zip(_arguments[name], ends, strict=True)
            )
        )

    return grouped


def _in_module(module: str, function: str) -> Callable[..., Any]:
    """Return a function of a module that is imported at the first call."""
    return lambda *args: getattr(importlib.import_module(module), function)(*args)


def define(
    package: str,
    name: str,
    arguments: ArgumentsClass | tuple[ArgumentsClass, ...],
    results: Sequence[str],
    *,
    fake: Callable[..., Any],
    fallback: Callable[..., Any] | None = None,
) -> None:
    """Declare an op in every namespace.

    The function ``name`` in ``reference.py`` of the package defines it.

    Args:
        package: the package of the op.
        name: the name of the op.
        arguments: a named tuple with the arguments of the op, or several, which follow one another. All
            implementations in Python take these tuples.
        results: names of the tensors that the op returns.
        fake: returns empty tensors with the shapes and dtypes of the results.
        fallback: runs where no kernel does; the default is the reference.
    """
    _packages[name] = package
    _arguments[name] = arguments if isinstance(arguments, tuple) else (arguments,)
    reference = _in_module(f"{package}.reference", name)
    _fakes[name] = _grouped(name, fake)
    _fallbacks[name] = _grouped(name, fallback or reference)
    declared = schema(name, _arguments[name], results)
    for namespace, library in _libraries.items():
        library.define(declared)
        torch.library.register_fake(f"{namespace}::{name}", _fakes[name], lib=library)
        _overloads[namespace, name] = getattr(getattr(torch.ops, namespace), name).default
    implementations = {"uefl": _fallbacks[name], "uefl_reference": _grouped(name, reference)}
    for namespace, implementation in implementations.items():
        _libraries[namespace].impl(name, implementation, "CompositeExplicitAutograd")


def define_autograd(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., Any], gradient: str | None = None
) -> None:
    """Attach one backward to the op in every namespace.

    ``gradient`` names an op of that namespace, which the backward takes first.
    """
    for namespace, library in _libraries.items():
        attached = functools.partial(backward, _overloads[namespace, gradient]) if gradient else backward
        torch.library.register_autograd(
            f"{namespace}::{name}", attached, setup_context=setup_context, lib=library
        )
        if Sequence[torch.Tensor] not in (
            kind for group in _arguments[name] for kind in get_type_hints(group).values()
        ):
            _functions[namespace, name] = _function(_overloads[namespace, name], attached, setup_context)


def _function(
    op: Any, backward: Callable[..., Any], setup_context: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Return the autograd of an op as a function that is applied before the op.

    It computes the same gradients as the registered autograd. The dispatcher calls the registered one
    from C++, which takes twice as many calls in Python.
    """

    class OpFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = op(*arguments)
            setup_context(ctx, arguments, results)
            return results

    OpFunction.backward = staticmethod(backward)  # type: ignore[assignment]
    return OpFunction


def define_vmap(name: str, rule: Callable[..., Any] | None = None) -> None:
    """Attach ``rule(op, info, in_dims, *arguments)`` of ``torch.func.vmap`` to an op.

    The default rule calls the op once for each element of a batch. Without a rule, torch does the same and
    warns of a slow call, or refuses an op that takes a list of tensors.
    """
    for namespace, library in _libraries.items():
        attached = functools.partial(rule or one_by_one, _overloads[namespace, name])
        torch.library.register_vmap(f"{namespace}::{name}", attached, lib=library)


def one_by_one(
    op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Call an op for each element of a batch, and stack its results."""

    def taken(value: Any, dim: Any, i: int) -> Any:
        if isinstance(dim, (list, tuple)):
            return [taken(entry, axis, i) for entry, axis in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, i)

    found = [
        op(*(taken(value, dim, i) for value, dim in zip(arguments, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    results = tuple(torch.stack(outputs) for outputs in zip(*found, strict=True))
    return results, (0,) * len(results)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, gradient: torch.Tensor, *made_of: torch.Tensor | None) -> torch.Tensor:
        ctx.op = op
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.op}: has no second derivative; compute the first derivative without create_graph=True, or"
            " compose the op from plain PyTorch"
        )


def once_differentiable(op: str, gradient: torch.Tensor, *made_of: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient that raises RuntimeError when it is differentiated again."""
    if not torch.is_grad_enabled():  # without create_graph=True
        return gradient
    once: torch.Tensor = _OnceDifferentiable.apply(op, gradient.detach(), *made_of)
    return once


def define_triton(name: str) -> None:
    """Attach the function ``name`` in ``triton.py`` of the op's package as the Triton backend.

    The module is imported at the first call, so Triton may be absent.
    """
    launch = _grouped(name, _in_module(f"{_packages[name]}.triton", name))
    for key in ("CPU", "CUDA"):
        _libraries["uefl_triton"].impl(name, launch, key)

    def choose(*args: Any) -> Any:
        if triton_available():
            return _overloads["uefl_triton", name](*args)
        return _fallbacks[name](*args)

    _libraries[_behind_cuda(name)].impl(name, choose, "CUDA")


def _behind_cuda(name: str) -> str:
    """Return the namespace of a Python kernel for CUDA tensors: ``uefl``, unless C++ has a kernel there."""
    return _PORTABLE if has_kernel("uefl", name, "CUDA") else "uefl"


def define_composed(name: str, around: Callable[..., Any], kernel: str) -> None:
    """Run ``around(kernel, arguments)`` on GPUs and in Triton, with a kernel of the same backend.

    If C++ has a kernel of the op, only the calls that this kernel leaves to Python run it.
    """
    places = [(_behind_cuda(name), "CUDA"), ("uefl_triton", "CPU"), ("uefl_triton", "CUDA")]
    if not has_kernel("uefl_cuda", name, "CUDA"):
        places.append(("uefl_cuda", "CUDA"))
    for namespace, key in places:
        of_backend = "uefl" if namespace == _PORTABLE else namespace
        composed = functools.partial(around, _overloads[of_backend, kernel])
        _libraries[namespace].impl(name, _grouped(name, composed), key)
        _composed[namespace, name, key] = kernel


def define_portable(name: str) -> None:
    """Run the fallback of a private op where C++ leaves it to Python, and where Triton is forced.

    Layers call such an op together with ops that have a Triton kernel.
    """
    for namespace, key in ((_PORTABLE, "CUDA"), ("uefl_triton", "CPU"), ("uefl_triton", "CUDA")):
        _libraries[namespace].impl(name, _fallbacks[name], key)


def load() -> bool:
    """Load the compiled kernels.

    Return False if they are not installed or do not load; ``load_error`` gives the reason.
    """
    global _load_error, _cuda_architectures
    path = Path(__file__).with_name("_C.abi3.so")
    if not path.exists():
        _load_error = "not built (installed with UEFL_BUILD=off, or from a source tree without `make setup`)"
        note = path.with_name("_not_compiled.txt")  # setup.py wrote it, as pip hides warnings
        if note.exists():
            _load_error = note.read_text(encoding="utf-8").strip()
            warnings.warn(
                f"uefl_kernels runs without its compiled kernels, more slowly: {_load_error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:  # another torch, or a stripped system
        _load_error = str(error).splitlines()[0]
        return False
    architectures = ctypes.CDLL(str(path)).uefl_cuda_architectures
    architectures.restype = ctypes.c_char_p
    _cuda_architectures = tuple(filter(None, architectures().decode().split(",")))
    return True


def load_error() -> str | None:
    """Return why the compiled library is absent, or None."""
    return _load_error


def has_kernel(namespace: str, name: str, key: str) -> bool:
    """Return True if the dispatcher has a kernel for this op and key.

    For a composed op, it may also be the kernel of the op inside.
    """
    while (namespace, name, key) in _composed:
        name = _composed[namespace, name, key]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key)


def ops() -> list[str]:
    """Return the names of all ops."""
    importlib.import_module("._api", __package__)  # where the ops are defined
    return sorted(_fakes)


def triton_available() -> bool:
    """Return True if Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def cuda_architecture_built(device: torch.device) -> bool:
    """Return True if csrc/cuda was compiled for this device, as machine code or PTX."""
    return _runs_on(_cuda_architectures, torch.cuda.get_device_capability(device))


@functools.cache
def _native(name: str, device: torch.device) -> bool:
    """Return True if csrc/cuda has the op and was compiled for this device."""
    return (
        has_kernel("uefl_cuda", name, "CUDA")
        and torch.cuda.is_available()
        and cuda_architecture_built(device)
    )


@functools.cache
def _runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Return True if one of the architectures runs on a device.

    Machine code and ``f`` run on later minor versions, PTX on all later versions, ``a`` on one version only.
    """
    for architecture in architectures:
        found = re.fullmatch(r"(\d+)(\d)([af]?)(-real|-virtual)?", architecture)
        if found is None:
            continue
        built, special, kind = (int(found[1]), int(found[2])), found[3], found[4]
        if special == "a":
            fits = capability == built
        elif special == "f" or kind == "-real":
            fits = capability[0] == built[0] and capability >= built
        else:
            fits = capability >= built
        if fits:
            return True
    return False


_forced = os.environ.get("UEFL_BACKEND") or "auto"
if _forced not in BACKENDS:
    raise ValueError(f"UEFL_BACKEND={_forced!r} is not a backend; use one of {', '.join(BACKENDS)}")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the ops inside the block on one backend.

    Args:
        name: ``"auto"``, ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``; ``UEFL_BACKEND`` sets it for
            a process.

    Raises:
        ValueError: ``name`` is not a backend.
        RuntimeError: (by the op) the backend is not available for the tensors given.

    Equivalent to: nothing in PyTorch; the results are the same, only the kernel differs.
    """
    global _forced
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is not known; use one of {', '.join(BACKENDS)}")
    previous, _forced = _forced, name
    try:
        yield
    finally:
        _forced = previous


def forced() -> str:
    """Return the forced backend, or "auto"."""
    return _forced


def exporting_to_onnx() -> bool:
    """Return True while ``torch.onnx.export(..., dynamo=True)`` traces a model."""
    return torch.compiler.is_exporting() and _in_onnx_export()


def _in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


# torch.compile takes is_in_onnx_export for False. The decorator assume_constant_result sets this attribute,
# too, but imports torch._dynamo.
_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def not_in_onnx(name: str) -> NotImplementedError:
    """Return the error for an op or a layer that ONNX cannot express."""
    return NotImplementedError(
        f"{name}: torch.onnx.export is not supported, because ONNX has no such op; use torch.export.export"
    )


def resolve(name: str, x: torch.Tensor) -> Any:
    """Return the overload of an op for the active backend.

    A CUDA tensor gets the overload of the CUDA C++ kernel, so that no Python runs between call and kernel. A
    graph under compilation keeps the overload of ``uefl``, so that other machines can run it. For
    ``torch.onnx.export(..., dynamo=True)`` it is the op in plain PyTorch.

    Raises RuntimeError if a forced backend is absent, and NotImplementedError under the ONNX exporter that
    traces (``dynamo=False``), and under the other one for an op that has no form in plain PyTorch.
    """
    namespace = _active(name, x, torch.compiler.is_compiling())
    if exporting_to_onnx():
        if name not in plain:
            raise not_in_onnx(name)
        return plain[name]
    return _overloads[namespace, name]


def _active(name: str, x: torch.Tensor, compiling: bool) -> str:
    """Return the namespace of the active backend."""
    if _forced == "auto" and x.is_cuda and not compiling and _native(name, x.device):
        return "uefl_cuda"
    if not compiling and torch._C._is_tracing() and torch.onnx.is_in_onnx_export():  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{name}: torch.onnx.export(..., dynamo=False) is not supported; use dynamo=True, or"
            " torch.export.export"
        )
    if _forced not in ("auto", "reference"):
        reason = _absent(_forced, name, x.device)
        if reason:
            raise RuntimeError(
                f"backend {_forced!r} cannot run {name} here: {reason}; see `uefl doctor`, or use backend"
                " 'auto'"
            )
    return _NAMESPACE[_forced]


def call(name: str, x: torch.Tensor, arguments: Sequence[Any], differentiable: bool) -> Any:
    """Call an op.

    The autograd of an op is a Python function, even where nothing needs a gradient: such calls go below it,
    straight to the kernel. Other calls apply it here, where the dispatcher need not call Python. A graph
    under compilation, a trace, and a transform of ``torch.func`` keep the whole op.
    """
    if torch.compiler.is_compiling():
        return resolve(name, x)(*arguments)
    key = _active(name, x, False), name
    if not differentiable:
        with torch._C._AutoDispatchBelowAutograd():
            return _overloads[key](*arguments)
    function = _functions.get(key)
    if function is None or torch._C._is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _overloads[key](*arguments)
    # Function.apply() without its steps for torch.func: a third of the calls
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def check(name: str, device: torch.device | str) -> None:
    """Raise the error of the machine that the first call of an op on this device would raise.

    Raises:
        RuntimeError: the forced backend, or the instruction set that ``UEFL_CPU`` names, cannot run there;
            one line.
    """
    importlib.import_module("._api", __package__)  # where the ops are defined
    on_nothing = torch.empty(0, 1, device=device)
    resolve(name, on_nothing)
    if on_nothing.device.type == "cpu" and _forced in ("auto", "cpu"):
        # this reads UEFL_CPU
        _overloads["uefl", "vq_assign"](on_nothing, torch.zeros(1, 1), "l2", True)


def _absent(forced: str, name: str, device: torch.device) -> str | None:
    on_cpu = device.type == "cpu"
    if forced == "cpu":
        if not on_cpu:
            return f"the input is on {device}, expected cpu"
        return (
            None
            if has_kernel("uefl", name, "CPU")
            else f"the compiled CPU kernels are absent ({_load_error})"
        )
    if forced == "cuda":
        if device.type != "cuda":
            return f"the input is on {device}, expected cuda"
        if not has_kernel("uefl_cuda", name, "CUDA"):
            return "the CUDA kernels are absent (built without nvcc)"
        if not cuda_architecture_built(device):
            return (
                f"the CUDA kernels are built for {', '.join(_cuda_architectures)}, and {device} runs none of"
                " these"
            )
        return None
    if not triton_available():
        return "Triton is not installed"
    if not has_kernel("uefl_triton", name, "CUDA"):
        return "this op has no Triton kernel"
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        return "the input is on cpu, which Triton only runs under TRITON_INTERPRET=1"
    return None


COMPILED: bool = load()
"""True when the compiled kernels are loaded; without them every op runs on its fallback, more slowly."""
