"""The report of a suite.

The report has means and deviations over seeds, differences to one arm with confidence intervals, the paper's
numbers, and curves.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..checkpoint import write_text
from ..config import Config
from ..errors import UserError, nearest
from ..report.compare import half_width, interval
from ..report.content import Content, ReportElement, ReportSection
from ..report.plots import LABELS, LOSSES, drawings, marked, save, shares_file
from ..report.run_folder import RunFolder, number_columns, read_run
from ..report.style import Drawing, Picture, canvas, handles, legend, line, panels
from ..report.tables import number
from ..report.words import spans
from ..report.write import write_pages
from ..text_table import Table
from . import cost, features
from .suite import Job, Scale, Suite

_COLUMNS = 3  # of panels
_LEGEND = (
    "Numbers are the mean ± the sample deviation over the seeds. `accuracy`, `accuracy@ANGLE` and measures"
    " that end in `_last4` are means over the last four rounds of a run, or over all rounds if a run has"
    " fewer.{of_a_round} All other measures are from the last round. Differences to {against} are paired by"
    " seed. The brackets have the 95 % confidence interval of the mean difference (Student's t)."
)
_OF_A_ROUND = {
    "selected_accuracy": (
        " `selected_accuracy` is the accuracy in the round that is best on the server's validation images, or"
        ' on the clients\' holdout images with `select = "holdout"`.'
    ),
    "best_": " Measures that begin with `best_` are from the round with the highest test accuracy.",
}
_BY_HOLDOUT = (
    ' In runs with `select = "holdout"`, `accuracy` and all measures of the last round are from the round'
    " with the best mean accuracy on the clients' holdout images."
)
_OUTCOMES = frozenset(
    (
        *("last_accuracy", "selected_accuracy", "worst_tenth", "unseen_accuracy", "arrival_accuracy"),
        *("late_accuracy", "late_personalized_accuracy", "rounds_to_catch_up", "rounds_to_target"),
        *("rounds", "rejected", "seconds", "cpu_seconds", "megabytes"),
    )
)
"""numbers of the summary that are no columns of metrics.jsonl"""
_PAPER = "Each number of the paper comes from one run, so it has no deviation."
_CPU = (
    "This is the scale `cpu`: smaller networks, fewer images and rounds. Do not expect the numbers of the"
    " full size, which is `--scale paper`."
)


def check_measures(suite: Suite, configs: Mapping[str, Config]) -> None:
    """Refuse measures that no run of a suite can have.

    Args:
        configs: the configuration of every case.

    Raises:
        UserError: no column and no number of the summary has the name, or no client has the angle.
    """
    columns = frozenset[str]().union(*map(number_columns, configs.values()))
    angles = {f"{a:g}" for cfg in configs.values() for a in getattr(cfg.data.partition, "angles", ())}
    known = columns | cost.MEASURES | _OUTCOMES
    for measure in (*suite.measures, *(suite.front or ())):
        name, at, angle = measure.partition("@")
        column = name.removeprefix("best_").removesuffix("_last4")
        if name not in known and column not in columns:
            raise UserError(
                f"suite {suite.name!r}: there is no measure {measure!r}{nearest(name, known)}; list a column"
                " of your own algorithm in its attribute `details`"
            )
        if at and angle not in angles:
            raise UserError(
                f"suite {suite.name!r}, measure {measure!r}: no client has the angle {angle!r}; there are"
                f" {', '.join(sorted(angles)) or 'none'}"
            )


@dataclass(frozen=True)
class SuiteResult:
    """The finished runs of a suite, and the reasons why others are missing."""

    suite: Suite
    scale: Scale
    runs: dict[tuple[str, str], dict[int, RunFolder]]
    """by case and arm, the runs by seed"""
    missing: dict[str, str]
    """by folder, the reason why a run is missing"""

    def values(self, case: str, arm: str, measure: str) -> dict[int, float]:
        """Return one measure by seed, for the seeds that have it, in an average in all its cases."""
        if case in self.suite.averages:
            cases = [self.values(of, arm, measure) for of in self.suite.averages[case].cases]
            return {
                seed: statistics.fmean(of[seed] for of in cases)
                for seed in cases[0]
                if all(seed in of for of in cases)
            }
        found = {seed: _value(run, arm, measure) for seed, run in self.runs.get((case, arm), {}).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def arms(self, case: str) -> list[str]:
        """Return the arms of a case with a run, in its order, or those in all cases of an average."""
        if case in self.suite.averages:
            first, *others = (self.arms(of) for of in self.suite.averages[case].cases)
            return [arm for arm in first if all(arm in arms for arms in others)]
        return [arm for of, arm in self.runs if of == case]

    def rows(self) -> list[tuple[str, str]]:
        """Return every case and arm with a run, and then the averages over cases."""
        return [(case, arm) for case in (*self.suite.cases, *self.suite.averages) for arm in self.arms(case)]


def collect(suite: Suite, scale: Scale, jobs: Sequence[Job], errors: dict[Path, str]) -> SuiteResult:
    """Read the runs of a suite that are finished, and keep the last line of the others."""
    runs: dict[tuple[str, str], dict[int, RunFolder]] = {}
    missing: dict[str, str] = {}
    for job in sorted(jobs, key=lambda job: list(suite.cases).index(job.case)):
        place = f"{job.case}/{job.arm}/{job.folder.name}"
        if not (job.folder / "summary.json").is_file():
            missing[place] = errors.get(job.folder, "it has not ended")
            continue
        try:
            runs.setdefault((job.case, job.arm), {})[job.seed] = read_run(job.folder)
        except UserError as error:
            missing[place] = f"{error}; or remove {job.folder}, and the suite runs it again"
    return SuiteResult(suite, scale, runs, missing)


def write(result: SuiteResult, out: Path, data_root: Path | None = None) -> None:
    """Write ``report.md``, ``report.html``, ``plots`` and ``results.json`` of a suite.

    The pictures of features need the images again.
    """
    made = chain(_draw(result), _draw_clients(result), _draw_features(result, data_root))
    write_pages(content(result, save(made, out)), out)
    write_text(out / "results.json", json.dumps(plain(result), indent=1) + "\n")


def plain(result: SuiteResult) -> dict[str, object]:
    """Return every measure of every run as JSON holds it: by case, arm and measure, a number per seed."""
    measures = result.suite.measures
    cases: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for case, arm in result.runs:
        cases.setdefault(case, {})[arm] = {measure: result.values(case, arm, measure) for measure in measures}
    return {"suite": result.suite.name, "scale": result.scale, "cases": cases, "missing": result.missing}


def table(result: SuiteResult) -> Table:
    """Make a row for each case and arm, and for each average over cases."""
    suite = result.suite
    printed = {
        measure
        for row in (*suite.cases, *suite.averages)
        for numbers in suite.paper(row).values()
        for measure in numbers
    }
    header = ["case / arm", "seeds"]
    for i, measure in enumerate(suite.measures):
        header += (
            [measure]
            + (["paper"] if measure in printed else [])
            + ([f"minus {suite.against}, 95 %"] if i == 0 else [])
        )
    rows = []
    for case, arm in result.rows():
        row = [f"{case} / {arm}", str(len(result.values(case, arm, suite.measures[0])))]
        for i, measure in enumerate(suite.measures):
            row.append(_spread(list(result.values(case, arm, measure).values())))
            if measure in printed:
                row.append(number(suite.paper(case).get(arm, {}).get(measure)))
            if i == 0:
                row.append(
                    ""
                    if (case, arm) == suite.baseline(case)
                    else interval(_differences(result, case, arm, measure))
                )
        rows.append(row)
    return Table(f"{suite.name}: {suite.about}", header, rows)


def differences(result: SuiteResult) -> list[ReportElement]:
    """Return, for several measures, a sentence and a table of the differences to the baseline arm."""
    suite = result.suite
    arms = [(case, arm) for case, arm in result.rows() if (case, arm) != suite.baseline(case)]
    if not arms or len(suite.measures) == 1:
        return []
    found = {m: [interval(_differences(result, *place, m)) for place in arms] for m in suite.measures}
    # an arm without a codebook has no number of codewords
    shown = [m for m in suite.measures if set(found[m]) != {"-"}]
    rows = [[f"{case} / {arm}", *(found[m][i] for m in shown)] for i, (case, arm) in enumerate(arms)]
    return [
        f"Difference of every measure to {suite.against}, paired by seed:",
        Table("", ["case / arm", *shown], rows),
    ]


def content(result: SuiteResult, pictures: list[Picture]) -> Content:
    """Return the whole report."""
    runs = sum(map(len, result.runs.values()))
    cases = result.suite.cases.values()
    named = [
        text
        for start, text in _OF_A_ROUND.items()
        if any(measure.startswith(start) for measure in result.suite.measures)
    ]
    if any(run.by_holdout for runs in result.runs.values() for run in runs.values()):
        named.append(_BY_HOLDOUT)
    legend = _LEGEND.format(against=result.suite.against, of_a_round="".join(named))
    elements: list[ReportElement] = [
        table(result),
        *unequal(result),
        *partial(result),
        legend,
        *elsewhere(result),
        *differences(result),
    ]
    if any(case.paper for case in cases):
        elements.append(_PAPER)
    if result.scale == "cpu" and (result.suite.cpu or any(case.cpu for case in cases)):
        elements.append(_CPU)
    sections = [ReportSection("", elements), *([ReportSection("Curves", list(pictures))] if pictures else [])]
    if result.missing:
        sections.append(ReportSection("Missing runs", [reasons(result.missing)]))
    warnings = (
        [f"{len(result.missing)} of {runs + len(result.missing)} runs are missing; see the end"]
        if result.missing
        else []
    )
    warnings += absent(result)
    return Content(f"Suite {result.suite.name}, scale {result.scale}", warnings, sections)


def reasons(missing: Mapping[str, str]) -> list[str]:
    """Return why runs are missing, in a line for the runs of a case with a common reason."""
    alike: dict[tuple[str, str], list[str]] = {}
    for place, why in missing.items():
        alike.setdefault((place.partition("/")[0], why), []).append(place)
    return [
        f"{places[0] if len(places) == 1 else f'{len(places)} runs of {case}'}: {why}"
        for (case, why), places in alike.items()
    ]


def _differences(result: SuiteResult, case: str, arm: str, measure: str) -> list[float]:
    ours, theirs = (result.values(*place, measure) for place in ((case, arm), result.suite.baseline(case)))
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def absent(result: SuiteResult) -> list[str]:
    """Return a sentence for each measure that no finished run has."""
    return [
        f"no run has the measure {m!r}{', which takes a GPU' if m == cost.ON_GPU else ''}"
        for m in result.suite.measures
        if result.runs and not any(result.values(case, arm, m) for case, arm in result.runs)
    ]


def unequal(result: SuiteResult) -> list[str]:
    """Return a sentence about arms that stopped earlier or later than their baseline arm."""
    against, entries = result.suite.against, []
    for case, arm in result.runs:
        ours, theirs = (
            {seed: run.arms[place[1]]["rounds"] for seed, run in result.runs.get(place, {}).items()}
            for place in ((case, arm), result.suite.baseline(case))
        )
        if any(ours[seed] != theirs[seed] for seed in ours.keys() & theirs.keys()):
            of, _ = result.suite.baseline(case)
            there = against if of == case else f"{against} of {of}"
            entries.append(f"{case} / {arm} {spans(ours.values())}, {there} {spans(theirs.values())}")
    said = (
        f"Some arms have another number of rounds than {against}. The comparison takes each arm at its own"
        f" end; rounds: {'; '.join(entries)}."
    )
    return [said] if entries else []


def elsewhere(result: SuiteResult) -> list[str]:
    """Return a sentence on the cases with arms that are compared with another case's arm, if any."""
    cases: dict[str, list[str]] = {}
    for name, case in result.suite.cases.items():
        if case.against is not None and result.arms(name):
            cases.setdefault(case.against, []).append(name)
    entries = "; ".join(
        f"{', '.join(names)} with {result.suite.against} of {against}" for against, names in cases.items()
    )
    return [f"Cases that are compared with another case: {entries}."] if entries else []


