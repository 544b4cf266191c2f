"""The report of a suite: seeds are paired, and missing runs are named."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from uefl.errors import UserError
from uefl.report.run_folder import read_run
from uefl.suites import report, suite

from . import sample_runs
from .test_suites import FEW, REPRODUCTION, TINY, tiny


def _collected(
    tmp_path: Path, text: str, changes: Callable[[suite.Job, dict], dict | None], seeds: int = 3, **keys: str
) -> report.SuiteResult:
    """Write the runs of a suite by hand, with changed records unless these are None, and collect them."""
    whole = suite.load(tiny(tmp_path, text))
    jobs = suite.jobs(whole, "cpu", seeds, tmp_path / "out", threads=1)
    for job in jobs:
        made = [(line, changes(job, line)) for line in sample_runs.records((job.arm,))]
        lines = [line | more for line, more in made if more is not None]
        if lines and not job.folder.exists():
            sample_runs.write(job.folder, lines, seed=job.seed, **keys)
    return report.collect(whole, "cpu", jobs, {})


def _finished(tmp_path: Path, accuracies: dict[str, list[float]]) -> report.SuiteResult:
    """Write runs of the case ``few`` by hand, with these accuracies by seed."""
    return _collected(tmp_path, FEW, lambda job, line: {"accuracy": accuracies[job.arm][job.seed]})


def _interval(differences: list[float]) -> str:
    mean = statistics.fmean(differences)
    half = 4.302653 * statistics.stdev(differences) / 3**0.5  # Student's t, two degrees of freedom, 97.5 %
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    fedavg, uefl = [0.5, 0.7, 0.9], [0.6, 0.77, 0.97]
    result = _finished(tmp_path, {"fedavg": fedavg, "uefl": uefl})
    header, rows = report.table(result).header, report.table(result).rows
    assert header == ["case / arm", "seeds", "accuracy", "paper", "minus fedavg, 95 %", "entropy"]
    assert rows[0][:5] == ["few / fedavg", "3", "0.700 ± 0.200", "-", ""]
    difference = _interval([b - a for a, b in zip(fedavg, uefl, strict=True)])
    assert difference.startswith("+0.080 [")
    assert rows[1][:5] == ["few / uefl", "3", "0.780 ± 0.185", "0.920", difference]


def test_every_measure_has_its_paired_difference(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5, 0.7, 0.9], "uefl": [0.6, 0.77, 0.97]})
    for seed, (of, entropy) in enumerate(((0.2, 0.1), (0.3, 0.5), (0.4, 0.4))):
        for arm, value in (("fedavg", of), ("uefl", entropy)):
            result.runs["few", arm][seed].arms[arm]["entropy"] = value
    said, table = report.differences(result)
    assert "fedavg" in said
    assert table.header == ["case / arm", "accuracy", "entropy"]
    assert table.rows == [["few / uefl", _interval([0.1, 0.07, 0.07]), _interval([-0.1, 0.2, 0.0])]]
    assert table in report.content(result, []).sections[0].elements
    more = replace(result, suite=result.suite.model_copy(update={"measures": ("accuracy", "usage")}))
    # a measure that the compared arm lacks has no difference
    assert report.differences(more)[1].header == ["case / arm", "accuracy"]
    one = replace(result, suite=result.suite.model_copy(update={"measures": ("accuracy",)}))
    assert report.differences(one) == []


def test_a_case_is_compared_with_an_arm_of_another_case(tmp_path: Path) -> None:
    """The other arm is FedAvg with its own learning rate."""
    text = TINY.replace('data.source = "cifar100"\n', 'training.lr = 0.5\nagainst = "few"\n').replace(
        "[cases.few]", '[cases.few]\narms = ["fedavg"]'
    )
    text = text.partition("[cases.few.paper]")[0] + "[cases.absent]" + text.partition("[cases.absent]")[2]
    accuracy = {
        "few/fedavg": [0.5, 0.7, 0.9],
        "absent/fedavg": [0.4, 0.6, 0.7],
        "absent/uefl": [0.6, 0.77, 0.97],
    }
    result = _collected(
        tmp_path, text, lambda job, line: {"accuracy": accuracy[f"{job.case}/{job.arm}"][job.seed]}
    )
    assert result.suite.configs("cpu")["absent"].training.lr == 0.5
    assert {row[0]: row[3] for row in report.table(result).rows} == {
        "few / fedavg": "",
        "absent / fedavg": _interval([-0.1, -0.1, -0.2]),
        "absent / uefl": _interval([0.1, 0.07, 0.07]),
    }
    assert report.differences(result)[1].rows == [
        ["absent / fedavg", _interval([-0.1, -0.1, -0.2]), _interval([0.0] * 3)],
        ["absent / uefl", _interval([0.1, 0.07, 0.07]), _interval([0.0] * 3)],
    ]
    assert re.search("absent .*fedavg .*few", str(report.content(result, []).sections[0].elements))
    only = replace(result, runs={place: runs for place, runs in result.runs.items() if place[0] == "few"})
    assert report.elsewhere(only) == []  # a case without runs has nothing to compare
    result.runs["few", "fedavg"][0].arms["fedavg"]["rounds"] = 1
    assert re.search("absent / uefl 4, fedavg .*few 1, 4", report.unequal(result)[0])


def test_a_damaged_run_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    folder = tmp_path / "out" / "few" / "uefl" / "seed-1"
    (folder / "summary.json").write_text("{")
    jobs = suite.jobs(result.suite, "cpu", 3, tmp_path / "out", threads=1)
    again = report.collect(result.suite, "cpu", jobs, {})
    assert list(again.values("few", "uefl", "accuracy")) == [0, 2]
    assert list(again.missing) == ["few/uefl/seed-1"]
    assert f" {folder}," in again.missing["few/uefl/seed-1"]


def test_the_report_has_validated_and_final_accuracy(tmp_path: Path) -> None:
    def validated(job: suite.Job, line: dict) -> dict:
        """Make the second round of fedavg the best one on validation images."""
        best = 0.9 if line["round"] == 1 else 0.8
        return {"validation_accuracy": best} if job.arm == "fedavg" else {}

    text = FEW.replace('"entropy"]', '"selected_accuracy"]')
    result = _collected(tmp_path, text, validated, seeds=1)
    # 0.1 x 2, and 0.01 of the mean client
    assert [row[-1] for row in report.table(result).rows] == ["0.210", "-"]
    assert "selected_accuracy" in str(report.content(result, []).sections[0].elements)
    other = _finished(tmp_path / "out", {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    assert "selected_accuracy" not in str(report.content(other, []).sections)


def test_measures_are_of_the_round_that_is_best_on_holdouts(tmp_path: Path) -> None:
    def measured(job: suite.Job, line: dict) -> dict:
        """Make the second of four rounds the best one on holdout images."""
        return {"holdout_accuracy": 0.9 if line["round"] == 1 else 0.8}

    result = _collected(tmp_path, FEW, measured, seeds=1, select="holdout")
    found = {"accuracy": 0.21, "entropy": 0.9, "last_accuracy": 0.21, "selected_accuracy": 0.21}
    for measure, value in (found | {"accuracy_last4": 0.26, "codewords": None, "nll_last4": 0.7}).items():
        values = result.values("few", "fedavg", measure)
        assert values == ({} if value is None else {0: pytest.approx(value)}), measure
    assert result.values("few", "uefl", "perplexity") == {0: 4.0}
    assert "holdout images" in str(report.content(result, []).sections[0].elements)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a report of three seeds, without a fourth one."""
    folder = tmp_path_factory.mktemp("written")
    found = _finished(folder, {"fedavg": [0.5] * 3, "uefl": [0.61234567] * 3})
    with_loss = found.suite.model_copy(update={"measures": (*found.suite.measures, "nll", "megabytes")})
    report.write(
        replace(found, suite=with_loss, missing={"few/uefl/seed-3": "/some/where: why"}), folder / "out"
    )
    return folder / "out"


