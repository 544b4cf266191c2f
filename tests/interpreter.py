"""Speed up Triton's interpreter: tests of kernels take two thirds of the time.

Triton 3.6 replaces every builtin of ``triton.language`` with one that runs on NumPy. It repeats this, with a
list of all members of the module, at each call of one jitted function by another. Once per launch is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def patch_once_a_launch() -> None:
    """Patch the interpreter before the first launch, unless its version is another one."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch, scope_type = (
        getattr(interpreter, "_patch_lang", None),
        getattr(interpreter, "_LangPatchScope", None),
    )
    if patch is None or scope_type is None or not hasattr(scope_type(), "_changes"):
        return
    patched: set[frozenset[int]] = set()

    @cache
    def modules(function: Callable[..., Any]) -> frozenset[int]:
        return frozenset(
            id(value) for value in function.__globals__.values() if value is tl or value is tl.core
        )

    class LaunchScope(scope_type):  # the arguments of the outermost call; device functions drop theirs
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: Callable[..., Any]) -> Any:
        scope = LaunchScope()
        if modules(function) not in patched:
            patched.add(modules(function))
            scope._changes = patch(function)._changes
        return scope

    interpreter._patch_lang = patch_once
