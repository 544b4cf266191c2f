"""What a configuration must satisfy; every rule says what it expected."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .errors import UserError

if TYPE_CHECKING:
    from .config import Config

_CHOICES = {
    "mode": ("paper", "legacy"),
    "precision": ("auto", "bf16", "fp32"),
    "normalize": ("standard", "imagenet", "raw"),
    "encoder": ("cnn", "vgg16_bn", "resnet18", "cnn5x5", "resnet18_nopool"),
    "codebook_init": ("normal", "kmeans"),
    "uncertainty": ("mc_dropout", "ensemble"),
    "reference": ("min", "mean"),
    "threshold": ("fixed", "current"),
    "ext_share": ("none", "group"),
    "split": ("iid", "noniid"),
    "priors": ("given", "estimated"),
    "augment": ("none", "rotate", "flip"),
    "loss": ("nll", "legacy_double_softmax"),
    "client_weights": ("uniform", "examples"),
    "select": ("last", "validation"),
}
_SILO_ARMS = ("fedavg", "fedavg-vq", "uefl")
SET_ARMS = ("fedul", "fedul-m1", "fedul-m2", "fedpl", "fedllp", "fedllp-vat", "fedavg-labeled", "fedavg-labeled-10", "supervised")
"""arms on unlabeled sets"""
_ARMS = (*_SILO_ARMS, *SET_ARMS)
SERVER_ARMS = ("fedul-m1", "fedul-m2", "supervised")
"""of these, the ones that learn from labeled images of the server"""
_SET_ONLY = (
    "split",
    "sets",
    "labeled",
    "validation",
    "overlap",
    "legacy_column_norm",
    "priors",
    "prior_noise",
    "prior_smoothing",
    "test_prior",
    "strict",
    "augment",
    "loss",
    "client_weights",
    "penalty",
    "server_epochs",
    "h",
    "resync",
    "select",
    "vat_weight",
    "vat_xi",
    "vat_epsilon",
    "vat_legacy_ramp",
)
_SILO_ONLY = (
    "holdout",
    "logit_dropout",
    "codewords",
    "segments",
    "commitment",
    "codebook_init",
    "usage_aware",
    "uncertainty",
    "passes",
    "members",
    "gamma",
    "reference",
    "threshold",
    "ext_share",
    "stop_when_certain",
)
DEALT_ONLY = (
    "clients",
    "train_per_client",
    "test_per_client",
    "split",
    "sets",
    "overlap",
    "legacy_column_norm",
    "labeled",
    "validation",
)
"""what the user's own sets bring with them, and of this the number of clients his own silos"""
_UNUSED_BY_ENCODER = {
    "vgg16_bn": ("width",),
    "resnet18": ("width",),
    "cnn5x5": ("hidden", "dropout"),
    "resnet18_nopool": ("hidden", "dropout", "width"),
}
_PAPER_ONLY = ("uncertainty", "codebook_init", "usage_aware", "ext_share", "threshold", "holdout")
_AT_LEAST_ONE = (
    "clients",
    "train_per_client",
    "test_per_client",
    "width",
    "hidden",
    "codewords",
    "segments",
    "passes",
    "local_epochs",
    "batch_size",
    "server_epochs",
)


_MOST_THREADS = 1024  # each is started at once, whether there is a core for it or not

Rules = list[tuple[str, bool, str]]


