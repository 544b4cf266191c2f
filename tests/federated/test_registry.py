"""Data sets and partitions of other packages come in by entry points."""

import importlib.metadata
from types import SimpleNamespace

import pytest

import uefl
from uefl.algorithms.base import ALGORITHMS, registry
from uefl.data import PARTITIONS, SOURCES, Scheme
from uefl.errors import UserError
from uefl.metrics import METRICS, metric
from uefl.models.networks import NETWORKS, Network, find


class Point:
    """An entry point of another package."""

    value, dist = "other_package:made", None

    def __init__(self, name, found):
        self.name, self.found = name, found

    def load(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def install(monkeypatch):
    """Install a package that has one entry point."""

    def installed(registry, group, name, found):
        assert list(registry)  # imports the modules of the package
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_complete", False)
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: [Point(name, found)] if group == wanted else []
        )
        wanted = group

    return installed


def test_an_entry_point_names_a_data_set(install):
    def reader(root):
        return None

    install(SOURCES, "uefl.sources", "theirs", reader)
    assert SOURCES["theirs"] is reader
    assert "digits" in SOURCES


def test_an_entry_point_names_a_partition(install):
    class TheirPartition(Scheme):
        """A partition of another package."""

    install(PARTITIONS, "uefl.partitions", "theirs", TheirPartition)
    assert PARTITIONS["theirs"] is TheirPartition
    assert TheirPartition().model_dump() == {"scheme": "theirs"}


def test_an_entry_point_names_a_network_and_a_metric(install):
    class TheirNetwork(Network):
        """A network of another package."""

    install(NETWORKS, "uefl.networks", "theirs", TheirNetwork)
    assert find("theirs") is TheirNetwork

    def theirs(probs, labels):
        """Share of something."""
        return 1.0

    install(METRICS, "uefl.metrics", "theirs", theirs)
    assert METRICS["theirs"] is theirs
    assert METRICS.known_elsewhere("theirs")


def test_names_registered_by_a_script_are_refused_by_workers(monkeypatch, tmp_path):
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._all()))
    metric("mine")(lambda probs, labels: 1.0)
    assert not METRICS.known_elsewhere("mine")
    assert METRICS.known_elsewhere("balanced_accuracy")
    with pytest.raises(UserError, match="'mine'"):
        uefl.train("demo", out=tmp_path / "run", engine="distributed", run={"metrics": ["mine"]})
    assert not (tmp_path / "run").exists()


def test_an_entry_point_names_an_algorithm(install):
    theirs = type("Other", (uefl.Algorithm,), {})
    install(ALGORITHMS, "uefl.algorithms", "theirs", theirs)
    assert registry()["theirs"] is theirs


@pytest.mark.parametrize("dist", [None, SimpleNamespace(name="other_package")])
def test_a_package_that_fails_to_load_is_named(install, monkeypatch, dist):
    monkeypatch.setattr(Point, "dist", dist)
    install(ALGORITHMS, "uefl.algorithms", "theirs", ImportError("torchx"))
    with pytest.raises(UserError, match=r"'theirs'.*other_package.*torchx"):
        registry()


def test_duplicate_names_of_entry_points_are_refused(install):
    install(SOURCES, "uefl.sources", "digits", lambda root: None)
    with pytest.raises(ValueError, match="'digits'"):
        list(SOURCES)
