"""Train one run of a suite in a process that is forked from a process with all imports."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from uefl_kernels import _api  # noqa: F401

from .. import run
from ..algorithms.base import registry
from ..config import from_toml
from ..errors import RunError, UserError
from ..paths import has_file
from ..progress import PlainProgress

registry()  # import, before the fork, the modules that a run needs later
with suppress(ImportError):
    import_module("torch.utils.tensorboard")


def work(text: str, folder: Path, device: str, data_root: Path | None, log: Path) -> None:
    """Start a run of a configuration in TOML, or continue it, with its output appended to a log.

    If the run cannot finish, the last line of the log is the reason. It writes no report, because pictures
    take longer than a small run, and the suite draws them.
    """
    # a terminal sends SIGINT to all processes, but the suite ends its runs itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_suite, daemon=True).start()
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    keys: dict[str, Any] = {
        "device": device,
        "data_root": data_root,
        "observer": PlainProgress(partial(print, flush=True)),
        "pages": False,
    }
    try:
        if has_file(folder / "config.toml"):
            summary = run.resume(folder, **keys)
        else:
            summary = run.train(from_toml(text), preset=str(folder), out=folder, **keys)
    except (UserError, RunError, OSError) as error:  # OSError: for example a full disk
        sys.exit(f"error: {error}")
    rejected = sum(arm["rejected"] for arm in summary["arms"].values())
    if rejected:
        sys.exit(f"error: {rejected} replies of clients were rejected")


def _end_with_suite() -> None:
    """End this process with the suite, because a run that continues would hold the lock of its folder."""
    suite = parent_process()
    assert suite is not None
    connection.wait([suite.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
