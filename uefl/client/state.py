"""Initial private state of a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..seeds import seeded

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm


def fresh(algorithm: Algorithm, client: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Create the tensors of :meth:`~uefl.Algorithm.client_state`.

    The result depends only on the seed and the client.

    Raises:
        TypeError: a value is not a tensor.
    """
    with seeded(device, algorithm.context.seed, "server", "client_state", client):
        state = algorithm.client_state(client)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{type(algorithm).__name__}.client_state: {name!r} is of type {type(tensor).__name__};"
                " expected a tensor"
            )
    return {name: tensor.to(device) for name, tensor in state.items()}
