"""The parameters of algorithms with a codebook."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .. import base


class CodebookParameters(base.Parameters):
    """Parameters of a quantizer between encoder and head, and of the threshold."""

    codewords: int = Field(32, ge=1, le=2**20)
    """size of the shared codebook, and of an extension"""
    segments: int = Field(1, ge=1, le=4096)
    """number of equal parts of each feature vector, which are quantized separately; a divisor of the
    channels"""
    commitment: float = Field(0.25, ge=0)
    """weight of the term that pulls features towards their codewords"""
    gamma: float = Field(0.3, ge=0)
    """a client is extended if its entropy exceeds (1 + gamma) times the reference"""
    reference: Literal["min", "mean"] = "min"
    """the reference: the least of the clients' entropies, or their mean"""
    stop_when_certain: bool = True
    """end the arm if no client is above the threshold; `false`: continue, so all arms run the same number of
    steps"""


class Parameters(CodebookParameters):
    """Parameters of UEFL.

    The defaults are the values of the published method, and other options are off.
    """

    # who is extended, and with what
    extend: Literal["uncertain", "random", "all", "none"] = "uncertain"
    """the clients with growing codebooks: `uncertain`: the clients above the threshold; `random`: the same
    number, drawn at random; `all`: every client; `none`: no client"""
    criterion: Literal["entropy", "loss"] = "entropy"
    """the quantity that is compared with the threshold, on holdout images: the mean `entropy`, or the
    cross-entropy `loss`"""
    threshold: Literal["fixed", "current"] = "fixed"
    """`fixed`: the threshold is set after the first iteration; `current`: each decision computes the
    threshold from the current entropies"""
    extension: Literal["append", "residual"] = "append"
    """`append`: new codewords are searched together with the others; `residual`: new codewords quantize the
    error of the others"""
    new_codewords: Literal["kmeans", "normal"] = "kmeans"
    """initial codewords of an extension: `kmeans`: centers of the client's features; `normal`: N(0, 1)"""
    growth: Literal["add", "double"] = "add"
    """size of an extension: `add`: always `codewords`; `double`: the current size of the client's codebook"""
    ext_share: Literal["none", "group"] = "none"
    """`none`: each client has its own extension; `group`: all clients that are extended at the same time
    share one extension"""
    keep: Literal["all", "better"] = "all"
    """the extensions that a client keeps: `all`; `better`: only an extension with which the cross-entropy of
    its holdout images is lower than without it, tested after the first round with the extension"""
    # how the codebook is made
    personal: bool | tuple[tuple[str, ...], ...] = False
    """separate codebooks from the start: `true`: every client has its own codebook, which is never averaged;
    lists of clients, such as the clients of one domain: each list shares a codebook; `false`: all clients
    share a codebook"""
    codebook_after: int = Field(0, ge=0)
    """number of first rounds without quantizer; then k-means of the features of all clients makes the
    codebook; 0: the codebook starts with draws from N(0, 1)"""
    reinit: bool = False
    """compute the shared codebook again by k-means before every iteration except the first"""
    segment_codebooks: bool = False
    """separate codewords for each segment, instead of one codebook for all"""
    # how codewords learn
    usage_aware: bool | Literal["equal"] = True
    """weights in the average of a codeword over the clients: `true`: how often each client used the codeword;
    `equal`: equal weights for the clients that used it; `false`: the number of examples"""
    codebook_lr: float = Field(1.0, gt=0)
    """learning rate of the codewords, as a multiple of `lr`"""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """codewords are moving averages of the features that they replace, with this decay per step, and the
    server averages the sums and the counts; 0: codewords learn by gradient"""
    revive_below: float = Field(0.0, ge=0, lt=1)
    """after a round, move codewords whose use is less than this share of the mean use, to places next to the
    most used codewords; 0: never"""
    search: Literal["l2", "cosine"] = "l2"
    """the nearest codeword has the smallest distance (`l2`) or the smallest angle (`cosine`)"""
    estimator: Literal["straight_through", "rotation"] = "straight_through"
    """how the gradient passes the quantizer: unchanged, or with the rotation and scaling from the feature to
    its codeword"""

    @model_validator(mode="after")
    def _one_way_to_learn(self) -> Parameters:
        if self.ema_decay and self.codebook_lr != 1:
            raise ValueError(
                "codebook_lr is for codewords that learn by gradient, but with ema_decay they are averages;"
                " omit codebook_lr or ema_decay"
            )
        if self.ema_decay and self.usage_aware == "equal":
            raise ValueError(
                "usage_aware = 'equal' is for codewords that learn by gradient, but with ema_decay the"
                " counts are the weights; omit usage_aware or ema_decay"
            )
        return self

    @model_validator(mode="after")
    def _parts_of_one_size(self) -> Parameters:
        if self.growth == "double":
            for key, value in (("extension", "residual"), ("ext_share", "group")):
                if getattr(self, key) == value:
                    raise ValueError(
                        f"growth = 'double' makes extensions of several sizes, and {key} = {value!r} needs"
                        " one; omit one"
                    )
        return self
