"""A report of a silo is valid, or it is refused: it goes into the manifest of a run and onto its screen."""

import shutil

import pytest
import torch

from tests.federated import tiny_sets
from tests.federated.data.test_own_sets import ROWS, write
from tests.federated.deploy.machines import images
from tests.federated.deploy.reports import refusal
from uefl import config
from uefl.deploy.setting import greeting
from uefl.deploy.silo import SiloProgram
from uefl.deploy.sources import own
from uefl.engines.codec import Packet, decode, encode

HASH = 64 * "0"


@pytest.fixture
def report(tmp_path):
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    cfg = config.load({"data": {"source": str(tmp_path)}, "arms": {"arm": {"algorithm": "fedavg"}}})
    found = SiloProgram(own(tmp_path / "a", None), torch.device("cpu"))(Packet(greeting(cfg), {}))
    return decode(encode(found))


def test_an_honest_one(report):
    assert refusal(report) is None


def test_skipped_files_are_noted_only_at_the_silo(tmp_path, caplog):
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    folder = (tmp_path / "a" / "train").rename(tmp_path / "b")
    (folder / "emu").mkdir()
    cfg = config.load({"data": {"source": str(tmp_path)}, "arms": {"arm": {"algorithm": "fedavg"}}})
    found = SiloProgram(own(folder, "b"), torch.device("cpu"))(Packet(greeting(cfg), {}))
    (note,) = (record.message for record in caplog.records if "note:" in record.message)
    assert note.endswith(f": {folder / 'emu'}")
    assert "emu" not in str(found.header)


def test_one_of_sets(tmp_path):
    whole = write(tmp_path / "whole")
    shutil.copytree(whole / "clients" / "berlin", tmp_path / "berlin" / "clients" / "berlin")
    rows = [f"berlin,{name},{','.join(map(str, shares))}" for name, shares in ROWS["berlin"].items()]
    (tmp_path / "berlin" / "priors.csv").write_text("\n".join(["client,set,cat,dog", *rows]))
    cfg = config.load(
        {**tiny_sets.KEYS, "data": {"source": str(whole)}, "arms": {"arm": {"algorithm": "fedul"}}}
    )
    found = decode(
        encode(SiloProgram(own(tmp_path / "berlin", None), torch.device("cpu"))(Packet(greeting(cfg), {})))
    )
    assert refusal(found) is None
    found.header["sizes"]["sets"] = []
    assert "report" in refusal(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("error", ["memory"]),
        ("kind", "other"),
        ("classes", ["cat", "dog\x1b[2J"]),
        ("classes", ["cat", "cat"]),
        ("classes", "ab"),
        ("classes", ["cat", "\ud800"]),
        ("torch", "2\n"),
        ("torch", 2),
        ("precision", "fp64"),
        ("content", None),
        ("content", {}),
        ("content", {"../train": {"sha256": HASH}}),
        ("content", {"train": {"sha256": "x"}}),
        ("content", {"train": {"sha256": HASH, "images_of_class": [1]}}),
        ("content", {"train": {"sha256": HASH, "images_of_class": [1, -1]}}),
        ("content", {"train": {"sha256": HASH, "files": ["a.png"]}}),
        ("content", {"train": 3}),
        ("content", {"train": {"sha256": HASH, "images_of_class": None}}),
        ("content", {"train": [1, 2, 3]}),
        ("torch", "<script>alert(1)</script>"),
        ("torch", 1000 * "2"),
        ("classes", [f"c{i}" for i in range(150_000)]),
        ("shape", [2000, 8, 8]),
        ("shape", [1, 1_000_000, 1_000_000]),
        ("shape", [1, 8, 9]),
        ("sizes", {"train": 10**30, "holdout": 0, "test": 8, "sets": []}),
        ("sizes", {"train": 12, "holdout": -4, "test": 8, "sets": []}),
        ("sizes", {"train": 9, "holdout": 4, "test": 8, "sets": []}),
        ("sizes", {"train": 12, "holdout": 0, "test": 8, "sets": [12]}),
    ],
)
def test_invalid_reports_are_one_line(report, key, value):
    report.header[key] = value
    line = refusal(report)
    assert line
    assert line.isprintable()


def test_missing_parts_are_one_line(report):
    for key in ("classes", "content", "shape", "kind", "precision", "sizes", "torch"):
        value = report.header.pop(key)
        assert "complete" in refusal(report), key
        report.header[key] = value


@pytest.mark.parametrize("how", ["level", "everywhere", "channel", "overflow"])
def test_a_histogram_of_other_images_is_refused(report, how):
    """A histogram of more images than the silo has would change the normalization of all silos."""
    counts = report.groups["pixels"]["counts"]
    match how:
        case "level":
            counts[0, 255] += 2**50
        case "everywhere":
            counts += 2**56
        case "channel":
            report.header["shape"] = [3, 8, 8]
            report.groups["pixels"]["counts"] = torch.cat([counts, counts, 2 * counts])
        case "overflow":
            counts[0, :4] += torch.tensor([2**62] * 4)  # as int64 their sum does not change
            assert int(counts.sum()) == int(report.groups["pixels"]["counts"].sum())
    assert "histogram" in refusal(report)
