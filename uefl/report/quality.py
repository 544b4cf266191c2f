"""Draw calibration, accuracy by class and confusion, over the test images of all clients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .run_folder import RunFolder
from .style import Drawing, Matrix, Picture, canvas, color, drawn_classes, legend, panels, replaced_classes

_COLUMNS = 3
_WITH_NUMBERS = 12  # classes; with more, the cells are too small
_MARKERS = "osD^vP*X"


def draw(run: RunFolder) -> Iterator[Drawing]:
    """Draw each picture for which the run has the numbers."""
    bins = {arm: found for arm in run.arms if (found := _bins(run, arm)) is not None}
    if bins:
        caption = (
            "Bars: percentage of correct predictions in each bin of confidence; dots: the same at the mean"
            " confidence of the bin; dashed line: perfect calibration. If a dot is below the line, the"
            " predictions are overconfident. Gray: share of the images."
            " ECE is over the images of all clients; the table has the mean over the clients."
        )
        picture = Picture("reliability.png", "Reliability of the confidence", caption)
        yield picture, _reliability(bins, run)
    confusion = {
        arm: found.reshape(2 * [math.isqrt(len(found))])
        for arm in run.arms
        if (found := run.counts(arm, "confusion")) is not None
    }
    if confusion:
        others = replaced_classes(run)
        caption = f"Test images of each class with a correct prediction.{others}"
        yield Picture("classes.png", "Accuracy by class", caption), _classes(confusion, run)
        caption = (
            "Rows: class of the image; columns: predicted class; in percent of the row. "
            f"The color shows the square root of the share.{others}"
        )
        yield Picture("confusion.png", "Confusion of classes", caption), _confusion(confusion, run)


def _bins(run: RunFolder, arm: str) -> Matrix | None:
    """Return ``[bins, 3]``: images, correct predictions, and the sum of the confidence."""
    counts, confidence = run.counts(arm, "reliability"), run.counts(arm, "confidence")
    return (
        None if counts is None or confidence is None else np.column_stack([counts.reshape(-1, 2), confidence])
    )


def _reliability(bins: dict[str, Matrix], run: RunFolder) -> Figure:
    columns = min(_COLUMNS, len(bins))
    rows = math.ceil(len(bins) / columns)
    figure = canvas(max(2.9 * columns, 4.2), 3.1 * rows)
    axes = figure.subplots(2 * rows, columns, squeeze=False, sharex=True, height_ratios=[4, 1] * rows)
    for ax in axes.flat:
        ax.set_axis_off()
    for i, (arm, table) in enumerate(bins.items()):
        upper, lower = axes[2 * (i // columns), i % columns], axes[2 * (i // columns) + 1, i % columns]
        images, right, confidence = table.T
        edges, width, seen = np.arange(len(table)) / len(table), 1 / len(table), images > 0
        share = 100 * right[seen] / images[seen]
        error = np.abs(right - confidence).sum() / images.sum()
        upper.bar(edges[seen], share, 0.9 * width, align="edge", color=color(run, arm), alpha=0.6)
        upper.plot([0, 1], [0, 100], color="#333333", linestyle=(0, (5, 3)), linewidth=0.9)
        upper.plot(confidence[seen] / images[seen], share, "o", color="#333333", markersize=2.5)
        upper.set(xlim=(0, 1), ylim=(0, 102), title=f"{arm}: ECE {error:.3f}")
        lower.bar(edges, 100 * images / images.sum(), 0.9 * width, align="edge", color="#999999")
        lower.set(ylim=(0, 100), yticks=(0, 100), xlabel="confidence")
        lower.tick_params(labelbottom=True)
        for ax in (upper, lower):
            ax.set_axis_on()
        if i % columns == 0:
            upper.set_ylabel("correct (%)")
            lower.set_ylabel("share (%)")
    return figure


def _classes(confusion: dict[str, Matrix], run: RunFolder) -> Figure:
    count = len(next(iter(confusion.values())))
    names = drawn_classes(run) or list(map(str, range(count)))
    figure = canvas(8.4, min(1.2 + (0.16 + 0.08 * len(confusion)) * count, 30))
    ax = figure.subplots()
    entries = []
    for i, (arm, table) in enumerate(confusion.items()):
        total = table.sum(1)
        share = np.divide(100 * table.diagonal(), total, out=np.full(count, np.nan), where=total > 0)
        dodge = 0.6 * ((i + 0.5) / len(confusion) - 0.5)
        marker = _MARKERS[list(run.arms).index(arm) % len(_MARKERS)]
        style: dict[str, Any] = {"color": color(run, arm), "marker": marker, "linestyle": "", "markersize": 5}
        ax.plot(share, np.arange(count) + dodge, label=arm, **style)
        entries.append(Line2D([], [], label=arm, **style))
    ax.set_yticks(range(count), labels=[_short(name) for name in names])
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_xlim(right=101)
    for edge in range(1, count):
        ax.axhline(edge - 0.5, color="#e6e6e6", linewidth=0.6)
    ax.grid(False, axis="y")
    ax.set_xlabel("correct (%)")
    legend(figure, entries)
    return figure


def _confusion(confusion: dict[str, Matrix], run: RunFolder) -> Figure:
    count = len(next(iter(confusion.values())))
    size = min(max(2.9, 0.29 * count + 0.6), 6.5)
    figure, axes = panels(len(confusion), _COLUMNS, size, size + 0.45)
    names = [_short(name) for name in drawn_classes(run) or map(str, range(count))]
    turned = 90 if max(map(len, names)) > 2 else 0
    step = math.ceil(count / 30)
    for ax, (arm, table) in zip(axes.flat, confusion.items(), strict=False):
        share = 100 * table / table.sum(1, keepdims=True).clip(1)
        ax.imshow(share, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100), interpolation="nearest")
        ax.grid(False)
        ax.set_xticks(range(0, count, step), labels=names[::step], rotation=turned)
        ax.set_yticks(range(0, count, step), labels=names[::step])
        ax.set(title=arm, xlabel="predicted")
        if count <= _WITH_NUMBERS:
            for (row, column), value in np.ndenumerate(share):
                if value >= 0.5:
                    dark = "white" if value > 40 else "#222222"
                    ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=dark)
    for ax in axes[:, 0]:
        ax.set_ylabel("class")
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"
