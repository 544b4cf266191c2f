"""Choose the number of CPU threads of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ENOUGH = 1e10
"""minimum number of floating-point operations of a training step for which several threads save time"""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def threads_for(net: nn.Module, example: torch.Tensor, batch_size: int) -> int:
    """Return the number of threads that train a network fastest, even if other programs use the same cores.

    A small network trains with one thread: an operation of microseconds ends before a second thread begins.
        Threads that wait for each other keep cores busy that other programs need. The number does not depend
    on the load of the machine, so a command repeats its bits.

    Args:
        example: one input, ``[1, ...]``.
        batch_size: inputs of a training step, which costs three forward passes.

    Returns:
        1, or the threads of torch, and no more than the cores that the control group grants.
    """
    mode = net.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        net.eval()(example)
    net.train(mode)
    if 3 * batch_size * counter.get_total_flops() < ENOUGH:
        return 1
    return max(1, int(min(torch.get_num_threads(), _quota_cores())))


def _quota_cores() -> float:
    """Return the number of cores in the control group's quota, or infinity without a quota."""
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)
