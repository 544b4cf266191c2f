"""Draw the curves of a report, without changing the global state of matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..checkpoint import write_bytes
from ..findings import Shares
from . import quality, samples
from .compare import Comparison
from .run_folder import Record, RunFolder
from .style import (
    RC,
    Curves,
    Drawing,
    Matrix,
    Picture,
    canvas,
    color,
    draw,
    drawn,
    handles,
    legend,
    line,
    panels,
    replaced,
)

_DASHED = (0, (7, 4))
_THIN = 0.8
_MARGIN = 0.03
_MOST_PANELS = 12
LOSSES = {"train_loss": "training loss", "server_loss": "loss of the server's step", "nll": "NLL (nats)"}
LABELS = {"accuracy": "accuracy", "entropy": "entropy (nats)"}


def write_plots(run: RunFolder) -> list[Picture]:
    """Draw all pictures of a run into its folder ``plots``, in reading order."""
    return save(chain(drawings(run), quality.draw(run), samples.draw(run)), run.path)


def save(drawings: Iterable[Drawing], out: Path) -> list[Picture]:
    """Draw figures in the style of all reports, then save them into the folder ``plots`` of ``out``.

    Args:
        drawings: draws while it is iterated over, because the style is set only here.
    """
    pictures = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the caller's style
        matplotlib.rcParams.update(RC)
        figures = list(drawings)  # an error comes before a file is written
        (out / "plots").mkdir(parents=True, exist_ok=True)
        for picture, figure in figures:
            drawn = io.BytesIO()
            figure.savefig(drawn)
            write_bytes(out / "plots" / picture.name, drawn.getbuffer())
            pictures.append(picture)
    return pictures


def draw_comparison(compared: Comparison) -> Iterator[Drawing]:
    """Draw the curves of all arms over several runs, for each data set."""
    for i, group in enumerate(compared.groups, 1):
        source = f" on {group.config.data.source}" if len(compared.groups) > 1 else ""
        caption = "Lines: mean over the runs; bands: 10 % to 90 % quantile of the runs."
        yield Picture(f"arms-{i}.png", f"Arms{source} over several runs", caption), _draw_arms(group)
        if any(group.measured(key) for key in LOSSES):
            picture = Picture(f"loss-{i}.png", f"Losses{source} over several runs", caption)
            yield picture, _draw_arms(group, LOSSES)


def drawings(run: RunFolder) -> Iterator[Drawing]:
    """Draw the curves of a run, and the counts of its algorithms."""
    band = _band(run)
    yield Picture("arms.png", "Arms side by side", band), _draw_arms(run)
    if any(run.measured(key) for key in LOSSES):
        yield Picture("loss.png", "Losses of the arms over the rounds", band), _draw_arms(run, LOSSES)
    if run.on_sets:  # the clients share one model, and the test images are dealt at random
        return
    about = dict.fromkeys(what for algorithm in run.algorithms.values() for what in algorithm.marks.values())
    marks = f" Triangles, before a round: {'; '.join(about)}." if about else ""
    for key in ("accuracy", "entropy"):
        dashes = dict.fromkeys(level.about for arm in run.arms for level in _levels(run, key, arm))
        levels = f" Thin dashes: {'; '.join(dashes)}." if dashes else ""
        if len(run.measured_clients) <= _MOST_PANELS:
            caption = f"One panel per client.{marks}{levels}{_starts(run)}{replaced(run)}"
            figure = _draw_clients(run, key)
        else:
            thin = " Thin lines: the clients with a triangle." if about else ""
            caption, figure = f"{band}{thin}{marks}{levels}", _draw_many_clients(run, key)
        yield Picture(f"{key}.png", f"{key.capitalize()} per client over the rounds", caption), figure
    for arm, findings in run.findings.items():
        if findings.shares is not None:
            member = " First member of the ensemble." if run.config.run.uncertainty == "ensemble" else ""
            picture = Picture(
                shares_file(findings.shares, arm),
                f"{findings.shares.title} of arm {arm}",
                f"{findings.shares.caption} Arm {arm}.{member}",
            )
            yield picture, _draw_shares(run, arm, findings.shares)


def _band(run: RunFolder) -> str:
    """Return the caption of lines and bands."""
    if not run.on_sets:
        return f"Lines: mean over the clients; bands: 10 % to 90 % quantile of the clients.{_starts(run)}"
    images = "test images" if run.measured("accuracy") else "unlabeled images, since there are no test images"
    return f"Lines: all {images}; bands: 10 % to 90 % quantile over the clients."


def _starts(run: RunFolder) -> str:
    return " Vertical lines: start of an iteration." if len(run.config.training.iterations()) > 1 else ""


def shares_file(shares: Shares, arm: str) -> str:
    """Return the file name of the picture of an arm's shares."""
    return f"{shares.name}-{arm}.png"


