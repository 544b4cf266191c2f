from contextlib import suppress

import pytest
import torch

from uefl import checkpoint
from uefl.errors import UserError

TENSORS = {"values": torch.arange(5.0), "part.0": torch.randn(3, 2)}


def test_round_trip(tmp_path):
    checkpoint.save(tmp_path, TENSORS, {"round": 3})
    tensors, plain = checkpoint.load(tmp_path)
    assert plain == {"round": 3}
    assert all(torch.equal(tensors[k], v) for k, v in TENSORS.items())


def test_folder_without_checkpoint_gives_none(tmp_path):
    assert checkpoint.load(tmp_path) is None


def test_only_the_newest_tensors_are_kept(tmp_path):
    for i in range(3):
        checkpoint.save(tmp_path, {"values": torch.full((2,), float(i))}, {"round": i})
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert checkpoint.load(tmp_path)[0]["values"].tolist() == [2.0, 2.0]


def test_a_kill_between_the_two_files_leaves_the_previous_pair(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"values": torch.zeros(2)}, {"round": 0})

    def killed(path, value):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, {"values": torch.ones(2)}, {"round": 1})
    tensors, plain = checkpoint.load(tmp_path)
    assert plain == {"round": 0}
    assert tensors["values"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_at_any_rename_leaves_a_whole_pair(tmp_path, monkeypatch, renames):
    checkpoint.save(tmp_path, {"values": torch.zeros(2)}, {"round": 0})
    rename, left = checkpoint.os.replace, iter(range(renames))

    def killed(old, new):
        if next(left, None) is None:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(checkpoint.os, "replace", killed)
    with suppress(KeyboardInterrupt):
        checkpoint.save(tmp_path, {"values": torch.ones(2)}, {"round": 1})
    tensors, plain = checkpoint.load(tmp_path)
    assert plain == {"round": int(renames >= 3)}
    assert tensors["values"].tolist() == [plain["round"]] * 2


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("*.safetensors", lambda data: data[:-3], "truncated .*altered"),
        ("*.safetensors", None, r"checkpoint\.json .*\.safetensors"),
        ("checkpoint.json", lambda data: data[:20], r"/checkpoint\.json "),
        ("checkpoint.json", lambda data: data.replace(b": 4,", b": 99,"), "schema 99, .*schema 4"),
        ("checkpoint.json", lambda data: data.replace(b'"state"', b'"other"'), r"/checkpoint\.json "),
        ("checkpoint.json", lambda data: data.replace(b"round", b"rounc"), r"/checkpoint\.json .*altered"),
    ],
    ids=["truncated tensors", "missing tensors", "truncated index", "other version", "no state", "altered"],
)
def test_damaged_checkpoint_error_has_advice(tmp_path, file, change, message):
    checkpoint.save(tmp_path, TENSORS, {"round": 3})
    path = next(tmp_path.glob(file))
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(UserError, match=message):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        100_000 * "[",
        '{"schema": 4, "tensors": "../other.safetensors", "sha256": "", "state": {}}',
        '{"schema": 4, "tensors": ["/dev/zero"], "sha256": "", "state": {}}',
    ],
    ids=["deep", "folder", "list"],
)
def test_an_index_of_a_stranger_is_refused_by_name(tmp_path, index):
    (tmp_path / "checkpoint.json").write_text(index)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'checkpoint.json'} "):
        checkpoint.load(tmp_path)
