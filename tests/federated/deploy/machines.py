"""Network namespaces that stand for machines, and folders of images.

Each machine has a folder and commands of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
from PIL import Image

from .runs import ENVIRONMENT

HOST = "10.77.0.1"
COMMANDS = ("flower-superlink", "flwr")
UEFL = "from uefl.cli import main as run; run()"


class Machines:
    """A server and silos, each in a namespace and in a folder of its own.

    Args:
        folder: holds their folders, the output of their programs, the command ``uefl`` and the commands
            of Flower.
        names: names of the silos.
        variables: environment variables of every program.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], variables: dict[str, str]) -> None:
        self.folder, self.names = folder, names
        self.environment = (
            os.environ | ENVIRONMENT | variables | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        )
        (folder / "bin").mkdir()
        programs = {"uefl": UEFL}
        for name in COMMANDS:
            (point,) = entry_points(group="console_scripts", name=name)
            programs[name] = f"from {point.module} import {point.attr} as run; run()"
        for name, program in programs.items():
            command = folder / "bin" / name
            command.write_text(f"#!{sys.executable}\n{program}\n")
            command.chmod(0o755)
        for name in ("server", *names):
            (folder / name).mkdir(exist_ok=True)
        self.spaces = {name: f"uefl-{os.getpid()}-{name}" for name in ("server", *names)}
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Machines:
        for space in self.spaces.values():
            self._ip("netns", "add", space)
            self._ip("-n", space, "link", "set", "lo", "up")
        server = self.spaces["server"]
        self._ip("-n", server, "addr", "add", f"{HOST}/32", "dev", "lo")
        for i, name in enumerate(self.names, 1):
            space = self.spaces[name]
            self._ip(
                "-n",
                server,
                "link",
                "add",
                f"to-{name}",
                "type",
                "veth",
                "peer",
                "name",
                "out",
                "netns",
                space,
            )
            for where, link, number in ((server, f"to-{name}", 1), (space, "out", 2)):
                self._ip("-n", where, "addr", "add", f"10.77.{i}.{number}/30", "dev", link)
                self._ip("-n", where, "link", "set", link, "up")
            self._ip("-n", space, "route", "add", f"{HOST}/32", "via", f"10.77.{i}.1")
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + 20
        while any(process.poll() is None for process in self.processes) and time.monotonic() < until:
            time.sleep(0.05)
        for process in self.processes:
            process.kill()
            process.wait()
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)

    def start(self, machine: str, line: str) -> subprocess.Popen[str]:
        """Run a command on a machine, as it would be typed there."""
        command = [
            "ip",
            "netns",
            "exec",
            self.spaces[machine],
            "bash",
            "-c",
            line if line.startswith("(") else f"exec {line}",
        ]
        log, place = (self.folder / f"{machine}-{len(self.processes)}.log").open("w"), self.folder / machine
        environment = self.environment | {"FLWR_HOME": str(place / ".flwr")}
        process = subprocess.Popen(
            command, cwd=place, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment
        )
        process.log = Path(log.name)  # type: ignore[attr-defined]
        self.processes.append(process)
        return process

    def run(self, machine: str, line: str, seconds: float = 120) -> tuple[int, str]:
        """Run a command on a machine, and return its exit code and output."""
        process = self.start(machine, line)
        code = process.wait(seconds)
        return code, process.log.read_text()  # type: ignore[attr-defined]

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


def may_make_namespaces() -> bool:
    """Return True if this user can."""
    space = f"uefl-{os.getpid()}-try"
    try:
        made = subprocess.run(["ip", "netns", "add", space], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
    return made


def images(
    folder: Path, classes: dict[str, int], *, size: int = 8, color: bool = False, seed: int = 0
) -> None:
    """Write ``folder/{train,test}/CLASS/*.png``.

    The position of a bright bar tells the class. There are 12 training and 4 test images.
    """
    rng = np.random.default_rng(seed)
    for part, count in (("train", 12), ("test", 4)):
        for name, place in classes.items():
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (size, size, 3) if color else (size, size), dtype=np.uint8)
                pixels[:, 2 * place : 2 * place + 2] = 220
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
