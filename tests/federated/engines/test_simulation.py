"""Flower's simulation with Ray's actors: the numbers of the local engine, and what a client or an actor that
fails costs."""

import time
from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: make test-flower has it")
if find_spec("ray") is None:  # its import has to wait for the one of uefl.engines.flower.simulation
    pytest.skip("Ray is not installed: make test-ray installs it", allow_module_level=True)

from tests.federated import tiny
from tests.federated.deploy.runs import config, uefl
from tests.federated.engines import tiny_worker
from tests.federated.engines.conformance import (
    DIES,
    check_raises,
    check_same,
    every_case,
    federation,
    messages,
    settings,
)
from uefl.deploy.chaos.stage import UEFL
from uefl.deploy.setting import Setting, task
from uefl.engines.flower import simulation
from uefl.engines.flower.address import Unreachable
from uefl.engines.flower.engine import FlowerEngine
from uefl.engines.flower.simulation import Placed, simulated

NAMES = ["client-0", "client-1", "silo-0", "silo-1", "silo-2", "unseen-0"]


@pytest.fixture(scope="module")
def nodes():
    with simulated(NAMES, tiny_worker.answer, 2) as (grid, placed):
        yield grid, placed


def engine(nodes, cfg):
    grid, placed = nodes
    fed = federation(cfg)
    here = {silo.name: placed.nodes[silo.name][0] for silo in (*fed.silos, *fed.unseen)}
    return FlowerEngine(
        grid, Placed(here, placed.look), task(Setting.of(cfg, fed, torch.get_num_threads()), "arm")
    )


@every_case
def test_every_algorithm_is_the_same_bit_for_bit(nodes, case):
    cfg = settings(case)
    check_same(cfg, engine(nodes, cfg))


def test_a_client_that_raises_says_a_code_and_no_text(nodes):
    check_raises(lambda cfg: engine(nodes, cfg))


def test_an_actor_that_dies_costs_its_reply(nodes):
    cfg = tiny.settings("fedavg", seed=DIES)
    errors = [reply.error for reply in engine(nodes, cfg).round(messages(cfg))]
    assert errors[0] is None
    assert "no reply" in errors[1]


def test_a_simulation_that_has_ended_is_said(monkeypatch):
    def ends(**keys):
        raise RuntimeError("no memory")

    monkeypatch.setattr(simulation, "start_vce", ends)
    with simulated(NAMES, tiny_worker.answer, 2) as (_, placed):
        time.sleep(0.2)
        with pytest.raises(Unreachable, match="simulation has ended: no memory"):
            placed.look()


@pytest.mark.timeout(300)
def test_a_whole_run_has_the_same_numbers_and_leaves_nothing(tmp_path):
    cfg = config(tmp_path, f"{UEFL}[arms.fedper]\n", clients=12, run="participation = 0.5")
    assert uefl("train", cfg, "--out", "local", "--device", "cpu", cwd=tmp_path)[0] == 0
    code, _, err = uefl(
        "train", cfg, "--engine", "ray", "--workers", 2, "--out", "ray", "--device", "cpu", cwd=tmp_path
    )
    assert (code, err) == (0, "")
    for name in (
        "metrics.jsonl",
        "manifest.json",
        "config.toml",
        *(path.name for path in tmp_path.glob("local/model-*")),
    ):
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name
