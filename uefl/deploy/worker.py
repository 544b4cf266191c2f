"""A worker, which has a share of the clients.

``python -m uefl.deploy.worker SOCKET RANK DEVICE [DATA_ROOT]``
"""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import torch

from ..engines.distributed import serve
from ..engines.processes import end_with_parent
from .silo import SiloProgram
from .sources import ClientSource, PartitionedSource


def work(end: int, rank: int, device: str, source: ClientSource) -> None:
    """Reply to the server until one of the two ends.

    Args:
        end: file descriptor of this worker's socket.
        rank: of this process, from 1 on.
        device: ``cpu`` or ``cuda``: then this worker takes the GPU with its number, where there are enough.
        source: the data of all clients.
    """
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    end_with_parent(interrupted=False)  # even in the middle of a client's work
    program = SiloProgram(source, _own_device(device, rank))
    serve(socket.socket(fileno=end), program)


def _own_device(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", (rank - 1) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    end, rank, device, *root = sys.argv[1:]
    source = PartitionedSource(None, Path(root[0]) if root else None)
    work(int(end), int(rank), device, source)
