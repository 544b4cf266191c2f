"""Draw the picture of the README: ``python -m benchmarks.overview``.

The picture compares each kernel with its fastest peer, on a CPU and on a GPU. It also
shows kernels that are slower than the peer. All numbers come from ``results/``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from . import results
from .cases import ours

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "overview.png"


class ResultFile(NamedTuple):
    """A file of results and how the picture shows it."""

    file: str
    name: str
    color: str
    gpu: bool = False


class OverviewRow(NamedTuple):
    """One kernel: the op and its shape on a CPU and on a GPU."""

    title: str
    op: str
    cpu: str
    gpu: str


MACHINES = (
    ResultFile("intel-r-xeon-r-processor.csv", "Xeon with AMX, 2 threads", "#0072B2"),
    ResultFile("amd-epyc-family-25-model-17-held-to-avx2.csv", "EPYC with AVX2, 2 threads", "#56B4E9"),
    ResultFile("nvidia-h100-80gb-hbm3.csv", "H100", "#E69F00", gpu=True),
)
ROWS = (
    OverviewRow("nearest codeword, d 64", "vq_assign", "200000x64x256", "1000000x64x256"),
    OverviewRow("nearest codeword, d 512", "vq_assign", "50000x512x256", "1048576x512x1024xfloat16"),
    OverviewRow("VectorQuantize step, large", "layer", "64x1024x256x1024", "64x1024x256x1024"),
    OverviewRow(
        "VectorQuantize step, small",
        "layer",
        "1024x9x512x64xstraight_through",
        "1024x9x512x64xstraight_through",
    ),
    OverviewRow("ten Lloyd iterations", "kmeans_lloyd", "262144x64x256", "1048576x64x256"),
)
SHOWN = {"addmm+argmin": "torch"}
"""provider: its name in the picture, if the names differ"""


def ratio(rows: list[dict[str, str]], op: str, shape: str) -> tuple[float, str]:
    """Return how many times faster our exact kernel is than its fastest peer, and the name of the peer.

    A row with an empty column ``error``, such as a bare matrix product, computes no result and is not a peer.
    """
    found = [row for row in rows if (row["op"], row["shape"]) == (op, shape)]
    found = [row for row in found if row["threads"] == max((row["threads"] for row in found), key=int)]
    own = min(float(row["median_ms"]) for row in found if row["provider"] == "uefl")
    peers = [
        (float(row["median_ms"]), row["provider"])
        for row in found
        if not ours(row["provider"]) and row["error"]
    ]
    time, name = min(peers)
    return time / own, name


def draw(folder: Path = results.FOLDER) -> Figure:
    """Draw one group of bars for each row and one bar for each machine."""
    figure, axes = plt.subplots(figsize=(7, 4.3))
    thickness = 0.8 / len(MACHINES)
    for j, machine in enumerate(MACHINES):
        rows = results.load(folder / machine.file)
        for i, row in enumerate(ROWS):
            times, peer = ratio(rows, row.op, row.gpu if machine.gpu else row.cpu)
            y = i + (j - (len(MACHINES) - 1) / 2) * thickness
            axes.barh(y, times - 1, left=1, height=thickness * 0.9, color=machine.color, label=machine.name)
            where = (max(times, 1), y)
            axes.annotate(
                f"{times:.2g}  {SHOWN.get(peer, peer)}",
                where,
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.axvline(1, color="#404040", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 130)
    axes.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_yticks(range(len(ROWS)), [row.title for row in ROWS])
    axes.invert_yaxis()
    axes.set_xlabel(
        "times faster than the fastest peer, named at the bar (log scale; below 1 the peer is faster)",
        fontsize=8,
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="upper center", ncols=len(MACHINES), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overview", description="draw the picture of the README"
    )
    parser.add_argument(
        "--out", type=Path, default=PICTURE, help=f"the picture (default: {PICTURE.name} in docs/images)"
    )
    figure = draw()
    figure.savefig(parser.parse_args(arguments).out, dpi=200)
    plt.close(figure)


if __name__ == "__main__":
    main()