def partial(result: SuiteResult) -> list[str]:
    """Return a sentence about means of fewer seeds than their row has."""
    entries = []
    for (case, arm), runs in result.runs.items():
        for measure in result.suite.measures:
            seeds = result.values(case, arm, measure)
            if 0 < len(seeds) < len(runs):
                entries.append(f"{measure} of {case} / {arm} (seeds {', '.join(map(str, seeds))})")
    said = "Some means are of fewer seeds, because the other runs do not have the measure"
    return [f"{said}: {'; '.join(entries)}."] if entries else []


def _value(run: RunFolder, arm: str, measure: str) -> float | None:
    """Return a value of the summary, or the mean of a column over the clients in the reported round.

    ``COLUMN_last4`` is of the last four rounds, and ``best_COLUMN`` of the round with the highest accuracy.
    ``MEASURE@ANGLE`` covers the clients with images turned by this angle.
    """
    if "@" in measure:
        return _accuracy_at_angle(run, arm, *measure.split("@", 1))
    outcome = run.arms[arm] | cost.read(run.path)
    best, at_best = outcome.get("best"), measure.removeprefix("best_")
    if best and at_best != measure and _is_measured(run, arm, at_best):
        return float(np.nanmean(run.series(arm, at_best)[best["round"] - 1]))
    selected = outcome.get("selected", {}).get("accuracy")
    outcome |= {
        "accuracy": outcome["accuracy"] if run.by_holdout else outcome["accuracy_last4"]["mean"],
        "last_accuracy": outcome["accuracy"],
        "selected_accuracy": selected,
        "megabytes": sum(outcome.get(key, 0) for key in ("bytes_sent", "bytes_received")) / 1e6,
    }
    found, column = outcome.get(measure), measure.removesuffix("_last4")
    if not isinstance(found, (int, float)) and _is_measured(run, arm, column):
        several = column != measure
        found = np.nanmean(run.series(arm, column)[-4:]) if several else run.mean(arm, column)
    return float(found) if isinstance(found, (int, float)) else None


