"""The interface of an engine: the names of its clients, and one round of messages and replies.

An engine does not depend on algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch

Option = bool | int | float | str
T = TypeVar("T")
_MEMBERS = 1000  # most members of an ensemble, as in the configuration


class Expected(NamedTuple):
    """A tensor that a reply must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass
class Message:
    """The work of one client in a round."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """the broadcast of the server"""
    options: dict[str, Option] = field(default_factory=dict)
    expects: dict[str, Expected] = field(default_factory=dict)
    """the expected tensors of the reply after training, or of the reply to an exchange of the algorithm; a
    reply with other tensors is rejected"""
    private: dict[str, torch.Tensor] = field(default_factory=dict)
    """the private state of this client, which comes back in the reply after training; the server half of an
    algorithm does not get it"""
    private_mean: dict[str, torch.Tensor] = field(default_factory=dict)
    """private state averaged over all clients, to measure the global model with; empty: the global model is
    not measured"""

    @property
    def bytes(self) -> int:
        """Return the size of the tensors that the server sends.

        The size includes the broadcast and the mean private state, without the client's own state.
        """
        return bytes_of(self.tensors) + bytes_of(self.private_mean)

    def to(self, device: torch.device) -> Message:
        """Return the same message with its tensors on a device."""
        tensors, private, private_mean = (
            _moved(given, device) for given in (self.tensors, self.private, self.private_mean)
        )
        return replace(self, tensors=tensors, private=private, private_mean=private_mean)


@dataclass
class Reply:
    """The reply of one client to its message.

    The tensors may be the engine's own buffers: use them before asking for the next reply, or clone them.
    """

    client: str
    examples: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, float | list[int] | list[float]] = field(default_factory=dict)
    """metrics of the model that was sent"""
    error: str | None = None
    """the reason why the client has no result; then every other field is empty"""
    private: dict[str, torch.Tensor] = field(default_factory=dict)
    training: dict[str, float] = field(default_factory=dict)
    """results of the training of this round: ``train_loss``, ``steps``, and what the algorithm put into
    ``work.metrics``"""
    states: list[str] = field(default_factory=list)
    """used instead of ``private`` if a client keeps its states itself: a name for each member, empty if there
    is no state"""

    @cached_property
    def magnitudes(self) -> dict[str, float]:
        """Return the :func:`magnitudes` of the tensors."""
        return magnitudes(self.tensors)

    @property
    def bytes(self) -> int:
        """Return the size of the returned tensors, without the private ones."""
        return bytes_of(self.tensors)

    @classmethod
    def failed(cls, client: str, error: RuntimeError) -> Reply:
        """Return the reply of a client without a result, because of an error of this client only."""
        lines = str(error).splitlines()
        return cls(client, error=lines[0] if lines else type(error).__name__)

    def to(self, device: torch.device) -> Reply:
        """Return the same reply with its tensors on a device."""
        return replace(self, tensors=_moved(self.tensors, device), private=_moved(self.private, device))


class Engine(Protocol):
    """Carry messages to clients and replies back.

    Clients are known by their names. Replies come sorted by name, so that sums have one order; their tensors
    may be on any device.
    """

    def clients(self) -> list[str]:
        """Return the names of the clients that can get messages, sorted."""
        ...

    def round(self, messages: Mapping[str, Message], deadline: float | None = None) -> Iterator[Reply]:
        """Send one message to each named client and yield one reply for each, by name.

        Args:
            messages: the messages by client name. A message may be created when it is looked up: do this in
                the caller's thread, and keep the message no longer than needed.
            deadline: seconds to wait for replies. After this time, each missing reply has an error.
        """
        ...


def magnitudes(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest absolute value of each real tensor: NaN if an element is NaN, 0 for an empty tensor.

    The host waits for the device once.
    """
    # aminmax reads a tensor once, and allocates no tensor of its size
    ends = [
        torch.stack(t.aminmax() if t.numel() else (t.new_zeros(()), t.new_zeros(()))).double()
        for t in tensors.values()
    ]
    pairs = torch.stack(ends).tolist() if ends else []
    return {name: max(-lowest, highest) for name, (lowest, highest) in zip(tensors, pairs, strict=True)}


def expected_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, Expected]:
    """Return the entries of ``Message.expects`` for tensors with these shapes and dtypes."""
    return {name: Expected(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


_PARTS = tuple(part.name for part in fields(Message))


def join(messages: Sequence[Message]) -> Message:
    """Join several messages to one client, without a copy: each name of message i gets the prefix ``i.``.

    A single message stays as it is.
    """
    if len(messages) == 1:
        return messages[0]
    joined = Message(*(number([getattr(message, part) for message in messages]) for part in _PARTS))
    joined.options["members"] = len(messages)
    return joined


def split(message: Message) -> list[Message]:
    """Undo :func:`join`.

    A message that was not joined is the only member.

    Raises:
        ValueError: the message names more members than an ensemble may have.
    """
    count = message.options.get("members", 0)
    if type(count) is not int or count > _MEMBERS:
        raise ValueError(f"members: expected at most {_MEMBERS}, got {count!r}")
    return [Message(*(member(getattr(message, part), i) for part in _PARTS)) for i in range(count)] or [
        message
    ]


def number(mappings: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """Merge several mappings into one, with the prefix ``i.`` for the names of mapping i."""
    return {f"{i}.{name}": value for i, values in enumerate(mappings) for name, value in values.items()}


def member(values: Mapping[str, T], i: int) -> dict[str, T]:
    """Return the mapping i of a mapping that :func:`number` merged."""
    prefix = f"{i}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _moved(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
