"""The configuration of a run: flat keys in the terms of the method, from a preset or a TOML file, checked as a whole."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from .errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Config:
    """Every key of a run. A TOML file or ``--set key=value`` may name any of them and nothing else."""

    # --- what runs
    arms: tuple[str, ...] = ("fedavg", "uefl")
    """algorithms, side by side on the same silos: ``fedavg``, ``fedavg-vq``, ``uefl``"""
    mode: str = "paper"
    """``paper``: the corrected algorithm; ``legacy``: the published code's behaviour (then the only arm is ``uefl``)"""
    seed: int = 0
    threads: int = 0
    """CPU threads, 0: as many as torch finds; results repeat bit for bit for one number of threads"""
    precision: str = "auto"
    """``auto``: bfloat16 autocast where the hardware multiplies it fast, ``bf16``, or ``fp32``"""

    # --- silos
    data: str = "digits"
    """``digits`` (5,000 embedded MNIST digits), ``mnist``, ``fashion_mnist``, or the path of a folder of silos or an .npz"""
    clients: int = 9
    rotations: tuple[float, ...] = (0, 0, 0, -50, -50, -50, 120, 120, 120)
    """degrees, counter-clockwise, one per client; empty: none. Not used with the user's own silos, which are as they are"""
    train_per_client: int = 400
    test_per_client: int = 100
    holdout: float = 0.1
    """share of each client's training images kept aside for its entropy; the test split never steers anything"""
    image_size: int = 0
    """resize every image to this square, 0: keep (images of one folder must then be of one size)"""
    normalize: str = "standard"
    """``standard`` (mean and deviation of the data set), ``imagenet``, or ``raw`` (0-255, as the published code)"""

    # --- model
    encoder: str = "cnn"
    """``cnn`` (three residual stages), ``vgg16_bn``, ``resnet18``"""
    pretrained: bool = False
    """ImageNet weights for vgg16_bn and resnet18 (downloaded by torchvision)"""
    width: int = 128
    """channels of the first stage of the cnn; the later ones have 2 and 4 times as many"""
    hidden: int = 512
    dropout: float = 0.1
    logit_dropout: bool = False
    """a second dropout on the logits, as the published head has; it bounds the accuracy with dropout on"""

    # --- codebook
    codewords: int = 32
    """size of the shared codebook, and of every extension"""
    segments: int = 1
    commitment: float = 0.25
    codebook_init: str = "normal"
    """``normal``: N(0, 1); ``kmeans``: k-means on the features of all clients after a first round without quantiser"""
    usage_aware: bool = True
    """average each shared codeword by how often each client used it; off: by the number of examples"""

    # --- uncertainty and extension
    gamma: float = 0.3
    """a client is extended when its entropy exceeds (1 + gamma) times the reference"""
    reference: str = "min"
    """``min`` or ``mean`` entropy over the clients"""
    threshold: str = "fixed"
    """``fixed``: set after the first iteration; ``current``: from the current entropies, each time"""
    passes: int = 20
    ext_share: str = "none"
    """``none``: extensions are private to a client; ``group``: one for all clients extended at the same time"""
    stop_when_certain: bool = True
    """end the run when no client is above the threshold; off: go on without extension (equal steps for all arms)"""

    # --- training
    rounds: tuple[int, ...] = (20, 10, 10, 10, 10)
    """communication rounds of each iteration; an extension happens before each iteration but the first"""
    max_iterations: int = 0
    """cap on iterations, the last entry of rounds repeated where needed; 0: as many as rounds has (in legacy mode: no cap)"""
    local_epochs: int = 20
    lr: float = 1e-4
    batch_size: int = 1024

    # --- promises
    quorum: float = 1.0
    """share of the clients that must return a sound update, or the run ends with an error"""
    max_update_norm: float = 0.0
    """reject an update further than this from what was sent (L2 over parameters, statistics and codebook), 0: no bound"""
    deadline: float = 0.0
    """seconds after which the clients of a round that have not begun are given up (they count against the quorum), 0: none"""

    def iterations(self) -> list[int]:
        """Rounds of each iteration, with ``max_iterations`` applied."""
        cap = self.max_iterations or len(self.rounds)
        return [self.rounds[min(i, len(self.rounds) - 1)] for i in range(cap)]

    def to_toml(self) -> str:
        """The whole configuration as TOML text."""
        return tomli_w.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()})


_CHOICES = {
    "mode": ("paper", "legacy"),
    "precision": ("auto", "bf16", "fp32"),
    "normalize": ("standard", "imagenet", "raw"),
    "encoder": ("cnn", "vgg16_bn", "resnet18"),
    "codebook_init": ("normal", "kmeans"),
    "reference": ("min", "mean"),
    "threshold": ("fixed", "current"),
    "ext_share": ("none", "group"),
}
_ARMS = ("fedavg", "fedavg-vq", "uefl")
_PAPER_ONLY = ("codebook_init", "usage_aware", "ext_share", "threshold", "holdout")
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
)


def presets() -> dict[str, str]:
    """Name of every preset and the first comment line of its file."""
    files = sorted((resources.files(__package__) / "presets").iterdir(), key=lambda f: f.name)
    return {f.name[:-5]: f.read_text().splitlines()[0].lstrip("# ") for f in files if f.name.endswith(".toml")}


