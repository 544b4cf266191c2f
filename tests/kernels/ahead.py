"""Compile Triton kernels ahead of time, in a new process: the process of the tests interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def report(script: str, folder: Path) -> Any:
    """Run a script and return its output, as JSON.

    The script's first argument is a folder of its own.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [sys.executable, "-c", script, folder], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def build(
    kernel: Any,
    architecture: int,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    other: str = "i64",
    aligned: tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    """Compile the kernel for sm_``architecture``, called from the script.

    It takes the constants and types of its own arguments; an argument without either is of type ``other``.
    With ``aligned``, pointers and the arguments named are divisible by 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, other) for name in names}
    attributes = {}
    if aligned is not None:
        attributes = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name][0] == "*" or name in aligned
        }
    source = ASTSource(
        kernel, signature, {name: value for name, value in constants.items() if name in names}, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
