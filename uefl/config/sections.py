"""The sections of a configuration except ``[data]``, which is ``uefl.data.settings.Data``."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from ..fields import Section


class RunSection(Section):
    """The settings that all arms share: seeds, precision, participation, measurements and guarantees."""

    seed: int = Field(0, ge=0, lt=2**31)
    """starting weights, order of batches, dropout, participants, and draws of the data"""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads; 0: one for a small network, otherwise torch's number; results repeat bit for bit for the
    same number of threads, and on a GPU for the same kind of GPU"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """`bf16` (autocast), `fp32`, or `auto`: bfloat16 if the hardware has bfloat16 products (AMX, AVX512_BF16,
    tensor cores); the run folder records the choice, and a resumed run uses it again"""
    cuda_graphs: bool = False
    """on a GPU: record a client's step once in a turn and replay it, so that all kernels of the step are
    launched together; no effect for algorithms with varying steps"""
    clients_at_once: int = Field(1, ge=1, le=10_000)
    """clients that this process trains at once, for a GPU or a tiny network: clients with batches of the same
    sizes take each step in one batched network; the results differ by rounding"""
    participation: float = Field(1.0, gt=0, le=1)
    """share of the clients that train in a round, drawn for every round"""
    joins: dict[str, Annotated[int, Field(ge=2)]] = Field({})
    """clients that join later, by name, with their first training round, such as `{ silo-8 = 9 }`; the client
    also measures the model of the round before"""
    evaluation: float = Field(1.0, gt=0, le=1)
    """share of the clients that measure the model of a round, drawn for every round; means, decisions and the
    quorum cover these clients"""
    quorum: float = Field(1.0, gt=0, le=1)
    """share of the participants that must return a valid update; otherwise the run ends with an error"""
    deadline: float = Field(0.0, ge=0)
    """seconds after which clients of a round are rejected (they count against the quorum): in one process the
    clients that have not begun, on every other engine the clients that have not replied; 0: no limit"""
    max_update_norm: float = Field(0.0, ge=0)
    """reject an update if its L2 distance to the sent values, over all returned tensors, is larger than this;
    0: no limit"""
    aggregation: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    """average of updates: the `mean`, or a rule that tolerates malicious clients: `median` and `trimmed_mean`
    of each element, or `krum`, the update closest to the others. With these rules clients have equal weight,
    and the server keeps every update of a round: the memory grows with clients times parameters"""
    attackers: int = Field(0, ge=0, le=1_000_000)
    """number a of clients that may be malicious, for `trimmed_mean`, which needs more than 2a clients, and
    `krum`, which needs 2a + 3"""
    privacy: Literal["none", "central", "local"] = "none"
    """differential privacy of whole clients: the server adds noise to the sum of a round (`central`), or each
    client to its update (`local`); clients have equal weight, and with `central` each takes part with the
    probability `participation`"""
    clip_norm: float = Field(1.0, gt=0)
    """with `privacy`: longer updates are clipped to this L2 norm"""
    noise_multiplier: float = Field(1.0, ge=0.01, le=1000)
    """with `privacy`: standard deviation of the noise, as a multiple of `clip_norm`"""
    delta: float = Field(1e-5, gt=0, lt=1)
    """with `privacy`: the delta of the reported epsilon; choose it well below 1 / clients"""
    max_epsilon: float = Field(0.0, ge=0)
    """with `privacy`: largest epsilon; an arm ends before the round that would exceed it; 0: no limit"""
    uncertainty: Literal["mc_dropout", "ensemble"] = "mc_dropout"
    """`mc_dropout`: the entropy over passes with dropout on; `ensemble`: over separately trained models,
    dropout off"""
    passes: int = Field(20, ge=1, le=100_000)
    """draws for a prediction: forward passes with dropout on, or the algorithm's own samples; refused with an
    ensemble"""
    members: int = Field(5, ge=2, le=1000)
    """models of an ensemble; each takes as long to train as a separate run; refused without an ensemble"""
    select: Literal["last", "validation", "holdout"] = "last"
    """the saved model: the model of the `last` round; for arms on unlabeled sets, the best model on the
    server's `validation` images; for other arms, the model with the best mean accuracy on the clients'
    `holdout` images, and the results are those of its round"""
    personalized: bool = False
    """also measure every participant's own model after its training of the round"""
    private_mean: bool = True
    """measure the global model with the mean of the clients' private layers; for this, the clients send these
    layers to the server, so silos at a SuperLink refuse it"""
    metrics: tuple[str, ...] = ()
    """further metrics of the test predictions, listed below; each client computes them, and a report has the
    mean, weighted by the number of test inputs"""
    target_accuracy: float = Field(0.0, ge=0, le=1)
    """report the first round with at least this mean accuracy; 0: none"""


