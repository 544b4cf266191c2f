"""The style of all pictures: fonts, colors, lines of arms, names of clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D

from ..config import Config
from .run_folder import RunFolder

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so pictures are the same on all machines
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "lines.scale_dashes": False,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "text.parse_math": False,  # a client may have any name
    "savefig.dpi": 150,
}
# color and dashes by the place of an arm: the color-blind safe palette of Okabe and Ito, and dashes (in
# points) for print
_STYLES: tuple[tuple[str, Any], ...] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (7, 2))),
    ("#009E73", (0, (7, 2, 1.5, 2))),
    ("#CC79A7", (0, (2, 1.5))),
    ("#777777", (0, (4, 2, 1.5, 2, 1.5, 2))),
    ("#000000", (0, (12, 2))),
    ("#56B4E9", (0, (4, 1.5))),
    ("#E69F00", (0, (12, 2, 1.5, 2))),
)
_WIDTH = 1.7  # width of lines, in points
_STRIPE = 4.0
_EQUAL = 0.004  # share of the range of all curves, less than the width of a line
Matrix = npt.NDArray[np.float64]


class Picture(NamedTuple):
    """A file in the folder ``plots``, with its text alternative and its caption."""

    name: str
    alt: str
    caption: str


Drawing = tuple[Picture, Figure]


class Curves(Protocol):
    """Metrics of several arms over the rounds: a run, or several runs on the same data."""

    @property
    def arms(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the outcome of each arm, with its number of ``rounds``."""

    @property
    def config(self) -> Config:
        """Return the configuration."""

    def measured(self, key: str) -> bool:
        """Return whether any arm has a metric."""

    def series(self, arm: str, key: str) -> Matrix:
        """Return a metric as ``[rounds, clients or runs]``."""


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure, with width and height in inches."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def panels(
    count: int, columns: int, width: float, height: float, above: float = 0.0, least: float = 4.2, **keys: Any
) -> tuple[Figure, Any]:
    """Return a figure with ``count`` panels, and its axes ``[rows, columns]`` as an array of NumPy.

    ``width`` and ``height`` are of a panel, ``above`` is the height for a legend, and ``least`` the smallest
    width of the figure, in inches.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = canvas(max(width * columns, least), height * rows + above)
    axes = figure.subplots(rows, columns, squeeze=False, **keys)
    for ax in axes.flat[count:]:
        ax.set_axis_off()
    return figure, axes


def color(run: Curves, arm: str) -> str:
    """Return the color of an arm."""
    return _STYLES[list(run.arms).index(arm) % len(_STYLES)][0]


def line(arms: Iterable[str], arm: str) -> dict[str, Any]:
    """Return the line style of an arm by its place among ``arms``."""
    arms = list(arms)
    place = arms.index(arm)
    again, look = divmod(place, len(_STYLES))
    return {
        "color": _STYLES[look][0],
        "linestyle": _STYLES[(look + again) % len(_STYLES)][1],  # a color comes again with other dashes
        "linewidth": _WIDTH,
        "zorder": 2 + place / len(arms),
    }


def draw(
    ax: Axes, run: Curves, curves: Mapping[str, Matrix], marker: Callable[[Matrix], str] = lambda curve: ""
) -> None:
    """Draw the curves ``[rounds]`` of all arms, and stripes of all their colors where arms agree."""
    for arm, curve in curves.items():
        ax.plot(np.arange(1, len(curve) + 1), curve, marker=marker(curve), **line(run.arms, arm))
    for span in shared(curves):
        rounds = np.arange(span.start, span.stop)
        for place, arm in enumerate(span.arms):
            gap = _STRIPE * (len(span.arms) - 1)
            stripes = {
                "linestyle": (-_STRIPE * place % (_STRIPE + gap), (_STRIPE, gap)),
                "dash_capstyle": "butt",
                "zorder": 3.5,
            }
            ax.plot(rounds + 1, curves[arm][rounds], **line(run.arms, arm) | stripes)


class Span(NamedTuple):
    """A range of rounds, counted from 0, with equal curves of some arms."""

    arms: tuple[str, ...]
    start: int
    stop: int


def shared(curves: Mapping[str, Matrix]) -> list[Span]:
    """Return the longest spans of at least two rounds with equal curves, in the order of their starts."""
    known = np.concatenate([curve[np.isfinite(curve)] for curve in curves.values()])
    within = _EQUAL * float(np.ptp(known)) if len(known) else 0.0
    spans: list[Span] = []
    for start in range(max(map(len, curves.values())) - 1):
        here = [
            arm
            for arm, curve in curves.items()
            if len(curve) > start + 1 and np.isfinite(curve[start : start + 2]).all()
        ]
        while here:
            first, *rest = here
            near = [
                arm
                for arm in rest
                if np.abs(curves[arm][start : start + 2] - curves[first][start : start + 2]).max() <= within
            ]
            group = (first, *near)
            here = [arm for arm in rest if arm not in near]
            before = next((span for span in spans if span.arms == group and span.stop == start + 1), None)
            if before is not None:
                spans[spans.index(before)] = before._replace(stop=start + 2)
            elif near:
                spans.append(Span(group, start, start + 2))
    return spans


def handles(arms: Iterable[str]) -> list[Line2D]:
    """Return the legend entries of all arms."""
    arms = list(arms)
    return [Line2D([], [], label=arm, **line(arms, arm)) for arm in arms]


def legend(figure: Figure, entries: list[Line2D]) -> None:
    """Put a legend above all panels, in the number of columns that fits."""
    longest = max(len(str(entry.get_label())) for entry in entries)
    # in points: the letters, and the line in front of them
    columns = max(1, min(int(figure.get_figwidth() * 72 / (5.0 * longest + 42)), len(entries)))
    more = max(0, math.ceil(len(entries) / columns) - 3)  # rows for which the figure has no room
    figure.set_figheight(figure.get_figheight() + 0.19 * more)
    figure.legend(handles=entries, loc="outside upper left", ncols=columns)


def drawn(run: RunFolder) -> dict[str, str]:
    """Return the names of the clients for pictures, with a number for letters that the font lacks."""
    return dict(zip(run.labels, _readable(run.labels.values(), "client"), strict=True))


def drawn_classes(run: RunFolder) -> list[str]:
    """Return the names of the classes for pictures, with the same replacement."""
    return _readable(run.classes, "class")


def replaced(run: RunFolder) -> str:
    """Return the replaced names of clients for a caption, or an empty text if there are none."""
    return _replaced(drawn(run).values(), run.labels.values())


def replaced_classes(run: RunFolder) -> str:
    """Return the replaced names of classes for a caption, or an empty text if there are none."""
    return _replaced(drawn_classes(run), run.classes)


def _readable(names: Iterable[str], kind: str) -> list[str]:
    font = get_font(findfont(RC["font.family"]))
    return [
        name if all(font.get_char_index(ord(c)) for c in name) else f"{kind} {place}"
        for place, name in enumerate(names, 1)
    ]


def _replaced(shown: Iterable[str], names: Iterable[str]) -> str:
    other = [f"{one}: {name}" for one, name in zip(shown, names, strict=True) if one != name]
    return f" {'; '.join(other)}." if other else ""
