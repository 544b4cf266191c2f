"""A user's own ``flwr run`` with the apps of uefl: the metrics of ``uefl train``, bit for bit."""

import importlib.util
import subprocess
import sys

import pytest

pytest.importorskip("flwr")

import uefl
from tests.federated import tiny
from tests.federated.deploy.chaos.cluster import CONFIG, SILOS, UEFL, open_sandbox, until, without_bytes
from tests.federated.deploy.machines import images
from uefl.deploy import own_run
from uefl.engines.flower.address import Address
from uefl.engines.flower.commands import folder_of_commands, free_port
from uefl.engines.flower.link import Node, _connection
from uefl.errors import UserError

APP = """
[project]
name = "own"
version = "1.0.0"
description = "an app of a user"
license = {{ text = "Apache-2.0" }}
[tool.flwr.app]
publisher = "user"
[tool.flwr.app.components]
serverapp = "uefl.deploy.app:server"
clientapp = "uefl.deploy.app:client"
[tool.flwr.app.config]
config = "{folder}/tiny.toml"
out = "{folder}/run"
{config}
"""


OWN_IMAGES = """
[run]
passes = 3
precision = "fp32"
threads = 1
private_mean = false
[data]
source = "nowhere"
legacy_holdout = true
[model]
width = 4
hidden = 16
[training]
rounds = [1, 1]
local_epochs = 1
batch_size = 8
[arms.fedper]
"""


class OwnRun:
    """A sandbox with a SuperLink of the user and an app."""

    def __init__(self, sandbox, monkeypatch):
        self.sandbox, self.port = sandbox, sandbox.cluster.port
        self.address = Address(f"127.0.0.1:{self.port}", insecure=True)
        monkeypatch.setenv("FLWR_HOME", str(sandbox.folder / "flwr"))
        monkeypatch.setenv("PATH", folder_of_commands(sandbox.folder / "bin"))

    def start(self, command, *options, log):
        return self.sandbox.start("uefl.engines.flower.commands", command, *options, log=log)

    def alone(self, config="tiny.toml"):
        """Return the metrics of the same run in this process."""
        folder = self.sandbox.folder
        uefl.train(folder / config, out=folder / "alone", device="cpu")
        return without_bytes((folder / "alone" / "metrics.jsonl").read_text())

    def superlink(self, *options):
        where = ("--insecure", "--host", "127.0.0.1", "--port", self.port)
        self.start("flower-superlink", *where, *options, log="superlink.log")
        self.address.wait(60.0)

    def run(self, *options, config=""):
        """Start the run, wait for its end, and return its metrics."""
        folder = self.sandbox.folder
        (folder / "app").mkdir()
        (folder / "app" / "pyproject.toml").write_text(APP.format(folder=folder, config=config))
        (folder / "flwr").mkdir(exist_ok=True)
        (folder / "flwr" / "config.toml").write_text(_connection(self.address, ["--insecure"]))
        command = [sys.executable, "-m", "uefl.engines.flower.commands", "flwr", "run"]
        subprocess.run([*command, str(folder / "app"), "here", *options], check=True, capture_output=True)
        log = folder / "superlink.log"
        until("the end of the program", lambda: "Finished task" in log.read_text(), 600.0)
        return without_bytes(self.sandbox.metrics())


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a configuration of two clients and a round in each of two iterations.

    Each message starts a process.
    """
    with open_sandbox(tmp_path) as sandbox:
        tiny = CONFIG.format(run="", clients=2, arms=UEFL).replace("[2, 1]", "[1, 1]")
        (tmp_path / "tiny.toml").write_text(tiny)
        yield OwnRun(sandbox, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_silos_reply_to_a_run_of_another_superlink(own):
    """This SuperLink itself starts the program of the run."""
    own.superlink()
    for name in SILOS[:2]:
        own.sandbox.cluster.silo(name)
    assert own.run(config="silos = 2") == own.alone()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_of_flower_stand_for_the_clients(own):
    """A node without a silo replies for all clients."""
    own.superlink()
    where = ("--insecure", "--superlink", own.address.place, "--port", free_port())
    own.start("flower-supernode", *where, log="supernode.log")
    until("the node", lambda: "SuperNode ID" in (own.sandbox.folder / "supernode.log").read_text())
    assert own.run() == own.alone()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_of_flower_with_images_of_their_own(own):
    """--node-config names the folder and the silo, and one process gives the same metrics."""
    folder = own.sandbox.folder
    for seed, name in enumerate(("ulm", "bonn")):
        for place in ("silos", "data"):  # a silo writes next to its images
            images(folder / place / name, {"cat": 0, "dog": 1}, seed=seed)
    (folder / "tiny.toml").write_text(OWN_IMAGES)
    own.superlink()
    for name in ("ulm", "bonn"):
        told = f'data="{folder / "silos" / name}" name="{name}"'
        where = ("--insecure", "--superlink", own.address.place, "--port", free_port())
        own.start("flower-supernode", *where, "--node-config", told, log=f"{name}.log")
    metrics = own.run(config="silos = 2")
    assert {line["client"] for line in metrics} == {"ulm", "bonn"}
    assert (folder / "silos" / "ulm.silo" / "states").is_dir()
    (folder / "alone.toml").write_text(OWN_IMAGES.replace("nowhere", str(folder / "data")))
    assert metrics == own.alone("alone.toml")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Flower's simulation needs Ray")
def test_the_simulation_of_flower(own):
    own.superlink("--simulation")
    assert own.run("--federation-config", "num-supernodes=2") == own.alone()


class Nodes:
    """A link with these nodes."""

    def __init__(self, count):
        self._count = count

    def nodes(self):
        return [Node(i, "1", "") for i in range(self._count)]


@pytest.mark.parametrize("nodes", [2, 0])
def test_each_client_has_a_node(nodes):
    cfg = tiny.settings("fedavg")
    with own_run.InRun(link=Nodes(nodes)).deployment("cpu", print, "") as run:
        if not nodes:
            with pytest.raises(UserError, match="SuperNodes"):
                run.federation(cfg, None, {})
            return
        names = list(run.federation(cfg, None, {}).by_name)
        _, roster = run._engine.args
    assert roster.nodes == {name: i % 2 for i, name in enumerate(names)}


def test_a_run_needs_a_folder():
    with pytest.raises(UserError, match=r"^out:"):
        own_run.train(None, {"config": "demo"})
