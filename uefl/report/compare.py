"""Compare several runs.

The tables have means over seeds, differences within a run, and differences of configurations.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import Config
from ..errors import UserError, listed
from ..text_table import Table
from .run_folder import RunFolder
from .tables import last_rounds, number
from .words import count

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class SameData:
    """Finished runs on the same data, each drawn like a client."""

    runs: list[RunFolder]

    @cached_property
    def arms(self) -> dict[str, dict[str, Any]]:
        """Return the largest number of ``rounds`` of each arm."""
        names = dict.fromkeys(name for run in self.runs for name in run.arms)
        return {
            name: {"rounds": max(run.arms[name]["rounds"] for run in self.runs if name in run.arms)}
            for name in names
        }

    @property
    def config(self) -> Config:
        """Return the configuration of the first run."""
        return self.runs[0].config

    def measured(self, key: str) -> bool:
        """Return whether any run has a metric."""
        return any(run.measured(key) for run in self.runs)

    def series(self, arm: str, key: str) -> npt.NDArray[np.float64]:
        """Return the mean of a metric over the clients, ``[rounds, runs]`` with NaN for missing numbers."""
        having = [run for run in self.runs if arm in run.arms]
        values = np.full((self.arms[arm]["rounds"], len(having)), np.nan)
        for i, run in enumerate(having):
            of_clients = run.series(arm, key)
            for number_of_round, row in enumerate(of_clients):
                values[number_of_round, i] = np.nanmean(row) if np.isfinite(row).any() else np.nan
        return values


@dataclass(frozen=True)
class Comparison:
    """Tables over several runs, and notes on the runs that are not in them."""

    runs: list[RunFolder]
    groups: list[SameData]
    tables: list[Table]
    notes: list[str]


def compare(runs: Sequence[RunFolder], against: str | None = None) -> Comparison:
    """Compare two runs or more, separately for each data set, without unfinished and repeated ones.

    Args:
        against: the arm to subtract; None: see :func:`paired_table`.

    Raises:
        UserError: no run has the arm ``against``.
    """
    check_arm(runs, against)
    repeats = repeated([run for run in runs if run.finished])
    groups = [
        SameData(same) for same in by_data([run for run in runs if run.finished and run.path not in repeats])
    ]
    tables = []
    for group in groups:
        source = str(group.config.data.source) if len(groups) > 1 else ""
        paired = paired_table(group.runs, against)
        tables += [spread_table(group.runs, source)] if len(group.runs) > 1 else []
        tables += [paired] if paired is not None else []
    notes = []
    if len(groups) > 1:
        folders = "; ".join(listed(run.path for run in group.runs) for group in groups)
        notes.append(f"runs on different data are compared separately: {folders}")
    notes += [
        f"not in the mean: {path} has the configuration and the seed of {like}"
        for path, like in repeats.items()
    ]
    unfinished = [str(run.path) for run in runs if not run.finished]
    if unfinished:
        notes.append(f"not in the mean, unfinished: {listed(unfinished)}")
    keys = differing_keys(runs)
    if keys:
        notes.append(f"note: these runs differ in more than the seed: {', '.join(keys)}")
    return Comparison(list(runs), groups, tables, notes)


def check_arm(runs: Sequence[RunFolder], arm: str | None) -> None:
    """Check that some run has the arm of ``--against``.

    Raises:
        UserError: no run has the arm; the message lists the arms.
    """
    if arm is not None and not any(arm in run.arms for run in runs):
        arms = dict.fromkeys(name for run in runs for name in run.arms)
        raise UserError(f"--against {arm!r}: no run has such an arm; there are {', '.join(arms)}")


def by_data(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Group runs by their data, in the order of the first run of each group."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(_data(run), []).append(run)
    return list(groups.values())


def _data(run: RunFolder) -> str:
    """Return a key for the data of a run: its section, and the counts of clients given in Python."""
    clients = run.manifest.get("silos", {}) if run.config.data.source == "arrays" else {}
    counts = {
        name: [
            sum(column)
            for column in zip(
                *(part["images_of_class"] for part in client.values() if isinstance(part, dict)), strict=True
            )
        ]
        for name, client in clients.items()
    }
    return json.dumps([run.config.data.table(), counts], sort_keys=True)


def spread_table(runs: Sequence[RunFolder], data: str = "") -> Table:
    """Return the accuracy of each arm over the last four rounds: mean and deviation over finished runs."""
    finished = [run for run in runs if run.finished]
    names = dict.fromkeys(name for run in finished for name in run.arms)
    rows = []
    for name in names:
        means = [run.arms[name]["accuracy_last4"]["mean"] for run in finished if name in run.arms]
        values = [mean for mean in means if mean is not None]
        spread = number(statistics.stdev(values)) if len(values) > 1 else "-"
        rows.append([name, str(len(means)), number(statistics.fmean(values) if values else None), spread])
    title = f"over {count(len(finished), 'run')}{f' on {data}' if data else ''}"
    return Table(
        title,
        ["arm", "runs", f"accuracy, {last_rounds(*finished)}" if finished else "accuracy", "sd over runs"],
        rows,
    )


def repeated(runs: Sequence[RunFolder]) -> dict[Path, Path]:
    """Return the runs with the configuration and seed of an earlier run, each with the earlier folder."""
    first: dict[str, Path] = {}
    again = {}
    for run in runs:
        like = first.setdefault(run.config.with_run(threads=0).to_toml(), run.path)
        if like != run.path:
            again[run.path] = like
    return again


def differing_keys(runs: Sequence[RunFolder]) -> list[str]:
    """Return the configuration keys that differ between runs, except the seed.

    The keys of an arm are compared among the runs that have the arm. If not all runs have the same arms, the
    last entry is ``different arms``.
    """
    tables = [run.config.with_run(seed=0, threads=0).table() for run in runs]
    arms = [table.pop("arms") for table in tables]
    names = dict.fromkeys(name for each in arms for name in each)
    compared = [tables, *([{"arms": {name: each[name]}} for each in arms if name in each] for name in names)]
    found = [key for several in compared for key in differing(several)]
    return found + (["different arms"] if any(each.keys() != names.keys() for each in arms) else [])


def configurations(runs: Sequence[RunFolder]) -> Table:
    """Return a row for each run: its arms, its seed, and its values of the keys that differ between runs."""
    keys = [key for key in differing_keys(runs) if "." in key]
    rows = []
    for run in runs:
        values = dict(_flat(run.config.table()))
        own = [str(values.get(key, "-")) for key in keys]
        rows.append([str(run.path), ", ".join(run.arms), str(run.config.run.seed), *own])
    return Table("configurations", ["run", "arms", "run.seed", *keys], rows, numeric=False)


def differing(tables: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys, as ``section.key``, with different values in these configurations."""
    flat = [dict(_flat(table)) for table in tables]
    keys = dict.fromkeys(key for table in flat for key in table)
    return [key for key in keys if len({repr(table.get(key)) for table in flat}) > 1]


