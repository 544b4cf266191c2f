"""Run a module in a process with a wrong clock.

Usage: ``python -m tests.federated.deploy.chaos.clock HOURSh MODULE ARGUMENTS...``.

Python's clocks of the day are shifted before anything else is imported, also in the processes of Flower that
the module starts.
"""

import datetime
import runpy
import sys
import time
from typing import Any

_WHOLE = datetime.datetime
_now, _now_ns = time.time, time.time_ns


def shift(seconds: int) -> None:
    """Shift the wall clock of this process by a number of seconds."""

    class Shifted(_WHOLE):
        """A datetime with a shifted now."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            """Return the shifted time."""
            return _WHOLE.now(tz) + datetime.timedelta(seconds=seconds)

    datetime.datetime = Shifted  # type: ignore[misc]
    time.time = lambda: _now() + seconds
    time.time_ns = lambda: _now_ns() + seconds * 10**9


if __name__ == "__main__":
    hours, module = sys.argv[1:3]
    del sys.argv[:2]
    shift(3600 * int(hours.removesuffix("h")))
    from uefl.engines.processes import Processes

    start = Processes.start
    Processes.start = lambda self, name, *command: start(self, name, __spec__.name, hours, *command)  # type: ignore[method-assign]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
