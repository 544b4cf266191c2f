"""Shared by several files of tests."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from tests.files import write_idx
from uefl.algorithms import base
from uefl.report.plots import draw_comparison, write_plots

from .data.test_sources_color import npz_pool, pacs_archive
from .whole_run import Watcher, start


@contextmanager
def undrawn():
    """Write reports without pictures, because pictures take most of the time of a tiny run."""

    def write_plots(run):
        (run.path / "plots").mkdir(exist_ok=True)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uefl.report.write.write_plots", write_plots)
        patch.setattr("uefl.report.write.draw_comparison", lambda compared: ())
        yield


@pytest.fixture(scope="module", autouse=True)
def _undrawn():
    """Leave out pictures in the runs that the tests of a module share, too."""
    with undrawn():
        yield


@pytest.fixture(scope="session", autouse=True)
def _not_on_disk():
    """Do not wait for the disk: no test survives a power failure, and a tiny run would wait forty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def drawn(monkeypatch):
    """Draw the pictures of a report, for the tests that look at them."""
    monkeypatch.setattr("uefl.report.write.write_plots", write_plots)
    monkeypatch.setattr("uefl.report.write.draw_comparison", draw_comparison)


@pytest.fixture(autouse=True)
def _registered_here(monkeypatch):
    """Remove the algorithms that a test has registered after this test."""
    monkeypatch.setattr(base.ALGORITHMS, "_entries", base.registry())


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return a finished run: its folder, its observer, and its summary."""
    out, observer = tmp_path_factory.mktemp("runs") / "whole", Watcher()
    with undrawn():
        summary = start(out, observer=observer)
    return out, observer, summary


@pytest.fixture(scope="session")
def every_source(tmp_path_factory):
    """Return a data root with a small generated data set of every name."""
    root = tmp_path_factory.mktemp("data")
    for name in ("MNIST", "FashionMNIST"):
        write_idx(root / name / "raw", ("train", "t10k"), (900, 120))
    write_idx(
        root / "EMNIST" / "raw",
        ("emnist-letters-train", "emnist-letters-test"),
        (260, 52),
        classes=26,
        first_label=1,
    )
    for name, classes, size in (("cifar10", 10, 32), ("cifar100", 100, 32), ("gtsrb", 43, 32)):
        npz_pool(root / f"{name}.npz", classes, size, 900)
    return pacs_archive(root, 6)
