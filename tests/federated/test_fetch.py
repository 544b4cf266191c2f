"""Downloads, with classes that stand for torchvision's."""

import pytest
from torchvision import datasets
from typer.testing import CliRunner

from uefl import fetch
from uefl.cli import app
from uefl.data import SOURCES


@pytest.fixture
def calls(monkeypatch):
    made = []
    for kind, _ in fetch.SETS.values():
        monkeypatch.setattr(datasets, kind, lambda root, kind=kind, **keys: made.append((kind, root, keys)))
    monkeypatch.delenv("UEFL_DATA", raising=False)
    return made


def cli(*arguments):
    return CliRunner().invoke(app, ["fetch", *map(str, arguments)])


def test_every_name_is_a_data_set_and_its_class_is_there():
    for name, (kind, _) in fetch.SETS.items():
        assert name in SOURCES
        assert hasattr(datasets, kind)


def test_data_sets_are_fetched_once_each(calls, tmp_path):
    result = cli("mnist", "gtsrb", "mnist", "--data-root", tmp_path)
    assert result.exit_code == 0, result.output
    there = str(tmp_path)
    parts = [{"download": True, "split": split} for split in ("train", "test")]
    assert calls == [
        ("MNIST", there, {"download": True}),
        ("GTSRB", there, parts[0]),
        ("GTSRB", there, parts[1]),
    ]
    assert result.stdout.splitlines() == [f"mnist: {there}", f"gtsrb: {there}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar10"], "data root"),
        (["mnits", "--data-root", "x"], "'mnits' .*'mnist'"),
        (["mnist", "mnits", "--data-root", "x"], "'mnits'"),
    ],
)
def test_mistakes_are_a_line_and_nothing_is_fetched(calls, arguments, message):
    import re

    result = cli(*arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert calls == []


@pytest.mark.parametrize("error", [OSError("network"), RuntimeError("corrupted\nmore")])
def test_a_download_that_fails_is_a_line(calls, monkeypatch, tmp_path, error):
    def fail(root, **keys):
        raise error

    monkeypatch.setattr(datasets, "CIFAR10", fail)
    result = cli("cifar10", "--data-root", tmp_path)
    assert result.exit_code == 2
    assert all(line in result.stderr for line in str(error).splitlines())
    assert len(result.stderr.strip().splitlines()) == 1
