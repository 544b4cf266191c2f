"""A step of training that is recorded once in a turn and replayed: a GPU is given all kernels of a step at
once.

The small networks of a federation keep a GPU busy for less time than Python takes to launch their kernels. A
CUDA graph has them launched together. It repeats the very same operations on the very same tensors, so an
algorithm has to say that its steps are such (:attr:`Algorithm.static_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from .work import Batch

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm
    from .work import Work

_FIRST = 2
"""steps before the recording, in which the optimizer, gradients and libraries make what they keep"""
_LEAST = 10
"""steps of one size from which on a recording should pay, whose making is reckoned to take as long as a few
steps; not measured"""
_METHODS = ("regularize", "loss", "before_step", "after_batch")

Step = Callable[[Batch], None]


class Recorder(Protocol):
    """Records operations on one device."""

    def turn(self) -> AbstractContextManager[None]:
        """Is around all steps of a turn."""

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """What repeats the operations, which are not carried out now."""


class CudaRecorder:
    """CUDA graphs, of which the last one is kept: the next ones take its memory, which none of them needs
    between two replays.

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
            raise RuntimeError(
                f"the step cannot be recorded as a CUDA graph ({line}); set run.cuda_graphs = false"
            ) from error
        self._last = graph
        return graph.replay


def recorder_of(device: torch.device) -> Recorder | None:
    """What records steps on a device; None: nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def is_static(algorithm: Algorithm) -> bool:
    """Whether a class that has every method of the algorithm's steps, its own or inherited, says that they
    can be repeated."""
    kind = type(algorithm)
    says = _owner(kind, "static_step")
    return all(issubclass(says, _owner(kind, method)) for method in _METHODS) and algorithm.static_step


def _owner(kind: type[Algorithm], name: str) -> type:
    return next(owner for owner in kind.__mro__ if name in vars(owner))


@contextmanager
def replayed(step: Step, work: Work, plan: list[list[torch.Tensor]]) -> Iterator[Step]:
    """The same step, carried out by replays of a recording for each size of which the turn has enough
    batches.

    Args:
        step: takes a batch; counts itself in ``work.step``, and images in ``work.counted``.
        work: of the turn.
        plan: the batches of every pass.
    """
    recorder = work.workspace.recorder
    numbers = Counter(len(positions) for batches in plan for positions in batches)
    sizes = {size for size, number in numbers.items() if number >= _LEAST}
    if recorder is None or not sizes:
        yield step
        return
    with recorder.turn():
        yield _Replayed(step, work, recorder, sizes)


class _Recording(NamedTuple):
    """A step on a batch that stays where it is."""

    batch: Batch
    replay: Callable[[], None]
    images: Counter[str]
    """what it adds to ``work.counted``"""


class _Replayed:
    """Steps on batches of some sizes; the first few of each size, and those of other sizes, as they are."""

    def __init__(self, step: Step, work: Work, recorder: Recorder, sizes: set[int]) -> None:
        self._step, self._work, self._recorder = step, work, recorder
        self._first = dict.fromkeys(sizes, _FIRST)
        self._recordings: dict[int, _Recording] = {}

    def __call__(self, batch: Batch) -> None:
        size = len(batch.positions)
        if size not in self._first:
            self._step(batch)
            return
        if self._first[size]:
            self._first[size] -= 1
            self._step(batch)
            return
        if size not in self._recordings:
            self._recordings[size] = self._recorded(batch)
        place, replay, images = self._recordings[size]
        for mine, tensor in zip(place, batch, strict=True):
            mine.copy_(tensor)
        replay()
        self._work.step += 1
        self._work.counted.update(images)

    def _recorded(self, batch: Batch) -> _Recording:
        """Recording carries out what is Python, and nothing else: what it counts is taken back."""
        place = Batch(*(tensor.clone() for tensor in batch))
        step, counted = self._work.step, self._work.counted.copy()
        replay = self._recorder.record(lambda: self._step(place))
        images = self._work.counted - counted
        self._work.step, self._work.counted = step, counted
        return _Recording(place, replay, images)
