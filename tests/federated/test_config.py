import dataclasses
import re
from pathlib import Path

import pytest

from uefl import config, rules
from uefl.config import Config, tomllib
from uefl.errors import UserError

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_document_lists_every_key_in_order_with_its_default():
    rows = re.findall(r"^\| `([a-z]\w*)` \| `([^`]*)` \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    documented = [(key, tomllib.loads(f"value = {default}")["value"]) for key, default, _ in rows]
    fields = dataclasses.fields(Config)
    assert documented == [(f.name, list(f.default) if isinstance(f.default, tuple) else f.default) for f in fields]


def test_document_names_every_choice():
    rows = dict(re.findall(r"^\| `([a-z]\w*)` \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE))
    for key, choices in {**rules._CHOICES, "arms": rules._ARMS}.items():
        assert [choice for choice in choices if f"`{choice}`" not in rows[key]] == []


def test_every_preset_loads_and_is_described_by_its_first_line():
    presets = config.presets()
    assert {"demo", "mnist-9", "mnist-5", "fashion-9", "mnist-9-legacy", "own-silos"} <= set(presets)
    for name, description in presets.items():
        assert len(description) > 20
        config.load(name)


def test_a_preset_may_name_only_what_differs_from_another(tmp_path):
    base, noniid = config.load("fedul-mnist-iid-40"), config.load("fedul-mnist-noniid-40")
    assert (base.sets, base.penalty, base.batch_size) == (40, 2e-6, 128)
    assert dataclasses.replace(base, split="noniid") == noniid
    (tmp_path / "mine.toml").write_text('base = "fedul-mnist-noniid-40"\nrounds = [7]\n')
    assert config.load(str(tmp_path / "mine.toml"), ["sets=30"]) == dataclasses.replace(noniid, rounds=(7,), sets=30)


@pytest.mark.parametrize(("data", "template"), [("digits", "fedul-demo"), ("my.npz", "fedul-demo"), ("my-sets", "own-sets")])
def test_a_first_file_with_arms_on_sets_is_told_which_keys_it_lacks(tmp_path, data, template):
    file, words = tmp_path / "mine.toml", f'arms = ["fedul"]\ndata = "{data}"\n'
    hint = rf"; write rounds = \[20\] and rotations = \[\], or begin the file with base = '{template}'; got \("
    for key, more in (("rounds", ""), ("rotations", "rounds = [20]\n")):
        file.write_text(words + more)
        with pytest.raises(UserError, match=f"key '{key}': expected .*{hint}"):
            config.load(str(file))
    for cure in ("rounds = [20]\nrotations = []\n", f'base = "{template}"\n'):
        file.write_text(words + cure)
        assert config.load(str(file)).data == data


@pytest.mark.parametrize("base", ['"mnist"', "3", '["demo"]'])
def test_a_base_that_is_no_preset(tmp_path, base):
    (tmp_path / "mine.toml").write_text(f"base = {base}")
    with pytest.raises(UserError, match=r"key 'base': expected the name of a preset, got .*; see `uefl presets`"):
        config.load(str(tmp_path / "mine.toml"))


def test_published_settings():
    paper, legacy = config.load("mnist-9"), config.load("mnist-9-legacy")
    for c in (paper, legacy):
        assert (c.width, c.segments, c.local_epochs, c.lr, c.batch_size, c.passes, c.commitment) == (128, 1, 20, 1e-4, 1024, 20, 0.25)
        assert (c.clients, c.train_per_client, c.test_per_client) == (9, 2000, 500)
    assert (paper.mode, paper.codewords, paper.gamma, paper.reference) == ("paper", 32, 0.3, "min")
    assert (legacy.mode, legacy.codewords, legacy.gamma, legacy.reference) == ("legacy", 64, 0.1, "mean")
    assert (legacy.normalize, legacy.logit_dropout, legacy.arms) == ("raw", True, ("uefl",))
    assert config.load("mnist-5").rotations == (0, 0, 0, -50, 120)


@pytest.mark.parametrize("name", ["demo", "mnist-9-legacy", "own-silos"])
def test_toml_round_trip(tmp_path, name):
    first = config.load(name, ["seed=7", "lr=0.1234567890123456"])
    path = tmp_path / "config.toml"
    path.write_text(first.to_toml())
    assert config.load(str(path)) == first


def test_the_configuration_of_an_older_run_names_the_key_it_lacks(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(re.sub("uncertainty = .*\n", "", Config().to_toml()))
    with pytest.raises(
        UserError, match=r"config.toml lacks the key 'uncertainty': it is cut off, or of another version; .* start a new run"
    ):
        config.load_whole(path)
    path.write_text(Config().to_toml().replace('encoder = "cnn"', 'encoder = "resnet18"').replace("width = 128", "width = 64"))
    refused = r"config.toml: key 'width': .* does not use it; got 64. It was changed, or is of another version; restore it, or start a new"
    with pytest.raises(UserError, match=refused):
        config.load_whole(path)
    assert config.load_past(path).width == 64


def test_keys_that_came_later_need_not_be_in_a_past_run(tmp_path):
    path = tmp_path / "config.toml"
    past = Config(gamma=float("inf"), threads=2000)  # refused by now
    path.write_text(re.sub("(?m)^(uncertainty|members|deadline|sets) = .*\n", "", past.to_toml()))
    assert config.load_past(path) == past


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("width = 128", "width = -3"), "key 'width': must be at least 1, got -3"),
        (('normalize = "standard"', 'normalize = "Raw"'), "key 'normalize': 'Raw' is not one of standard, imagenet, raw"),
        (("members = 5", "members = 0"), "key 'members': expected 2 or more; got 0"),
        (("dropout = 0.1", "dropout = nan"), "key 'dropout': expected in [0, 1); got nan"),
        (("width = 128", "widht = 128"), "unknown key 'widht' (did you mean 'width'?)"),
        (("width = 128", 'width = "128"'), "key 'width': expected int, got '128'"),
        ((Config().to_toml(), "seed = 3"), "the key 'arms' is missing, which every run writes"),
        ((Config().to_toml().partition("quorum = ")[2], "1.0"), "the key 'max_update_norm' is missing, which every run writes"),
    ],
    ids=["range", "choice", "members", "nan", "unknown", "type", "cut-to-a-line", "cut-at-the-end"],
)
def test_values_of_a_past_run_are_checked_and_its_file_is_named(tmp_path, change, message):
    path = tmp_path / "config.toml"
    path.write_text(Config().to_toml().replace(*change, 1))
    named = re.escape(f"{path}: {message}")
    with pytest.raises(UserError, match=rf"^{named}.*\. It was changed, is cut off, or is of another version; restore it$"):
        config.load_past(path)


def test_a_home_that_nobody_has_is_a_path_like_others():
    assert config.from_table({"data": "~nobody-of-this-name/silos"}).path == Path("~nobody-of-this-name/silos")


def test_toml_holds_every_key():
    assert list(tomllib.loads(Config().to_toml())) == [f.name for f in dataclasses.fields(Config)]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("gamma=0.5", "gamma", 0.5),
        ("gamma=1", "gamma", 1.0),
        (" seed = 3 ", "seed", 3),
        ("reference=mean", "reference", "mean"),
        ('reference="mean"', "reference", "mean"),
        ("logit_dropout=true", "logit_dropout", True),
        ("rounds=[3, 2]", "rounds", (3, 2)),
        ('arms=["uefl"]', "arms", ("uefl",)),
        ("rotations=[0,1,2,3,4,5,6,7,8.5]", "rotations", (0, 1, 2, 3, 4, 5, 6, 7, 8.5)),
        ("data=/some/place=here", "data", "/some/place=here"),
    ],
)
def test_overrides(override, key, value):
    result = getattr(config.load("demo", [override]), key)
    assert result == value
    assert type(result) is type(value)


