"""The server half of UEFL: parts of codebooks, their clients, averages and extensions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import torch

from ...aggregation import Mean, WeightedMean
from ...client.work import Work
from ...data.federation import Federation
from ...engines.base import Expected, Message, Reply
from ...errors import UserError
from ...findings import Findings, History
from ...seeds import derive
from ...server.turn import Turn
from ..base import Record, State, register
from . import clustering, extension, extension_findings, parameters, unseen
from .codebook_algorithm import CodebookAlgorithm
from .quantizer import Quantizer, codewords, joined, moving_start, revived
from .usage import CodewordMean


@register("uefl")
class UEFL(CodebookAlgorithm):
    """FedAvg with a quantizer between encoder and head, and codebooks that grow for uncertain clients."""

    Parameters = parameters.Parameters
    columns: ClassVar = {
        **CodebookAlgorithm.columns,
        **unseen.COLUMNS,
        "extension_gain": "nats by which the newest codewords, when tested, lowered the holdout loss",
    }
    private_predicts = ("codewords",)

    @property
    def quantizer(self) -> Quantizer:
        """Return the quantizer of the parameters."""
        p = self.parameters
        stage = p.codewords if p.extension == "residual" else 0
        return Quantizer(
            p.commitment, p.search, p.estimator, stage, p.segment_codebooks, p.codebook_lr, p.ema_decay
        )

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Check as FedAvg does, and refuse a codebook that would come after the first iteration."""
        super().check(federation, arm, net)
        after, first = self.parameters.codebook_after, self.context.training.rounds[0]
        if after > first:
            raise UserError(
                f"key 'arms.{arm}.codebook_after': expected at most the {first} rounds of the first"
                f" iteration; got {after}"
            )
        if self.kept_at_silos and any(len(group) == 1 for group in self.sharing) and federation.unseen:
            raise UserError(
                f"key 'arms.{arm}.personal': a client that is only measured needs codewords that all clients"
                " share, but a group of one client keeps its codewords with this client; omit the key"
            )
        grouped = Counter(name for group in self.sharing for name in group)
        for name in sorted({*grouped, *self.context.clients}):
            if name not in self.context.clients or grouped[name] != 1:
                known = name in self.context.clients
                what = f"it is in {grouped[name]} lists" if known else "it is not a client"
                raise UserError(
                    f"key 'arms.{arm}.personal': expected every client in one list; {name!r}: {what}"
                )

    @property
    def sharing(self) -> list[list[str]]:
        """Return the clients that share each initial codebook."""
        personal, clients = self.parameters.personal, self.context.clients
        if isinstance(personal, bool):
            return [[name] for name in clients] if personal else [list(clients)]
        return [list(group) for group in personal]

    # --- codebooks -----------------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg, the parts of codebooks, and the clients to extend.

        ``part_clients``: the clients that see each part. ``uncertain``: clients above the threshold after
        the last iteration. ``pending``: clients that still need new codewords. ``extended``: clients extended
        in the last round. ``at_silo``: number of rows of a client's codebook that the client has trained and
        keeps, by client. ``gains``: by how much the newest codewords of a client lowered its holdout loss.
        """
        state = super().server_state(values, buffers, net)
        state.plain = {"part_clients": [], "threshold": None, "uncertain": [], "pending": [], "extended": []}
        state.plain |= {"at_silo": {}, "gains": {}}
        for clients in self.sharing:
            self.extend(state, clients, self.start(self.length(net)).to(values.device))
        return state

    def most_new(self) -> int:
        """Return the size of a client's last possible extension, the largest one if codebooks double."""
        extensions = len(self.context.training.iterations()) - 1
        doubled = extensions if self.parameters.growth == "double" else 0
        return int(self.parameters.codewords * 2 ** max(doubled - 1, 0))

    def extend(self, state: State, clients: list[str], part: torch.Tensor) -> None:
        """Give clients a new part, codewords ``[..., v, d]``."""
        state.plain["part_clients"].append(sorted(clients))
        self.put(state, len(state.plain["part_clients"]) - 1, part)

    def remove(self, state: State, client: str) -> None:
        """Take the newest part from a client, and delete a part that no client sees."""
        parts, newest = state.plain["part_clients"], self.seen(state, client)[-1]
        parts[newest].remove(client)
        if parts[newest]:
            return
        del parts[newest]
        for what in ("part", "moving"):
            names = [f"{what}.{i}" for i in range(len(parts) + 1) if f"{what}.{i}" in state.tensors]
            kept = [state.tensors.pop(name) for name in names]
            state.tensors |= dict(zip(names, kept[:newest] + kept[newest + 1 :], strict=False))

    def put(self, state: State, i: int, part: torch.Tensor) -> None:
        """Replace the codewords ``[..., v, d]`` of a part."""
        state.tensors[f"part.{i}"] = part
        if self.parameters.ema_decay:
            state.tensors[f"moving.{i}"] = moving_start(part)

    def seen(self, state: State, client: str) -> list[int]:
        """Return the parts of a client, oldest first, for an unseen client the shared ones or else all."""
        part_clients = state.plain["part_clients"]
        own = [
            i
            for i, names in enumerate(part_clients)
            if client in names or len(names) == len(self.context.clients)
        ]
        return own or list(range(len(part_clients)))

    def visible(self, state: State, client: str, what: str = "part") -> torch.Tensor:
        """Return a client's codebook ``[..., V, d]`` or ``moving`` averages, with extensions at the end."""
        return joined([state.tensors[f"{what}.{i}"] for i in self.seen(state, client)])

    @property
    def kept_at_silos(self) -> bool:
        """Return True if clients keep their own codewords, with which the server computes nothing."""
        return self.context.clients_keep_states and not self.computes_codewords

    def first_own_row(self, state: State, client: str) -> int:
        """Return the first row of a client's codebook that no other client shares."""
        part_clients = state.plain["part_clients"]
        first = self.seen(state, client)[0]
        return 0 if part_clients[first] == [client] else int(state.tensors[f"part.{first}"].shape[-2])

    def quantized(self, round: int) -> bool:
        """Return False in the first ``codebook_after`` rounds, before there is a codebook."""
        return bool(round >= self.parameters.codebook_after)

    def pooled_kmeans(self, state: State, clients: Iterable[str], purpose: str, turn: Turn) -> torch.Tensor:
        """Return a part ``[..., v, d]`` by k-means on the weighted centers of several clients."""
        count, shape = self.parameters.codewords, tuple(state.tensors["part.0"].shape)
        centers, masses, messages = [], [], {}
        for name in clients:
            message = super().broadcast(state, name, turn)
            if purpose == "extend" and self.quantizer.stage:
                message.tensors["codebook"] = self.visible(state, name)
            message.options |= {
                "new_codewords": count,
                "kmeans_seed": derive(self.context.seed, purpose, turn.iteration, name),
            }
            message.expects = {
                "part": Expected(shape, torch.float32),
                "mass": Expected(shape[:-1], torch.float32),
            }
            messages[name] = message
        for reply in turn.need(messages, "find new codewords"):
            centers.append(reply.tensors["part"])
            masses.append(reply.tensors["mass"])
        seed = derive(self.context.seed, purpose, turn.iteration)
        part, _ = clustering.kmeans(joined(centers), count, seed, torch.cat(masses, -1))
        return part.to(state.tensors["values"].device)

    # --- a turn --------------------------------------------------------------------------------------------

    def prepare(self, state: State, turn: Turn) -> None:
        """Make the codebooks and extensions that need an exchange of their own."""
        state.scratch |= {"new": {}, "growing": [], "usage": {}}
        if self.parameters.keep == "better" and turn.trained:
            self.test_extensions(state, turn)
        first = turn.trained > 0 and turn.round == self.parameters.codebook_after > 0
        if first or (self.parameters.reinit and turn.iteration > 0 and turn.trained == 0):
            for i, names in enumerate(state.plain["part_clients"][: len(self.sharing)]):
                self.put(state, i, self.pooled_kmeans(state, names, "codebook", turn))
        pending, group = state.plain["pending"], self.parameters.ext_share == "group"
        normal = self.parameters.new_codewords == "normal"
        if not turn.train or not pending or not (group or normal):
            return
        for names in [pending] if group else [[name] for name in pending]:
            if normal:
                part = self.drawn(state, names, turn)
            else:
                part = self.pooled_kmeans(state, names, "extend", turn)
            self.extend(state, names, part)
        state.scratch["growing"], state.plain["pending"] = list(pending), []

    def test_extensions(self, state: State, turn: Turn) -> None:
        """Remove the extensions of the last round that do not lower the holdout loss of their client."""
        messages = {}
        for name in state.plain["extended"]:
            message = messages[name] = super().broadcast(state, name, turn)
            message.tensors["codebook"] = self.visible(state, name)
            message.options["untested"] = state.tensors[f"part.{self.seen(state, name)[-1]}"].shape[-2]
            message.expects = {"gain": Expected((), torch.float32)}
        for reply in turn.need(messages, "test its new codewords"):
            gain = state.plain["gains"][reply.client] = float(reply.tensors["gain"])
            if gain <= 0:
                self.remove(state, reply.client)
                turn.notice(f"round {turn.round}: {reply.client} loses new codewords, gain {gain:.3f} nats")

    def size_of_extension(self, state: State, client: str) -> int:
        """Return the number of codewords of a client's next extension, in each segment."""
        return int(
            self.visible(state, client).shape[-2]
            if self.parameters.growth == "double"
            else self.parameters.codewords
        )

    def drawn(self, state: State, clients: list[str], turn: Turn) -> torch.Tensor:
        """Draw an extension ``[..., v, d]`` from N(0, 1), for clients that share it."""
        shared, count = state.tensors["part.0"], self.size_of_extension(state, clients[0])
        part = self.start(shared.shape[-1], "extend", turn.iteration, clients[0], count=count)
        return part.to(shared.device)

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """Return the message of FedAvg with the client's codebook and the request for a private extension."""
        message = super().broadcast(state, client, turn)
        if not self.quantized(turn.round):
            return message
        codebook = message.tensors["codebook"] = self.visible(state, client)
        *segments, rows, length = codebook.shape
        known = client in self.context.clients
        if turn.train and client in state.plain["pending"]:
            seed = derive(self.context.seed, "extend", turn.iteration, client)
            count = self.size_of_extension(state, client)
            message.options |= {"new_codewords": count, "new_at": rows, "kmeans_seed": seed}
            rows += count
        if known and self.kept_at_silos:
            at = message.options["own_at"] = rows = self.first_own_row(state, client)
            shared, _, drawn = codebook.tensor_split([at, at + state.plain["at_silo"].get(client, 0)], -2)
            message.tensors["codebook"] = joined([shared, drawn])
        message.expects["usage"] = Expected((*segments, rows), torch.int64)
        if self.parameters.ema_decay:
            message.tensors["moving"] = self.visible(state, client, "moving")
            message.expects["moving"] = Expected((*segments, rows, length + 1), codebook.dtype)
        else:
            message.expects["codebook"] = Expected((*segments, rows, length), codebook.dtype)
        if not known and not self.kept_at_silos:
            message.tensors |= self.all_parts(state, codebook.device)
        return message

    def all_parts(self, state: State, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the choices of an unseen client: all codewords, and a mask for each codebook."""
        parts = [state.tensors[f"part.{i}"] for i in range(len(state.plain["part_clients"]))]
        codebooks = sorted({tuple(self.seen(state, name)) for name in self.context.clients})
        part_of = [i for i, part in enumerate(parts) for _ in range(part.shape[-2])]
        mask = torch.tensor([[i in codebook for i in part_of] for codebook in codebooks], device=device)
        return {"parts": joined(parts), "codebooks": mask}

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the update without the codewords that the client keeps.

        A codeword of its own that the client did not use stays as it was, as in an average over one client.
        """
        sent = super().update(work)
        if "own_at" not in work.message.options or "codebook" not in sent:
            return sent
        at, before = int(work.message.options["own_at"]), self.received(work)
        assert before is not None
        codebook, usage, had = sent["codebook"], sent["usage"], before.shape[-2]
        sent["codebook"], sent["usage"] = codebook[..., :at, :], usage[..., :at]
        own, new = codebook[..., at:, :].tensor_split([had - at], -2)
        if self.by_use:
            own = torch.where(usage[..., at:had, None] > 0, own, before[..., at:, :])
        work.private["codewords"] = joined([own, new])
        return sent

    @property
    def averaged(self) -> str:
        """Return the averaged tensor of a part: codewords or moving averages."""
        return "moving" if self.parameters.ema_decay else "part"

    @property
    def by_use(self) -> bool:
        """Return True if codewords are weighted by their usage, which moving averages contain already."""
        return bool(self.parameters.usage_aware and not self.parameters.ema_decay)

    def weights(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the weights ``[..., v]`` of a client's codewords, from how often it used them."""
        return counts > 0 if self.parameters.usage_aware == "equal" else counts

    def averages(self, state: State) -> dict[str, Mean]:
        """Return the averages of FedAvg and of each part."""
        mean = CodewordMean if self.by_use else WeightedMean
        parts = {
            name: mean(tensor)
            for name, tensor in state.tensors.items()
            if name.startswith(f"{self.averaged}.")
        }
        return super().averages(state) | parts

    def add(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Add each part of the client's codebook to its average, and keep further rows as a new part."""
        for name in ("values", "buffers"):
            averages[name].add(update.tensors[name], self.weight(update))
        if "usage" not in update.tensors:
            return
        if self.kept_at_silos:
            self.add_shared(state, averages, update)
            return
        parts, used = self.seen(state, update.client), state.scratch["usage"]
        ends = list(itertools.accumulate(state.tensors[f"part.{i}"].shape[-2] for i in parts))
        sent = update.tensors["moving" if self.parameters.ema_decay else "codebook"].tensor_split(ends, -2)
        usage = update.tensors["usage"].tensor_split(ends, -1)
        for i, part, counts in zip(parts, sent, usage, strict=False):
            averages[f"{self.averaged}.{i}"].add(
                part, self.weights(counts) if self.by_use else self.weight(update)
            )
            used[i] = used.get(i, 0) + counts
        if sent[-1].shape[-2]:
            state.scratch["new"][update.client] = sent[-1].clone()
            state.scratch["growing"].append(update.client)
            state.plain["pending"].remove(update.client)

    def add_shared(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Add the part that a client shares with others, and count the rows that the client keeps."""
        client, (first, *_) = update.client, self.seen(state, update.client)
        codebook, usage = update.tensors["codebook"], update.tensors["usage"]
        if codebook.shape[-2]:
            averages[f"part.{first}"].add(
                codebook, self.weights(usage) if self.by_use else self.weight(update)
            )
        rows = self.visible(state, client).shape[-2] - codebook.shape[-2]
        if client in state.plain["pending"]:
            count = self.size_of_extension(state, client)
            state.scratch["new"][client] = codebook.new_zeros(*codebook.shape[:-2], count, codebook.shape[-1])
            state.scratch["growing"].append(client)
            state.plain["pending"].remove(client)
            rows += count
        state.plain["at_silo"][client] = rows

    @property
    def asks_all(self) -> bool:
        """Return True if k-means pools the centers of clients."""
        p = self.parameters
        return bool(p.codebook_after or p.reinit or p.ext_share == "group")

    @property
    def computes_codewords(self) -> bool:
        """Return True if the server does more with codewords than to average and to send them."""
        p = self.parameters
        return bool(p.ema_decay or p.revive_below or p.keep == "better" or self.asks_all)

    @property
    def plain_means(self) -> bool:
        """Return True if each part is a plain mean: no usage, no moving averages, no pooled k-means."""
        return not (self.parameters.usage_aware or self.computes_codewords)

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """Take the averages, and leave a part without accepted updates as it is."""
        super().aggregate(state, averages)
        tensors, moving = state.tensors, bool(self.parameters.ema_decay)
        if moving:
            for i in range(len(state.plain["part_clients"])):
                tensors[f"part.{i}"] = codewords(tensors[f"moving.{i}"], tensors[f"part.{i}"])
        for client, sent in state.scratch["new"].items():
            self.extend(state, [client], codewords(sent, sent[..., :-1]) if moving else sent)
            if moving:
                tensors[f"moving.{len(state.plain['part_clients']) - 1}"] = sent
        if self.parameters.revive_below:
            for i, usage in state.scratch["usage"].items():
                self.revive(state, i, usage)
        state.plain["extended"] = state.scratch["growing"]

    def revive(self, state: State, i: int, usage: torch.Tensor) -> None:
        """Move rarely used codewords of part ``i`` by ``usage [..., v]``, and reset their moving averages."""
        before, averages = state.tensors[f"part.{i}"], state.tensors.get(f"moving.{i}")
        after = revived(before, usage, self.parameters.revive_below)
        self.put(state, i, after)
        if averages is not None:
            moved = (after != before).any(-1, keepdim=True)
            state.tensors[f"moving.{i}"] = torch.where(moved, state.tensors[f"moving.{i}"], averages)

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """Return the size of the client's codebook, and whether it has just grown."""
        size = self.visible(state, client).shape[:-1].numel()
        record = {"codewords": size, "extended": client in state.plain["extended"]}
        gain = state.plain["gains"].get(client)
        return record if gain is None else record | {"extension_gain": gain}

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """Extend client k next if and only if its holdout entropy e_k > (1 + gamma) * reference (eq. 7).

        Raises:
            RunError: no client sent the value that decides.
        """
        p = self.parameters
        if p.extend in ("all", "none"):
            state.plain["pending"] = list(self.context.clients) if p.extend == "all" else []
            return False
        by_entropy = p.criterion == "entropy"
        needed = ("holdout_entropy", "holdout_entropy_se") if by_entropy else ("holdout_nll",)
        records = extension.deciding(records, needed, turn)
        measured = {record["client"]: record[needed[0]] for record in records}
        if state.plain["threshold"] is None or p.threshold == "current":
            state.plain["threshold"] = extension.threshold(measured, p)
            line = extension.unsure(state.plain["threshold"], measured, records) if by_entropy else None
            if line:
                turn.notice(f"after iteration {turn.iteration + 1}, {line}")
        limit = state.plain["threshold"]
        uncertain = [name for name, e in sorted(measured.items()) if e > limit]
        chosen = list(uncertain)
        if p.extend == "random":  # the same in every member of an ensemble
            chosen = extension.drawn(
                self.context.clients, len(uncertain), self.context.run.seed, turn.iteration
            )
        state.plain |= {"uncertain": uncertain, "pending": chosen}
        said_threshold, said_value = extension_findings.RECORDED[p.criterion]
        for record in records:
            record |= {said_threshold: limit, said_value: measured[record["client"]]}
        shown = extension_findings.nats(limit, len(self.context.classes) if by_entropy else 0)
        line = f"{p.criterion} above {shown}: {extension.above(limit, measured, uncertain) or 'no client'}"
        elsewhere = "" if chosen == uncertain else f"; extended in their place: {', '.join(chosen)}"
        turn.notice(f"after iteration {turn.iteration + 1}, {line}{elsewhere}")
        return not uncertain and bool(p.stop_when_certain)

    def findings(self, history: History) -> Findings:
        """Return a section on the extensions of codebooks, with the names of drawn clients."""
        return extension_findings.findings(history, self.initial_size, self.parameters.extend == "random")

    def client_tensors(self, state: State, client: str) -> dict[str, torch.Tensor]:
        """Return the client's codebook, without the codewords that the client keeps."""
        codebook = self.visible(state, client)
        return {
            "codebook": codebook[..., : self.first_own_row(state, client), :]
            if self.kept_at_silos
            else codebook
        }
