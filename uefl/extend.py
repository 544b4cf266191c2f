"""Train a finished run for more rounds.

A run keeps, for each arm, the checkpoint before its last turn, which only measures: ``ends/ARM``. Training
continues from there. The result has the same bits as the result of one longer run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import checkpoint
from .config import Config
from .errors import UserError
from .folder import MetricsFile
from .json_text import parse_json
from .paths import command, has_file, opened, read_text
from .server.private import StateFiles

_FOLDER, _LONGER, _STAGED, _INDEX = "ends", "longer", "longer.tmp", "checkpoint.json"
Checkpoint = tuple[dict[str, torch.Tensor], dict[str, Any]]


def keep(out: Path, arm: int, name: str) -> None:
    """Keep a copy of the checkpoint before the last turn of an arm, given by its number and name."""
    found = checkpoint.load(out)
    if found is None or found[1]["arm"] != arm:
        return  # an arm with a single turn has no checkpoint of its own
    tensors, plain = found
    with opened(out / "metrics.jsonl") as file:
        written = file.read(plain["metrics_bytes"]).decode()
    count = sum(json.loads(line)["arm"] == name for line in written.splitlines())
    folder = out / _FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder, tensors, plain | {"lines": count})


def kept(out: Path, name: str) -> Checkpoint | None:
    """Return the state of an arm before its last turn, or None if it has not ended yet.

    Raises:
        UserError: the checkpoint is damaged.
    """
    return checkpoint.load(out / _FOLDER / name)


def check_private(out: Path, states: Iterable[Checkpoint | None]) -> None:
    """Check the private states of clients that checkpoints name, before a run continues from them.

    Raises:
        UserError: a file is missing or damaged.
    """
    members = [member for state in states if state for member in state[1]["state"]["members"]]
    for client, name in {item for member in members for item in member["private"].items()}:
        StateFiles(out / "private").read(name, client)


def private_files(out: Path, cfg: Config) -> set[str]:
    """Return the names of the files of private states that belong to arms that have ended."""
    found: set[str] = set()
    for name in cfg.arms:
        index = out / _FOLDER / name / "checkpoint.json"
        if has_file(index):
            members = checkpoint.read_index(index.parent)["state"]["state"]["members"]
            found.update(file for member in members for file in member["private"].values())
    return found


def with_more_rounds(cfg: Config, rounds: int) -> Config:
    """Return the configuration with more rounds in its last iteration.

    Raises:
        UserError: the past rounds would have been different with the longer schedule.
    """
    if cfg.training.lr_schedule != "constant":
        raise UserError(
            "key 'lr_schedule': the learning rates of the finished rounds depend on the number of rounds;"
            " start a new run"
        )
    if cfg.run.privacy != "none":
        raise UserError("key 'privacy': the secret of a private run is removed at its end; start a new run")
    iterations = cfg.training.iterations()
    longer = cfg.training.model_copy(
        update={"rounds": (*iterations[:-1], iterations[-1] + rounds), "max_iterations": 0}
    )
    return replace(cfg, training=longer)


def check_none(out: Path) -> None:
    """Check that no arm has ended in a run without a checkpoint, because its states would be taken.

    Raises:
        UserError: there is a state of an arm.
    """
    if next((out / _FOLDER).glob(f"*/{_INDEX}"), None) is not None:
        raise UserError(
            f"{out / _FOLDER} has states of arms, and {_INDEX} is missing; restore it, or start a new run"
        )


def stage(out: Path, cfg: Config, rounds: int, preset: str) -> dict[str, Any]:
    """Write the files of a finished run, set back to the last turn of its first arm, with more rounds.

    All files are complete in a folder of their own before the first one takes its place, as :func:`finish`
    does after a kill. Return the record ``made_with`` of the checkpoints, with the digest of the longer run.

    Raises:
        UserError: the run has not ended, or has no states to continue from.
    """
    if not has_file(out / "summary.json"):
        raise UserError(f"{out} has not finished; continue it first: {command('train', '--resume', out)}")
    longer, names = with_more_rounds(cfg, rounds), list(cfg.arms)
    states = {name: kept(out, name) for name in names}
    absent = [name for name, state in states.items() if state is None]
    if absent:
        raise UserError(
            f"{out / _FOLDER / absent[0]} is missing, the state that arm {absent[0]!r} would continue from;"
            " start a new run"
        )
    left = {name: state[1]["lines"] for name, state in states.items() if state is not None}
    last = checkpoint.load(out)
    first = states[names[0]]
    assert first is not None
    if last is None:
        raise UserError(f"{out / _INDEX} is missing; restore it, or start a new run")
    if last[1]["made_with"]["config"] != cfg.digest():
        raise UserError(
            f"{out}: config.toml has been changed since the run ended; restore it, or start a new run"
        )
    MetricsFile(out).cut(last[1]["metrics_bytes"])
    lines = []
    try:
        for line in read_text(out / "metrics.jsonl").splitlines(keepends=True):
            arm = parse_json(line)["arm"]
            if left[arm] > 0:  # the turn that now trains measures the last round again
                lines.append(line)
            left[arm] -= 1
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{out / 'metrics.jsonl'} is damaged; restore it, or start a new run") from None
    text = "".join(lines)
    plain = first[1] | {
        "arm": 0,
        "seconds": last[1]["seconds"],
        "cpu_seconds": last[1]["cpu_seconds"],
        "metrics_bytes": len(text.encode()),
    }
    plain["made_with"] = first[1]["made_with"] | {"config": longer.digest()}
    discard(out)
    new = out / _STAGED
    new.mkdir()
    checkpoint.write_text(new / "metrics.jsonl", text)
    checkpoint.save(new, first[0], plain)
    checkpoint.write_text(new / "config.toml", f"# {preset}\n{longer.to_toml()}")
    return dict(plain["made_with"])


def discard(out: Path) -> None:
    """Remove the files of a longer run that was staged and not committed."""
    shutil.rmtree(out / _STAGED, ignore_errors=True)


def commit(out: Path) -> None:
    """Replace a finished run by the longer run that was staged."""
    os.replace(out / _STAGED, out / _LONGER)
    finish(out)


def finish(out: Path) -> None:
    """Put the files of a longer run in their places, if it was committed and is not in place yet.

    Raises:
        UserError: the folder of the longer run has other files; nothing is changed then.
    """
    new = out / _LONGER
    names = {path.name for path in new.iterdir()} if new.is_dir() else set()
    if names:
        ours = {_INDEX, "config.toml", "metrics.jsonl"}
        ours |= {checkpoint.read_index(new)["tensors"]} if _INDEX in names else set()
        if _INDEX not in names or names - ours:
            raise UserError(f"{new} does not have the files of an extension of this run; move it elsewhere")
        for name in ("summary.json", "report.md", "report.html"):
            (out / name).unlink(missing_ok=True)
        for name in [*sorted(names - {_INDEX}), _INDEX]:  # the last one tells that the others were ours
            os.replace(new / name, out / name)
    with suppress(FileNotFoundError):
        new.rmdir()


def in_order(metrics: MetricsFile, names: list[str]) -> None:
    """Sort the lines of an extended run by arm, the order of a run that was not extended."""
    lines = metrics.lines()
    ordered = sorted(lines, key=lambda line: names.index(line["arm"]))
    if ordered != lines:
        metrics.cut(0)
        metrics.write(ordered, first=1)
