"""Suites: every file is a list of runs at both scales, and a report pairs seeds."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uefl import config
from uefl.cli import app
from uefl.errors import UserError
from uefl.models.net import Net
from uefl.report import read_run
from uefl.suites import report, suite

from . import run_folder
from .test_presets import trains

TINY = """# A tiny suite
against = "fedavg"
measures = ["accuracy", "entropy"]
axis = "codewords"

[all]
data = { source = "digits", clients = 2, train_per_client = 20, test_per_client = 10 }
model = { width = 2, hidden = 8 }
training = { rounds = [1, 1], local_epochs = 1, batch_size = 8 }
run.passes = 2

[cpu]
data = { train_per_client = 20, test_per_client = 10 }
model = { width = 2 }
training = { rounds = [1, 1], local_epochs = 1, batch_size = 8 }

[all.arms.fedavg]

[all.arms.uefl]
codewords = 4

[cases.few]
x = 4

[cases.few.paper]
uefl = { accuracy = 0.92 }

[cases.absent]
x = 8
data.source = "cifar100"
arms.uefl.codewords = 8
"""


def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


@pytest.mark.parametrize("name", suite.suites())
@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_every_suite_is_a_list_of_runs(name: str, scale: suite.Scale) -> None:
    whole = suite.load(name)
    for case, cfg in whole.configs(scale).items():
        assert whole.cases[case].paper.keys() <= cfg.arms.keys(), f"{case}: the paper's numbers are of arms that it has"
        if any(arm.algorithm == "uefl-published" for arm in cfg.arms.values()):
            assert cfg.training.max_iterations, f"{case}: the published code goes on for ever"
    arms = {arm for cfg in whole.configs(scale).values() for arm in cfg.arms}
    assert whole.against in arms
    assert (whole.axis is None) == all(case.x is None for case in whole.cases.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", suite.suites())
def test_every_arm_and_every_case_trains(name: str, every_source: Path) -> None:
    """A round in each of two iterations, on small generated files: each arm in the first case that has it, and another one in each case."""
    trained: set[str] = set()
    for number, cfg in enumerate(suite.load(name).configs("cpu").values()):
        names = [arm for arm in cfg.arms if arm not in trained] or [list(cfg.arms)[number % len(cfg.arms)]]
        trains(replace(cfg, arms={arm: cfg.arms[arm] for arm in names}), every_source)
        trained.update(names)


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "docs").rglob("*.toml")), ids=lambda file: file.stem)
def test_a_suite_that_the_pages_name_can_still_be_run(file: Path) -> None:
    """With the methods that it was written for: their keys are those of today."""
    configs = suite.load(str(file)).configs("cpu")
    assert all(cfg.arms for cfg in configs.values())


def test_the_small_scale_is_smaller() -> None:
    small, large = (suite.load("table1").configs(scale)["mnist"] for scale in ("cpu", "paper"))
    assert (small.model.width, small.data.clients, small.data.image_size, small.training.iterations()) == (8, 9, 16, [16, 4, 4])
    assert (large.model.width, large.data.clients, large.data.image_size, large.training.iterations()) == (128, 9, 0, [20] * 5)


def test_the_scale_of_the_paper_has_the_published_settings() -> None:
    """Which the results that are kept, of the small scale, have not."""
    for name in ("table2", "table3"):
        for case, cfg in suite.load(name).configs("paper").items():
            invariance = cfg.arms["fediir"].parameters.model_dump()["invariance"]
            assert invariance == (1e-3 if case.startswith("pacs") else 1e-2), case
        small = suite.load(name).configs("cpu").values()
        assert {cfg.arms["fediir"].parameters.model_dump()["invariance"] for cfg in small} == {1e-3}
    whole = suite.load("fedul-cifar10")
    for scale, pretrained in (("cpu", False), ("paper", True)):
        assert {cfg.model.pretrained for cfg in whole.configs(scale).values()} == {pretrained}


def test_the_wider_network_has_the_parameters_of_a_codebook_that_was_extended_twice() -> None:
    """The control for the size of a method, in the preset and at both scales of its suite, of which one is that of the paper."""
    scales = [suite.load("controls").configs(scale)["mnist"] for scale in ("cpu", "paper")]
    assert [(cfg.model.width, cfg.data.clients, sum(cfg.training.iterations())) for cfg in scales] == [(8, 9, 24), (128, 9, 100)]
    for cfg in (config.load("controls"), *scales):
        dim, uefl = Net(cfg.model, (1, 28, 28), 10).dim, cfg.arms["uefl"].parameters.model_dump()
        assert cfg.arms["fedavg-wide"].parameters.model_dump()["more_parameters"] == 3 * uefl["codewords"] * dim // uefl["segments"]


def test_a_job_has_one_arm_and_one_seed(tmp_path: Path) -> None:
    jobs = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 2, tmp_path, threads=1)
    assert [(j.case, j.arm, j.seed) for j in jobs[:4]] == [
        ("few", "fedavg", 0),
        ("few", "uefl", 0),
        ("absent", "fedavg", 0),
        ("absent", "uefl", 0),
    ]
    assert [list(job.config.arms) for job in jobs[:2]] == [["fedavg"], ["uefl"]]
    assert {(job.config.run.seed, job.config.run.threads) for job in jobs[4:]} == {(1, 1)}
    assert jobs[1].folder == tmp_path / "few" / "uefl" / "seed-0"


def test_seeds_begin_at_the_seed_of_the_case(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TINY.replace("run.passes = 2", "run = { passes = 2, seed = 100 }"))
    jobs = suite.jobs(suite.load(str(tmp_path / "mine.toml")), "cpu", 2, tmp_path, threads=1)
    assert {(job.seed, job.config.run.seed, job.folder.name) for job in jobs} == {(100, 100, "seed-100"), (101, 101, "seed-101")}


def test_runs_that_cases_have_in_common_are_made_once(tmp_path: Path) -> None:
    """The codebook of a sweep is not FedAvg's: its run of a seed is one, in the folder of the first case."""
    (tmp_path / "mine.toml").write_text(TINY.replace('data.source = "cifar100"\n', ""))
    jobs = suite.jobs(suite.load(str(tmp_path / "mine.toml")), "cpu", 1, tmp_path, threads=1)
    folders = [str(job.folder.relative_to(tmp_path)) for job in jobs]
    assert folders == ["few/fedavg/seed-0", "few/uefl/seed-0", "few/fedavg/seed-0", "absent/uefl/seed-0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("measures = 3", "key 'bad.against' is missing; give it a value"),
        (TINY + "[cases.more]\nmodel.widht = 3", "case 'more': unknown key 'widht' in [model] (did you mean 'width'?)"),
        (TINY + "[cases.more]\ncolour = 3", "unknown key 'colour'"),
        ("= 3", "is not valid TOML"),
        ("", "key 'bad.against' is missing; give it a value"),
        (TINY.replace('against = "fedavg"', 'against = "fedvag"'), "key 'against': no case has an arm 'fedvag'; there are fedavg, uefl"),
        (TINY + '[cases."../away"]', "key 'cases': '../away' names a folder; expected up to 40 letters"),
        (TINY + '[cases.more]\narms = ["fedvag"]', "case 'more': key 'arms.fedvag': no algorithm 'fedvag'"),
        (TINY + "[cases.more]\narms = 3", "case 'more': key 'arms'"),
        (TINY.replace("uefl = { acc", "uelf = { acc"), "case 'few': key 'paper': there is no arm 'uelf' (did you mean 'uefl'?)"),
        (TINY.replace("{ accuracy =", "{ acc ="), "key 'paper': there is no measure 'acc'"),
        (TINY.replace("x = ", "# x = "), "key 'axis': no case has a place on 'codewords'; give cases an `x`"),
        (TINY + '[cases."report.md"]', "'report.md' is a file or folder that the suite writes itself"),
    ],
)
def test_a_suite_that_is_none_is_refused_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UserError) as error:
        suite.load(str(tmp_path / "bad.toml")).configs("cpu")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_suite_of_ones_own_is_as_large_as_it_says(tmp_path: Path) -> None:
    """The example of docs/suites.md."""
    text = Path("docs/suites.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "mine.toml").write_text(text)
    own = suite.load(str(tmp_path / "mine.toml"))
    assert own.about == "FedAvg and UEFL with few and many images"
    assert [cfg.data.train_per_client for cfg in own.configs("cpu").values()] == [100, 400]
    assert own.configs("cpu") == own.configs("paper")
    assert {name: (case.x, case.paper) for name, case in own.cases.items()} == {
        "few": (100, {"fedavg": {"accuracy": 0.75}}),
        "many": (400, {}),
    }
    arms = own.configs("cpu")["few"].arms
    assert list(arms) == ["fedavg", "uefl"]
    assert (arms["uefl"].parameters.gamma, arms["uefl"].parameters.codewords) == (0.1, 32)


def test_the_page_has_every_key_of_a_file() -> None:
    page = Path("docs/suites.md").read_text().partition("| key | meaning |")[2]
    keys = {*suite.Suite.model_fields, "x", "paper", "arms", "base"} - {"name", "about"}
    assert [key for key in keys if not re.search(rf"`[^`]*\b{key}\b", page)] == []


def test_a_case_picks_arms_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TINY + '[cases.one]\narms = ["uefl"]\n')
    (arm,) = suite.load(str(tmp_path / "mine.toml")).configs("cpu")["one"].arms.values()
    assert arm.parameters.codewords == 4


