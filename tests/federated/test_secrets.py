"""Draws that protect the data of a client come from its own secret.

An attacker who knows the run's seed and all messages cannot repeat them.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.federated.deploy.silos_in_memory import SilosInMemory, asked, program
from tests.federated.engines import conformance
from tests.federated.engines.conformance import messages
from tests.federated.tiny import arm, federation, finish, settings, state
from uefl.algorithms.base import registry
from uefl.algorithms.fedbr import FedBR
from uefl.deploy.setting import greeting
from uefl.deploy.silo_folder import SiloFolder
from uefl.engines.base import Message
from uefl.engines.codec import Packet
from uefl.seeds import derive

SECRETS = {f"silo-{i}": bytes([i]) * 32 for i in range(3)}


class SecretiveSilos(SilosInMemory):
    """Silos that have these secrets in their folders."""

    def program(self, name, fed):
        (self.folder / name).mkdir(parents=True)
        (self.folder / name / "secret").write_bytes(SECRETS[name])
        return program(fed, name, kept=SiloFolder(self.folder / name))


def with_secrets(engine):
    """Return the local engine with these secrets."""
    for name, secret in SECRETS.items():
        engine._clients[name]._secret = secret
    return engine


def test_pseudo_images_do_not_reveal_the_images(monkeypatch):
    """An attacker draws the matrix of the means again from the seed, and solves for the images.

    The attacker is the server or another silo.
    """
    fed, asked, original = federation((48, 48, 48)), {}, FedBR.reply

    def watched(self, work):
        made = original(self, work)
        asked[work.client] = made["pseudo"].flatten(1)
        return made

    monkeypatch.setattr(FedBR, "reply", watched)
    arm(settings("fedbr", pseudo=600), fed)[0].turn()
    assert asked
    for client in fed.clients:
        images, means = client.load().train.images.flatten(1).float(), asked[client.name]
        generator = torch.Generator().manual_seed(derive(0, "own", "ask", "0/0/1", 0, client.name))
        matrix = torch.zeros(len(means), len(images))
        for row in matrix:
            row[torch.randperm(len(images), generator=generator)[:10]] = 0.1
        solved = torch.linalg.lstsq(matrix.double(), means.double(), driver="gelsd").solution.round()
        found = [(solved == image).all(1).any().item() for image in images]
        assert not any(found), f"{sum(found)} of {len(images)} images of {client.name}"
        assert 10 * len(means) < len(images)


def test_repeated_requests_get_the_same_means():
    """The means are the same for any number of requests, in any round, member or exchange.

    Otherwise means could add up.
    """
    fed, found = federation((148, 148, 148)), []
    for seed in (0, 7):
        one = arm(settings("fedbr", pseudo=9, seed=seed, batch_size=148), fed, with_secrets)[0]
        one.turn()
        found.append(state(one).tensors["pseudo"])
    assert torch.equal(*found)
    other = arm(settings("fedbr", pseudo=9, batch_size=148), fed)[0]
    other.turn()
    assert not any(
        torch.equal(mine, theirs) for mine in other.members[0].state.tensors["pseudo"] for theirs in found[0]
    )


def test_the_offset_of_distrans_is_not_drawn_from_the_seed(tmp_path):
    cfg, fed = settings("distrans", offset_lr=0.0), federation()
    offsets = [finish_and_read(arm(cfg, fed, engine)[0]) for engine in (with_secrets, lambda engine: engine)]
    assert not torch.equal(*offsets)


def finish_and_read(one):
    one.turn()
    return one.members[0].private["silo-0"]["net.buffers"]


@pytest.mark.slow
def test_silos_with_secrets_match_the_local_engine(tmp_path):
    for name, keys in {"fedbr": {"pseudo": 6}, "distrans": {"private_mean": False}}.items():
        cfg, fed = settings(name, **keys), federation((148, 148, 148))
        local = arm(cfg, fed, with_secrets)[0]
        remote = arm(
            cfg,
            fed,
            lambda _, cfg=cfg, fed=fed, name=name: SecretiveSilos(cfg, fed, tmp_path / name),
            clients_keep_states=True,
        )[0]
        assert repr(finish(remote)) == repr(finish(local))
        for key, tensor in local.state()[0].items():
            assert torch.equal(remote.state()[0][key], tensor), (name, key)


def test_a_secret_is_made_once_and_only_its_owner_reads_it(tmp_path):
    made = SiloFolder(tmp_path / "ulm.silo").secret
    assert len(made) == 32
    assert SiloFolder(tmp_path / "ulm.silo").secret == made != SiloFolder(tmp_path / "bonn.silo").secret
    assert (tmp_path / "ulm.silo").stat().st_mode & 0o077 == 0
    assert (tmp_path / "ulm.silo" / "secret").stat().st_mode & 0o077 == 0


def test_page_lists_what_each_algorithm_reveals():
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    table = page.split("| algorithm | what its messages reveal |")[1].split("\n\n")[0]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`([a-z-]+)`", row.split("|")[1] if row else "")
    }
    own = {name for name, kind in registry().items() if kind.__module__.startswith("uefl.")}
    assert own - named == set()


@pytest.mark.parametrize("name", ["centralized", "supervised"])
def test_a_client_sends_no_update_if_only_the_server_trains(name):
    """A server could add classes, so that the numbers of unlabeled sets are labels."""
    cfg = conformance.settings(name)
    fed = conformance.federation(cfg)
    fed = replace(fed, classes=(*fed.classes, *"0123456789"))
    workspace = arm(cfg, fed)[1]
    options = {"seed": 0, "round": 0, "train": True}
    client = fed.clients[0].name
    message = asked(Message(workspace.initial(0)[0], options), cfg, fed, client)
    reply = program(fed, client)(message)
    assert (reply.header["error"], reply.groups["update"]) == ("data", {})


@pytest.mark.parametrize("accepted", [("fedavg", "fedprox"), ("fedbr",), None])
def test_a_silo_accepts_the_algorithms_that_its_owner_names(accepted, caplog):
    cfg, fed = settings("fedbr"), federation()
    one = program(fed, algorithms=accepted)
    for packet in (asked(messages(cfg)["silo-0"], cfg, fed), Packet(greeting(cfg), {})):
        error = one(packet).header["error"]
        assert (error == "algorithm") == (accepted == ("fedavg", "fedprox"))
    assert ("'fedbr'" in caplog.text) == (error == "algorithm")
