"""Draw saved results.

Usage: ``python -m benchmarks.roofline [results/<machine>.csv] [--threads N]``, or ``make bench-plot``.

The program writes two kinds of pictures into the folder of the .csv. ``<machine>-roofline.png`` compares
every shape with the limits of the machine. ``<machine>-<op>.png`` shows how many times faster ours is than
each peer.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from . import results
from .cases import ours

ResultRow = dict[str, str]
# Okabe and Ito: distinct for the color-blind, and in gray
COLORS = {"amx": "#0072B2", "avx512vnni": "#CC79A7", "avx512": "#E69F00", "": "#0072B2"}
MARKERS = {"amx": "o", "avx512": "s", "avx512vnni": "D", "": "o"}
BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8}  # in front of lines
PEER, LINE = "#7F7F7F", "#404040"
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def number(row: ResultRow, column: str) -> float:
    return float(row[column])


def color(row: ResultRow) -> str:
    return COLORS.get(row["variant"], "#009E73")


def label(row: ResultRow) -> str:
    return f"ours, {row['variant'] or row['machine']}"


def _legend(add: Callable[..., Any], axes: Axes, **where: Any) -> None:
    """Add a legend with every label once."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    add(list(unique.values()), list(unique), frameon=False, **where)


def by_op(rows: list[ResultRow]) -> dict[str, dict[str, list[ResultRow]]]:
    """Return the rows by op and shape."""
    table: dict[str, dict[str, list[ResultRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row["op"]][row["shape"]].append(row)
    return table


def mains(rows: list[ResultRow]) -> list[ResultRow]:
    """Return our rows in every variant, the best first."""
    return sorted(
        (row for row in rows if row["provider"] == "uefl"), key=lambda row: number(row, "median_ms")
    )


def peers(rows: list[ResultRow]) -> list[ResultRow]:
    """Return the rows of the peers, the fastest first.

    The rows of a lower bound are left out: they have no error, because a lower bound gives no answer.
    """
    return sorted(
        (row for row in rows if not ours(row["provider"]) and row["error"]),
        key=lambda row: number(row, "median_ms"),
    )


# --- the roofline -----------------------------------------------------------------------------------------


def placed(row: ResultRow) -> bool:
    """Return whether a row can be drawn.

    The rates of shapes that are too small to measure are rounded to 0.
    """
    return number(row, "gflop_s") > 0 and number(row, "gb_s") > 0


def intensity(row: ResultRow) -> float:
    """Return the operations per byte that must move."""
    return number(row, "gflop_s") / number(row, "gb_s")


def roofline(rows: list[ResultRow]) -> Figure | None:
    """Draw ours and the fastest peer as points below the limits of the machine.

    A point is (operations per byte, operations per second). Return None if there is no row of ours.
    """
    table = by_op(rows)
    limits = [row for found in table.pop("limits", {}).values() for row in found]
    named = [(f"{op} {shape}", found) for op, shapes in table.items() for shape, found in shapes.items()]
    columns = [(name, found) for name, found in named if any(map(placed, mains(found)))]
    if not columns:
        return None
    where = [intensity(next(filter(placed, mains(found)))) for _, found in columns]

    figure, axes = plt.subplots(figsize=(13, 7))
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that must move", ylabel="GFLOP/s")
    for i, (_, found) in enumerate(columns):
        _column(axes, where[i], found)
        # numbers of close columns go to the sides
        crowd = [other for other in where if abs(other / where[i] - 1) < 0.06]
        side = 0 if len(crowd) == 1 else 1 if where[i] == max(crowd) else -1
        top = max(number(row, "gflop_s") for row in shown(found))
        shift, anchor = {0: (0, 8), 1: (6, 0), -1: (-6, 0)}[side], {0: "center", 1: "left", -1: "right"}[side]
        axes.annotate(
            str(i + 1),
            (where[i], top),
            shift,
            textcoords="offset points",
            ha=anchor,
            va="center",
            fontsize=8,
            bbox=BOX,
        )
    _ceilings(axes, limits)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PLAIN)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes.legend, axes, loc="lower right")
    key = "\n".join(f"{i:>2}  {name}" for i, (name, _) in enumerate(columns, 1))
    figure.text(0.77, 0.5, key, family="monospace", fontsize=8, va="center")
    figure.subplots_adjust(left=0.06, right=0.62, top=0.93, bottom=0.08)
    return figure


def shown(found: list[ResultRow]) -> list[ResultRow]:
    """Return our rows in every variant and the row of the fastest peer."""
    return [row for row in (*mains(found), *peers(found)[:1]) if placed(row)]


def _column(axes: Axes, x: float, found: list[ResultRow]) -> None:
    """Draw one shape: ours in every variant and the fastest peer, on one vertical line."""
    rows = shown(found)
    heights = [number(row, "gflop_s") for row in rows]
    axes.plot([x, x], [min(heights), max(heights)], color="#D0D0D0", linewidth=1, zorder=1)
    for row, height in zip(rows, heights, strict=True):
        if ours(row["provider"]):
            axes.plot(
                x, height, MARKERS.get(row["variant"], "^"), color=color(row), zorder=3, label=label(row)
            )
        else:
            axes.plot(x, height, "D", color="white", markeredgecolor=PEER, zorder=2, label="the fastest peer")


