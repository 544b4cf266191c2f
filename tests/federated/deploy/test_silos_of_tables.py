"""Check the reports of silos with tables, and the federation that the server makes of them."""

import json

import pytest
import torch

from tests.federated.data.test_tables import KEYS, UEFL, frame, write
from tests.federated.deploy.reports import agreed, refusal
from uefl import config
from uefl.data import build
from uefl.deploy.agreement import fitting
from uefl.deploy.report import read
from uefl.deploy.setting import Setting, greeting, task
from uefl.deploy.silo import SiloProgram
from uefl.deploy.sources import own
from uefl.engines.codec import Packet
from uefl.errors import UserError


def settings(source="silos", **data):
    return config.load(KEYS | {"data": {"source": str(source), **data}, "arms": {"uefl": UEFL}})


def report(path, cfg):
    """Return the report of a silo in the form in which it arrives."""
    header, statistics = SiloProgram(own(path, None), torch.device("cpu"))(Packet(greeting(cfg), {}))
    assert header.get("error") is None
    return json.loads(json.dumps(header)), statistics


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "data", 3)


@pytest.fixture
def split(tmp_path):
    """Write tables with test rows, because drawn splits depend on which clients draw together."""
    (tmp_path / "split").mkdir()
    for i in range(3):
        table = frame(i, test=[False] * 30 + [True] * 10)
        table.to_csv(tmp_path / "split" / f"silo-{i}.csv", index=False)
    return tmp_path / "split"


def reports(folder, cfg):
    return {path.stem: report(path, cfg) for path in sorted(folder.iterdir(), reverse=True)}


@pytest.mark.parametrize("normalize", ["standard", "raw"])
def test_silos_and_one_process_agree_on_the_federation(split, normalize):
    cfg = settings(normalize=normalize)
    found = reports(split, cfg)
    assert {refusal(each) for each in found.values()} == {None}
    assert all(bool(statistics) == (normalize == "standard") for _, statistics in found.values())
    there = agreed(found, cfg)
    here = build(settings(split, normalize=normalize).data, kind="labeled", seed=0)
    for field in ("classes", "shape", "mean", "std", "inputs"):
        assert getattr(there, field) == getattr(here, field), field
    assert [client.sizes for client in there.clients] == [client.sizes for client in here.clients]


def test_the_setting_of_a_run_travels_as_json(folder):
    there = agreed(reports(folder, settings()), settings())
    setting = Setting.of(settings(), there, 0)
    assert Setting.of_header(json.loads(json.dumps(task(setting, "uefl")))) == setting
    assert setting.context().inputs == there.inputs


def test_a_silo_itself_names_its_column_of_labels(tmp_path):
    """A report has every value of this column.

    A run that chose the column could read all columns.
    """
    path = tmp_path / "a.csv"
    table = frame(0, patient=range(1_000_000, 1_000_040)).rename(columns={"label": "outcome"})
    table.to_csv(path, index=False)
    for label, asked, error in (
        ("outcome", "outcome", None),
        ("outcome", "patient", "data"),
        ("patient", "outcome", "data"),
        ("label", "outcome", "data"),
    ):
        cfg = settings(label=asked, normalize="raw")
        program = SiloProgram(own(path, None, label), torch.device("cpu"))
        header = program(Packet(greeting(cfg), {})).header
        assert header["error"] == error, (label, asked)
        assert "1000007" not in str(header)


def test_a_silo_with_other_columns_is_refused(folder):
    frame(5, "abdce").to_csv(folder / "other.csv", index=False)
    found = {name: read(packet) for name, packet in reports(folder, settings()).items()}
    names, why = fitting(found, settings())
    assert sorted(names) == ["silo-0", "silo-1", "silo-2"]
    assert "columns" in why["other"]


def test_a_silo_without_moments_is_refused(folder):
    found = {name: read(packet) for name, packet in reports(folder, settings()).items()}
    found["silo-1"].statistics = {}
    names, why = fitting(found, settings())
    assert sorted(names) == ["silo-0", "silo-2"]
    assert "moments" in why["silo-1"]


def _moments(change):
    def changed(header, statistics):
        change(statistics["columns"]["moments"])

    return changed


@pytest.mark.parametrize(
    "change",
    [
        _moments(lambda moments: moments[0].add_(1e6)),
        _moments(lambda moments: moments[0, :1].add_(1)),
        _moments(lambda moments: moments.fill_(float("inf"))),
        lambda header, sums: sums["columns"].clear(),
        lambda header, sums: sums.update(pixels=sums.pop("columns")),
        _moments(lambda moments: moments[1, 0].fill_(float("nan"))),
        _moments(lambda moments: moments[1, 0].fill_(1e200)),
        _moments(lambda moments: moments[2, 0].fill_(-1.0)),
        _moments(lambda moments: moments[2, 0].fill_(float("inf"))),
        lambda header, sums: sums["columns"].update(moments=torch.zeros(3, 4, dtype=torch.float64)),
        lambda header, sums: sums["columns"].update(moments=torch.zeros(3, 5)),
        lambda header, sums: header["inputs"].update(kind="sounds"),
        lambda header, sums: header["inputs"].update(vocabulary=5),
        lambda header, sums: header["inputs"].update(vocabulary=10**9, kind="tokens"),
        lambda header, sums: header["inputs"].update(names=["a"]),
        lambda header, sums: header["inputs"].update(names=["a\x1b[2J", *"bcde"]),
        lambda header, sums: header.update(shape=[10**9]),
        lambda header, sums: header.update(shape=[5, 1, 1]),
        lambda header, sums: header.pop("inputs"),
    ],
)
def test_invalid_reports_of_tables_are_one_line(folder, change):
    header, statistics = report(folder / "silo-0.csv", settings())
    change(header, statistics)
    line = refusal((header, statistics))
    assert line
    assert line.isprintable()


def test_a_damaged_table_is_found_when_the_silo_starts(tmp_path):
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(UserError, match=r"t\.csv"):
        own(tmp_path / "t.csv", None)
