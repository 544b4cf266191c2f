"""The SuperNode of a faulty silo.

If a file says so, it dies with its silo in the middle of a reply, sends the parts of its reply slowly, or
sends the reply twice.

``python -m tests.federated.deploy.chaos.supernode MODULE ARGUMENTS...`` runs a module with these changes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal

from .faulty import SENDING, dying, kill_this_process

_push, _silo = start_client_internal.push_object_contents_from_iterable, os.getppid()
_push_messages = start_client_internal._push_messages


def _die() -> None:
    os.kill(_silo, signal.SIGKILL)
    kill_this_process()


def _how() -> str:
    """Return how to send the next reply, and forget it."""
    file = Path(os.environ[SENDING])
    how = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    return how


def _push_faulty(send: Callable[..., Any], **keys: Any) -> None:
    """Send replies, as the file says at the moment when one is sent."""
    again = []

    def announce(*arguments: Any) -> Any:
        how = _how()
        start_client_internal.push_object_contents_from_iterable = _WAYS.get(how, _push)
        again.extend([arguments] if how == "twice" else [])
        return send(*arguments)

    _push_messages(send=announce, **keys)
    for arguments in again:
        with suppress(Exception):  # the SuperLink may refuse it
            send(*arguments)


def _push_slowly(objects: Any, push_object_fn: Callable[..., Any], **keys: Any) -> None:
    def push(*arguments: Any) -> None:
        time.sleep(60)
        push_object_fn(*arguments)

    _push(objects, push, **keys)


_WAYS = {"dies": dying(_push, _die), "parts": _push_slowly}


if __name__ == "__main__":
    start_client_internal._push_messages = _push_faulty
    # in seconds; Flower then notices the end of the node in half a minute instead of one
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_DEFAULT_INTERVAL = 12
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
