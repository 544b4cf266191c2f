"""The messenger of a run that is killed, with its run, in the middle of its eighth message.

Before this message, three silos are greeted and then asked in the first round.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

from flwr.superlink.grid import http_grid

from uefl.deploy import app

from .faulty import SERVER_PROCESS, dying, kill_this_process

_push, _messages = http_grid.push_objects, count(1)


def _die() -> None:
    os.kill(int(os.environ[SERVER_PROCESS]), signal.SIGKILL)
    kill_this_process()


def _push_or_die(*arguments: Any, **keys: Any) -> None:
    (dying(_push, _die) if next(_messages) == 8 else _push)(*arguments, **keys)


http_grid.push_objects = _push_or_die
server = app.server
