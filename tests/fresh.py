"""Fast processes that have imported torch, but not our packages.

These processes are forked from one process, because a new Python process takes seconds to import torch. Tests
of the import of ``uefl_kernels`` use them. Tests of the start of Python, and tests without torch, need a new
Python process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

FORKED = """
import os, signal, threading
import torch
{}
begun, ended = threading.Event(), threading.Event()

def hold():
    with held():
        begun.set()
        ended.wait()

threading.Thread(target=hold).start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    use()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended.set()
"""
"""a program that prints the exit code of a child, forked while a thread is in ``held()``, after ``use()``"""

_processes = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start the process to fork from, once, before a test imports the package."""
    _processes.set_forkserver_preload(["pytest", "torch"])
    multiprocessing.forkserver.ensure_running()


def python(code: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
    """Run ``code`` as ``python -c`` does, with variables in addition to the environment of this process."""
    start()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _processes.Process(target=_run, args=(code, arguments, os.environ | environment, files))
        process.start()
        process.join()
        return CompletedProcess(
            [code, *arguments], process.exitcode or 0, *(file.read_text() for file in files)
        )


def _run(code: str, arguments: tuple[str, ...], environment: dict[str, str], files: list[Path]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    assert "uefl_kernels" not in sys.modules, (
        "the process before the fork has imported uefl_kernels: does other code call set_forkserver_preload?"
    )
    exec(code, {"__name__": "__main__"})
