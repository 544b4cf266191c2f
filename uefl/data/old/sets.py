"""Unlabeled sets: a client's images, the set that each of them is in, and what is known of the sets, their class priors.

One builder for FedUL and all its baselines, so that every arm sees the same images in the same sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ...config import Config
from ...errors import InvalidPriors, UserError
from ...seeds import derive
from .. import priors
from ..rotate import resize
from . import own_sets
from .build import mean_and_std, read_source
from .silo import Split
from .sources import Pool, take

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SetSilo:
    """One client's sets. ``labels`` are known in experiments alone, and used by the labeled baselines only."""

    name: str
    images: torch.Tensor
    """``[n, C, H, W]`` uint8"""
    sets: torch.Tensor
    """``[n]`` int64, in which set an image is"""
    priors: torch.Tensor
    """``[M, K]`` float64, class shares of each set"""
    labels: torch.Tensor | None
    """``[n]`` int64"""
    test: Split | None
    """None: no accuracy is measured"""
    drawn: torch.Tensor | None = None
    """``[M, K]`` float64, what the sets that were dealt weighed the classes before supply was taken into account; FedPL labels by it"""

    @property
    def sizes(self) -> torch.Tensor:
        """``[M]`` int64, images of each set."""
        return self.sets.bincount(minlength=len(self.priors))

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that a run depends on."""
        yield from (self.images, self.sets, self.priors)
        if self.test is not None:
            yield from (self.test.images, self.test.labels)
        yield from (known for known in (self.labels, self.drawn) if known is not None)


@dataclass(frozen=True)
class SetFederation:
    """All clients of a run, what the server holds, and notices about the sets."""

    silos: tuple[SetSilo, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labeled: Split | None
    validation: Split | None
    notes: tuple[str, ...]

    def describe(self) -> str:
        """One line: how many clients, sets and images, and what the server holds."""
        images, sets, tests = (sum(v) for v in zip(*((len(s.sets), len(s.priors), len(s.test or ())) for s in self.silos), strict=True))
        sizes = torch.cat([s.sizes for s in self.silos])
        server = ", ".join(f"{len(part)} {what}" for part, what in ((self.labeled, "labeled"), (self.validation, "validation")) if part)
        shape = " x ".join(map(str, self.image_shape))
        return (
            f"{len(self.silos)} clients: {images} unlabeled images of {shape} in {sets} sets of {sizes.min()} to {sizes.max()}, "
            f"{tests or 'no'} test images; the server: {server or 'no'} images; {len(self.classes)} classes"
        )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        c, h, w = self.silos[0].images.shape[1:]
        return c, h, w

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that a run depends on."""
        for silo in self.silos:
            yield from silo.tensors()
        for part in (self.labeled, self.validation):
            if part is not None:
                yield from (part.images, part.labels)