def _flat(table: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def interval(differences: Sequence[float]) -> str:
    """Format the mean of paired differences with its 95 % confidence interval (Student's t)."""
    if len(differences) < 2:
        return f"{differences[0]:+.3f}" if differences else "-"
    mean, half = statistics.fmean(differences), half_width(differences)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a mean (Student's t), 0 for one value."""
    from scipy import stats

    if len(values) < 2:
        return 0.0
    quantile = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def paired_table(runs: Sequence[RunFolder], against: str | None = None) -> Table | None:
    """Return the difference of each arm to one arm of the same run, with a confidence interval over the runs.

    The seed of a run changes both arms alike, so their accuracies over the last four rounds differ less.

    Args:
        runs: runs of one configuration with several seeds. Unfinished ones are ignored.
        against: the arm to subtract. None: the first arm, if there are two runs or more.

    Returns:
        None: no finished run has two arms, or there is a single run and ``against`` is None.
    """
    finished = [run for run in runs if run.finished]
    names = list(dict.fromkeys(name for run in finished for name in run.arms))
    base = against if against is not None else next(iter(names), "")
    rows = []
    for name in names:
        differences = [
            run.arms[name]["accuracy_last4"]["mean"] - run.arms[base]["accuracy_last4"]["mean"]
            for run in finished
            if name != base and {name, base} <= run.arms.keys() and _known(run, name) and _known(run, base)
        ]
        if len(differences) >= (2 if against is None else 1):
            higher = sum(difference > 0 for difference in differences)
            spread = number(statistics.stdev(differences)) if len(differences) > 1 else "-"
            rows.append([name, interval(differences), spread, f"{higher} of {len(differences)}"])
    if not rows:
        return None
    header = ["arm", f"accuracy minus {base}, {last_rounds(*finished)}, 95 %", "sd over runs", "higher in"]
    return Table(f"differences to {base} within each run", header, rows)


def _known(run: RunFolder, arm: str) -> bool:
    return run.arms[arm]["accuracy_last4"]["mean"] is not None
