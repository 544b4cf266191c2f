"""Choose codebooks for a client that never trains and so has no codebook of its own.

Its metrics are measured with the codewords that every trained client sees. Two other accuracies come from one
pass with dropout off. ``accuracy_union`` uses all codewords of all clients. ``accuracy_best`` uses the
codebook of the trained client that fits the images best, by the mean squared quantization error, without
labels.

A message to such a client has all codewords, ``parts [..., V, d]``, and a mask ``codebooks [K, V]`` of the
codewords of each client.
"""

from __future__ import annotations

from typing import Any

import torch

from uefl_kernels import metrics

from ...client.work import Work
from ...engines.base import Message
from ...models.net import TokenNet
from ...uncertainty import of_head
from .quantizer import Quantizer

COLUMNS = {
    "accuracy_union": "accuracy of an unseen client with all codewords of all clients, dropout off",
    "accuracy_best": (
        "accuracy of an unseen client with the codebook of the client that fits its images best, dropout off"
    ),
}


def choices(
    quantizer: Quantizer, net: TokenNet, tokens: torch.Tensor, message: Message
) -> dict[str, torch.Tensor]:
    """Return quantization errors and predictions for the choice of an unseen client.

    A trained client has none of them. For B images and K codebooks these are ``error [B, K]``,
    ``probs.codebooks [B, K, C]`` and ``probs.union [B, C]``.
    """
    if "codebooks" not in message.tensors:
        return {}
    errors, probs = [], []
    for codebook in message.tensors["codebooks"]:
        values = quantizer(tokens, message.tensors["parts"][..., codebook, :]).values
        errors.append((tokens - values).float().square().flatten(1).mean(1))
        probs.append(of_head(net.head, values, 0).probs)
    found = {"error": torch.stack(errors, 1), "probs.codebooks": torch.stack(probs, 1)}
    if not quantizer.stage:  # the stages of different clients do not follow each other
        union = quantizer(tokens, message.tensors["parts"]).values
        found["probs.union"] = of_head(net.head, union, 0).probs
    return found


def measured(work: Work, extras: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Return the accuracies of an unseen client with labels, of the mean over the members of an ensemble."""
    if "error" not in extras[0] or work.test is None:
        return {}
    best = [extra["probs.codebooks"][:, int(extra["error"].double().mean(0).argmin())] for extra in extras]
    predictions = {"accuracy_best": best}
    if "probs.union" in extras[0]:
        predictions["accuracy_union"] = [extra["probs.union"] for extra in extras]
    return {
        name: float(metrics.accuracy(torch.stack(probs).mean(0), work.test.labels))
        for name, probs in predictions.items()
    }
