"""The behavior of the published UEFL code, for comparison.

The server takes the steps of the published server in the same order, with its mistakes.

Differences from the corrected algorithm (``uefl/algorithms/uefl/server.py``):

* no codeword is ever averaged: every client keeps a copy of the whole codebook module, also of the "shared"
  part;
* at the start of an iteration every client starts from the *last* client's copy;
* k-means then runs at every client, uncertain or not, and overwrites the part that the client points at: part
  0, the shared one, in a client that was never extended;
* a client sees part 0 and the part it points at, never an older extension; after each extension a spare
  part is added;
* the model is averaged with equal weights;
* the threshold is (1 + gamma) x the *mean* entropy (``reference = "mean"``), set once, on the clients' *test*
  split;
* the entropy is measured with dropout off, in identical passes;
* iterations have no cap (``max_iterations = 0``).

The preset sets raw pixels, dropout on the logits, the rotation center, the test split as holdout, and the
hyper-parameters. The evaluation after every local epoch is left out, because it changes no result.
"""

from __future__ import annotations

import torch

from ..aggregation import Mean
from ..client.work import Work
from ..data.federation import Federation
from ..engines.base import Expected, Message, Reply
from ..errors import UserError
from ..server.turn import Turn
from .base import Record, State, register
from .uefl import extension_findings
from .uefl.codebook_algorithm import CodebookAlgorithm
from .uefl.extension import deciding, threshold


@register("uefl-published")
class PublishedUEFL(CodebookAlgorithm):
    """UEFL as the published code runs it, mistakes included.

    The module's docstring lists them.
    """

    draws = False
    asks_all = True  # the server keeps a codebook of every client from the start

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse an arm without an end, and a choice of the best round.

        The clients of a round measure other codebooks than are saved.
        """
        super().check(federation, arm, net)
        if not (self.parameters.stop_when_certain or self.context.training.max_iterations):
            raise UserError(
                f"key 'arms.{arm}.stop_when_certain': with false this arm never ends, because the published"
                " code does not limit the iterations; set training.max_iterations"
            )
        if self.context.run.select == "holdout":
            raise UserError(
                f"arm {arm!r}: run.select = 'holdout' keeps the best model, but this arm saves other"
                " codebooks than its clients measure; set select = 'last', or omit the arm"
            )

    def rounds(self, iteration: int) -> int | None:
        """Return None without ``max_iterations``: there is always another iteration."""
        training = self.context.training
        if training.max_iterations:
            return super().rounds(iteration)
        return training.rounds[min(iteration, len(training.rounds) - 1)]

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg with every client's parts.

        ``main`` ``[parts, v, d]``: parts of the main model, a shared one and spares. ``own.NAME``: parts
        of each client. ``own_part``: index of each client's own part, 0 for a client with the shared part
        only.
        """
        state, length = super().server_state(values, buffers, net), self.length(net)
        main = torch.stack([self.start(length, 0), self.start(length, 1)]).to(values.device)
        state.tensors |= {"main": main} | {f"own.{name}": main for name in self.context.clients}
        state.plain = {"own_part": dict.fromkeys(self.context.clients, 0), "threshold": None, "uncertain": []}
        return state

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the visible part of the client's module, with k-means at the start of later iterations."""
        message = super().broadcast(state, client, turn)
        codebook = message.tensors["codebook"] = self.visible(state, client, turn)
        if turn.train and turn.trained == 0 and turn.iteration > 0:
            at = 0 if state.plain["own_part"][client] == 0 else self.parameters.codewords
            message.options |= {"new_codewords": self.parameters.codewords, "new_at": at, "kmeans_seed": 0}
        message.expects["codebook"] = Expected(tuple(codebook.shape), codebook.dtype)
        message.expects["usage"] = Expected((len(codebook),), torch.int64)
        return message

    def weight(self, update: Reply) -> float:
        """Weight clients equally."""
        return 1.0

    def add(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Add the model to its average, and keep the codebook for the client."""
        for name, mean in averages.items():
            mean.add(update.tensors[name], self.weight(update))
        at, codewords = state.plain["own_part"][update.client], self.parameters.codewords
        trained = state.scratch.setdefault("trained", {})
        shared, other = update.tensors["codebook"].tensor_split([codewords])
        trained[update.client] = at, shared.clone(), other.clone()

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """Leave the main model with the last client's parts, and after an extension with a new spare part."""
        super().aggregate(state, averages)
        tensors, first = state.tensors, state.scratch["first"]
        for name, (at, shared, other) in state.scratch["trained"].items():
            parts = (tensors["main"] if first else tensors[f"own.{name}"]).clone()
            parts[0] = shared
            if at > 0:
                parts[at] = other
            tensors[f"own.{name}"] = parts
        tensors["main"] = tensors[f"own.{max(self.context.clients)}"]
        if first and state.scratch["later"]:
            main = tensors["main"]
            spare = self.start(main.shape[2], len(main)).to(main.device)[None]
            for name in ("main", *(f"own.{client}" for client in self.context.clients)):
                tensors[name] = torch.cat([tensors[name], spare])

    def prepare(self, state: State, turn: Turn) -> None:
        """Remember where in the run the averages are made."""
        state.scratch |= {"first": turn.trained == 0, "later": turn.iteration > 0}

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """Return the column of the client's codebook: its size."""
        new = turn.trained == 1 and client in state.plain["uncertain"]
        return {"codewords": len(self.visible(state, client, turn)), "extended": new}

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """Point uncertain clients at the newest part, and stop when there are none."""
        records = deciding(records, ("entropy_deterministic",), turn)
        entropy = {record["client"]: record["entropy_deterministic"] for record in records}
        if state.plain["threshold"] is None:
            state.plain["threshold"] = threshold(entropy, self.parameters)
        limit = state.plain["threshold"]
        uncertain = state.plain["uncertain"] = [name for name, e in sorted(entropy.items()) if e > limit]
        for name in uncertain:
            state.plain["own_part"][name] = turn.iteration + 1
        for record in records:
            record |= {"threshold": limit, "deciding_entropy": entropy[record["client"]]}
        shown = extension_findings.nats(limit, len(self.context.classes))
        turn.notice(
            f"after iteration {turn.iteration + 1}, entropy above {shown}:"
            f" {', '.join(uncertain) or 'no client'}"
        )
        return not uncertain and bool(self.parameters.stop_when_certain)

    def passes(self, work: Work) -> int:
        """Return 0: the published code measures with dropout off."""
        return 0

    def visible(self, state: State, client: str, turn: Turn) -> torch.Tensor:
        """Return the codebook of a client at the start of a round, ``[V, d]``."""
        own = state.tensors.get(f"own.{client}")
        parts = state.tensors["main"] if turn.trained == 0 or own is None else own
        own_part = state.plain["own_part"].get(client, 0)
        return parts[0] if own_part == 0 else torch.cat([parts[0], parts[own_part]])

    def client_tensors(self, state: State, client: str) -> dict[str, torch.Tensor]:
        """Return the tensors that the client has after the run, from the main model."""
        parts, own_part = state.tensors["main"], state.plain["own_part"].get(client, 0)
        return {"codebook": parts[0] if own_part == 0 else torch.cat([parts[0], parts[own_part]])}