class Model(Section):
    """The network, for algorithms without a network of their own."""

    encoder: str = Field("cnn", min_length=1)
    """name of a network, listed below, or `given`: the network in `uefl.train(model=...)`"""
    pretrained: bool | str = False
    """ImageNet weights, from torchvision's cache or from the file of this name; nothing is downloaded; gray
    images become three equal channels"""
    pooled: bool = False
    """one feature vector per image, the mean over the positions of the encoder's map, instead of one per
    position"""
    norm_layer: Literal["batch", "group"] = "batch"
    """`group`: group norm, without running statistics, instead of every batch norm; not for pretrained or
    given networks"""
    frozen_batch_norm: bool = False
    """batch norm uses its running statistics in training, too, for example with pretrained weights; its
    scales and shifts are trained, and the buffers of the network do not change"""
    width: int = Field(128, ge=1, le=4096)
    """channels of the first layer group; later groups grow in proportion"""
    hidden: int = Field(512, ge=1, le=65_536)
    """hidden units of the classifier"""
    dropout: float = Field(0.1, ge=0, lt=1)
    """rate of the dropout before the last layer"""
    logit_dropout: bool = False
    """a second dropout on the logits, for published results; it limits the accuracy of dropout passes"""


class Training(Section):
    """The local training of the clients."""

    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """every round starts with a new optimizer"""
    lr: float = Field(1e-4, gt=0)
    """learning rate"""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """over the rounds of a run: `constant`, or from `lr` down to nearly 0 along half a cosine"""
    momentum: float = Field(0.0, ge=0, lt=1)
    """only for `sgd`"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay of the optimizer: added to the gradient; with `adamw`, separate from the gradient"""
    batch_size: int = Field(1024, ge=1)
    """training images in a batch"""
    rounds: tuple[Annotated[int, Field(ge=1)], ...] = Field((20, 10, 10, 10, 10), min_length=1)
    """number of rounds of each iteration; an algorithm may change the model between two iterations"""
    max_iterations: int = Field(0, ge=0)
    """limit on iterations; if it is larger than the length of `rounds`, the last entry of `rounds` repeats;
    0: the length of `rounds`"""
    local_epochs: int = Field(20, ge=1)
    """epochs of a client in a round, over its training images"""
    local_steps: int = Field(0, ge=0)
    """steps of every client in a round, instead of `local_epochs`; 0: use `local_epochs`"""

    def lr_in(self, round: int) -> float:
        """Return the learning rate of a round, counted from 0, or of the last round for a later one."""
        if self.lr_schedule == "constant":
            return self.lr
        rounds = sum(self.iterations())
        return self.lr * (1 + math.cos(math.pi * min(round, rounds - 1) / rounds)) / 2

    def iterations(self) -> list[int]:
        """Return the number of rounds of each iteration, with ``max_iterations`` applied."""
        cap = self.max_iterations or len(self.rounds)
        return [self.rounds[min(i, len(self.rounds) - 1)] for i in range(cap)]
