"""A pytest plugin for vq_suite: gives our classes the peer's name, and reports the outcome of each test."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

OURS = os.environ.get("UEFL_PEER_OURS") == "1"
_found: dict[str, str] = {}

if OURS:
    import uefl_kernels.nn
    from uefl_kernels.nn.fsp import build_cdf_act

    stand_in = types.ModuleType("vector_quantize_pytorch")
    for name in uefl_kernels.nn.__all__:
        setattr(stand_in, name, getattr(uefl_kernels.nn, name))
    stand_in.build_cdf_act = build_cdf_act
    for module in ("", ".latent_quantization", ".finite_scalar_perturbation"):
        sys.modules["vector_quantize_pytorch" + module] = stand_in


def pytest_runtest_setup() -> None:
    """Set the seed, so our classes and the peer draw equal random numbers.

    The peer passes its own tests with this seed. Two of these tests depend on it: one tests a 95% confidence
    interval, and one inverts the normal distribution in float32.
    """
    torch.manual_seed(2)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record each test once, with the first line of its error."""
    if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
        return
    reason = (
        ""
        if report.passed
        else ": " + str(report.longrepr).strip().splitlines()[-1].split("E   ")[-1][:120].replace("|", "/")
    )
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None:
        reason = ": " + crash.message.splitlines()[0][:120].replace("|", "/")
    _found[report.nodeid.split("/")[-1]] = report.outcome + reason


def pytest_sessionfinish() -> None:
    """Write the report."""
    Path(os.environ["UEFL_PEER_REPORT"]).write_text(
        "".join(f"{name}\t{outcome}\n" for name, outcome in _found.items())
    )
