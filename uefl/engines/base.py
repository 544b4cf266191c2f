"""What an algorithm may ask of an engine: who is there, and one round of requests and replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

Option = bool | int | float | str
T = TypeVar("T")


@dataclass
class Request:
    """All of one client's work of a round."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    options: dict[str, Option] = field(default_factory=dict)


@dataclass
class Reply:
    """What came back from one client.

    The tensors may be the engine's own buffers: use them before asking for the next reply, or clone them.
    """

    client: str
    examples: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float | list[int]] = field(default_factory=dict)
    error: str | None = None
    """why the client did not do its work; then everything else is empty"""


class Engine(Protocol):
    """Clients are known by their names; replies come sorted by name, so that sums have one order."""

    def clients(self) -> list[str]:
        """Names of the clients that can be asked, sorted."""
        ...

    def round(self, requests: Mapping[str, Request], deadline: float | None = None) -> Iterator[Reply]:
        """Send one request to each named client and yield one reply for each, by name.

        Args:
            requests: by client name.
            deadline: seconds after which a client that has not answered is given up, with an error in its reply.
        """
        ...


def join(requests: Sequence[Request]) -> Request:
    """Several requests to one client as one, without a copy: of number i, every name begins with ``i.``."""
    tensors = number([request.tensors for request in requests])
    return Request(tensors, number([request.options for request in requests]) | {"members": len(requests)})


def split(request: Request) -> list[Request]:
    """The opposite of :func:`join`; a request that is no joint one is the only part."""
    count = int(request.options.get("members", 0))
    return [Request(member(request.tensors, i), member(request.options, i)) for i in range(count)] or [request]


def number(parts: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """Several mappings as one, the names of number i after ``i.``."""
    return {f"{i}.{name}": value for i, part in enumerate(parts) for name, value in part.items()}


def member(values: Mapping[str, T], i: int) -> dict[str, T]:
    """The part with number i of what :func:`number` made one."""
    prefix = f"{i}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
