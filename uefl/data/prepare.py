"""Convert the inputs of a source to the form that a federation shares, and measure mean and deviation."""

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


@dataclass(frozen=True)
class Preparation:
    """Reads images in one number of channels and one size, and columns and tokens without a change."""

    shape: tuple[int, ...]
    """shape of a prepared input: (C, H, W), (F,) or (L,)"""
    inputs: Inputs = IMAGES
    image_size: int = 0
    """side of the square that images are resized to; 0: images are not resized"""
    standard: bool = True
    """whether columns are standardized, and so measured"""

    @classmethod
    def of(cls, sources: Sequence[Source], image_size: int, standard: bool = True) -> Preparation:
        """Return the preparation for the inputs of several sources, in color if an image of one is in color.

        Raises:
            UserError: images differ in size and are not resized, or ``image_size`` is set for other inputs.
        """
        first = sources[0]
        if isinstance(first, Vectors):
            if image_size:
                kind = first.inputs.kind
                raise UserError(
                    f"key 'image_size': only images are resized, and the data are {kind}; set it to 0"
                )
            return cls(tuple(first.values.shape[1:]), first.inputs, standard=standard)
        images = [source for source in sources if isinstance(source, ImageList)]
        channels = max(source.channels for source in images)
        if image_size:
            return cls((channels, image_size, image_size), image_size=image_size)
        h0, w0 = first.shapes[0].tolist()
        for source in images:
            different = np.flatnonzero((source.shapes != first.shapes[0]).any(1))
            if len(different):
                h, w = source.shapes[different[0]]
                pair = f"{source.name(int(different[0]))} is {w}x{h} and {first.name(0)} is {w0}x{h0}"
                raise UserError(f"{pair}; set image_size to resize all images to one square")
        return cls((channels, h0, w0))

    def __call__(
        self, source: Source, rows: Rows, angle: float = 0.0, *, legacy_center: bool = False
    ) -> torch.Tensor:
        """Return the inputs ``[n, ...]``: images resized, then turned by ``angle`` degrees counter-clockwise.

        Raises:
            UserError: ``angle`` is not 0, and the inputs are not images.
        """
        if isinstance(source, Vectors):
            if angle:
                kind = self.inputs.kind
                raise UserError(f"key 'data.partition.angles': only images can be turned; omit it for {kind}")
            return source.values[torch.from_numpy(rows)]
        pixels = source.read(rows, self.image_size).expand(-1, self.shape[0], -1, -1).contiguous()
        return rotate(pixels, angle, legacy_center=legacy_center) if len(pixels) else pixels

    def check_memory(self, count: int) -> None:
        """Refuse ``count`` images that do not fit into the memory together (other inputs are there already).

        Raises:
            UserError: the images do not fit.
        """
        needed, there = count * math.prod(self.shape), memory()
        if self.inputs.kind == "images" and needed > there:
            c, h, w = self.shape
            raise UserError(
                f"{count} images of {c} x {h} x {w} take {needed / 1e9:.0f} GB, this machine has"
                f" {there / 1e9:.0f} GB; lower image_size"
            )

    def statistics(self) -> PixelCounts | Moments:
        """Return new statistics, without any client."""
        if self.inputs.kind == "images":
            return PixelCounts(self.shape[0])
        return Moments(self.shape[0] if self.inputs.kind == "columns" else 0, self.standard)


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
        """Add the report of a silo, with gray images as color images if other silos have color."""
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
        """Return the statistics of one client for its report, none where columns are not standardized."""
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
