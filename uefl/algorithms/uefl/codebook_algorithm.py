"""The client half of algorithms with a codebook between encoder and head.

A message of a quantized round has the client's ``codebook [..., V, d]``. If codewords are moving averages, it
also has ``moving [..., V, d + 1]``. With the option ``new_codewords`` the client first runs k-means for this
many codewords on its features, and writes them into the codebook from row ``new_at``. It returns the
``codebook`` or ``moving``, and ``usage [..., V]``, the number of assignments of each codeword in training.
The reply to an ask has ``part [..., v, d]`` and ``mass [..., v]``, from k-means only, or with the option
``untested`` the ``gain`` of the last codewords.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from ...aggregation import LARGEST
from ...client.work import Batch, Work
from ...data.federation import Federation, LabeledData
from ...engines.base import Message, Reply
from ...errors import UnfitClient, UserError
from ...findings import Findings, History
from ...models.custom import CustomNet
from ...models.heads import Head
from ...models.net import Net, TokenNet
from ...models.networks.base import with_usual_head
from ...seeds import derive
from ...uncertainty import Prediction, of_head
from ..base import Algorithm, ModelSpec, Record, State
from . import clustering, extension_findings, unseen
from .parameters import CodebookParameters
from .quantizer import Quantizer, codewords, moved, moving_start, placed
from .usage import perplexity

_EVALUATION_BATCH = 500
_ROUNDING = 1e-5  # relative error of a sum in float32
_PERPLEXITY_BATCH = 100  # images per batch of the published perplexity


class CodebookAlgorithm(Algorithm):
    """See the module's docstring."""

    Parameters: Any = CodebookParameters
    ops = ("vq",)
    columns: ClassVar = {
        "perplexity": (
            "number of codewords in effect, exp of the entropy of their usage; mean over batches of 100"
            " images"
        ),
        "codewords": "size of the codebook that a client sees",
        "vq_loss": (
            "loss of the quantizer, both terms: mean over the images of the round, each in its training step"
        ),
    }
    details = frozenset({"perplexity_full"})
    server_columns = extension_findings.COLUMNS
    marks: ClassVar = {
        "extended": ("codewords added to the client (decided on holdout images; shown here: the test split)")
    }
    levels: ClassVar = {"threshold": ("entropy", "the threshold of each decision about extensions")}

    @property
    def quantizer(self) -> Quantizer:
        """Return the quantizer of the parameters."""
        return Quantizer(self.parameters.commitment)

    @property
    def initial_size(self) -> int:
        """Return the number of initial codewords, over all segments."""
        return int(
            self.parameters.codewords * (self.parameters.segments if self.quantizer.segment_codebooks else 1)
        )

    @property
    def static_step(self) -> bool:
        """Return False for moving averages: each step makes a new tensor."""
        return not self.quantizer.decay

    stacked_step = static_step

    def build_model(self, spec: ModelSpec) -> torch.nn.Module:
        """Build a network in two parts, also from one given in Python."""
        net = super().build_model(spec)
        return net if spec.given is None else CustomNet(net, spec.shape, spec.inputs)

    def check(self, federation: Federation, arm: str, net: torch.nn.Module) -> None:
        """Refuse a number of segments that does not divide the features, and too few features for k-means."""
        super().check(federation, arm, net)
        if not isinstance(net, TokenNet) or (isinstance(net, Net) and not isinstance(net.head, Head)):
            raise UserError(
                f"arm {arm!r}: a codebook needs a network with the usual head: encoder = {with_usual_head()}"
            )
        segments = self.parameters.segments
        if net.dim % segments:
            raise UserError(
                f"key 'arms.{arm}.segments': expected a divisor of the {net.dim} channels of the encoder; got"
                f" {segments}"
            )
        few = min(federation.clients, key=lambda client: client.sizes.train)
        per_image = net.positions * (1 if self.quantizer.segment_codebooks else segments)
        if few.sizes.train * per_image < self.most_new():
            rows = f"{few.sizes.train} training images of {per_image} feature vectors"
            why = f"has {rows}, too few for {self.most_new()} new codewords; lower codewords"
            raise UnfitClient(few.name, why)

    def server_state(self, values: torch.Tensor, buffers: torch.Tensor, net: torch.nn.Module) -> State:
        """Return the state of FedAvg."""
        assert isinstance(net, TokenNet)
        self._rows_per_image = net.positions * self.parameters.segments
        return super().server_state(values, buffers, net)

    def rejection(self, message: Message, reply: Reply) -> str | None:
        """Reject counts that no training has, because they can be the weights of codewords."""
        training, reported = self.context.training, self.context.reported(reply)
        if "mass" in reply.tensors:
            return self._new_rejection(reply, reported * self._rows_per_image)
        usage, moving = reply.tensors.get("usage"), reply.tensors.get("moving")
        if usage is None or not usage.numel():  # every codeword is the client's own
            return None
        images = training.local_steps * training.batch_size or training.local_epochs * reported
        stages = math.ceil(usage.shape[-1] / (self.quantizer.stage or max(usage.shape[-1], 1)))
        most = images * self._rows_per_image * stages
        counts = usage.double().flatten() if moving is None else moving[..., -1].double().flatten()
        # one read from the device
        least, total, smallest, largest = torch.stack(
            [usage.min().double(), usage.double().sum(), counts.min(), counts.max()]
        ).tolist()
        if least < 0 or total > most:
            return f"usage has negative counts, or more than {most} together"
        if moving is not None and not (smallest >= 0 and largest <= most):
            return f"moving has a count below 0, or above {most}"
        return None

    def _new_rejection(self, reply: Reply, most: int) -> str | None:
        """Return why at most ``most`` feature vectors cannot have new codewords, or None if they can."""
        least, total = torch.stack([reply.tensors["mass"].min(), reply.tensors["mass"].sum()]).tolist()
        if least < 0 or not 0 < total <= most * (1 + _ROUNDING):
            return f"mass has negative elements, or not 1 to {most} together"
        largest = reply.magnitudes["part"]
        return f"part has an element of {largest:.3g}, more than {LARGEST:g}" if largest > LARGEST else None

    def most_new(self) -> int:
        """Return the largest number of codewords that k-means makes at once."""
        return int(self.parameters.codewords)

    def start(self, length: int, *place: int | str, count: int = 0) -> torch.Tensor:
        """Draw codewords ``[..., v, length]`` from N(0, 1), by default the initial number."""
        generator = torch.Generator().manual_seed(derive(self.context.seed, "codebook", *place))
        shape = [self.parameters.segments] if self.quantizer.segment_codebooks else []
        return torch.randn(*shape, count or self.parameters.codewords, length, generator=generator)

    def length(self, net: torch.nn.Module) -> int:
        """Return the number of elements of a codeword."""
        assert isinstance(net, TokenNet)
        return int(net.dim // self.parameters.segments)

    def codebook(self, work: Work) -> torch.Tensor | None:
        """Return the client's current codebook, or None without a quantizer."""
        known: torch.Tensor | None = work.trained.get(
            "codebook", work.memory.get("codebook", self.received(work))
        )
        return known

    def received(self, work: Work) -> torch.Tensor | None:
        """Return the codebook ``[..., V, d]`` with codewords that the client keeps, or None without one."""
        codebook, own = work.message.tensors.get("codebook"), work.private.get("codewords")
        if codebook is None or own is None:
            return codebook
        shared, drawn = codebook.tensor_split([int(work.message.options["own_at"])], -2)
        return torch.cat([shared, own, drawn], -2)

    # --- training ------------------------------------------------------------------------------------------

    def before_round(self, work: Work) -> None:
        """Compute the requested new codewords, and train the codebook with the network."""
        tensors, options = work.message.tensors, work.message.options
        codebook, moving = self.received(work), tensors.get("moving")
        if codebook is None:  # a round without quantizer
            return
        if options.get("new_codewords"):
            part, _ = self.new_codewords(work)
            codebook = placed(codebook, part, int(options["new_at"]))
            if moving is not None:
                moving = placed(moving, moving_start(part), int(options["new_at"]))
        if moving is None:
            work.trained["codebook"] = codebook.detach().clone().requires_grad_()
            if self.quantizer.lr != 1:
                work.rates["codebook"] = self.quantizer.lr
        else:
            work.memory |= {"codebook": codebook, "moving": moving}
        work.memory["usage"] = torch.zeros(codebook.shape[:-1], dtype=torch.int64, device=codebook.device)

    def reply(self, work: Work) -> dict[str, torch.Tensor]:
        """Return new codewords and the number of features of each, or the gain of an extension."""
        if "untested" in work.message.options:
            return {"gain": self.gain(work)}
        part, mass = self.new_codewords(work)
        return {"part": part, "mass": mass}

    @torch.no_grad()
    def new_codewords(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codewords ``[..., v, d]`` and masses ``[..., v]`` by k-means on the client's features."""
        net, options = _net(work), work.message.options
        codebook = self.received(work) if self.quantizer.stage else None
        net.eval()
        features = []
        for images in work.train.images.split(_EVALUATION_BATCH):
            with work.amp():
                tokens = net.tokens(work.workspace.normalize(images))
                if codebook is not None:
                    tokens = tokens - self.quantizer(tokens, codebook).values
                features.append(tokens.float())
        rows = self.quantizer.rows(torch.cat(features), self.length(net))
        part, mass = clustering.kmeans(rows, int(options["new_codewords"]), int(options["kmeans_seed"]))
        return part.to(work.workspace.device), mass.to(work.workspace.device)

    @torch.no_grad()
    def gain(self, work: Work) -> torch.Tensor:
        """Return by how much the last ``untested`` codewords lower the mean cross-entropy of the holdout."""
        net, data, codebook = _net(work).eval(), work.data, self.received(work)
        assert isinstance(data, LabeledData)
        assert codebook is not None
        losses = []
        for seen in (codebook[..., : -int(work.message.options["untested"]), :], codebook):
            logits = [
                self.infer(net, work.workspace.normalize(images), {"codebook": seen})
                for images in data.holdout.images.split(_EVALUATION_BATCH)
            ]
            losses.append(F.cross_entropy(torch.cat(logits).double(), data.holdout.labels))
        return (losses[0] - losses[1]).float()

    def loss(self, work: Work, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy plus the codebook and commitment losses."""
        codebook, net, averages = self.codebook(work), _net(work), "moving" in work.memory
        if codebook is None:
            return super().loss(work, batch)
        with work.amp():
            out = self.quantizer(net.tokens(batch.images), codebook, with_sums=averages)
            logits = net.classify(out.values)
        work.memory["usage"] += out.counts
        if averages:
            moving = work.memory["moving"] = moved(work.memory["moving"], out, self.quantizer.decay)
            work.memory["codebook"] = codewords(moving, codebook)
        work.note("vq_loss", out.loss, len(batch.labels))
        total: torch.Tensor = work.cross_entropy(logits, batch.labels) + out.loss
        return total

    def update(self, work: Work) -> dict[str, torch.Tensor]:
        """Return the update of FedAvg, the codebook, and the usage of its codewords."""
        sent = super().update(work)
        if "moving" in work.memory:
            sent["moving"] = work.memory["moving"]
        elif "codebook" in work.trained:
            sent["codebook"] = work.trained["codebook"].detach()
        return sent | ({"usage": work.memory["usage"]} if "usage" in work.memory else {})

    # --- measuring -----------------------------------------------------------------------------------------

    def passes(self, work: Work) -> int:
        """Return the number of dropout passes of a prediction."""
        return work.passes

    def predict(self, work: Work, images: torch.Tensor) -> Prediction:
        """Predict from quantized features, with the positions of their codewords in ``extra["codes"]``."""
        net, codebook = _net(work), self.codebook(work)
        with work.amp():
            tokens = net.tokens(images)
            if codebook is None:
                return of_head(net.head, tokens, self.passes(work))
            out = self.quantizer(tokens, codebook.detach())
            prediction = of_head(net.head, out.values, self.passes(work))
            choices = unseen.choices(self.quantizer, net, tokens, work.message)
        return prediction._replace(extra={"codes": out.codes, **choices})

    def measure(self, work: Work, extras: list[dict[str, torch.Tensor]], last: bool) -> Record:
        """Return perplexities of batches of 100 images and of all, and counts at the end of an iteration."""
        codebook = self.received(work)
        if codebook is None:
            return {}
        counts = torch.stack(
            [counts_per_batch(extra["codes"], codebook.shape[:-1].numel()) for extra in extras]
        )
        means = torch.stack([perplexity(counts).mean(), perplexity(counts.sum(1)).mean()])
        record: Record = dict(zip(("perplexity", "perplexity_full"), means.tolist(), strict=True))
        # by codeword, then by segment; the codewords that all clients have come first
        usage = counts[0].sum(0).view(codebook.shape[:-1]).movedim(-1, 0).flatten()
        return record | unseen.measured(work, extras) | ({"usage": usage.tolist()} if last else {})

    def findings(self, history: History) -> Findings | None:
        """Return a section on the extensions of codebooks."""
        return extension_findings.findings(history, self.initial_size)

    def infer(
        self, net: torch.nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return logits ``[B, classes]`` from features quantized with the client's codebook."""
        assert isinstance(net, TokenNet)
        return net.classify(self.quantizer(net.tokens(images), tensors["codebook"]).values)

    def misfit(
        self, net: torch.nn.Module, images: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the mean squared quantization error ``[B]``."""
        assert isinstance(net, TokenNet)
        tokens = net.tokens(images)
        return (
            (tokens - self.quantizer(tokens, tensors["codebook"]).values).float().square().flatten(1).mean(1)
        )


def counts_per_batch(codes: torch.Tensor, codewords: int) -> torch.Tensor:
    """Return ``[batches, V]``, how often each 100 images of ``codes [N, n]`` use a codeword."""
    batch = torch.arange(len(codes), device=codes.device) // _PERPLEXITY_BATCH
    flat = (codes + codewords * batch[:, None]).flatten()
    batches = math.ceil(len(codes) / _PERPLEXITY_BATCH)
    counts = torch.zeros(batches * codewords, dtype=torch.int64, device=codes.device)
    return counts.index_add_(0, flat, torch.ones_like(flat)).view(batches, codewords)


def _net(work: Work) -> TokenNet:
    assert isinstance(work.net, TokenNet)
    return work.net
