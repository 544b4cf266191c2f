"""Tests marked ``every_variant`` pass on every variant of the CPU kernels that this machine can run.

They also pass with more threads than cores.

UEFL_CPU is read once per process: each variant has a process, one at a time on each core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from uefl_kernels import COMPILED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all_cores,
    pytest.mark.skipif(not COMPILED, reason="the compiled kernels are absent"),
]

VARIANTS = ("amx", "avx512vnni", "avx512", "avx2", "portable")
CROWDED = "four threads on one core"  # waiting threads must leave the core to others
CASES = {variant: {"UEFL_CPU": variant, "UEFL_CPU_EVERY_SHAPE": "1"} for variant in VARIANTS} | {
    CROWDED: {"OMP_NUM_THREADS": "4"}
}
MARK = "every_variant"
MARKED = [str(path) for path in Path(__file__).parent.glob("test_*.py") if MARK in path.read_text()]
COMMAND = [sys.executable, "-m", "pytest", "-x", *MARKED, "-m", f"{MARK} and not slow"]


def runs_here(environment: dict[str, str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", "from uefl_kernels import _host; _host.variant()"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 or "instructions" in done.stderr, done.stderr
    return done.returncode == 0


def outcome(case: str) -> subprocess.CompletedProcess[str] | None:
    environment = os.environ | CASES[case]
    if not runs_here(environment):
        return None
    if case == CROWDED:
        alone = partial(os.sched_setaffinity, 0, {min(os.sched_getaffinity(0))})
        return subprocess.run(
            [*COMMAND, "-k", "threads"], env=environment, capture_output=True, text=True, preexec_fn=alone
        )
    return subprocess.run(
        [*COMMAND, "-k", "not compile and not opcheck"], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def begun(request):
    """Start all selected cases, so that later ones run while the first is awaited."""
    asked = [item.callspec.params["case"] for item in request.session.items if item.module is request.module]
    with ThreadPoolExecutor(os.cpu_count()) as processes:
        yield {case: processes.submit(outcome, case) for case in asked}
        processes.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(1200)  # the time includes the wait for a free core
def test_marked_tests_pass(begun, case):
    done = begun[case].result()
    if done is None:
        pytest.skip(f"this CPU cannot run {case}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
