"""Wrap torch.distributed for the layers.

In a single process no function sends a message.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor


def rank_and_size(shared: bool = True) -> tuple[int, int]:
    """Return the rank of this process and the number of processes.

    They are (0, 1) without a process group, or if ``shared`` is False.
    """
    if shared and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_reduce(tensors: list[torch.Tensor], shared: bool = True) -> list[torch.Tensor]:
    """Sum each ``[h, K, *]`` tensor over all processes, in one message."""
    if rank_and_size(shared)[1] == 1:
        return tensors
    packed = torch.cat(tensors, -1)
    dist.all_reduce(packed)
    return list(packed.split([tensor.shape[-1] for tensor in tensors], -1))


def sample_rows(rows: torch.Tensor, count: int, shared: bool = True) -> torch.Tensor | None:
    """Draw ``[h, count, d]`` rows from the rows ``[h, n, d]`` of all processes.

    Each process gets the same rows.

    The rows are distinct if there are enough. The result is None if no process has a row. Each process
    contributes rows in proportion to its number of rows. With several processes, the host waits once for
    these numbers.
    """
    rank, world = rank_and_size(shared)
    ends = [0, rows.shape[1]]
    if world > 1:
        sizes = torch.zeros(world, dtype=torch.int64, device=rows.device)
        sizes[rank] = rows.shape[1]
        dist.all_reduce(sizes)
        ends = [0, *sizes.cumsum(0).tolist()]
    if ends[-1] == 0:
        return None
    start, stop = (count * end // ends[-1] for end in ends[rank : rank + 2])
    result = rows.new_zeros(rows.shape[0], count, rows.shape[-1])
    for codebook, samples in enumerate(rows):
        result[codebook, start:stop] = samples[_draw(len(samples), stop - start, rows.device)]
    if world > 1:
        dist.all_reduce(result)
    return result


def _draw(available: int, count: int, device: torch.device) -> torch.Tensor:
    if available >= count:
        return torch.randperm(available, device=device)[:count]
    return torch.randint(available, (count,), device=device)


def drawn_on_all(low: int, high: int, device: torch.device) -> int | None:
    """Draw a number from ``low`` to ``high`` - 1, the same in all processes.

    Return None on tensors without values: fake ones, or on the meta device.
    """
    value = torch.randint(low, high, (), device=device)
    if value.is_meta or isinstance(value, FakeTensor):
        return None
    if rank_and_size()[1] > 1:
        dist.broadcast(value, src=0)
    return int(value)


def largest(value: int, device: torch.device) -> int:
    """Return the largest value of any process.

    With several processes the host waits.
    """
    if rank_and_size()[1] == 1:
        return value
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def average_gradients(parameters: list[torch.nn.Parameter], shared: bool = True) -> None:
    """Replace the gradients by their means over all processes."""
    world = rank_and_size(shared)[1]
    if world == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
