"""Run ``flower-superlink`` until the process that started it ends: ``python -m uefl.deploy.superlink PARENT
OPTIONS...``."""

import sys
from importlib.metadata import entry_points

from ..engines import flower  # noqa: F401 its import keeps Flower quiet
from .processes import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    command.load()()
