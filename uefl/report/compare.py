"""Several runs side by side: means over seeds, and differences between arms run by run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .folder import Run
from .tables import Table, last_rounds, number
from .words import count

_CONFIDENCE = 0.95


def by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs on the same data together, in the order of the first of each; a mean over runs on different data
    means nothing."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_data(run), []).append(run)
    return list(groups.values())


def _data(run: Run) -> str:
    """The section of the configuration; of clients given in Python the images of each class that every one
    has, in all its splits."""
    silos = run.manifest.get("silos", {}) if run.config.data.source == "arrays" else {}
    counts = {
        name: [
            sum(column)
            for column in zip(
                *(part["images_of_class"] for part in silo.values() if isinstance(part, dict)), strict=True
            )
        ]
        for name, silo in silos.items()
    }
    return json.dumps([run.config.data.table(), counts], sort_keys=True)


def spread_table(runs: Sequence[Run], data: str = "") -> Table:
    """One row per arm over several runs: mean and sample deviation of its accuracy over the last four rounds.

    Unfinished runs are left out: they would pull the mean with rounds that the others have behind them.
    """
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


def repeated(runs: Sequence[Run]) -> dict[Path, Path]:
    """Runs with the configuration and seed of an earlier run, which add no information: their folders, each
    with that of the earlier."""
    first: dict[str, Path] = {}
    again = {}
    for run in runs:
        like = first.setdefault(run.config.with_run(threads=0).to_toml(), run.path)
        if like != run.path:
            again[run.path] = like
    return again


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Configuration keys other than the seed in which the runs differ; their mean then says little.

    The keys of an arm are compared among the runs that have it; where not all runs have the same arms, the
    last entry says so.
    """
    tables = [run.config.with_run(seed=0, threads=0).table() for run in runs]
    arms = [table.pop("arms") for table in tables]
    names = dict.fromkeys(name for each in arms for name in each)
    compared = [tables, *([{"arms": {name: each[name]}} for each in arms if name in each] for name in names)]
    found = [key for several in compared for key in differing(several)]
    return found + (["different arms"] if any(each.keys() != names.keys() for each in arms) else [])


def differing(tables: Sequence[dict[str, Any]]) -> list[str]:
    """Keys, with their sections, whose values are not the same in all tables of configurations."""
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
    """The mean of paired differences with its confidence interval of 95 %, by Student's t; a single one has
    none."""
    if len(differences) < 2:
        return f"{differences[0]:+.3f}" if differences else "-"
    mean, half = statistics.fmean(differences), half_width(differences)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a mean, by Student's t; 0 for a single
    value."""
    from scipy import stats

    if len(values) < 2:
        return 0.0
    quantile = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def paired_table(runs: Sequence[Run], against: str | None = None) -> Table | None:
    """One row per arm: its accuracy over the last rounds less that of one arm of the same run, over all
    finished runs that have both, the mean with its confidence interval.

    Differences within a run leave out what its seed does to all arms alike.

    Args:
        runs: of one configuration under several seeds.
        against: the arm that is subtracted; its differences within a single run stand without an interval.
            None: the first one, over two runs at least.

    Returns:
        None: there are not as many finished runs with two arms.
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
    header = (
        ["arm", f"accuracy, {last_rounds(*finished)}, less that of {base}, 95 %", "sd over runs", "higher in"]
        if finished
        else []
    )
    return Table(f"less {base}, run by run", header, rows) if rows else None


def _known(run: Run, arm: str) -> bool:
    return run.arms[arm]["accuracy_last4"]["mean"] is not None
