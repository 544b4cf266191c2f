"""Suites: every file is a list of runs at both scales."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from uefl import config
from uefl.data import build
from uefl.errors import UserError
from uefl.models.net import Net
from uefl.suites import report, suite

from .command_line import accepted, cli
from .test_presets import trains
from .tiny import arm as tiny_arm
from .tiny import smallest, values

REPRODUCTION = Path(__file__).parents[2] / "reproduction"
EXAMPLES = Path("docs/suites.md").read_text()
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


FEW = TINY.partition("[cases.absent]")[0]
"""the suite with its first case only"""


def tiny(tmp_path: Path, text: str = TINY, name: str = "tiny") -> str:
    """Write a suite, and return its path."""
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", suite.suites())
def test_every_suite_is_a_list_of_runs(name: str) -> None:
    whole = suite.load(name)
    for scale in ("cpu", "paper"):
        configs = whole.configs(scale)
        report.check_measures(whole, configs)
        for case, cfg in configs.items():
            assert whole.cases[case].paper.keys() <= cfg.arms.keys(), case
            if any(arm.algorithm == "uefl-published" for arm in cfg.arms.values()):
                assert cfg.training.max_iterations, case  # the published code would extend without an end
        assert whole.against in {arm for cfg in configs.values() for arm in cfg.arms}
    assert (whole.axis is None) == all(case.x is None for case in whole.cases.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", suite.suites())
def test_every_arm_and_every_case_trains(name: str, every_source: Path) -> None:
    """Train every arm in its first case, and each case with one arm, on small generated files."""
    trained: set[str] = set()
    for number, cfg in enumerate(suite.load(name).configs("cpu").values()):
        names = [arm for arm in cfg.arms if arm not in trained] or [list(cfg.arms)[number % len(cfg.arms)]]
        trains(replace(cfg, arms={arm: cfg.arms[arm] for arm in names}), every_source)
        trained.update(names)


@pytest.mark.slow
def test_every_network_takes_a_step_at_the_scale_of_the_paper(every_source: Path) -> None:
    """Networks have their full size and their own images, except a narrower CNN and random initial weights.

    There are few images, and only the last arm of a case trains.
    """
    trained: set[tuple[object, ...]] = set()
    for name in suite.suites():
        for cfg in suite.load(name).configs("paper").values():
            place = (cfg.kind, cfg.model.encoder, cfg.model.pooled, cfg.data.image_size, cfg.data.normalize)
            if place in trained:
                continue
            trained.add(place)
            (*_, last) = smallest(cfg)
            model = cfg.model.model_copy(
                update={"pretrained": False} | ({"width": 16} if "cnn" in cfg.model.encoder else {})
            )
            training = last.training.model_copy(
                update={"batch_size": 8, "local_steps": 1 if last.kind == "labeled" else 0}
            )
            last = replace(last, model=model, training=training)
            data = build(last.data, kind=last.kind, seed=0, data_root=every_source)
            one, workspace, _ = tiny_arm(last, data)
            workspace.algorithm.check(data, "arm", workspace.net)
            before = values(one).clone()
            one.turn()
            assert torch.isfinite(values(one)).all(), place
            assert not torch.equal(values(one), before), place
    assert {encoder for _, encoder, *_ in trained} >= {
        "cnn",
        "vgg16_bn",
        "resnet18",
        "resnet18_3x3",
        "lenet",
        "pixel_mlp",
    }


@pytest.mark.parametrize(
    "file", sorted((REPRODUCTION / "preregistration").glob("*.toml")), ids=lambda file: file.stem
)
def test_a_comparison_that_was_planned_can_still_be_run(file: Path) -> None:
    """The plans use the methods that they name, with the present keys."""
    configs = suite.load(str(file)).configs("cpu")
    assert all(cfg.arms for cfg in configs.values())


def test_the_small_scale_is_smaller() -> None:
    small, large = (suite.load("table1").configs(scale)["mnist"] for scale in ("cpu", "paper"))
    for cfg, sizes in ((small, (8, 9, 16, [16, 4, 4])), (large, (128, 9, 0, [20] * 5))):
        data = cfg.data
        assert (cfg.model.width, data.clients, data.image_size, cfg.training.iterations()) == sizes


def test_the_scale_of_the_paper_has_the_published_settings() -> None:
    """The saved results use the small scale, so they do not test these settings."""
    for name in ("table2", "table3"):
        for case, cfg in suite.load(name).configs("paper").items():
            invariance = cfg.arms["fediir"].parameters.model_dump()["invariance"]
            assert invariance == (1e-3 if case.startswith("pacs") else 1e-2), case
        small = suite.load(name).configs("cpu").values()
        assert {cfg.arms["fediir"].parameters.model_dump()["invariance"] for cfg in small} == {1e-3}
    whole = suite.load("fedul-cifar10")
    for scale, pretrained in (("cpu", False), ("paper", True)):
        assert {cfg.model.pretrained for cfg in whole.configs(scale).values()} == {pretrained}


def test_the_wide_network_matches_a_codebook_extended_twice() -> None:
    """The control for the size of a method is in its preset and at both scales of its suite."""
    scales = [suite.load("controls").configs(scale)["mnist"] for scale in ("cpu", "paper")]
    assert [(cfg.model.width, cfg.data.clients, sum(cfg.training.iterations())) for cfg in scales] == [
        (8, 9, 24),
        (128, 9, 100),
    ]
    for cfg in (config.load("controls"), *scales):
        dim, uefl = Net(cfg.model, (1, 28, 28), 10).dim, cfg.arms["uefl"].parameters.model_dump()
        assert (
            cfg.arms["fedavg-wide"].parameters.model_dump()["more_parameters"]
            == 3 * uefl["codewords"] * dim // uefl["segments"]
        )


def test_a_clone_has_paper_suites_and_an_installation_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite given by its path runs from any folder."""
    monkeypatch.chdir(tmp_path)
    assert suite.suites().keys() == {file.stem for file in REPRODUCTION.glob("*.toml")}
    monkeypatch.setattr(
        suite, "_FOLDERS", (tmp_path / "site-packages" / "reproduction", Path("reproduction"))
    )
    assert suite.suites() == {}
    found = cli("suite")
    assert found.exit_code == 2
    assert "reproduction/" in found.stderr
    assert suite.load(str(REPRODUCTION / "table1.toml")).configs("cpu")["mnist"].model.width == 8
    (tmp_path / "reproduction").mkdir()
    (tmp_path / "reproduction" / "mine.toml").write_text(TINY)
    assert suite.suites() == {"mine": "A tiny suite"}


