"""A step of training that is recorded once in a turn and replayed: a GPU is given all kernels of a step at once.

The small networks of a federation keep a GPU busy for less time than Python takes to launch their kernels. A CUDA graph has them launched
together. It repeats the very same operations on the very same tensors, so an algorithm has to say that its steps are such
(:attr:`Algorithm.static_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from .work import Batch

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm
    from .work import Work

_FIRST = 2
"""steps before the recording, in which the optimizer, gradients and libraries make what they keep"""
_LEAST = 10
"""steps of one size from which on a recording should pay, whose making is reckoned to take as long as a few steps; not measured"""
_METHODS = ("regularize", "loss", "before_step", "after_batch")

Step = Callable[[Batch], None]


class Recorder(Protocol):
    """Records operations on one device."""

    def turn(self) -> AbstractContextManager[None]:
        """Is around all steps of a turn."""

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """What repeats the operations, which are not carried out now."""


class CudaRecorder:
    """CUDA graphs, of which the last one is kept: the next one takes its memory.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """All steps on one stream, which is not the default one: there, nothing can be recorded."""
        around = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(around)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            around.wait_stream(self._stream)

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """A replay of the operations.

        Raises:
            RuntimeError: one of them cannot be recorded, e.g. because it waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        pool = None if self._last is None else self._last.pool()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                operations()
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise RuntimeError(f"the step cannot be recorded as a CUDA graph ({line}); set run.cuda_graphs = false") from error
        self._last = graph
        return graph.replay


def recorder_of(device: torch.device) -> Recorder | None:
    """What records steps on a device; None: nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def is_static(algorithm: Algorithm) -> bool:
    """Whether a class that has every method of the algorithm's steps, its own or inherited, says that they can be repeated."""
    kind = type(algorithm)
    says = _owner(kind, "static_step")
    return all(issubclass(says, _owner(kind, method)) for method in _METHODS) and algorithm.static_step


def _owner(kind: type[Algorithm], name: str) -> type:
    return next(owner for owner in kind.__mro__ if name in vars(owner))


@contextmanager
def replayed(step: Step, work: Work, plan: list[list[torch.Tensor]]) -> Iterator[Step]:
    """The same step, carried out by replays of a recording where the turn has enough batches of one size.

    Args:
        step: takes a batch; counts itself in ``work.step``, and images in ``work.counted``.
        work: of the turn.
        plan: the batches of every pass.
    """
    recorder = work.workspace.recorder
    sizes = Counter(len(positions) for batches in plan for positions in batches)
    size, number = max(sizes.items(), key=lambda item: item[1], default=(0, 0))
    if recorder is None or number < _LEAST:
        yield step
        return
    with recorder.turn():
        yield _Replayed(step, work, recorder, size)


class _Replayed:
    """Steps on batches of one size, the first few and those of other sizes as they are."""

    def __init__(self, step: Step, work: Work, recorder: Recorder, size: int) -> None:
        self._step, self._work, self._recorder, self._size = step, work, recorder, size
        self._first = _FIRST
        self._replay: Callable[[], None] | None = None

    def __call__(self, batch: Batch) -> None:
        if len(batch.positions) != self._size:
            self._step(batch)
            return
        if self._first:
            self._first -= 1
            self._step(batch)
            return
        if self._replay is None:
            self._replay = self._recorded(batch)
        for place, tensor in zip(self._batch, batch, strict=True):
            place.copy_(tensor)
        self._replay()
        self._work.step += 1
        self._work.counted.update(self._images)

    def _recorded(self, batch: Batch) -> Callable[[], None]:
        """Recording carries out what is Python, and nothing else: what it counts is taken back."""
        self._batch = Batch(*(tensor.clone() for tensor in batch))
        step, counted = self._work.step, self._work.counted.copy()
        replay = self._recorder.record(lambda: self._step(self._batch))
        self._images = self._work.counted - counted
        self._work.step, self._work.counted = step, counted
        return replay