def _is_measured(run: RunFolder, arm: str, column: str) -> bool:
    return any(isinstance(r.get(column), (int, float)) for r in run.of(arm))


def _accuracy_at_angle(run: RunFolder, arm: str, measure: str, angle: str) -> float | None:
    """Return a column of the clients with images turned by an angle, over the rounds of :func:`_value`."""
    several = measure.endswith("_last4") or (measure == "accuracy" and not run.by_holdout)
    series, round = run.series(arm, measure.removesuffix("_last4")), run.reported_round(arm)
    series = series[-4:] if several else series[round - 1 : round]
    chosen = (
        series[:, [f"{run.angles.get(client):g}" == angle for client in run.measured_clients]]
        if run.angles
        else series[:, :0]
    )
    return None if np.isnan(chosen).all() else float(np.nanmean(chosen))


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return number(statistics.fmean(values)) + (
        f" ± {number(statistics.stdev(values))}" if len(values) > 1 else ""
    )


# --- pictures ---------------------------------------------------------------------------------------------


def draw_means(result: SuiteResult) -> Iterator[Drawing]:
    """Draw the sweep and the Pareto front of a suite that has them, from the means over the seeds."""
    suite, measure = result.suite, result.suite.measures[0]
    if suite.axis is not None:
        caption = (
            f"Mean over the seeds of {measure}, and its paired difference to {suite.against}; bars: 95"
            " % confidence intervals."
        )
        yield Picture("sweep.png", f"{measure} over {suite.axis}", caption), _draw_sweep(result, measure)
    if suite.front is not None:
        caption = (
            "Means over the seeds, one point for each case and arm; line: the cases of an arm for which no"
            " other case of this arm is better in both measures."
        )
        alt = f"{' and '.join(suite.front)} of every case"
        yield Picture("front.png", alt, caption), _draw_front(result, suite.front)


