"""Fixtures of runs."""

from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without pictures, which take most of the time of a tiny run; for tests that look at something else."""

    def write_plots(run):
        (run.path / "plots").mkdir(exist_ok=True)
        return []

    monkeypatch.setattr("uefl.report.write.write_plots", write_plots)