def build_sets(config: Config, *, data_root: Path | None = None) -> SetFederation:
    """Make the unlabeled sets that a configuration describes, on the CPU.

    A data set is cut in file order into the unlabeled images (``clients x train_per_client``), the server's ``labeled`` and its
    ``validation`` images, and the test images (its test split, where it has one). Unlabeled images go to the clients, then to the
    sets of each client; see :func:`client_parts` and :func:`client_sets`. Test images are dealt to the clients at random, in equal
    parts, so that the mean over the clients is the figure of the whole test set. All draws depend on ``config.seed``.

    A folder holds the user's own sets: see :mod:`uefl.data.own_sets`.

    Args:
        config: the keys of the sections "silos" and "unlabeled sets", and ``seed``.
        data_root: folder of torchvision's files; default: environment variable UEFL_DATA.

    Raises:
        UserError: no such data, damaged or too few images; InvalidPriors: sets or priors that cannot be trained with.
    """
    path = config.path
    made = own_sets.read(path, config.image_size) if path is not None and path.is_dir() else _deal(config, data_root)
    classes = len(made.classes)
    if classes == 1:
        raise UserError(f"{config.data} has one class, {made.classes[0]!r}; a classifier needs two or more")
    tests: list[Split | None] = [None] * len(made.clients)
    if made.test is not None:
        if len(made.test) < len(tests):
            raise UserError(f"{config.data} has {len(made.test)} test images for {len(tests)} clients; each needs one or more")
        dealt = np.array_split(_rng(config, "test").permutation(len(made.test)), len(tests))
        tests = [take(made.test, torch.from_numpy(part)) for part in dealt]
    rng = _rng(config, "priors")
    corrected, doubts, silos, known = [], [], [], []
    estimate: priors.PriorEstimator | None = None
    for client, test in zip(made.clients, tests, strict=True):
        table = client.priors
        images = client.images.numpy()
        if config.priors == "estimated":
            if made.labeled is None:
                raise UserError(f"{config.data}: estimated priors need labeled images of the server")
            count = int(client.sets.max()) + 1 if table is None else len(table)
            of_set = [images[client.sets.numpy() == m] for m in range(count)]
            for m, batch in enumerate(of_set):
                if len(batch) == 0:
                    raise InvalidPriors(f"client {client.name!r}, set {m}: the set is empty; lower sets or raise train_per_client")
            estimate = estimate or priors.PriorEstimator(made.labeled, made.classes, derive(config.seed, "folds") % 2**32)
            table = estimate(of_set)
        if table is None:
            raise UserError(f"{config.data}: no priors given; add priors.csv or priors.json, or set priors = 'estimated'")
        priors.check_targets(client.name, client.sets.numpy(), len(table))
        sizes = client.sets.bincount(minlength=len(table)).numpy()
        table, normalised = priors.check_priors(client.name, table, sizes, classes, client.set_names)
        known.append((table, sizes))  # before they are blurred, which would hide a class that nobody has
        doubts += priors.doubts(client.name, table, sizes, made.classes, client.set_names)
        table = priors.noisy(table, config.prior_noise, rng) if config.prior_noise else table
        table = priors.smoothed(table, config.prior_smoothing)
        corrected += normalised
        exact = client.drawn is not None and config.priors == "given" and not config.prior_noise
        drawn = torch.from_numpy(client.drawn) if exact else None  # noise blurs FedPL's labels too; smoothing keeps the order of a row
        silos.append(SetSilo(client.name, client.images, client.sets, torch.from_numpy(table), client.labels, test, drawn))
    doubts += _check_together(known, made.classes)
    if doubts and config.strict:
        raise InvalidPriors(f"{doubts[0]} (strict = true; {len(doubts)} such findings)")
    if config.test_prior and len(config.test_prior) != classes:
        raise InvalidPriors(f"key 'test_prior': expected {classes} numbers, one per class, got {len(config.test_prior)}")
    everything = [silo.images for silo in silos] + ([made.labeled.images] if made.labeled else [])
    mean, std = mean_and_std(everything)
    return SetFederation(tuple(silos), made.classes, mean, std, made.labeled, made.validation, (*made.notes, *corrected, *doubts))


def client_parts(labels: Indices, clients: int, split: str, rng: np.random.Generator, classes: int) -> list[Indices]:
    """Which images each client gets; every image goes to exactly one client.

    ``iid``: random parts of equal size. ``noniid``: classes 2c and 2c + 1 (modulo K) weigh 80 times as much at client c as the
    others, whose weights are U(0.45, 0.55); the images of a class are dealt in proportion to what the clients weigh it, so that
    a class in demand runs short for all alike. A client that would get none of a class then gets one image of whoever has most,
    as long as that leaves one.
    """
    if split == "iid":
        return list(np.array_split(rng.permutation(len(labels)), clients))
    weights = rng.uniform(0.45, 0.55, (clients, classes))
    for c in range(clients):
        weights[c, [2 * c % classes, (2 * c + 1) % classes]] *= 80
    return _deal_by_class(labels, priors.normalized(weights), rng, priors.shares_of_all)


