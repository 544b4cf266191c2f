"""The configuration of a run: flat keys in the terms of the method, from a preset or a TOML file, checked as a whole."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from . import rules
from .errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


DATA_SETS = ("digits", "mnist", "fashion_mnist", "cifar10")


@dataclass(frozen=True)
class Config:
    """Every key of a run. A TOML file or ``--set key=value`` may name any of them and nothing else."""

    # --- what runs
    arms: tuple[str, ...] = ("fedavg", "uefl")
    """algorithms, side by side on the same silos: ``fedavg``, ``fedavg-vq``, ``uefl``; or, on unlabeled sets, ``fedul``, ``fedul-m1``,
    ``fedul-m2``, ``fedpl``, ``fedllp``, ``fedllp-vat``, ``fedavg-labeled``, ``fedavg-labeled-10``, ``supervised``"""
    mode: str = "paper"
    """``paper``: the corrected algorithm; ``legacy``: the published code's behaviour (then the only arm is ``uefl``)"""
    seed: int = 0
    threads: int = 0
    """CPU threads, 0: as many as torch finds; results repeat bit for bit for one number of threads"""
    precision: str = "auto"
    """``auto``: bfloat16 autocast where the hardware multiplies it fast, ``bf16``, or ``fp32``"""

    # --- silos
    data: str = "digits"
    """``digits`` (5,000 embedded MNIST digits), ``mnist``, ``fashion_mnist``, ``cifar10``, or the path of a folder or an .npz"""
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

    # --- unlabeled sets (the arms of FedUL)
    split: str = "iid"
    """``iid``: a random part for each client; ``noniid``: two classes dominate each client"""
    sets: int = 10
    """unlabeled sets per client"""
    labeled: int = 0
    """labeled images of the server, for ``fedul-m1``, ``fedul-m2``, ``supervised`` (2 or more) and estimated priors (5 of every class)"""
    validation: int = 0
    """labeled images of the server on which every round's model is measured"""
    overlap: bool = False
    """draw the sets as the published code does: one image may be in several sets of its client"""
    legacy_column_norm: bool = False
    """with overlap: set priors divided by column sums, which uses ever less of the data as sets get more (published, ``iid``)"""
    priors: str = "given"
    """``given``: the realised class shares of each set; ``estimated``: from the set's images and the server's labeled ones"""
    prior_noise: float = 0.0
    """every known class share is off by a random factor in [1 - x, 1 + x]; rows are normalised again"""
    prior_smoothing: float = 0.0
    """mix every row of priors with this share of the uniform one"""
    test_prior: tuple[float, ...] = ()
    """class shares under which the model's output is a posterior; empty: uniform"""
    strict: bool = False
    """doubtful priors (too few sets, no full rank, ill-conditioned, absent classes) are errors, not notices"""

    # --- model
    encoder: str = "cnn"
    """``cnn`` (three residual stages), ``vgg16_bn``, ``resnet18``; FedUL's: ``cnn5x5``, ``resnet18_nopool`` (not with a codebook)"""
    pretrained: bool = False
    """ImageNet weights for vgg16_bn and resnet18 (downloaded by torchvision)"""
    width: int = 128
    """channels of the first stage of cnn and cnn5x5; everything behind it grows with them"""
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
    uncertainty: str = "mc_dropout"
    """``mc_dropout``: the entropy over passes with dropout on; ``ensemble``: over members that are trained apart, dropout off"""
    passes: int = 20
    members: int = 5
    """of an ensemble; each takes as long as a run of its own"""
    gamma: float = 0.3
    """a client is extended when its entropy exceeds (1 + gamma) times the reference"""
    reference: str = "min"
    """``min`` or ``mean`` entropy over the clients"""
    threshold: str = "fixed"
    """``fixed``: set after the first iteration; ``current``: from the current entropies, each time"""
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

    augment: str = "none"
    """of training images, on the device: ``rotate`` (up to 20 degrees either way) or ``flip`` (left-right)"""

    # --- FedUL
    loss: str = "nll"
    """``nll``: the proper loss; ``legacy_double_softmax``: the published one, also for labeled images"""
    client_weights: str = "uniform"
    """of the average: ``uniform``, or ``examples``"""
    penalty: float = 0.0
    """weight of the sum of absolute parameters (in ``fedpl``: Adam's weight decay), as published"""
    server_epochs: int = 1
    """passes over the server's labeled images in a round"""
    h: float = 0.5
    """fedul-m2: the broadcast model is (1 - h) f + h f'"""
    resync: bool = False
    """fedul-m2: f' starts every round from the broadcast model, instead of going its own way"""
    select: str = "last"
    """the model that is saved and reported: of the ``last`` round, or the best on ``validation``"""
    vat_weight: float = 5e-4
    """fedllp-vat: final weight of the smoothness term, reached within 20 epochs"""
    vat_xi: float = 1.0
    """fedllp-vat: length of the probing step"""
    vat_epsilon: float = 1e-2
    """fedllp-vat: length of the adversarial step"""
    vat_legacy_ramp: bool = False
    """fedllp-vat: the weight starts anew every epoch, as in the published code"""

    # --- promises
    quorum: float = 1.0
    """share of the clients that must return a sound update, or the run ends with an error"""
    max_update_norm: float = 0.0
    """reject an update further than this from what was sent (L2 over parameters, statistics and codebook), 0: no bound"""
    deadline: float = 0.0
    """seconds after which the clients of a round that have not begun are given up (they count against the quorum), 0: none"""

    @property
    def path(self) -> Path | None:
        """Of the user's own data; None for a data set that goes by its name, whatever lies in the working folder."""
        return None if self.data in DATA_SETS else Path(os.path.expanduser(self.data))

    @property
    def on_sets(self) -> bool:
        """Whether the arms are those on unlabeled sets (FedUL and its baselines)."""
        return set(self.arms) <= set(rules.SET_ARMS)

    def iterations(self) -> list[int]:
        """Rounds of each iteration, with ``max_iterations`` applied."""
        cap = self.max_iterations or len(self.rounds)
        return [self.rounds[min(i, len(self.rounds) - 1)] for i in range(cap)]

    def to_toml(self, without: Collection[str] = ()) -> str:
        """The whole configuration as TOML text, but for the keys ``without``."""
        kept = {k: v for k, v in dataclasses.asdict(self).items() if k not in without}
        return tomli_w.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()})


