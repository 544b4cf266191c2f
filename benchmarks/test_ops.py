"""Run the registry under pytest-benchmark.

Usage: ``pytest benchmarks --benchmark-only -k "vq_assign and 9216x512x64"``.

Use it for the statistics and comparisons of pytest-benchmark (``--benchmark-autosave``,
``--benchmark-compare``). The numbers of the documentation come from ``python -m benchmarks.run``, where the
providers take turns.
"""

import functools

import pytest
import torch

from .cases import BenchmarkCase, ProviderUnavailable
from .measure import CaseRunner
from .ops import REGISTRY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [
    (op, case, provider)
    for op, row in REGISTRY.items()
    for case in row.cases_on(DEVICE)
    for provider in row.providers
]


@functools.lru_cache(maxsize=1)
def opened(op: str, case: BenchmarkCase) -> CaseRunner:
    runner = CaseRunner(DEVICE)
    runner.open(op, case)
    return runner


@pytest.mark.parametrize(
    ("op", "case", "provider"), ROWS, ids=[f"{op}-{case.name}-{provider}" for op, case, provider in ROWS]
)
def test_op(op, case, provider, benchmark):
    runner = opened(op, case)
    try:
        found = runner.enter(provider)
    except (ImportError, ProviderUnavailable) as why:
        pytest.skip(str(why))
    assert REGISTRY[op].passes(provider, found["error"])
    benchmark.group = f"{op} {case.name}"
    benchmark.extra_info |= found | {"variant": runner.variant()}
    benchmark(runner.time, provider, 1)
