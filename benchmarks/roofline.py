"""Draw saved results: ``python -m benchmarks.roofline [results/<machine>.csv] [--threads N]``, or ``make bench-plot``.

Beside the .csv, ``<machine>-roofline.png``: every shape against what the machine can do at most, and ``<machine>-<op>.png``: how
many times faster ours is than each peer.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from . import results
from .registry import ours

Row = dict[str, str]
COLOURS = {"amx": "#0072B2", "avx512": "#E69F00", "": "#0072B2"}  # Okabe and Ito: told apart by the colour-blind, and in grey
PEER, LINE = "#7F7F7F", "#404040"
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def number(row: Row, column: str) -> float:
    return float(row[column])


def colour(row: Row) -> str:
    return COLOURS.get(row["variant"], "#009E73")


def by_op(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """Op -> shape -> rows."""
    table: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row["op"]][row["shape"]].append(row)
    return table


def mains(rows: list[Row]) -> list[Row]:
    """Ours in every variant, the best first."""
    return sorted((row for row in rows if row["provider"] == "uefl"), key=lambda row: number(row, "median_ms"))


def peers(rows: list[Row]) -> list[Row]:
    """Those that give an answer, the fastest first; a ruler gives none."""
    return sorted((row for row in rows if not ours(row["provider"]) and row["error"]), key=lambda row: number(row, "median_ms"))


# --- the roofline -------------------------------------------------------------------------------------------------------


def roofline(rows: list[Row]) -> Figure:
    """Operations per second over operations per byte: ours, the fastest peer, and the machine's limits."""
    table = by_op(rows)
    limits = [row for shapes in [table.pop("limits", {})] for found in shapes.values() for row in found]
    figure, axes = plt.subplots(figsize=(11, 6.5))
    names = []
    for op, shapes in table.items():
        for shape, found in shapes.items():
            if mains(found):
                names.append(f"{len(names) + 1:>2}  {op} {shape}")
                _column(axes, str(len(names)), found)
    low, high = axes.get_xlim()
    _ceilings(axes, limits, low, high)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="operations per byte that must move", ylabel="GFLOP/s")
    axes.xaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), loc="lower right", frameon=False)
    figure.text(0.715, 0.5, "\n".join(names), family="monospace", fontsize=8, va="center")
    figure.subplots_adjust(left=0.07, right=0.7, top=0.93, bottom=0.09)
    return figure


