"""The commands of docs/deploy.md work as the page has them.

The server and two silos are machines of their own, as far as network and files go.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import uefl
from tests.federated.deploy.chaos.certificates import certificate, node_key
from tests.federated.deploy.chaos.cluster import until
from tests.federated.deploy.machines import HOST, Machines, images, may_make_namespaces
from tests.federated.deploy.page import WalkThrough
from tests.federated.deploy.runs import content
from uefl.folder import read_silos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # seconds
    pytest.mark.skipif(
        not may_make_namespaces() and "CI" not in os.environ,
        reason="network namespaces need the rights of root",
    ),
    pytest.mark.skipif(
        shutil.which("openssl") is None or shutil.which("ssh-keygen") is None,
        reason="needs openssl and ssh-keygen",
    ),
]
SILOS = ("ulm", "bonn")
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
def page():
    """Return the commands of the page with a small configuration and a path.

    An address replaces a name, as the page advises.
    """
    changes = {
        "DNS:server.example": f"IP:{HOST}",
        "server.example": HOST,
        "/path/of/server.pem": "server.pem",
    }
    return WalkThrough(
        "Two silos in ten commands",
        changes | {"uefl train own-silos": "uefl train mine.toml --out run --device cpu"},
    )


@pytest.fixture(scope="module")
def machines(tmp_path_factory, page):
    """Create the machines of the page: each hospital has its images, and the server has none."""
    folder = tmp_path_factory.mktemp("two-silos")
    with Machines(folder, SILOS, page.variables) as machines:
        (folder / "server" / "mine.toml").write_text(CONFIG)
        images(folder / "ulm" / "images", {"cat": 0, "dog": 1})
        images(folder / "bonn" / "images", {"dog": 1, "emu": 2}, color=True, seed=1)
        yield machines


def told(folder, secrets):
    """Return the places of a secret outside of its own file.

    The search covers command lines of processes on this machine, logs, and run folders.
    """
    places = {path: content(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    places |= {
        path: path.read_bytes()
        for path in [*folder.glob("*.log"), *folder.glob("server/run/**/*")]
        if path.is_file()
    }
    assert any(b"--secret" in text for text in places.values())
    apps = [text for text in places.values() if b"flwr-serverapp" in text]
    assert apps
    assert not any(b"--token\0" in text for text in apps)
    return [
        (str(path), name)
        for path, text in places.items()
        for name, secret in secrets.items()
        if secret in text
    ]


def done(machines, machine, line):
    code, said = machines.run(machine, line)
    assert code == 0, said


def copy(machines, name, start, end):
    """Copy a file by hand, as the page describes."""
    shutil.copy(machines.folder / start / name, machines.folder / end / name)


def test_the_ten_commands_of_the_page(machines, page, monkeypatch):
    assert len(page.first) + 2 * len(page.hospital) + len(page.last) == 10
    folder, silos = machines.folder, {}
    *made, start = page.first
    for line in made:
        done(machines, "server", line)
    superlink = machines.start("server", start)
    until(
        "the SuperLink",
        lambda: "Uvicorn running" in superlink.log.read_text() or superlink.poll() is not None,
    )
    for name in SILOS:
        key, serve = page.at(name)
        copy(machines, "server.pem", "server", name)
        done(machines, name, key)
        copy(machines, f"{name}.key.pub", name, "server")
        silos[name] = machines.start(name, f"{serve} --device cpu")
    node_key(folder / "ulm", "stranger")
    stranger = machines.start("ulm", page.at("ulm")[1].replace("ulm", "stranger") + " --device cpu --wait 5")
    (folder / "server" / ".flwr").mkdir(exist_ok=True)
    (folder / "server" / ".flwr" / "config.toml").write_text(
        page.file.replace("server.pem", str(folder / "server" / "server.pem"))
    )
    *register, train = page.last
    for line in register:
        done(machines, "server", line)
    run = machines.start("server", train)
    until("a message", lambda: "arm 'fedavg'" in silos["ulm"].log.read_text() or run.poll() is not None, 300)
    files = {
        name: (folder / place / name).read_bytes()
        for place, name in (("ulm", "ulm.key"), ("bonn", "bonn.key"))
    }
    files |= {name: (folder / "server" / name).read_bytes() for name in ("secret", "server.key")}
    secrets = {name: text[:32] if name == "secret" else text.splitlines()[2] for name, text in files.items()}
    assert told(folder, secrets) == []
    silos["ulm"].kill()  # the silo is training; the server must send the message again
    machines.start("ulm", f"{page.at('ulm')[1]} --device cpu")
    assert run.wait(300) == 0, run.log.read_text()
    assert stranger.wait(60) == 2
    assert "SuperLink" in stranger.log.read_text()
    for name in SILOS:
        shutil.copytree(folder / name / "images", folder / "data" / name)
    monkeypatch.chdir(folder)  # the paths of the silos' images are relative to it
    uefl.train("server/mine.toml", out="local", device="cpu")
    assert (folder / "server/run/metrics.jsonl").read_bytes() == (folder / "local/metrics.jsonl").read_bytes()
    logs = b"".join(
        path.read_bytes() for path in [*folder.glob("*.log"), *(folder / "server/run").rglob("*.*")]
    )
    assert not [name for name, secret in secrets.items() if secret in logs]
    assert not (folder / "server/run/samples.safetensors").exists()
    assert ".png" not in (folder / "server/run/manifest.json").read_text()
    known = read_silos(folder / "server/run")
    assert [(name, set(of)) for name, of in known.items()] == [
        (name, {"key", "precision", "torch"}) for name in sorted(SILOS)
    ]
    assert len({of["key"] for of in known.values()}) == 2


def test_missing_secret_or_other_certificate_is_one_line(machines, page):
    """This test uses the SuperLink of the test above."""
    certificate(machines.folder / "server", HOST, "other")
    copy(machines, "other.pem", "server", "ulm")
    train = page.last[-1].replace("--out run", "--out no")
    asked = {
        f"SuperLink .*{HOST}:8000 .*run": machines.start(
            "server", train.replace("--secret secret", "--secret mine.toml")
        ),
        "trusted": machines.start("server", train.replace("server.pem", "other.pem")),
        "trusted: ": machines.start("ulm", page.at("ulm")[1].replace("server.pem", "other.pem")),
    }
    for line, process in asked.items():
        assert process.wait(120) == 2, process.log.read_text()
        assert re.search(line, process.log.read_text())
