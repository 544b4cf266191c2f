"""Copy a tensor so that a compiler does not replace the copy by the tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from ._library import exporting_to_onnx

_library = torch.library.Library("uefl", "FRAGMENT")
_library.define("snapshot(Tensor tensor) -> Tensor")
_library.impl("snapshot", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("uefl::snapshot", torch.empty_like, lib=_library)


@contextlib.contextmanager
def _saved_for_backward() -> Iterator[None]:
    """Mark ops that are traced inside as saved, as selective checkpointing does.

    So no partitioner recomputes them.
    """
    # with a budget of 0, the partitioner ignores the marks and saves only the inputs of the graph
    if functorch.activation_memory_budget == 0:
        raise RuntimeError(
            "uefl_kernels: torch._functorch.config.activation_memory_budget is 0. With this value,"
            " torch.compile would read the codewords after their update, and gradients would be wrong; set it"
            " above 0"
        )
    meta = traceback.current_meta
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        meta.pop("recompute")
        if before is not None:
            meta["recompute"] = before


class _Snapshot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd(), _saved_for_backward():
            held: torch.Tensor = torch.ops.uefl.snapshot(tensor)
        return held

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_library.impl("snapshot", _Snapshot.apply, "Autograd")


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that keeps its values for the backward pass while the tensor is updated in place.

    Under ``torch.compile`` a ``clone()`` is not enough: inductor (torch 2.11) recomputes it in the backward
    pass, from a buffer that the forward pass has already updated, and the gradients are silently wrong.
    Inductor does not recompute an op that is marked as saved, even in a checkpointed region or under a memory
    budget.
    """
    if torch.compiler.is_compiling() and not exporting_to_onnx():
        held: torch.Tensor = torch.ops.uefl.snapshot(tensor)
        return held
    return tensor.clone()


def snapshots(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``snapshot`` of each tensor, by one operation where their shapes are equal."""
    if torch.compiler.is_compiling() or any(tensor.shape != tensors[0].shape for tensor in tensors):
        return [snapshot(tensor) for tensor in tensors]
    return list(torch.stack([*tensors]).unbind())
