"""Train the runs of a suite in separate processes, several at a time.

Finished runs stay, and interrupted runs resume.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from .. import config
from ..errors import UserError
from ..paths import check_regular, has_file, opened, read_bytes, read_text
from ..report.compare import differing
from .suite import Job
from .worker import work

_LOOK = 0.1  # seconds between two checks of the processes
# the fork server imports torch once, which takes longer than a small run
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload([work.__module__])
_TAIL = 1 << 16  # bytes; holds the last line of metrics.jsonl


class JobResult(NamedTuple):
    """A run that has ended."""

    job: Job
    seconds: float
    error: str | None
    """the last line of the run's output; None: the run is finished"""


def run(
    jobs: list[Job],
    *,
    side_by_side: int,
    device: str,
    data_root: Path | None,
    ended: Callable[[JobResult], None],
    report: Callable[[dict[Job, int]], None],
) -> None:
    """Run all jobs that are not finished, in their order, until they end or Ctrl-C stops them.

    Args:
        jobs: see :func:`uefl.suites.suite.jobs`; one for each folder, after :func:`check_configurations`.
        ended: called with every run as it ends.
        report: called some ten times a second with the rounds that each running job has measured.
    """
    waiting = [job for job in jobs if not has_file(job.folder / "summary.json")]
    running: dict[Job, tuple[ForkServerProcess, float]] = {}
    _start_server()
    try:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                job = waiting.pop(0)
                running[job] = _start(job, device, data_root), time.monotonic()
            time.sleep(_LOOK)
            for job, (process, begun) in list(running.items()):
                code = process.exitcode
                if code is not None:
                    del running[job]
                    finished = (job.folder / "summary.json").is_file()
                    why = _last_line(_log(job)) or f"it ended with exit code {code}"
                    error = None if code == 0 and finished else why
                    ended(JobResult(job, time.monotonic() - begun, error))
            report({job: _measured(job) for job in running})
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def check_own(out: Path, suite: str, jobs: list[Job]) -> None:
    """Refuse to overwrite the report of another suite.

    Raises:
        UserError: the folder belongs to a run or (by its report or runs) to another suite, or lies in one.
    """
    for parent in out.absolute().parents[:3]:
        if around := _suite_of(parent / "results.json"):
            raise UserError(
                f"{out} lies in {parent}, the folder of the suite {around!r}; choose another folder with"
                " --out"
            )
    runs = {path.parent for path in out.glob("*/*/seed-*/config.toml")}
    named = _suite_of(out / "results.json")
    if has_file(out / "config.toml"):
        there = "a run"
    elif named not in (None, suite):
        there = f"the suite {named!r}"
    elif named is None and runs and runs.isdisjoint(job.folder for job in jobs):
        there = "the runs of another suite"
    else:
        return
    raise UserError(f"{out} holds {there}; choose another folder with --out")


def _suite_of(path: Path) -> str | None:
    """Return the suite that wrote results, or None if the results are missing or damaged."""
    try:
        return str(json.loads(read_text(path))["suite"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def check_configurations(jobs: list[Job]) -> None:
    """Refuse runs in the folder with another configuration than their jobs.

    Raises:
        UserError: some runs have another configuration, for example after a change of the suite's file.
    """
    others = {job.folder: keys for job in jobs if (keys := _differing(job))}
    if others:
        folder, keys = next(iter(others.items()))
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"{folder}{more}: {'a run' if len(others) == 1 else 'runs'} with another configuration"
            f" ({', '.join(keys)}); remove {'it' if len(others) == 1 else 'them'}, or choose another folder"
            " with --out"
        )


def _differing(job: Job) -> list[str]:
    """Return the keys that differ between a job and the run in its folder, or none without a run there."""
    if not has_file(job.folder / "config.toml"):
        return []
    try:
        there, wanted = (
            cfg.with_run(threads=0) for cfg in (config.load_whole(job.folder / "config.toml"), job.config)
        )
    except UserError as error:
        raise UserError(f"{error}; or remove {job.folder}, and the suite runs it again") from None
    if wanted.run.precision == "auto":  # the run has made its choice
        wanted = wanted.with_run(precision=there.run.precision)
    return differing([there.table(), wanted.table()])


def _start_server() -> None:
    """Start the fork server with Ctrl-C ignored, which would print a traceback during seconds of imports."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _start(job: Job, device: str, data_root: Path | None) -> ForkServerProcess:
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    check_regular(_log(job))
    _log(job).open("ab").close()  # if the log cannot be written, the suite raises the error
    process = _FORK.Process(
        target=work, args=(job.config.to_toml(), job.folder, device, data_root, _log(job)), daemon=True
    )
    process.start()
    return process


def _log(job: Job) -> Path:
    return job.folder.with_suffix(".log")


def _last_line(path: Path) -> str:
    lines = read_bytes(path).decode(errors="replace").split("\n") if path.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("error: ")


def _measured(job: Job) -> int:
    """Return the number of rounds in the metrics of a run."""
    try:
        with opened(job.folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            whole = [
                line
                for line in file.read().split(b"\n")[:-1]
                if line.startswith(b"{") and line.endswith(b"}")
            ]
        lines = (json.loads(line) for line in reversed(whole))
        return next((int(line["round"]) for line in lines if "reason" not in line), 0)
    except (OSError, ValueError):
        return 0