def check(c: Config) -> None:
    """What a new run must satisfy: :func:`check_values`, no key that would say nothing, and data of which there is enough.

    Raises:
        UserError: the first key whose value is out of its range, or does not go with the others.
    """
    for key, value in vars(c).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
            raise UserError(f"key {key!r}: expected {'finite numbers' if isinstance(value, tuple) else 'a finite number'}; got {value!r}")
    if not c.data.strip():
        raise UserError("key 'data': is empty, expected the name of a data set or the path of your own data; '.' is the current folder")
    if c.on_sets and c.path is not None and c.path.is_dir():  # told first: to leave a key out helps more than its range
        _require(c, [_unused(c, key, "a folder of sets brings its own") for key in DEALT_ONLY])
    check_values(c)
    rules: Rules = [
        ("threads", c.threads <= _MOST_THREADS, f"0 to {_MOST_THREADS}"),
        (
            "pretrained",
            not c.pretrained or "cnn" not in c.encoder,
            "false with encoder = 'cnn' and 'cnn5x5', which have no pretrained weights",
        ),
        *(_unused(c, key, "legacy mode does not use it") for key in _PAPER_ONLY if c.mode == "legacy"),
        *(_unused(c, key, f"{c.encoder} does not use it") for key in _UNUSED_BY_ENCODER.get(c.encoder, ())),
    ]
    _require(c, rules + (_of_new_sets(c) if c.on_sets else _of_new_silos(c)))


def check_values(c: Config) -> None:
    """What has held for the runs of every version, wherever their data are: choices, ranges, and values that go together.

    Raises:
        UserError: the first key whose value does not satisfy it.
    """
    for key, choices in _CHOICES.items():
        if getattr(c, key) not in choices:
            raise UserError(f"key {key!r}: {getattr(c, key)!r} is not one of {', '.join(choices)}")
    for key in _AT_LEAST_ONE:
        if getattr(c, key) < 1:
            raise UserError(f"key {key!r}: must be at least 1, got {getattr(c, key)}")
    rules: Rules = [
        (
            "arms",
            bool(c.arms) and len(set(c.arms)) == len(c.arms) and set(c.arms) <= set(_ARMS),
            f"a list of different arms out of {', '.join(_ARMS)}",
        ),
        (
            "arms",
            set(c.arms) <= set(_SILO_ARMS) or set(c.arms) <= set(SET_ARMS),
            f"either arms on silos ({', '.join(_SILO_ARMS)}) or arms on unlabeled sets ({', '.join(SET_ARMS)})",
        ),
        ("arms", c.mode == "paper" or c.arms == ("uefl",), 'legacy mode has one arm: arms = ["uefl"]'),
        ("rounds", bool(c.rounds) and min(c.rounds) >= 1, "a list of at least one number, each at least 1"),
        ("max_iterations", c.max_iterations >= 0, "0 or more"),
        ("dropout", 0 <= c.dropout < 1, "in [0, 1)"),
        ("holdout", 0 < c.holdout < 1, "between 0 and 1"),
        ("gamma", c.gamma >= 0, "0 or more"),
        ("lr", c.lr > 0, "positive and finite"),
        ("deadline", c.deadline >= 0, "0 or more"),
        ("members", c.members >= 2, "2 or more"),
        ("commitment", c.commitment >= 0, "0 or more"),
        ("quorum", 0 < c.quorum <= 1, "in (0, 1]"),
        ("max_update_norm", c.max_update_norm >= 0, "0 or more"),
        ("threads", c.threads >= 0, f"0 to {_MOST_THREADS}"),
        ("seed", 0 <= c.seed < 2**31, "in [0, 2^31)"),
        ("image_size", c.image_size >= 0, "0 or more"),
    ]
    _require(c, rules + (_of_sets(c) if c.on_sets else _of_silos(c)))


def check_silos(c: Config, *, own: bool) -> None:
    """Keys that depend on where the silos come from: a data set that is dealt, or the user's own.

    Raises:
        UserError: the first key that does not go with them.
    """
    ours: Rules = [
        _unused(c, "clients", "your own silos are as many as there are"),
        ("rotations", c.rotations in (type(c).rotations, ()), "an empty list: your own silos are not turned"),
    ]
    _require(c, ours if own else _of_dealing(c))


def _require(c: Config, rules: Rules) -> None:
    for key, holds, expected in rules:
        if not holds:
            raise UserError(f"key {key!r}: expected {expected}; got {getattr(c, key)!r}")


def _unused(c: Config, key: str, why: str) -> tuple[str, bool, str]:
    """A key that would say nothing may only say its default, which a run folder names too."""
    default = getattr(type(c), key)
    return key, getattr(c, key) == default, f"its default {default!r}, so leave it out: {why}"