def test_later_overrides_and_keywords_win_and_none_is_passed_over():
    assert config.load("demo", ["seed=1", "seed=2"]).seed == 2
    assert config.load("demo", ["seed=1"], seed=3).seed == 3
    assert config.load("demo", ["seed=1"], seed=None).seed == 1


@pytest.mark.parametrize(
    ("keys", "iterations"),
    [
        ({"rounds": [8, 4, 4]}, [8, 4, 4]),
        ({"rounds": [8, 4], "max_iterations": 4}, [8, 4, 4, 4]),
        ({"rounds": [8, 4, 2], "max_iterations": 2}, [8, 4]),
    ],
    ids=["as-given", "last-repeated", "capped"],
)
def test_iterations(keys, iterations):
    assert config.from_table(keys).iterations() == iterations


@pytest.mark.parametrize("key", rules._CHOICES)
def test_choices_are_checked(key):
    with pytest.raises(UserError, match=f"key '{key}': 'other' is not one of {', '.join(rules._CHOICES[key])}"):
        config.from_table({key: "other"})


@pytest.mark.parametrize("key", rules._AT_LEAST_ONE)
def test_counts_are_at_least_one(key):
    with pytest.raises(UserError, match=f"key '{key}': must be at least 1, got 0"):
        config.from_table({key: 0})


