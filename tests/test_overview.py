"""Check the picture of the README."""

import matplotlib.pyplot as plt
import pytest

from benchmarks import overview, results


@pytest.mark.parametrize("machine", overview.MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("row", overview.ROWS, ids=lambda row: row.title)
def test_every_bar_comes_from_a_saved_row(row, machine):
    saved = results.load(results.FOLDER / machine.file)
    times, peer = overview.ratio(saved, row.op, row.gpu if machine.gpu else row.cpu)
    assert times > 0
    assert peer in {found["provider"] for found in saved}


def test_fastest_peer_is_another_package():
    def row(provider, ms, error="0", threads="2"):
        return {
            "op": "o",
            "shape": "s",
            "threads": threads,
            "provider": provider,
            "median_ms": str(ms),
            "error": error,
        }

    rows = [
        row("uefl", 2),
        row("uefl-fast", 1),
        row("matmul", 1, ""),
        row("slow", 9),
        row("quick", 5),
        row("quick", 1, threads="1"),
    ]
    assert overview.ratio(rows, "o", "s") == (2.5, "quick")


def test_the_picture_has_a_bar_for_each_row_and_machine():
    figure = overview.draw()
    assert len(figure.axes[0].patches) == len(overview.ROWS) * len(overview.MACHINES)
    plt.close(figure)
