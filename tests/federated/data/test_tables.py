"""Columns of tables and sequences of tokens: in Python, from files, on other engines, in saved models."""

import csv
import io
import json
import re
import zipfile
from decimal import Decimal

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import uefl
from tests import fresh
from uefl import config, export
from uefl.algorithms.base import registry
from uefl.cli import app
from uefl.data import from_arrays, prior_table
from uefl.data.prepare import Moments
from uefl.data.sources import own_table
from uefl.data.vectors import of_array
from uefl.deploy.sources import own
from uefl.errors import UserError
from uefl.predict import Predictor

from .common import labeled

KEYS = {
    "run": {"precision": "fp32", "passes": 3},
    "model": {"encoder": "mlp", "width": 8, "hidden": 8},
    "training": {"rounds": [1], "local_epochs": 2, "batch_size": 16, "lr": 1e-2},
}
TOKENS = KEYS | {"model": KEYS["model"] | {"encoder": "conv1d"}}
UEFL = {"codewords": 4, "segments": 2}
ARMS = {"fedavg": {}, "uefl": UEFL}
NUMBERED = [("007", "01"), ("7", "01"), ("1e2", "1"), ("007", "1")]
"""labels and clients that are numbers too"""


def columns(seed, rows=40, count=5):
    """Return columns with different scales, of two classes that differ in the first column."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    values = rng.normal(size=(rows, count)) * 10.0 ** np.arange(count) + 1e6
    values[:, 0] += 4 * labels
    return values, labels


def tokens(seed, rows=40, length=9):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    values = rng.integers(1, 20, (rows, length))
    values[:, 2] = np.where(labels, 5, 6)
    return values, labels


def frame(seed, names="abcde", **more):
    values, labels = columns(seed, count=len(names))
    return pandas.DataFrame(values, columns=list(names)).assign(label=np.where(labels, "yes", "no"), **more)


def write(folder, clients=2):
    folder.mkdir()
    for i in range(clients):
        frame(i).to_csv(folder / f"silo-{i}.csv", index=False)
    return folder


def start(base, out, **keys):
    """Train on the folder of tables in ``base``."""
    training = KEYS["training"] | {"rounds": keys.pop("rounds", [1])}
    sections = KEYS | {"data": {"source": str(base / "data")}, "training": training}
    return uefl.train(sections, out=out, arms=ARMS, **keys)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run of two clients from a folder of tables."""
    base = tmp_path_factory.mktemp("tables")
    write(base / "data")
    return base, start(base, base / "run")


@pytest.mark.parametrize(("made", "keys"), [(columns, KEYS), (tokens, TOKENS)], ids=["columns", "tokens"])
def test_arrays_train_and_predict(made, keys, tmp_path):
    clients = {f"silo-{i}": (made(i), made(10 + i)) for i in range(2)}
    done = uefl.train(keys, out=tmp_path / "run", clients=clients, arms=ARMS)
    values = made(20)[0]
    for name in ("fedavg", "uefl"):
        assert 0 <= done.summary[name]["accuracy"] <= 1
        model = done.model(name)
        own_part = model.clients[0] if model.clients else None
        probabilities = model.predict(values, own_part)
        assert probabilities.shape == (40, 2)
        assert torch.allclose(probabilities.sum(1), torch.ones(40))
        as_module = model.module(own_part)(torch.from_numpy(values))
        assert torch.allclose(as_module, probabilities, atol=1e-6)
    assert not (tmp_path / "run" / "samples.safetensors").exists()


@pytest.mark.parametrize(("made", "keys"), [(columns, KEYS), (tokens, TOKENS)], ids=["columns", "tokens"])
def test_tables_are_exported_in_the_dtype_of_their_inputs(made, keys, tmp_path):
    clients = {f"silo-{i}": (made(i), made(10 + i)) for i in range(2)}
    done = uefl.train(keys, out=tmp_path / "run", clients=clients, arms={"fedavg": {}})
    model, about = done.model("fedavg"), {"uefl.json": ""}
    export.write(model, tmp_path / "model.pt2")
    program = torch.export.load(str(tmp_path / "model.pt2"), extra_files=about).module()
    values = torch.from_numpy(made(20)[0])
    torch.testing.assert_close(program(values), model.predict(values), atol=1e-6, rtol=0)
    about = json.loads(about["uefl.json"])
    assert about["inputs"] == model.inputs.kind
    assert about["dtype"] == str(values.dtype).removeprefix("torch.")
    assert "scale" not in about


