"""The suites of reproduction/ match the papers' tables.

Settings (in ``paper_settings.py``) and numbers were copied from the papers (UEFL: Zhang, Cao and Liu, ICML
2025; FedUL: Lu et al., ICLR 2022; Alzahrani 2024) and from the code of the methods that they follow,
independently of the files.
"""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import replace
from typing import Any

import pytest

from uefl import config
from uefl.models.layers import linear_layers
from uefl.report.compare import differing
from uefl.suites import suite

from .paper_settings import SETS, SETTINGS
from .tiny import federation, workspace_of

DOMAINS = ("0", "-50", "120")
# the domains of table 5, then the number of table 1
TABLE_5 = {
    ("fedavg", "accuracy"): [
        (0.874, 0.848, 0.618, 0.780),
        (0.801, 0.825, 0.784, 0.803),
        (0.670, 0.677, 0.634, 0.660),
        (0.676, 0.622, 0.553, 0.617),
        (0.110, 0.072, 0.083, 0.088),
    ],
    ("fedavg", "entropy"): [
        (0.212, 0.231, 0.377, 0.273),
        (0.246, 0.232, 0.341, 0.273),
        (0.623, 0.634, 0.652, 0.636),
        (0.172, 0.178, 0.183, 0.177),
        (1.74, 1.86, 2.13, 1.91),
    ],
    ("distrans", "accuracy"): [
        (0.856, 0.799, 0.789, 0.815),
        (0.721, 0.705, 0.694, 0.707),
        (0.898, 0.900, 0.897, 0.898),
        (0.721, 0.719, 0.659, 0.699),
        (0.289, 0.261, 0.251, 0.267),
    ],
    ("uefl", "accuracy"): [
        (0.951, 0.885, 0.924, 0.920),
        (0.857, 0.848, 0.845, 0.850),
        (0.950, 0.964, 0.911, 0.942),
        (0.776, 0.713, 0.671, 0.720),
        (0.362, 0.335, 0.282, 0.326),
    ],
    ("uefl", "entropy"): [
        (0.120, 0.196, 0.131, 0.149),
        (0.147, 0.188, 0.167, 0.167),
        (0.0196, 0.0206, 0.0314, 0.0239),
        (0.0192, 0.0245, 0.0229, 0.0222),
        (0.728, 0.624, 0.612, 0.655),
    ],
}
UNSEEN = {  # tables 2 and 3: the domains, then the printed mean
    "table2": {
        "rotated-mnist": {
            "fedavg": (0.827, 0.982, 0.990, 0.991, 0.982, 0.899, 0.945),
            "fedsr": (0.842, 0.980, 0.989, 0.990, 0.983, 0.900, 0.947),
            "fediir": (0.838, 0.982, 0.991, 0.991, 0.985, 0.908, 0.950),
            "uefl": (0.881, 0.973, 0.976, 0.978, 0.979, 0.932, 0.953),
        },
        "pacs": {
            "fedavg": (0.78, 0.73, 0.92, 0.79, 0.803),
            "fedsr": (0.83, 0.75, 0.94, 0.82, 0.834),
            "fediir": (0.83, 0.76, 0.94, 0.82, 0.837),
            "uefl": (0.81, 0.80, 0.94, 0.82, 0.845),
        },
    },
    "table3": {
        "rotated-mnist": {
            "fedavg": (0.779, 0.959, 0.969, 0.970, 0.960, 0.812, 0.908),
            "fedsr": (0.783, 0.957, 0.963, 0.971, 0.960, 0.840, 0.912),
            "fediir": (0.840, 0.968, 0.977, 0.977, 0.974, 0.845, 0.930),
            "uefl": (0.864, 0.955, 0.964, 0.969, 0.947, 0.906, 0.9342),
        }
    },
}
TABLES: dict[str, dict[str, dict[str, dict[str, float]]]] = {
    "table4": {
        "emnist-letters": {
            k: {"accuracy": v}
            for k, v in {"fedavg": 0.9589, "fedsr": 0.8622, "fedcr": 0.9747, "uefl": 0.9829}.items()
        },
        "fashion": {
            k: {"accuracy": v}
            for k, v in {"fedavg": 0.8815, "fedsr": 0.8555, "fedcr": 0.9378, "uefl": 0.9393}.items()
        },
        "cifar10": {
            k: {"accuracy": v}
            for k, v in {"fedavg": 0.7683, "fedsr": 0.6147, "fedcr": 0.8474, "uefl": 0.8611}.items()
        },
        "cifar100": {
            k: {"accuracy": v}
            for k, v in {"fedavg": 0.3208, "fedsr": 0.4082, "fedcr": 0.6296, "uefl": 0.6337}.items()
        },
    },
    "table6": {
        "scratch-upright": {"centralized": {"accuracy": 0.3852}, "fedavg": {"accuracy": 0.2447}},
        "scratch-turned": {"fedavg": {"accuracy": 0.0852}, "uefl": {"accuracy": 0.1062}},
        "pretrained-upright": {"centralized": {"accuracy": 0.6604}, "fedavg": {"accuracy": 0.6496}},
        "pretrained-turned": {"fedavg": {"accuracy": 0.5005}, "uefl": {"accuracy": 0.5619}},
    },
    "table7": {
        str(angle): {"fedavg": {"accuracy": fedavg}, "uefl": {"accuracy": uefl}}
        for angle, fedavg, uefl in [
            (10, 0.5935, 0.6232),
            (20, 0.5469, 0.6039),
            (30, 0.5106, 0.5600),
            (40, 0.4799, 0.5311),
            (50, 0.4494, 0.5074),
            (60, 0.4368, 0.4939),
            (70, 0.4188, 0.4737),
        ]
    },
    "table8": {
        case: {arm: {"best_accuracy": accuracy, "best_entropy": entropy}}
        for case, arm, accuracy, entropy in [
            ("mnist", "fedavg", 0.782, 0.261),
            ("mnist-uefl", "uefl", 0.920, 0.149),
            ("fashion", "fedavg", 0.801, 0.289),
            ("fashion-uefl", "uefl", 0.850, 0.167),
            ("gtsrb", "fedavg", 0.657, 0.645),
            ("gtsrb-uefl", "uefl", 0.942, 0.0239),
            ("cifar10", "fedavg", 0.618, 0.173),
            ("cifar10-uefl", "uefl", 0.720, 0.0222),
            ("cifar100", "fedavg", 0.093, 1.74),
            ("cifar100-uefl", "uefl", 0.326, 0.655),
        ]
    },
    "table9": {
        case: {"uefl": {"accuracy": accuracy, "entropy": entropy}}
        for case, accuracy, entropy in [
            ("mnist-dropout", 0.920, 0.149),
            ("mnist-ensemble", 0.926, 0.211),
            ("fashion-dropout", 0.850, 0.167),
            ("fashion-ensemble", 0.853, 0.289),
            ("gtsrb-dropout", 0.942, 0.0239),
            ("gtsrb-ensemble", 0.940, 0.041),
            ("cifar10-dropout", 0.720, 0.0222),
            ("cifar10-ensemble", 0.717, 0.043),
            ("cifar100-dropout", 0.326, 0.655),
            ("cifar100-ensemble", 0.331, 0.873),
        ]
    },
    "table10": {
        "mnist": {"tpt": {"accuracy": 0.9584, "start_accuracy": 0.9375}},
        "mnist-uefl": {"uefl": {"accuracy": 0.9778}},
        "cifar100-together": {},
        "cifar100": {"tpt": {"accuracy": 0.3482, "start_accuracy": 0.3473}},
        "cifar100-uefl": {"uefl": {"accuracy": 0.5074}},
    },
    "table11": {
        "cifar10": {
            "fedavg": {"milliseconds": 16.102, "milliseconds_gpu": 16.154, "parameters_millions": 14.991},
            "uefl": {"milliseconds": 16.611, "milliseconds_gpu": 16.733, "parameters_millions": 15.491},
        }
    },
    "fedul-article": {
        split: {arm: {"accuracy": round(1 - error / 100, 4)} for arm, error in errors.items()}
        for split, errors in (
            ("iid", {"fedul": 0.78, "fedul-m1": 0.69, "fedul-m2": 0.69}),
            ("noniid", {"fedul": 2.98, "fedul-m1": 0.77, "fedul-m2": 0.79}),
        )
    },
    "table12": {
        "fashion": {
            "fedavg": {"accuracy": 0.8745},
            "vhl": {"accuracy": 0.9152},
            "uefl": {"accuracy": 0.9059},
        },
        "cifar10": {
            "fedavg": {"accuracy": 0.5899},
            "vhl": {"accuracy": 0.6123},
            "fedbr": {"accuracy": 0.6461},
            "uefl": {"accuracy": 0.6267},
        },
    },
}
# tables 13 to 16: rows of clients or domains; the suites print their mean; VQ loss, perplexity, entropy,
# accuracy
BY_DOMAIN = {
    ("table14", "8", "uefl"): [
        (3.61, 4.78, 2.02, 0.257),
        (3.68, 4.86, 2.01, 0.265),
        (3.38, 4.81, 2.03, 0.249),
    ],
    ("table14", "16", "uefl"): [
        (3.41, 10.46, 1.36, 0.515),
        (3.55, 10.54, 1.37, 0.506),
        (3.23, 10.61, 1.39, 0.486),
    ],
    ("table14", "32", "uefl"): [
        (0.127, 25.91, 0.0412, 0.956),
        (0.0885, 25.42, 0.0313, 0.966),
        (0.178, 26.37, 0.117, 0.911),
    ],
    ("table14", "64", "uefl"): [
        (0.0975, 26.79, 0.0086, 0.965),
        (0.0853, 26.32, 0.0084, 0.974),
        (0.1907, 27.23, 0.0166, 0.926),
    ],
    ("table14", "128", "uefl"): [
        (0.0512, 38.73, None, 0.954),
        (0.0453, 34.16, None, 0.968),
        (0.0726, 43.42, None, 0.917),
    ],
    ("table14", "256", "uefl"): [
        (0.0543, 41.20, 0.0043, 0.962),
        (0.0301, 38.96, 0.0054, 0.959),
        (0.0577, 50.57, 0.0103, 0.904),
    ],
    ("table15", "mnist", "uefl-normal"): [
        (0.6202, 6.26, 0.125, 0.888),
        (0.6063, 5.99, 0.296, 0.554),
        (0.6096, 5.35, 0.267, 0.622),
    ],
    ("table15", "mnist", "uefl"): [
        (0.0862, 59.64, 0.0935, 0.945),
        (0.0785, 57.58, 0.1604, 0.906),
        (0.0779, 99.38, 0.1509, 0.929),
    ],
    ("table16", "cifar100", "static-512"): [
        (3.10, 17.54, 1.66, 0.142),
        (2.91, 17.41, 1.76, 0.135),
        (2.63, 16.82, 1.76, 0.112),
    ],
    ("table16", "cifar100", "uefl-128"): [
        (1.28, 19.31, 0.782, 0.375),
        (0.976, 27.42, 0.667, 0.341),
        (0.978, 22.00, 0.711, 0.304),
    ],
}
SILOS_13 = {  # accuracy and entropy of clients 1a, 1b, 1c, 2a, 3a
    "fedavg": ((0.964, 0.936, 0.964, 0.796, 0.508), (0.0312, 0.0252, 0.0499, 0.1477, 0.2560)),
    "uefl": ((0.952, 0.974, 0.944, 0.836, 0.828), (0.0291, 0.0170, 0.0308, 0.1261, 0.1048)),
}


