"""``ExtensibleCodebook``: codewords that all clients see, and further parts that only some clients see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._checks import check_dense
from ..ops.vq import VQOutput, vq
from ._shared import Float32Module, ParametersToCall, counts, explained, no_torchscript


class ExtensibleCodebook(Float32Module):
    """Keep the codewords of each client in one buffer of fixed size.

    The codewords are the parts that the client sees, in their order of arrival.

    The ops take one codebook tensor. So each client has a parameter of ``capacity`` rows. Its first
    ``size(client)`` rows are visible. A search reads a view of them, and an extension writes behind them:
    neither copies a codeword nor invalidates an optimizer. Rows that are not visible are zero and get a zero
    gradient. Each client trains its own copy of a part that it shares with others; :meth:`average` averages
    the copies, as a federated round does.

    Args:
        shared: ``[K, d]``, the first part, which all clients see.
        capacity: the most codewords that a client can see, K included.
        clients: their names, distinct.

    Attributes:
        part_clients: for each part, the names of the clients that see it; every client sees part 0.
        weights: one parameter ``[capacity, d]`` float32 per client.

    Raises:
        ValueError: sizes that do not fit, or clients that are missing, unknown or named twice.
        TypeError: codewords that are no tensor of floats.

    Source: Zhang, Cao and Liu, "Uncertainty-Based Extensible Codebook for Discrete Federated Learning in
        Heterogeneous Data Silos".

    Equivalent to: ``vq(x, torch.cat(parts[client]))``, which copies all codewords in every step.
    """

    def __init__(self, shared: torch.Tensor, *, capacity: int, clients: Sequence[str] = ("client",)) -> None:
        super().__init__()
        check_dense("ExtensibleCodebook", "shared", shared)
        (capacity,) = counts("ExtensibleCodebook", capacity=capacity)
        if shared.dim() != 2 or shared.numel() == 0 or len(shared) > capacity:
            raise ValueError(
                f"ExtensibleCodebook: shared must have shape [1 to capacity={capacity}, d], got"
                f" {list(shared.shape)}"
            )
        if isinstance(clients, str) or len(clients) == 0 or len(set(clients)) != len(clients):
            raise ValueError(
                f"ExtensibleCodebook: clients must be distinct names, at least one, got {clients!r}"
            )
        self.dim, self.capacity = shared.shape[1], capacity
        self.clients = tuple(clients)
        start = shared.new_zeros(capacity, self.dim, dtype=torch.float32)
        self.weights = ParametersToCall(nn.Parameter(start.clone()) for _ in clients)
        self.part_clients: list[frozenset[str]] = []
        self._rows: list[dict[str, slice]] = []  # for each part, its rows in the buffer of each client
        self._sizes = dict.fromkeys(self.clients, 0)
        self.extend(self.clients, shared)

    __prepare_scriptable__ = no_torchscript

    def __repr__(self) -> str:
        """Return one line, for any number of clients."""
        return (
            f"ExtensibleCodebook(dim={self.dim}, capacity={self.capacity}, clients={len(self.clients)},"
            f" parts={len(self.part_clients)})"
        )

    def size(self, client: str) -> int:
        """Return the number of codewords that the client sees."""
        return self._sizes[self._known(client)]

    def codebook(self, client: str) -> torch.Tensor:
        """Return ``[size, d]``, a view of the client's buffer.

        The parts that were added first come first.
        """
        codewords: torch.Tensor = self._weight(client)[: self._sizes[client]]
        return codewords

    def rows(self, part: int, client: str) -> slice:
        """Return the rows of a part in the codebook of a client that sees it."""
        if client not in self._rows[part]:
            raise ValueError(f"ExtensibleCodebook: client {self._known(client)!r} does not see part {part}")
        return self._rows[part][client]

    def part(self, part: int, client: str | None = None) -> torch.Tensor:
        """Return ``[v, d]``, a view of a client's copy of a part.

        By default this is the copy of the first client that sees the part.
        """
        client = next(iter(self._rows[part])) if client is None else client
        codewords: torch.Tensor = self._weight(client)[self.rows(part, client)]
        return codewords

    @torch.no_grad()
    def extend(self, clients: str | Sequence[str], codewords: torch.Tensor) -> int:
        """Add a part that one client or several clients see.

        Args:
            clients: a name, or some.
            codewords: ``[v, d]``, finite.

        Returns:
            The number of the part.

        Raises:
            ValueError: a client that is not known, a shape that does not fit, more than ``capacity``, or
                values that are not finite.
        """
        names = [clients] if isinstance(clients, str) else list(clients)
        check_dense("ExtensibleCodebook", "codewords", codewords)
        if codewords.dim() != 2 or len(codewords) == 0 or codewords.shape[1] != self.dim:
            raise ValueError(
                f"ExtensibleCodebook: a part must have shape [v, {self.dim}], got {list(codewords.shape)}"
            )
        for name in names:
            if self.size(name) + len(codewords) > self.capacity:
                raise ValueError(
                    f"ExtensibleCodebook: {len(codewords)} more codewords for {name!r} make"
                    f" {self.size(name) + len(codewords)}, but capacity is {self.capacity}; raise capacity"
                )
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"ExtensibleCodebook: a part must have distinct clients, at least one, got {names}"
            )
        if not bool(torch.isfinite(codewords).all()):
            raise ValueError("ExtensibleCodebook: the part holds NaN or infinity")
        self.part_clients.append(frozenset(names))
        self._rows.append(
            {name: slice(self._sizes[name], self._sizes[name] + len(codewords)) for name in names}
        )
        self._sizes.update({name: rows.stop for name, rows in self._rows[-1].items()})
        self.set_part(len(self.part_clients) - 1, codewords)
        return len(self.part_clients) - 1

    @torch.no_grad()
    def set_part(self, part: int, codewords: torch.Tensor) -> None:
        """Replace the codewords ``[v, d]`` of a part for every client that sees it."""
        check_dense("ExtensibleCodebook", "codewords", codewords)
        if codewords.shape != self.part(part).shape:
            raise ValueError(
                f"ExtensibleCodebook: part {part} has shape {list(self.part(part).shape)}, got"
                f" {list(codewords.shape)}"
            )
        for client in self._rows[part]:
            self.part(part, client).copy_(codewords)

    @torch.no_grad()
    def average(self, part: int = 0, mass: Sequence[float] | torch.Tensor | None = None) -> torch.Tensor:
        """Replace the clients' copies of a part by their mean.

        Args:
            part: its number.
            mass: the weight of each client that sees the part, in the order of ``clients``; or ``[c, v]``,
                how often each of these c clients used each codeword. Equal by default. A codeword without
                mass anywhere gets the plain mean.

        Returns:
            The part, ``[v, d]``.

        Raises:
            ValueError: a mass of another shape, negative, or not finite.
        """
        copies = torch.stack(
            [self.part(part, name) for name in self.clients if name in self.part_clients[part]]
        )
        mass = [1.0] * len(copies) if mass is None else mass
        given = torch.as_tensor(mass, dtype=torch.float64, device=copies.device)
        if given.shape not in (copies.shape[:1], copies.shape[:2]):
            raise ValueError(
                f"ExtensibleCodebook: mass must have shape {[len(copies)]} or {list(copies.shape[:2])}, got"
                f" {list(given.shape)}"
            )
        weights = given.reshape(len(copies), -1, 1).expand(*copies.shape[:2], 1)
        if not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ValueError("ExtensibleCodebook: mass must be finite and not negative")
        weights = torch.where(weights.sum(0) == 0, 1.0, weights)
        mean = ((copies.double() * weights).sum(0) / weights.sum(0)).to(copies.dtype)
        self.set_part(part, mean)
        return mean

    @explained
    def forward(self, x: torch.Tensor, client: str | None = None, **options: Any) -> VQOutput:
        """Apply :func:`uefl_kernels.vq` to x with the codewords that the client sees.

        Args:
            x: ``[..., D]``, cut into segments of ``dim``.
            client: its name; may be left out when there is only one.
            **options: options of :func:`uefl_kernels.vq`.

        Returns:
            :class:`uefl_kernels.VQOutput`, with one count per visible codeword.

        Raises:
            ValueError: a client that is not known, and as :func:`uefl_kernels.vq`.
        """
        if client is None and len(self.clients) > 1:
            raise ValueError(f"ExtensibleCodebook: name the client, one of {', '.join(self.clients)}")
        name = self.clients[0] if client is None else self._known(client)
        codewords = self.weights()[self.clients.index(name)][: self._sizes[name]]
        return vq(x, codewords, **options)

    def _weight(self, client: str) -> torch.Tensor:
        weight: torch.Tensor = self.weights[self.clients.index(self._known(client))]
        return weight

    def _known(self, client: str) -> str:
        if client not in self.clients:
            raise ValueError(
                f"ExtensibleCodebook: there is no client {client!r}, only {', '.join(self.clients)}"
            )
        return client

    def get_extra_state(self) -> torch.Tensor:
        """Return the places of the parts, for the state_dict.

        The places are ``[parts, clients, 2]``: the first row and the row after the last, or zeros.
        """
        places = [
            [(rows[name].start, rows[name].stop) if name in rows else (0, 0) for name in self.clients]
            for rows in self._rows
        ]
        return torch.tensor(places, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Restore the result of :meth:`get_extra_state`."""
        found = [dict(zip(self.clients, places, strict=True)) for places in state.tolist()]
        self._rows = [{name: slice(*place) for name, place in part.items() if place[1] > 0} for part in found]
        self.part_clients = [frozenset(rows) for rows in self._rows]
        self._sizes = {
            name: max(rows[name].stop for rows in self._rows if name in rows) for name in self.clients
        }