def test_data_of_ones_own_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder keeps the whole path, which is compared when the suite goes on."""
    (tmp_path / "silos").mkdir()
    (tmp_path / "mine.toml").write_text('against = "fedavg"\n[cases.a]\nbase = "own-silos"\ndata.source = "silos"\n')
    monkeypatch.chdir(tmp_path)
    assert suite.load("mine.toml").configs("cpu")["a"].data.source == str(tmp_path / "silos")


def test_an_unknown_suite_names_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"no suite 'tabel1' \(did you mean 'table1'\?\)"):
        suite.load("tabel1")


def _finished(tmp_path: Path, accuracies: dict[str, list[float]]) -> report.Result:
    """Runs of the case ``few`` by hand, whose accuracy is these numbers by seed."""
    whole = suite.load(tiny(tmp_path))
    jobs = [job for job in suite.jobs(whole, "cpu", 3, tmp_path / "out", threads=1) if job.case == "few"]
    for job in jobs:
        lines = run_folder.records((job.arm,))
        for line in lines:
            line["accuracy"] = accuracies[job.arm][job.seed]
        run_folder.write(job.folder, lines, seed=job.seed)
    return report.collect(whole, "cpu", jobs, {})


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    fedavg, uefl = [0.5, 0.7, 0.9], [0.6, 0.77, 0.97]
    result = _finished(tmp_path, {"fedavg": fedavg, "uefl": uefl})
    header, rows = report.table(result).header, report.table(result).rows
    assert header == ["case / arm", "seeds", "accuracy", "paper", "less fedavg, 95 %", "entropy"]
    assert rows[0][:5] == ["few / fedavg", "3", "0.700 ± 0.200", "-", ""]
    difference = [b - a for a, b in zip(fedavg, uefl, strict=True)]
    half = 4.302653 * statistics.stdev(difference) / 3**0.5  # Student's t, two degrees of freedom, 97.5 %
    assert rows[1][:5] == ["few / uefl", "3", "0.780 ± 0.185", "0.920", f"+0.080 [{0.08 - half:+.3f}, {0.08 + half:+.3f}]"]


def test_a_damaged_run_is_named_and_the_others_are_reported(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    folder = tmp_path / "out" / "few" / "uefl" / "seed-1"
    (folder / "summary.json").write_text("{")
    jobs = [job for job in suite.jobs(result.suite, "cpu", 3, tmp_path / "out", threads=1) if job.case == "few"]
    again = report.collect(result.suite, "cpu", jobs, {})
    assert list(again.values("few", "uefl", "accuracy")) == [0, 2]
    assert list(again.missing) == ["few/uefl/seed-1"]
    assert again.missing["few/uefl/seed-1"].endswith(f"; or remove {folder}, and the suite makes it anew")


def test_the_accuracy_that_validation_selects_stands_beside_that_of_the_last_rounds(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TINY.replace('"entropy"]', '"selected_accuracy"]'))
    whole = suite.load(str(tmp_path / "mine.toml"))
    jobs = [job for job in suite.jobs(whole, "cpu", 1, tmp_path / "out", threads=1) if job.case == "few"]
    for job in jobs:
        lines = run_folder.records((job.arm,))
        if job.arm == "fedavg":  # whose second round is the best one on validation images
            lines = [line | {"validation_accuracy": 0.9 if line["round"] == 1 else 0.8} for line in lines]
        run_folder.write(job.folder, lines)
    result = report.collect(whole, "cpu", jobs, {})
    assert [row[-1] for row in report.table(result).rows] == ["0.210", "-"]  # 0.1 x 2, and 0.01 of the mean client
    assert "last four rounds, or of all where it has fewer, selected_accuracy that of the round" in str(
        report.content(result, []).sections[0].blocks
    )
    assert "selected_accuracy" not in str(report.content(_finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3}), []).sections)


def test_a_report_has_pages_pictures_and_numbers(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    report.write(result, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "plots").iterdir()} == {
        "curves.png", "entropy.png", "sweep.png", "entropy-few-uefl.png", "usage-few-uefl.png",
    }  # fmt: skip
    assert "| few / uefl | 3 | 0.600 ± 0.000 | 0.920 |" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "report.html").read_text().count("data:image/png") == 5
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())
    assert numbers["cases"]["few"]["uefl"]["accuracy"] == {str(seed): pytest.approx(0.6) for seed in range(3)}


def test_results_that_are_kept_are_small_and_whole(tmp_path: Path) -> None:
    """Table, numbers by seed and one picture; what is not there is said."""
    result = replace(
        _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.61234567] * 3}), missing={"few/uefl/seed-3": "no file in /some/where: why"}
    )
    report.write(result, tmp_path / "out")
    spec = importlib.util.spec_from_file_location("results_tool", Path(__file__).parents[2] / "tools" / "results.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.keep(tmp_path / "out", tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"tiny.md", "tiny.json", "tiny.png"}
    kept = json.loads((tmp_path / "kept" / "tiny.json").read_text())
    assert kept["cases"]["few"]["uefl"]["accuracy"] == {"0": 0.61235, "1": 0.61235, "2": 0.61235}
    page = (tmp_path / "kept" / "tiny.md").read_text()
    assert "| few / uefl | 3 | 0.612 ± 0.000 | 0.920 |" in page
    assert "![The sweep, tiny](tiny.png)" in page
    assert page.endswith("- few/uefl/seed-3: no file in ROOT: why\n")
    assert "/some/where" not in page + (tmp_path / "kept" / "tiny.json").read_text()
    assert "entropy-few-uefl.png" not in page


def test_a_measure_that_no_run_has_is_said_with_the_nearest_one(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    unknown = replace(result, suite=result.suite.model_copy(update={"measures": ("accuracy", "nlll", "acuracy", "usage")}))
    assert report.table(unknown).rows[0][-3:] == ["-", "-", "-"]
    assert report.absent(result) == []
    assert report.content(unknown, []).warnings == [
        "no run has the measure 'nlll' (did you mean 'nll'?)",
        "no run has the measure 'acuracy' (did you mean 'accuracy'?)",
        "no run has the measure 'usage'",
    ]


def test_a_measure_over_an_angle_that_no_client_has_is_said_with_the_nearest_one(tmp_path: Path) -> None:
    data = {"clients": 3, "partition": {"scheme": "rotations", "angles": [0, 0, -50]}}
    run = read_run(run_folder.write(tmp_path / "turned", run_folder.records(("fedavg",)), data=data))
    own = suite.load(tiny(tmp_path)).model_copy(update={"measures": ("accuracy@-50", "accuracy@-51")})
    result = report.Result(own, "cpu", {("few", "fedavg"): {0: run}}, {})
    assert report.absent(result) == ["no run has the measure 'accuracy@-51' (did you mean 'accuracy@-50'?)"]


def test_an_arm_that_took_other_rounds_than_the_one_compared_is_named(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    assert report.unequal(result) == []
    for seed, rounds in enumerate((2, 3, 4)):
        result.runs["few", "uefl"][seed].arms["uefl"]["rounds"] = rounds
    (said,) = report.unequal(result)
    assert said.endswith("rounds: few / uefl 2-4, fedavg 4.")
    assert said in report.content(result, []).sections[0].blocks


def test_a_mean_of_fewer_seeds_than_the_row_has_is_said(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    assert report.partial(result) == []
    run = result.runs["few", "uefl"][1]
    for said in (run.arms["uefl"], *run.records):
        del said["entropy"]
    (line,) = report.partial(result)
    assert line == "Some means are of fewer seeds, because the other runs lack the measure: entropy of few / uefl (seeds 0, 2)."
    assert line in report.content(result, []).sections[0].blocks


def test_a_measure_may_be_the_mean_of_a_column_over_the_last_four_rounds(tmp_path: Path) -> None:
    result = _finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3})
    rounds = [1.0 - 0.1 * round for round in range(sum(run_folder.ROUNDS))]
    assert result.values("few", "uefl", "entropy_last4")[0] == pytest.approx(statistics.fmean(rounds[-4:]))
    assert result.values("few", "uefl", "entropy")[0] == pytest.approx(rounds[-1])
    said = result.runs["few", "uefl"][0].arms["uefl"]
    said["accuracy"] = 0.7
    assert result.values("few", "uefl", "last_accuracy")[0] == 0.7
    assert result.values("few", "uefl", "accuracy")[0] == said["accuracy_last4"]["mean"]


def test_a_measure_may_be_of_the_clients_of_one_angle(tmp_path: Path) -> None:
    """Two clients upright and one turned, by either partition; accuracies of a round are 0.01 apart, those of the rounds 0.1."""
    found = {}
    schemes = {
        "rotations": {"clients": 3, "partition": {"scheme": "rotations", "angles": [0, 0, -50]}},
        "imbalanced": {"partition": {"scheme": "imbalanced", "angles": [0, -50], "clients_per_angle": [2, 1]}},
    }
    for name, data in schemes.items():
        run = read_run(run_folder.write(tmp_path / name, data=data))
        assert run.angles == {"silo-0": 0, "silo-1": 0, "silo-2": -50}
        measures = ("accuracy@0", "accuracy@-50", "entropy@-50", "entropy_last4@0", "accuracy@120")
        found[name] = [report._value(run, "fedavg", measure) for measure in measures]
    expected = [0.25 + 0.005, 0.25 + 0.02, 0.7, 0.85]
    assert found["rotations"][:4] == found["imbalanced"][:4] == pytest.approx(expected)
    assert found["rotations"][4] is found["imbalanced"][4] is None
    assert read_run(run_folder.write(tmp_path / "upright")).angles == {}
    lists = read_run(run_folder.write(tmp_path / "lists", [r | {"usage": [1, 2]} for r in run_folder.records()], data=schemes["rotations"]))
    assert report._value(lists, "fedavg", "usage@0") is None


def test_table_5_is_table_1_by_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr("uefl.suites.command.run", lambda name, *, out, **_: asked.append((name, out)))
    assert CliRunner().invoke(app, ["suite", "table5"]).exit_code == 0
    assert asked == [("table1", Path("runs/table1-cpu"))]
    table1 = suite.load("table1")
    for case in table1.cases.values():
        for arm, numbers in case.paper.items():
            for measure in {"accuracy", "entropy"} & numbers.keys():  # three silos of each rotation, and three digits
                of_each = [numbers[f"{measure}@{angle}"] for angle in (0, -50, 120)]
                assert statistics.fmean(of_each) == pytest.approx(numbers[measure], abs=0.0011), (arm, measure)
    assert {f"{m}@{a}" for m in ("accuracy", "entropy") for a in (0, -50, 120)} <= set(table1.measures)


def test_runs_that_are_not_there_are_counted(tmp_path: Path) -> None:
    result = replace(_finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3}), missing={"few/uefl/seed-3": "why"})
    assert report.content(result, []).warnings == ["1 of 7 runs are not there; see the end"]


def test_a_reason_that_runs_of_a_case_have_in_common_is_said_once(tmp_path: Path) -> None:
    missing = {f"{case}/{arm}/seed-0": "no file" for case in ("absent", "gone") for arm in ("fedavg", "uefl")}
    result = replace(_finished(tmp_path, {"fedavg": [0.5] * 3, "uefl": [0.6] * 3}), missing=missing | {"few/uefl/seed-3": "why"})
    lines = ["2 runs of absent: no file", "2 runs of gone: no file", "few/uefl/seed-3: why"]
    assert report.content(result, []).sections[-1].blocks == [lines]
