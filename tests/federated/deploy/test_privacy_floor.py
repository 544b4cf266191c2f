"""The requirements of a silo: noise on its updates for every server, and a lasting count of the updates."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("opacus", reason="the extra 'privacy' is not installed")

from tests.federated import tiny
from tests.federated.deploy import silos_in_memory
from tests.federated.deploy.reports import refusal
from tests.federated.engines.conformance import messages
from uefl.deploy.command import silo as serve
from uefl.deploy.privacy_floor import PrivacyFloor
from uefl.deploy.setting import greeting
from uefl.engines.codec import Packet, reply_of
from uefl.errors import UserError
from uefl.privacy import Privacy, clip_factor, spent_by

LOCAL = {"privacy": "local", "noise_multiplier": 2.0, "norm_layer": "group", "normalize": "centered"}


def settings(algorithm="fedavg", **keys):
    return tiny.settings(algorithm, **(LOCAL | keys))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "count.json"


def floor(path, noise=1.0, bound=0.0):
    return PrivacyFloor(noise, 1e-5, bound, path)


def program(path, **keys):
    return silos_in_memory.program(tiny.federation(), floor=floor(path, **keys))


def asked(cfg, **options):
    """Return the first message of a run to silo-0.

    If the arm is refused before its message is read, return the message of another arm.
    """
    message = messages(settings())["silo-0"]
    message.options |= options
    return silos_in_memory.asked(message, cfg, tiny.federation())


def error(reply):
    return reply.header["error"]


def test_a_run_above_the_floor_gets_replies_and_is_counted(path, caplog):
    caplog.set_level("INFO")
    one = program(path)
    assert error(one(Packet(greeting(settings()), {}))) is None
    assert not path.exists()
    for _ in range(2):
        reply = reply_of(one(asked(settings())))
        assert reply.error is None
        assert reply.tensors
    assert reply_of(program(path)(asked(settings(noise_multiplier=4.0)))).error is None
    assert json.loads(path.read_text()) == {"schema": 1, "updates": {"2.0": 2, "4.0": 1}}
    spent = f"{spent_by({2.0: 2, 4.0: 1}, 1e-5):.3g}"
    assert re.match(rf"3 updates .*epsilon {spent} .*delta 1e-05$", floor(path).describe())
    assert floor(path).describe() in caplog.text


def test_privacy_spent_by_several_runs_adds_up():
    assert spent_by({}, 1e-5) == 0.0
    for noise, count in ((1.0, 7), (4.0, 3)):
        assert spent_by({noise: count}, 1e-5) == Privacy(settings(noise_multiplier=noise).run, b"").epsilon(
            count
        )
    both = spent_by({1.0: 7, 4.0: 3}, 1e-5)
    assert spent_by({1.0: 7}, 1e-5) < both < spent_by({1.0: 8}, 1e-5)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"noise_multiplier": 0.5}, r"noise_multiplier .*\b1 or more; .*\b0\.5"),
        ({"privacy": "central"}, "privacy = 'central'"),
        ({"privacy": "none", "noise_multiplier": 1.0}, "privacy = 'none'"),
    ],
)
def test_a_run_below_the_floor_is_refused(path, keys, line, caplog):
    cfg, one = settings(**keys), program(path)
    report = one(Packet(greeting(cfg), {}))
    assert error(report) == error(one(asked(cfg))) == "privacy"
    assert re.search(r"\bfault\b.*\bprivacy\b", refusal(report))
    assert len(re.findall(line, caplog.text)) == 2
    assert "Traceback" not in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(
    ("algorithm", "keys", "options"),
    [
        ("uefl", {}, {}),  # k-means centers of its features
        ("fedper", {}, {}),  # a mean of layers that stay
        ("fedavg", {"norm_layer": "batch"}, {}),  # running statistics
        ("fedavg", {}, {"ask": "0/0/1"}),  # the reply has no noise
        ("fedavg", {}, {"members": 2}),  # two updates, which would count as one
    ],
)
def test_algorithms_without_noise_are_refused(path, algorithm, keys, options, caplog):
    assert error(program(path)(asked(settings(algorithm, **keys), **options))) == "privacy"
    assert "noise" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_model_returns_only_noise(bad):
    """A server may send such a model.

    The length of the change then has no meaning.
    """
    mechanism, sent = Privacy(settings(clip_norm=1e-6).run, b"key"), {"a": torch.tensor([bad, 0.0])}
    one = mechanism.hidden({"a": torch.tensor([bad, 5.0])}, sent, "silo-0", 0)
    assert abs(float(one["a"][1])) < 1e-4
    assert clip_factor({"a": (torch.tensor([bad, 5.0]), sent["a"])}, 1.0) == 0.0


def test_silo_stops_at_its_own_bound(path, caplog):
    one = program(path, bound=spent_by({2.0: 2}, 1e-5))
    assert [error(one(asked(settings()))) for _ in range(4)] == [None, None, "budget", "budget"]
    assert "--max-epsilon" in caplog.text
    again = program(path, bound=spent_by({2.0: 2}, 1e-5))
    # a continued run may only have to measure
    assert error(again(Packet(greeting(settings()), {}))) is None
    assert error(again(asked(settings(), train=False, evaluate=True))) is None
    assert error(again(asked(settings()))) == "budget"
    assert json.loads(path.read_text())["updates"] == {"2.0": 2}


def test_a_bound_below_one_update_is_noted_at_the_start(path):
    assert re.match(r"0 updates .*\b10\.7: .*noise", floor(path, noise=1.0, bound=5.0).describe())
    assert "10.7" not in floor(path, noise=1.0, bound=20.0).describe()


def test_an_update_that_cannot_be_counted_does_not_leave(path, monkeypatch):
    def full(*arguments):
        raise OSError("no space")

    monkeypatch.setattr("uefl.deploy.privacy_floor.write_json", full)
    reply = program(path)(asked(settings()))
    assert error(reply) == "program"
    assert reply.groups == {"update": {}, "private": {}}


def test_a_measurement_is_no_update(path):
    assert error(program(path)(asked(settings(), train=False, evaluate=True))) is None
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"schema": 2, "updates": {}}', '{"schema": 1, "updates": {"1.0": -1}}', '{"schema": 1}'],
)
def test_damaged_count_is_not_reset(path, text):
    path.write_text(text)
    with pytest.raises(UserError, match=r"--spent: .*damaged"):
        floor(path)


def test_two_processes_do_not_count_in_one_file(path):
    with floor(path).locked(), pytest.raises(UserError, match=r"\bprocess;.*--spent"), floor(path).locked():
        pass


def test_updates_counted_since_are_kept(path):
    first, second = floor(path), floor(path)
    with first.locked():
        first.count(settings().run)
    with second.locked():
        second.count(settings().run)
    assert floor(path).describe().startswith("2 updates")


def test_runs_that_differ_in_noise_do_not_reveal_the_update(path):
    """Two runs that differ in noise scale different draws.

    With the same draw, twice the first reply minus the second would be the update without noise.
    """
    one = program(path)
    packet = asked(settings(noise_multiplier=1.0))
    first, second = (
        reply_of(one(asked(settings(noise_multiplier=noise)))).tensors["values"].double()
        for noise in (1.0, 2.0)
    )
    sent = packet.groups["broadcast"]["values"].double()
    assert float((2 * first - second - sent).norm()) > 1.5 * float((first - sent).norm())


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"noise_multiplier": 0.0}, r"--noise-multiplier: .*\b0.01 to 1000; .*\b0$"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, r"--delta: .*\b0 .*\b1\b"),
        ({"noise_multiplier": 1.0, "max_epsilon": -1.0}, r"--max-epsilon: .*\b0\b"),
        ({"noise_multiplier": 1.0, "spent": None}, "--spent"),
        ({"max_epsilon": 1.0}, "--noise-multiplier"),
    ],
)
def test_incompatible_options_of_the_floor_are_one_line(path, keys, line):
    pytest.importorskip("flwr")
    options = {"noise_multiplier": None, "delta": 1e-5, "max_epsilon": 0.0, "spent": path} | keys
    rest = dict.fromkeys(
        ("data", "name", "root_certificates", "key", "label", "algorithms", "state", "strict", "data_root")
    )
    with pytest.raises(UserError, match=line):
        serve(
            SimpleNamespace(
                **options,
                **rest,
                simulate="silo-0",
                superlink="127.0.0.1:1",
                insecure=True,
                wait=0.0,
                device="cpu",
            )
        )
