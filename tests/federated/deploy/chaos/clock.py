"""``uefl`` in a process with a wrong clock: ``python -m tests.federated.deploy.chaos.clock HOURSh ARGUMENTS
OF uefl...``.

Python's clocks of the day are shifted before anything else is imported, so Flower sees the shifted time too.
"""

import datetime
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
            """The shifted time."""
            return _WHOLE.now(tz) + datetime.timedelta(seconds=seconds)

    datetime.datetime = Shifted  # type: ignore[misc]
    time.time = lambda: _now() + seconds
    time.time_ns = lambda: _now_ns() + seconds * 10**9


if __name__ == "__main__":
    shift(3600 * int(sys.argv.pop(1).removesuffix("h")))
    from uefl.cli import main

    main()
