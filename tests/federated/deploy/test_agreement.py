"""The server builds the same federation from reports as from the data, or names the silo that differs."""

import re

import pytest
import torch

from tests.federated.deploy.machines import images
from tests.federated.deploy.reports import agreed, refusal
from uefl import config
from uefl.data import build
from uefl.deploy.setting import greeting
from uefl.deploy.silo import SiloProgram
from uefl.deploy.sources import own
from uefl.engines.codec import Packet
from uefl.errors import UserError


@pytest.fixture
def folder(tmp_path):
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    images(tmp_path / "b", {"dog": 1, "emu": 2}, color=True, seed=1)
    return tmp_path


def settings(folder, **keys):
    return config.load({"data": {"source": str(folder)}, "arms": {"arm": {"algorithm": "fedavg"}}}, **keys)


def report(cfg, path):
    return SiloProgram(own(path, None), torch.device("cpu"))(Packet(greeting(cfg), {}))


@pytest.mark.parametrize("legacy_holdout", [True, False])
def test_agreement_equals_what_the_server_would_have_read(folder, legacy_holdout):
    cfg = settings(folder, legacy_holdout=legacy_holdout)
    whole = build(cfg.data, kind="labeled", seed=0)
    found = agreed({name: report(cfg, folder / name) for name in ("b", "a")}, cfg)
    assert not found.here
    for field in ("classes", "shape", "mean", "std", "kind"):
        assert getattr(found, field) == getattr(whole, field), field
    assert [(client.name, client.sizes) for client in found.clients] == [
        (client.name, client.sizes) for client in whole.clients
    ]
    assert found.manifest["silos"]["a"]["test"]["images_of_class"] == [4, 4, 0]
    if legacy_holdout:  # no random draw decides which images a silo has
        for client in whole.clients:
            data, mine = (
                client.load(),
                own(folder / client.name, None).data(client.name, cfg, found.classes, 3),
            )
            assert torch.equal(data.train.images, mine.train.images)
            assert torch.equal(data.train.labels, mine.train.labels)
            assert mine.holdout is mine.test


def test_reports_have_no_file_names_and_no_pixels(folder):
    header, statistics = report(settings(folder), folder / "a")
    assert "png" not in str(header)
    assert {name: tuple(t.shape) for part in statistics.values() for name, t in part.items()} == {
        "counts": (1, 256)
    }


def test_the_images_cannot_be_read_at_the_server(folder):
    cfg = settings(folder)
    with pytest.raises(UserError, match=r"images .*silo 'a' "):
        agreed({"a": report(cfg, folder / "a")}, cfg).clients[0].load()


def test_a_silo_that_differs_is_named(folder):
    images(folder / "c", {"cat": 0, "dog": 1}, size=10)
    cfg = settings(folder)
    reports = {name: report(cfg, folder / name) for name in "abc"}
    with pytest.raises(UserError, match=r"silo 'c' .*10x10, silo 'a' .*8x8; .*image_size"):
        agreed(reports, cfg)


def test_data_that_cannot_be_used_are_a_code(folder, caplog):
    cfg = settings(folder)
    images(folder / "d", {"cat": 0})
    header, statistics = report(cfg, folder / "d")
    assert header["error"] == "data"
    assert re.search("12 training .*class 'cat'", caplog.text)
    assert re.search(r"\bfault\b.*\bdata\b", str(refusal((header, statistics))))


@pytest.mark.parametrize("damage", ["no-counts", "other-counts", "no-sizes", "name", "shape"])
def test_reports_that_do_not_fit_are_refused(folder, damage):
    header, statistics = report(settings(folder), folder / "a")
    assert refusal((header, statistics)) is None
    match damage:
        case "no-counts":
            statistics = {}
        case "other-counts":
            statistics = {"pixels": {"counts": torch.zeros(3, 256, dtype=torch.int64)}}
        case "no-sizes":
            del header["sizes"]
        case "name":
            header["client"] = "a\n"
        case "shape":
            header["shape"] = [1, 8]
    assert refusal((header, statistics)) is not None
