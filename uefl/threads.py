"""Choose the number of CPU threads of a run."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ENOUGH = 1e10
"""minimum number of floating-point operations of a training step for which several threads save time"""
_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def threads_for(net: nn.Module, example: torch.Tensor, batch_size: int) -> int:
    """Return the number of threads that train a network fastest, even if other programs use the same cores.

    It is 1 for a small network, because an operation of microseconds ends before a second thread begins.
    Otherwise it is the threads of torch, and no more than the cores that the control group grants. It does
    not depend on the load of the machine, so a command repeats its bits.

    Args:
        example: one input, ``[1, ...]``.
        batch_size: inputs of a training step, which costs three forward passes.
    """
    mode = net.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        net.eval()(example)
    net.train(mode)
    if 3 * batch_size * counter.get_total_flops() < ENOUGH:
        return 1
    return max(1, int(min(torch.get_num_threads(), _quota_cores())))


def _quota_cores() -> float:
    """Return the least number of cores that a control group around this process grants, or infinity."""
    try:
        lines = _OWN.read_text(errors="surrogateescape").splitlines()
    except OSError:
        lines = ["0::/"]
    found = [float("inf")]
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "cpu" in controllers.split(","):
            mounted = _GROUPS / "cpu" if controllers else _GROUPS
            group = PurePosixPath(path.lstrip("/"))
            found += [_cores_of(mounted / each) for each in (group, *group.parents)]
    return min(found)


def _cores_of(group: Path) -> float:
    """Return the number of cores in the quota of a control group, or infinity without a quota."""
    one = group / "cpu.max"  # version 2 of control groups has one file, version 1 has two
    files = [one] if one.exists() else [group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"]
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        cores = int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")
    return cores if cores > 0 else float("inf")
