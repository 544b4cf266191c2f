"""Checks of the command line before a run over Flower, and their messages."""

import errno
import os
import re

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")

from tests.federated.deploy.chaos.certificates import node_key
from tests.federated.deploy.machines import images
from uefl.cli import app
from uefl.deploy import choices, command
from uefl.engines.flower.address import Address
from uefl.engines.flower.commands import free_port
from uefl.errors import UserError

AWAY = ("--superlink", "10.77.9.9:8000")
JOIN = ("train", "demo", "--engine", "flower", *AWAY)


def said(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.stderr.count("\n") == 1, result.stderr
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "demo", *AWAY), "--engine flower"),
        (("train", "demo", "--engine", "flower", "--silos", "2"), "--superlink"),
        (JOIN, "--silos"),
        ((*JOIN, "--silos", "2"), "--secret"),
        ((*JOIN, "--silos", "2", "--secret", "nowhere"), "--secret: nowhere"),
        ((*JOIN, "--silos", "2", "--insecure", "--root-certificates", "x"), "--insecure"),
        (
            ("train", "demo", "--engine", "flower", "--superlink", "there", "--silos", "2"),
            "HOST:PORT, got 'there'",
        ),
        (
            ("train", "demo", "--engine", "flower", "--superlink", "https://there:1", "--silos", "2"),
            "HOST:PORT, got 'https://there:1'",
        ),
        ((*JOIN, "--silos", "2", "--root-certificates", "key.pem"), "key.pem"),
        (("silo", *AWAY, "--insecure", "--data", "empty"), "expected FOLDER/CLASS/image.png"),
        (
            ("silo", *AWAY, "--insecure", "--data", "empty", "--algorithms", "fedavg,fedavgg"),
            "--algorithms: no algorithm 'fedavgg'",
        ),
        (("silo", *AWAY), "--key"),
        (("silo", *AWAY, "--insecure"), "--data"),
        (("silo", *AWAY, "--insecure", "--key", "x"), "TLS"),
        (("silo", *AWAY, "--insecure", "--data", "nowhere"), "nowhere"),
    ],
)
def test_missing_parts_are_one_line(arguments, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "key.pem").write_text("-----BEGIN PRIVATE KEY-----\n")
    code, error = said(*arguments)
    assert code == 2
    assert line in error


def test_no_process_listens(tmp_path):
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    place = f"127.0.0.1:{free_port()}"
    code, error = said("silo", "--superlink", place, "--data", tmp_path / "a", "--wait", 0)
    assert code == 2
    assert re.fullmatch(rf"error: .*\b{place}: {os.strerror(errno.ECONNREFUSED)}\n", error)


def test_without_flower_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda name: None)
    code, error = said(*JOIN)
    assert code == 2
    assert "pip install '.[flower]'" in error


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("[::1]", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host, loopback):
    assert Address(f"{host}:8000").is_loopback == loopback


def test_key_is_elliptic_curve_without_a_passphrase(tmp_path):
    node_key(tmp_path, "ulm")
    command._check_key(tmp_path / "ulm.key", strict=True)
    (tmp_path / "none").write_text("no key")
    for path in ("none", "ulm.key.pub"):
        with pytest.raises(UserError, match=rf"--key: .*{path}"):
            command._check_key(tmp_path / path, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_keys_and_secrets_that_others_may_read(strict, tmp_path, caplog):
    """The command prints a line about such files, and refuses them with ``--strict``."""
    images(tmp_path / "a", {"cat": 0, "dog": 1})
    node_key(tmp_path, "ulm")
    (tmp_path / "secret").write_bytes(64 * b"x")
    (tmp_path / "root.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "a.silo").mkdir()
    place = ("--superlink", f"127.0.0.1:{free_port()}", "--wait", 0, *["--strict"] * strict)
    root = ("--root-certificates", tmp_path / "root.pem")
    starts = {
        "ulm.key": ("silo", "--data", tmp_path / "a", "--key", tmp_path / "ulm.key", *root),
        "a.silo": ("silo", "--data", tmp_path / "a", "--insecure"),
        "secret": (
            "train",
            "demo",
            "--out",
            tmp_path / "run",
            "--engine",
            "flower",
            "--silos",
            2,
            "--secret",
            tmp_path / "secret",
            *root,
        ),
    }
    options = {"ulm.key": "--key", "a.silo": "--state", "secret": "--secret"}
    for name, arguments in starts.items():
        for mode in (0o700, 0o740):
            (tmp_path / name).chmod(mode)
            caplog.clear()
            result = CliRunner().invoke(app, list(map(str, (*arguments, *place))))
            assert result.exit_code == 2
            text = result.stderr + result.stdout + caplog.text
            assert (re.search(rf"users .*{tmp_path / name}\b", text) is not None) == (mode == 0o740)
            assert (re.search(rf"error: {options[name]}: .*users", result.stderr) is not None) == (
                mode == 0o740 and strict
            )
