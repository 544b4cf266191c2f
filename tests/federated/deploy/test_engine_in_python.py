"""``uefl.train(engine=...)``: what goes over Flower from Python, with the words of the command line for what does not."""

import numpy as np
import pytest

pytest.importorskip("flwr")

import uefl
from tests.federated.interrupted import KEYS
from uefl.deploy import command
from uefl.errors import UserError

ARMS = {"fedavg": {}}


class Mine(uefl.Algorithm):
    """Of this process alone."""


def train(out, **keys):
    keys = {"arms": ARMS} | keys
    return uefl.train(KEYS, out=out, device="cpu", **keys)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"engine": "ray"}, r"engine: expected 'local', 'flower' or uefl.Flower\(...\), got 'ray'"),
        ({"engine": uefl.Flower(silos=2)}, "--silos, --root-certificates, --secret and --insecure are for a --superlink"),
        ({"engine": uefl.Flower("10.77.9.9:8000")}, "say with --silos how many silos take part"),
        ({"engine": uefl.Flower("10.77.9.9:8000", silos=2, secret="nowhere")}, "--secret: nowhere cannot be read"),
        (
            {"engine": "flower", "clients": {"a": ((np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2), None)}},
            "clients or federation: given in",
        ),
        ({"engine": "flower", "arms": {"mine": Mine()}}, "arm 'mine': mine is known to this process alone; install it as a package"),
    ],
)
def test_what_cannot_go_over_flower_is_a_line_before_anything_is_written(tmp_path, keys, line):
    with pytest.raises(UserError, match=line):
        train(tmp_path / "run", **keys)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_cannot_go_on(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        uefl.resume(tmp_path / "run", engine="flower")


def test_without_flower_the_answer_is_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"Flower is not installed; install it with: pip install 'uefl\[flower\]'"):
        train(tmp_path / "run", engine="flower")
