"""Private state stays at its silo.

The server knows names, and a continued run finds the states of its checkpoint.
"""

import json
import re
from dataclasses import replace

import pytest
import torch

from tests.federated.deploy.silos_in_memory import NAMES, SilosInMemory
from tests.federated.engine_wrappers import RecordingEngine, TamperingEngine
from tests.federated.tiny import arm, federation, finish, settings
from uefl.errors import RunError

ALGORITHMS = {
    "scaffold": {},
    "fedper": {"private_mean": False},
    "fedbn": {"private_mean": False, "participation": 0.6},
    "local": {"private_mean": False},
    "fedcr": {"private_mean": False},
    "uefl": {"extend": "all", "rounds": [2, 2]},
    "fedper-ensemble": {"private_mean": False, "uncertainty": "ensemble", "members": 2},
}


def configured(name):
    keys = ALGORITHMS[name]
    return settings(name.partition("-")[0], **keys)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("scaffold", "fedper-ensemble") else pytest.mark.slow)
        for name in sorted(ALGORITHMS.keys() - {"uefl"})
    ],
)
def test_it_trains_as_the_local_engine(name, tmp_path):
    cfg, fed = configured(name), federation()
    local = arm(cfg, fed)[0]
    remote = arm(cfg, fed, lambda _: SilosInMemory(cfg, fed, tmp_path), clients_keep_states=True)[0]
    assert repr(finish(remote)) == repr(finish(local))
    for key, tensor in local.state()[0].items():
        assert torch.equal(remote.state()[0][key], tensor), key
    assert remote.named_files() == set()
    for theirs, mine in zip(remote.members, local.members, strict=True):
        assert theirs.private.named == mine.private.named  # hashes of the content


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "fedper", "uefl"])
def test_run_resumes_after_every_turn_bit_for_bit(name, tmp_path):
    """The silos are started again, and have already done the turn that the server requests again."""
    cfg, fed = configured(name), federation()
    whole = finish(
        arm(cfg, fed, lambda _: SilosInMemory(cfg, fed, tmp_path / "whole"), clients_keep_states=True)[0]
    )
    records, one = [], arm(cfg, fed, lambda _: SilosInMemory(cfg, fed, tmp_path), clients_keep_states=True)[0]
    while not one.finished:
        tensors, plain = one.state()
        tensors, plain = {k: v.clone() for k, v in tensors.items()}, json.loads(json.dumps(plain))
        one.turn()  # the server is killed after it, before its checkpoint
        one = arm(cfg, fed, lambda _: SilosInMemory(cfg, fed, tmp_path), clients_keep_states=True)[0]
        one.restore(tensors, plain)
        records += one.turn()
    assert repr(records) == repr(whole)


OWN_CODEWORDS = {
    "kmeans": {},
    "counts": {"usage_aware": False},
    "equal": {"usage_aware": "equal"},
    "normal": {"new_codewords": "normal"},
    "double": {"growth": "double"},
    "residual": {"extension": "residual"},
    "personal": {"personal": True, "weight_decay": 0.1},  # also moves codewords that no image uses
    "groups": {"personal": [["silo-0", "silo-2"], ["silo-1"]]},
    "segments": {"segments": 2, "segment_codebooks": True},
    "ensemble": {"uncertainty": "ensemble", "members": 2},
    "absent": {"participation": 0.6},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "personal" else pytest.mark.slow) for name in OWN_CODEWORDS],
)
def test_codewords_of_one_client_stay_at_its_silo(name, tmp_path):
    """The server has zeros, or codewords drawn from the seed, and the metrics are the same."""
    cfg = settings("uefl", **{"extend": "all", "rounds": [2, 2, 1]} | OWN_CODEWORDS[name])
    fed, engines = federation(), []
    local = arm(cfg, fed)[0]
    remote = arm(
        cfg,
        fed,
        lambda _: engines.append(SilosInMemory(cfg, fed, tmp_path)) or engines[0],
        clients_keep_states=True,
    )[0]
    for mine, theirs in zip(finish(local), finish(remote), strict=True):
        moved = ("bytes_sent", "bytes_received")
        assert {k: v for k, v in mine.items() if k not in moved} == {
            k: v for k, v in theirs.items() if k not in moved
        }
        assert all(theirs[key] <= mine[key] for key in moved)
    theirs, mine = remote.members[0].state, local.members[0].state
    assert torch.equal(theirs.tensors["values"], mine.tensors["values"])
    for i, clients in enumerate(mine.plain["part_clients"]):
        same = torch.equal(theirs.tensors[f"part.{i}"], mine.tensors[f"part.{i}"])
        assert same == (len(clients) > 1), i
    rows = {client: local.members[0].algorithm.visible(mine, client).shape[-2] for client in NAMES}
    for client, kept in theirs.plain["at_silo"].items():
        assert kept == rows[client] - remote.members[0].algorithm.first_own_row(theirs, client) > 0


