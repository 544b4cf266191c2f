"""A finished run with more rounds is the run that had them from the start, bit for bit."""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import uefl
from uefl import config, run
from uefl import extend as extend_module
from uefl.data import build
from uefl.errors import UserError

from .command_line import cli
from .whole_run import Watcher, go_on, outcome, start


def extend(out, rounds, observer=None):
    return go_on(out, observer, more_rounds=rounds)


def same(a, b):
    assert outcome(a) == outcome(b)
    assert (a / "metrics.jsonl").read_text() == (b / "metrics.jsonl").read_text()
    for model in sorted(a.glob("model-*.safetensors")):
        theirs = load_file(b / model.name)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in load_file(model).items())


ARMS = [
    ["rounds=[1, 1]"],
    [
        "rounds=[1]",
        'arms=["fedavg", "scaffold", "fedper"]',
        "arms.scaffold.algorithm=scaffold",
        "arms.fedper.algorithm=fedper",
    ],
    ["rounds=[1]", 'arms=["uefl"]', "uncertainty=ensemble", "members=2", "passes=20"],
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", ARMS, ids=["codebooks", "private-states", "ensemble"])
def test_extended_run_equals_a_longer_run(tmp_path, keys):
    rounds = json.loads(keys[0].removeprefix("rounds="))
    longer = f"rounds={[*rounds[:-1], rounds[-1] + 2]}"
    start(tmp_path / "long", *keys[1:], longer)
    start(tmp_path / "run", *keys)
    extend(tmp_path / "run", 1)
    extend(tmp_path / "run", 1)  # extends the run a second time
    same(tmp_path / "run", tmp_path / "long")
    assert (tmp_path / "run" / "config.toml").read_text() == (tmp_path / "long" / "config.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 4, 7])
def test_interrupted_extension_resumes(tmp_path, calls):
    keys = ['arms=["fedavg", "uefl"]']
    start(tmp_path / "long", *keys, "rounds=[3]")
    start(tmp_path / "run", *keys, "rounds=[1]")
    with pytest.raises(KeyboardInterrupt):
        extend(tmp_path / "run", 2, Watcher(stop_after=calls))
    with pytest.raises(UserError, match="train --resume"):
        extend(tmp_path / "run", 1)
    go_on(tmp_path / "run")
    same(tmp_path / "run", tmp_path / "long")


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lengthen(out):
    """Lengthen a run as ``resume`` does before it trains."""
    extend_module.finish(out)
    if (out / "summary.json").is_file():
        extend_module.stage(out, config.load_whole(out / "config.toml"), 1, "demo")
        extend_module.commit(out)


def test_an_extension_that_is_killed_anywhere_is_completed(tmp_path, monkeypatch):
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    lengthen(tmp_path / "whole")
    rename, left = os.replace, [0]

    def killed(*paths):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        rename(*paths)

    monkeypatch.setattr(os, "replace", killed)
    for calls in range(1, 20):
        out = tmp_path / f"after-{calls}"
        shutil.copytree(tmp_path / "run", out)
        left[0] = calls
        with suppress(KeyboardInterrupt):
            lengthen(out)
        if left[0] > 0:
            break
        lengthen(out)
        assert contents(out) == contents(tmp_path / "whole")
    assert calls > 8  # metrics, tensors and index of the checkpoint, configuration, folder, and their places


@pytest.mark.parametrize("name", ["notes.txt", "config.toml", "checkpoint.json"])
def test_a_folder_named_as_an_extension_is_left_alone(tmp_path, name):
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    (tmp_path / "run" / "longer").mkdir()
    (tmp_path / "run" / "longer" / name).write_text("mine")
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="longer"):
        extend(tmp_path / "run", 1)
    assert contents(tmp_path / "run") == before


def test_an_extension_with_other_data_changes_nothing(tmp_path, monkeypatch):
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    before = contents(tmp_path / "run")
    monkeypatch.setattr(run, "build", lambda *given, **more: replace(build(*given, **more), digest="another"))
    with pytest.raises(UserError, match=r"images .*clients"):
        extend(tmp_path / "run", 1)
    for rounds in (-1, 1.0, True, "1"):
        with pytest.raises(UserError, match="more_rounds"):
            uefl.resume(tmp_path / "run", more_rounds=rounds)
    assert contents(tmp_path / "run") == before


def test_run_that_cannot_be_extended_is_unchanged(tmp_path):
    start(tmp_path / "cosine", "arms=fedavg", "rounds=[1]", "lr_schedule=cosine")
    with pytest.raises(UserError, match="lr_schedule"):
        extend(tmp_path / "cosine", 1)
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_bytes()
    for damaged in (b"\xff", whole[:-9], b"[]\n", whole.replace(b'"fedavg"', b'"other"')):
        metrics.write_bytes(damaged)
        with pytest.raises(UserError, match=r"metrics\.jsonl"):
            extend(tmp_path / "run", 1)
    metrics.write_bytes(whole)
    (tmp_path / "run" / "ends" / "fedavg" / "checkpoint.json").unlink()
    with pytest.raises(UserError, match=r"/ends/fedavg .*'fedavg'"):
        extend(tmp_path / "run", 1)
    for name in ("cosine", "run"):
        assert (tmp_path / name / "summary.json").is_file()


def check_refused(out, match):
    """Check that a run is not extended, and that its folder stays as it is."""
    before = contents(out)
    with pytest.raises(UserError, match=match):
        extend(out, 1)
    assert contents(out) == before


def test_a_run_with_another_configuration_is_not_extended(tmp_path):
    out = tmp_path / "run"
    start(out, "arms=fedavg", "rounds=[1]")
    (out / "checkpoint.json").rename(tmp_path / "kept.json")
    with pytest.raises(UserError, match=r"checkpoint\.json"):
        extend(out, 1)
    (tmp_path / "kept.json").rename(out / "checkpoint.json")
    text = (out / "config.toml").read_text()
    assert "\nlr = " in text
    (out / "config.toml").write_text(re.sub(r"\nlr = .*", "\nlr = 0.5", text))
    check_refused(out, r"config\.toml")


@pytest.mark.parametrize(
    "edited",
    [
        lambda text: "".join(text.splitlines(keepends=True)[1:]),
        lambda text: text.replace("silo-1", "silo-9"),
        lambda text: "".join(text.splitlines(keepends=True)[::-1]),
    ],
    ids=["lost", "renamed", "reversed"],
)
def test_a_run_with_edited_metrics_is_not_extended(tmp_path, edited):
    out = tmp_path / "run"
    start(out, "arms=fedavg", "rounds=[2]")
    path = out / "metrics.jsonl"
    path.write_text(edited(path.read_text()))
    check_refused(out, r"metrics\.jsonl")


@pytest.mark.parametrize(
    ("arm", "damaged", "size"),
    [
        ("fedper", "private/*", 9),
        ("fedavg", "samples.safetensors", 9),
        ("fedavg", "model-*", 0),
        ("fedavg", "report.md", 0),
        ("fedavg", "plots", None),
    ],
    ids=["private", "samples", "model", "report", "plots"],
)
def test_a_run_with_a_damaged_file_is_not_extended(tmp_path, arm, damaged, size):
    """The file is read or replaced at the end, when the results of the finished run are gone."""
    out = tmp_path / "run"
    start(out, f"arms={arm}", "rounds=[1]")
    path = next(out.glob(damaged))
    path.rename(tmp_path / "kept")
    path.write_bytes(b"?" * (size or 1))
    if size == 0:
        path.unlink()
        path.mkdir()
    check_refused(out, re.escape(str(path)))


def test_states_of_arms_without_a_checkpoint_are_not_taken(tmp_path):
    out = tmp_path / "run"
    start(out, "arms=fedavg", "rounds=[1]")
    for name in ("checkpoint.json", "summary.json", "metrics.jsonl"):
        (out / name).unlink()
    with pytest.raises(UserError, match=r"/ends .*checkpoint\.json"):
        go_on(out)


def test_the_command(tmp_path):
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")
    result = cli("train", "--resume", tmp_path / "run", "--more-rounds", "1")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["arms"]["fedavg"]["rounds"] == 2
    result = cli("train", "demo", "--more-rounds", "1")
    assert result.exit_code == 2
    assert "--resume DIR --more-rounds N" in result.output