def presets() -> dict[str, str]:
    """Name of every preset and the first comment line of its file."""
    files = sorted((resources.files(__package__) / "presets").iterdir(), key=lambda f: f.name)
    return {f.name[:-5]: f.read_text().splitlines()[0].lstrip("# ") for f in files if f.name.endswith(".toml")}


def load(source: str, overrides: list[str] | None = None, **keys: Any) -> Config:
    """Read a preset or a TOML file, then apply ``key=value`` overrides. A file that says ``base = "PRESET"`` names only what differs.

    Args:
        source: name of a preset, or the path of a .toml file.
        overrides: ``"key=value"`` in TOML syntax (a bare word is taken as a string).
        keys: further keys, already of their type; None is passed over.

    Raises:
        UserError: unknown preset or key, a value of the wrong type or out of its range.
    """
    table = _with_base(_read(source))
    for item in overrides or []:
        key, sign, value = item.partition("=")
        if not sign:
            raise UserError(f"--set {item!r}: expected key=value")
        table[key.strip()] = _parse(value.strip())
    table.update({k: v for k, v in keys.items() if v is not None})
    return from_table(table)


def load_whole(path: Path) -> Config:
    """Read the configuration of a run folder, which names every key: one that is cut off must not fall back to defaults.

    On the user's own data it leaves out keys of dealing, and ends with others as well.
    """
    table = _read(str(path))
    unsaid = () if table.get("data") in DATA_SETS else rules.DEALT_ONLY
    missing = [field.name for field in dataclasses.fields(Config) if field.name not in table and field.name not in unsaid]
    if missing:
        raise UserError(f"{path} lacks the key {missing[0]!r}: it is cut off, or of another version; restore it, or start a new run")
    try:
        return from_table(table)
    except UserError as error:
        raise UserError(f"{path}: {error}. It was changed, or is of another version; restore it, or start a new run") from None


def load_past(path: Path) -> Config:
    """Read the configuration of a run folder to look at its results, as :func:`from_toml` does; the message of an error names the file."""
    table = _read(str(path))
    try:
        return _build_past(table)
    except UserError as error:
        raise UserError(f"{path}: {error}. It was changed, is cut off, or is of another version; restore it") from None


def from_toml(text: str) -> Config:
    """The opposite of :meth:`Config.to_toml`, for what a run has left: every value is checked, but not as for a new run.

    Versions refuse ever more keys that say nothing, and the user's own data may be elsewhere by now. Keys that are missing, because an
    older version did not have them, are at their defaults; only ``arms`` and ``max_update_norm``, the first and the last key of the first
    version, must be there, or the text is cut off.
    """
    try:
        return _build_past(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"its configuration is not valid TOML: {error}") from None


def from_table(table: dict[str, Any]) -> Config:
    """Build and check a configuration from plain values."""
    config = _build(table)
    rules.check(config)
    return config


def _build_past(table: dict[str, Any]) -> Config:
    for key in ("arms", "max_update_norm"):
        if key not in table:
            raise UserError(f"the key {key!r} is missing, which every run writes")
    config = _build(table)
    rules.check_values(config)
    return config


def _build(table: dict[str, Any]) -> Config:
    hints = get_type_hints(Config)
    unknown = sorted(set(table) - set(hints))
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}{_nearest(unknown[0], list(hints))}; the keys are listed in docs/configuration.md")
    return Config(**{key: _convert(key, value, hints[key]) for key, value in table.items()})


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


def _with_base(table: dict[str, Any]) -> dict[str, Any]:
    """The keys of the preset that a file is based on, where it does not name them itself."""
    if "base" not in table:
        return table
    base = table.pop("base")
    if not isinstance(base, str) or base not in presets():
        raise UserError(f"key 'base': expected the name of a preset, got {base!r}; see `uefl presets`")
    return _with_base(_read(base)) | table


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


def _nearest(word: str, words: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, words, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
