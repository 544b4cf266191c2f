"""Which clients get further codewords: the threshold of the entropy, draws, and what the user is told of
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...seeds import derive


def threshold(entropy: Mapping[str, float], parameters: Any) -> float:
    """The entropy above which a client is extended (eq. 7), from those of the clients."""
    reference = (
        min(entropy.values()) if parameters.reference == "min" else sum(entropy.values()) / len(entropy)
    )
    return float((1 + parameters.gamma) * reference)


def drawn(clients: Sequence[str], count: int, seed: int, iteration: int) -> list[str]:
    """Draw so many clients at random, sorted."""
    generator = torch.Generator().manual_seed(derive(seed, "extended", iteration))
    return sorted(clients[i] for i in torch.randperm(len(clients), generator=generator)[:count].tolist())


def above(threshold: float, entropy: Mapping[str, float], names: list[str]) -> str:
    """These clients' entropies in units of the least one, in as many digits as tell them from the
    threshold."""
    least = min(entropy.values())
    if least == 0:
        return ", ".join(names)

    def digits(name: str) -> int:
        return next(
            (d for d in range(2, 15) if f"{entropy[name] / least:.{d}f}" != f"{threshold / least:.{d}f}"), 15
        )

    return ", ".join(f"{name} ({entropy[name] / least:.{digits(name)}f} x least)" for name in names)


def unsure(
    threshold: float, entropy: Mapping[str, float], records: Iterable[Mapping[str, Any]]
) -> str | None:
    """A line for the user where an entropy is not known well enough to tell it from the threshold; None: all
    are.

    That is where its standard error, over the client's holdout images, is more than the least entropy is
    below the threshold.
    """
    margin = threshold - min(entropy.values())
    error, name = max((record["holdout_entropy_se"], record["client"]) for record in records)
    if error <= margin:
        return None
    return (
        f"the entropy of {name} has a standard error of {error:.3f} nats, and the threshold is {margin:.3f}"
        " above the least entropy: extensions are partly chance; raise holdout, train_per_client or gamma"
    )
