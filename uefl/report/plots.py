"""The curves of a report; drawn on figures of their own, so that importing this changes no global state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..findings import Shares
from . import quality, samples
from .folder import Record, Run
from .style import RC, Matrix, canvas, color, draw, drawn, handles, legend, line, replaced

_DASHED = (0, (7, 4))
_THIN = 0.8
_MARGIN = 0.03
_MOST_PANELS = 12
_LOSSES = {"train_loss": "training loss", "nll": "NLL (nats)"}
_LABEL = {"accuracy": "accuracy", "entropy": "entropy (nats)"}


class Picture(NamedTuple):
    """A file in the folder ``plots``, and what is said about it."""

    name: str
    alt: str
    caption: str


def write_plots(run: Run) -> list[Picture]:
    """Draw every picture of a run into its ``plots`` folder, in reading order."""
    folder = run.path / "plots"
    folder.mkdir(exist_ok=True)
    pictures = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the caller's style
        matplotlib.rcParams.update(RC)
        for name, alt, caption, drawing in (*drawings(run), *quality.draw(run), *samples.draw(run)):
            drawing.savefig(folder / name)
            pictures.append(Picture(name, alt, caption))
    return pictures


def drawings(run: Run) -> Iterator[tuple[str, str, str, Figure]]:
    """File name, short text, caption and figure of the curves, and of what the algorithms count."""
    if run.on_sets:  # one model, and test images dealt at random: the clients do not differ
        what = "test images" if run.measured("accuracy") else "unlabeled images, as there are no test images"
        caption = f"Lines: all {what}; bands: 10 % to 90 % quantile of the clients' parts of them."
        yield "arms.png", "Arms side by side", caption, _draw_arms(run)
        return
    few = len(run.clients) <= _MOST_PANELS
    starts = " Grey uprights: an iteration begins." if len(run.config.training.iterations()) > 1 else ""
    band = f"Lines: mean over the clients; bands: from the 10 % to the 90 % quantile of the clients.{starts}"
    about = dict.fromkeys(what for algorithm in run.algorithms.values() for what in algorithm.marks.values())
    marks = f" Triangles, before a round: {'; '.join(about)}." if about else ""
    yield "arms.png", "Arms side by side", band, _draw_arms(run)
    if any(run.measured(key) for key in _LOSSES):
        yield "loss.png", "Losses of the arms over the rounds", band, _draw_arms(run, _LOSSES)
    for key in ("accuracy", "entropy"):
        alt = f"{key.capitalize()} per client over the rounds"
        dashes = dict.fromkeys(level.about for arm in run.arms for level in _levels(run, key, arm))
        levels = f" Thin dashes: {'; '.join(dashes)}." if dashes else ""
        if few:
            yield (
                f"{key}.png",
                alt,
                f"One panel per client.{marks}{levels}{starts}{replaced(run)}",
                _draw_clients(run, key),
            )
        else:
            thin = " Thin lines: the clients with a triangle." if about else ""
            yield f"{key}.png", alt, f"{band}{thin}{marks}{levels}", _draw_many_clients(run, key)
    for arm, findings in run.findings.items():
        if findings.shares is not None:
            whose = " Of the ensemble's first member." if run.config.run.uncertainty == "ensemble" else ""
            name, alt = shares_file(findings.shares, arm), f"{findings.shares.title} of arm {arm}"
            yield (
                name,
                alt,
                f"{findings.shares.caption} Arm {arm}.{whose}",
                _draw_shares(run, arm, findings.shares),
            )


def shares_file(shares: Shares, arm: str) -> str:
    """The name of the picture of an arm's shares."""
    return f"{shares.name}-{arm}.png"


def _draw_arms(run: Run, labels: dict[str, str] = _LABEL) -> Figure:
    figure = canvas(8.4, 3.2)
    keys = [key for key in labels if run.measured(key)]
    for ax, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        series = {arm: run.series(arm, key) for arm in run.arms}
        for arm, values in series.items():
            _draw_band(ax, values, line(run, arm))
        draw(ax, run, {arm: _mean(values) for arm, values in series.items()}, _marker)
        _finish(ax, run)
        _limit(ax, key)
        ax.set_ylabel(labels[key])
        ax.set_xlabel("round")
    legend(figure, handles(run))
    return figure