def _draw(result: SuiteResult) -> Iterator[Drawing]:
    if not result.runs:
        return
    suite = result.suite
    yield from draw_means(result)
    marks = "triangles: before this round, the algorithm gave a client something, such as codewords"
    caption = (
        f"Lines: mean over clients and seeds; bands: from the least to the largest of the seeds; {marks}."
    )
    losses = {key: label for key, label in LOSSES.items() if key in result.suite.measures}
    for key, label in {**LABELS, "perplexity": "perplexity", **losses}.items():
        name = "curves" if key == "accuracy" else key
        title = f"{label[0].upper()}{label[1:].removesuffix(' (nats)')} over the rounds"
        figure = _draw_curves(result, key, label)
        if figure.axes:
            yield Picture(f"{name}.png", title, caption), figure
    local = [key for key in LABELS if f"personalized_{key}" in suite.measures]
    if local:
        caption = (
            "Thick lines: the global model; thin lines: the model of each client after its training and"
            " before the average; means over clients and seeds."
        )
        yield Picture("local.png", "Global and local models", caption), _draw_local(result, local)


def _all_arms(result: SuiteResult) -> list[str]:
    return list(dict.fromkeys(arm for _, arm in result.runs))


def _draw_curves(result: SuiteResult, key: str, label: str) -> Figure:
    """Draw a panel per case."""
    arms = _all_arms(result)
    curves = {
        place: [c for run in runs.values() if len(c := _curve(run, place[1], key))]
        for place, runs in result.runs.items()
    }
    cases = [case for case in result.suite.cases if any(curves.get((case, arm)) for arm in arms)]
    if not cases:
        return canvas(4.4, 0.7)
    figure, axes = panels(len(cases), _COLUMNS, 2.9, 2.2, above=0.7, least=4.4)
    for ax, case in zip(axes.flat, cases, strict=False):
        for arm in arms:
            found = curves.get((case, arm), [])
            if not found:
                continue
            values = np.stack([c[: min(map(len, found))] for c in found])
            rounds = np.arange(1, values.shape[1] + 1)
            style = line(arms, arm)
            of_arm: dict[str, Any] = {"color": style["color"]}
            ax.fill_between(rounds, values.min(0), values.max(0), alpha=0.15, linewidth=0, **of_arm)
            ax.plot(rounds, values.mean(0), **style)
            marks = {r["round"] for run in result.runs[case, arm].values() for r in marked(run, arm)}
            at = np.array(sorted(marks & set(rounds.tolist())), dtype=int)
            ax.plot(at, values.mean(0)[at - 1], linestyle="", marker="^", markersize=5, **of_arm)
        ax.set_title(case)
        ax.set_xlabel("round")
        ax.locator_params("x", integer=True)
    for row in axes:
        row[0].set_ylabel(label)
    drawn = {arm for (_, arm), found in curves.items() if found}
    legend(figure, [entry for entry in handles(arms) if entry.get_label() in drawn])
    return figure


