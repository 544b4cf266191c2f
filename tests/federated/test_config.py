import ast
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from uefl import config
from uefl.algorithms.base import registry
from uefl.cli import app
from uefl.config import Model, RunSection, Training, docs
from uefl.config.config import tomllib
from uefl.data import build
from uefl.data.settings import Data
from uefl.data.sources import SOURCES
from uefl.errors import UserError

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
ARMS = {"arms": {"fedavg": {}}}


def table(**sections):
    return ARMS | sections


def test_the_document_is_the_generated_one():
    text = DOCUMENT.read_text()
    assert docs.rewritten(text) == text, "python -m uefl.config.docs docs/configuration.md"
    parameters = [algorithm.Parameters for algorithm in registry().values()]
    for kind in (RunSection, Data, Model, Training, *parameters):
        for key, field in kind.model_fields.items():
            assert field.description, f"{kind.__qualname__}.{key} has no description"


def test_the_document_names_every_data_set():
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    for name in SOURCES:
        if SOURCES[name].__module__.startswith("uefl."):
            (row,) = (row for row in rows if row.startswith(f"| `{name}` | "))
            assert len(row) > 40


def test_a_document_without_a_generated_part_is_refused():
    with pytest.raises(ValueError, match="generated"):
        docs.rewritten("# Configuration\n")


def test_the_keys_of_one_section_are_printed():
    titles = [title for title, _ in docs.sections()]
    assert len(titles) == len(set(titles)) > 30
    result = CliRunner().invoke(app, ["keys", "Training"])
    assert [line for line in result.output.splitlines() if line.startswith("#")] == ["### `[training]`"]
    assert set(re.findall(r"^\| `(\w+)`", result.output, re.M)) == set(Training.model_fields)
    assert CliRunner().invoke(app, ["keys", "trainings"]).exit_code == 2


