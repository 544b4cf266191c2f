"""A pytest plugin for vq_suite: our classes under the peer's name, only the tests that are about them, and a
report of what came out."""

from __future__ import annotations

import inspect
import os
import re
import sys
import types
from pathlib import Path

import pytest

from tests.peers.vq_suite import CLASSES

OURS = os.environ.get("UEFL_PEER_OURS") == "1"
_found: dict[str, str] = {}

if OURS:
    import uefl_kernels.nn

    stand_in = types.ModuleType("vector_quantize_pytorch")
    for name in CLASSES:
        setattr(stand_in, name, getattr(uefl_kernels.nn, name))
    for module in ("", ".latent_quantization"):
        sys.modules["vector_quantize_pytorch" + module] = stand_in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of other classes."""
    items[:] = [item for item in items if isinstance(item, pytest.Function) and _about_ours(item)]


def _about_ours(item: pytest.Function) -> bool:
    source = inspect.getsource(item.function)
    pattern = r"from vector_quantize_pytorch[\w.]* import ([\w, ]+)"
    imported = re.findall(pattern, source)
    names = {name.strip() for line in imported for name in line.split(",")} or set(
        re.findall(r"\b\w*VQ\b|\bVectorQuantize\b", source)
    )
    if not names:
        names = {
            name.strip()
            for line in re.findall(pattern, inspect.getsource(item.module))
            for name in line.split(",")
        }
    return bool(names) and names <= set(CLASSES)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each test once, with the first line of why it failed."""
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