def _draw_local(result: SuiteResult, keys: Sequence[str]) -> Figure:
    """Draw the global model and the clients' own models, with a panel for each case and measure."""
    arms, places = _all_arms(result), [(case, key) for case in result.suite.cases for key in keys]
    figure, axes = panels(len(places), len(keys), 3.4, 2.6, above=0.7, least=4.4)
    for ax, (case, key) in zip(axes.flat, places, strict=False):
        for arm in arms:
            for measured, width in ((key, 2.0), (f"personalized_{key}", 0.8)):
                found = [_curve(run, arm, measured) for run in result.runs.get((case, arm), {}).values()]
                least = min(map(len, found), default=0)
                means = np.array([curve[:least] for curve in found]).mean(0) if least else np.empty(0)
                ax.plot(np.arange(1, least + 1), means, **{**line(arms, arm), "linewidth": width})
        ax.set_title(case)
        ax.set_xlabel("round")
        ax.set_ylabel(LABELS[key])
        ax.locator_params("x", integer=True)
    legend(figure, handles(arms))
    return figure


def _curve(run: RunFolder, arm: str, key: str) -> np.ndarray:
    if run.arms[arm]["rounds"] < 2 or not _is_measured(run, arm, key):
        return np.empty(0)
    means: np.ndarray = np.nanmean(run.series(arm, key), axis=1)
    return means


