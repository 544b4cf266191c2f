"""A worker, which has a share of the clients: ``python -m uefl.deploy.worker SOCKET RANK DEVICE PARENT
[DATA_ROOT]``."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from ..engines.distributed.engine import serve
from .silo import SiloProgram
from .sources import ClientSource, PartitionedSource


def work(end: int, rank: int, device: str, parent: int, source: ClientSource) -> None:
    """Answer the server until one of the two ends.

    Args:
        end: file descriptor of this worker's socket.
        rank: of this process, from 1 on.
        device: ``cpu`` or ``cuda``: then this worker takes the GPU with its number, where there are enough.
        parent: the process that started this one.
        source: the data of all clients.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    program = SiloProgram(source, _own_device(device, rank))
    serve(socket.socket(fileno=end), program)


def _own_device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", (rank - 1) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _end_with(parent: int) -> None:
    """End this process when its parent ends, even in the middle of a client's work."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    end, rank, device, parent, *root = sys.argv[1:]
    source = PartitionedSource(None, Path(root[0]) if root else None)
    work(int(end), int(rank), device, int(parent), source)
