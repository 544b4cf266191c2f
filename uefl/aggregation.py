"""Averages of what clients send back, as running sums: memory does not grow with the number of clients."""

from __future__ import annotations

import torch

from .engines.base import Reply, Request


class WeightedMean:
    """sum of w_k x_k over sum of w_k, one client at a time, in the order in which they are added.

    Args:
        old: the tensor before the round, which stays where nothing is added.
    """

    def __init__(self, old: torch.Tensor) -> None:
        self._old = old
        self._sum = torch.zeros_like(old, dtype=torch.float32)
        self._weight = 0.0

    def add(self, x: torch.Tensor, weight: float) -> None:
        """Add one client's tensor; it may be overwritten afterwards."""
        self._sum.add_(x, alpha=weight)
        self._weight += weight

    def result(self) -> torch.Tensor:
        """The mean, float32."""
        return self._sum / self._weight if self._weight > 0 else self._old


class CodewordMean:
    """Each codeword averaged by how often each client used it; one that nobody used keeps its old value.

    Averaging by examples would pull a codeword towards clients that never touch it, where it has not moved.

    Args:
        old: ``[V, d]``, the codewords before the round.
    """

    def __init__(self, old: torch.Tensor) -> None:
        self._old = old
        self._sum = torch.zeros_like(old, dtype=torch.float64)
        self._usage = torch.zeros(len(old), dtype=torch.float64, device=old.device)

    def add(self, codewords: torch.Tensor, usage: torch.Tensor) -> None:
        """codewords [V, d] of one client, usage [V] its assignment counts."""
        usage = usage.double()
        self._sum += codewords.double() * usage[:, None]
        self._usage += usage

    def result(self) -> torch.Tensor:
        """[V, d] float32."""
        mean = self._sum / self._usage.clamp_min(1)[:, None]
        return torch.where(self._usage[:, None] > 0, mean, self._old.double()).float()


def refusal(reply: Reply, request: Request, max_norm: float) -> str | None:
    """Why a client's update must not be averaged, or None when it is sound.

    Args:
        reply: the client's reply to a training request.
        request: what the client was sent; its codebook comes back longer by the codewords that it was asked for.
        max_norm: bound on the L2 distance between all that was sent and what came back; 0: none.
    """
    if reply.error is not None:
        return reply.error
    if reply.examples < 1:
        return f"it claims {reply.examples} examples"
    moved = 0.0
    for name, old in request.tensors.items():
        new, shape = reply.tensors.get(name), list(old.shape)
        if name == "codebook" and request.options.get("new_codewords"):
            shape[0] = max(shape[0], int(request.options["new_at"]) + int(request.options["new_codewords"]))
        if new is None:
            return f"{name} is missing"
        if new.dtype != old.dtype or list(new.shape) != shape:
            return f"{name} is {new.dtype} {list(new.shape)}, expected {old.dtype} {shape}"
        if not bool(torch.isfinite(new).all()):
            return f"{name} is not finite"
        if max_norm > 0:
            moved += float((new[: len(old)] - old).double().square().sum())
    if moved**0.5 > max_norm > 0:
        return f"the update is {moved**0.5:.3g} long, more than max_update_norm = {max_norm:g}"
    if "codebook" in request.tensors:
        usage = reply.tensors.get("usage")
        if usage is None or usage.dtype != torch.int64 or usage.shape != reply.tensors["codebook"].shape[:1] or bool((usage < 0).any()):
            return "usage is not one count for each codeword"
    return None