def test_the_base_file_of_the_small_scale_is_next_to_the_suite(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("data.train_per_client = 12\nmodel.width = 3\n")
    (cfg, *_) = suite.load(tiny(tmp_path, 'cpu_base = "small.toml"\n' + TINY)).configs("cpu").values()
    assert (cfg.data.train_per_client, cfg.model.width) == (20, 2)  # the suite's own [cpu] comes after it
    without_cpu = TINY.partition("[cpu]")[0] + "[all.arms.fedavg]\n[cases.one]\nx = 1\n"
    mine = tiny(tmp_path, 'cpu_base = "small.toml"\n' + without_cpu)
    (cfg,) = suite.load(mine).configs("cpu").values()
    assert (cfg.data.train_per_client, cfg.model.width) == (12, 3)
    (tmp_path / "small.toml").unlink()
    with pytest.raises(UserError, match=r"small\.toml"):
        suite.load(mine)


def test_a_job_has_one_arm_and_one_seed(tmp_path: Path) -> None:
    jobs = suite.jobs(suite.load(tiny(tmp_path)), "cpu", 2, tmp_path, threads=1)
    places = [(case, arm, 0) for case in ("few", "absent") for arm in ("fedavg", "uefl")]
    assert [(j.case, j.arm, j.seed) for j in jobs[:4]] == places
    assert [list(job.config.arms) for job in jobs[:2]] == [["fedavg"], ["uefl"]]
    assert {(job.config.run.seed, job.config.run.threads) for job in jobs[4:]} == {(1, 1)}
    assert jobs[1].folder == tmp_path / "few" / "uefl" / "seed-0"


def test_seeds_begin_at_the_seed_of_the_case(tmp_path: Path) -> None:
    mine = tiny(tmp_path, TINY.replace("run.passes = 2", "run = { passes = 2, seed = 100 }"))
    jobs = suite.jobs(suite.load(mine), "cpu", 2, tmp_path, threads=1)
    found = {(job.seed, job.config.run.seed, job.folder.name) for job in jobs}
    assert found == {(100, 100, "seed-100"), (101, 101, "seed-101")}


def test_runs_that_cases_have_in_common_are_made_once(tmp_path: Path) -> None:
    """A sweep over the codebook does not change FedAvg, which has one run for each seed."""
    whole = suite.load(tiny(tmp_path, TINY.replace('data.source = "cifar100"\n', "")))
    jobs = suite.jobs(whole, "cpu", 1, tmp_path, threads=1)
    folders = [str(job.folder.relative_to(tmp_path)) for job in jobs]
    assert folders == ["few/fedavg/seed-0", "few/uefl/seed-0", "few/fedavg/seed-0", "absent/uefl/seed-0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("measures = 3", "key 'bad.against' .*missing"),
        (TINY + "[cases.more]\nmodel.widht = 3", r"case 'more': .*key 'widht' .*\[model\] .*'width'"),
        (TINY + "[cases.more]\ncolor = 3", "key 'color'"),
        ("= 3", "TOML"),
        ("", "key 'bad.against' .*missing"),
        (
            TINY.replace('against = "fedavg"', 'against = "fedvag"'),
            "key 'against': .*'fedvag'; .*fedavg, uefl",
        ),
        (TINY + '[cases."../away"]', r"key 'cases': '\.\./away' .*\b40\b"),
        (TINY + '[cases.more]\narms = ["fedvag"]', "case 'more': key 'arms.fedvag': .*'fedvag'"),
        (TINY + "[cases.more]\narms = 3", "case 'more': key 'arms'"),
        (TINY.replace("uefl = { acc", "uelf = { acc"), "case 'few': key 'paper': .*'uelf' .*'uefl'"),
        (TINY.replace("{ accuracy =", "{ acc ="), "key 'paper': .*'acc'"),
        (TINY.replace("x = ", "# x = "), "key 'axis': .*'codewords'; .*`x`"),
        (TINY + '[cases.more]\nagainst = "fewer"', "case 'more', key 'against': .*'fewer' .*'few'"),
        (
            TINY + '[cases.more]\narms = ["uefl"]\n[cases.most]\nagainst = "more"',
            "key 'against': case 'more' .*'fedavg'",
        ),
        (TINY + '[cases."report.md"]', r"'report\.md'"),
    ],
)
def test_invalid_suite_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        suite.load(tiny(tmp_path, text, "bad")).configs("cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ('["accuracy", "entrpy"]', "'entrpy' .*'entropy'"),
        ('["accuracy", "best_acuracy_last4"]', "'best_acuracy_last4'"),
        ('["accuracy", "perplexity_full", "best_nll", "accuracy@5"]', "'accuracy@5': .*'5'"),
        ('["accuracy", "usage"]', "'usage'"),
        ('["accuracy"]\nfront = ["nll", "bier"]', "'bier' .*'brier'"),
    ],
)
def test_unknown_measures_are_refused_before_a_run(measures: str, message: str, tmp_path: Path) -> None:
    own = tiny(tmp_path, TINY.replace('["accuracy", "entropy"]', measures))
    found = cli("suite", own, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert re.search(message, " ".join(found.stderr.split()))
    assert not (tmp_path / "out").exists()


def test_size_of_an_own_suite_follows_its_file(tmp_path: Path) -> None:
    """This is the second example of docs/suites.md."""
    _, _, text = EXAMPLES.split("```toml\n")
    own = suite.load(tiny(tmp_path, text.partition("```")[0]))
    assert own.about
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
    whole = suite.load(tiny(tmp_path, TINY + '[cases.one]\narms = ["uefl"]\n'))
    (arm,) = whole.configs("cpu")["one"].arms.values()
    assert arm.parameters.codewords == 4


def test_data_of_ones_own_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder keeps the whole path, which a suite that continues compares."""
    (tmp_path / "silos").mkdir()
    (tmp_path / "mine.toml").write_text(
        'against = "fedavg"\n[cases.a]\nbase = "own-silos"\ndata.source = "silos"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert suite.load("mine.toml").configs("cpu")["a"].data.source == str(tmp_path / "silos")


def test_an_unknown_suite_names_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"'tabel1' .*'table1'"):
        suite.load("tabel1")


def test_table_5_is_table_1_by_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr("uefl.suites.command.run", lambda name, *, out, **_: asked.append((name, out)))
    accepted("suite", "table5")
    assert asked == [("table1", Path("runs/table1-cpu"))]
    table1 = suite.load("table1")
    for case in table1.cases.values():
        for arm, numbers in case.paper.items():
            # three clients of each rotation, and three digits
            for measure in {"accuracy", "entropy"} & numbers.keys():
                of_each = [numbers[f"{measure}@{angle}"] for angle in (0, -50, 120)]
                assert statistics.fmean(of_each) == pytest.approx(numbers[measure], abs=0.0011), (
                    arm,
                    measure,
                )
    assert {f"{m}@{a}" for m in ("accuracy", "entropy") for a in (0, -50, 120)} <= set(table1.measures)
