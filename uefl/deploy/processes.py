"""Processes on this machine that end with the run, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..engines import faults

_GRACE = 5.0  # seconds between asking a process to end and ending it


class Processes:
    """Starts Python modules, each with a log file; a context manager that ends all of them.

    They watch this process too, and end by themselves when it is killed.

    Args:
        prefix: of the name of the folder for their logs.
    """

    def __init__(self, prefix: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=prefix))
        """of the logs, and of files of the processes; only this user may read it"""
        self.environment = {"PYTHONUNBUFFERED": "1"}
        """additions to the environment of this process"""
        self.all: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, module: str, *arguments: str, inherited: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Run ``python -m MODULE ARGUMENTS...`` under a name, with these file descriptors open."""
        with self._log(name).open("ab") as log:
            command = [sys.executable, "-m", module, *arguments]
            # of a group of its own: Ctrl-C is for the run, which then ends its processes in order
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                start_new_session=True,
                pass_fds=inherited,
            )
        self.all[name] = process
        return process

    def ended(self, name: str) -> str | None:
        """Return the last log line of a process that has ended, or the signal that ended it; None while it
        runs."""
        process = self.all[name]
        if process.poll() is None:
            return None
        if process.returncode < 0:
            return f"killed by {signal.Signals(-process.returncode).name}"
        lines = [line for line in self._log(name).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {process.returncode}"

    def stop(self) -> Path | None:
        """End every process: silos first, then the SuperLink. The folder of the logs, where one tells of
        an error; else none."""
        for process in reversed(self.all.values()):
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + _GRACE
        while any(process.poll() is None for process in self.all.values()) and time.monotonic() < end:
            time.sleep(0.02)
        for process in self.all.values():
            process.kill()  # does nothing to one that has ended
            process.wait()
        if any(
            word in self._log(name).read_bytes()
            for name in self.all
            for word in (b"Traceback", faults.LINE.encode())
        ):
            return self.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        return None

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def note_oversubscription(processes: int, device: str, notice: Callable[[str], None]) -> None:
    """Note that the processes have more threads than there are cores."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if device == "cpu" and threads > 1 and processes * threads > cores:
        crowd = f"{processes} processes with {threads} threads each on {cores} cores slow each other down"
        notice(f"note: {crowd}; set threads = {max(1, cores // processes)}")
