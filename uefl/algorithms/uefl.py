"""UEFL: a shared codebook for all, more codewords for the clients that the model is uncertain about.

Source: Liu et al., "Uncertainty-Based Extensible-Codebook Federated Learning" (arXiv 2402.18888), with what its text leaves
open or its code gets wrong settled as docs/uefl.md says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from uefl_kernels.nn import ExtensibleCodebook

from .. import clustering
from ..aggregation import CodewordMean, WeightedMean
from ..config import Config
from ..engines.base import Option, Reply, Request
from ..errors import RunError
from ..seeds import derive
from .fedavg import FedAvg, Record


def threshold(entropy: Mapping[str, float], config: Config) -> float:
    """The entropy above which a client is extended (eq. 7), from those of the clients."""
    reference = min(entropy.values()) if config.reference == "min" else sum(entropy.values()) / len(entropy)
    return (1 + config.gamma) * reference


def out_of_reach(threshold: float, classes: int) -> str:
    """What to add to a line that names a threshold which no client can exceed; empty for the others."""
    most = math.log(classes)
    return "" if threshold < most else f" (none of {classes} classes can exceed ln {classes} = {most:.3f}: lower gamma)"


def above(threshold: float, entropy: Mapping[str, float], names: list[str]) -> str:
    """These clients' entropies in units of the least one, in as many digits as tell them from the threshold."""
    least = min(entropy.values())
    if least == 0:
        return ", ".join(names)

    def digits(name: str) -> int:
        return next((d for d in range(2, 15) if f"{entropy[name] / least:.{d}f}" != f"{threshold / least:.{d}f}"), 15)

    return ", ".join(f"{name} ({entropy[name] / least:.{digits(name)}f} x least)" for name in names)