def test_a_report_has_pages_pictures_and_numbers(written: Path) -> None:
    names = ("curves", "entropy", "nll", "perplexity", "sweep", "entropy-few-uefl", "usage-few-uefl")
    assert {path.name for path in (written / "plots").iterdir()} == {f"{name}.png" for name in names}
    assert "| few / uefl | 3 | 0.612 ± 0.000 | 0.920 |" in (written / "report.md").read_text()
    assert (written / "report.html").read_text().count("data:image/png") == 7
    numbers = json.loads((written / "results.json").read_text())
    rounds = len(sample_runs.records(("uefl",)))
    assert numbers["cases"]["few"]["uefl"]["megabytes"]["0"] == pytest.approx(1500e-6 * rounds)
    assert numbers["cases"]["few"]["uefl"]["accuracy"] == {
        str(seed): pytest.approx(0.61234567) for seed in range(3)
    }


def test_local_models_are_drawn_with_global_ones(tmp_path: Path) -> None:
    text = FEW.replace('"accuracy"', '"accuracy", "personalized_accuracy"', 1)
    result = _collected(tmp_path, text, lambda job, line: {"accuracy": 0.5, "personalized_accuracy": 0.75})
    report.write(result, tmp_path / "out")
    assert (tmp_path / "out" / "plots" / "local.png").exists()
    (ax,) = report._draw_local(result, ["accuracy"]).axes
    drawn = {float(line.get_linewidth()): set(line.get_ydata().tolist()) for line in ax.lines}
    assert drawn == {2.0: {0.5}, 0.8: {0.75}}


