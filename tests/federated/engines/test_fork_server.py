"""A run brings files to a silo: nothing in them is imported, and none is written elsewhere."""

import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from uefl.engines.flower import fork_server

# A fork of the server up to the search for the program of a run. Flower's functions for this are private.
FORK = """
import os, sys
from importlib.machinery import PathFinder
from pathlib import Path
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.cli.install import install_from_fab
from uefl.deploy import app
from uefl.engines.flower import fork_server
sys.meta_path[sys.meta_path.index(PathFinder)] = fork_server.InstalledFinder()
fork_server.write_only_in(Path(os.environ["FLWR_HOME"]))
fab = sys.stdin.buffer.read()
import hashlib
digest = hashlib.sha256(fab).hexdigest()
install_from_fab(fab, skip_prompt=True)
print(get_load_client_app_fn("", None, True)("one/two", "1.0.0", digest) is app.client)
"""
PROJECT = """
[project]
name = "two"
version = "{version}"
description = ""
license = {{ text = "" }}
[tool.flwr.app]
publisher = "one"
[tool.flwr.app.components]
serverapp = "evil:app"
clientapp = "{client}"
"""


def fab(client, version="1.0.0"):
    """Return the file of a run with the module ``evil``."""
    from hashlib import sha256

    files = {
        "pyproject.toml": PROJECT.format(client=client, version=version),
        "evil.py": "print('evil')",
        "json.py": "print('evil')",
        "uefl/deploy/app.py": "print('evil')",
    }
    content = "\n".join(f"{name},{sha256(text.encode()).hexdigest()},8" for name, text in files.items())
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in (files | {".info/CONTENT": content}).items():
            archive.writestr(name, text)
    return data.getvalue()


def forked(tmp_path, file):
    (tmp_path / "home").mkdir()
    environment = os.environ | {"FLWR_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "home")}
    return subprocess.run(
        [sys.executable, "-c", FORK], input=file, capture_output=True, env=environment, cwd=tmp_path
    )


def test_the_program_of_a_run_is_the_installed_one(tmp_path):
    found = forked(tmp_path, fab("uefl.deploy.app:client"))
    assert found.stdout.endswith(b"True\n"), found.stderr.decode()
    assert b"evil" not in found.stdout


@pytest.mark.parametrize("client", ["evil:app", "evil.deep:app"])
def test_a_program_that_a_run_brings_is_not_imported(tmp_path, client):
    found = forked(tmp_path, fab(client))
    assert b"No module named 'evil'" in found.stderr
    assert b"evil" not in found.stdout


def test_the_name_of_a_run_leads_to_no_other_folder(tmp_path):
    found = forked(tmp_path, fab("evil:app", f"1/../../../{tmp_path.name}/other"))
    assert b"PermissionError" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


SERVER = """
import sys
from importlib.metadata import EntryPoint
from uefl.engines.flower import fork_server
fork_server.entry_points = lambda **keys: [EntryPoint("x", "{program}", "console_scripts")]
fork_server.serve(sys.argv[1])
"""


def started(tmp_path, program):
    """Return a server that has forked once for a program."""
    environment = os.environ | {"FLWR_HOME": str(tmp_path)}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(program=program), tmp_path / "forks"],
        env=environment,
        stderr=subprocess.PIPE,
    )
    script = tmp_path / "script"
    script.write_text(fork_server.script(tmp_path / "forks"))
    while not (tmp_path / "forks").exists():
        assert server.poll() is None, server.stderr.read()
    subprocess.run(["sh", script, "--an", "argument"], check=True)
    return server


def test_a_fork_ends_with_the_server(tmp_path):
    server = started(tmp_path, "signal:pause")
    try:
        children = f"/proc/{server.pid}/task/{server.pid}/children"
        while not (forks := Path(children).read_text().split()):
            assert server.poll() is None
    finally:
        server.kill()
        server.wait()
    end = time.monotonic() + 60
    while Path(f"/proc/{forks[0]}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("program", ["pathlib:Path", "os:abort", "sys:exit"])
def test_a_fork_that_fails_ends_the_server(tmp_path, program):
    """If the server stayed, the SuperNode would wait for a reply forever.

    ``pathlib.Path`` and ``sys.exit`` end normally.
    """
    server = started(tmp_path, program)
    try:
        if program == "os:abort":
            assert server.wait(60) == 1
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(2)
    finally:
        server.kill()
        server.wait()
