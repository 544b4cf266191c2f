"""The number of CPU threads of a run whose configuration does not set it."""

import json

import pytest
import torch
from torch import nn

import uefl
from uefl import run, threads
from uefl.client.workspace import Workspace
from uefl.threads import threads_for
from uefl_kernels.__main__ import spin_briefly

SMALL, IMAGE = nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 32, 32)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_network_has_one_thread_and_a_large_one_all():
    flops = 2 * 3 * 8 * 9 * 30 * 30
    enough = int(threads.ENOUGH / (3 * flops))
    assert [threads_for(SMALL, IMAGE, batch) for batch in (enough, enough + 1)] == [1, 2]


QUOTAS = {  # the control group of the process, and files below the folder of control groups
    "none": ("0::/", {"cpu.max": "max 100000"}, 2),
    "one core": ("0::/", {"cpu.max": "150000 100000"}, 1),
    "half a core": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "unreadable": ("0::/", {"cpu.max": "bad"}, 2),
    "of a service": ("0::/system.slice/a.service", {"system.slice/a.service/cpu.max": "100000 100000"}, 1),
    "around a service": ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1),
    "of a container": ("0::/docker/a", {"cpu.max": "100000 100000"}, 1),
    "version 1": (
        "3:cpu,cpuacct:/a",
        {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"},
        1,
    ),
    "version 1, none": ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 2),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_thread_count_stays_within_the_quota(name, tmp_path, monkeypatch):
    line, files, expected = QUOTAS[name]
    (tmp_path / "own").write_text(f"1:memory:/m\n{line}\n")
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    monkeypatch.setattr(threads, "_OWN", tmp_path / "own")
    monkeypatch.setattr(threads, "_GROUPS", tmp_path)
    assert threads_for(SMALL, IMAGE, 10**6) == expected


def test_choice_of_threads_does_not_change_the_network():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout()).train()
    state, drawn = {key: value.clone() for key, value in net.state_dict().items()}, torch.get_rng_state()
    threads_for(net, IMAGE, 1)
    assert net.training
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_run_records_its_threads_and_builds_its_network_once(tmp_path, monkeypatch):
    keys = {"width": 4, "hidden": 8, "rounds": [1], "local_epochs": 1, "train_per_client": 20}
    keys |= {"angles": [], "clients": 2, "test_per_client": 10}
    built = []
    monkeypatch.setattr(run, "Workspace", lambda *args: built.append(args) or Workspace(*args))
    for wanted, found in ((0, 1), (2, 2)):
        out = tmp_path / str(wanted)
        uefl.train("demo", out=out, arms=["fedavg"], threads=wanted, device="cpu", **keys)
        assert len(built) == 1
        built.clear()
        assert json.loads((out / "made.json").read_text())["threads"] == found
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["default", "own count", "own policy"],
)
def test_the_command_lets_waiting_threads_sleep(monkeypatch, given, spins):
    """The command does not change a variable that the user has set."""
    environment = dict(given)
    monkeypatch.setattr("os.environ", environment)
    spin_briefly()
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert environment.items() >= given.items()