def paper(name: str) -> dict[str, Any]:
    return {case: whole.paper for case, whole in suite.load(name).cases.items()}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_prints_the_numbers_of_the_paper(name: str) -> None:
    assert paper(name) == TABLES[name]


def test_tables_1_and_5_have_every_rotation_and_the_means() -> None:
    printed = paper("table1")
    for (arm, measure), rows in TABLE_5.items():
        for case, row in zip(SETS, rows, strict=True):
            numbers = printed[case][arm]
            measures = [*(f"{measure}@{angle}" for angle in DOMAINS), measure]
            assert [numbers[measure] for measure in measures] == list(row), (case, arm)


@pytest.mark.parametrize("name", UNSEEN)
def test_tables_2_and_3_have_every_domain_and_the_printed_means(name: str) -> None:
    whole = suite.load(name)
    assert [case for average in whole.averages.values() for case in average.cases] == list(whole.cases)
    for average, arms in UNSEEN[name].items():
        cases = whole.averages[average].cases
        for arm, row in arms.items():
            measured = [whole.cases[case].paper[arm] for case in cases] + [whole.averages[average].paper[arm]]
            assert [numbers["unseen_accuracy"] for numbers in measured] == list(row), (average, arm)


def test_tables_13_to_16_have_the_means_over_the_domains() -> None:
    for (name, case, arm), rows in BY_DOMAIN.items():
        for measure, column in zip(
            ("vq_loss", "perplexity", "entropy", "accuracy"), zip(*rows, strict=True), strict=True
        ):
            found = paper(name)[case][arm].get(measure)
            if None in column:
                assert found is None
            else:
                assert found == pytest.approx(statistics.fmean(column), rel=0.006), (name, case, arm, measure)
    # section 4.1 prints one number for codebooks of the domains
    assert paper("table13")["mnist"]["per-domain"] == {"accuracy": 0.907}
    for arm, (accuracy, entropy) in SILOS_13.items():
        numbers = paper("table13")["mnist"][arm]
        assert numbers["accuracy"] == pytest.approx(statistics.fmean(accuracy), abs=0.001)
        assert numbers["entropy"] == pytest.approx(statistics.fmean(entropy), abs=0.001)
        by_angle = (statistics.fmean(accuracy[:3]), accuracy[3], accuracy[4])
        assert [numbers[f"accuracy@{angle}"] for angle in DOMAINS] == pytest.approx(by_angle, abs=0.001)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_suite_has_the_settings_of_its_sources(name: str) -> None:
    configs = suite.load(name).configs("paper")
    assert list(configs) == list(SETTINGS[name])
    for case, cfg in configs.items():
        expected = config.load(SETTINGS[name][case])
        assert cfg.table() == expected.table(), case
        assert list(cfg.arms) == list(expected.arms), case