def _draw_clients(run: Run, key: str) -> Figure:
    """Small multiples: a panel per client, all arms in it."""
    names = run.clients
    columns = 3 if len(names) <= 9 else 4
    columns = min(columns, len(names))
    rows = math.ceil(len(names) / columns)
    series = {arm: run.series(arm, key) for arm in run.arms}
    figure = canvas(max(2.8 * columns, 4.2), 1.75 * rows + 0.7)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for i, ax in enumerate(panels.flat):
        if i >= len(names):
            ax.set_axis_off()
            continue
        draw(ax, run, {arm: values[:, i] for arm, values in series.items()}, _marker)
        _finish(ax, run)
        _draw_levels(ax, run, key)
        for arm in run.arms:
            _mark(ax, run, arm, [r["round"] for r in marked(run, arm) if r["client"] == names[i]])
        ax.set_title(_title(run, names[i]))
        if i + columns >= len(names):  # the lowest panel of its column
            ax.tick_params(labelbottom=True)
    _limit(panels[0, 0], key)
    for ax in panels[-1]:
        ax.set_xlabel("round")
    for row in panels:
        row[0].set_ylabel(_LABEL[key])
    _legend(figure, run, key)
    return figure


def _draw_many_clients(run: Run, key: str) -> Figure:
    """A panel per arm: the mean and the band of all clients, and a thin line for each one with a mark."""
    columns = min(3, len(run.arms))
    rows = math.ceil(len(run.arms) / columns)
    figure = canvas(max(3.4 * columns, 4.4), 2.7 * rows + 0.7)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax in panels.flat[len(run.arms) :]:
        ax.set_axis_off()
    for ax, arm in zip(panels.flat, run.arms, strict=False):
        values = run.series(arm, key)
        shown = marked(run, arm)
        who = [i for i, name in enumerate(run.clients) if name in {r["client"] for r in shown}]
        ax.plot(_rounds(values), values[:, who], color="#888888", linewidth=0.6, alpha=0.6)
        _draw_mean(ax, values, line(run, arm))
        _finish(ax, run)
        _draw_levels(ax, run, key, arm)
        _mark(ax, run, arm, sorted({r["round"] for r in shown}))
        what = " or ".join(run.algorithms[arm].marks)
        ax.set_title(f"{arm}: {len(who)} of {len(run.clients)} clients {what}" if who else arm)
        ax.set_xlabel("round")
        ax.tick_params(labelbottom=True)
    _limit(panels[0, 0], key)
    for row in panels:
        row[0].set_ylabel(_LABEL[key])
    _legend(figure, run, key)
    return figure


def _draw_shares(run: Run, arm: str, shares: Shares) -> Figure:
    counts = {client: np.asarray(row, dtype=np.float64) for client, row in shares.counts.items()}
    names = [name for name in run.clients if name in counts]
    percent = np.full((len(names), max(map(len, counts.values()))), np.nan)
    for i, name in enumerate(names):
        percent[i, : len(counts[name])] = 100 * counts[name] / max(counts[name].sum(), 1)
    figure = canvas(8.4, min(1.3 + 0.26 * len(names), 12))
    ax = figure.subplots()
    ax.set_facecolor("#d9d9d9")
    ax.grid(False)
    # The square root keeps small shares visible beside a dominant one.
    image = ax.imshow(
        percent, aspect="auto", interpolation="nearest", cmap="viridis", norm=PowerNorm(0.5, vmin=0)
    )
    for edge in range(shares.group, percent.shape[1], shares.group):
        ax.axvline(edge - 0.5, color="white", linewidth=2)
    step = math.ceil(len(names) / 40)
    ax.set_yticks(range(0, len(names), step), labels=[_title(run, name) for name in names[::step]])
    ax.set_xlabel(shares.label)
    ax.set_title(arm)
    ax.spines[:].set_visible(False)
    figure.colorbar(image, ax=ax, label="share (%)", pad=0.01, fraction=0.03)
    return figure


def _draw_mean(ax: Axes, values: Matrix, style: dict[str, Any]) -> None:
    _draw_band(ax, values, style)
    ax.plot(_rounds(values), _mean(values), marker=_marker(values), **style)


def _draw_band(ax: Axes, values: Matrix, style: dict[str, Any]) -> None:
    known = np.isfinite(values).any(1)
    low, high = np.nanquantile(values[known], (0.1, 0.9), axis=1)
    ax.fill_between(_rounds(values)[known], low, high, color=style["color"], alpha=0.15, linewidth=0)


