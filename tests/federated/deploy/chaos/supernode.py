"""The SuperNode of a faulty silo: it dies with its silo in the middle of a reply, if a file says so.

``python -m tests.federated.deploy.chaos.supernode MODULE ARGUMENTS...`` runs a module with these changes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal

from .faulty import DYING, dying, kill_this_process

_push, _silo = start_client_internal.push_object_contents_from_iterable, os.getppid()


def _die() -> None:
    os.kill(_silo, signal.SIGKILL)
    kill_this_process()


def _push_or_die(*arguments: Any, **keys: Any) -> None:
    file = Path(os.environ[DYING])
    if file.exists():
        file.unlink()
        dying(_push, _die)(*arguments, **keys)
    else:
        _push(*arguments, **keys)


if __name__ == "__main__":
    start_client_internal.push_object_contents_from_iterable = _push_or_die
    # seconds: Flower then notices its death in half a minute instead of a whole one
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = heartbeat.HEARTBEAT_DEFAULT_INTERVAL = 12
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
