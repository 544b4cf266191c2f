"""Runs with differential privacy in their folders: the summary, and the key of the noise."""

import re
import stat

import pytest

from tests.federated.test_privacy import SECRET, privacy
from tests.federated.whole_run import KEYS, Watcher, go_on, outcome, train
from uefl import config
from uefl.errors import UserError
from uefl.models import saved
from uefl.privacy import KEY

pytest.importorskip("opacus", reason="the extra 'privacy' is not installed")


@pytest.fixture(scope="module")
def keyed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uefl.privacy.secrets.token_bytes", lambda size: SECRET)
        yield


def begin(out, observer=None):
    keys = [key for key in KEYS if not key.startswith(("arms", "codewords", "gamma", "rounds"))]
    own = {"privacy": "central", "noise_multiplier": 2.0, "clip_norm": 0.01, "norm_layer": "group"}
    own |= {"arms": ["fedavg", "fedprox"], "rounds": [1], "normalize": "centered"}
    return train(config.load("demo", keys, **own), out, observer)


@pytest.fixture(scope="module")
def whole(keyed, tmp_path_factory):
    out, observer = tmp_path_factory.mktemp("private") / "run", Watcher()
    return out, observer, begin(out, observer)


def test_the_summary_lists_what_is_private_and_from_whom(whole):
    out, observer, summary = whole
    told, of_one = summary["privacy"], privacy(noise_multiplier=2.0)
    assert told["epsilon"] == of_one.epsilon(2)  # both arms spend the privacy of the same clients
    assert {arm["epsilon"] for arm in summary["arms"].values()} == {of_one.epsilon(1)}
    assert "one client" in told["hides"]
    assert "metrics.jsonl" in told["outside"]
    spent = rf"central .*: 1 round .*epsilon {of_one.epsilon(1):.3g} .*delta 1e-05$"
    assert any(re.match(spent, notice) for notice in observer.notices)
    report = (out / "report.md").read_text()
    assert "privacy: central, clip" in report
    assert "| epsilon |" in report
    model = saved.load(out / "model-fedavg.safetensors")
    assert model.mean.flatten().tolist() == [127.5]


def test_key_is_owner_only_and_deleted_after_the_run(whole, keyed, tmp_path):
    assert not (whole[0] / KEY).exists()
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "run", Watcher(stop_after=4))
    assert stat.S_IMODE((tmp_path / "run" / KEY).stat().st_mode) == 0o600
    others = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != KEY]
    assert not [
        path for path in others if SECRET in path.read_bytes() or SECRET.hex().encode() in path.read_bytes()
    ]
    go_on(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(whole[0])
    assert not (tmp_path / "run" / KEY).exists()


def test_run_without_its_key_does_not_resume(keyed, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "run", Watcher(stop_after=4))
    (tmp_path / "run" / KEY).unlink()
    with pytest.raises(UserError, match=rf"{KEY} .*missing"):
        go_on(tmp_path / "run")