def _of_dealing(c: Config) -> Rules:
    """Rules of silos that a data set is dealt to."""
    return [("rotations", not c.rotations or len(c.rotations) == c.clients, f"one angle per client ({c.clients}), or an empty list")]


def _of_silos(c: Config) -> Rules:
    """Rules of the arms on silos."""
    return [
        *(_of_dealing(c) if c.path is None else []),  # of the user's own data the files say whether they are dealt
        ("encoder", c.encoder in ("cnn", "vgg16_bn", "resnet18"), "cnn, vgg16_bn or resnet18 with these arms"),
        ("segments", c.encoder != "cnn" or (4 * c.width) % c.segments == 0, f"a divisor of the {4 * c.width} channels (4 x width)"),
        ("segments", c.encoder == "cnn" or 512 % c.segments == 0, "a divisor of the 512 channels"),
    ]


def _of_new_silos(c: Config) -> Rules:
    """Rules of a new run with arms on silos."""
    return [
        _unused(c, "passes", "an ensemble has members, not passes")
        if c.uncertainty == "ensemble"
        else _unused(c, "members", "it is for uncertainty = 'ensemble'"),
        *(_unused(c, key, "it is for arms on unlabeled sets") for key in _SET_ONLY),
    ]


def _of_sets(c: Config) -> Rules:
    """Rules of the arms on unlabeled sets."""
    template = "fedul-demo" if c.path is None or c.path.suffix == ".npz" else "own-sets"
    begin = f"write rounds = [20] and rotations = [], or begin the file with base = {template!r}"
    return [
        ("mode", c.mode == "paper", "paper: FedUL's published behaviour is chosen by loss, overlap and legacy_column_norm"),
        ("rounds", len(c.rounds) == 1, f"one number: FedUL has one iteration; {begin}"),
        ("max_iterations", c.max_iterations in (0, 1), "0: FedUL has one iteration"),
        ("rotations", not c.rotations, f"an empty list: images of one class must look alike at all clients; {begin}"),
        ("sets", c.sets >= 2, "2 or more"),
        ("batch_size", c.batch_size >= 2, "2 or more, for batch norm"),
        ("labeled", c.labeled >= 0, "0 or more"),
        ("validation", c.validation >= 0, "0 or more"),
        ("legacy_column_norm", not c.legacy_column_norm or (c.overlap and c.split == "iid"), "false without overlap = true, split = 'iid'"),
        ("prior_noise", 0 <= c.prior_noise < 1, "in [0, 1)"),
        ("prior_smoothing", 0 <= c.prior_smoothing < 1, "in [0, 1)"),
        ("test_prior", not c.test_prior or min(c.test_prior) > 0, "positive numbers"),
        ("test_prior", not c.test_prior or abs(sum(c.test_prior) - 1) <= 1e-4, "numbers that sum to 1"),
        ("h", 0 <= c.h <= 1, "in [0, 1]"),
        ("penalty", c.penalty >= 0, "0 or more"),
        ("vat_weight", c.vat_weight >= 0, "0 or more"),
        ("vat_xi", c.vat_xi > 0, "positive"),
        ("vat_epsilon", c.vat_epsilon > 0, "positive"),
    ]


def _of_new_sets(c: Config) -> Rules:
    """Rules of a new run with arms on unlabeled sets; its data are looked for."""
    dealt = c.path is None or c.path.is_file()
    needs_labels = [arm for arm in c.arms if arm in SERVER_ARMS]
    return [
        ("labeled", not (dealt and needs_labels and c.labeled < 2), f"2 or more for {', '.join(needs_labels)}"),
        ("labeled", not (dealt and c.priors == "estimated" and c.labeled < 10), "5 images of every class for estimated priors"),
        ("validation", not (dealt and c.select == "validation" and c.validation == 0), "1 or more with select = 'validation'"),
        *(_unused(c, key, "it is for arms on silos") for key in _SILO_ONLY),
    ]
