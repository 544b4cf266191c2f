"""The code of a run that is for GPUs runs here on the CPU, and the results have the same bits.

Not covered: the search of the codebooks of several clients in one call (``test_together`` covers it), the
choice of a GPU by its number in a worker, and recordings and streams of CUDA itself.
"""

from __future__ import annotations

import pytest
import torch

import uefl
from uefl import devices
from uefl.client import recording
from uefl.client.workspace import uses_bf16
from uefl.seeds import seeded

from .tape import Tape
from .whole_run import Watcher, outcome, start


class Generator:
    """Stands in for the generator of a GPU: it has a state, and nothing draws from it."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.seeds = 0

    def seed(self, number: int) -> None:
        self.seeds += 1
        self.generator.manual_seed(number)


@pytest.fixture
def gpu(monkeypatch):
    """Make a run take the CPU for a GPU."""
    own = Generator()
    monkeypatch.setattr(devices, "_GPUS", ("cpu", "cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", own.seed)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: own.generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: own.generator.set_state(state))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(recording, "CudaRecorder", lambda device: Tape())
    return own


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("precision=bf16",),
        ("precision=fp32", "clients_at_once=3"),
        pytest.param(("precision=fp32", "cuda_graphs=true", "local_epochs=6"), marks=pytest.mark.slow),
        ("precision=fp32", "optimizer=sgd", 'arms=["fedavg", "centralized"]'),
    ],
    ids=["auto", "bf16", "at once", "graphs", "server"],
)
def test_run_has_the_same_bits(tmp_path, request, keys):
    plain = [key for key in keys if "graphs" not in key] or ["precision=bf16"]
    start(tmp_path / "plain", *plain)
    own, watcher = request.getfixturevalue("gpu"), Watcher()
    start(tmp_path / "gpu", *keys, observer=watcher)
    assert own.seeds > 0
    assert not [notice for notice in watcher.notices if "cuda_graphs" in notice]
    found, expected = outcome(tmp_path / "gpu"), outcome(tmp_path / "plain")
    assert found[:2] == expected[:2]
    if "cuda_graphs=true" not in keys:  # else the models name another configuration
        assert found[2] == expected[2]


def test_prediction_takes_deterministic_kernels(gpu, tmp_path, monkeypatch):
    start(tmp_path / "run")
    model = uefl.load(tmp_path / "run").model("fedavg")
    found = []
    infer = type(model.algorithm).infer

    def watched(*arguments):
        found.append(torch.are_deterministic_algorithms_enabled())
        return infer(*arguments)

    monkeypatch.setattr(type(model.algorithm), "infer", watched)
    model.predict(torch.zeros(2, *model.shape, dtype=torch.uint8))
    assert found == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_bfloat16_and_seeds_of_a_gpu(gpu):
    device = torch.device("cpu")
    assert uses_bf16("auto", device)
    before = gpu.generator.get_state()
    with seeded(device, 0, "place"):
        assert not torch.equal(gpu.generator.get_state(), before)
    assert torch.equal(gpu.generator.get_state(), before)
