"""Define the terms of the suite: a case, a provider, a gate, and the op that holds them.

``benchmarks/ops/`` uses them.

To add an op, write ``benchmarks/ops/<family>.py`` with a dict ``OPS`` of its rows; it is found by itself, and
``python -m benchmarks.run --op NAME --smoke`` runs it. Say ::

    @dataclass(frozen=True)
    class HeadCase(BenchmarkCase):  # sizes; --shape takes Head(2000, 512).name, "2000x512"
        batch: int
        hidden: int
        passes: int = 20  # a field at its default is left out of the name

    def inputs(case: Head, device: str) -> tuple[Tensor, ...]: ...  # seeded

    def eager(inputs) -> Call:  # a provider: prepare, return the timed call
        x, weight = inputs
        return lambda: torch.softmax(x @ weight, 1)  # the answer, or None: a lower bound

    def against(inputs) -> Callable[[Tensor], float]:                  # the gate: answer -> error
        truth = ...
        return lambda found: float((found.double() - truth).abs().max())

    OPS = {"mc_head": Op(cases=(HeadCase(2000, 512),), smoke=Head(8, 16), inputs=inputs,
                         providers={"uefl": ours, "eager": eager},  # "uefl" first
                         gate=Gate("max error", limit=1e-5, against=against),
                         bytes=lambda case: ..., flops=lambda case: ...)} # the least possible

A provider raises ImportError if its library is absent, and ``ProviderUnavailable`` if it does not fit the
device, the case or the memory. The report names both with the reason. A provider must run on
``torch.get_num_threads()`` threads. The runner sets torch and every OpenMP and BLAS pool; a provider sets the
threads of a library with its own setting. Peers get their best settings, with the reason in their docstring.
Work that a caller does once (building an index, converting a tensor to an array) belongs to the preparation.
Work of every call belongs to the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, TypeVar

import torch

Call = Callable[[], Any]
OpInputs = Any  # whatever ``Op.inputs`` returns


class ProviderUnavailable(Exception):
    """Why a provider cannot take part here."""


@dataclass(frozen=True)
class BenchmarkCase:
    """The sizes of one measurement.

    A subclass per family of ops names the sizes, and raises ValueError where they do not go together.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int" and getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")

    @property
    def name(self) -> str:
        """Return the sizes joined by x, without those at their default: the argument of ``--shape``."""
        values = ((getattr(self, field.name), field.default) for field in fields(self))
        return "x".join(str(value) for value, default in values if default is MISSING or value != default)


C = TypeVar("C", bound=BenchmarkCase)


def form(kind: type[BenchmarkCase]) -> str:
    """Return the form of a case's name, such as "NxDIMxK[xSEGMENTS][xDTYPE]"."""
    names = ((field.name.upper(), field.default is MISSING) for field in fields(kind))
    return "".join(f"x{name}" if needed else f"[x{name}]" for name, needed in names)[1:]


def case_of(kind: type[C], name: str) -> C:
    """Return the case of that name, of any size.

    Raises ValueError when the name fits no case.
    """
    values: dict[str, int | str] = {}
    left = name.split("x")
    for field in fields(kind):
        if left and left[0].isdecimal() == (field.type == "int"):
            text = left.pop(0)
            values[field.name] = int(text) if field.type == "int" else text
        elif field.default is MISSING:
            break
    else:
        case = kind(**values)
        if case.name == name:
            return case
    raise ValueError(f"expected {form(kind)}, without sizes at their default")


@dataclass(frozen=True)
class Gate:
    """The error of an answer.

    ``limit`` is the largest error that ours may have; the error of peers is only reported.
    """

    figure: str
    limit: float
    against: Callable[[OpInputs], Callable[[Any], float]]
    # for providers with a true answer of their own
    own: Mapping[str, Callable[[OpInputs], Callable[[Any], float]]] | None = None


@dataclass(frozen=True)
class Op(Generic[C]):
    """One row of the registry, with ``providers`` that begin with "uefl"."""

    cases: tuple[C, ...]
    smoke: C
    inputs: Callable[[C, str], OpInputs]
    providers: Mapping[str, Callable[[OpInputs], Call]]
    gate: Gate
    bytes: Callable[[C], int]
    flops: Callable[[C], int]
    loose: tuple[str, ...] = ()  # providers of ours that promise no exact answer: reported, never a failure
    covers: tuple[str, ...] = ()  # other ops of uefl_kernels with kernels in this row
    cuda_cases: tuple[C, ...] | None = None  # on a GPU, where they are not the same

    def passes(self, provider: str, error: float | None) -> bool:
        """Return whether a provider of ours gave an answer within its promise.

        A NaN fails, and a peer always passes.
        """
        return (
            not ours(provider) or provider in self.loose or (error is not None and error <= self.gate.limit)
        )

    def cases_on(self, device: str) -> tuple[C, ...]:
        """Return the cases of a device type."""
        return self.cases if device == "cpu" or self.cuda_cases is None else self.cuda_cases


def ours(provider: str) -> bool:
    return provider.startswith("uefl")


def needs(device_type: str, x: torch.Tensor) -> None:
    """Skip a provider that runs on another type of device only."""
    if x.device.type != device_type:
        raise ProviderUnavailable(f"runs on {device_type} only")
