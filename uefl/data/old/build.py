"""From a configuration to the silos of a run: read, deal and rotate, split, keep a part aside."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ... import rules
from ...config import DATA_SETS, Config
from ...errors import UserError
from ..rotate import resize, rotate
from . import sources
from .folder import image_folder
from .silo import Federation, Silo, Split
from .sources import OwnSilos, Pool, take


def build_silos(config: Config, *, data_root: Path | None = None) -> Federation:
    """Make the silos that a configuration describes, on the CPU.

    A data set (``digits``, ``mnist``, ``fashion_mnist``, ``cifar10``, or an .npz of four arrays) is dealt in disjoint slices to
    ``config.clients`` silos and rotated; those silos are the same for every ``config.seed``. The user's own silos (a folder, or an
    .npz with an array ``silo``) are as many as there are and as large as they are: ``clients`` and ``rotations`` keep their defaults,
    and ``train_per_client`` and ``test_per_client`` only set the share of the test split where none is given.

    The holdout is taken out of the training images at random. In legacy mode it is the test split, as the published code has it.

    Args:
        config: the keys of the section "silos", ``mode`` and ``seed``.
        data_root: folder of torchvision's files, for ``mnist``, ``fashion_mnist`` and ``cifar10``; default: environment variable UEFL_DATA.

    Raises:
        UserError: no such data, damaged or too few images, keys that do not go with them, a silo with one class or with an empty split.
    """
    data = read_source(config, data_root)
    rules.check_silos(config, own=not isinstance(data, Pool))
    generator = torch.Generator().manual_seed(config.seed)
    share = config.test_per_client / (config.train_per_client + config.test_per_client)
    parts: dict[str, tuple[Split, Split]]
    if isinstance(data, Pool):
        parts, angles = _deal(data, config), config.rotations or (0.0,) * config.clients
    else:
        parts = {
            name: (train, test) if test is not None else _stratified(train, share, generator) for name, (train, test) in data.silos.items()
        }
        angles = (0.0,) * len(parts)
    parts = {
        name: (_prepared(train, angle, config), _prepared(test, angle, config))
        for angle, (name, (train, test)) in zip(angles, parts.items(), strict=True)
    }
    for name, (train, test) in parts.items():
        _check(name, train, test, data.classes)
    mean, std = mean_and_std([train.images for train, _ in parts.values()])
    if config.mode == "legacy":
        silos = [Silo(name, train, test, test) for name, (train, test) in parts.items()]
    else:
        silos = [Silo(name, *_hold_out(name, train, config.holdout, generator), test) for name, (train, test) in parts.items()]
    return Federation(tuple(silos), data.classes, mean, std, data.notes)


def read_source(config: Config, data_root: Path | None) -> Pool | OwnSilos:
    """What ``config.data`` names, before it is dealt."""
    data_root = data_root or (Path(os.environ["UEFL_DATA"]) if os.environ.get("UEFL_DATA") else None)
    if config.data == "digits":
        return sources.digits()
    if config.data in ("mnist", "fashion_mnist"):
        return sources.idx_files("MNIST" if config.data == "mnist" else "FashionMNIST", data_root)
    if config.data == "cifar10":
        return sources.cifar10(data_root)
    path = Path(config.data).expanduser()
    if path.suffix == ".npz":
        return sources.npz_file(path)
    if path.is_dir():
        return image_folder(path, config.image_size)
    raise UserError(
        f"key 'data': {config.data!r} is none of {', '.join(DATA_SETS)}, and no folder or .npz of that name is there; "
        "the presets own-silos and own-sets are templates: give the path of your data with --set data=PATH, laid out as in "
        "docs/configuration.md"
    )


def _deal(pool: Pool, config: Config) -> dict[str, tuple[Split, Split]]:
    """Disjoint slices in order, silo by silo; without a test split each slice is cut into train and test."""
    clients, s, t = config.clients, config.train_per_client, config.test_per_client
    if pool.test is None:
        _check_enough(config, "", clients * (s + t), pool.train)
        starts = range(0, clients * (s + t), s + t)
        dealt = [(take(pool.train, slice(i, i + s)), take(pool.train, slice(i + s, i + s + t))) for i in starts]
    else:
        _check_enough(config, "training ", clients * s, pool.train)
        _check_enough(config, "test ", clients * t, pool.test)
        dealt = [(take(pool.train, slice(i * s, (i + 1) * s)), take(pool.test, slice(i * t, (i + 1) * t))) for i in range(clients)]
    digits = len(str(clients - 1))  # of equal length, so that sorting by name keeps the order
    return {f"silo-{i:0{digits}}": part for i, part in enumerate(dealt)}


def _check_enough(config: Config, kind: str, needed: int, split: Split) -> None:
    if needed > len(split):
        raise UserError(
            f"{config.clients} clients with train_per_client = {config.train_per_client} and test_per_client = {config.test_per_client} "
            f"need {needed} {kind}images, {config.data} has {len(split)}; lower one of the three"
        )


def _prepared(split: Split, angle: float, config: Config) -> Split:
    images = resize(split.images, config.image_size) if config.image_size else split.images
    return Split(rotate(images, angle, legacy_center=config.mode == "legacy"), split.labels)


def _stratified(split: Split, share: float, generator: torch.Generator) -> tuple[Split, Split]:
    """Cut off round(share * n) test images at random, from each class its share of them, to within one image."""
    order = torch.randperm(len(split), generator=generator)
    order = order[split.labels[order].argsort(stable=True)]
    # sorted by class, evenly spaced positions visit every class in proportion
    chosen = (torch.arange(len(split) + 1, dtype=torch.float64) * share + 0.5).floor().diff() > 0
    return take(split, order[~chosen]), take(split, order[chosen])


def _hold_out(name: str, train: Split, share: float, generator: torch.Generator) -> tuple[Split, Split]:
    kept, held = _stratified(train, max(share, 1 / len(train)), generator)
    if len(kept.labels.unique()) < 2:
        raise UserError(
            f"silo {name!r}: holdout = {share} leaves fewer than two classes of {len(train)} training images; add images or lower it"
        )
    return kept, held


def _check(name: str, train: Split, test: Split, classes: tuple[str, ...]) -> None:
    if len(train) == 0 or len(test) == 0:
        raise UserError(f"silo {name!r}: {len(train)} training and {len(test)} test images; it needs some of both")
    if len(train.labels.unique()) < 2:
        only = classes[int(train.labels[0])]
        raise UserError(f"silo {name!r}: all {len(train)} training images are of class {only!r}; a silo needs two classes or more")


def mean_and_std(images: list[torch.Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per channel on the scale 0-1, exactly, from how often each of the 256 values occurs."""
    channels = range(images[0].shape[1])
    counts = torch.stack([torch.stack([x[:, c].flatten().bincount(minlength=256) for x in images]).sum(0) for c in channels])
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(1)
    std = variance.sqrt().clamp_min(1 / 255)  # one grey level: a constant channel is divided by it
    return tuple(mean.tolist()), tuple(std.tolist())
