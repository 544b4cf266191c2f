"""Downloads, with classes that stand for torchvision's."""

import re
import signal
from pathlib import Path

import pytest
from torchvision import datasets

from tests import fresh
from tests.federated.command_line import accepted, cli
from uefl import fetch
from uefl.data import SOURCES


class Published:
    """A data set of torchvision that is published on no machine, and may stop in the middle of its file."""

    calls, stop = [], None

    def __init__(self, root, download, split="all", train=None):
        split = split if train is None else "first" if train else "second"
        self.calls.append((split, download))
        file = Path(root, "set", f"{split}.bin")
        if file.exists():  # whole or not
            return
        if not download:
            raise RuntimeError("not found")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("part")
        if self.stop is not None:
            self.stop()
        file.write_text("whole")


def files(root):
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(Published, "calls", made)
    for kind, _ in fetch.SETS.values():
        monkeypatch.setattr(datasets, kind, Published)
    monkeypatch.setattr(fetch, "FOLDERS", {})
    monkeypatch.delenv("UEFL_DATA", raising=False)
    return made


def test_every_name_is_a_data_set_and_its_class_is_there():
    for name, (kind, _) in fetch.SETS.items():
        assert name in SOURCES
        assert hasattr(datasets, kind)


def test_data_sets_are_fetched_once_each(calls, tmp_path):
    result = cli("fetch", "mnist", "gtsrb", "mnist", "--data-root", tmp_path)
    assert result.exit_code == 0, result.output
    assert [split for split, download in calls if download] == ["first", "second", "train", "test"]
    assert result.stdout.splitlines() == [f"mnist: {tmp_path}", f"gtsrb: {tmp_path}"]
    assert files(tmp_path) == dict.fromkeys(
        [f"set/{split}.bin" for split in ("first", "second", "train", "test")], "whole"
    )
    calls.clear()
    assert cli("fetch", "mnist", "gtsrb", "--data-root", tmp_path).exit_code == 0
    assert not any(download for _, download in calls)


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError, "SIGKILL"])
def test_an_interrupted_download_leaves_no_part(calls, monkeypatch, tmp_path, end):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine").write_text("mine")
    if end == "SIGKILL":
        done = fresh.python(
            f"""
import os, signal
from pathlib import Path
from torchvision import datasets
from {__name__} import Published, fetch
Published.stop = lambda self: os.kill(os.getpid(), signal.SIGKILL)
datasets.MNIST = Published
fetch.fetch(["mnist"], Path({str(tmp_path)!r}), print)
"""
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        with monkeypatch.context() as patch:
            patch.setattr(Published, "stop", lambda self: (_ for _ in ()).throw(end("stopped")))
            assert cli("fetch", "mnist", "--data-root", tmp_path).exit_code != 0
        assert files(tmp_path) == {"set/mine": "mine"}
    assert not (tmp_path / "set" / "first.bin").exists()
    accepted("fetch", "mnist", "--data-root", tmp_path)
    assert files(tmp_path) == {"set/mine": "mine", "set/first.bin": "whole", "set/second.bin": "whole"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_files_are_fetched_again_after_an_interrupted_move(calls, monkeypatch, tmp_path):
    def stop(source, target):
        target.parent.mkdir(exist_ok=True)
        target.write_text("a part")
        raise KeyboardInterrupt

    (tmp_path / "set").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "move", stop)
        assert cli("fetch", "mnist", "--data-root", tmp_path).exit_code == 130
    accepted("fetch", "mnist", "--data-root", tmp_path)
    assert files(tmp_path) == {"set/first.bin": "whole", "set/second.bin": "whole"}


class Folder(Published):
    """A data set that takes a part of its folder for the folder, as torchvision's GTSRB does."""

    def __init__(self, root, download, split):
        if download or not Path(root, "set").exists():
            super().__init__(root, download, split)


def test_a_part_of_a_folder_is_completed(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets, "GTSRB", Folder)
    monkeypatch.setattr(fetch, "FOLDERS", {"GTSRB": ("set", "*.bin", 2)})
    for _ in range(2):
        accepted("fetch", "gtsrb", "--data-root", tmp_path)
        assert files(tmp_path) == {"set/train.bin": "whole", "set/test.bin": "whole"}
        (tmp_path / "set" / "test.bin").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar10"], "data root"),
        (["mnits", "--data-root", "x"], "'mnits' .*'mnist'"),
        (["mnist", "mnits", "--data-root", "x"], "'mnits'"),
        (["pacs", "--data-root", "x"], "pacs.*DOMAIN/CLASS"),
    ],
)
def test_mistakes_are_a_line_and_nothing_is_fetched(calls, arguments, message):
    result = cli("fetch", *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert calls == []


@pytest.mark.parametrize("error", [OSError("network"), RuntimeError("corrupted\nmore")])
def test_a_download_that_fails_is_a_line(calls, monkeypatch, tmp_path, error):
    def fail(root, **keys):
        raise error

    monkeypatch.setattr(datasets, "CIFAR10", fail)
    result = cli("fetch", "cifar10", "--data-root", tmp_path)
    assert result.exit_code == 2
    assert all(line in result.stderr for line in str(error).splitlines())
    assert len(result.stderr.strip().splitlines()) == 1
