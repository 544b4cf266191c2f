"""What several files of tests share."""

from __future__ import annotations

import pytest

from .whole_run import Watcher, start


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without pictures, which take most of the time of a tiny run; for tests that look at something else."""

    def write_plots(run):
        (run.path / "plots").mkdir(exist_ok=True)
        return []

    monkeypatch.setattr("uefl.report.write.write_plots", write_plots)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run: its folder, who watched it, and its summary."""
    out, observer = tmp_path_factory.mktemp("runs") / "whole", Watcher()
    summary = start(out, observer=observer)
    return out, observer, summary
