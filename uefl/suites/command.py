"""``uefl suite``: run the missing runs of a suite, show its progress, write its report."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import RunError
from ..folder import lock
from ..paths import check_name, has_file
from ..report.words import count
from ..run import chosen_device
from . import cost, report, runner
from .suite import Job, Scale, load
from .suite import jobs as jobs_of

# paths may contain square brackets
_AS_IT_IS: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def run(
    name: str,
    *,
    scale: Scale,
    seeds: int,
    jobs: int,
    out: Path,
    device: str,
    data_root: Path | None,
    console: Console,
) -> None:
    """Run a suite with seeds from 0 into a folder, with ``jobs`` runs at a time, and report.

    Raises:
        UserError: the suite, a measure or the device does not exist, or the folder holds other runs or
            another suite.
        RunError: some runs could not finish; the report names them.
    """
    check_name(out, "the folder of the suite")
    suite = load(name)
    report.check_measures(suite, suite.configs(scale))
    gpu = chosen_device(device).type == "cuda"
    cores = len(os.sched_getaffinity(0))
    at_a_time = jobs or (cores if scale == "cpu" else 1)
    # One thread at the small scale: the same bits for any number of jobs.
    wanted = jobs_of(suite, scale, seeds, out, threads=1 if scale == "cpu" else max(1, cores // at_a_time))
    runs = list({job.folder: job for job in reversed(wanted)}.values())[::-1]
    runner.check_own(out, suite.name, runs)
    out.mkdir(parents=True, exist_ok=True)
    with lock(out, "suite.lock", "choose another folder with --out"):
        runner.check_configurations(runs)
        before = [job for job in runs if has_file(job.folder / "summary.json")]
        console.print(
            f"{suite.name}: {suite.about}\n{count(len(runs), 'run')}, {len(before)} of them finished,"
            f" {at_a_time} at a time, in {out}",
            **_AS_IT_IS,
        )
        start = partial(runner.run, runs, side_by_side=at_a_time, device=device, data_root=data_root)
        errors = _finish(runs, before, console, start)
        if cost.MEASURES & set(suite.measures):
            for job in runs:
                cost.measure(job.folder, gpu, data_root)
        result = report.collect(suite, scale, wanted, errors)
        report.write(result, out, data_root)
    console.print(*(one.rich(console.encoding) for one in report.table(result).split(console.width)))
    for note in (
        *report.elsewhere(result),
        *report.unequal(result),
        *report.partial(result),
        *report.absent(result),
    ):
        console.print(note, **_AS_IT_IS)
    console.print(f"report: {out / 'report.html'}\n        {out / 'report.md'}", **_AS_IT_IS)
    if result.missing:
        raise RunError(
            f"{len(result.missing)} of {len(wanted)} runs are missing; {out / 'report.md'} has the reasons"
        )


def _finish(
    runs: list[Job], before: list[Job], console: Console, start: Callable[..., None]
) -> dict[Path, str]:
    """Run the jobs that have not finished ``before``, and return errors by run folder."""
    errors: dict[Path, str] = {}
    reported: set[tuple[str, str]] = set()
    with _progress(console) as progress:
        task = progress.add_task(
            "", total=sum(job.rounds for job in runs), completed=sum(job.rounds for job in before)
        )
        done = {job: job.rounds for job in before}

        def ended(end: runner.JobResult) -> None:
            done[end.job] = end.job.rounds
            place = f"{end.job.case} {end.job.arm} seed {end.job.seed}"
            what = f"{end.seconds:.0f} s" if end.error is None else f"not finished: {end.error}"
            if end.error is not None:
                if (end.job.case, end.error) in reported:
                    what = "not finished, for the same reason"
                reported.add((end.job.case, end.error))
                errors[end.job.folder] = end.error
            console.print(f"{len(done)}/{len(runs)}  {place}: {what}", **_AS_IT_IS)

        def show_progress(running: dict[Job, int]) -> None:
            names = ", ".join(f"{job.case} {job.arm} {job.seed}" for job in running)
            progress.update(task, completed=sum(done.values()) + sum(running.values()), description=names)

        start(ended=ended, report=show_progress)
    return errors


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    return Progress(
        *columns, console=console, speed_estimate_period=900, transient=True, disable=not console.is_terminal
    )