@pytest.mark.parametrize(
    ("arm", "layers"),
    [
        ("fedavg", [(784, 1024), (1024, 1024), (1024, 3)]),
        ("fedsr", [(784, 1024), (1024, 1024), (1024, 2 * 256), (256, 3)]),
        ("fedcr", [(784, 1024), (1024, 1024), (1024, 2 * 512), (512, 3)]),
        ("uefl", [(784, 1024), (1024, 1024), (1024, 3)]),
    ],
)
def test_all_arms_of_table_4_have_the_layers_of_fedcr(arm: str, layers: list[tuple[int, int]]) -> None:
    cfg = suite.load("table4").configs("paper")["emnist-letters"]
    fed = replace(federation(), shape=(1, 28, 28))  # three classes
    net = workspace_of(replace(cfg, arms={arm: cfg.arms[arm]}), fed).net
    assert [(layer.in_features, layer.out_features) for layer in linear_layers(net)] == layers


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("table7", "angles"),
        ("table14", "codewords"),
        ("segments", "segments"),
        ("segments-cifar100", "segments"),
        ("threshold", "gamma"),
        ("fedul-h", "h"),
    ],
)
def test_the_axis_of_a_sweep_is_the_key_that_differs(name: str, key: str) -> None:
    for case, sections in SETTINGS[name].items():
        (*_, arm) = sections["arms"].values()
        value = (sections["data"]["partition"] | arm)[key]
        assert suite.load(name).cases[case].x == (max(value) if key == "angles" else value)


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_table_8_gives_fedavg_no_additional_iterations(scale: suite.Scale) -> None:
    configs = suite.load("table8").configs(scale)
    for case, cfg in configs.items():
        if case.endswith("-uefl"):
            first = configs[case.removesuffix("-uefl")]
            assert (list(first.arms), list(cfg.arms)) == (["fedavg"], ["uefl"])
            assert (first.training.iterations(), first.data) == (cfg.training.iterations()[:1], cfg.data)
            assert suite.load("table8").baseline(case) == (case.removesuffix("-uefl"), "fedavg")


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_table_15_changes_only_the_start_of_new_codewords(scale: suite.Scale) -> None:
    (cfg,) = suite.load("table15").configs(scale).values()
    keys = {name: arm.parameters.model_dump() for name, arm in cfg.arms.items()}
    assert [keys[f"{arm}-normal"].pop("new_codewords") for arm in ("uefl", "extend-all")] == ["normal"] * 2
    assert [keys[arm].pop("new_codewords") for arm in ("uefl", "extend-all")] == ["kmeans"] * 2
    assert keys["uefl-normal"] == keys["uefl"]
    assert keys["extend-all-normal"] == keys["extend-all"]
    assert (
        keys["static-96"]["codewords"]
        == 3 * keys["extend-all"]["codewords"]
        == 3 * keys["static-32"]["codewords"]
    )


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_both_variants_of_table_16_end_with_equal_codewords(scale: suite.Scale) -> None:
    for cfg in suite.load("table16").configs(scale).values():
        extensions = len(cfg.training.iterations()) - 1
        for arm in cfg.arms.values():
            p = arm.parameters
            assert p.codewords * (2**extensions if p.growth == "double" and p.extend != "none" else 1) == 512


