"""``ExtensibleCodebook``: a block of codewords that all clients share, and blocks that only one of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..ops.vq import VQOutput, vq
from ._float32 import Float32Module


class ExtensibleCodebook(Float32Module):
    """Codewords per client, those of the shared block first, in one buffer that is made once.

    The ops take one codebook tensor. So each client has a parameter of ``capacity`` rows whose first ``size(client)`` are
    visible: a search reads a view of it, extending a client writes behind the visible rows, and neither copies a codeword nor
    invalidates an optimizer. Rows that are not visible are zero and get a zero gradient. Every client trains its own copy of
    the shared block; :meth:`average_shared` makes them one again, as a federated round does.

    Args:
        dim: length of a codeword.
        shared: K, the number of codewords in the shared block.
        capacity: the most codewords that a client can see, K included.
        clients: their names, distinct.

    Attributes:
        weights: one parameter ``[capacity, dim]`` float32 per client.

    Raises:
        ValueError: sizes that do not fit, or clients that are missing, unknown or named twice.

    Source: Liu et al., "Uncertainty-Based Extensible-Codebook Federated Learning" (arXiv 2402.18888).

    Equivalent to: ``vq(x, torch.cat([shared[client], *blocks[client]]))``, which copies all codewords in every step.
    """

    sizes: torch.Tensor

    def __init__(self, dim: int, shared: int, *, capacity: int, clients: Sequence[str] = ("client",)) -> None:
        super().__init__()
        if dim < 1 or not 1 <= shared <= capacity:
            raise ValueError(
                f"ExtensibleCodebook: dim={dim}, shared={shared} and capacity={capacity} must be 1 <= dim, 1 <= shared <= capacity"
            )
        if not clients or len(set(clients)) != len(clients):
            raise ValueError(f"ExtensibleCodebook: clients must be distinct names, at least one, got {list(clients)}")
        self.dim, self.shared_size, self.capacity = dim, shared, capacity
        self.clients = tuple(clients)
        start = torch.randn(shared, dim)
        self.weights = nn.ParameterList(nn.Parameter(torch.cat([start, torch.zeros(capacity - shared, dim)])) for _ in clients)
        self.register_buffer("sizes", torch.full((len(clients),), shared))
        self._sizes = [shared] * len(clients)  # the host's copy of `sizes`: a view's shape must not wait for the device

    def size(self, client: str) -> int:
        """How many codewords the client sees."""
        return self._sizes[self._number(client)]

    def codebook(self, client: str) -> torch.Tensor:
        """``[size, dim]``, a view of the client's buffer: the shared block, then its own blocks in the order of their coming."""
        number = self._number(client)
        codes: torch.Tensor = self.weights[number][: self._sizes[number]]
        return codes

    def shared(self, client: str) -> torch.Tensor:
        """``[K, dim]``, a view of the client's copy of the shared block."""
        return self.codebook(client)[: self.shared_size]

    @torch.no_grad()
    def extend(self, client: str, block: torch.Tensor) -> range:
        """Show the client more codewords.

        Args:
            client: its name.
            block: ``[n, dim]``, finite.

        Returns:
            The rows they have now.

        Raises:
            ValueError: a shape that does not fit, more than ``capacity``, or values that are not finite.
        """
        number = self._number(client)
        if block.dim() != 2 or block.shape[1] != self.dim:
            raise ValueError(f"ExtensibleCodebook: block must have shape [n, {self.dim}], got {list(block.shape)}")
        rows = range(self._sizes[number], self._sizes[number] + len(block))
        if rows.stop > self.capacity:
            raise ValueError(
                f"ExtensibleCodebook: {len(block)} more codewords for {client!r} make {rows.stop},"
                f" and capacity is {self.capacity}; give it more"
            )
        if not bool(torch.isfinite(block).all()):
            raise ValueError("ExtensibleCodebook: block holds NaN or infinity")
        self.weights[number][rows.start : rows.stop] = block
        self._sizes[number] = rows.stop
        self.sizes[number] = rows.stop
        return rows

    @torch.no_grad()
    def average_shared(self, mass: Sequence[float] | torch.Tensor | None = None) -> torch.Tensor:
        """Replace every client's copy of the shared block by their mean.

        Args:
            mass: the weight of each client, or ``[clients, K]`` of each client's codewords (how often it used them); equal by
                default. A codeword without mass anywhere gets the plain mean.

        Returns:
            The shared block, ``[K, dim]``.

        Raises:
            ValueError: a mass of another shape, negative, or not finite.
        """
        copies = torch.stack([weight[: self.shared_size] for weight in self.weights])
        given = torch.ones(len(copies)) if mass is None else torch.as_tensor(mass)
        if given.shape not in (copies.shape[:1], copies.shape[:2]):
            raise ValueError(
                f"ExtensibleCodebook: mass must have shape {[len(copies)]} or {list(copies.shape[:2])}, got {list(given.shape)}"
            )
        weights = given.to(copies.device, torch.float64).reshape(len(copies), -1, 1).expand(*copies.shape[:2], 1)
        if not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ValueError("ExtensibleCodebook: mass must be finite and not negative")
        weights = torch.where(weights.sum(0) == 0, 1.0, weights)
        mean = ((copies.double() * weights).sum(0) / weights.sum(0)).to(copies.dtype)
        self.set_shared(mean)
        return mean

    @torch.no_grad()
    def set_shared(self, codes: torch.Tensor) -> None:
        """Give every client this shared block, ``[K, dim]``."""
        if list(codes.shape) != [self.shared_size, self.dim]:
            raise ValueError(f"ExtensibleCodebook: the shared block has shape {[self.shared_size, self.dim]}, got {list(codes.shape)}")
        for weight in self.weights:
            weight[: self.shared_size] = codes

    def forward(self, x: torch.Tensor, client: str | None = None, **options: Any) -> VQOutput:
        """:func:`uefl_kernels.vq` of x with the codewords that the client sees.

        Args:
            x: ``[..., D]``, cut into segments of ``dim``.
            client: its name; may be left out when there is only one.
            **options: of :func:`uefl_kernels.vq`.

        Returns:
            :class:`uefl_kernels.VQOutput`, with one count per visible codeword.

        Raises:
            ValueError: a client that is not known, and as :func:`uefl_kernels.vq`.
        """
        if client is None and len(self.clients) > 1:
            raise ValueError(f"ExtensibleCodebook: name the client, one of {', '.join(self.clients)}")
        return vq(x, self.codebook(self.clients[0] if client is None else client), **options)

    def _number(self, client: str) -> int:
        if client not in self.clients:
            raise ValueError(f"ExtensibleCodebook: there is no client {client!r}, only {', '.join(self.clients)}")
        return self.clients.index(client)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._sizes = self.sizes.tolist()
