"""Name the variants of benchmarks/variants, and lay out their inputs."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from .gpu_driver import MOST_SHARED

FOLDER = Path(__file__).with_name("variants")


@dataclass(frozen=True)
class SearchVariant:
    """A kernel of variants/table.h, described by its name."""

    name: str

    @cached_property
    def _parts(self) -> list[str]:
        return self.name.split("_")

    @property
    def group(self) -> int:
        """Return the number of codewords that share one index in the packed scores."""
        return {"cross": 1, "g4": 4, "g8": 8}[self._parts[0]]

    @property
    def shift(self) -> int:
        """Return the factor of the scores, which makes room for the packed indices."""
        return 32 // self.group

    @property
    def warpgroups(self) -> int:
        """Return the number of warpgroups that multiply."""
        return int(self._parts[1])

    @property
    def chunks(self) -> int:
        """Return the number of blocks of 64 elements in a row."""
        return int(self._parts[2])

    @property
    def options(self) -> set[str]:
        """Return the options: first, marked, or none."""
        return set(self._parts[3:])

    @property
    def threads(self) -> int:
        """Return the number of threads of a block.

        One more warpgroup copies.
        """
        return (self.warpgroups + 1) * 128

    @property
    def starts(self) -> int:
        """Return the number of start values of a lane in a tile, as floats."""
        return 68 if "first" in self.options else 36

    @property
    def tiles(self) -> int:
        """Return the number of tiles of rows that each warpgroup has in shared memory."""
        return 1 if self.chunks > 2 else 2

    def shared(self, places: int) -> int:
        """Return the bytes of shared memory for this number of codebook tiles.

        They include 1024 bytes for the alignment.
        """
        rows, barriers = (
            self.warpgroups * self.tiles * self.chunks * 64 * 64 * 2,
            16 * (places + self.warpgroups * self.tiles),
        )
        return places * (128 * 64 * 2 + 16 * self.starts) + rows + barriers + 1024

    def rings(self, k: int) -> list[int]:
        """Return the numbers of codebook tiles in shared memory to time.

        This is the whole codebook if it fits, and two sizes of a ring otherwise.
        """
        needed = k // 128 * self.chunks
        fits = [
            places
            for places in (needed, 6, 5, 4, 3)
            if places <= needed and self.shared(places) <= MOST_SHARED
        ]
        return (
            fits[:1]
            if fits[:1] == [needed]
            else [fits[0], *(places for places in (4, 3) if places < fits[0])][:2]
            if fits
            else []
        )


class SearchWork(ctypes.Structure):
    """``SearchWork`` of variants/search.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "codewords", "starts", "found", "marks")),
        *((name, ctypes.c_int) for name in ("blocks", "tiles", "places", "shift")),
    )


def variants() -> list[SearchVariant]:
    """Return the variants of variants/table.h."""
    table = (FOLDER / "table.h").read_text()
    return [SearchVariant(name) for name in re.findall(r"^VARIANT\((\w+),", table, re.M)]


def tiles(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return values [N, d] as tiles [N / rows, d / 64, rows, 64] in the layout of products.

    The 16 bytes with number i of row r are at position i ^ r % 8.
    """
    n, d = values.shape
    pieces = values.view(n // rows, rows, d // 64, 8, 8).transpose(1, 2)
    place = torch.arange(8, device=values.device) ^ (torch.arange(rows, device=values.device) % 8)[:, None]
    return torch.take_along_dim(pieces, place[None, None, :, :, None], 3).contiguous()


def columns(first: bool) -> torch.Tensor:
    """Return the column of a tile for each lane of four and each of its starts.

    The shape is [4, 32], or [4, 64] where the sums begin at the starts.
    """
    lane, number = torch.arange(4)[:, None], torch.arange(64 if first else 32)
    return number // 4 * 8 + 2 * lane + number % 2 if first else number // 2 * 8 + 2 * lane + number % 2
