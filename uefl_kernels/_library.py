"""How an op is made: one schema, one reference, one fake; compiled kernels attach by dispatch key.

Every backend has a dispatcher namespace of its own, and an op has the same name and schema in each of them:

=================  =============================================================================================
``uefl``           the default: the compiled CPU kernel on CPU tensors, CUDA C++ or Triton on CUDA tensors, and the
                   reference wherever neither exists (no compiler, another device, another architecture)
``uefl_reference`` plain PyTorch, the definition of correct
``uefl_triton``    the Triton kernel (on CPU tensors under ``TRITON_INTERPRET=1``)
``uefl_cuda``      the CUDA C++ kernel
=================  =============================================================================================

So a forced backend costs one dictionary look-up in Python and nothing in the kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BACKENDS = ("auto", "reference", "triton", "cuda", "cpu")
_NAMESPACE = {"auto": "uefl", "cpu": "uefl", "reference": "uefl_reference", "triton": "uefl_triton", "cuda": "uefl_cuda"}
_libraries = {name: torch.library.Library(name, "DEF") for name in sorted(set(_NAMESPACE.values()))}
_overloads: dict[tuple[str, str], Any] = {}
_fakes: dict[str, Callable[..., Any]] = {}
_load_error: str | None = None


def define(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Declare an op in every namespace and register its reference as what runs where nothing faster does."""
    name = schema.split("(", 1)[0]
    _fakes[name] = fake
    for namespace, library in _libraries.items():
        library.define(schema)
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        _overloads[namespace, name] = getattr(getattr(torch.ops, namespace), name).default
    for namespace in ("uefl", "uefl_reference"):
        _libraries[namespace].impl(name, reference, "CompositeExplicitAutograd")


def define_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Attach one backward to the op in every namespace."""
    for namespace, library in _libraries.items():
        torch.library.register_autograd(f"{namespace}::{name}", backward, setup_context=setup_context, lib=library)


def define_triton(name: str, module: str) -> None:
    """Attach ``module.<name>`` as the Triton backend; the module is imported at the first call, Triton may be absent."""

    def launch(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    for key in ("CPU", "CUDA"):
        _libraries["uefl_triton"].impl(name, launch, key)

    def choose(*args: Any) -> Any:
        x = args[0]
        if has_kernel("uefl_cuda", name, "CUDA") and cuda_architecture_built(x.device):
            return _overloads["uefl_cuda", name](*args)
        if triton_available():
            return _overloads["uefl_triton", name](*args)
        return _overloads["uefl_reference", name](*args)

    _libraries["uefl"].impl(name, choose, "CUDA")


def define_composed(name: str, around: Callable[..., Any], search: str = "vq_assign") -> None:
    """On a GPU and in Triton, run ``around(assign, ...)``: plain PyTorch around that backend's own search kernel."""

    def compose(namespace: str) -> Callable[..., Any]:
        return lambda *args: around(_overloads[namespace, search], *args)

    _libraries["uefl"].impl(name, compose("uefl"), "CUDA")
    _libraries["uefl_cuda"].impl(name, compose("uefl_cuda"), "CUDA")
    for key in ("CPU", "CUDA"):
        _libraries["uefl_triton"].impl(name, compose("uefl_triton"), key)


def load() -> bool:
    """Attach ``csrc/``; False when the package was installed without it, or when it does not load here (see doctor)."""
    global _load_error
    path = Path(__file__).with_name("_C.abi3.so")
    if not path.exists():
        _load_error = "not built (installed with UEFL_BUILD=off, or from a source tree without `make setup`)"
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:  # another torch than the one promised, a stripped system: fall back, and say so in doctor
        _load_error = str(error).splitlines()[0]
        return False
    return True


def load_error() -> str | None:
    """Why the compiled library is absent, or None when it is loaded."""
    return _load_error


def has_kernel(namespace: str, name: str, key: str) -> bool:
    """True when the dispatcher holds a kernel of its own (not the reference) for this op and key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key)


def triton_available() -> bool:
    """True when Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def cuda_architecture_built(device: torch.device) -> bool:
    """True when csrc/cuda holds code that runs on this device: sm_80 and newer, by cubin or by PTX."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


_forced = os.environ.get("UEFL_BACKEND", "auto")
if _forced not in BACKENDS:
    raise ValueError(f"UEFL_BACKEND={_forced!r} is not a backend; use one of {', '.join(BACKENDS)}")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the ops inside the block on one backend.

    Args:
        name: ``"auto"``, ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``; ``UEFL_BACKEND`` sets it for a process.

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


def resolve(name: str, x: torch.Tensor) -> Any:
    """The op overload that the active backend asks for; an absent one is an error, never a silent fallback."""
    if _forced not in ("auto", "reference"):
        reason = _absent(_forced, name, x)
        if reason:
            raise RuntimeError(f"backend {_forced!r} cannot run {name} here: {reason}; see `uefl doctor`, or use backend 'auto'")
    return _overloads[_NAMESPACE[_forced], name]


def _absent(forced: str, name: str, x: torch.Tensor) -> str | None:
    on_cpu = x.device.type == "cpu"
    if forced == "cpu":
        if not on_cpu:
            return f"the input is on {x.device}, expected cpu"
        return None if has_kernel("uefl", name, "CPU") else f"the compiled CPU kernels are absent ({_load_error})"
    if forced == "cuda":
        if x.device.type != "cuda":
            return f"the input is on {x.device}, expected cuda"
        return None if has_kernel("uefl_cuda", name, "CUDA") else "the CUDA kernels are absent (built without nvcc)"
    if not triton_available():
        return "Triton is not installed"
    if not has_kernel("uefl_triton", name, "CUDA"):
        return "this op has no Triton kernel"
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        return "the input is on cpu, which Triton only runs under TRITON_INTERPRET=1"
    return None
