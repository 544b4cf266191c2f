"""A client's end of Flower: which failures of a SuperLink it outlives."""

import os
import signal
from contextlib import contextmanager

import pytest

pytest.importorskip("flwr")

import httpx

from uefl.engines.flower import node
from uefl.engines.flower.address import Address, Unreachable

ADDRESS = Address("127.0.0.1:1", insecure=True)


class Enough(Exception):
    """Ends a loop that otherwise never ends."""


def status(code):
    return httpx.HTTPStatusError("", request=httpx.Request("POST", "http://x"), response=httpx.Response(code, text="{}"))


@pytest.fixture
def superlink(monkeypatch):
    """Plays what connections do, one after the other: an exception before there is one, or what is done over it."""
    acts = []

    @contextmanager
    def connection(*arguments, **keys):
        if not acts:
            raise Enough
        act = acts.pop(0)
        if isinstance(act, Exception):
            try:
                raise act
            except Exception:
                node.fleet.flwr_exit()
        heartbeat = node._Heartbeat(act[1])
        heartbeat.start()
        yield (None, act[0], *[None] * 6)

    monkeypatch.setattr(node.fleet, "http_request_response", connection)
    monkeypatch.setattr(node, "_AGAIN", 0.0)
    monkeypatch.setattr(Address, "wait", lambda self, seconds: None)
    return acts


def serve(patience=60.0):
    node.serve(ADDRESS, lambda records: records, patience=patience)


def healthy():
    return True


def gone():
    raise Enough


def failing(error):
    def beat():
        raise error

    return beat


@pytest.mark.parametrize("error", [status(500), status(503), httpx.ConnectError("away")])
def test_a_superlink_that_is_not_well_is_tried_again(superlink, error):
    superlink += [error, error, (gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert not superlink


def test_but_not_for_ever(superlink):
    superlink += [status(500)] * 3
    with pytest.raises(Unreachable, match="does not let this silo in"):
        serve(patience=-1.0)
    assert len(superlink) == 2


def test_a_refusal_is_final_where_there_is_no_key_to_wait_for(superlink):
    superlink += [status(403), (gone, healthy)]
    with pytest.raises(Unreachable, match="does not let this silo in"):
        serve()


@pytest.mark.parametrize("error", [status(500), RuntimeError("The SuperLink does not recognize this SuperNode.")])
def test_a_heartbeat_that_is_not_taken_connects_again(superlink, error):
    superlink += [(lambda: None, failing(error)), (gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert not superlink


def test_a_refused_heartbeat_sends_nobody_a_signal(superlink):
    superlink += [(lambda: None, lambda: node.fleet.os.kill(os.getpid(), signal.SIGINT)), (gone, healthy)]
    with pytest.raises(Enough):
        serve()
    assert not superlink


@pytest.mark.parametrize("code", [401, 403])
def test_a_run_that_has_ended_is_an_error_that_can_be_caught(code):
    invoker = node.fleet.make_simple_http_retry_invoker()
    with pytest.raises(httpx.HTTPStatusError):
        invoker.invoke(failing(status(code)))
