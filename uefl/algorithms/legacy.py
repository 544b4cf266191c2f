"""The published UEFL code's behaviour, for comparison: what its server does, in its order, mistakes included.

What differs from the corrected algorithm (``uefl.py``):

* no codeword is ever averaged: every silo keeps a copy of the whole codebook module, also of the "shared" block;
* at the start of an iteration every silo starts from the *last* silo's copy;
* k-means then runs in every silo, uncertain or not, and overwrites the block that the silo points at: block 0, the
  shared one, in a silo that was never extended;
* a silo sees block 0 and the block it points at, never an older extension; after each extension a spare block is added;
* the model is averaged with equal weights;
* the threshold is (1 + gamma) x the *mean* entropy (``reference = "mean"``), set once, on the silos' *test* split;
* the entropy is that of passes with dropout off, which are all the same;
* iterations have no cap (``max_iterations = 0``).

Raw pixels, dropout on the logits, the rotation centre and the hyper-parameters are the preset's.
Left out, because it changes no result: the evaluation of every local epoch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..engines.base import Reply, Request
from ..seeds import derive
from .fedavg import FedAvg, Record
from .uefl import out_of_reach, threshold


class LegacyUEFL(FedAvg):
    """See the module's docstring; ``codeword_length`` is d, ``classes`` K."""

    def __init__(self, *args: Any, codeword_length: int, classes: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.classes = classes
        self._shape = (self.config.codewords, codeword_length)
        self.main = torch.stack([self._spare(0), self._spare(1)])
        """blocks of the main model, [blocks, v, d]: the shared one and a spare"""
        self.own = dict.fromkeys(self.engine.clients(), self.main)
        """blocks of each silo"""
        self.book = dict.fromkeys(self.engine.clients(), 0)
        """the block that each silo points at; 0: none beside the shared one"""
        self.threshold: float | None = None
        self.uncertain: list[str] = []

    _plain = (*FedAvg._plain, "book", "threshold", "uncertain")

    def rounds_of(self, iteration: int) -> int | None:
        """Without ``max_iterations`` there is always another iteration."""
        if self.config.max_iterations:
            return super().rounds_of(iteration)
        return self.config.rounds[min(iteration, len(self.config.rounds) - 1)]

    def request(self, client: str, *, measure: bool, train: bool) -> Request:
        """The visible part of the silo's module; k-means for everybody in the first round of a later iteration."""
        request = super().request(client, measure=measure, train=train)
        request.tensors["codebook"] = self._visible(client)
        if self.trained == 0 and self.iteration > 0:
            at = 0 if self.book[client] == 0 else self.config.codewords
            request.options |= {"new_codewords": self.config.codewords, "new_at": at, "kmeans_seed": 0}
        return request

    def add(self, reply: Reply) -> None:
        """Equal weights; the codebook stays with the silo."""
        self._mean_values.add(reply.tensors["values"], 1.0)
        self._mean_statistics.add(reply.tensors["statistics"], 1.0)
        blocks, codebook = self._blocks(reply.client).clone(), reply.tensors["codebook"]
        blocks[0] = codebook[: self.config.codewords]
        if self.book[reply.client] > 0:
            blocks[self.book[reply.client]] = codebook[self.config.codewords :]
        self.own[reply.client] = blocks

    def end_average(self) -> None:
        """The main model is left with the last silo's blocks, and with one more spare after an extension."""
        super().end_average()
        self.main = self.own[max(self.own)]
        if self.trained == 0 and self.iteration > 0:
            spare = self._spare(len(self.main))[None]
            self.main = torch.cat([self.main, spare])
            self.own = {name: torch.cat([blocks, spare]) for name, blocks in self.own.items()}

    def record(self, reply: Reply) -> Record:
        """With the size of the codebook that the silo sees."""
        new = self.trained == 1 and reply.client in self.uncertain
        return super().record(reply) | {"codewords": len(self._visible(reply.client)), "extended": new}

    def end_iteration(self, records: list[Record]) -> None:
        """Point uncertain silos at the newest block; stop when there are none."""
        entropy = {record["client"]: record["entropy_deterministic"] for record in records}
        if self.threshold is None:
            self.threshold = threshold(entropy, self.config)
        self.uncertain = [name for name, e in sorted(entropy.items()) if e > self.threshold]
        for name in self.uncertain:
            self.book[name] = self.iteration + 1
        if not self.uncertain and self.config.stop_when_certain:
            self.finished = True
        for record in records:
            record["threshold"] = self.threshold
        limit = f"{self.threshold:.3f} nats{out_of_reach(self.threshold, self.classes)}"
        self.notice(f"after iteration {self.iteration + 1}, entropy above {limit}: {', '.join(self.uncertain) or 'no client'}")

    def codebooks(self) -> dict[str, torch.Tensor]:
        """What each client sees."""
        return {name: self._visible(name) for name in self.engine.clients()}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Also every silo's blocks and where it points."""
        tensors, plain = super().state()
        tensors |= {f"own.{name}": blocks for name, blocks in self.own.items()} | {"main": self.main}
        return tensors, plain

    def restore(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """The opposite of :meth:`state`."""
        super().restore(tensors, plain)
        device = self.values.device
        self.main = tensors["main"].to(device)
        self.own = {name: tensors[f"own.{name}"].to(device) for name in self.own}

    def _blocks(self, client: str) -> torch.Tensor:
        """What the silo starts a round from."""
        return self.main if self.trained == 0 else self.own[client]

    def _visible(self, client: str) -> torch.Tensor:
        blocks, book = self._blocks(client), self.book[client]
        return blocks[0] if book == 0 else torch.cat([blocks[0], blocks[book]])

    def _spare(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(derive(self.config.seed, "codebook", index))
        return torch.randn(*self._shape, generator=generator).to(self.values.device)