def _mean(values: Matrix) -> Matrix:
    """The mean over the clients; NaN in a round in which none was measured."""
    known = np.isfinite(values).any(1)
    means = np.full(len(values), np.nan)
    means[known] = np.nanmean(values[known], axis=1)
    return means


class Level(NamedTuple):
    """A dashed line through the rounds of an iteration."""

    first: int
    last: int
    value: float
    name: str
    about: str


def _levels(run: Run, key: str, arm: str) -> list[Level]:
    """The levels that the algorithm of an arm has in the plot of a metric; an iteration has one where its
    last round has the number."""
    found = []
    for name, (metric, about) in run.algorithms[arm].levels.items():
        ends = {
            r["iteration"]: (r["round"], r[name])
            for r in run.of(arm)
            if metric == key and r.get(name) is not None
        }
        starts = {i: min(r["round"] for r in run.of(arm) if r["iteration"] == i) for i in ends}
        found += [Level(starts[i] + 1, last + 1, value, name, about) for i, (last, value) in ends.items()]
    return found


def _draw_levels(ax: Axes, run: Run, key: str, *arms: str) -> None:
    for arm in arms or run.arms:
        for level in _levels(run, key, arm):
            ends, height = [level.first - 0.5, level.last + 0.5], [level.value, level.value]
            ax.plot(ends, height, color=color(run, arm), linestyle=_DASHED, linewidth=_THIN, zorder=1)


def marked(run: Run, arm: str) -> list[Record]:
    """The records of an arm that have one of the marks of its algorithm."""
    return [r for r in run.of(arm) if any(r.get(mark) for mark in run.algorithms[arm].marks)]


def _finish(ax: Axes, run: Run) -> None:
    """Finish the panels alike: ticks at whole rounds, and a faint line where an iteration begins."""
    length = max(arm["rounds"] for arm in run.arms.values())
    ax.set_xlim(0.5, max(length, 2) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 4, 5, 10], integer=True))
    iterations = run.config.training.iterations()
    for start in np.cumsum(iterations[:-1]):
        if start < length:
            ax.axvline(start + 0.5, color="#bbbbbb", linewidth=0.8, zorder=0)


def _limit(ax: Axes, key: str) -> None:
    """The natural end of the scale; after everything is drawn, since it stops the automatic scaling of all
    panels.

    Entropies that lie close together, far above 0, fill the scale instead. A little of the scale is left
    beyond it, and above the
    highest value: half of a line would lie under the frame.
    """
    low, high = ax.get_ylim()
    if key == "entropy" and low > high / 2:
        return
    if key == "entropy":
        ax.set_ylim(-_MARGIN * high, (1 + _MARGIN) * high)
    elif key == "accuracy":  # a loss has no natural end
        ax.set_ylim(low, 1 + _MARGIN * (1 - low))


def _mark(ax: Axes, run: Run, arm: str, rounds: list[int]) -> None:
    """A tick between the round before it and the first one after it."""
    for round in rounds:
        ax.axvline(round + 0.5, color=color(run, arm), linewidth=0.9)
        ax.plot(
            [round + 0.5],
            [1],
            marker="v",
            color=color(run, arm),
            markersize=6,
            transform=ax.get_xaxis_transform(),
            clip_on=False,
        )


def _legend(figure: Figure, run: Run, key: str) -> None:
    marks = [
        Line2D([], [], label=f"{arm}: {mark}", color=color(run, arm), linestyle="", marker="v")
        for arm in run.arms
        for mark in run.algorithms[arm].marks
        if any(r.get(mark) for r in run.of(arm))
    ]
    levels = [
        Line2D([], [], label=f"{arm}: {name}", color=color(run, arm), linestyle=_DASHED, linewidth=_THIN)
        for arm in run.arms
        for name in dict.fromkeys(level.name for level in _levels(run, key, arm))
    ]
    legend(figure, [*handles(run), *marks, *levels])


def _marker(values: Matrix) -> str:
    """A line of one round is a point."""
    return "o" if len(values) == 1 else ""


def _rounds(values: Matrix) -> npt.NDArray[np.int64]:
    """1 for the first round: the horizontal axis counts rounds that are done."""
    return np.arange(1, len(values) + 1)


def _title(run: Run, client: str) -> str:
    """The client's name, with its angle where the data were dealt and turned."""
    name, angle = drawn(run)[client], run.angles.get(client)
    return name if angle is None else f"{name} ({f'{angle:g}'.replace('-', '−')}°)"
