"""Label skew drawn from a Dirichlet distribution, in the three conventions of the literature."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from ...errors import UserError
from .base import (
    Deal,
    Scheme,
    Share,
    angle_of_each,
    check_enough,
    client_names,
    generator,
    partition,
    wanted_clients,
)

if TYPE_CHECKING:
    from ..dataset import DataSet
    from ..images import Rows
    from ..priors import Matrix
    from ..settings import Data

_ATTEMPTS = 10_000
# Stop after 100 draws if the number of clients with too few images is on average more than five standard
# deviations: then hardly one of 10,000 draws would give zero.
_FIRST_DRAWS, _DEVIATIONS = 100, 5


@partition("dirichlet")
class Dirichlet(Scheme):
    """Draw the classes of clients from Dir(alpha), in one of three conventions.

    The conventions give very different skew for one alpha.

    ``over_clients``: the images of each class are divided among the clients by a draw over the clients; a
        client that already has its share of all images gets no more, and the draw is repeated until every
        client has at least K images, for K classes. Sizes differ.
    Source: VHL (Tang et al., ICML 2022), after Li et al. 2022.

    ``over_classes``: each client draws its shares of the classes, and all clients get the same number of
        images.
    Source: FedCR (Zhang et al., ICML 2023).

    ``over_classes_by_frequency``: as ``over_classes``, but alpha is divided among the classes by their
    frequency: with ten equally frequent classes, alpha = 0.1 gives 0.01 for each class.
    Source: FedBR (Guo et al., ICML 2023).

    If a class is used up, the client gets images of its other classes, or of any class that is left.
    """

    one_class: ClassVar[bool] = True

    convention: Literal["over_clients", "over_classes", "over_classes_by_frequency"]
    """the drawn shares: of a class over the clients, or of a client over the classes"""
    alpha: float = Field(default=0.1, gt=0)
    """concentration; a smaller value means more skew"""
    test: Literal["own", "even"] = "own"
    """own: training and test images are dealt together, then cut; even: equal random parts of the test
    images"""
    angles: tuple[float, ...] = ()
    """degrees, counter-clockwise; one per client, or a number of angles that divides the number of clients;
    empty: none"""

    def deal(self, table: DataSet, data: Data, seed: int) -> Deal:
        """Deal by label, at random by the seed."""
        rng, classes = generator(seed), len(table.classes)
        clients = wanted_clients(data, len(self.angles) or None)
        angles = angle_of_each(self.angles, clients)
        supply, wanted, tests = _supply(table, data, clients, own=self.test == "own", rng=rng)
        if self.convention == "over_clients":
            supply = supply[:wanted]
            parts = _over_clients(table.labels[supply], clients, self.alpha, classes, rng)
        else:
            frequency = np.bincount(table.labels[supply], minlength=classes) / len(supply)
            concentration = self.alpha * (
                frequency if self.convention == "over_classes_by_frequency" else np.ones(classes)
            )
            parts = _over_classes(table.labels[supply], clients, wanted, concentration, rng)
        shares = zip(client_names("silo", clients), parts, tests, angles, strict=True)
        return Deal(tuple(Share(name, supply[part], test, angle) for name, part, test, angle in shares))


def _supply(
    table: DataSet, data: Data, clients: int, *, own: bool, rng: np.random.Generator
) -> tuple[Rows, int, list[Rows | None]]:
    """Return the images to deal by label, their number, and each client's test images, dealt evenly."""
    s, t = clients * data.train_per_client, clients * data.test_per_client
    if own:
        everything = table.train if table.test is None else np.concatenate([table.train, table.test])
        check_enough(table, data, clients, "", s + t, everything)
        return rng.permutation(everything), s + t, [None] * clients
    if table.test is None:
        check_enough(table, data, clients, "", s + t, table.train)
        supply, tests = table.train[t:], table.train[:t]
    else:
        check_enough(table, data, clients, "training ", s, table.train)
        check_enough(table, data, clients, "test ", t, table.test)
        supply, tests = table.train, table.test[:t]
    return supply, s, list(np.array_split(rng.permutation(tests), clients))


def _over_clients(
    labels: Rows, clients: int, alpha: float, classes: int, rng: np.random.Generator
) -> list[Rows]:
    """Return the positions of each client's images."""
    if clients * classes > len(labels):
        few = f"{len(labels)} images are too few for {clients} clients with {classes} images each"
        raise UserError(f"{few}, one per class; raise train_per_client")
    by_class = [np.flatnonzero(labels == k) for k in range(classes)]
    shorts: list[int] = []
    for attempt in range(1, _ATTEMPTS + 1):
        pieces, sizes = [], np.zeros(clients, np.int64)
        for of_class in by_class:
            drawn = rng.permutation(of_class)
            weights = rng.dirichlet(np.full(clients, alpha)) * (sizes < len(labels) / clients)
            if weights.sum() == 0:  # the clients with room for more images drew a share of zero
                weights = (sizes < len(labels) / clients).astype(float)
            ends = (weights.cumsum() / weights.sum() * len(drawn)).astype(np.int64)
            ends[-1] = len(drawn)
            sizes += np.diff(ends, prepend=0)
            pieces.append((drawn, ends))
        short = int((sizes < classes).sum())
        if short == 0:
            parts = zip(*(np.split(drawn, ends[:-1]) for drawn, ends in pieces), strict=True)
            return [np.concatenate(part) for part in parts]
        shorts.append(short)
        if attempt == _FIRST_DRAWS and np.mean(shorts) > _DEVIATIONS * np.std(shorts):
            break
    raise UserError(
        f"key 'alpha': {attempt} draws with alpha = {alpha:g} gave at least {min(shorts)} of {clients}"
        f" clients fewer than {classes} images; raise alpha or train_per_client, or lower clients"
    )


def _over_classes(
    labels: Rows, clients: int, wanted: int, concentration: Matrix, rng: np.random.Generator
) -> list[Rows]:
    """Return the positions of each client's images: ``wanted`` in total, one at a time to a random client."""
    classes = len(concentration)
    shares = rng.dirichlet(np.maximum(concentration, 1e-12), clients)
    supply = [list(rng.permutation(np.flatnonzero(labels == k))) for k in range(classes)]
    left = np.array([len(of_class) for of_class in supply])
    parts: list[list[int]] = [[] for _ in range(clients)]
    for client, draw in zip(rng.permutation(np.arange(wanted) % clients), rng.random(wanted), strict=True):
        weights = (shares[client] * (left > 0)).cumsum()
        if weights[-1] <= 0:  # no image is left of the classes in which the client has a share
            weights = left.cumsum().astype(float)
        k = int(np.searchsorted(weights, draw * weights[-1], side="right"))
        parts[client].append(supply[k].pop())
        left[k] -= 1
    return [np.array(part, np.int64) for part in parts]
