"""What an algorithm may ask of an engine: who is there, and one round of requests and replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

Option = bool | int | float | str


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
