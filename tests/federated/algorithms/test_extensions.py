"""The report of a run with codebooks describes their extensions.

The report of a run without codebooks does not.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

import uefl
from tests.federated import sample_runs
from tests.federated.tiny import arm, finish, settings
from uefl.algorithms.base import registry
from uefl.algorithms.uefl import extension_findings
from uefl.findings import History
from uefl.report import plots
from uefl.report.run_folder import read_run
from uefl.report.write import write_report


def decided(threshold, values, criterion="entropy"):
    """Return records with a decision after each iteration of uefl."""
    lines = sample_runs.records()
    for line in lines:
        if line["arm"] == "uefl" and line["round"] in (1, 3):
            line |= dict(
                zip(
                    extension_findings.RECORDED[criterion],
                    (threshold, values[int(line["client"][-1])]),
                    strict=True,
                )
            )
    return lines


@pytest.mark.parametrize(
    ("threshold", "entropies", "said"),
    [
        (0.9, (0.5, 0.7, 0.6), r"entropy, 0\.700 nats .*silo-1, .*0\.900 .*ln 4 = 1\.386"),
        (1.5, (0.5, 0.7, 0.6), r"1\.500; .*4 classes .*ln 4 = 1\.386; .*gamma"),
        (0.55, (0.5, 0.5, 0.6), r"round 2, entropy .*0\.550 nats: silo-2 \(0\.600\); extended"),
    ],
    ids=["certain", "out-of-reach", "extended"],
)
def test_the_report_says_why_clients_were_extended_or_not(tmp_path, threshold, entropies, said):
    write_report(sample_runs.write(tmp_path, decided(threshold, entropies)))
    markdown, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert re.search(said, markdown)
    assert re.search(said, unescape(page))
    warned = re.search(r"^> \*\*uefl: .*1\.500 nats", markdown, re.MULTILINE) is not None
    assert warned == (threshold == 1.5)
    least, most = f"{min(entropies):.3f} silo-0", max(entropies)
    of = f"{most:.3f} silo-{entropies.index(most)}"
    row = ["uefl", "2", "entropy", f"{threshold:.3f}", least, of]
    assert f"| {' | '.join(row)} |" in markdown


def test_uncertain_clients_without_a_further_round_are_noted(tmp_path):
    write_report(sample_runs.write(tmp_path, decided(0.55, (0.5, 0.5, 0.6))))
    said = r"round 4, entropy .*0\.550 nats: silo-2 \(0\.600\); .*"
    assert re.search(said + r"\bended\b", (tmp_path / "report.md").read_text())
    write_report(sample_runs.write(tmp_path / "stopped", decided(0.55, (0.5, 0.5, 0.6)), finished=False))
    assert re.search(said + r"\bround\b.*\byet\b", (tmp_path / "stopped/report.md").read_text())


def test_a_decision_by_the_loss_is_named_and_has_no_bound(tmp_path):
    write_report(sample_runs.write(tmp_path, decided(1.5, (0.5, 0.7, 0.6), "loss"), criterion="loss"))
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"loss, 0\.700 nats .*silo-1, .*1\.500\.", text)
    assert "| uefl | 2 | loss | 1.500 | 0.500 silo-0 | 0.700 silo-1 | 0 | 1 |" in text
    assert "> **uefl: " not in text
    assert "ln 4" not in text


def test_report_separates_drawn_and_uncertain_clients(tmp_path):
    write_report(sample_runs.write(tmp_path, decided(0.55, (0.6, 0.5, 0.5)), extend="random"))
    said = r"0\.550 nats: silo-0 \(0\.600\); .*drawn.*: silo-2\."
    assert re.search(said, (tmp_path / "report.md").read_text())


@pytest.mark.parametrize(
    "keys", [{"criterion": "loss"}, {"extend": "random"}, {"extend": "random", "criterion": "loss"}], ids=str
)
def test_every_kind_of_decision_is_recorded(keys):
    records = finish(arm(settings("uefl", gamma=0.0, rounds=[1, 1], **keys))[0])
    made, last = extension_findings.decisions(History(records, {}, 3, True))
    assert made.criterion == keys.get("criterion", "entropy")
    assert made.threshold == min(made.measured.values())
    assert made.above
    assert len(made.extended) == len(made.above)
    assert last.extended == ()


def test_a_codebook_that_is_never_extended_is_noted(tmp_path):
    write_report(sample_runs.write(tmp_path, sample_runs.records(("fedavg", "one-codebook"))))
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\bone-codebook: .*codebook .*never", text)
    assert not re.search(r"\bfedavg: .*codebook", text)


WORDS = r"codeword|codebook|perplexity|extended|extension|threshold"


def test_arms_without_a_codebook_have_no_codebook_columns(tmp_path):
    out = tmp_path / "run"
    write_report(sample_runs.write(out, sample_runs.records(("fedavg", "fedbn"))))
    markdown, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    assert "Triangles" not in markdown
    assert not re.search(WORDS, markdown + re.sub(r"base64,[^\"]*", "", page), re.IGNORECASE)
    run = read_run(out)
    assert run.findings == {}
    for draw in (plots._draw_clients, plots._draw_many_clients):
        figure = draw(run, "entropy")
        assert not [line for ax in figure.axes for line in ax.lines if line.get_marker() == "v"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fedavg", "fedbn"]


def test_algorithms_choose_the_codebook_columns_of_a_report(tmp_path):
    run = read_run(sample_runs.write(tmp_path))
    figure = plots._draw_clients(run, "accuracy")
    assert "uefl: extended" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert len([line for ax in figure.axes for line in ax.lines if line.get_marker() == "v"]) == 1


def test_report_separates_initial_and_new_codewords(tmp_path):
    """Check the white line in the picture of codeword usage, and the caption below it."""
    lines = [
        line | ({"usage": list(range(8))} if "usage" in line else {})
        for line in sample_runs.records(("uefl",))
    ]
    shares = read_run(sample_runs.write(tmp_path, lines)).findings["uefl"].shares
    assert {len(counts) for counts in shares.counts.values()} == {8}
    assert shares.group == 4
    assert re.search(r"first 4\b", shares.label)
    per_segment = registry()["uefl"](codewords=4, segments=2, segment_codebooks=True)
    assert per_segment.initial_size == 8


@pytest.mark.parametrize("usage", [5, 0.5, [], [1], [-1] * 8, list(range(9))])
def test_counts_of_other_codewords_are_not_drawn(tmp_path, usage):
    """A client may send anything under this name."""
    lines = [line | {"usage": usage, "codewords": 8} for line in sample_runs.records(("uefl",))]
    assert read_run(sample_runs.write(tmp_path, lines)).findings["uefl"].shares is None


def test_modules_of_the_core_do_not_mention_codebooks():
    root = Path(uefl.__file__).parent
    files = [
        path for folder in ("report", "server", "client", "engines") for path in (root / folder).rglob("*.py")
    ]
    files += [
        root / f"{name}.py"
        for name in ("run", "aggregation", "uncertainty", "findings", "progress", "checkpoint", "cli")
    ]
    for path in files:
        # malloc has a THRESHOLD
        assert not re.search(r"[Cc]odeword|[Pp]erplexity|[Ee]xtended|[Tt]hreshold", path.read_text()), path