def test_the_bridge_changes_one_thing_at_a_time_for_all_arms() -> None:
    """The bridge leads from the published code to uefl's defaults, in the same steps for both data sets."""
    configs = suite.load("bridge").configs("cpu")
    changed: dict[str, list[set[str]]] = {}
    for (one, before), (two, after) in itertools.pairwise(configs.items()):
        data = one.partition("-")[0]
        if two.startswith(data):
            changed.setdefault(data, []).append(
                {key for key in differing([before.table(), after.table()]) if ".uefl." not in key}
            )
            assert list(before.arms) == list(after.arms) == ["fedavg", "fedper", "personal", "uefl"]
    assert changed["mnist"] == [
        {"data.normalize"},
        {"model.logit_dropout"},
        {"training.lr", "training.local_steps"},
        {"run.passes"},
        set(),
        set(),
        {"data.holdout", "data.legacy_holdout"},
        {"run.passes"},
    ]
    assert changed["fashion"] == changed["mnist"]
    for data in ("mnist", "fashion"):
        arms = [cfg.arms["uefl"] for case, cfg in configs.items() if case.startswith(data)]
        assert [arm.algorithm for arm in arms] == ["uefl-published"] * 4 + ["uefl"] * 5
        chosen = [(arm.parameters.personal, arm.parameters.reinit) for arm in arms[4:]]
        assert chosen == [(True, True), (False, True), (False, False), (False, False), (False, False)]
        assert {arm.parameters.reference for arm in arms[4:]} == {"min"}


