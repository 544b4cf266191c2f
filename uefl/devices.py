"""Tell GPUs from other devices."""

from __future__ import annotations

import torch

_GPUS = ("cuda",)
"""types of devices that are GPUs; a test adds the CPU, so that it runs the same lines"""


def is_gpu(device: torch.device) -> bool:
    """Return True for a GPU."""
    return device.type in _GPUS


def gpus_of(device: torch.device) -> list[torch.device]:
    """Return the device if it is a GPU, with a generator of its own, or nothing."""
    return [device] if is_gpu(device) else []
