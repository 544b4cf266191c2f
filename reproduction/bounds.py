"""Evaluate the bounds of the UEFL paper's theory on finished runs: ``python reproduction/bounds.py RUN...``.

With ``--save``, the measurements of every client replace reproduction/results/bounds.json. Without runs, the
table is of the saved measurements. docs/theory.md explains the bounds and the table. All bounds are computed
as natural logarithms, because some are larger than any float.

Source: Zhang, Cao and Liu 2025, appendices A and B; Liu et al. 2021, "Discrete-Valued Neural Communication";
Weissman et al. 2003, "Inequalities for the L1 Deviation of the Empirical Distribution".
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

import uefl
from uefl.algorithms.uefl.codebook_algorithm import CodebookAlgorithm
from uefl.algorithms.uefl.quantizer import Quantizer
from uefl.data import build
from uefl.data.federation import LabeledData
from uefl.models.net import TokenNet
from uefl.models.normalization import normalized
from uefl.models.saved import SavedModel

RESULTS = Path(__file__).parent / "results" / "bounds.json"
DELTA = 0.05
"""the largest probability that a bound fails"""
NOISE = (0.1, 0.3, 1.0)
"""standard deviation of the noise, as a multiple of the standard deviation of the features"""


def mean_bound(n: int, log_cells: float) -> float:
    """Return ln of the bound on ``|expectation - mean over n images|`` for functions with values in [0, 1].

    The bound holds for all cells at once: Hoeffding's inequality and a union bound.
    """
    return 0.5 * math.log((log_cells + math.log(2 / DELTA)) / (2 * n))


def gap_bound(n: int, log_cells: float, classes: int) -> float:
    """Return ln of the bound on the gap between training and expected accuracy, for all classifiers of cells.

    The gap is at most half the L1 distance between the empirical and the true distribution of pairs of a
    cell and a class.
    """
    log_pairs = log_cells + math.log(2 * classes * math.log(2))
    return 0.5 * (_log_sum(log_pairs, math.log(2 * math.log(1 / DELTA))) - math.log(n)) - math.log(2)


def covering(n: int, dim: int) -> float:
    """Return ln of the number of balls of radius R / (2 sqrt(n)) that cover features of ``dim`` elements."""
    return dim * math.log(4 * math.sqrt(n * dim))


def _log_sum(a: float, b: float) -> float:
    return max(a, b) + math.log1p(math.exp(-abs(a - b)))


class ClientMeasurements(NamedTuple):
    """The measurements of one client."""

    n: int
    """training images"""
    tests: int
    """test images"""
    log_cells: float
    """ln of the number of values that a quantized token can have; NaN without a codebook"""
    dim: int
    """elements of a token"""
    positions: int
    """tokens of an image"""
    classes: int
    deviation: float
    """largest difference between the frequencies of a cell on training and test images, or NaN"""
    gap: float
    """training accuracy - test accuracy, both of the final model"""
    changed: tuple[float, ...]
    """share of the predictions on test images that change with each ``NOISE`` in the features"""


class _ClientNetwork(NamedTuple):
    """A saved network with the codebook of one client, or with none."""

    model: SavedModel
    net: TokenNet
    codebook: torch.Tensor | None

    def classes(self, images: torch.Tensor, noise: float = 0.0) -> torch.Tensor:
        """Predict ``[N]`` classes from features with added noise."""
        tokens = self._tokens(images)
        generator = torch.Generator().manual_seed(0)
        tokens = tokens + noise * tokens.std() * torch.randn(tokens.shape, generator=generator)
        if self.codebook is not None:
            tokens = self._quantizer(tokens, self.codebook).values
        return self.net.classify(tokens).argmax(-1)

    def cells(self, images: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[N, segments]`` of each token of the images."""
        assert self.codebook is not None
        codes = self._quantizer(self._tokens(images), self.codebook).codes
        return codes.reshape(len(images) * self.net.positions, -1)

    def _tokens(self, images: torch.Tensor) -> torch.Tensor:
        return self.net.tokens(normalized(images, self.model.mean, self.model.std))

    @property
    def _quantizer(self) -> Quantizer:
        assert isinstance(self.model.algorithm, CodebookAlgorithm)
        return self.model.algorithm.quantizer


