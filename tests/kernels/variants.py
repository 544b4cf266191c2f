"""Tests once more on every variant of the CPU kernels: UEFL_CPU is read once per process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

VARIANTS = ("amx", "avx512vnni", "avx512", "avx2", "portable")
_processes = ThreadPoolExecutor(os.cpu_count())  # one at a time on each core


@functools.cache
def _runs_here(variant: str) -> bool:
    code = "from uefl_kernels import _host; _host.variant()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"UEFL_CPU": variant}, capture_output=True, text=True)
    assert done.returncode == 0 or "needs instructions that this CPU lacks" in done.stderr, done.stderr
    return done.returncode == 0


@functools.cache
def _begin(
    session: pytest.Session, path: str, selected: str, variants: tuple[str, ...]
) -> dict[str, Future[subprocess.CompletedProcess[str]]]:
    """The tests of all variants that are asked for, so that the later ones run while the first is waited for."""
    session.config.add_cleanup(functools.partial(_processes.shutdown, cancel_futures=True))
    command = [sys.executable, "-m", "pytest", "-x", path, "-k", selected]
    begun = {}
    for variant in filter(_runs_here, variants):
        environment = os.environ | {"UEFL_CPU": variant, "UEFL_CPU_EVERY_SHAPE": "1", "OMP_WAIT_POLICY": "passive"}
        begun[variant] = _processes.submit(subprocess.run, command, env=environment, capture_output=True, text=True)
    return begun


def run(request: pytest.FixtureRequest, selected: str, variant: str) -> None:
    """The tests ``selected`` (as by pytest -k) of the file of a test, in a process forced to a variant; skips where the CPU lacks it."""
    if not _runs_here(variant):
        pytest.skip(f"this CPU cannot run {variant}")
    asked = tuple(item.callspec.params["variant"] for item in request.session.items if getattr(item, "function", None) is request.function)
    done = _begin(request.session, str(request.path), selected, asked)[variant].result()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
