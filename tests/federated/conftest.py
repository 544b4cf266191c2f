"""What several files of tests share."""

from __future__ import annotations

import pytest

from uefl.algorithms import base

from .whole_run import Watcher, start


@pytest.fixture
def drawn():
    """For tests that look at the pictures of a report; all others do without."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    """Reports without pictures, which take most of the time of a tiny run."""

    def write_plots(run):
        (run.path / "plots").mkdir(exist_ok=True)
        return []

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("uefl.report.write.write_plots", write_plots)


@pytest.fixture(autouse=True)
def _registered_here(monkeypatch):
    """An algorithm that a test registers is known in this test alone."""
    monkeypatch.setattr(base, "_registered", base.registry())


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run: its folder, who watched it, and its summary."""
    out, observer = tmp_path_factory.mktemp("runs") / "whole", Watcher()
    summary = start(out, observer=observer)
    return out, observer, summary
