"""The memory and the work of a run with many clients do not grow with their number."""

import pytest
import torch

from benchmarks import scale
from uefl import config
from uefl.client import client
from uefl.data import build
from uefl.data.sources import generated
from uefl.errors import UserError

from . import tiny

# MiB for 1,800 more clients: 3.4 KB each, for names, a place in the list of clients, a name of a file, and
# the system's own noise
MOST = 6


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["fedavg", "local"])
def test_memory_does_not_follow_the_number_of_clients(arm):
    """With ``local`` the whole network is private: 9 KB for each client, 16 MiB for 1,800 clients."""
    few, many = (scale.measured(clients, arm, asked=50, rounds=2) for clients in (200, 2000))
    assert many["mib"] - few["mib"] < MOST
    if arm == "fedavg":  # the header of a saved model names every private tensor of every client, in memory
        assert many["mib_whole"] - few["mib_whole"] < 3 * MOST
    assert (few["private_bytes"] > 0) == (arm == "local")


def test_generated_clients_are_reproducible():
    cfg = config.load("many-clients", clients=40)
    federation, again = (build(cfg.data, kind="labeled", seed=3) for _ in range(2))
    assert federation.digest == again.digest != build(cfg.data, kind="labeled", seed=4).digest
    assert [one.name for one in federation.clients[:2]] == ["client-00", "client-01"]
    for one, other in zip(federation.clients, again.clients, strict=True):
        first, second = one.load(), other.load()
        assert [len(part) for part in (first.train, first.holdout, first.test)] == [
            one.sizes.train,
            one.sizes.holdout,
            one.sizes.test,
        ]
        assert all(
            torch.equal(a.images, b.images)
            for a, b in zip(vars(first).values(), vars(second).values(), strict=True)
        )
    assert not torch.equal(
        federation.clients[0].load().train.images, federation.clients[1].load().train.images
    )
    assert 0.3 < federation.mean[0] < 0.7
    legacy = config.load("many-clients", clients=2, legacy_holdout=True)
    data = build(legacy.data, kind="labeled", seed=0).clients[0].load()
    assert data.holdout is data.test


def test_generated_images_are_not_dealt():
    for keys, message in (
        ({"image_size": 8}, "image_size"),
        ({"partition": {"scheme": "rotations"}}, "partition"),
    ):
        with pytest.raises(UserError, match=f"key '{message}'"):
            build(config.load("many-clients", data=keys).data, kind="labeled", seed=0)
    with pytest.raises(UserError, match="key 'clients'"):
        build(
            config.load("demo").data.model_copy(
                update={"source": generated.NAME, "partition": None, "clients": None}
            ),
            kind="labeled",
            seed=0,
        )
    with pytest.raises(UserError, match=r"key 'source': .*labeled"):
        build(
            config.load("fedul-demo").data.model_copy(update={"source": generated.NAME}), kind="sets", seed=0
        )


def test_clients_that_do_not_fit_in_memory_are_read_every_turn(monkeypatch):
    monkeypatch.setattr(client, "_KEPT", 1)
    read = []

    def counted(data, device):
        read.append(data)
        return data

    monkeypatch.setattr(client, "on_device", counted)
    one = tiny.arm(tiny.settings("fedavg", rounds=[1]))[0]
    records = tiny.finish(one)
    assert len(read) > 3
    monkeypatch.undo()
    assert tiny.finish(tiny.arm(tiny.settings("fedavg", rounds=[1]))[0]) == records
