"""The choice of clients to extend: threshold of the entropy, random draws, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import RunError, listed
from ...seeds import derive
from ...server.turn import Turn
from ..base import Record


def deciding(records: list[Record], needed: Sequence[str], turn: Turn) -> list[Record]:
    """Return the records that have all of these metrics, and note the clients without them.

    Raises:
        RunError: no record has them.
    """
    lacking = [record["client"] for record in records if any(record.get(key) is None for key in needed)]
    if lacking:  # a client may send no metrics, or wrong ones
        turn.notice(
            f"after iteration {turn.iteration + 1}: {listed(lacking)} sent no {needed[0]}, and cannot"
            " be extended"
        )
    if len(lacking) == len(records):
        raise RunError(
            f"no client sent its {needed[0]}, which decides about extensions; see the logs of the clients"
        )
    return [record for record in records if record["client"] not in lacking]


def threshold(entropy: Mapping[str, float], parameters: Any) -> float:
    """Return the entropy above which a client is extended (eq. 7)."""
    reference = (
        min(entropy.values()) if parameters.reference == "min" else sum(entropy.values()) / len(entropy)
    )
    return float((1 + parameters.gamma) * reference)


def drawn(clients: Sequence[str], count: int, seed: int, iteration: int) -> list[str]:
    """Draw ``count`` clients at random, sorted."""
    generator = torch.Generator().manual_seed(derive(seed, "extended", iteration))
    return sorted(clients[i] for i in torch.randperm(len(clients), generator=generator)[:count].tolist())


def above(threshold: float, entropy: Mapping[str, float], names: list[str]) -> str:
    """Return these clients' entropies relative to the least one, with digits enough to pass the threshold."""
    least = min(entropy.values())
    if least < 1e-6:  # a ratio to it has no meaning; a check of replies allows for rounding below 0
        return ", ".join(names)

    def digits(name: str) -> int:
        return next(
            (d for d in range(2, 15) if f"{entropy[name] / least:.{d}f}" != f"{threshold / least:.{d}f}"), 15
        )

    return ", ".join(f"{name} ({entropy[name] / least:.{digits(name)}f} x least)" for name in names)


def unsure(
    threshold: float, entropy: Mapping[str, float], records: Iterable[Mapping[str, Any]]
) -> str | None:
    """Return a note if a standard error exceeds the distance from the least entropy to the threshold."""
    margin = threshold - min(entropy.values())
    error, name = max((record["holdout_entropy_se"], record["client"]) for record in records)
    if error <= margin:
        return None
    return (
        f"the entropy of {name} has a standard error of {error:.3f} nats, and the threshold is {margin:.3f}"
        " above the lowest entropy. So extensions depend partly on chance; raise holdout, train_per_client"
        " or gamma"
    )