def test_a_table_is_learned(tmp_path):
    """One column determines the class, and the scales of the columns differ by factors of ten."""
    keys = KEYS | {"training": KEYS["training"] | {"rounds": [4], "local_epochs": 8}}
    clients = {f"silo-{i}": (columns(i, 120), columns(10 + i, 60)) for i in range(2)}
    done = uefl.train(keys, out=tmp_path / "run", clients=clients, arms=["fedavg"])
    assert done.summary["fedavg"]["accuracy"] > 0.9


def test_a_dataset_and_a_frame_are_the_array(tmp_path):
    values, labels = columns(0)
    names = list("abcde")
    parts = [
        (values, labels),
        (pandas.DataFrame(values, columns=names), pandas.Series(labels)),
        *(
            [(change(row), int(label)) for row, label in zip(values, labels, strict=True)]
            for change in (
                torch.from_numpy,
                lambda row: torch.from_numpy(row).requires_grad_(),
                lambda row: row.astype(">f8"),
                lambda row: np.ma.masked_array(row),
            )
        ),
    ]
    digests = set()
    for part in parts:
        fed = from_arrays({"a": (part, None)})
        assert (fed.inputs.kind, fed.shape) == ("columns", (5,))
        assert fed.clients[0].load().train.images.dtype == torch.float64
        digests.add(fed.digest)
    assert len(digests) == 1
    assert from_arrays({"a": (parts[1], None)}).inputs.names == tuple(names)


def test_standardization_uses_all_training_rows():
    fed = from_arrays({f"s{i}": (columns(i), columns(9 + i)) for i in range(3)})
    splits = [part for client in fed.clients for part in (client.load().train, client.load().holdout)]
    values = torch.cat([split.images for split in splits]).numpy()
    assert np.allclose(fed.mean, values.mean(0), rtol=1e-14)
    assert np.allclose(fed.std, values.std(0), rtol=1e-12)


def test_moments_do_not_depend_on_the_order_of_clients_or_rows():
    clients = [torch.from_numpy(columns(i, rows=7 + i)[0]) for i in range(9)]
    found = set()
    for order in (clients, clients[::-1], clients[4:] + clients[:4], [each.flip(0) for each in clients]):
        moments = Moments(5)
        for client in order:
            moments.add(client)
        found.add(moments.mean_and_std())
    assert len(found) == 1


def test_a_constant_column_becomes_zero():
    values, labels = columns(0)
    values[:, 1] = 7.0
    fed = from_arrays({"a": ((values, labels), None)})
    assert (fed.mean[1], fed.std[1]) == (7.0, 1.0)


@pytest.mark.parametrize(("value", "said"), [(np.nan, ""), (np.inf, "inf "), (-1e300, r"-1e\+300 ")])
def test_missing_and_huge_values_are_refused(value, said):
    values, labels = columns(0)
    values[3, 2] = value
    with pytest.raises(UserError, match=f"a/train: column 2 .*{said}.*row 4"):
        from_arrays({"a": ((values, labels), None)})


class Frame:
    """A data frame of another library than pandas."""

    columns, dtypes = ["a"], ["f"]

    def to_numpy(self):
        return np.ones((2, 1))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ((pandas.DataFrame({"city": ["x", "y"]}), [0, 1]), "column 'city'"),
        ((np.array([[1, -2], [3, 4]]), [0, 1]), "tokens -2 to 4"),
        ((np.zeros((2, 0)), [0, 1]), r"\[2, 0\]"),
        ((np.array([["a", "b"]]), [0]), "<U1"),
        ([(np.ma.masked_array([1.0, 2.0], [False, True]), 0)] * 2, "item 0: .*masked"),
        ((Frame(), [0, 1]), "pandas.*Frame"),
    ],
)
def test_other_values_are_refused(train, said):
    with pytest.raises(UserError, match=said):
        from_arrays({"a": (train, None)})


def test_one_kind_of_inputs_for_all_parts():
    images = (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), [0, 1, 0, 1])
    for other, said in (
        (tokens(0), "tokens"),
        (images, "images"),
        (columns(0, count=4), "5 columns|4 columns"),
    ):
        with pytest.raises(UserError, match=said):
            from_arrays({"a": (columns(0), None), "b": (other, None)})