def _draw_sweep(result: SuiteResult, measure: str) -> Figure:
    """Draw a measure and, below it, its difference to the baseline arm over the cases of each panel."""
    cases, arms = result.suite.cases, _all_arms(result)
    names = list(dict.fromkeys(case.panel for case in cases.values() if case.x is not None))
    figure = canvas(max(5.6, 4.4 * len(names)), 6.0)
    panels = figure.subplots(2, len(names), squeeze=False, sharex="col", sharey="row")
    for column, panel in enumerate(names):
        places = [
            (name, case.x, case.label)
            for name, case in cases.items()
            if case.panel == panel and case.x is not None
        ]
        for arm in arms:
            measured = [(x, list(result.values(name, arm, measure).values())) for name, x, _ in places]
            paired = [(x, _differences(result, name, arm, measure)) for name, x, _ in places]
            for row, points in enumerate((measured, paired)):
                known = [(x, values) for x, values in points if values]
                means, bars = ([f(values) for _, values in known] for f in (statistics.fmean, half_width))
                at, style = [x for x, _ in known], line(arms, arm)
                panels[row][column].errorbar(at, means, bars, capsize=2, marker="o", **style)
        panels[0][column].set_title(panel)
        below = panels[1][column]
        below.set_xlabel(result.suite.axis or "")
        labels = [(x, label) for _, x, label in places if label]
        if labels:
            below.set_xticks([x for x, _ in labels], [label for _, label in labels], rotation=40, ha="right")
    panels[0][0].set_ylabel(measure)
    panels[1][0].set_ylabel(f"minus {result.suite.against}")
    legend(figure, handles(arms))
    return figure


def best_in_both(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto front of points, both coordinates minimized, by the first one."""
    order = sorted(range(len(points)), key=lambda i: points[i])
    found: list[int] = []
    for i in order:
        if not found or points[i][1] < points[found[-1]][1]:
            found.append(i)
    return found


def _draw_front(result: SuiteResult, measures: tuple[str, str]) -> Figure:
    """Draw two measures of every case against each other."""
    figure, arms = canvas(5.6, 4.0), _all_arms(result)
    ax = figure.subplots()
    for arm in arms:
        points, names = [], []
        for case in result.suite.cases:
            x, y = (list(result.values(case, arm, measure).values()) for measure in measures)
            if x and y:
                points.append((statistics.fmean(x), statistics.fmean(y)))
                names.append(case)
        style = line(arms, arm)
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=style["color"])
        for name, point in zip(names, points, strict=True):
            ax.annotate(name, point, xytext=(4, 4), textcoords="offset points", fontsize=7)
        front = [points[i] for i in best_in_both(points)]
        if len(front) > 1:
            ax.plot(*zip(*front, strict=True), **style)
    ax.set_xlabel(measures[0])
    ax.set_ylabel(measures[1])
    legend(figure, handles(arms))
    return figure


def _draw_clients(result: SuiteResult) -> Iterator[Drawing]:
    """Draw entropies and counts, for the first seed of the arms whose clients differ in the count."""
    for (case, arm), runs in result.runs.items():
        run = runs[min(runs)]
        shares = run.findings[arm].shares if arm in run.findings else None
        if shares is None:
            continue
        wanted = {"entropy.png": "entropy", shares_file(shares, arm): shares.name}
        for picture, figure in drawings(run):
            if picture.name in wanted:
                name = f"{wanted[picture.name]}-{case}-{arm}.png"
                caption = f"{picture.caption} Case {case}, seed {min(runs)}."
                yield Picture(name, f"{picture.alt} on {case}", caption), figure


def _draw_features(result: SuiteResult, data_root: Path | None) -> Iterator[Drawing]:
    """Draw the features of the first seed of every arm with a codebook."""
    for (case, arm), runs in result.runs.items():
        folder = runs[min(runs)].path
        try:
            figure = features.draw(folder, data_root)
        except UserError as error:
            raise UserError(f"{error}; or remove {folder}, and the suite runs it again") from None
        if figure is not None:
            caption = (
                f"Test images of each client on the two principal axes of the features, seed {min(runs)}."
            )
            alt = f"Features and codewords of {arm} on {case}"
            yield Picture(f"features-{case}-{arm}.png", alt, caption), figure