def _ceilings(axes: Axes, limits: list[ResultRow]) -> None:
    """Draw the bandwidth of memory as slopes and the peak of the arithmetic as horizontal lines."""
    moved = [row for row in limits if row["shape"] in ("copy", "read")]
    done = [row for row in limits if row not in moved]
    bandwidth = max((number(row, "gb_s") for row in moved), default=float("inf"))
    roof = max((number(row, "gflop_s") for row in done), default=float("inf"))
    low, high = axes.get_xlim()
    for row in moved:
        slope = number(row, "gb_s")
        end = min(high, roof / slope)
        style, text = "-" if slope == bandwidth else ":", f"{row['shape']}, {slope:.0f} GB/s"
        axes.plot(
            [low, end], [low * slope, end * slope], color=LINE, linewidth=1, linestyle=style, label=text
        )
    for row in done:
        rate, units = number(row, "gflop_s"), row["provider"] == "units"
        axes.plot(
            [rate / bandwidth, high], [rate, rate], color=LINE, linewidth=1, linestyle="-" if units else "--"
        )
        text = f"{row['shape']} {'units' if units else 'product'}, {rate:.0f}"
        axes.annotate(
            text,
            (high, rate),
            (4, 0),
            textcoords="offset points",
            va="bottom" if units else "top",
            fontsize=8,
            color=LINE,
        )
    axes.set_xlim(low, high)


# --- the ratios -------------------------------------------------------------------------------------------


def ratios(shapes: dict[str, list[ResultRow]]) -> Figure | None:
    """Draw a panel for each peer and lower bound.

    A group of bars shows, for each shape, its time divided by ours.

    Return None if there is nothing to compare.
    """
    others = list(
        dict.fromkeys(
            row["provider"] for found in shapes.values() for row in found if not ours(row["provider"])
        )
    )
    variants = list(dict.fromkeys(row["variant"] for found in shapes.values() for row in mains(found)))
    if not others or not variants:
        return None
    width, thickness = max(1.55 * len(others) + 2.2, 6.0), 0.8 / len(variants)
    height = 0.42 * len(shapes) * max(1, len(variants) / 2) + 1.5
    figure, panels = plt.subplots(
        1, len(others), sharex=True, sharey=True, squeeze=False, figsize=(width, height)
    )
    for panel, other in zip(panels[0], others, strict=True):
        for i, found in enumerate(shapes.values()):
            for theirs in (row for row in found if row["provider"] == other):
                for j, row in enumerate(mains(found)):
                    ratio = number(theirs, "median_ms") / number(row, "median_ms")
                    y = i + (j - (len(variants) - 1) / 2) * thickness
                    panel.barh(
                        y,
                        ratio - 1,
                        left=1,
                        height=thickness * 0.92,
                        color=color(row),
                        label=f"ours, {row['variant'] or row['machine']}",
                    )
                    panel.annotate(
                        f"{ratio:.2g}",
                        (max(ratio, 1), y),
                        (2, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=7,
                    )
        panel.axvline(1, color=LINE, linewidth=1)
        is_bound = not any(
            row["error"] for found in shapes.values() for row in found if row["provider"] == other
        )
        panel.set_title(f"lower bound: {other}" if is_bound else other, fontsize=8)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(10, (1, 3)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(PLAIN)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    low, high = panels[0][0].get_xlim()
    # bars below 1 have a tick, at 0.3
    panels[0][0].set_xlim(min(low, 0.28) if low < 0.9 else 0.9, high * 1.6)
    panels[0][0].set_yticks(range(len(shapes)), list(shapes))
    panels[0][0].invert_yaxis()
    figure.supxlabel("times faster than the peer or the lower bound (log scale)", fontsize=8)
    _legend(figure.legend, panels[0][0], loc="upper right", ncols=len(variants), fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    return figure


def draw(path: Path, threads: str | None) -> list[Path]:
    """Draw everything in one file of results, and return the paths of the pictures."""
    rows = results.load(path)
    threads = threads or max((row["threads"] for row in rows), key=int, default="")
    rows = [row for row in rows if row["threads"] == threads]
    figures = {"roofline": roofline(rows), **{op: ratios(shapes) for op, shapes in by_op(rows).items()}}
    drawn = []
    for name, figure in figures.items():
        if figure is None:
            continue
        title = f"{name}: {rows[0]['machine']}, {threads} thread{'s' if threads != '1' else ''}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        drawn.append(path.with_name(f"{path.stem}-{name}.png"))
        figure.savefig(drawn[-1], dpi=150)
        plt.close(figure)
    return drawn


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description="draw saved results")
    parser.add_argument(
        "csv", type=Path, nargs="*", help="files of results (default: all of benchmarks/results)"
    )
    parser.add_argument("--threads", help="only results with this number of threads (default: the largest)")
    options = parser.parse_args(arguments)
    files = options.csv or sorted(results.FOLDER.glob("*.csv"))
    if missing := [str(path) for path in files if not path.is_file()] or (
        [] if files else [f"{results.FOLDER}/*.csv"]
    ):
        parser.error(f"no file {', '.join(missing)}; python -m benchmarks.run --save writes one")
    for path in files:
        print(*draw(path, options.threads), sep="\n")


if __name__ == "__main__":
    main()