IMAGES_ONLY = [name for name, kind in registry().items() if kind.images_only]


def test_list_of_algorithms_that_need_images():
    assert IMAGES_ONLY == ["distrans", "fedbr", "fedllp-vat", "vhl"]


@pytest.mark.parametrize("name", sorted({"distrans", "fedbr", "vhl"}))
def test_algorithm_for_images_is_refused_before_the_start(name, tmp_path):
    with pytest.raises(UserError, match=rf"arm '{name}': .*images.*columns"):
        uefl.train(KEYS, out=tmp_path / "run", clients={"a": (columns(0), None)}, arms=[name])
    assert not (tmp_path / "run").exists()


OTHERS = [
    name
    for name, kind in registry().items()
    if kind.__module__.startswith("uefl.") and kind.kind == "labeled" and not kind.images_only
]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_algorithm_trains_on_columns(name, tmp_path):
    own_keys = {key: value for key, value in UEFL.items() if key in registry()[name].Parameters.model_fields}
    keys = KEYS | {"run": KEYS["run"] | ({} if registry()[name].draws else {"passes": 20})}
    if name == "uefl-published":
        keys = keys | {"data": {"legacy_holdout": True}}
    clients = {f"silo-{i}": (columns(i), columns(10 + i)) for i in range(2)}
    done = uefl.train(keys, out=tmp_path / "run", clients=clients, arms={name: own_keys})
    assert 0 <= done.summary[name]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": {"encoder": "cnn"}}, "'cnn' .*columns; .*'mlp'"),
        ({"data": {"augment": "flip"}}, "data.augment"),
        ({"data": {"image_size": 8}}, "image_size"),
        ({"data": {"normalize": "imagenet"}}, "data.normalize"),
        ({"data": {"vocabulary": 9}}, "data.vocabulary"),
    ],
)
def test_keys_for_images_are_refused(keys, said, tmp_path):
    with pytest.raises(UserError, match=said):
        uefl.train(KEYS | keys, out=tmp_path / "run", clients={"a": (columns(0), None)}, arms=["fedavg"])
    assert not (tmp_path / "run").exists()


def test_keys_of_tables_are_refused_for_images():
    for key, value in (("label", "y"), ("vocabulary", 3)):
        with pytest.raises(UserError, match=f"key '{key}'"):
            labeled(clients=2, **{key: value})


# --- files ------------------------------------------------------------------------------------------------


def test_a_table_has_clients_in_a_column_or_is_dealt(tmp_path):
    path = tmp_path / "t.csv"
    frame(0, silo=["north", "south"] * 20, test=[False] * 30 + [True] * 10).to_csv(path, index=False)
    fed = labeled(path)
    assert [(client.name, client.sizes.test) for client in fed.clients] == [("north", 5), ("south", 5)]
    assert (fed.classes, fed.inputs.names) == (("no", "yes"), tuple("abcde"))
    frame(0).rename(columns={"label": "y"}).to_csv(path, index=False)
    keys = {"label": "y", "clients": 2, "train_per_client": 14, "test_per_client": 6}
    assert [client.sizes.test for client in labeled(path, **keys).clients] == [6, 6]
    with pytest.raises(UserError, match="angles"):
        labeled(path, **keys, angles=[0.0, 9.0])
    keys |= {"train_per_client": 8, "test_per_client": 4}
    for scheme in (
        {"scheme": "dirichlet", "convention": "over_clients", "alpha": 5.0},
        {"scheme": "classes"},
    ):
        assert labeled(path, **keys, partition=scheme).inputs.kind == "columns"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "column 'label'"),
        ("a,label\n1,x\n2,\n", "'label' .*row 2"),
        ("a,label\n,x\n2,y\n", "'a' .*row 1"),
        ("a,label\n2,x\nred,y\n", "'a' .*'red' .*row 2"),
        ("a, label\n1,x\n2,y\n", "'label' .*' label'"),
        ("a,label,test\n1,x,perhaps\n2,y,true\n", "'perhaps'"),
        ("a,label\n", r"t\.csv .*\brows"),
        ("", r"t\.csv .*: .*columns"),
        ("a,a,label\n1,2,x\n3,4,y\n", "'a'"),
        (",a,label\n0,1,x\n1,2,y\n", "name.*index=False"),  # as DataFrame.to_csv writes the index
        ("label,a\n0,1,2\n1,3,4\n", "header"),  # pandas would take the labels for an index
        ("a,label,Test\n1,x,0\n2,y,1\n", "'Test' .*'test'"),
        ("a,label,silo \n1,x,n\n2,y,s\n", "'silo ' .*'silo'"),
        ("a,label\n1,0.5\n2,0.25\n", "'label' .*0.5"),
        ("a,label\n1,'x '\n2,NA\n", "'label' .*row 2.*NA"),
        ("a,label\n1,x\n2,1.5E+3\n", r"'label' .*1\.5E\+3"),
        ("a,label\n1,x\n2,2e-3\n", "'label' .*2e-3"),
        ("a,label\n1,x\n2,y\n".encode("utf-16"), "UTF-8"),
        ("a;label\n1,5;x\n2;y\n", "';'"),
        (f"a,label\n{'9' * 400},x\n2,y\n", r"1e308; .*1e\+36$"),
        ("a\tlabel\n1\tx\n2\ty\n", r"t\.csv .*'\\t'"),
    ],
)
def test_a_damaged_table_is_refused(text, said, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=said):
        labeled(path, clients=2)