def _draw_arms(run: Curves, labels: dict[str, str] = LABELS) -> Figure:
    figure = canvas(8.4, 3.2)
    keys = [key for key in labels if run.measured(key)]
    for ax, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        series = {arm: run.series(arm, key) for arm in run.arms}
        for arm, values in series.items():
            _draw_band(ax, values, line(run.arms, arm))
        draw(ax, run, {arm: _mean(values) for arm, values in series.items()}, _marker)
        _finish(ax, run)
        _limit(ax, key)
        ax.set_ylabel(labels[key])
        ax.set_xlabel("round")
    legend(figure, handles(run.arms))
    return figure


def _draw_clients(run: RunFolder, key: str) -> Figure:
    """Draw a panel per client with all arms."""
    names = run.measured_clients
    series = {arm: run.series(arm, key) for arm in run.arms}
    columns = 3 if len(names) <= 9 else 4
    figure, axes = panels(len(names), columns, 2.8, 1.75, above=0.7, sharex=True, sharey=True)
    for i, ax in enumerate(axes.flat[: len(names)]):
        draw(ax, run, {arm: values[:, i] for arm, values in series.items()}, _marker)
        _finish(ax, run)
        _draw_levels(ax, run, key)
        for arm in run.arms:
            _mark(ax, run, arm, [r["round"] for r in marked(run, arm) if r["client"] == names[i]])
        ax.set_title(_title(run, names[i]))
        if i + axes.shape[1] >= len(names):  # the lowest panel of its column
            ax.tick_params(labelbottom=True)
    _limit(axes[0, 0], key)
    for ax in axes[-1]:
        ax.set_xlabel("round")
    for row in axes:
        row[0].set_ylabel(LABELS[key])
    _legend(figure, run, key)
    return figure


def _draw_many_clients(run: RunFolder, key: str) -> Figure:
    """Draw a panel per arm: mean and band of all clients, and a thin line per client with an event."""
    figure, axes = panels(len(run.arms), 3, 3.4, 2.7, above=0.7, least=4.4, sharex=True, sharey=True)
    for ax, arm in zip(axes.flat, run.arms, strict=False):
        values = run.series(arm, key)
        shown = marked(run, arm)
        who = [i for i, name in enumerate(run.measured_clients) if name in {r["client"] for r in shown}]
        ax.plot(_rounds(values), values[:, who], color="#888888", linewidth=0.6, alpha=0.6)
        _draw_band(ax, values, line(run.arms, arm))
        ax.plot(_rounds(values), _mean(values), marker=_marker(values), **line(run.arms, arm))
        _finish(ax, run)
        _draw_levels(ax, run, key, arm)
        _mark(ax, run, arm, sorted({r["round"] for r in shown}))
        what = " or ".join(run.algorithms[arm].marks)
        ax.set_title(f"{arm}: {len(who)} of {len(run.measured_clients)} clients {what}" if who else arm)
        ax.set_xlabel("round")
        ax.tick_params(labelbottom=True)
    _limit(axes[0, 0], key)
    for row in axes:
        row[0].set_ylabel(LABELS[key])
    _legend(figure, run, key)
    return figure


def _draw_shares(run: RunFolder, arm: str, shares: Shares) -> Figure:
    counts = {client: np.asarray(row, dtype=np.float64) for client, row in shares.counts.items()}
    names = [name for name in run.measured_clients if name in counts]
    percent = np.full((len(names), max(map(len, counts.values()))), np.nan)
    for i, name in enumerate(names):
        percent[i, : len(counts[name])] = 100 * counts[name] / max(counts[name].sum(), 1)
    figure = canvas(8.4, min(1.3 + 0.26 * len(names), 12))
    ax = figure.subplots()
    ax.set_facecolor("#d9d9d9")
    ax.grid(False)
    # the square root keeps small shares visible next to a dominant one
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