@pytest.mark.parametrize(
    ("key", "value", "more"),
    [
        ("arms", [], {}),
        ("arms", ["uefl", "uefl"], {}),
        ("arms", ["fedprox"], {}),
        ("arms", ["fedavg", "uefl"], {"mode": "legacy"}),
        ("rounds", [], {}),
        ("rounds", [3, 0], {}),
        ("max_iterations", -1, {}),
        ("rotations", [0, 90], {"clients": 3}),
        ("dropout", 1.0, {}),
        ("dropout", -0.1, {}),
        ("dropout", float("nan"), {}),
        ("holdout", 0.0, {}),
        ("holdout", 1.0, {}),
        ("gamma", -0.1, {}),
        ("lr", 0.0, {}),
        ("lr", float("nan"), {}),
        ("commitment", -1.0, {}),
        ("quorum", 0.0, {}),
        ("quorum", 1.1, {}),
        ("max_update_norm", -1.0, {}),
        ("deadline", -1.0, {}),
        ("lr", float("inf"), {}),
        ("rotations", [0, float("nan")], {"clients": 2}),
        ("pretrained", True, {}),
        ("holdout", 0.3, {"mode": "legacy", "arms": ["uefl"]}),
        ("usage_aware", False, {"mode": "legacy", "arms": ["uefl"]}),
        ("ext_share", "group", {"mode": "legacy", "arms": ["uefl"]}),
        ("threshold", "current", {"mode": "legacy", "arms": ["uefl"]}),
        ("codebook_init", "kmeans", {"mode": "legacy", "arms": ["uefl"]}),
        ("threads", -1, {}),
        ("threads", 1025, {}),
        ("seed", -1, {}),
        ("seed", 2**31, {}),
        ("image_size", -1, {}),
        ("segments", 3, {}),
        ("segments", 3, {"encoder": "vgg16_bn"}),
    ],
)
def test_values_out_of_range_are_refused(key, value, more):
    with pytest.raises(UserError, match=f"key '{key}': expected .*; got ") as error:
        config.from_table({key: value, **more})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", ["", " "])
def test_empty_data_is_not_the_current_folder(data):
    with pytest.raises(UserError, match=r"^key 'data': is empty, expected the name of a data set or the path of your own data"):
        config.from_table({"data": data})


_NUMBERS = [f.name for f in dataclasses.fields(Config) if "float" in str(f.type)]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("key", _NUMBERS)
def test_numbers_are_finite(key, value):
    given = [value] if key in ("rotations", "test_prior") else value
    with pytest.raises(UserError, match=f"key '{key}': expected (a finite number|finite numbers); got "):
        config.from_table({key: given, "clients": 1})
    assert len(_NUMBERS) > 15


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("arms", ["fedavg-vq"]),
        ("rotations", []),
        ("dropout", 0.0),
        ("gamma", 0.0),
        ("quorum", 1.0),
        ("seed", 2**31 - 1),
        ("segments", 512),
        ("max_iterations", 0),
        ("threads", 1024),
    ],
)
def test_values_at_the_edge_are_taken(key, value):
    result = getattr(config.from_table({key: value}), key)
    assert result == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("encoder", ["vgg16_bn", "resnet18"])
def test_an_encoder_of_fixed_width_takes_none(encoder):
    for arms in (["uefl"], ["fedul"]):
        with pytest.raises(UserError, match=f"key 'width': expected its default .*, so leave it out: {encoder} does not use it; got 64"):
            config.from_table({"encoder": encoder, "width": 64, "arms": arms, "rotations": [], "rounds": [1]})


def test_segments_divide_the_channels_of_the_encoder():
    assert config.from_table({"encoder": "resnet18", "segments": 8}).segments == 8
    with pytest.raises(UserError, match=r"a divisor of the 12 channels \(4 x width\); got 8"):
        config.from_table({"encoder": "cnn", "width": 3, "segments": 8})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("clients", "9", "int"),
        ("clients", 9.0, "int"),
        ("clients", True, "int"),
        ("lr", True, "float"),
        ("lr", "fast", "float"),
        ("pretrained", 1, "bool"),
        ("data", 5, "str"),
        ("rounds", 5, "a list of int"),
        ("rounds", [1, "2"], "int"),
        ("arms", "uefl", "a list of str"),
    ],
)
def test_wrong_types_are_refused(key, value, expected):
    with pytest.raises(UserError, match=re.escape(f"key {key!r}: expected {expected}, got ")):
        config.from_table({key: value})


def test_unknown_key_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown key 'codeword' .did you mean 'codewords'.*docs/configuration.md"):
        config.load("demo", ["codeword=3"])
    with pytest.raises(UserError, match="unknown key 'zzz'; the keys are listed"):
        config.from_table({"zzz": 1})


def test_override_without_a_value_is_refused():
    with pytest.raises(UserError, match="--set 'gamma': expected key=value"):
        config.load("demo", ["gamma"])


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"no preset 'mnist9' .did you mean 'mnist-9'.*uefl presets"):
        config.load("mnist9")


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*absent.toml: No such file"):
        config.load(str(tmp_path / "absent.toml"))
    for content in (b"clients = ", b"\xff\xfe"):
        (tmp_path / "broken.toml").write_bytes(content)
        with pytest.raises(UserError, match=r"broken.toml is not valid TOML") as error:
            config.load(str(tmp_path / "broken.toml"))
        assert "\n" not in str(error.value)
