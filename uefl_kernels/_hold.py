"""A copy of a tensor that a compiler must not replace by the tensor itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

_library = torch.library.Library("uefl", "FRAGMENT")
_library.define("hold(Tensor tensor) -> Tensor")
_library.impl("hold", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("uefl::hold", torch.empty_like, lib=_library)


@contextlib.contextmanager
def _saved_for_backward() -> Iterator[None]:
    """What is traced inside is marked as selective checkpointing marks what it saves: no partitioner
    recomputes it."""
    # which saves nothing but the inputs of the graph, whatever is marked
    if functorch.activation_memory_budget == 0:
        raise RuntimeError(
            "uefl_kernels: torch._functorch.config.activation_memory_budget is 0, under which torch.compile"
            " would read the codewords after their update, and gradients would be wrong; set it above 0"
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


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd(), _saved_for_backward():
            held: torch.Tensor = torch.ops.uefl.hold(tensor)
        return held

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


_library.impl("hold", _Hold.apply, "Autograd")


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that keeps its values for the backward pass while the tensor is updated in place behind it.

    Under ``torch.compile``, ``clone()`` does not: inductor (torch 2.11) recomputes the clone in the backward
    pass, from a buffer that the forward pass has updated by then, and the gradients are silently wrong. An op
    of our own that is marked as saved is not recomputed, not in a checkpointed region or under a memory
    budget either.
    """
    if torch.compiler.is_compiling():
        held: torch.Tensor = torch.ops.uefl.hold(tensor)
        return held
    return tensor.clone()