def _draw_band(ax: Axes, values: Matrix, style: dict[str, Any]) -> None:
    known = np.isfinite(values).any(1)
    if not known.any():  # nanquantile refuses an empty matrix
        return
    low, high = np.nanquantile(values[known], (0.1, 0.9), axis=1)
    ax.fill_between(_rounds(values)[known], low, high, color=style["color"], alpha=0.15, linewidth=0)


def _mean(values: Matrix) -> Matrix:
    """Return the mean over the clients, NaN for a round without measurements."""
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


def _levels(run: RunFolder, key: str, arm: str) -> list[Level]:
    """Return the levels of an arm in the plot of a metric, from the last round of each iteration."""
    found = []
    for name, (metric, about) in run.algorithms[arm].levels.items():
        ends = {
            r["iteration"]: (r["round"], r[name])
            for r in run.of(arm)
            if metric == key and r.get(name) is not None
        }
        starts = {i: min(r["round"] for r in run.of(arm) if r["iteration"] == i) for i in ends}
        found += [Level(starts[i], last, value, name, about) for i, (last, value) in ends.items()]
    return found


def _draw_levels(ax: Axes, run: RunFolder, key: str, *arms: str) -> None:
    for arm in arms or run.arms:
        for level in _levels(run, key, arm):
            ends, height = [level.first - 0.5, level.last + 0.5], [level.value, level.value]
            ax.plot(ends, height, color=color(run, arm), linestyle=_DASHED, linewidth=_THIN, zorder=1)


def marked(run: RunFolder, arm: str) -> list[Record]:
    """Return the records of an arm with a mark: an event of the algorithm (extension)."""
    return [r for r in run.of(arm) if any(r.get(mark) for mark in run.algorithms[arm].marks)]


def _finish(ax: Axes, run: Curves) -> None:
    """Set ticks at whole rounds, and draw a faint line at the start of each iteration."""
    length = max(arm["rounds"] for arm in run.arms.values())
    ax.set_xlim(0.5, max(length, 2) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 4, 5, 10], integer=True))
    iterations = run.config.training.iterations()
    for start in np.cumsum(iterations[:-1]):
        if start < length:
            ax.axvline(start + 0.5, color="#bbbbbb", linewidth=0.8, zorder=0)


def _limit(ax: Axes, key: str) -> None:
    """Set the natural limits of a metric at the end, because this ends the scaling of all panels."""
    low, high = ax.get_ylim()
    if key == "entropy" and low <= high / 2:  # entropies far above 0 keep the automatic limits
        ax.set_ylim(-_MARGIN * high, (1 + _MARGIN) * high)
    elif key == "accuracy":  # a loss has no natural limit
        ax.set_ylim(low, 1 + _MARGIN * (1 - low))


def _mark(ax: Axes, run: RunFolder, arm: str, rounds: list[int]) -> None:
    """Draw a triangle between each of the rounds and the round before it."""
    own, top = color(run, arm), ax.get_xaxis_transform()
    for round in rounds:
        ax.axvline(round - 0.5, color=own, linewidth=0.9)
        ax.plot([round - 0.5], [1], marker="v", color=own, markersize=6, transform=top, clip_on=False)


def _legend(figure: Figure, run: RunFolder, key: str) -> None:
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
    legend(figure, [*handles(run.arms), *marks, *levels])


def _marker(values: Matrix) -> str:
    """Return the marker of a curve, because a single round has no line."""
    return "o" if len(values) == 1 else ""


def _rounds(values: Matrix) -> npt.NDArray[np.int64]:
    """Return the numbers of the rounds, from 1."""
    return np.arange(1, len(values) + 1)


def _title(run: RunFolder, client: str) -> str:
    """Return the name of a client, with the rotation of its images."""
    name, angle = drawn(run)[client], run.angles.get(client)
    return name if angle is None else f"{name} ({f'{angle:g}'.replace('-', '−')}°)"