def test_an_average_over_cases_is_paired_by_seed(tmp_path: Path) -> None:
    """The average uses the seeds and the arms that all its cases have."""
    text = (
        TINY.replace('data.source = "cifar100"\n', "arms.fedprox = {}\n")
        + '[averages.both]\ncases = ["few", "absent"]\n[averages.both.paper]\nuefl = { accuracy = 0.5 }\n'
    )
    given = {
        ("few", "fedavg"): [0.1, 0.3, 0.2],
        ("few", "uefl"): [0.2, 0.5],
        ("absent", "uefl"): [0.4, 0.5, 0.9],
    }

    def change(job: suite.Job, line: dict) -> dict | None:
        accuracies = given.get((job.case, job.arm), given["few", "fedavg"])  # cases share the runs of fedavg
        return {"accuracy": accuracies[job.seed]} if job.seed < len(accuracies) else None

    result = _collected(tmp_path, text, change)
    assert result.arms("both") == ["fedavg", "uefl"]
    assert result.values("both", "uefl", "accuracy") == pytest.approx({0: 0.3, 1: 0.5})
    rows = {row[0]: row for row in report.table(result).rows}
    assert rows["both / uefl"][1:4] == ["2", "0.400 ± 0.141", "0.500"]
    assert rows["both / uefl"][4].startswith("+0.200 [")  # 0.3 - 0.1, 0.5 - 0.3
    assert rows["both / fedavg"][4] == ""


def test_a_sweep_has_columns_per_panel_and_paired_intervals(tmp_path: Path) -> None:
    text = TINY.replace("x = 4", 'x = 4\nlabel = "four"\npanel = "one"').replace(
        "x = 8", 'x = 8\nlabel = "eight"\npanel = "two"'
    )
    text = text.replace('data.source = "cifar100"', 'data.normalize = "raw"')

    def change(job: suite.Job, line: dict) -> dict:
        return {"accuracy": (0.5 if job.arm == "fedavg" else 0.6) + 0.01 * job.seed * (job.case == "few")}

    figure = report._draw_sweep(_collected(tmp_path, text, change), "accuracy")
    above, below = figure.axes[:2], figure.axes[2:4]
    assert [ax.get_title() for ax in above] == ["one", "two"]
    assert [[label.get_text() for label in ax.get_xticklabels()] for ax in below] == [["four"], ["eight"]]
    (left, *_), segments = (
        below[0].containers,
        [container.lines[2][0].get_segments() for container in below[0].containers],
    )
    assert [container.lines[0].get_ydata().tolist() for container in below[0].containers][1] == pytest.approx(
        [0.1]
    )
    assert left.has_yerr
    assert all(abs(low[1] - high[1]) < 1e-9 for bars in segments for low, high in bars), (
        "what seeds do to both arms alike is left out"
    )
    (bar,) = above[0].containers[0].lines[2][0].get_segments()
    assert bar[1][1] - bar[0][1] == pytest.approx(2 * 4.302653 * 0.01 / 3**0.5, abs=1e-6)


def test_best_measures_are_of_the_round_with_highest_accuracy(tmp_path: Path) -> None:
    text = FEW.replace('"accuracy", "entropy"]', '"best_accuracy", "best_entropy", "last_accuracy"]')
    at = {0: (0.5, 1.0), 1: (0.8, 0.7), 2: (0.6, 0.3)}
    result = _collected(
        tmp_path,
        text.replace("uefl = { acc", "uefl = { best_acc"),
        lambda job, line: dict(zip(("accuracy", "entropy"), at[min(line["round"], 2)], strict=True)),
        seeds=1,
    )
    found = [result.values("few", "fedavg", measure)[0] for measure in result.suite.measures]
    assert found == pytest.approx([0.8, 0.7, 0.6])
    assert "highest" in str(report.content(result, []).sections[0].elements)


