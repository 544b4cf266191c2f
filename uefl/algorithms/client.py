"""A client's side of a round: measure the model it is sent, find new codewords, train; whatever the request asks for.

Request tensors: ``values`` [P], ``statistics`` [Q] (the flat model), ``codebook`` [V, d] (what this client sees; absent in
arms without quantiser).

Request options, carried out in this order:

=================  ===========================================================================================
``evaluate``       measure the model as sent; metrics of the test split, and the entropy of the holdout split
``usage``          with evaluate: also the count of every codeword on the test split
``new_codewords``  k-means with this many clusters on the training features of the model as sent ...
``new_at``         ... whose centroids are written into the codebook from this row on, enlarging it where needed
``train``          local training with a fresh optimizer
=================  ===========================================================================================

with ``round`` and ``seed``, which make every random draw. Reply tensors: ``values``, ``statistics``, ``codebook``,
``usage`` [V] (how often training assigned each codeword) after training; ``block`` and ``mass`` after k-means alone.

The requests of the members of an ensemble come as one (``engines.base.join``). They are measured together, perplexity as a mean
over them and ``usage`` of the first; all else is done for each, and its tensors go back under the number of the member.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch

from .. import clustering, metrics
from ..config import Config
from ..data.sets import SetFederation
from ..data.silo import Federation, Silo, Split
from ..engines.base import Reply, Request, number, split
from ..models.flat import FlatModule
from ..models.net import Head, Net
from ..models.saved import normalization
from ..seeds import derive
from ..uncertainty import Prediction, ensemble, estimate

_EVALUATION_BATCH = 500
_PERPLEXITY_BATCH = 100  # images per batch of the published perplexity


class Device:
    """What all clients on one device share: the resident model, the precision, the normalisation."""

    def __init__(self, config: Config, federation: Federation | SetFederation, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._shape = federation.image_shape, len(federation.classes)
        self.net = self._network(config.seed)
        self.flat = FlatModule(self.net)
        self.autocast = _use_bf16(config.precision, device)
        mean, std = normalization(config, federation.mean, federation.std)
        self._mean, self._std = mean.to(device), std.to(device)

    def start(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters ``[P]`` and statistics ``[Q]`` of a new network; the seed of the run gives those that the resident one began with."""
        flat = FlatModule(self._network(seed))
        return flat.values.detach(), flat.statistics

    def _network(self, seed: int) -> Net:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            return Net(self.config, *self._shape).to(self.device)

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 [B, C, H, W] -> float32, channels-last."""
        return ((images - self._mean) / self._std).contiguous(memory_format=torch.channels_last)

    def amp(self) -> torch.autocast:
        """The autocast context of every forward pass."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast)


