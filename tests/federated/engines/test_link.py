"""The server's end of Flower: failures of a SuperLink that a run outlives, and messages about the others."""

import os
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.proto.runtime_pb2 import PullTaskInputResponse
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.retry import make_simple_http_retry_invoker

from uefl.engines.flower import link
from uefl.engines.flower.address import Address, Unreachable

ADDRESS = Address("127.0.0.1:1", insecure=True)


def status(code, **headers):
    return httpx.HTTPStatusError(
        "",
        request=httpx.Request("POST", "http://x"),
        response=httpx.Response(code, text="{}", headers=headers),
    )


class Client:
    """Of a SuperLink that gives a run, and answers a heartbeat with ``beat``: an exception, or whether it is
    taken."""

    def __init__(self, beat=True):
        self._beat = beat

    def PullTaskInput(self, request):
        return PullTaskInputResponse()

    def PushTaskOutput(self, request):
        raise status(503)

    def SendTaskHeartbeat(self, request):
        if isinstance(self._beat, Exception):
            raise self._beat
        return SimpleNamespace(success=self._beat)


@pytest.fixture
def superlink(monkeypatch):
    def grid(*arguments, **keys):
        return SimpleNamespace(
            _retry_invoker=make_simple_http_retry_invoker(),
            _runtime_client=Client(),
            set_run=lambda run: None,
            close=lambda: None,
        )

    monkeypatch.setattr(link, "_start", lambda address: None)
    monkeypatch.setattr(link, "_token", lambda address, secret: "token")
    monkeypatch.setattr(link, "CheckedGrid", grid)


@pytest.mark.parametrize(
    "beat", [status(401), status(500), status(502), httpx.ConnectError("away"), ValueError("a page"), False]
)
def test_a_heartbeat_that_is_not_taken_is_tried_again(beat):
    """In its thread, which goes on, and without a signal to this process."""
    assert not link._heartbeat(Client(beat))()
    heart = link.HeartbeatSender(link._heartbeat(Client(beat)))
    heart.start()
    time.sleep(0.05)
    assert heart.is_running
    heart.stop()


def test_one_that_is_taken():
    assert link._heartbeat(Client())()


LOST = r"SuperLink .*127.0.0.1:1: {}; .*\brun\b"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (status(401), LOST.format(401)),
        (status(403), LOST.format(403)),
        (status(500), "SuperLink .*127.0.0.1:1: 500$"),
        (httpx.ConnectError("away"), "SuperLink .*127.0.0.1:1: away$"),
        (ObjectPushError("part", 1, "session"), "SuperLink .*127.0.0.1:1 .*part .*message"),
    ],
)
def test_what_ends_a_run_is_a_line(superlink, error, line):
    with pytest.raises(Unreachable, match=line), link.connect(ADDRESS):
        raise error


def test_a_run_rejected_at_start_is_told_of_the_secret(superlink, monkeypatch):
    def refused(address, secret):
        raise status(401)

    monkeypatch.setattr(link, "_token", refused)
    with pytest.raises(Unreachable, match=r"\b401; .*--secret"), link.connect(ADDRESS):
        pass


@pytest.mark.parametrize(("skew", "line"), [(-60, "60 .*behind"), (60, "60 .*ahead"), (0, "500$")])
def test_a_clock_that_is_off_is_named(superlink, skew, line, monkeypatch):
    """Messages of a server with a slow clock have expired when they arrive at the SuperLink; it says 500,
    and its time."""
    error, now = status(500, date=formatdate(usegmt=True)), time.time()
    monkeypatch.setattr(link.time, "time", lambda: int(now) + skew)
    with pytest.raises(Unreachable, match=line), link.connect(ADDRESS):
        raise error


class Teapot(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments): ...


def test_what_does_not_leave_the_machine_goes_to_no_proxy(monkeypatch):
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