def largest_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference between the frequencies of equal rows in ``[N, s]`` and ``[M, s]``."""
    cells, at = torch.cat([first, second]).unique(dim=0, return_inverse=True)
    shares = [part.bincount(minlength=len(cells)) / len(part) for part in at.split([len(first), len(second)])]
    return float((shares[0] - shares[1]).abs().max())


@torch.no_grad()
def measure(run: uefl.Run, arm: str, data_root: Path | None) -> Iterator[ClientMeasurements]:
    """Yield the measurements of each client of a run."""
    model, config = run.model(arm), run.config
    net, own = model.members[0]
    assert isinstance(net, TokenNet)
    for client in build(config.data, kind="labeled", seed=config.run.seed, data_root=data_root).clients:
        data = client.load()
        assert isinstance(data, LabeledData)
        yield _found(_ClientNetwork(model, net.eval(), own.get(client.name, {}).get("codebook")), data)


def _found(network: _ClientNetwork, data: LabeledData) -> ClientMeasurements:
    expected = network.classes(data.test.images)
    accuracies = [
        float((predicted == split.labels).double().mean())
        for predicted, split in ((network.classes(data.train.images), data.train), (expected, data.test))
    ]
    log_cells = deviation = math.nan
    if network.codebook is not None:
        codes = network.cells(data.train.images)
        log_cells = codes.shape[1] * math.log(network.codebook.shape[-2])
        deviation = largest_difference(codes, network.cells(data.test.images))
    changed = (
        float((network.classes(data.test.images, noise) != expected).double().mean()) for noise in NOISE
    )
    return ClientMeasurements(
        len(data.train),
        len(data.test),
        log_cells,
        network.net.dim,
        network.net.positions,
        int(data.train.labels.max()) + 1,
        deviation,
        accuracies[0] - accuracies[1],
        tuple(changed),
    )


HEADER = (
    "| arm | deviation | bound 1 | bound 2 | gap | log10 bound 3 | log10 bound 4 | changed by noise |\n"
    "| :-- | --: | --: | --: | --: | --: | --: | --: |"
)
ByArm = dict[str, list[ClientMeasurements]]


def table(arms: ByArm) -> str:
    """Return the table of docs/theory.md, with a row for each arm."""
    return "\n".join([HEADER, *(row(arm, found) for arm, found in arms.items())])


def save(arms: ByArm) -> None:
    """Save the measurements by arm: a list with the fields of each client, null for NaN."""
    plain = {
        arm: [
            {key: None if value != value else value for key, value in client._asdict().items()}
            for client in found
        ]
        for arm, found in arms.items()
    }
    RESULTS.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def saved() -> ByArm:
    """Return the saved measurements."""
    return {
        arm: [
            ClientMeasurements(**{key: math.nan if value is None else value for key, value in client.items()})
            for client in found
        ]
        for arm, found in json.loads(RESULTS.read_text(encoding="utf-8")).items()
    }


def row(arm: str, found: Sequence[ClientMeasurements]) -> str:
    """Return the row of an arm: means over the clients, and the largest deviation and gap."""
    first, second, third, fourth = (fmean(values) for values in zip(*map(bounds, found), strict=True))
    changed = " / ".join(f"{fmean(shares):.3f}" for shares in zip(*(f.changed for f in found), strict=True))
    deviation = max(f.deviation for f in found)
    values = [f"{deviation:.3f}", f"{first:.3f}", f"{second:.2f}", f"{max(f.gap for f in found):+.3f}"]
    values += [f"{third:.1f}", f"{fourth:.0f}", changed]
    return " | ".join([f"| {arm}", *("-" if text == "nan" else text for text in values)]) + " |"


def bounds(found: ClientMeasurements) -> tuple[float, float, float, float]:
    """Return the four bounds for a client, the last two as log10.

    The first two bound the difference of two means, so they are sums over the training and the test images.
    """
    sizes, dim, positions = (found.n, found.tests), found.dim, found.positions
    return (
        sum(math.exp(mean_bound(n, found.log_cells)) for n in sizes),
        sum(math.exp(mean_bound(n, covering(n, dim))) for n in sizes),
        gap_bound(found.n, positions * found.log_cells, found.classes) / math.log(10),
        gap_bound(found.n, covering(found.n, positions * dim), found.classes) / math.log(10),
    )


def main() -> None:
    """Print a row for each arm, over the clients of all runs."""
    parser = argparse.ArgumentParser(description="Evaluate the bounds of the theory on finished runs.")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--arms", default="fedavg,uefl", help="arms, separated by commas")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets, as in the runs")
    parser.add_argument("--save", action="store_true", help=f"write the measurements to {RESULTS.name}")
    args = parser.parse_args()
    if not args.runs:
        print(table(saved()))
        return
    runs = [uefl.load(folder) for folder in args.runs]
    arms = {
        arm: [found for run in runs for found in measure(run, arm, args.data_root)]
        for arm in args.arms.split(",")
    }
    if args.save:
        save(arms)
    print(table(arms))


if __name__ == "__main__":
    main()