def test_names_of_columns_in_some_parts_only():
    named = frame(0).drop(columns="label"), frame(0)["label"]
    plain = named[0].to_numpy(), named[1]
    for clients in ({"a": (named, plain)}, {"a": (plain, None), "b": (named, None)}):
        with pytest.raises(UserError, match=r"(a/train|b/train) .* (a/test|a/train) .*\bnone\b"):
            from_arrays(clients)


def test_another_number_of_columns():
    fewer = frame(1, "abcd")
    parts = [(each.drop(columns="label"), each["label"]) for each in (frame(0), fewer)]
    with pytest.raises(UserError, match=r"b/train .*\b4 .* a/train.*\b5\b"):
        from_arrays({name: (part, None) for name, part in zip("ab", parts, strict=True)})


def test_decimals_are_numbers_and_null_has_no_value():
    values, labels = [Decimal("0.5"), Decimal(2)] * 10, [0, 1] * 10
    fed = from_arrays({"a": ((pandas.DataFrame({"a": values}), labels), None)})
    assert set(fed.clients[0].load().train.images.flatten().tolist()) == {0.5, 2.0}
    values[2] = None
    with pytest.raises(UserError, match=r"'a' .*row 3"):
        from_arrays({"a": ((pandas.DataFrame({"a": values}), labels), None)})


