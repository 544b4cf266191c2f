"""Measure a case: check each provider and its memory once, then time all providers in turns.

In a turn, each provider is timed once. So other work on the machine slows all providers equally. The report
has the median over the turns and the spread. A process can choose the variant of our CPU kernels only once,
so other variants run in separate processes, also once in each turn.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import threadpoolctl
import torch

from uefl_kernels import COMPILED

from .cases import BenchmarkCase, ProviderUnavailable, ours
from .ops import REGISTRY

VARIANTS = ("amx", "avx512vnni", "avx512", "avx2", "portable")  # what UEFL_CPU may name
TURNS = 9
_SETTLE = 0.01  # seconds for the idle threads of the last provider to stop spinning


def use_threads(threads: int) -> None:
    """Give ``threads`` threads to torch and to every OpenMP and BLAS library, also if it is loaded later."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(threads)


def threads_differ(threads: int) -> list[str]:
    """Return the libraries that would not run on ``threads`` threads."""
    pools = [(Path(pool["filepath"]).name, pool["num_threads"]) for pool in threadpoolctl.threadpool_info()]
    return [
        f"{name} has {found}"
        for name, found in (*pools, ("torch", torch.get_num_threads()))
        if found != threads
    ]


class CaseRunner:
    """Run the providers of a case in this process, or in a separate process (``elsewhere``).

    The object holds the case that is being measured, and its providers.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def variant(self) -> str:
        """Return the CPU variant of our kernels, empty on a GPU.

        Raises:
            RuntimeError: this CPU cannot run the variant that UEFL_CPU names.
        """
        if self._device == "cuda":
            return ""
        if not COMPILED:
            return "reference"
        from uefl_kernels import _host

        return str(_host.variant())

    def open(self, op: str, case: BenchmarkCase) -> None:
        """Create the inputs and the true answer of a case, without providers."""
        self._op = REGISTRY[op]
        self._calls: dict[str, Callable[[], Any]] = {}
        self._inputs = self._op.inputs(case, self._device)
        self._error = self._op.gate.against(self._inputs)

    def enter(self, provider: str) -> dict[str, Any]:
        """Prepare a provider, check its first answer and its memory, and return the first columns of its row.

        Raises:
            ProviderUnavailable, ImportError: the provider cannot run this case here.
        """
        prepare = self._op.providers[provider]
        prepare(self._op.inputs(self._op.smoke, self._device))()  # load libraries before memory is measured
        call = self._calls[provider] = prepare(self._inputs)
        answer, peak = weigh(call, self._device)
        own = (self._op.gate.own or {}).get(provider)
        error = self._error if own is None else own(self._inputs)
        return {
            "error": None if answer is None else error(answer),
            "peak_mb": None if peak is None else peak / 1e6,
        }

    def time(self, provider: str, number: int) -> tuple[float, float]:
        """Return the wall time and the CPU time of ``number`` calls in a row, in seconds."""
        call = self._calls[provider]
        cpu, begun = time.process_time(), time.perf_counter()
        for _ in range(number):
            call()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun, time.process_time() - cpu


def weigh(call: Callable[[], Any], device: str) -> tuple[Any, int | None]:
    """Return the answer, and the peak of the memory minus the memory before the call, in bytes.

    The peak includes the answer. The second result is None if the system cannot measure the peak. On the CPU,
    the function measures the resident memory, because Linux resets its peak on demand. The allocator first
    returns its spare memory, because reused memory would not count. A page counts from its first access on.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        answer = call()
        torch.cuda.synchronize()
        return answer, torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    except (OSError, AttributeError):  # not Linux with glibc
        return call(), None
    answer = call()
    return answer, _resident("VmHWM") - before


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class _Process(BaseManager):
    """Run a ``CaseRunner`` in another process."""


_Process.register("CaseRunner", CaseRunner)


@contextmanager
def elsewhere(variant: str) -> Iterator[CaseRunner]:
    """Yield a runner in a separate process that uses the given CPU variant.

    Raises:
        RuntimeError: this CPU cannot run the variant.
    """
    process = _Process(ctx=get_context("spawn"))
    previous = os.environ.get("UEFL_CPU", "")  # an empty one means unset
    os.environ["UEFL_CPU"] = variant
    try:
        process.start()
    finally:
        os.environ["UEFL_CPU"] = previous
    with process:
        runner: CaseRunner = process.CaseRunner("cpu")  # type: ignore[attr-defined]
        runner.variant()
        yield runner


def measure(
    name: str,
    case: BenchmarkCase,
    providers: list[str],
    seconds: float,
    runners: list[CaseRunner],
    skipped: list[str],
) -> list[dict[str, Any]]:
    """Return a row of results for each provider, on the first runner, and for "uefl" on the others.

    About ``seconds`` are spent on timing each; 0 means one call. ``skipped`` gets the providers that
    were not measured, with the reason. A peer that fails, for example for lack of memory, does not end the
    run.
    """
    op, rows, entrants = REGISTRY[name], [], []
    for runner in runners:
        runner.open(name, case)
        for provider in providers if runner is runners[0] else [p for p in providers if p == "uefl"]:
            try:
                found = runner.enter(provider)
            except (ImportError, ProviderUnavailable) as why:
                skipped.append(f"{provider} ({why})")
                continue
            except Exception as why:
                if ours(provider):
                    raise
                skipped.append(
                    f"{provider} at {name} {case.name} ({type(why).__name__}: {str(why).splitlines()[0]})"
                )
                continue
            variant = runner.variant() if ours(provider) else ""
            rows.append(
                {
                    "op": name,
                    "shape": case.name,
                    "provider": provider,
                    "variant": variant,
                    "gate": op.gate.figure,
                }
                | found
            )
            entrants.append((runner, provider))
    for row, (walls, cpus) in zip(rows, race(entrants, seconds), strict=True):
        median = statistics.median(walls)
        quartiles = statistics.quantiles(walls, n=4) if len(walls) > 1 else None
        spread = None if quartiles is None else (quartiles[2] - quartiles[0]) / median
        row |= {"median_ms": median * 1e3, "spread": spread, "cores": sum(cpus) / sum(walls)}
        row |= {"gb_s": op.bytes(case) / median / 1e9, "gflop_s": op.flops(case) / median / 1e9}
    return rows


def race(entrants: list[tuple[CaseRunner, str]], seconds: float) -> list[tuple[list[float], list[float]]]:
    """Return the seconds per call, wall and CPU, of every provider and turn.

    If ``seconds`` is 0, there is one turn. Otherwise a provider takes part in three turns, and in further
    ones until its ``seconds`` are spent, but in at most ``TURNS``.
    """
    results: list[tuple[list[float], list[float]]] = [([], []) for _ in entrants]
    once = [runner.time(provider, 1)[0] for runner, provider in entrants]
    numbers = [max(1, round(seconds / TURNS / estimate)) for estimate in once]
    order, shuffle = list(range(len(entrants))), random.Random(0).shuffle
    for turn in range(TURNS if seconds else 1):
        shuffle(order)
        for i in order:
            (runner, provider), (walls, cpus) = entrants[i], results[i]
            if turn >= 3 and sum(walls) * numbers[i] >= seconds:
                continue
            time.sleep(_SETTLE)
            if numbers[i] > 1:
                # not counted: the first call after the others finds cold caches and sleeping threads
                runner.time(provider, 1)
            wall, cpu = runner.time(provider, numbers[i])
            walls.append(wall / numbers[i])
            cpus.append(cpu / numbers[i])
    return results
