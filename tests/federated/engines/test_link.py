"""The server's end of Flower: the commands that start a run, and their errors."""

import os
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("flwr")

from uefl.engines.flower import QUIET, link
from uefl.engines.flower.address import Address, Unreachable
from uefl.engines.flower.commands import folder_of_commands, without_token
from uefl.engines.processes import Processes

ADDRESS = Address("127.0.0.1:1", insecure=True)


@contextmanager
def played(monkeypatch, **programs):
    """Replace Flower's commands by these lines of Python."""
    start = Processes.start
    monkeypatch.setattr(
        Processes,
        "start",
        lambda self, name, *_: start(self, name, "tests.federated.engines.line", programs[name]),
    )
    yield


CONNECTS = (
    "import os, socket, time; end = socket.socket(socket.AF_UNIX); end.connect(os.environ['UEFL_RUN']);"
    " end.recv(1); time.sleep(60)"
)


def test_the_program_of_a_run_connects(monkeypatch):
    with (
        played(monkeypatch, flwr="", superexec=CONNECTS),
        link.connect(ADDRESS) as messages,
        pytest.raises(Unreachable, match=r"SuperLink .*127.0.0.1:1"),
    ):
        messages.nodes()


@pytest.mark.parametrize(
    ("flwr", "superexec", "why"),
    [
        ("print('a line'); print('│ no such run │'); raise SystemExit(1)", "", "127.0.0.1:1 .*run$"),
        (f"import os; raise SystemExit([os.environ[name] for name in {sorted(QUIET)}])", "", "'1', '1', '0'"),
        ("", "print('401'); raise SystemExit(1)", "127.0.0.1:1 .*401; .*--secret"),
        ("", "import time; time.sleep(60)", "127.0.0.1:1 .*--isolation process"),
    ],
    ids=["no run", "quiet", "no task", "away"],
)
def test_a_run_that_does_not_begin_is_a_line(monkeypatch, flwr, superexec, why):
    monkeypatch.setattr(link, "_PATIENCE", 1.0)
    with (
        played(monkeypatch, flwr=flwr, superexec=superexec),
        pytest.raises(Unreachable, match=why),
        link.connect(ADDRESS),
    ):
        pass


FAILS_ONCE = """
from pathlib import Path
first = Path({mark!r})
if not first.exists():
    first.touch()
    raise SystemExit("│ Server error '500 Internal Server Error' for url │")
raise SystemExit({then!r})
"""


@pytest.mark.parametrize(
    ("then", "why"), [("no such run", r"127\.0\.0\.1:1 .*run$"), (0, "--isolation process")]
)
def test_a_run_is_requested_again_after_a_server_error(monkeypatch, tmp_path, then, why):
    monkeypatch.setattr(link, "_PATIENCE", 10.0 if then else 1.0)
    monkeypatch.setattr(link, "_AGAIN", 0.0)
    lines, flwr = [], FAILS_ONCE.format(mark=str(tmp_path / "mark"), then=then)
    with (
        played(monkeypatch, flwr=flwr, superexec="import time; time.sleep(60)"),
        pytest.raises(Unreachable, match=why),
        link.connect(ADDRESS, None, lines.append),
    ):
        pass
    (line,) = lines
    assert re.search(r"127\.0\.0\.1:1 .*\b500 Internal Server Error\b", line)


def test_every_command_of_flower_comes_first_on_the_path(tmp_path):
    path = folder_of_commands(tmp_path / "bin")
    assert path == f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    names = {script.name for script in (tmp_path / "bin").iterdir()}
    assert names >= {"flwr", "flwr-serverapp", "flwr-clientapp", "flower-superexec", "flower-supernode"}


def test_programs_of_flower_get_their_token_in_a_file(tmp_path):
    given = ["flwr-serverapp", "--token", "secret", "--insecure"]
    name, option, file, rest = without_token(given, tmp_path / "home")
    assert (name, option, rest) == ("flwr-serverapp", "--token-file", "--insecure")
    (path,) = (tmp_path / "home").iterdir()
    assert (str(path), path.read_text(), path.stat().st_mode & 0o777) == (file, "secret", 0o600)


class Teapot(BaseHTTPRequestHandler):
    pages = iter(())

    def do_GET(self):
        self.send_response(next(self.pages, 404))
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments): ...


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_without_a_superlink_is_waited_for(monkeypatch, status):
    monkeypatch.setattr(Teapot, "pages", iter([status] * 3))
    lines = []
    with HTTPServer(("127.0.0.1", 0), Teapot) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = Address(f"127.0.0.1:{server.server_port}", True)
        address.wait(60.0, notice=lines.append)
        monkeypatch.setattr(Teapot, "pages", iter([status] * 3))
        with pytest.raises(Unreachable, match=rf"HTTP {status}$"):
            address.wait(-1.0)
        server.shutdown()
    (line,) = lines
    assert re.search(rf"{address.place}: HTTP {status}; ", line)


def test_local_addresses_use_no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no server listens there
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with HTTPServer(("127.0.0.1", 0), Teapot) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with (
            pytest.raises(Unreachable, match=r"\b418\b"),
            link.connect(Address(f"127.0.0.1:{server.server_port}", True)),
        ):
            pass
    assert os.environ["no_proxy"] == "example.org,127.0.0.1"
