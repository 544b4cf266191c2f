"""docs/deploy.md as a test: a server and two silos, each a machine of its own as far as the network goes, with certificates and keys."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import uefl
from tests.federated.deploy.machines import HOST, Machines, images, may_make_namespaces
from tests.federated.deploy.runs import content
from uefl.deploy.chaos.keys import certificate, node_key
from uefl.deploy.chaos.stage import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces need the rights of root"),
    pytest.mark.skipif(shutil.which("openssl") is None or shutil.which("ssh-keygen") is None, reason="needs openssl and ssh-keygen"),
]
PLACE = f"{HOST}:8000"
CONFIG = """
[run]
passes = 3
precision = "fp32"
threads = 1
[data]
source = "data"
legacy_holdout = true
[model]
width = 4
hidden = 16
[training]
rounds = [2]
local_epochs = 1
batch_size = 8
[arms.fedavg]
[arms.uefl]
codewords = 4
segments = 4
stop_when_certain = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-silos")
    (folder / "mine.toml").write_text(CONFIG)
    images(folder / "data" / "ulm", {"cat": 0, "dog": 1})
    images(folder / "data" / "bonn", {"dog": 1, "emu": 2}, colour=True, seed=1)
    certificate(folder, HOST)
    for name in ("ulm", "bonn", "stranger"):
        node_key(folder, name)
    (folder / "secret").write_bytes(b"0123456789abcdef" * 4)
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(f'[superlink.here]\naddress = "{PLACE}"\nroot-certificates = "{folder}/server.pem"\n')
    return folder


@pytest.fixture(scope="module")
def machines(folder):
    with Machines(folder, ("ulm", "bonn")) as machines:
        tls = ("--ssl-ca-certfile", "server.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key")
        own = ("--isolation", "process", "--enable-supernode-auth", "--superexec-auth-secret-file", "secret")
        superlink = machines.start("server", "flower-superlink", "--host", HOST, "--port", "8000", *tls, *own)
        until("the SuperLink", lambda: "Uvicorn running" in superlink.log.read_text() or superlink.poll() is not None)
        yield machines


def silo(machines, name, *options):
    return machines.start(name, "uefl", "silo", "--data", f"data/{name}", "--superlink", PLACE, "--device", "cpu", *options)


def train(out, *options):
    return ("train", "mine.toml", "--engine", "flower", "--superlink", PLACE, "--silos", "2", "--device", "cpu", "--out", out, *options)


def told(folder, secrets):
    """Where a secret stands that should be in its own file alone: in a command line of any process here, a log, or a run folder."""
    places = {path: content(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    places |= {path: path.read_bytes() for path in [*folder.glob("*.log"), *folder.glob("runs/**/*")] if path.is_file()}
    assert any(b"--secret" in text for text in places.values())
    return [(str(path), name) for path, text in places.items() for name, secret in secrets.items() if secret in text]


TRUST = ("--root-certificates", "server.pem")


def test_two_machines_with_certificates_and_keys(folder, machines, monkeypatch):
    silos = {}
    for name in ("ulm", "bonn"):
        code, said = machines.run("server", "flwr", "supernode", "register", f"{name}.key.pub", "here")
        assert code == 0, said
        silos[name] = silo(machines, name, *TRUST, "--key", f"{name}.key")
    stranger = silo(machines, "ulm", *TRUST, "--key", "stranger.key", "--name", "stranger", "--wait", "5")
    run = machines.start("server", "uefl", *train("runs/flower", *TRUST, "--secret", "secret"))
    until("a message", lambda: "arm 'fedavg'" in silos["ulm"].log.read_text() or run.poll() is not None, 300)
    secrets = {name: (folder / name).read_bytes() for name in ("secret", "server.key", "ulm.key", "bonn.key")}
    bodies = {name: text[:32] if name == "secret" else text.splitlines()[2] for name, text in secrets.items()}
    assert told(folder, bodies) == []
    silos["ulm"].kill()  # at work: its message has to come again, to the same node
    silo(machines, "ulm", *TRUST, "--key", "ulm.key")
    assert run.wait(300) == 0, run.log.read_text()
    assert stranger.wait(60) == 2
    assert "does not let this silo in" in stranger.log.read_text()
    monkeypatch.chdir(folder)  # below which the silos' images lie
    uefl.train("mine.toml", out="runs/local", device="cpu")
    assert (folder / "runs/flower/metrics.jsonl").read_bytes() == (folder / "runs/local/metrics.jsonl").read_bytes()
    logs = b"".join(path.read_bytes() for path in [*folder.glob("*.log"), *(folder / "runs").rglob("*.*")])
    assert not [name for name, body in bodies.items() if body in logs]
    assert not (folder / "runs/flower/samples.safetensors").exists()
    assert ".png" not in (folder / "runs/flower/manifest.json").read_text()


def test_who_has_no_secret_or_trusts_another_gets_a_line(folder, machines):
    certificate(folder, HOST, "other")
    other = ("--root-certificates", "other.pem")
    asked = {
        "the SuperLink at 10.77.0.1:8000 refuses a run": train("no", *TRUST, "--secret", "mine.toml"),
        "cannot be trusted": train("no", *other, "--secret", "secret"),
    }
    for line, arguments in asked.items():
        code, said = machines.run("server", "uefl", *arguments)
        assert code == 2, said
        assert line in said
    process = silo(machines, "ulm", *other, "--key", "ulm.key")
    assert process.wait(60) == 2
    assert "cannot be trusted" in process.log.read_text()
