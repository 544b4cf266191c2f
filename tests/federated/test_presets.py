"""Every arm of every preset that the package has trains: one tiny round of each of two iterations."""

import os
from pathlib import Path

import pytest

import uefl
from tests.federated.tiny import arm, finish
from uefl import config
from uefl.algorithms.base import find
from uefl.data import build
from uefl.errors import UserError

TEMPLATES = ("own-silos", "own-sets")


def tiny(name):
    """The preset as small as it goes, each of its arms alone."""
    cfg = config.load(name)
    keys = {"data": {"test_per_client": 10}, "training": {"rounds": [1], "batch_size": 16, "local_epochs": 1}}
    if getattr(cfg.data.partition, "angles", ()):
        keys["data"]["partition"] = {"angles": [0, 120]}
    if cfg.kind == "labeled":
        keys["data"] |= {"clients": 2, "train_per_client": 24}
        keys["model"] = {"width": 2, "hidden": 8}
        keys["training"]["max_iterations"] = 2
    else:
        keys["data"] |= {"clients": 2, "train_per_client": 60, **{key: 40 for key in ("labeled", "validation") if getattr(cfg.data, key)}}
        keys["model"] = {"width": 2} if cfg.model.encoder == "cnn5x5" else {}
    for arm_, of_arm in cfg.table()["arms"].items():
        draws = cfg.kind == "labeled" and find(of_arm["algorithm"]).draws
        keys["run"] = {"precision": "fp32", "participation": 1.0, "evaluation": 1.0} | ({"passes": 2} if draws else {})
        smaller = {"codewords": 4, "codebook_after": min(1, of_arm.get("codebook_after", 0))}
        yield config.load(name, arms={arm_: of_arm | {key: value for key, value in smaller.items() if key in of_arm}}, **keys)


def presets():
    """Their names; a ResNet takes its time also for tiny rounds."""
    marks = {name: [pytest.mark.slow] if "resnet" in config.load(name).model.encoder else [] for name in config.presets()}
    return [pytest.param(name, marks=of) for name, of in marks.items() if name not in TEMPLATES]


@pytest.mark.parametrize("name", presets())
def test_every_arm_of_a_preset_trains(name):
    cfgs, root = list(tiny(name)), os.environ.get("UEFL_DATA")
    try:
        data = build(cfgs[0].data, kind=cfgs[0].kind, seed=0, data_root=Path(root) if root else None)
    except UserError as error:
        if cfgs[0].data.source == "digits":
            raise
        pytest.skip(f"{cfgs[0].data.source} is not here: {error}")
    for cfg in cfgs:
        one, room, _ = arm(cfg, data)
        room.algorithm.check(data, "arm", room.net)
        assert {r["client"] for r in finish(one, 5)} == {silo.name for silo in data.silos}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_asks_for_data(name, tmp_path):
    with pytest.raises(UserError, match=config.load(name).data.source):
        uefl.train(config.load(name), out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
