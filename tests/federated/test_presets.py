"""Every arm of every preset that the package has trains: one tiny round of each of two iterations."""

from pathlib import Path

import pytest

import uefl
from tests.federated.tiny import arm, finish, smallest
from uefl import config
from uefl.config import Config
from uefl.data import build
from uefl.errors import UserError

TEMPLATES = ("own-silos", "own-sets")


def presets():
    """Return the names of the presets, those with a ResNet marked as slow."""
    marks = {
        name: [pytest.mark.slow] if "resnet" in config.load(name).model.encoder else []
        for name in config.presets()
    }
    return [pytest.param(name, marks=of) for name, of in marks.items() if name not in TEMPLATES]


@pytest.mark.slow
@pytest.mark.parametrize("name", presets())
def test_every_arm_of_a_preset_trains(name, every_source):
    """Train on small generated files instead of the preset's data."""
    trains(config.load(name), every_source)


def trains(cfg: Config, root: Path) -> None:
    """Check that each arm trains a round in each iteration, and that every client is measured."""
    data = None
    for one_arm in smallest(cfg):
        data = data or build(one_arm.data, kind=one_arm.kind, seed=0, data_root=root)
        one, workspace, _ = arm(one_arm, data)
        workspace.algorithm.check(data, "arm", workspace.net)
        measured = {record["client"] for record in finish(one, 5)}
        assert measured == {client.name for client in (*data.clients, *data.unseen)}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_requires_data(name, tmp_path):
    with pytest.raises(UserError, match=config.load(name).data.source):
        uefl.train(config.load(name), out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