def test_integers_of_more_than_64_bits(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,label\n" + f"{2**70},a\n{-(2**70)},b\n" * 12)
    assert len(labeled(path, clients=2, train_per_client=8, test_per_client=4).clients) == 2


def test_clients_need_the_same_columns(tmp_path):
    folder = write(tmp_path / "data", 1)
    frame(1, "abdce").to_csv(folder / "other.csv", index=False)
    with pytest.raises(UserError, match=r"'c' .*'d'"):
        labeled(folder)


def tables(tmp_path, **texts):
    for name, text in texts.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return labeled(tmp_path, holdout=0.5)


def test_whole_floats_and_integers_name_the_same_classes(tmp_path):
    """pandas reads the labels of a file as floats if one label was empty at first."""
    fed = tables(tmp_path, n="a,label\n" + "1,0\n2,1\n" * 9, s="a,label\n" + "1,0.0\n2,1.0\n" * 9)
    assert fed.classes == ("0", "1")


def test_names_in_digits_keep_their_zeros(tmp_path):
    """As numbers, 007 and 7 would be one class and one client."""
    rows = "".join(f"{i},{label},{client}\n" for i, (label, client) in enumerate(NUMBERED * 6))
    (tmp_path / "t.csv").write_text("a,label,silo\n" + rows)
    fed = labeled(tmp_path / "t.csv")
    assert fed.classes == ("007", "1e2", "7")
    assert [client.name for client in fed.clients] == ["01", "1"]


def test_labels_of_other_types_in_parquet(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    read = {}
    monkeypatch.setattr(pandas, "read_parquet", lambda path: read["frame"])

    def classes(labels):
        read["frame"] = pandas.DataFrame({"a": np.arange(24.0), "label": labels * 12, "silo": "n"})
        return labeled(tmp_path / "t.parquet").classes

    assert classes([b"cat", b"dog"]) == ("cat", "dog")
    assert classes(["1.0", "2.0"]) == ("1", "2")
    for strange in ([["cat"], ["dog"]], [{"a": 1}, {"a": 2}]):
        with pytest.raises(UserError, match=rf"'label' .*{type(strange[0]).__name__}.* row 1"):
            classes(strange)


def test_an_index_of_a_parquet_file_is_a_column(tmp_path, monkeypatch):
    """pandas makes the index of the columns that it was in a frame."""
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    whole = frame(0, "ab", silo="n")
    for kept in (whole.set_index(["label", "b"]), whole.set_index("a"), whole[whole["a"] > 0]):
        monkeypatch.setattr(pandas, "read_parquet", lambda path, kept=kept: kept)
        fed = labeled(path)
        assert set(fed.inputs.names) == {"a", "b"}


def test_labels_in_another_order_are_refused():
    """Rows and labels are paired by position, whatever their indexes are, if these differ in more."""
    rows = frame(0).drop(columns="label")
    labels = frame(0)["label"]
    shuffled = labels.sample(frac=1, random_state=0)
    with pytest.raises(UserError, match=r"a/train: .*\bindex"):
        from_arrays({"a": ((rows, shuffled), None)})
    for same in (
        labels,
        labels.to_numpy(),
        labels.set_axis(range(100, 140)),
        list(labels),
        pandas.Index(labels),
    ):
        assert from_arrays({"a": ((rows, same), None)}).classes == ("no", "yes")


@pytest.mark.parametrize("name", ["t.csv", "priors.csv", "priors.json"])
def test_a_file_larger_than_the_memory_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("client,set,a,b\n" * 9)
    monkeypatch.setattr("os.sysconf", lambda name: 8)
    with pytest.raises(UserError, match=rf"{name} .*memory"):
        _ = own_table.frame_of(tmp_path / name) if name == "t.csv" else prior_table.read(tmp_path)


def test_a_small_parquet_file_of_many_rows_is_refused(tmp_path, monkeypatch):
    """Equal values of a column are stored once."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    columns = {"label": pyarrow.array(["a"] * 100_000), "x": pyarrow.array(np.zeros(100_000))}
    parquet.write_table(pyarrow.table(columns), path)
    assert len(own_table.frame_of(path)) == 100_000
    assert path.stat().st_size < 100_000
    monkeypatch.setattr("uefl.paths.memory", lambda: 100_000)
    with pytest.raises(UserError, match=r"t\.parquet .*memory"):
        own_table.frame_of(path)


LIMITED = """
import resource
from pathlib import Path
from uefl.data import npz
from uefl.data.sources import own_table
from uefl.errors import UserError

path = Path({path!r})
limit = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    npz.read(path, ("images",)) if path.suffix == ".npz" else own_table.frame_of(path)
except UserError as error:
    print(error)
print(int(next(x for x in open("/proc/self/status") if x.startswith("VmPeak")).split()[1]) * 1024 < limit)
"""


@pytest.mark.parametrize(
    "kind",
    [
        "csv",
        "coded.parquet",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("npz", "repeated.parquet")),
    ],
)
def test_values_beyond_the_memory_of_the_process(tmp_path, kind):
    """A small file may hold many values: short cells, compressed zeros, one value for all rows."""
    path = tmp_path / f"x.{kind}"
    if kind == "csv":
        path.write_text("a,label\n" + "1,2\n" * 60_000_000)
    elif kind == "npz":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            shape = (200_000, 100, 100)
            with file.open("images.npy", "w", force_zip64=True) as target:
                about = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(target, about)
                for _ in range(200):
                    target.write(bytes(10_000_000))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        rows = 50_000_000 if kind == "repeated.parquet" else 100_000
        numbers = pyarrow.array(np.zeros(rows, np.uint8))
        text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(rows, np.int32)), ["a" * 100_000])
        label = numbers if kind == "repeated.parquet" else text
        columns = {f"column {i}": numbers for i in range(32)} | {"label": label}
        parquet.write_table(pyarrow.table(columns), path)
    done = fresh.python(LIMITED.format(path=str(path)))
    assert done.returncode == 0, done.stderr
    message, within = done.stdout.splitlines()
    assert re.fullmatch(rf"{path}.* memory .*", message)
    assert within == "True"


def test_spellings_of_a_class_and_other_files_are_noted(tmp_path):
    (tmp_path / "plan.xlsx").write_text("x")
    rows = "a,label\n" + "1,yes\n2,no\n" * 9
    notes = "\n".join(tables(tmp_path, n=rows, s=rows.replace("yes", "Yes")).notes)
    assert "'Yes' and 'yes'" in notes
    assert "plan.xlsx" in notes


def test_a_table_among_folders_of_images_is_refused(tmp_path):
    (tmp_path / "n" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match=r"about\.csv .*folder n;"):
        tables(tmp_path, about="width,label\n8,a\n9,b\n" * 9)


def test_a_file_of_one_client_names_no_other(tmp_path):
    rows = "a,label,silo\n" + "1,yes,q\n2,no,q\n" * 9
    with pytest.raises(UserError, match=r"'silo' .*'q'.*'n'"):
        tables(tmp_path, n=rows)
    (tmp_path / "q.CSV").write_text(rows)
    with pytest.raises(UserError, match=r"q\.CSV .*q\.csv"):
        tables(tmp_path, q=rows)


@pytest.mark.parametrize(
    ("names", "labels", "named"),
    [(["x" * 65], "xy", r"\b65 .*\b64\b"), (["x"], ["a\nb", "y"], r"'a\\nb'")],
    ids=["column", "class"],
)
def test_names_that_a_model_file_refuses_are_refused_before(names, labels, named):
    frame = pandas.DataFrame(np.ones((20, 1)), columns=names)
    with pytest.raises(UserError, match=named):
        from_arrays({"a": ((frame, list(labels) * 10), None)})


def test_empty_cells_at_the_end_of_tokens_are_padding(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("p,q,r,label\n" + "3,4,,a\n5,,,b\n1,2,3,a\n4,4,4,b\n" * 5)
    fed = labeled(path, clients=1, train_per_client=15, test_per_client=5, vocabulary=6)
    assert (fed.inputs.kind, fed.inputs.vocabulary, fed.mean) == ("tokens", 6, ())
    rows = {tuple(row) for row in fed.clients[0].load().train.images.tolist()}
    assert rows <= {(3, 4, 0), (5, 0, 0), (1, 2, 3), (4, 4, 4)}
    path.write_text("p,q,label\n,4,a\n5,5,b\n")
    with pytest.raises(UserError, match=r"t\.csv.*\btoken"):
        labeled(path, vocabulary=6, clients=1)
    path.write_text("p,q,label\n1,6,a\n5,5,b\n")
    with pytest.raises(UserError, match=r"tokens .*\b6; .*data\.vocabulary"):
        labeled(path, vocabulary=6, clients=1)


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """Write a folder of two files, and replace pandas' reader, so that no Parquet library is needed."""
    frames = {tmp_path / "data" / f"silo-{i}.parquet": frame(i, silo=f"silo-{i}") for i in range(2)}
    (tmp_path / "data").mkdir()
    for path in frames:
        path.write_bytes(b"PAR1")
    monkeypatch.setattr(pandas, "read_parquet", lambda path: frames[path].copy())
    return tmp_path / "data"


def test_parquet_and_csv_are_the_same_data(parquet, tmp_path):
    texts = write(tmp_path / "texts")
    first, second = (labeled(folder) for folder in (parquet, texts))
    for one, other in zip(first.clients, second.clients, strict=True):
        assert one.name == other.name
        assert torch.equal(one.load().train.images, other.load().train.images)
    assert (first.classes, first.inputs, first.mean) == (second.classes, second.inputs, second.mean)


def test_a_silo_reads_its_own_parquet_file(parquet):
    cfg = config.load(KEYS | {"data": {"source": str(parquet)}, "arms": {"arm": {"algorithm": "fedavg"}}})
    source = own(parquet / "silo-1.parquet", None)
    (client,) = source.federation(cfg).clients
    assert (source.name, client.name) == ("silo-1", "silo-1")
    assert client.load().train.images.shape[1] == 5


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("no engine"), "pyarrow"),
        (OSError("Invalid\nfile"), "Invalid$"),
        (MemoryError(), "memory"),
    ],
    ids=["absent", "damaged", "huge"],
)
def test_parquet_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, error, words):
    def fails(path):
        raise error

    monkeypatch.setattr(pandas, "read_parquet", fails)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=rf"t\.parquet.*{words}"):
        labeled(tmp_path / "t.parquet", clients=1)