def _column(axes: Axes, label: str, found: list[Row]) -> None:
    """One shape: ours in every variant above the fastest peer, on one vertical line."""
    best = mains(found)[0]
    intensity = number(best, "gflop_s") / number(best, "gb_s")
    heights = [number(row, "gflop_s") for row in (*mains(found), *peers(found)[:1])]
    axes.plot([intensity] * 2, [min(heights), max(heights)], color="#D0D0D0", linewidth=1, zorder=1)
    for row in peers(found)[:1]:
        axes.plot(intensity, number(row, "gflop_s"), "D", color="white", markeredgecolor=PEER, zorder=2, label="the fastest peer")
    for row, marker in zip(mains(found), "os^v", strict=False):
        axes.plot(intensity, number(row, "gflop_s"), marker, color=colour(row), zorder=3, label=f"ours, {row['variant'] or row['machine']}")
    axes.annotate(label, (intensity, max(heights)), (0, 5), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")


def _ceilings(axes: Axes, limits: list[Row], low: float, high: float) -> None:
    moved = [row for row in limits if row["shape"] in ("copy", "read")]
    roof = max((number(row, "gflop_s") for row in limits if row not in moved), default=float("inf"))
    for row in moved:
        slope = number(row, "gb_s")
        end = min(high, roof / slope)
        axes.plot([low, end], [low * slope, end * slope], color=LINE, linewidth=1, linestyle="-" if row["shape"] == "read" else ":")
        axes.annotate(f"{row['shape']}, {slope:.0f} GB/s", (low, low * slope), (4, 4), textcoords="offset points", fontsize=8, color=LINE)
    for row in limits:
        if row not in moved:
            rate, style = number(row, "gflop_s"), "-" if row["provider"] == "units" else "--"
            what = f"{row['shape']} {'arithmetic units' if row['provider'] == 'units' else 'matrix product of torch'}, {rate:.0f} GFLOP/s"
            axes.axhline(rate, color=LINE, linewidth=1, linestyle=style)
            axes.annotate(what, (high, rate), (-2, 3), textcoords="offset points", ha="right", fontsize=8, color=LINE)


# --- the ratios ---------------------------------------------------------------------------------------------------------


def ratios(op: str, shapes: dict[str, list[Row]]) -> Figure:
    """A panel per peer and ruler, a group of bars per shape: its time over ours."""
    others = list(dict.fromkeys(row["provider"] for found in shapes.values() for row in found if not ours(row["provider"])))
    variants = list(dict.fromkeys(row["variant"] for found in shapes.values() for row in mains(found)))
    width, thickness = max(1.55 * len(others) + 2.2, 6.0), 0.8 / len(variants)
    height = 0.42 * len(shapes) * max(1, len(variants) / 2) + 1.5
    figure, panels = plt.subplots(1, len(others), sharex=True, sharey=True, squeeze=False, figsize=(width, height))
    for panel, other in zip(panels[0], others, strict=True):
        for i, found in enumerate(shapes.values()):
            for theirs in (row for row in found if row["provider"] == other):
                for j, row in enumerate(mains(found)):
                    ratio = number(theirs, "median_ms") / number(row, "median_ms")
                    y = i + (j - (len(variants) - 1) / 2) * thickness
                    panel.barh(
                        y, ratio - 1, left=1, height=thickness * 0.92, color=colour(row), label=f"ours, {row['variant'] or row['machine']}"
                    )
                    panel.annotate(f"{ratio:.2g}", (max(ratio, 1), y), (2, 0), textcoords="offset points", va="center", fontsize=7)
        panel.axvline(1, color=LINE, linewidth=1)
        panel.set_title(other, fontsize=8)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(10, (1, 3)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(PLAIN)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    low, high = panels[0][0].get_xlim()
    panels[0][0].set_xlim(min(low, 0.9), high * 1.6)
    panels[0][0].set_yticks(range(len(shapes)), list(shapes))
    panels[0][0].invert_yaxis()
    figure.supxlabel("times faster than the peer (log scale)", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="upper right", ncols=len(unique), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    return figure


def draw(path: Path, threads: str | None) -> list[Path]:
    """Draw everything in one file of results; the pictures' paths."""
    rows = results.load(path)
    threads = threads or max((row["threads"] for row in rows), key=int)
    rows = [row for row in rows if row["threads"] == threads]
    figures = {"roofline": roofline(rows)}
    figures |= {op: ratios(op, shapes) for op, shapes in by_op(rows).items() if any(mains(found) for found in shapes.values())}
    drawn = []
    for name, figure in figures.items():
        title = f"{name}: {rows[0]['machine']}, {threads} thread{'s' if threads != '1' else ''}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        drawn.append(path.with_name(f"{path.stem}-{name}.png"))
        figure.savefig(drawn[-1], dpi=150)
        plt.close(figure)
    return drawn


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description="draw saved results")
    parser.add_argument("csv", type=Path, nargs="*", help="files of results (default: all of benchmarks/results)")
    parser.add_argument("--threads", help="only runs on so many threads (default: the most)")
    options = parser.parse_args(arguments)
    files = options.csv or sorted(results.FOLDER.glob("*.csv"))
    if missing := [str(path) for path in files if not path.is_file()] or ([] if files else [f"{results.FOLDER}/*.csv"]):
        parser.error(f"no file {', '.join(missing)}; python -m benchmarks.run --save writes one")
    for path in files:
        print(*draw(path, options.threads), sep="\n")


if __name__ == "__main__":
    main()
