"""Record a training step as a CUDA graph and replay it.

A small network keeps a GPU busy for less time than Python takes to launch its kernels. A CUDA graph launches
all of them at once. A graph repeats the same operations on the same tensors. An algorithm declares by
:attr:`Algorithm.static_step` that its steps do this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ..devices import is_gpu
from .work import Batch

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm
    from .work import Work

_FIRST = 2
"""steps before the recording, in which the optimizer, autograd and libraries allocate their buffers"""
_LEAST = 10
"""smallest number of steps of one batch size that is worth a recording; an estimate, not measured"""
_METHODS = ("regularize", "loss", "before_step", "after_batch")

TrainingStep = Callable[[Batch], None]


class Recorder(Protocol):
    """Records operations on one device."""

    def turn(self) -> AbstractContextManager[None]:
        """Enclose all steps of a turn."""

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """Record the operations without running them, and return a function that replays them."""


class CudaRecorder:
    """Record CUDA graphs.

    Each graph uses the memory pool of the graph before. No graph needs its memory between two replays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run all steps on a stream of its own.

        The default stream cannot record.
        """
        around = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(around)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            around.wait_stream(self._stream)

    def record(self, operations: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays the operations.

        Raises:
            RuntimeError: an operation cannot be recorded, e.g. because it waits for the device.
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
    """Return the recorder of steps on a device, or None if steps are not recorded."""
    return CudaRecorder(device) if is_gpu(device) else None


def is_static(algorithm: Algorithm) -> bool:
    """Return True if the steps of an algorithm can be replayed.

    The class that sets ``static_step`` must define or inherit every method of the step.
    """
    return declares(algorithm, "static_step") and algorithm.static_step


def declares(algorithm: Algorithm, name: str) -> bool:
    """Return True if the class that sets an attribute defines or inherits every method of the step."""
    kind = type(algorithm)
    says = _owner(kind, name)
    return all(issubclass(says, _owner(kind, method)) for method in _METHODS)


def _owner(kind: type[Algorithm], name: str) -> type:
    return next(owner for owner in kind.__mro__ if name in vars(owner))


@contextmanager
def replayed(step: TrainingStep, work: Work, schedule: list[list[torch.Tensor]]) -> Iterator[TrainingStep]:
    """Replay a recording of the step for each batch size that is frequent enough in this turn.

    Args:
        step: takes a batch; counts itself in ``work.step``, and images in ``work.counted``.
        schedule: the batches of every epoch.
    """
    recorder = work.workspace.recorder
    numbers = Counter(len(positions) for batches in schedule for positions in batches)
    sizes = {size for size, number in numbers.items() if number >= _LEAST}
    if recorder is None or not sizes:
        yield step
        return
    with recorder.turn():
        yield _Replayed(step, work, recorder, sizes)


class _Recording(NamedTuple):
    """A step on a batch that stays at one place in memory."""

    batch: Batch
    replay: Callable[[], None]
    images: Counter[str]
    """counts that a replay adds to ``work.counted``"""


class _Replayed:
    """Run the first steps of each frequent batch size, and the steps of other sizes, without a recording.

    Replay the others.
    """

    def __init__(self, step: TrainingStep, work: Work, recorder: Recorder, sizes: set[int]) -> None:
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
        """Record a step, and reset the counts of its Python code, which runs during the recording."""
        place = Batch(*(tensor.clone() for tensor in batch))
        step, counted = self._work.step, self._work.counted.copy()
        replay = self._recorder.record(lambda: self._step(place))
        images = self._work.counted - counted
        self._work.step, self._work.counted = step, counted
        return _Recording(place, replay, images)
