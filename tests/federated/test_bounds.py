"""The bounds of docs/theory.md, compared with plain formulas, and measured on a finished run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import uefl
from reproduction import bounds
from uefl.data import build


def test_hoeffding_over_all_cells():
    assert math.exp(bounds.mean_bound(100, 3 * math.log(4))) == pytest.approx(
        math.sqrt(math.log(2 * 4**3 / 0.05) / 200)
    )


def test_gap_over_cells_and_classes():
    pairs = 7 * 10
    expected = 0.5 * math.sqrt(2 * math.log(2**pairs / 0.05) / 1000)
    assert math.exp(bounds.gap_bound(1000, math.log(7), 10)) == pytest.approx(expected)


def test_a_gap_larger_than_any_float_has_a_logarithm():
    assert bounds.gap_bound(800, 5000.0, 10) == pytest.approx(2500, rel=0.01)


def test_balls_that_cover_the_features():
    assert bounds.covering(25, 4) == pytest.approx(4 * math.log(40))


def test_largest_difference_of_frequencies():
    first = torch.tensor([[0, 1], [0, 1], [2, 2], [0, 0]])
    second = torch.tensor([[0, 1], [1, 0]])
    assert bounds.largest_difference(first, second) == 0.5  # [1, 0]: 0 of 4, 1 of 2


def test_a_finished_run(finished):
    run = uefl.load(finished[0])
    found = {arm: list(bounds.measure(run, arm, None)) for arm in ("fedavg", "uefl")}
    last = run.metrics.query("arm == 'uefl' and round == 3")
    for client, codewords in zip(found["uefl"], last["codewords"], strict=True):
        assert (client.n, client.tests, client.classes) == (36, 20, 10)
        assert client.log_cells == pytest.approx(4 * math.log(codewords))  # four segments
        assert 0 < client.deviation < bounds.bounds(client)[0]
    assert all(math.isnan(client.deviation) for client in found["fedavg"])
    assert all(len(client.changed) == 3 and client.changed[2] > 0 for client in found["fedavg"])


def test_the_gap_is_of_training_and_test_images(finished):
    run, found = uefl.load(finished[0]), []
    model, config = run.model("fedavg"), run.config
    for client in build(config.data, kind="labeled", seed=config.run.seed, data_root=None).clients:
        train, test = (
            float((model.predict(split.images).argmax(1) == split.labels).double().mean())
            for split in (client.load().train, client.load().test)
        )
        found.append(train - test)
    assert [client.gap for client in bounds.measure(run, "fedavg", None)] == pytest.approx(found)
    assert any(found)


def test_the_table_of_a_run(finished, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bounds.py", str(finished[0])])
    bounds.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| arm", "| :--", "| fedavg", "| uefl"]
    assert lines[2].split(" | ")[1] == "-"
    assert len({line.count("|") for line in lines}) == 1


def test_the_page_has_the_table_of_the_saved_measurements():
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    assert bounds.table(bounds.saved()) in page


def test_saved_measurements_are_read_again(finished, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bounds, "RESULTS", tmp_path / "bounds.json")
    monkeypatch.setattr("sys.argv", ["bounds.py", str(finished[0]), "--save"])
    bounds.main()
    monkeypatch.setattr("sys.argv", ["bounds.py"])
    bounds.main()
    first, second = capsys.readouterr().out.split("| arm ")[1:]
    assert first == second
