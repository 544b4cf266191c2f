"""A worker, which has a share of the clients: ``python -m uefl.deploy.worker FOLDER RANK SIZE DEVICE PARENT
[DATA_ROOT]``."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch

from ..engines.distributed.engine import serve
from ..engines.distributed.group import Group
from .silo import SiloProgram
from .sources import Dealt, Source


def work(folder: Path, rank: int, size: int, device: str, parent: int, source: Source) -> None:
    """Do what the server asks until it ends, with it or by it.

    Args:
        folder: of the group's addresses.
        rank: of this process, from 1 on.
        size: of the group, the server included.
        device: ``cpu`` or ``cuda``: then this worker takes the GPU with its number, where there are enough.
        parent: the process that started this one.
        source: the data of all clients.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    program = SiloProgram(source, _own_device(device, rank))
    serve(Group(folder, rank, size), program)


def _own_device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", (rank - 1) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _end_with(parent: int) -> None:
    """In the middle of a client's work too."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    folder, rank, size, device, parent, *root = sys.argv[1:]
    work(
        Path(folder), int(rank), int(size), device, int(parent), Dealt(None, Path(root[0]) if root else None)
    )
