"""What the report of a run with codebooks says of their extensions, and that a run without codebooks says nothing of them."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

import uefl
from tests.federated import run_folder
from uefl.report import plots, read_run, write_report


def decided(threshold, entropies, lines=None):
    """Records with a decision after each iteration of uefl."""
    lines = run_folder.records() if lines is None else lines
    for line in lines:
        if line["arm"] == "uefl" and line["round"] in (1, 3):
            line |= {"threshold": threshold, "deciding_entropy": entropies[int(line["client"][-1])]}
    return lines


@pytest.mark.parametrize(
    ("threshold", "entropies", "said"),
    [
        (
            0.9,
            (0.5, 0.7, 0.6),
            "the highest entropy, 0.700 nats of silo-1, is not above the threshold of 0.900 (at most it could be ln 4 = 1.386)",
        ),
        (1.5, (0.5, 0.7, 0.6), "is not above the threshold of 1.500; no entropy over 4 classes can exceed ln 4 = 1.386; lower gamma"),
        (0.55, (0.5, 0.5, 0.6), "after round 2, above the threshold of 0.550 nats: silo-2 (0.600); extended before the next round"),
    ],
    ids=["certain", "out-of-reach", "extended"],
)
def test_the_report_says_why_clients_were_extended_or_not(tmp_path, threshold, entropies, said):
    write_report(run_folder.write(tmp_path, decided(threshold, entropies)))
    markdown, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert said in markdown
    assert said in unescape(page)
    warned = "> **uefl: the threshold of 1.500 nats cannot be reached" in markdown
    assert warned == (threshold == 1.5)
    row = ["uefl", "2", f"{threshold:.3f}", f"{min(entropies):.3f} silo-0", f"{max(entropies):.3f} silo-{entropies.index(max(entropies))}"]
    assert f"| {' | '.join(row)} |" in markdown


def test_clients_above_the_last_threshold_have_no_round_left(tmp_path):
    write_report(run_folder.write(tmp_path, decided(0.55, (0.5, 0.5, 0.6))))
    assert "after round 4, above the threshold of 0.550 nats: silo-2 (0.600); the arm ended there" in (tmp_path / "report.md").read_text()


def test_a_codebook_that_is_never_extended_is_said(tmp_path):
    write_report(run_folder.write(tmp_path, run_folder.records(("fedavg", "one-codebook"))))
    text = (tmp_path / "report.md").read_text()
    assert "one-codebook: its codebook is never extended." in text
    assert "fedavg: its codebook" not in text


WORDS = r"codeword|codebook|perplexity|extended|extension|threshold"


def test_arms_without_a_codebook_show_nothing_of_one(tmp_path):
    out = tmp_path / "run"
    write_report(run_folder.write(out, run_folder.records(("fedavg", "fedbn"))))
    markdown, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    assert "Triangles" not in markdown
    assert not re.search(WORDS, markdown + re.sub(r"base64,[^\"]*", "", page), re.IGNORECASE)
    run = read_run(out)
    assert run.findings == {}
    for draw in (plots._draw_clients, plots._draw_many_clients):
        figure = draw(run, "entropy")
        assert not [line for ax in figure.axes for line in ax.lines if line.get_marker() == "v"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "fedbn"]


def test_the_algorithms_say_what_a_report_shows_of_codebooks(tmp_path):
    run = read_run(run_folder.write(tmp_path))
    figure = plots._draw_clients(run, "accuracy")
    assert "uefl: extended" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert len([line for ax in figure.axes for line in ax.lines if line.get_marker() == "v"]) == 1


def test_the_frame_has_no_word_for_codebooks():
    root = Path(uefl.__file__).parent
    files = [path for folder in ("report", "server", "client", "engines") for path in (root / folder).rglob("*.py")]
    files += [root / f"{name}.py" for name in ("run", "aggregation", "uncertainty", "findings", "progress", "checkpoint", "cli")]
    for path in files:
        assert not re.search(r"[Cc]odeword|[Pp]erplexity|[Ee]xtended|[Tt]hreshold", path.read_text()), path  # malloc has a THRESHOLD
