"""Convert the inputs of a source to the form that all clients of a federation share.

The preparation also measures the mean and the deviation of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import UserError
from ..paths import memory
from .images import ImageList, Rows
from .inputs import IMAGES, Inputs
from .rotate import rotate
from .vectors import Vectors

Source = ImageList | Vectors
ReportedStatistics = dict[str, dict[str, torch.Tensor]]
"""tensors of a report by group and name"""


def prepare_for(
    sources: Sequence[Source], image_size: int, standard: bool = True
) -> Preparation | NoPreparation:
    """Return the preparation for the inputs of several sources.

    Args:
        image_size: side of the square that images are resized to; 0: images are not resized.
        standard: whether columns are standardized, and so measured.

    Raises:
        UserError: the inputs have different sizes or kinds, or a key needs images.
    """
    images = [source for source in sources if isinstance(source, ImageList)]
    if len(images) == len(sources):
        return Preparation.of(images, image_size)
    vectors = [source for source in sources if isinstance(source, Vectors)]
    assert len(vectors) == len(sources)
    if image_size:
        kind = vectors[0].inputs.kind
        raise UserError(f"key 'image_size': only images are resized, and the data are {kind}; omit the key")
    return NoPreparation(vectors[0].inputs, tuple(vectors[0].values.shape[1:]), standard)


@dataclass(frozen=True)
class NoPreparation:
    """Return the columns of a table or sequences of tokens, which need no preparation."""

    inputs: Inputs
    shape: tuple[int, ...]
    """(F,) or (L,)"""
    standard: bool = True
    """whether columns are standardized"""

    def __call__(
        self, source: Source, rows: Rows, angle: float = 0.0, *, legacy_center: bool = False
    ) -> torch.Tensor:
        """Return the inputs ``[n, F]`` float64 or ``[n, L]`` int64.

        Raises:
            UserError: ``angle`` is not 0.
        """
        assert isinstance(source, Vectors)
        if angle:
            kind = self.inputs.kind
            raise UserError(f"key 'data.partition.angles': only images can be turned; omit it for {kind}")
        return source.values[torch.from_numpy(rows)]

    def check_memory(self, count: int) -> None:
        """Do nothing: the inputs are in memory already."""

    def statistics(self) -> PixelCounts | Moments:
        """Return new statistics, without any client."""
        return statistics_of(self.shape, self.inputs, self.standard)


@dataclass(frozen=True)
class Preparation:
    """Reads images in one number of channels and one size."""

    channels: int
    image_size: int
    """0: not resized"""
    shape: tuple[int, int, int]
    """(C, H, W) of a prepared image"""

    @classmethod
    def of(cls, sources: Sequence[ImageList], image_size: int) -> Preparation:
        """Return the preparation for images of several sources.

        All become color images if one of them is in color.

        Raises:
            UserError: the images differ in size and are not resized.
        """
        channels = max(images.channels for images in sources)
        if image_size:
            return cls(channels, image_size, (channels, image_size, image_size))
        first = sources[0]
        for images in sources:
            images.check_one_size()
            (h, w), (h0, w0) = images.shapes[0].tolist(), first.shapes[0].tolist()
            if (h, w) != (h0, w0):
                pair = f"{images.name(0)} is {w}x{h} and {first.name(0)} is {w0}x{h0}"
                raise UserError(f"{pair}; set image_size to resize all images to one square")
        return cls(channels, 0, (channels, h0, w0))

    inputs = IMAGES

    def __call__(
        self, images: Source, rows: Rows, angle: float = 0.0, *, legacy_center: bool = False
    ) -> torch.Tensor:
        """Resize the images ``[n, C, H, W]`` uint8, then turn them by ``angle`` degrees counter-clockwise."""
        assert isinstance(images, ImageList)
        pixels = images.read(rows, self.image_size).expand(-1, self.channels, -1, -1).contiguous()
        return rotate(pixels, angle, legacy_center=legacy_center) if len(pixels) else pixels

    def check_memory(self, count: int) -> None:
        """Refuse ``count`` images that do not fit into the memory of this machine together.

        Raises:
            UserError: the images do not fit.
        """
        needed, there = count * int(np.prod(self.shape)), memory()
        if needed > there:
            c, h, w = self.shape
            raise UserError(
                f"{count} images of {c} x {h} x {w} take {needed / 1e9:.0f} GB, this machine has"
                f" {there / 1e9:.0f} GB; lower image_size"
            )

    def statistics(self) -> PixelCounts | Moments:
        """Return new statistics, without any client."""
        return statistics_of(self.shape, self.inputs)


def statistics_of(shape: tuple[int, ...], inputs: Inputs, standard: bool = True) -> PixelCounts | Moments:
    """Return new statistics of inputs, without any client."""
    if inputs.kind == "images":
        return PixelCounts(shape[0])
    return Moments(shape[0] if inputs.kind == "columns" else 0, standard)


class PixelCounts:
    """Count the pixels of each of the 256 values in each channel."""

    def __init__(self, channels: int) -> None:
        self.counts = torch.zeros(channels, 256, dtype=torch.int64)
        """``[channels, 256]``"""

    def add(self, *parts: torch.Tensor) -> None:
        """Count the images ``[N, C, H, W]`` uint8 of one client."""
        for images in parts:
            for c, counts in enumerate(self.counts):
                counts += images[:, c].flatten().bincount(minlength=256)

    def report(self) -> ReportedStatistics:
        """Return the statistics of one client for its report."""
        return {"pixels": {"counts": self.counts}}

    def join(self, report: ReportedStatistics) -> None:
        """Add the report of a silo.

        Gray images count as color images if other silos have color.
        """
        self.counts += report["pixels"]["counts"].expand(len(self.counts), -1)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the exact mean and standard deviation of each channel, on the scale 0-1."""
        share = self.counts.double() / self.counts.sum(1, keepdim=True)
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(1)
        std = variance.sqrt().clamp_min(1 / 255)  # one gray level: a constant channel is divided by it
        return tuple(mean.tolist()), tuple(std.tolist())