@pytest.mark.parametrize("step", ["published", "corrected"])
def test_other_sizes_of_the_bridge_change_its_size_alone(step: str) -> None:
    at = {"published": "mnist-published", "corrected": "mnist-passes"}[step]
    same, other = suite.load("bridge").configs("cpu")[at], suite.load("bridge-sizes").configs("cpu")
    same = replace(same, arms={name: same.arms[name] for name in ("fedavg", "uefl")})
    for size, key in (("wider", "model.width"), ("longer", "training.rounds")):
        tables = [same.table(), other[f"{step}-{size}"].table()]
        assert set(differing(tables)) == {key, "run.seed", "run.personalized"}


def test_table_1_has_the_published_code_and_a_personal_control() -> None:
    for scale in ("cpu", "paper"):
        for cfg in suite.load("table1").configs(scale).values():
            ours, published = (cfg.arms[name].parameters for name in ("uefl", "uefl-published"))
            assert (published.codewords, published.segments, published.gamma) == (
                ours.codewords,
                ours.segments,
                ours.gamma,
            )
            assert published.reference == "mean"
            assert "fedper" in cfg.arms


def test_the_longer_table_1_has_its_numbers_and_its_arms() -> None:
    whole, longer = suite.load("table1"), suite.load("table1-longer")
    for case, cfg in longer.configs("cpu").items():
        of_table = whole.configs("paper")[case]
        assert (cfg.data.source, cfg.data.partition) == (of_table.data.source, of_table.data.partition)
        assert all(cfg.arms[arm] == of_table.arms[arm] for arm in ("fedavg", "distrans", "uefl"))
        for arm, numbers in longer.cases[case].paper.items():
            assert numbers.items() <= whole.cases[case].paper[arm].items()


def test_only_tables_of_a_paper_print_its_numbers() -> None:
    for name, about in suite.suites().items():
        whole = suite.load(name)
        of_a_table = re.search(r"[Tt]able", about) and not re.search(
            r"not in the paper|without numbers", about
        )
        assert of_a_table or not any(case.paper for case in whole.cases.values()), name


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_the_papers_figures_have_suites(scale: suite.Scale) -> None:
    sweep = suite.load("fedul-h")
    weights = [case.arms["fedul-m2"].parameters.model_dump()["h"] for case in sweep.configs(scale).values()]
    assert weights == [case.x for case in sweep.cases.values()]
    assert sweep.front == ("train_loss", "nll")
    # surrogate and supervised loss of the article's figures 1 to 4
    assert {"train_loss", "server_loss"} <= set(suite.load("fedul-article").measures)
    (first,) = suite.load("figure1").configs(scale).values()
    assert first.run.personalized
    for name, cfg in suite.load("late").configs(scale).items():
        assert len(cfg.run.joins) == {"known": 1, "new": 3}[name]
        assert set(cfg.run.joins.values()) == {cfg.training.rounds[0] + 1}
    table7 = suite.load("table7").configs(scale)["50"]
    for case, cfg in suite.load("segments-cifar100").configs(scale).items():
        assert (cfg.data, cfg.training) == (table7.data, table7.training)
        assert cfg.arms["uefl"].parameters.model_dump()["segments"] == int(case)