def client_sets(labels: Indices, theta: priors.Matrix, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Positions of images and the sets that they are in, ``[n]`` each: every image of the client is in exactly one set.

    The images of a class are dealt to the sets in proportion to the drawn priors ``theta [M, K]``. With as many images of every
    class these are the priors of the sets, up to the sums of their columns; a rare class is rare in all sets.
    """
    parts = _deal_by_class(labels, theta, rng, priors.shares)
    return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def overlapping_sets(labels: Indices, theta: priors.Matrix, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """As the published code draws them: set m takes the first int(floor(n / M) theta[m, k]) images of class k, shuffled anew.

    An image can be in several sets, and a class that runs short is cut silently; the realised priors are exact all the same.
    """
    nominal, positions, sets = len(labels) // len(theta), [], []
    for m, row in enumerate(theta):
        for k, share in enumerate(row):
            chosen = rng.permutation(np.flatnonzero(labels == k))[: int(nominal * share)]
            positions.append(chosen)
            sets.append(np.full(len(chosen), m))
    return np.concatenate(positions), np.concatenate(sets)


def _deal_by_class(
    labels: Indices, weights: priors.Matrix, rng: np.random.Generator, shares: Callable[[int, priors.Matrix], Indices]
) -> list[Indices]:
    """Deal the positions of the images of each class k to len(weights) parts in the ``shares`` of ``weights[:, k]``."""
    parts: list[list[Indices]] = [[] for _ in weights]
    for k in range(weights.shape[1]):
        of_class = rng.permutation(np.flatnonzero(labels == k))
        for part, piece in zip(parts, np.split(of_class, np.cumsum(shares(len(of_class), weights[:, k]))[:-1]), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def _deal(config: Config, data_root: Path | None) -> own_sets.Material:
    """A data set cut into clients, sets and the server's parts."""
    pool = read_source(config, data_root)
    if not isinstance(pool, Pool):
        raise UserError(f"{config.data} holds silos; FedUL needs x_train, y_train, x_test, y_test, or a folder of sets")
    clients, classes = config.clients, len(pool.classes)
    wanted = {"clients x train_per_client": clients * config.train_per_client, "labeled": config.labeled, "validation": config.validation}
    tests = clients * config.test_per_client
    if pool.test is None:
        wanted["clients x test_per_client"] = tests
    elif tests > len(pool.test):
        raise UserError(f"clients x test_per_client = {tests}, {config.data} has {len(pool.test)} test images; lower test_per_client")
    if sum(wanted.values()) > len(pool.train):
        parts = " + ".join(f"{what} ({n})" for what, n in wanted.items())
        raise UserError(f"{parts} need {sum(wanted.values())} images, {config.data} has {len(pool.train)}; lower one of them")
    ends = np.cumsum([0, *wanted.values()])
    pieces = [take(pool.train, slice(int(a), int(b))) for a, b in pairwise(ends)]
    unlabeled, labeled, validation = (_prepared(piece, config) for piece in pieces[:3])
    test = _prepared(pieces[3] if pool.test is None else take(pool.test, slice(0, tests)), config)

    rng = _rng(config, "sets")
    labels = unlabeled.labels.numpy()
    parts_of = client_parts(labels, clients, config.split, rng, classes)
    theta = [priors.draw_priors(rng, config.sets, classes) for _ in range(clients)]
    if config.legacy_column_norm:
        theta = [sum(theta) / sum(theta).sum(0)] * clients  # type: ignore[union-attr, call-overload]
    elif config.split == "iid":
        theta = theta[:1] * clients  # one matrix for all
    digits = len(str(clients - 1))
    made = []
    for c, part in enumerate(parts_of):
        chosen, sets = (overlapping_sets if config.overlap else client_sets)(labels[part], theta[c], rng)
        table = priors.realised(labels[part][chosen], sets, config.sets, classes)
        mine = take(unlabeled, torch.from_numpy(part[chosen]))
        made.append(own_sets.ClientImages(f"client-{c:0{digits}}", mine.images, torch.from_numpy(sets), table, mine.labels, drawn=theta[c]))
    return own_sets.Material(made, pool.classes, test, labeled if len(labeled) else None, validation if len(validation) else None)


def _check_together(known: list[tuple[priors.Matrix, Indices]], classes: tuple[str, ...]) -> list[str]:
    """What no client can see alone, from the priors and the sizes of each."""
    total = np.sum([table.sum(0) for table, _ in known], axis=0)
    for name, share in zip(classes, total.tolist(), strict=True):
        if share == 0:
            raise InvalidPriors(f"class {name!r} is in no set of any client; remove it, or add a set that has it")
    if any(priors.full_rank(table, sizes) for table, sizes in known):
        return []
    return ["no client's priors have full rank: the sets may not determine a classifier of all classes"]


def _prepared(split: Split, config: Config) -> Split:
    return replace(split, images=resize(split.images, config.image_size)) if config.image_size and len(split) else split


def _rng(config: Config, purpose: str) -> np.random.Generator:
    return np.random.default_rng(derive(config.seed, purpose))
