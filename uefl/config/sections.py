"""The sections ``[run]``, ``[model]`` and ``[training]`` of a configuration; ``[data]`` is
``uefl.data.settings.Data``."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Keys with their types, ranges and meaning; anything else is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunSection(Section):
    """The settings that all arms share: seeds, precision, participation, measurements and guarantees."""

    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="starting weights, order of batches, dropout, participants, and draws of the data",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description=(
            "CPU threads, 0: one for a small network, else those of torch; results repeat bit for bit for one"
            " number of threads"
        ),
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description=(
            "`bf16` (autocast), `fp32`, or `auto`: bfloat16 where the hardware multiplies it (AMX,"
            " AVX512_BF16, tensor cores); the run folder names the choice, and a run that is resumed keeps it"
        ),
    )
    cuda_graphs: bool = Field(
        False,
        description=(
            "on a GPU: record a client's step once in a turn and replay it, which launches its kernels"
            " together; for algorithms whose steps are all the same (docs/scale.md), the others train as"
            " without it"
        ),
    )
    participation: float = Field(
        1.0, gt=0, le=1, description="share of the clients that train in a round, drawn anew for every round"
    )
    joins: dict[str, Annotated[int, Field(ge=2)]] = Field(
        {},
        description=(
            "clients that join later: by name, the first round that the client trains, such as"
            " `{ silo-8 = 9 }`; it also measures the model that it finds, of the round before"
        ),
    )
    evaluation: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "share of the clients that measure the model of a round, drawn anew for every round; means,"
            " decisions and the quorum are over these"
        ),
    )
    quorum: float = Field(
        1.0,
        gt=0,
        le=1,
        description=(
            "share of the clients asked that must return a sound update, or the run ends with an error"
        ),
    )
    deadline: float = Field(
        0.0,
        ge=0,
        description=(
            "seconds after which clients of a round are given up (they count against the quorum): in one"
            " process those that have not begun, on every other engine those that have not replied; 0: none"
        ),
    )
    max_update_norm: float = Field(
        0.0,
        ge=0,
        description=(
            "reject an update further than this from what was sent (L2 over all tensors that come back); 0:"
            " no bound"
        ),
    )
    aggregation: Literal["mean", "median", "trimmed_mean", "krum"] = Field(
        "mean",
        description=(
            "of updates: the `mean`, or a rule that bears clients which lie: `median` and `trimmed_mean` of"
            " each element, `krum`, the update nearest to the others; with these clients count alike, and the"
            " server keeps every update of a round: memory is clients times parameters"
        ),
    )
    attackers: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description=(
            "clients that may send anything, for `trimmed_mean` (needs more than 2 a) and `krum` (2 a + 3)"
        ),
    )
    privacy: Literal["none", "central", "local"] = Field(
        "none",
        description=(
            "differential privacy of whole clients: noise that the server adds to the sum of a round"
            " (`central`), or each client to its update (`local`); clients count alike, and with `central`"
            " each takes part with the probability `participation`"
        ),
    )
    clip_norm: float = Field(
        1.0, gt=0, description="with `privacy`: updates that are longer are cut to this L2 norm"
    )
    noise_multiplier: float = Field(
        1.0,
        ge=0.01,
        le=1000,
        description="with `privacy`: standard deviation of the noise, as a multiple of `clip_norm`",
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="with `privacy`: what epsilon is reported for; well below 1 / clients"
    )
    max_epsilon: float = Field(
        0.0,
        ge=0,
        description="with `privacy`: an arm ends before the round that would spend more; 0: no bound",
    )
    uncertainty: Literal["mc_dropout", "ensemble"] = Field(
        "mc_dropout",
        description=(
            "`mc_dropout`: the entropy over passes with dropout on; `ensemble`: over models that are trained"
            " apart, dropout off"
        ),
    )
    passes: int = Field(
        20,
        ge=1,
        le=100_000,
        description=(
            "draws of a prediction: forward passes with dropout on, or samples of the algorithm's own;"
            " refused with an ensemble"
        ),
    )
    members: int = Field(
        5,
        ge=2,
        le=1000,
        description=(
            "models of an ensemble, each takes as long to train as a run of its own; refused without an"
            " ensemble"
        ),
    )
    select: Literal["last", "validation"] = Field(
        "last",
        description=(
            "the model that is saved: of the `last` round, or the best on the server's `validation` images"
        ),
    )
    personalized: bool = Field(
        False, description="also measure every participant's own model after its training of the round"
    )
    private_mean: bool = Field(
        True,
        description=(
            "measure the global model of an algorithm whose clients keep layers of their own, with the mean"
            " of these layers; for that the layers leave the clients, so silos at a SuperLink do not do it"
        ),
    )
    metrics: tuple[str, ...] = Field(
        (),
        description=(
            "further metrics of the test predictions, listed below: computed by each client; a report has the"
            " mean, weighted by the test inputs of each client"
        ),
    )
    target_accuracy: float = Field(
        0.0, ge=0, le=1, description="report the first round whose mean accuracy reaches this; 0: none"
    )


class Model(Section):
    """The network, for algorithms that bring none."""

    encoder: str = Field(
        "cnn",
        min_length=1,
        description=(
            "name of a network, listed below, or `given`: the network that `uefl.train(model=...)` gets"
        ),
    )
    pretrained: bool | str = Field(
        False,
        description=(
            "ImageNet weights, from torchvision's cache, or from the file of this name; nothing is"
            " downloaded; gray images are as three equal channels"
        ),
    )
    pooled: bool = Field(
        False,
        description=(
            "one feature vector per image, the mean over the positions of the encoder's map, in the place of"
            " one per position"
        ),
    )
    norm_layer: Literal["batch", "group"] = Field(
        "batch",
        description=(
            "`group`: group norm in the place of every batch norm, without running statistics; not of"
            " pretrained or given networks"
        ),
    )
    width: int = Field(
        128, ge=1, le=4096, description=("channels of the first stage, everything behind it grows with them")
    )
    hidden: int = Field(512, ge=1, le=65_536, description="hidden units of the classifier")
    dropout: float = Field(0.1, ge=0, lt=1, description="rate of the dropout before the last layer")
    logit_dropout: bool = Field(
        False,
        description=(
            "a second dropout on the logits, for published results; it bounds the accuracy with dropout on"
        ),
    )


class Training(Section):
    """The local training of the clients."""

    optimizer: Literal["adam", "adamw", "sgd"] = Field("adam", description="made anew in every round")
    lr: float = Field(1e-4, gt=0, description="learning rate")
    lr_schedule: Literal["constant", "cosine"] = Field(
        "constant",
        description="over the rounds of a run: `constant`, or from `lr` down to nearly 0 along half a cosine",
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of `sgd` alone")
    weight_decay: float = Field(
        0.0, ge=0, description="of the optimizer: added to the gradient, with `adamw` apart from it"
    )
    batch_size: int = Field(1024, ge=1, description="training images in a batch")
    rounds: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (20, 10, 10, 10, 10),
        min_length=1,
        description=(
            "communication rounds of each iteration; an algorithm may change the model between two iterations"
        ),
    )
    max_iterations: int = Field(
        0,
        ge=0,
        description=(
            "cap on iterations, the last entry of `rounds` repeated where needed; 0: as many as `rounds` has"
        ),
    )
    local_epochs: int = Field(
        20, ge=1, description="passes over its training images that a client makes in a round"
    )
    local_steps: int = Field(
        0,
        ge=0,
        description="steps that every client makes in a round, in the place of `local_epochs`; 0: by epochs",
    )

    def lr_in(self, round: int) -> float:
        """Return the learning rate of a round, counted from 0. Training after the last round uses the rate of
        the last round."""
        if self.lr_schedule == "constant":
            return self.lr
        rounds = sum(self.iterations())
        return self.lr * (1 + math.cos(math.pi * min(round, rounds - 1) / rounds)) / 2

    def iterations(self) -> list[int]:
        """Return the number of rounds of each iteration, with ``max_iterations`` applied."""
        cap = self.max_iterations or len(self.rounds)
        return [self.rounds[min(i, len(self.rounds) - 1)] for i in range(cap)]