class Moments:
    """Count the rows of each client, with the mean and the sum of squared deviations of each column.

    The result depends neither on the order of the clients nor on the order of their rows.

    Args:
        columns: number of columns; 0 for tokens, which have no mean.
        standard: False leaves the columns unchanged and measures nothing: mean 0, deviation 1.
    """

    def __init__(self, columns: int, standard: bool = True) -> None:
        self._columns, self._standard = columns, standard
        self.clients: list[torch.Tensor] = []
        """for each client ``[3, columns]`` float64: rows, mean, sum of squared deviations"""

    def add(self, *parts: torch.Tensor) -> None:
        """Count the rows ``[N, columns]`` float64 of one client."""
        if not self._columns or not self._standard:
            return
        # sorted, because rounding depends on the order of a sum
        values = np.sort(torch.cat(parts).double().cpu().numpy(), axis=0)
        mean = values.sum(0) / max(len(values), 1)
        of_client = [np.full_like(mean, len(values)), mean, ((values - mean) ** 2).sum(0)]
        self.clients.append(torch.from_numpy(np.stack(of_client)))

    def report(self) -> ReportedStatistics:
        """Return the statistics of one client for its report.

        The report is empty where columns are not standardized.
        """
        return {"columns": {"moments": self.clients[0]}} if self.clients else {}

    def join(self, report: ReportedStatistics) -> None:
        """Add the report of a silo."""
        if self._columns and self._standard:
            self.clients.append(report["columns"]["moments"])

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and the standard deviation of each column over all clients.

        A constant column has the deviation 1.

        Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".
        """
        if not self._standard:
            return (0.0,) * self._columns, (1.0,) * self._columns
        means, deviations = [], []
        for column in range(self._columns):
            triples = [client[:, column].tolist() for client in self.clients]
            total = math.fsum(n for n, _, _ in triples)
            mean = math.fsum(n * own for n, own, _ in triples) / total
            square = math.fsum(value for n, own, left in triples for value in (left, n * (own - mean) ** 2))
            std = math.sqrt(square / total)
            means.append(mean)
            deviations.append(std if std > 1e-12 * abs(mean) else 1.0)
        return tuple(means), tuple(deviations)