def _tool():
    spec = importlib.util.spec_from_file_location(
        "results_tool", REPRODUCTION.parent / "tools" / "suite_results.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize("name", ["table2", "local-epochs"])
def test_tables_of_a_saved_page_match_its_numbers(name: str, tmp_path: Path) -> None:
    for kind in ("md", "json"):
        shutil.copy(REPRODUCTION / "results" / f"{name}.{kind}", tmp_path)
    before = (tmp_path / f"{name}.md").read_text()
    (tmp_path / f"{name}.md").write_text(before.replace("0.", "9."))
    _tool().again(tmp_path / f"{name}.json")
    tables = [line for line in before.splitlines() if line.startswith("|")]
    assert [
        line for line in (tmp_path / f"{name}.md").read_text().splitlines() if line.startswith("|")
    ] == tables
    assert not list(tmp_path.glob("*.png"))


def test_a_sweep_and_a_front_are_drawn_again(tmp_path: Path) -> None:
    for kind in ("md", "json"):
        shutil.copy(REPRODUCTION / "results" / f"fedul-h.{kind}", tmp_path)
    _tool().again(tmp_path / "fedul-h.json")
    assert {path.name for path in tmp_path.glob("*.png")} == {"fedul-h.png", "fedul-h-front.png"}


def test_saved_results_are_small_and_complete(written: Path, tmp_path: Path) -> None:
    """There are a table, numbers by seed and pictures, and missing numbers are named."""
    tool = _tool()
    tool.keep(written, tmp_path / "kept")
    pictures = {"tiny.png", "tiny-nll.png", "tiny-perplexity.png"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"tiny.md", "tiny.json", *pictures}
    kept = json.loads((tmp_path / "kept" / "tiny.json").read_text())
    assert kept["cases"]["few"]["uefl"]["accuracy"] == {"0": 0.61235, "1": 0.61235, "2": 0.61235}
    page = (tmp_path / "kept" / "tiny.md").read_text()
    assert "| few / uefl | 3 | 0.612 ± 0.000 | 0.920 |" in page
    assert "![The sweep, tiny](tiny.png)" in page
    assert "![Test loss over the rounds, tiny](tiny-nll.png)" in page
    assert page.endswith("- few/uefl/seed-3: ROOT: why\n")
    assert "/some/where" not in page + (tmp_path / "kept" / "tiny.json").read_text()
    assert "entropy-few-uefl.png" not in page


def test_a_measure_that_no_run_has_is_named(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    assert report.absent(result) == []
    without = replace(
        result, suite=result.suite.model_copy(update={"measures": ("accuracy", "brier", "usage")})
    )
    assert report.table(without).rows[0][-2:] == ["-", "-"]
    assert [w.rpartition(" ")[2] for w in report.content(without, []).warnings] == ["'brier'", "'usage'"]


def test_numbers_of_runs_may_be_measures(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    run = result.runs["few", "uefl"][0]
    numbers = {**run.of("uefl")[-1], **run.arms["uefl"]}
    names = tuple(name for name, value in numbers.items() if type(value) in (int, float))
    report.check_measures(result.suite.model_copy(update={"measures": names}), {"few": run.config})


def test_missing_gpu_measure_is_explained(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    of_gpu = replace(
        result, suite=result.suite.model_copy(update={"measures": ("accuracy", "milliseconds_gpu")})
    )
    (line,) = report.absent(of_gpu)
    assert re.search("'milliseconds_gpu', .*GPU$", line)


def test_a_measure_of_a_missing_angle_is_refused(tmp_path: Path) -> None:
    data = {"clients": 3, "partition": {"scheme": "rotations", "angles": [0, 0, -50]}}
    cfg = read_run(sample_runs.write(tmp_path / "turned", data=data)).config
    own = suite.load(tiny(tmp_path)).model_copy(update={"measures": ("accuracy@-50", "accuracy@-51")})
    with pytest.raises(UserError, match=r"'accuracy@-51': .*'-51'; .* -50, 0"):
        report.check_measures(own, {"few": cfg})


def test_arms_with_different_rounds_are_named(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    assert report.unequal(result) == []
    for seed, rounds in enumerate((2, 3, 4)):
        result.runs["few", "uefl"][seed].arms["uefl"]["rounds"] = rounds
    (said,) = report.unequal(result)
    assert said.endswith("rounds: few / uefl 2-4, fedavg 4.")
    assert said in report.content(result, []).sections[0].elements


def test_a_mean_of_fewer_seeds_than_the_row_has_is_noted(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    assert report.partial(result) == []
    run = result.runs["few", "uefl"][1]
    for said in (run.arms["uefl"], *run.records):
        del said["entropy"]
    (line,) = report.partial(result)
    assert re.search(r"entropy .*few / uefl \(seeds 0, 2\)", line)
    assert line in report.content(result, []).sections[0].elements


def test_a_measure_may_average_a_column_over_four_rounds(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    rounds = [1.0 - 0.1 * round for round in range(sum(sample_runs.ROUNDS))]
    assert result.values("few", "uefl", "entropy_last4")[0] == pytest.approx(statistics.fmean(rounds[-4:]))
    assert result.values("few", "uefl", "entropy")[0] == pytest.approx(rounds[-1])
    said = result.runs["few", "uefl"][0].arms["uefl"]
    said["accuracy"] = 0.7
    assert result.values("few", "uefl", "last_accuracy")[0] == 0.7
    assert result.values("few", "uefl", "accuracy")[0] == said["accuracy_last4"]["mean"]


def test_a_measure_may_be_of_the_clients_of_one_angle(tmp_path: Path) -> None:
    """Accuracies of two unturned clients and a turned one differ by 0.01, and by 0.1 between rounds."""
    found = {}
    schemes = {
        "rotations": {"clients": 3, "partition": {"scheme": "rotations", "angles": [0, 0, -50]}},
        "imbalanced": {
            "partition": {"scheme": "imbalanced", "angles": [0, -50], "clients_per_angle": [2, 1]}
        },
    }
    for name, data in schemes.items():
        run = read_run(sample_runs.write(tmp_path / name, data=data))
        assert run.angles == {"silo-0": 0, "silo-1": 0, "silo-2": -50}
        measures = ("accuracy@0", "accuracy@-50", "entropy@-50", "entropy_last4@0", "accuracy@120")
        found[name] = [report._value(run, "fedavg", measure) for measure in measures]
    expected = [0.25 + 0.005, 0.25 + 0.02, 0.7, 0.85]
    assert found["rotations"][:4] == found["imbalanced"][:4] == pytest.approx(expected)
    assert found["rotations"][4] is found["imbalanced"][4] is None
    assert read_run(sample_runs.write(tmp_path / "upright")).angles == {}
    lists = read_run(
        sample_runs.write(
            tmp_path / "lists",
            [r | {"usage": [1, 2]} for r in sample_runs.records()],
            data=schemes["rotations"],
        )
    )
    assert report._value(lists, "fedavg", "usage@0") is None


def test_missing_runs_are_counted(tmp_path: Path) -> None:
    result = replace(
        _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3}), missing={"few/uefl/seed-3": "why"}
    )
    (warning,) = report.content(result, []).warnings
    assert warning.startswith("1 of 7 runs")


def test_runs_of_a_case_share_one_line_for_a_common_reason(tmp_path: Path) -> None:
    missing = {f"{case}/{arm}/seed-0": "why not" for case in ("absent", "gone") for arm in ("fedavg", "uefl")}
    result = replace(
        _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3}),
        missing=missing | {"few/uefl/seed-3": "why"},
    )
    lines = ["2 runs of absent: why not", "2 runs of gone: why not", "few/uefl/seed-3: why"]
    assert report.content(result, []).sections[-1].elements == [lines]


def test_pareto_front_has_the_undominated_cases(tmp_path: Path) -> None:
    assert report.best_in_both([(1.0, 3.0), (2.0, 2.0), (2.5, 2.5), (3.0, 1.0), (1.0, 4.0)]) == [0, 1, 3]
    result = _finished(tmp_path, {"fedavg": [0.5, 0.7, 0.9], "uefl": [0.6, 0.77, 0.97]})
    front = replace(result, suite=result.suite.model_copy(update={"front": ("accuracy", "entropy")}))
    assert "front.png" in [picture.name for picture, _ in report._draw(front)]
    assert "front.png" not in [picture.name for picture, _ in report._draw(result)]