def test_a_saved_model_predicts_tables_by_column_name(trained, tmp_path):
    base, done = trained
    model, table = done.model("fedavg"), frame(7)
    path = tmp_path / "new.csv"
    table[["label", *"edcba"]].assign(note="x").to_csv(path, index=False)
    rows = list(Predictor(model, [path]).rows())
    assert [row.name for row in rows[:2]] == [f"{path}:1", f"{path}:2"]
    expected = model.predict(table[list("abcde")].to_numpy(), uncertainty=True)
    assert [model.classes.index(row.label) for row in rows] == expected.probs.argmax(1).tolist()
    command = ["predict", str(base / "run"), str(path), "--arm", "fedavg", "--csv", "-"]
    found = csv.DictReader(io.StringIO(CliRunner().invoke(app, command).stdout))
    assert [line["row"] for line in found] == [row.name for row in rows]
    with pytest.raises(UserError, match="column 'b'"):
        model.predict(table.drop(columns="b"))
    with pytest.raises(UserError, match=r"columns \[B, 5\]"):
        model.predict(np.zeros((2, 4)))


class InPlaceNet(torch.nn.Module):
    """A network that changes its tokens in place."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.embedding(inputs.add_(1)).mean(1))


def test_a_network_that_changes_tokens_in_place(tmp_path):
    """A prediction gives the network a copy, and a run refuses it, because losses share their inputs."""
    clients = {f"silo-{i}": (tokens(i), tokens(10 + i)) for i in range(2)}
    model = uefl.train(TOKENS, out=tmp_path / "run", clients=clients, arms=["fedavg"]).model()
    first = next(part for part in model.members[0].net.modules() if isinstance(part, torch.nn.Embedding))

    def clear(module, inputs):
        inputs[0].zero_()

    first.register_forward_pre_hook(clear)
    values = torch.from_numpy(tokens(3)[0])
    before = values.clone()
    model.predict(values, uncertainty=True)
    assert torch.equal(values, before)
    keys = {key: value for key, value in KEYS.items() if key != "model"}
    with pytest.raises(UserError, match=r"^model: "):
        uefl.train(keys, out=tmp_path / "out", clients=clients, arms=["fedavg"], model=InPlaceNet())
    assert not (tmp_path / "out").exists()


def test_a_frame_with_numbers_as_names_predicts(tmp_path):
    parts = [columns(i) for i in range(2)]
    clients = {f"silo-{i}": ((pandas.DataFrame(x), y), None) for i, (x, y) in enumerate(parts)}
    model = uefl.train(KEYS, out=tmp_path / "run", clients=clients, arms={"fedavg": {}}).model()
    values = columns(7)[0]
    turned = pandas.DataFrame(values)[[4, 3, 2, 1, 0]]
    assert torch.equal(model.predict(turned), model.predict(values))


def test_arrays_in_either_order_of_memory_become_the_same_rows():
    values = columns(7)[0]
    for given in (values, np.asfortranarray(values), pandas.DataFrame(values)):
        found = of_array(given, "inputs").values
        assert found.is_contiguous()
        assert torch.equal(found, torch.from_numpy(values))
    tokens = np.arange(12).reshape(3, 4)
    assert of_array(np.asfortranarray(tokens), "inputs").values.is_contiguous()


def test_a_run_of_tables_resumes_bit_for_bit(trained, tmp_path):
    base, _ = trained
    again = start(base, tmp_path / "long", rounds=[2])
    short = start(base, tmp_path / "short").path
    uefl.resume(short, more_rounds=1)
    assert (short / "metrics.jsonl").read_text() == (again.path / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(trained, tmp_path):
    base, done = trained
    other = start(base, tmp_path / "run", engine="distributed")
    one, same = ((run.path / "metrics.jsonl").read_text().splitlines() for run in (done, other))
    assert list(map(json.loads, one)) == list(map(json.loads, same))
    for name in ("fedavg", "uefl"):
        a, b = (load_file(path / f"model-{name}.safetensors") for path in (done.path, other.path))
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_client_of_a_table_is_known_by_its_file(tmp_path):
    folder = write(tmp_path / "data")
    source = own(folder / "silo-1.csv", None)
    cfg = config.load(KEYS | {"data": {"source": "silos"}, "arms": {"fedavg": {}}})
    found = source.data("silo-1", cfg, ("maybe", "no", "yes"), 5)
    assert source.name == "silo-1"
    assert found.train.images.shape[1:] == (5,)
    assert set(found.train.labels.tolist()) == {1, 2}