def test_few_states_are_kept(tmp_path):
    cfg, fed = settings("scaffold", rounds=[8]), federation()
    finish(arm(cfg, fed, lambda _: SilosInMemory(cfg, fed, tmp_path), clients_keep_states=True)[0])
    for name in NAMES:
        assert len(list((tmp_path / name).glob("states/*/*.safetensors"))) == 3
        assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / name).glob("*"))


def test_silo_with_a_lost_state_is_rejected(tmp_path):
    cfg, fed = settings("scaffold", quorum=0.5), federation()
    one, _, notices = arm(cfg, fed, lambda _: SilosInMemory(cfg, fed, tmp_path), clients_keep_states=True)
    one.turn()
    for path in (tmp_path / "silo-1").glob("states/*/*.safetensors"):
        path.write_bytes(b"x")
    one.turn()
    assert len(notices) == 1
    assert re.search(r"\brejected\b.*\bsilo-1\b", notices[0])
    assert "state" in notices[0]


@pytest.mark.parametrize("how", ["asked", "sent", "name"])
def test_server_cannot_request_private_state(how, tmp_path):
    """The server leaves out the name of the state, sends its own state, or names a file."""
    cfg, fed = configured("fedper"), federation()
    silos = SilosInMemory(cfg, fed, tmp_path)

    def ask(messages):
        for message in messages.values():
            match how:
                case "asked":
                    del message.options["state"]
                case "sent":
                    message.private = {"net.values": torch.zeros(3)}
                case "name":
                    message.options["state"] = "../secret"

    one = arm(cfg, fed, lambda _: RecordingEngine(silos, ask), clients_keep_states=True)[0]
    messages = one.members[0].messages
    one.members[0].messages = lambda *rest: dict(messages(*rest))
    with pytest.raises(RunError, match="0 of 3"):
        one.turn()
    assert [reply.error for reply in silos.said] == ["state" if how == "name" else "unreadable"] * 3


@pytest.mark.parametrize("states", [[], ["x"], ["../../x"], [32 * "0", 32 * "0"], [32 * "0"]])
def test_invalid_names_of_states_are_rejected(states, tmp_path):
    cfg, fed = configured("scaffold"), federation()
    silos = TamperingEngine(SilosInMemory(cfg, fed, tmp_path), lambda reply: replace(reply, states=states))
    one, _, notices = arm(settings("scaffold", quorum=0.1), fed, lambda _: silos, clients_keep_states=True)
    if states == [32 * "0"]:
        one.turn()
    else:
        with pytest.raises(RunError, match="0 of 3"):
            one.turn()
        assert all("private" in notice for notice in notices)


def test_reported_tensors_equal_sent_tensors(tmp_path):
    """The bytes differ by a few thousand, for a header.

    The private state is not sent.
    """
    cfg, fed = settings("fedper", private_mean=False, personal="all", hidden=256), federation()
    engines = []
    one = arm(
        cfg,
        fed,
        lambda _: engines.append(SilosInMemory(cfg, fed, tmp_path)) or engines[0],
        clients_keep_states=True,
    )[0]
    records = finish(one)
    reported = [sum(record[key] for record in records) for key in ("bytes_sent", "bytes_received")]
    messages = len(engines[0].said)
    state = sum(t.numel() * t.element_size() for t in one.members[0].private.start.values())
    assert state > 10_000
    for traveled, said in zip((engines[0].sent, engines[0].received), reported, strict=True):
        assert said <= traveled < said + 6000 * messages
    assert state > 6000
