"""UEFL: a shared codebook for all, more codewords for the clients that the model is uncertain about.

Source: Zhang, Cao and Liu, "Uncertainty-Based Extensible Codebook for Discrete Federated Learning in Heterogeneous Data Silos" (ICML 2025,
arXiv 2402.18888), with what its text leaves open or its code gets wrong settled as docs/uefl.md says.

A message of a quantised round has ``codebook [V, d]``, what its client sees. With the option ``new_codewords`` the client first finds
that many by k-means on its own features, and writes them into the codebook from row ``new_at`` on. It sends back ``codebook`` and
``usage [V]``, how often training assigned each codeword. An answer has ``block [v, d]`` and ``mass [v]``, k-means alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

import uefl_kernels

from .. import clustering, metrics
from ..aggregation import CodewordMean, Mean, WeightedMean
from ..client.work import Batch, Work
from ..data.federation import Federation
from ..engines.base import Expected, Message, Reply
from ..errors import RunError, UserError
from ..findings import Findings, History
from ..models.net import Net
from ..seeds import derive
from ..server.turn import Turn
from ..uncertainty import Prediction, of_head
from . import base, extensions
from .base import Algorithm, Record, State, register

_EVALUATION_BATCH = 500
_PERPLEXITY_BATCH = 100  # images per batch of the published perplexity


class Codebook(base.Parameters):
    """Of a quantiser between encoder and head."""

    codewords: int = Field(32, ge=1, le=2**20, description="size of the shared codebook, and of every extension")
    segments: int = Field(
        1, ge=1, le=4096, description="equal parts that each feature vector is cut into before it is quantised; a divisor of its channels"
    )
    commitment: float = Field(0.25, ge=0, description="weight of the term that draws features to their codewords")
    gamma: float = Field(0.3, ge=0, description="a client is extended when its entropy exceeds (1 + gamma) times the reference")
    reference: Literal["min", "mean"] = Field("min", description="of the clients' entropies: the least, or their mean")
    stop_when_certain: bool = Field(
        True, description="end the arm when no client is above the threshold; `false`: go on, so that all arms take equally many steps"
    )


class Quantised(Algorithm):
    """The client half of algorithms with a codebook between encoder and head."""

    Parameters: Any = Codebook
    ops = ("vq",)
    columns: ClassVar = {
        "perplexity": "how many codewords are in effective use, the mean over batches of 100 images",
        "codewords": "size of the codebook that a client sees",
    }
    marks: ClassVar = {"extended": "codewords added to the client (decided on held-out training images; shown here: the test split)"}
    levels: ClassVar = {"threshold": ("entropy", "the threshold of each decision about extensions")}

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """The segments must divide the features, and k-means needs as many features as codewords."""
        if not isinstance(net, Net) or not hasattr(net.head, "fc1"):
            raise UserError(f"arm {arm!r}: a codebook needs encoder = 'cnn', 'vgg16_bn' or 'resnet18'")
        segments, codewords = self.parameters.segments, self.parameters.codewords
        if net.dim % segments:
            raise UserError(f"key 'arms.{arm}.segments': expected a divisor of the {net.dim} channels of the encoder; got {segments}")
        few = min(federation.silos, key=lambda silo: silo.sizes.train)
        per_image = net.positions * segments
        if few.sizes.train * per_image < codewords:
            rows = f"{few.sizes.train} training images of {per_image} feature vectors"
            raise UserError(f"silo {few.name!r} has {rows}, too few for {codewords} codewords; lower codewords")

    def start(self, length: int, *place: int) -> torch.Tensor:
        """Codewords ``[v, length]`` to begin with, N(0, 1)."""
        generator = torch.Generator().manual_seed(derive(self.context.seed, "codebook", *place))
        return torch.randn(self.parameters.codewords, length, generator=generator)

    def length(self, net: torch.nn.Module) -> int:
        """Elements of a codeword."""
        assert isinstance(net, Net)
        return int(net.dim // self.parameters.segments)

    # --- the client's half -----------------------------------------------------------------------------------------

    def before_round(self, work: Work) -> None:
        """Find new codewords where they are asked for; the codebook is trained with the network."""
        codebook = work.message.tensors.get("codebook")
        if codebook is None:  # a round without quantiser
            return
        options = work.message.options
        if options.get("new_codewords"):
            block, _ = self.new_codewords(work, codebook.shape[1])
            at = int(options["new_at"])
            codebook = torch.cat([codebook[:at], block, codebook[at + len(block) :]])
        work.trained["codebook"] = codebook.detach().clone().requires_grad_()
        work.memory["usage"] = torch.zeros(len(codebook), dtype=torch.int64, device=codebook.device)

    def answer(self, work: Work) -> dict[str, torch.Tensor]:
        """New codewords of the client's own features, and how many features each stands for."""
        block, mass = self.new_codewords(work, int(work.message.options["length"]))
        return {"block": block, "mass": mass}

    @torch.no_grad()
    def new_codewords(self, work: Work, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k-means on the features of the training images: centroids ``[v, d]`` and masses ``[v]``."""
        net, options = _net(work), work.message.options
        net.eval()
        features = []
        for images in work.train.images.split(_EVALUATION_BATCH):
            with work.amp():
                features.append(net.tokens(work.workspace.normalize(images)).float())
        block, mass = clustering.kmeans(torch.cat(features).reshape(-1, length), int(options["new_codewords"]), int(options["kmeans_seed"]))
        return block.to(work.workspace.device), mass.to(work.workspace.device)

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Cross-entropy, and the losses of the codebook and of the commitment to it."""
        codebook = work.trained.get("codebook")
        if codebook is None:
            return super().loss(work, batch)
        with work.amp():
            logits, out = _net(work).quantized(batch.images, codebook, self.parameters.commitment)
        work.memory["usage"] += out.counts
        work.note("vq_loss", out.loss, len(batch.labels))
        return work.cross_entropy(logits, batch.labels) + out.loss

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Also the codebook, and how it was used."""
        if "codebook" not in work.trained:
            return super().update(work)
        return super().update(work) | {"codebook": work.trained["codebook"].detach(), "usage": work.memory["usage"]}

    def passes(self, work: Work) -> int:
        """With dropout on."""
        return work.passes

    def predict(self, work: Work, images: torch.Tensor) -> Prediction:
        """From quantised features; ``extra["codes"]`` are the codewords of each image."""
        net, codebook = _net(work), work.trained.get("codebook", work.message.tensors.get("codebook"))
        with work.amp():
            tokens = net.tokens(images)
            if codebook is None:
                return of_head(net.head, tokens, self.passes(work))  # type: ignore[arg-type]
            out = uefl_kernels.vq(tokens, codebook.detach(), commitment_weight=self.parameters.commitment)
            prediction = of_head(net.head, out.quantized, self.passes(work))  # type: ignore[arg-type]
        return prediction._replace(extra={"codes": out.indices.flatten(1)})

    def measure(self, work: Work, extras: list[dict[str, torch.Tensor]], last: bool) -> Record:
        """Perplexity of the codewords in use, in batches of 100 images and over all; at the end of an iteration also their counts."""
        codebook = work.message.tensors.get("codebook")
        if codebook is None:
            return {}
        counts = torch.stack([counts_per_batch(extra["codes"], len(codebook)) for extra in extras])
        record: Record = {
            "perplexity": float(metrics.perplexity(counts).mean()),
            "perplexity_full": float(metrics.perplexity(counts.sum(1)).mean()),
        }
        return record | ({"usage": counts[0].sum(0).tolist()} if last else {})

    def findings(self, history: History) -> Findings | None:
        """Extensions."""
        return extensions.findings(history)

    def infer(self, net: torch.nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Behind the client's codebook."""
        assert isinstance(net, Net)
        return net.quantized(images, tensors["codebook"], 0.0)[0]


@register("uefl")
class UEFL(Quantised):
    """FedAvg of encoder and head around a quantiser whose codebook grows for uncertain clients."""

    class Parameters(Codebook):
        """Of UEFL."""

        extend: Literal["uncertain", "random", "all", "none"] = Field(
            "uncertain",
            description="whose codebooks grow after an iteration: `uncertain`: of the clients above the threshold; `random`: of as many, "
            "drawn; `all`: of every client; `none`: of nobody",
        )
        codebook_init: Literal["normal", "kmeans"] = Field(
            "normal", description="`normal`: N(0, 1); `kmeans`: on the features of all clients after a first round without quantiser"
        )
        usage_aware: bool = Field(
            True, description="average each codeword by how often each client used it; `false`: by the number of examples"
        )
        threshold: Literal["fixed", "current"] = Field(
            "fixed", description="`fixed`: set after the first iteration; `current`: from the current entropies, each time"
        )
        ext_share: Literal["none", "group"] = Field(
            "none", description="`none`: extensions are private to a client; `group`: one for all clients extended at the same time"
        )

    # --- codebooks -------------------------------------------------------------------------------------------------

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Also the blocks of codewords, their members, and who is to be extended.

        ``uncertain``: clients above the threshold after the iteration before this one; ``pending``: those of them that have yet to get
        their new codewords; ``extended``: clients that got new codewords in the last round.
        """
        state = super().server_state(values, buffers, net)
        state.tensors["block.0"] = self.start(self.length(net)).to(values.device)
        state.plain = {"members": [list(self.context.clients)], "threshold": None, "uncertain": [], "pending": [], "extended": []}
        return state

    def visible(self, state: State, client: str) -> torch.Tensor:
        """The codebook of one client, ``[V, d]``: shared codewords first, then its extensions in the order of their coming."""
        blocks = [state.tensors[f"block.{i}"] for i, names in enumerate(state.plain["members"]) if i == 0 or client in names]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def quantized(self, round: int) -> bool:
        """False only in the first round of ``codebook_init = "kmeans"``, whose features the codebook is made of."""
        return not (self.parameters.codebook_init == "kmeans" and round == 0)

    def extend(self, state: State, clients: list[str], block: torch.Tensor) -> None:
        """Show clients a new block."""
        state.tensors[f"block.{len(state.plain['members'])}"] = block
        state.plain["members"].append(sorted(clients))

    def pooled_kmeans(self, state: State, clients: Iterable[str], purpose: str, turn: Turn) -> torch.Tensor:
        """One block for several clients, ``[v, d]``: k-means on each one's features, then on the weighted centroids of all."""
        count, length = self.parameters.codewords, state.tensors["block.0"].shape[1]
        centroids, masses, messages = [], [], {}
        for name in clients:
            message = super().broadcast(state, name, turn)
            seed = derive(self.context.seed, purpose, turn.iteration, name)
            message.options |= {"new_codewords": count, "length": length, "kmeans_seed": seed}
            message.expects = {"block": Expected((count, length), torch.float32), "mass": Expected((count,), torch.float32)}
            messages[name] = message
        for reply in turn.ask(messages):
            if reply.error is not None:
                raise RunError(f"{reply.client} could not find new codewords: {reply.error}")
            centroids.append(reply.tensors["block"])
            masses.append(reply.tensors["mass"])
        seed = derive(self.context.seed, purpose, turn.iteration)
        block, _ = clustering.kmeans(torch.cat(centroids), count, seed, torch.cat(masses))
        return block.to(state.tensors["values"].device)

    # --- a turn ----------------------------------------------------------------------------------------------------

    def prepare(self, state: State, turn: Turn) -> None:
        """The codebooks and extensions that need an exchange of their own."""
        state.scratch |= {"new": {}, "growing": []}
        if turn.round == 1 and turn.trained == 1 and self.parameters.codebook_init == "kmeans":
            state.tensors["block.0"] = self.pooled_kmeans(state, self.context.clients, "codebook", turn)
        pending = state.plain["pending"]
        if turn.train and pending and self.parameters.ext_share == "group":
            self.extend(state, pending, self.pooled_kmeans(state, pending, "extend", turn))
            state.scratch["growing"], state.plain["pending"] = list(pending), []

    def broadcast(self, state: State, client: str, turn: Turn) -> Message:
        """The client's own codebook with it; and for a private extension, the order to make one."""
        message = super().broadcast(state, client, turn)
        if self.quantized(turn.round):
            codebook = message.tensors["codebook"] = self.visible(state, client)
            rows = len(codebook)
            if turn.train and client in state.plain["pending"]:
                seed = derive(self.context.seed, "extend", turn.iteration, client)
                message.options |= {"new_codewords": self.parameters.codewords, "new_at": rows, "kmeans_seed": seed}
                rows += self.parameters.codewords
            message.expects["codebook"] = Expected((rows, codebook.shape[1]), codebook.dtype)
            message.expects["usage"] = Expected((rows,), torch.int64)
        return message

    def unsound(self, message: Message, reply: Reply) -> str | None:
        """Counts are not negative."""
        return negative_usage(reply)

    def averages(self, state: State) -> dict[str, Mean]:
        """One average per block."""
        mean = CodewordMean if self.parameters.usage_aware else WeightedMean
        blocks = {name: mean(tensor) for name, tensor in state.tensors.items() if name.startswith("block.")}
        return super().averages(state) | blocks

    def add(self, state: State, averages: dict[str, Mean], update: Reply) -> None:
        """Each block's part of the client's codebook goes to that block's average; what is behind them is a new block."""
        for name in ("values", "buffers"):
            averages[name].add(update.tensors[name], self.weight(update))
        if "codebook" not in update.tensors:
            return
        codebook, usage, at = update.tensors["codebook"], update.tensors["usage"], 0
        for i, names in enumerate(state.plain["members"]):
            if update.client in names:
                part = slice(at, at := at + len(state.tensors[f"block.{i}"]))
                averages[f"block.{i}"].add(codebook[part], usage[part] if self.parameters.usage_aware else self.weight(update))
        if at < len(codebook):
            state.scratch["new"][update.client] = codebook[at:].clone()
            state.scratch["growing"].append(update.client)
            state.plain["pending"].remove(update.client)

    def aggregate(self, state: State, averages: dict[str, Mean]) -> None:
        """Blocks whose every member was refused stay as they are."""
        super().aggregate(state, averages)
        for client, block in state.scratch["new"].items():
            self.extend(state, [client], block)
        state.plain["extended"] = state.scratch["growing"]

    def record(self, state: State, client: str, turn: Turn) -> Record:
        """With the size of the client's codebook, and whether it has just grown."""
        return {"codewords": len(self.visible(state, client)), "extended": client in state.plain["extended"]}

    def end_iteration(self, state: State, records: list[Record], turn: Turn) -> bool:
        """Extend client k next iff e_k > (1 + gamma) * reference, e the entropies on the clients' held-out data (eq. 7)."""
        if self.parameters.extend in ("all", "none"):
            state.plain["pending"] = list(self.context.clients) if self.parameters.extend == "all" else []
            return False
        entropy = {record["client"]: record["holdout_entropy"] for record in records}
        if state.plain["threshold"] is None or self.parameters.threshold == "current":
            state.plain["threshold"] = threshold(entropy, self.parameters)
        limit = state.plain["threshold"]
        uncertain = [name for name, e in sorted(entropy.items()) if e > limit]
        chosen = list(uncertain) if self.parameters.extend == "uncertain" else self.drawn(len(uncertain), turn)
        state.plain |= {"uncertain": uncertain, "pending": chosen}
        if self.parameters.extend == "uncertain":
            for record in records:
                record |= {"threshold": limit, "deciding_entropy": entropy[record["client"]]}
        shown = extensions.nats(limit, len(self.context.classes))
        line = f"after iteration {turn.iteration + 1}, entropy above {shown}: {above(limit, entropy, uncertain) or 'no client'}"
        turn.notice(line if chosen == uncertain else f"{line}; extended in their place: {', '.join(chosen)}")
        return not uncertain and bool(self.parameters.stop_when_certain)

    def drawn(self, count: int, turn: Turn) -> list[str]:
        """So many clients at random, sorted; the same in every member of an ensemble."""
        seed = derive(self.context.run.seed, "extended", turn.iteration)
        order = torch.randperm(len(self.context.clients), generator=torch.Generator().manual_seed(seed))
        return sorted(self.context.clients[i] for i in order[:count].tolist())

    def client_tensors(self, state: State, client: str) -> dict[str, torch.Tensor]:
        """What the client sees."""
        return {"codebook": self.visible(state, client)}


def threshold(entropy: Mapping[str, float], parameters: Any) -> float:
    """The entropy above which a client is extended (eq. 7), from those of the clients."""
    reference = min(entropy.values()) if parameters.reference == "min" else sum(entropy.values()) / len(entropy)
    return float((1 + parameters.gamma) * reference)


def above(threshold: float, entropy: Mapping[str, float], names: list[str]) -> str:
    """These clients' entropies in units of the least one, in as many digits as tell them from the threshold."""
    least = min(entropy.values())
    if least == 0:
        return ", ".join(names)

    def digits(name: str) -> int:
        return next((d for d in range(2, 15) if f"{entropy[name] / least:.{d}f}" != f"{threshold / least:.{d}f}"), 15)

    return ", ".join(f"{name} ({entropy[name] / least:.{digits(name)}f} x least)" for name in names)


def negative_usage(reply: Reply) -> str | None:
    """Counts are not negative."""
    usage = reply.tensors.get("usage")
    return "usage has negative counts" if usage is not None and bool((usage < 0).any()) else None


def counts_per_batch(indices: torch.Tensor, codewords: int) -> torch.Tensor:
    """[batches, V]: how often each batch of 100 images uses each codeword; indices [N, tokens]."""
    batch = torch.arange(len(indices), device=indices.device) // _PERPLEXITY_BATCH
    flat = (indices + codewords * batch[:, None]).flatten()
    batches = math.ceil(len(indices) / _PERPLEXITY_BATCH)
    counts = torch.zeros(batches * codewords, dtype=torch.int64, device=indices.device)
    return counts.index_add_(0, flat, torch.ones_like(flat)).view(batches, codewords)


def _net(work: Work) -> Net:
    assert isinstance(work.net, Net)
    return work.net