class Client:
    """One silo on one device; callable with a request."""

    def __init__(self, silo: Silo, device: Device) -> None:
        self.name = silo.name
        self._device = device
        self._train, self._test = silo.train.to(device.device), silo.test.to(device.device)
        self._holdout = self._test if silo.holdout is silo.test else silo.holdout.to(device.device)

    def __call__(self, request: Request) -> Reply:
        """Do the work; see the module's docstring."""
        members, device = split(request), self._device.device
        options = members[0].options
        reply = Reply(self.name, examples=len(self._train))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if options.get("evaluate"):
                torch.manual_seed(derive(int(options["seed"]), "evaluate", int(options["round"]), self.name))
                reply.metrics = self._evaluate(members, bool(options.get("usage")))
            if len(members) == 1:
                reply.tensors, loss = self._work(request)
            else:  # in turns on the one resident model, so what a member leaves there has to be copied
                work = [({name: t.clone() for name, t in tensors.items()}, loss) for tensors, loss in map(self._work, members)]
                reply.tensors, loss = number([tensors for tensors, _ in work]), statistics.fmean(loss for _, loss in work)
            if options.get("train"):
                reply.metrics["train_loss"] = loss
        return reply

    def _work(self, member: Request) -> tuple[dict[str, torch.Tensor], float]:
        """New codewords and training, as asked for: tensors of the reply, some of them the resident model's own, and the training loss."""
        options, codebook = member.options, self._load(member)
        tensors: dict[str, torch.Tensor] = {}
        loss = 0.0
        if options.get("new_codewords"):
            block, mass = self._new_codewords(int(options["new_codewords"]), int(options["kmeans_seed"]))
            if codebook is not None:
                codebook = _write(codebook, block, int(options["new_at"]))
            tensors = {"block": block, "mass": mass}
        if options.get("train"):
            torch.manual_seed(derive(int(options["seed"]), "train", int(options["round"]), self.name))
            tensors, loss = self._fit(codebook)
        return tensors, loss

    def _load(self, member: Request) -> torch.Tensor | None:
        """Put a model where it can run; its codebook."""
        self._device.flat.set(member.tensors["values"], member.tensors["statistics"])
        return member.tensors.get("codebook")

    def _fit(self, codebook: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], float]:
        device, config, n = self._device, self._device.config, len(self._train)
        codebook = None if codebook is None else codebook.detach().clone().requires_grad_()
        usage = None if codebook is None else torch.zeros(len(codebook), dtype=torch.int64, device=device.device)
        parameters = [device.flat.values] if codebook is None else [device.flat.values, codebook]
        optimizer = torch.optim.Adam(parameters, lr=config.lr, fused=True)
        order = torch.stack([torch.randperm(n) for _ in range(config.local_epochs)]).to(device.device)
        total = torch.zeros((), device=device.device)
        device.net.train()
        for epoch in order:
            for batch in epoch.split(config.batch_size):
                images, labels = device.normalize(self._train.images[batch]), self._train.labels[batch]
                optimizer.zero_grad(set_to_none=False)
                with device.amp():
                    logits, out = device.net(images, codebook, config.commitment)
                loss = torch.nn.functional.cross_entropy(logits.float(), labels)
                if out is not None and usage is not None:
                    loss = loss + out.loss
                    usage += out.counts
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(batch)
        tensors = {"values": device.flat.values.detach(), "statistics": device.flat.statistics}
        if codebook is not None and usage is not None:
            tensors |= {"codebook": codebook.detach(), "usage": usage}
        return tensors, float(total) / order.numel()

    @torch.no_grad()
    def _evaluate(self, members: list[Request], with_usage: bool) -> dict[str, float | list[int]]:
        test = self._measure(self._test, members)
        holdout = test if self._holdout is self._test else self._measure(self._holdout, members)
        probs = test.prediction.probs
        values = {
            "accuracy": metrics.accuracy(probs, self._test.labels),
            "entropy": test.prediction.entropy.double().mean(),
            "entropy_deterministic": test.prediction.entropy_deterministic.double().mean(),
            "mutual_info": test.prediction.mutual_info.double().mean(),
            "holdout_accuracy": metrics.accuracy(holdout.prediction.probs, self._holdout.labels),
            "holdout_entropy": holdout.prediction.entropy.double().mean(),
            "nll": metrics.nll(probs, self._test.labels),
            "ece": metrics.ece(probs, self._test.labels),
            "brier": metrics.brier(probs, self._test.labels),
        }
        if test.counts is not None:
            values["perplexity"] = metrics.perplexity(test.counts).mean()
            values["perplexity_full"] = metrics.perplexity(test.counts.sum(1)).mean()
        result: dict[str, float | list[int]] = dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
        if with_usage and test.counts is not None:
            result["usage"] = test.counts[0].sum(0).tolist()
        return result

    def _measure(self, split: Split, members: list[Request]) -> _Outcome:
        outcomes = [self._predict(split, self._load(member)) for member in members]
        counts = [outcome.counts for outcome in outcomes if outcome.counts is not None]
        return _Outcome(ensemble([outcome.prediction for outcome in outcomes]), torch.cat(counts) if counts else None)

    def _predict(self, split: Split, codebook: torch.Tensor | None) -> _Outcome:
        """Of the model that is loaded."""
        device, config = self._device, self._device.config
        device.net.eval()
        assert isinstance(device.net.head, Head)  # as the configuration requires of arms on silos
        parts: list[Prediction] = []
        chosen: list[torch.Tensor] = []
        for images in split.images.split(_EVALUATION_BATCH):
            with device.amp():
                tokens, out = device.net.quantize(device.net.tokens(device.normalize(images)), codebook, config.commitment)
                parts.append(estimate(device.net.head, tokens, config))
            if out is not None:
                chosen.append(out.indices.flatten(1))
        prediction = Prediction(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))
        if codebook is None:
            return _Outcome(prediction, None)
        return _Outcome(prediction, _counts_per_batch(torch.cat(chosen), len(codebook))[None])

    @torch.no_grad()
    def _new_codewords(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._device
        device.net.eval()
        features = []
        for images in self._train.images.split(_EVALUATION_BATCH):
            with device.amp():
                features.append(device.net.tokens(device.normalize(images)).float())
        rows = torch.cat(features).reshape(-1, device.net.codeword_length)
        block, mass = clustering.kmeans(rows, count, seed)
        return block.to(device.device), mass.to(device.device)


class _Outcome(NamedTuple):
    prediction: Prediction
    counts: torch.Tensor | None  # [members, batches of 100 images, V]


def _counts_per_batch(indices: torch.Tensor, codewords: int) -> torch.Tensor:
    """indices [images, tokens] -> how often each batch of 100 images used each codeword, [batches, V]."""
    batch = torch.arange(len(indices), device=indices.device) // _PERPLEXITY_BATCH
    flat = (indices + batch[:, None] * codewords).flatten()
    batches = -(-len(indices) // _PERPLEXITY_BATCH)
    return (
        torch.zeros(batches * codewords, dtype=torch.int64, device=indices.device)
        .index_add_(0, flat, torch.ones_like(flat))
        .view(batches, codewords)
    )


def _write(codebook: torch.Tensor, block: torch.Tensor, at: int) -> torch.Tensor:
    """The codebook with ``block`` in rows ``at`` and on; rows behind the end are added."""
    return torch.cat([codebook[:at], block, codebook[at + len(block) :]])


def _use_bf16(precision: str, device: torch.device) -> bool:
    """bfloat16 pays where the hardware multiplies it in matrix units: AMX on a CPU, tensor cores on a GPU."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_amx_tile_supported()