def load(source: str, overrides: list[str] | None = None, **keys: Any) -> Config:
    """Read a preset or a TOML file, then apply ``key=value`` overrides.

    Args:
        source: name of a preset, or the path of a .toml file.
        overrides: ``"key=value"`` in TOML syntax (a bare word is taken as a string).
        keys: further keys, already of their type; None is passed over.

    Raises:
        UserError: unknown preset or key, a value of the wrong type or out of its range.
    """
    table = _read(source)
    for item in overrides or []:
        key, sign, value = item.partition("=")
        if not sign:
            raise UserError(f"--set {item!r}: expected key=value")
        table[key.strip()] = _parse(value.strip())
    table.update({k: v for k, v in keys.items() if v is not None})
    return from_table(table)


def load_whole(path: Path) -> Config:
    """Read the configuration of a run folder, which names every key: one that is cut off must not fall back to defaults."""
    table = _read(str(path))
    missing = [field.name for field in dataclasses.fields(Config) if field.name not in table]
    if missing:
        raise UserError(f"{path} lacks the key {missing[0]!r}: it is cut off, or of another version; restore it, or start a new run")
    return from_table(table)


def from_toml(text: str) -> Config:
    """The opposite of :meth:`Config.to_toml`."""
    return from_table(tomllib.loads(text))


def from_table(table: dict[str, Any]) -> Config:
    """Build and check a configuration from plain values."""
    hints = get_type_hints(Config)
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}{_nearest(unknown[0], list(hints))}; the keys are listed in docs/configuration.md")
    config = Config(**{key: _convert(key, value, hints[key]) for key, value in table.items()})
    _check(config)
    return config


def _read(source: str) -> dict[str, Any]:
    path = Path(source)
    if path.suffix != ".toml":
        preset = resources.files(__package__) / "presets" / f"{source}.toml"
        if not preset.is_file():
            raise UserError(
                f"no preset {source!r}{_nearest(source, list(presets()))}; see `uefl presets`, or give the path of a .toml file"
            )
        return tomllib.loads(preset.read_text())
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _convert(key: str, value: Any, hint: Any) -> Any:
    name = str(hint)
    kind = {"<class 'int'>": int, "<class 'float'>": float, "<class 'bool'>": bool, "<class 'str'>": str}.get(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is not None and type(value) is kind:
        return value
    if name.startswith("tuple") and isinstance(value, (list, tuple)):
        item = hint.__args__[0]
        return tuple(_convert(key, v, item) for v in value)
    expected = kind.__name__ if kind else f"a list of {hint.__args__[0].__name__}"
    raise UserError(f"key {key!r}: expected {expected}, got {value!r}")


def _check(c: Config) -> None:
    for key, choices in _CHOICES.items():
        if getattr(c, key) not in choices:
            raise UserError(f"key {key!r}: {getattr(c, key)!r} is not one of {', '.join(choices)}")
    for key in _AT_LEAST_ONE:
        if getattr(c, key) < 1:
            raise UserError(f"key {key!r}: must be at least 1, got {getattr(c, key)}")
    rules = [
        (
            "arms",
            bool(c.arms) and len(set(c.arms)) == len(c.arms) and set(c.arms) <= set(_ARMS),
            f"a list of different arms out of {', '.join(_ARMS)}",
        ),
        ("arms", c.mode == "paper" or c.arms == ("uefl",), 'legacy mode has one arm: arms = ["uefl"]'),
        ("rounds", bool(c.rounds) and min(c.rounds) >= 1, "a list of at least one number, each at least 1"),
        ("max_iterations", c.max_iterations >= 0, "0 or more"),
        ("rotations", not c.rotations or len(c.rotations) == c.clients, f"one angle per client ({c.clients}), or an empty list"),
        ("dropout", 0 <= c.dropout < 1, "in [0, 1)"),
        ("holdout", 0 < c.holdout < 1, "between 0 and 1"),
        ("gamma", c.gamma >= 0, "0 or more"),
        ("lr", 0 < c.lr < math.inf, "positive and finite"),
        ("rotations", all(map(math.isfinite, c.rotations)), "finite angles"),
        ("deadline", c.deadline >= 0, "0 or more"),
        ("pretrained", not c.pretrained or c.encoder != "cnn", "false with encoder = 'cnn', which has no pretrained weights"),
        *(
            (key, c.mode == "paper" or getattr(c, key) == getattr(Config, key), "its default: legacy mode does not use it")
            for key in _PAPER_ONLY
        ),
        ("commitment", c.commitment >= 0, "0 or more"),
        ("quorum", 0 < c.quorum <= 1, "in (0, 1]"),
        ("max_update_norm", c.max_update_norm >= 0, "0 or more"),
        ("threads", c.threads >= 0, "0 or more"),
        ("seed", 0 <= c.seed < 2**31, "in [0, 2^31)"),
        ("image_size", c.image_size >= 0, "0 or more"),
        ("segments", c.encoder != "cnn" or (4 * c.width) % c.segments == 0, f"a divisor of the {4 * c.width} channels (4 x width)"),
        ("segments", c.encoder == "cnn" or 512 % c.segments == 0, "a divisor of the 512 channels"),
    ]
    for key, holds, expected in rules:
        if not holds:
            raise UserError(f"key {key!r}: expected {expected}; got {getattr(c, key)!r}")


def _nearest(word: str, words: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, words, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