class UEFL(FedAvg):
    """FedAvg of encoder and head around a quantiser whose codebook grows for uncertain clients.

    Args:
        codeword_length: d.
        classes: K, which bounds the entropy.
        extend: whether clients are ever extended; without, this is FedAvg with an averaged codebook (arm ``fedavg-vq``).
    """

    def __init__(self, *args: Any, codeword_length: int, classes: int, extend: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.classes = classes
        generator = torch.Generator().manual_seed(derive(self.config.seed, "codebook"))
        shared = torch.randn(self.config.codewords, codeword_length, generator=generator).to(self.values.device)
        self.codebook = self._codebook(shared)
        self.extend = extend
        self.threshold: float | None = None
        self.uncertain: list[str] = []
        """clients above the threshold after the iteration before this one"""
        self.pending: list[str] = []
        """those of them that have yet to get their new codewords"""
        self.extended: list[str] = []
        """clients that got new codewords in the last round"""
        self._growing: list[str] = []

    _plain = (*FedAvg._plain, "threshold", "uncertain", "pending", "extended")

    # --- codebooks -------------------------------------------------------------------------------------------------

    @property
    def quantized(self) -> bool:
        """False only in the first round of ``codebook_init = "kmeans"``, whose features the codebook is made of."""
        return not (self.config.codebook_init == "kmeans" and self.round == 0)

    def _codebook(self, shared: torch.Tensor) -> ExtensibleCodebook:
        """With room for an extension of every client before each iteration but the first."""
        return ExtensibleCodebook(shared, capacity=len(shared) * len(self.config.iterations()), clients=self.engine.clients())

    def visible(self, client: str) -> torch.Tensor:
        """The codebook of one client, ``[V, d]``: shared codewords first, then its extensions in the order of their coming."""
        return self.codebook.codebook(client).detach()

    def pooled_kmeans(self, clients: list[str], purpose: str) -> torch.Tensor:
        """One block for several clients, ``[v, d]``: k-means on each one's features, then on the weighted centroids of all."""
        count = self.config.codewords
        centroids, masses = [], []
        requests = {name: super(UEFL, self).request(name, measure=False, train=False) for name in clients}
        for name, request in requests.items():
            request.options |= {"new_codewords": count, "kmeans_seed": derive(self.config.seed, purpose, self.iteration, name)}
        for reply in self.engine.round(requests):
            if reply.error is not None:
                raise RunError(f"{reply.client} could not find new codewords: {reply.error}")
            centroids.append(reply.tensors["block"])
            masses.append(reply.tensors["mass"])
        block, _ = clustering.kmeans(torch.cat(centroids), count, derive(self.config.seed, purpose, self.iteration), torch.cat(masses))
        return block.to(self.values.device)

    # --- a turn ----------------------------------------------------------------------------------------------------

    def prepare(self, *, train: bool) -> None:
        """The codebooks and extensions that need an exchange of their own."""
        if self.round == 1 and self.trained == 1 and self.config.codebook_init == "kmeans":
            self.codebook.set_block(0, self.pooled_kmeans(self.engine.clients(), "codebook"))
        if train and self.pending and self.config.ext_share == "group":
            self.codebook.extend(self.pending, self.pooled_kmeans(self.pending, "extend"))
            self._growing, self.pending = self.pending, []

    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """The client's own codebook with it; and for a private extension, the order to make one."""
        request = super().request(client, measure=measure, train=train)
        if self.quantized:
            codebook = request.tensors["codebook"] = self.visible(client)
            if train and client in self.pending:
                seed: Option = derive(self.config.seed, "extend", self.iteration, client)
                request.options |= {"new_codewords": self.config.codewords, "new_at": len(codebook), "kmeans_seed": seed}
        return request

    def begin_average(self) -> None:
        """One average per block."""
        super().begin_average()
        mean, blocks = CodewordMean if self.config.usage_aware else WeightedMean, range(len(self.codebook.members))
        self._means = [mean(self.codebook.block(number).detach()) for number in blocks]
        self._new: dict[str, torch.Tensor] = {}

    def add(self, reply: Reply) -> None:
        """Each block's part of the client's codebook goes to that block's average; what is behind them is a new block."""
        super().add(reply)
        if not self.quantized:
            return
        codebook, usage, known = reply.tensors["codebook"], reply.tensors["usage"], self.codebook.size(reply.client)
        for number, mean in enumerate(self._means):
            if reply.client in self.codebook.members[number]:
                part = self.codebook.rows(number, reply.client)
                mean.add(codebook[part], usage[part] if isinstance(mean, CodewordMean) else reply.examples)  # type: ignore[arg-type]
        if known < len(codebook):
            self._new[reply.client] = codebook[known:].clone()
            self._growing.append(reply.client)
            self.pending.remove(reply.client)

    def end_average(self) -> None:
        """Blocks whose every member was refused stay as they are."""
        super().end_average()
        if self.quantized:
            for number, mean in enumerate(self._means):
                self.codebook.set_block(number, mean.result())
        for client, block in self._new.items():
            self.codebook.extend(client, block)
        self.extended, self._growing = self._growing, []

    def record(self, reply: Reply) -> Record:
        """With the size of the client's codebook, and whether it has just grown."""
        return super().record(reply) | {"codewords": len(self.visible(reply.client)), "extended": reply.client in self.extended}

    def end_iteration(self, records: list[Record]) -> None:
        """Extend client k next iff e_k > (1 + gamma) * reference, e the entropies on the clients' held-out data (eq. 7)."""
        if not self.extend:
            return
        entropy = {record["client"]: record["holdout_entropy"] for record in records}
        if self.threshold is None or self.config.threshold == "current":
            self.threshold = threshold(entropy, self.config)
        self.uncertain = [name for name, e in sorted(entropy.items()) if e > self.threshold]
        self.pending = list(self.uncertain)
        if not self.uncertain and self.config.stop_when_certain:
            self.finished = True
        for record in records:
            record["threshold"] = self.threshold
        limit = f"{self.threshold:.3f} nats{out_of_reach(self.threshold, self.classes)}"
        clients = above(self.threshold, entropy, self.uncertain)
        self.notice(f"after iteration {self.iteration + 1}, entropy above {limit}: {clients or 'no client'}")

    def codebooks(self) -> dict[str, torch.Tensor]:
        """What each client sees."""
        return {name: self.visible(name) for name in self.engine.clients()}

    # --- the state between two turns -------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Also the blocks, their members, and who is to be extended."""
        tensors, plain = super().state()
        tensors |= {f"block.{i}": self.codebook.block(i).detach() for i in range(len(self.codebook.members))}
        members = [sorted(names) for names in self.codebook.members]
        return tensors, plain | {"members": members}

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        super().restore(tensors, plain)
        shared, *others = (tensors[f"block.{i}"].to(self.values.device) for i in range(len(plain["members"])))
        self.codebook = self._codebook(shared)
        for members, block in zip(plain["members"][1:], others, strict=True):
            self.codebook.extend(members, block)
