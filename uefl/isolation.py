"""Set the state of the process and thread for a run, and restore it afterwards.

The state is the same for every caller.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.deterministic
from PIL import ImageFile
from torch import backends, utils
from torch._guards import detect_fake_mode

from .devices import is_gpu
from .errors import UserError
from .seeds import deterministic

Function = TypeVar("Function", bound=Callable[..., Any])

# runs draw from the global generator of torch: two runs at once would draw from one sequence
_ONE_RUN = threading.RLock()
_DENORMAL = 5e-324
_CPU = torch.device("cpu")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute in this thread as a new process does, and restore the caller's contexts.

    Raises:
        UserError: the caller's context replaces tensors, which a run cannot leave.
    """
    _check_context()
    with ExitStack() as stack:
        for context in (
            torch.inference_mode(False),
            torch.enable_grad(),
            _no_autocast(),
            _no_saved_tensors_hooks(),
            # in this context every call of torch takes longer, and most callers are on the CPU anyway
            nullcontext() if torch.get_default_device() == _CPU else _CPU,
            torch.autograd.set_detect_anomaly(False),
            np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
        ):
            stack.enter_context(context)
        yield


def _check_context() -> None:
    if detect_fake_mode() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        raise UserError(
            "uefl cannot compute within torch.func, such as grad and vmap, or FakeTensorMode; call it outside"
        )


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave all autocast contexts of the caller.

    ``torch.autocast(enabled=False)`` would only add a context. Torch keeps the copies of parameters in
    bfloat16 until the outermost context ends, so that all steps of a run would compute with the parameters of
    its first step.
    """
    devices = ("cpu", "cuda")
    enabled = [torch.is_autocast_enabled(device) for device in devices]
    caches = torch.is_autocast_cache_enabled()
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    try:
        for device in devices:
            torch.set_autocast_enabled(device, False)
        torch.set_autocast_cache_enabled(True)
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        for device, was in zip(devices, enabled, strict=True):
            torch.set_autocast_enabled(device, was)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def _no_saved_tensors_hooks() -> Iterator[None]:
    """Leave all contexts of ``saved_tensors_hooks``, which may change what autograd keeps for a gradient."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)


@contextmanager
def isolated() -> Iterator[None]:
    """Give a run exclusive use of the state of the process.

    The results of the run do not depend on the caller's settings, and the settings do not change.

    Runs of several threads take turns. Inside, torch has the contexts of :func:`plain_torch`. Its global
    settings (default dtype, deterministic algorithms, cuDNN, oneDNN, precision of float32, denormal numbers,
    hooks of all modules) are as in a new process. A warning that the caller's filters make an error is shown
    instead. Afterwards these settings, the number of threads, the states of the global random generators of
    torch, NumPy and Python, the warning filters and the environment are as before.
    """
    _check_context()
    lock = _ONE_RUN
    if not lock.acquire(blocking=False):
        logging.getLogger("uefl").info("another thread of this process trains; this run begins after it")
        lock.acquire()
    try:
        with _restored(), warnings.catch_warnings(), plain_torch():
            shown = [("default", *entry[1:]) if entry[0] == "error" else entry for entry in warnings.filters]
            warnings.filters[:] = shown  # type: ignore[index]
            yield
    finally:
        lock.release()


def _free_in_child() -> None:
    """Replace the lock after a fork: the child does not have the thread that would release it."""
    global _ONE_RUN
    _ONE_RUN = threading.RLock()


os.register_at_fork(after_in_child=_free_in_child)


@contextmanager
def for_prediction(device: torch.device, *, draws: bool = False) -> Iterator[None]:
    """Compute a prediction as a run does.

    The context is :func:`plain_torch`, so that threads can predict at once. If the prediction draws random
    numbers, if a GPU computes it, if the process computes products of float32 with less precision, or if it
    has hooks of all modules, the context is :func:`isolated`.
    """
    hooked = any(getattr(_module, name) for name in _HOOKS)
    alone = draws or hooked or is_gpu(device) or _matmul_precision() != "highest"
    with isolated() if alone else plain_torch():
        deterministic(device)
        yield


def isolate(function: Function) -> Function:
    """Run a whole function as within :func:`isolated`."""

    @wraps(function)
    def alone(*args: Any, **keys: Any) -> Any:
        with isolated():
            return function(*args, **keys)

    return alone  # type: ignore[return-value]


@contextmanager
def _restored() -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _ATTRIBUTES]
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    matmul, always = _matmul_precision(), torch.is_warn_always_enabled()
    environment, python, legacy = dict(os.environ), random.getstate(), np.random.get_state()  # noqa: NPY002
    flushes = _DENORMAL * 1.0 == 0
    with _generators():
        try:
            torch.set_default_dtype(torch.float32)
            torch.set_deterministic_debug_mode(0)
            torch.set_warn_always(False)
            torch.set_flush_denormal(False)
            if matmul is not None:
                torch.set_float32_matmul_precision("highest")
            for owner, name, value in _ATTRIBUTES:
                setattr(owner, name, copy(value))
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            torch.set_flush_denormal(flushes)
            torch.set_warn_always(always)
            torch.set_deterministic_debug_mode(mode)
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            _restore_environment(environment)


@contextmanager
def _generators() -> Iterator[None]:
    """Restore torch's generators.

    A GPU that the caller has not used has no state yet. Its generator gets the seed of the generator on the
    CPU, as with ``torch.manual_seed``.
    """
    in_use = torch.cuda.is_initialized()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if in_use else []):
            yield
    finally:
        if torch.cuda.is_initialized() and not in_use:
            torch.cuda.manual_seed_all(torch.initial_seed())


_cudnn: Any = backends.cudnn  # its parts have no type annotations
_mkldnn: Any = backends.mkldnn
_module: Any = torch.nn.modules.module
_HOOKS = [name for name in vars(_module) if name.startswith("_global_") and "hooks" in name]
_ATTRIBUTES: list[tuple[Any, str, Any]] = [
    (_cudnn, "enabled", True),
    (_cudnn, "benchmark", False),
    (_cudnn, "deterministic", False),
    (utils.deterministic, "fill_uninitialized_memory", True),
    (_mkldnn, "enabled", True),
    (_mkldnn, "deterministic", False),
    (backends, "fp32_precision", "none"),
    (backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    (backends.cuda.matmul, "fp32_precision", "none"),
    (_cudnn, "fp32_precision", "none"),
    (_cudnn.conv, "fp32_precision", "tf32"),
    (_cudnn.rnn, "fp32_precision", "tf32"),
    (_mkldnn, "fp32_precision", "none"),
    (_mkldnn.matmul, "fp32_precision", "none"),
    (_mkldnn.conv, "fp32_precision", "none"),
    (_mkldnn.rnn, "fp32_precision", "none"),
    (ImageFile, "LOAD_TRUNCATED_IMAGES", False),
    *((_module, name, OrderedDict()) for name in _HOOKS),
    (_module, "_global_is_full_backward_hook", None),
]
"""Settings of torch and Pillow, and their values in a new process."""


def _matmul_precision() -> str | None:
    """Return torch's float32 matmul precision, or None if the caller has set it by the newer options."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _restore_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