def test_no_message_names_a_page_of_the_sources():
    """A wheel contains no docs, so messages name commands."""
    named, seen = [], 0
    root = DOCUMENT.parents[1]
    for path in (file for package in ("uefl", "uefl_kernels") for file in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
                seen += 1
                if re.search(r"(?<![\w/.-])docs/", node.value):
                    named.append(f"{path.relative_to(root)}:{node.lineno} {node.value}")
    presets = [f"{name}: docs/" for name in config.presets() if "docs/" in config.preset_text(name)]
    assert named + presets == []
    assert seen > 5000


def test_every_preset_loads_and_is_described_by_its_first_line():
    assert {"demo", "mnist-9", "mnist-9-published", "own-silos", "comparators"} <= set(config.presets())
    groups = config.preset_groups()
    assert sum(map(len, groups.values())) == len(config.presets()) <= 14
    assert all(len(presets) <= 5 for presets in groups.values())
    for name, description in config.presets().items():
        assert len(description) > 20
        config.load(name)


def test_published_settings():
    paper, published = config.load("mnist-9"), config.load("mnist-9-published")
    for c in (paper, published):
        t = c.training
        assert (c.model.width, t.local_epochs, t.lr, t.batch_size, c.run.passes) == (128, 20, 1e-4, 1024, 20)
        assert (c.data.clients, c.data.train_per_client, c.data.test_per_client) == (9, 2000, 500)
    p = paper.arms["uefl"].parameters
    assert (p.codewords, p.gamma, p.reference, p.segments, p.commitment) == (32, 0.3, "min", 1, 0.25)
    p = published.arms["uefl-published"].parameters
    assert (p.codewords, p.gamma, p.reference) == (64, 0.1, "mean")
    assert (published.data.normalize, published.data.legacy_holdout) == ("raw", True)
    assert published.model.logit_dropout


@pytest.mark.parametrize("name", ["demo", "mnist-9-published", "own-silos", "fedul-article", "comparators"])
def test_toml_round_trip(tmp_path, name):
    first = config.load(name, ["seed=7", "lr=0.1234567890123456"])
    path = tmp_path / "config.toml"
    path.write_text(first.to_toml())
    assert config.load_whole(path) == config.load(str(path)) == config.from_toml(first.to_toml()) == first


# --- files and their base ---------------------------------------------------------------------------------


def written(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    return str(tmp_path / "mine.toml")


def test_a_base_is_merged_key_by_key(tmp_path):
    demo = config.load("demo")
    text = 'base = "demo"\ntraining = {lr = 0.5}\ndata = {clients = 3, partition = {angles = [1, 2, 3]}}\n'
    mine = config.load(written(tmp_path, text))
    assert mine.training == demo.training.model_copy(update={"lr": 0.5})
    assert (mine.data.clients, mine.data.partition.angles) == (3, (1, 2, 3))
    assert mine.data.train_per_client == demo.data.train_per_client
    assert mine.arms == demo.arms


@pytest.mark.parametrize("clients", [3, 6, 9])
def test_the_demo_takes_another_number_of_clients(clients):
    data = config.load("demo", [f"clients={clients}", "train_per_client=20", "test_per_client=10"]).data
    assert len(build(data, kind="labeled", seed=0).clients) == clients


def test_names_with_commas_error_shows_the_list_syntax():
    with pytest.raises(UserError, match=r"""'arms=\["uefl","fedavg"\]'"""):
        config.load("demo", ["arms=uefl,fedavg"])


def test_another_scheme_by_set_inherits_nothing():
    assert "angles" in config.load("demo").table()["data"]["partition"]
    changed = config.load("demo", ["data.partition.scheme=classes", "data.partition.per_client=3"])
    assert changed.table()["data"]["partition"] == {"scheme": "classes", "per_client": 3}
    assert config.load("demo", ["data.partition.scheme=rotations"]) == config.load("demo")


def test_a_partition_of_another_scheme_inherits_nothing(tmp_path):
    text = 'base = "demo"\n[data.partition]\nscheme = "classes"\nper_client = 3\n'
    assert config.load(written(tmp_path, text)).data.partition.per_client == 3


def test_arms_in_a_file_replace_and_inherit_base_arms(tmp_path):
    text = 'base = "demo"\n[arms.uefl]\ngamma = 0.9\n[arms.apart]\nalgorithm = "fedavg"\n'
    mine = config.load(written(tmp_path, text))
    assert list(mine.arms) == ["uefl", "apart"]
    assert (mine.arms["uefl"].parameters.gamma, mine.arms["uefl"].parameters.segments) == (0.9, 4)
    assert mine.arms["apart"].algorithm == "fedavg"


def test_arms_are_selected_by_name(tmp_path):
    mine = config.load(written(tmp_path, 'base = "demo"\narms = ["uefl", "fedprox"]\n'))
    assert (mine.arms["uefl"].parameters.segments, mine.arms["fedprox"].parameters.mu) == (4, 0.01)
    assert list(config.load("demo", ["arms=uefl"]).arms) == ["uefl"]
    assert list(config.load("demo", ['arms=["fedbn", "fedavg"]']).arms) == ["fedbn", "fedavg"]


def test_one_algorithm_may_have_two_arms():
    cfg = config.load("demo", ['arms=["fedavg", "uefl"]', "arms.one.algorithm=uefl", "arms.one.segments=1"])
    assert [arm.algorithm for arm in cfg.arms.values()] == ["fedavg", "uefl", "uefl"]
    assert [cfg.arms[name].parameters.segments for name in ("uefl", "one")] == [4, 1]


@pytest.mark.parametrize("base", ['"mnist"', "3", '["demo"]'])
def test_a_base_must_be_a_preset(tmp_path, base):
    with pytest.raises(UserError, match=r"key 'base': .*presets`"):
        config.load(written(tmp_path, f"base = {base}"))


def test_a_file_with_a_byte_order_mark(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b'\xef\xbb\xbfbase = "demo"\n')
    assert config.load(str(tmp_path / "mine.toml")) == config.load("demo")


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match=r"absent.toml .*\.toml"):
        config.load(str(tmp_path / "absent.toml"))
    for content in (b"[data", b"\xff\xfe", b"a = " + 5000 * b"[", b"a = " + 5000 * b"9"):
        (tmp_path / "broken.toml").write_bytes(content)
        with pytest.raises(UserError, match=r"broken.toml .*TOML") as error:
            config.load(str(tmp_path / "broken.toml"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("table", [{1: {}}, {"run": {1: 2}}, {"data": {"partition": {None: 1}}}], ids=str)
def test_keys_must_be_text(table):
    with pytest.raises(UserError, match=r"key (1|None): expected .*text"):
        config.load(table)


def test_tables_inside_each_other_have_a_limit(tmp_path):
    with pytest.raises(UserError, match=r"tables|TOML"):
        config.load(written(tmp_path, f"[{'.'.join(3000 * 'a')}]\nb = 1\n"))


def test_a_truncated_or_foreign_configuration_is_refused(tmp_path):
    path, text = tmp_path / "config.toml", config.load("demo").to_toml()
    for damaged, message in (
        ('arms = ["fedavg"]\nwidth = 64\n', r"config\.toml .*\[run\]"),
        (text.replace("quorum = 1.0\n", ""), r"config\.toml .*key 'run\.quorum'"),
        (text.replace("width = 8", "width = -3"), r"config\.toml: key 'model\.width': .*\b1; .*-3"),
    ):
        path.write_text(damaged)
        with pytest.raises(UserError, match=rf"{message}.*\bversion"):
            config.load_whole(path)


# --- overrides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("lr=0.5", "training.lr", 0.5),
        ("training.lr=1", "training.lr", 1.0),
        (" seed = 3 ", "run.seed", 3),
        ("precision=fp32", "run.precision", "fp32"),
        ('precision="fp32"', "run.precision", "fp32"),
        ("logit_dropout=true", "model.logit_dropout", True),
        ("rounds=[3, 2]", "training.rounds", (3, 2)),
        ("data.source=/some/place=here", "data.source", "/some/place=here"),
        ("train_per_client=7", "data.train_per_client", 7),
        ("angles=[0,1,2,3,4,5,6,7,8.5]", "data.partition.angles", (0, 1, 2, 3, 4, 5, 6, 7, 8.5)),
        ("data.partition.legacy_center=true", "data.partition.legacy_center", True),
        ("arms.uefl.gamma=0.5", "arms.uefl.gamma", 0.5),
        ("gamma=0.5", "arms.uefl.gamma", 0.5),
    ],
)
def test_overrides(override, place, value):
    cfg = config.load("demo", [override])
    section, *path = place.split(".")
    found = cfg.arms[path.pop(0)].parameters if section == "arms" else getattr(cfg, section)
    for key in path:
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_bare_parameter_applies_to_every_arm_that_has_it():
    arms = config.load("comparators", ["commitment=0.7"]).arms
    changed = {name for name, arm in arms.items() if getattr(arm.parameters, "commitment", None) == 0.7}
    assert changed == {"one-codebook", "one-segment", "uefl"}


def test_an_ambiguous_key_is_refused_with_the_list(monkeypatch):
    class Parameters(registry()["uefl"].Parameters):
        lr: float = 1.0

    monkeypatch.setattr(registry()["uefl"], "Parameters", Parameters)
    with pytest.raises(UserError, match=r"key 'lr' .*training.lr, arms.uefl.lr$"):
        config.load("demo", ["arms=uefl", "lr=0.1"])
    assert config.load("demo", ["training.lr=0.1"]).arms["uefl"].parameters.lr == 1.0


def test_bare_key_may_come_before_its_section():
    orders = itertools.permutations(["alpha=0.4", "scheme=dirichlet", "convention=over_clients"])
    for items in orders:
        partition = config.load("demo", ["arms=fedavg", *items]).data.partition
        assert (partition.name, partition.alpha, partition.convention) == ("dirichlet", 0.4, "over_clients")
    for items in itertools.permutations(["scheme=dirichlet", "alpha=0.4", "arms.other.algorithm=distrans"]):
        with pytest.raises(UserError, match=r"key 'alpha' .*data.partition.alpha, arms.other.alpha$"):
            config.load("demo", [*items, "convention=over_clients"])
    assert list(config.load("demo", ["gamma=0.1", "arms=fedavg"]).arms) == ["fedavg"]
    with pytest.raises(UserError, match="key 'gamma'"):
        config.load("demo", ["arms=fedavg", "gamma=0.1"])
    assert config.load("demo", ["mu=0.5", 'arms=["fedavg", "fedprox"]']).arms["fedprox"].parameters.mu == 0.5
    # the later one
    assert config.load("demo", ["gamma=0.1", "arms.uefl.gamma=0.3"]).arms["uefl"].parameters.gamma == 0.3


def test_integers_of_numpy():
    found = config.load("demo", model={"width": np.int64(4)}, rounds=[np.uint8(3), np.int32(2)])
    assert (found.model.width, found.training.rounds) == (4, (3, 2))
    assert type(found.model.width) is int


def test_later_overrides_and_keywords_win():
    assert config.load("demo", ["seed=1", "seed=2"]).run.seed == 2
    assert config.load("demo", ["seed=1"], run={"seed": 3}).run.seed == 3
    assert config.load("demo", ["seed=1"], seed=None, lr=0.5).run.seed == 1
    assert list(config.load("demo", arms={"fedavg": {}}).arms) == ["fedavg"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gama=1", "key 'gama' .*'gamma'.*`uefl .*keys`"),
        ("run.lr=3", r"key 'lr' .*\[run\]; .*\[training\]"),
        ("arms.uefl.gama=1", r"key 'gama' .*\[arms.uefl\] .*'gamma'"),
        ("data.partition.angels=[0]", r"key 'angels' .*\[data.partition\] .*'angles'"),
        (
            "data.partition.sets=4",
            r"key 'sets' .*\[data.partition\]; .*\[data.partition\] .*scheme = 'unlabeled'",
        ),
        ("sets=4", r"key 'sets'; .*\[data.partition\] .*scheme = 'unlabeled'"),
        ("loss=nll", "key 'loss'; .*algorithm = "),
        ("fedcr.samples=4", r"key 'fedcr.samples'; .*\[arms.fedcr\]"),
        ("algorithm=fedprox", r"key 'algorithm'; .*\[arms.NAME\]"),
        ("gamma", "'gamma': .*key=value"),
        ("seed=1\nlr=2", r"'seed=1\\nlr=2': .*key=value"),
        ("arms.uefl=3", "arms.uefl: .*arms.NAME.key=value"),
        ("arms=['uefl', 'uefl']", "key 'arms': .*names"),
        ("arms=fedavgg", "key 'arms.fedavgg': .*'fedavg'.*algorithm = \"...\""),
        ("arms.nobody.gamma=1.0", "key 'arms.nobody': .*'nobody'; .*algorithm = "),
        ("data=runs/x", "key 'data' .*data.source=runs/x"),
        ("training=3", "key 'training' .*training.lr=VALUE"),
        ("arms.a/b.algorithm=uefl", r"key 'arms': 'a/b' .*\b40\b"),
        ("arms=[]", r"key 'arms': .*\[arms.NAME\]; .*centralized, "),
        ("arms.x.algorithm=fedul", "key 'arms': .*labeled.*unlabeled.*: fedavg"),
        ("scheme=rotation", "key 'data.partition': 'rotation' .*'rotations'"),
        ("lr=fast", "key 'training.lr': .*'fast'$"),
        ("rounds=[]", r"key 'training.rounds': .*\b1 item; .*\[\]$"),
        ("source=", r"key 'data.source': .*\b1 character; .*''$"),
        ("arms.uefl.personal=last", "key 'arms.uefl.personal': .*'last'$"),
        ("personalized=yes", "key 'run.personalized': .*'yes'$"),
        ("data.partition.scheme=leave_one_out", "key 'data.partition.domain' .*missing"),
        ("data.partition=natural", "key 'data.partition': .*data.partition.scheme=natural"),
        ("partition.scheme=natural", "key 'partition.scheme' .*'data.partition.scheme'"),
        ("trainin=1", "key 'trainin' .*'training'"),
        ("trainin.lr=1", "key 'trainin.lr' .*'training.lr'"),
        ("threads=3.5", r"key 'run.threads': .*integer; .*\b3.5$"),
        ("seed=true", "key 'run.seed': .*integer; .*True$"),
        ("encoder=resnet", "key 'model.encoder': .*'cnn', 'cnn5x5', .*'vgg16_bn' .*'given'; .*'resnet'"),
        ("batch_size=9223372036854775808", r"key 'training.batch_size': .*\b64 bits; .*808$"),
        ("rounds=[1, 100000000000000000000]", r"key 'training.rounds.1': .*\b64 bits"),
        ("rounds=5", r"key 'training.rounds': .*\[1\]; .*\b5$"),
        ("image_size=100000", r"key 'data.image_size': .*\b1024; .*\b100000$"),
        ("passes=4294967296", r"key 'run.passes': .*\b100000; .*\b4294967296$"),
    ],
)
def test_mistakes_are_one_line(override, message):
    with pytest.raises(UserError, match=rf"^(unknown |--set )?{message}") as error:
        config.load("demo", [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("section", ["run", "training"])
def test_a_section_that_is_no_table_takes_no_key(section):
    with pytest.raises(UserError, match=f"--set {section}.x: '{section}' .*table$"):
        config.load({section: 3, "arms": {"fedavg": {}}}, [f"{section}.x=1"])


def test_the_error_of_a_misplaced_key_names_its_section():
    for key, place in (
        ("lr", r"\[training\]"),
        ("gamma", r"\barms .*algorithm = "),
        ("angles", r"\[data.partition\] .*scheme = "),
    ):
        with pytest.raises(UserError, match=rf"key {key!r} .*{place}"):
            config.from_table(table(**{key: 1}))
    with pytest.raises(UserError, match=r"key 'trainin' .*'training'"):
        config.from_table(table(trainin={}))
    with pytest.raises(UserError, match=r"key 'run': .*\[run\], .*\b3$"):
        config.from_table(table(run=3))


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"'mnist9' .*'mnist-9'.*presets"):
        config.load("mnist9")


# --- ranges and what goes together ------------------------------------------------------------------------


def _numbers(kind: type[BaseModel]):
    return [key for key, field in kind.model_fields.items() if field.annotation in (int, float)]


KINDS = {"run": RunSection, "model": Model, "training": Training}


@pytest.mark.parametrize(
    ("section", "key"), [(name, key) for name, kind in KINDS.items() for key in _numbers(kind)]
)
def test_every_number_has_a_range_and_is_finite(section, key):
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(UserError, match=f"key '{section}.{key}': expected "):
            config.from_table(table(**{section: {key: value}}))


@pytest.mark.parametrize("name", registry())
def test_every_number_of_an_algorithm_has_a_range(name):
    for key in _numbers(registry()[name].Parameters):
        with pytest.raises(UserError, match=f"key 'arms.{name}.{key}': expected .*-1"):
            config.from_table({"arms": {name: {key: -1}}})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"encoder": "vgg16_bn", "width": 64}}, "key 'model.width': .*default 128, .*vgg16_bn"),
        ({"model": {"pretrained": True}}, r"key 'model.pretrained': cnn\b"),
        ({"model": {"encoder": "cnn5x5", "hidden": 3}}, "key 'model.hidden': .*default 512"),
        ({"model": {"encoder": "cnn5x5", "pooled": True}}, "key 'model.pooled': .*default False"),
        ({"training": {"batch_size": 1}}, r"key 'training.batch_size': .*\b2 .*\b1$"),
        ({"run": {"passes": 7}, "arms": {"uefl-published": {}}}, "key 'run.passes': .*default 20, .*dropout"),
        ({"training": {"momentum": 0.9}}, "key 'training.momentum': .*default 0.0, .*optimizer = 'sgd'"),
        ({"run": {"members": 3}}, "key 'run.members': .*default 5"),
        ({"run": {"select": "validation"}}, "key 'run.select': .*default 'last', .*unlabeled"),
        (
            {"run": {"select": "holdout"}, "arms": {"fedul": {}}, "training": {"rounds": [1]}},
            "key 'run.select': .*'last', .*holdout",
        ),
        (
            {"run": {"select": "holdout"}, "data": {"legacy_holdout": True}},
            "key 'run.select': .*'last', .*legacy_holdout",
        ),
        ({"data": {"labeled": 3}}, "key 'data.labeled': .*default 0, .*unlabeled"),
        ({"arms": {"fedul": {}}}, "key 'training.rounds': .*unlabeled"),
        (
            {"arms": {"fedul": {}}, "training": {"rounds": [1], "batch_size": 1}},
            r"key 'training.batch_size': .*\b2\b",
        ),
        ({"arms": {"fedul": {"test_prior": [0.5, 0.1]}}}, r"key 'arms.fedul': test_prior: .*\b1, .*\b0.6"),
    ],
)
def test_incompatible_keys_are_errors(sections, message):
    with pytest.raises(UserError, match=rf"^{message}"):
        config.from_table(table(**sections))


def test_iterations():
    for keys, expected in (
        ({"rounds": [8, 4, 4]}, [8, 4, 4]),
        ({"rounds": [8, 4], "max_iterations": 4}, [8, 4, 4, 4]),
        ({"rounds": [8, 4, 2], "max_iterations": 2}, [8, 4]),
    ):
        assert config.from_table(table(training=keys)).training.iterations() == expected


def test_every_key_is_written_in_toml():
    cfg = config.load("demo")
    assert set(tomllib.loads(cfg.to_toml())["run"]) == set(RunSection.model_fields)


def test_paths_of_a_run_are_absolute(tmp_path, monkeypatch):
    """A run goes on from any working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v1").mkdir()
    (tmp_path / "silos").symlink_to("v1")
    (tmp_path / "weights.pth").touch()
    keys = {"data": {"source": "silos"}, "model": {"encoder": "resnet18", "pretrained": "weights.pth"}}
    cfg = config.load(keys | {"arms": {"fedavg": {}}}).absolute()
    assert (cfg.data.source, cfg.model.pretrained) == (str(tmp_path / "v1"), str(tmp_path / "weights.pth"))
