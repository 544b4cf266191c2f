"""A CUDA graph in miniature, on the CPU.

The operations of a step are written down with their tensors, and repeated on the same tensors.

As on a GPU, a replay does not repeat the Python code between the operations, and recording computes nothing.
Recording fails if Python reads a value of a tensor, if an operation waits for the device, or if numbers are
drawn from a generator of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "bincount",
}
# They wait with deterministic kernels, which a run uses. The gradient of an index has the same ops without a
# wait.
_PUTS = {"index_put", "index_put_"}


class Tape:
    """Replace :class:`uefl.client.recording.CudaRecorder` in tests on the CPU."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        mode = _Writing()
        generator = torch.get_rng_state()
        with mode:
            operations()
        torch.set_rng_state(generator)
        with torch.no_grad():
            for tensor, before in mode.before:  # undo the step, because a recording on a GPU computes nothing
                tensor.copy_(before)

        def replay() -> None:
            self.replayed += 1
            with torch._C._AutoDispatchBelowAutograd():  # the recording has the operations of autograd
                for operation in mode.operations:
                    operation()

        return replay


class _Writing(TorchDispatchMode):
    """Carries the operations out, as later ones need tensors of the right shape, until a restore."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        masked = name == "index" and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if name in _WAITS | _PUTS or masked or kwargs.get("generator") is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        self._keep((args, kwargs))
        out = func(*args, **kwargs)
        self._kept.append((args, kwargs, out))
        new = _new(func, out)
        self._seen |= {tensor.untyped_storage().data_ptr() for tensor in new}

        def again() -> None:
            for place, tensor in zip(new, _new(func, func(*args, **kwargs)), strict=True):
                place.copy_(tensor)

        self.operations.append(again)
        return out

    def _keep(self, given: Any) -> None:
        """Keep a copy of tensors from outside, which batch norm changes without a mark in its schema."""
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._seen:
                self._seen.add(tensor.untyped_storage().data_ptr())
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self.before.append((whole, whole.clone()))


def _new(func: Any, out: Any) -> list[torch.Tensor]:
    """Return the results that are neither views nor changed arguments."""
    returned = zip(func._schema.returns, out if isinstance(out, tuple) else (out,), strict=False)
    made = (leaf for entry, value in returned if entry.alias_info is None for leaf in tree_leaves(value))
    return [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
