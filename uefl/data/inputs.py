"""The kinds of inputs that clients train on: images, the columns of a table, and sequences of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InputKind = Literal["images", "columns", "tokens"]


@dataclass(frozen=True)
class Inputs:
    """The kind of the inputs of a federation, and its facts besides their shape.

    ========  ===================================  ==================
    kind      inputs of a client                   shape of one input
    ========  ===================================  ==================
    images    ``[N, C, H, W]`` uint8               (C, H, W)
    columns   ``[N, F]`` float64                   (F,)
    tokens    ``[N, L]`` int64, 0 is padding       (L,)
    ========  ===================================  ==================
    """

    kind: InputKind = "images"
    names: tuple[str, ...] = ()
    """names of the columns of a table; empty: columns are known by their position"""
    vocabulary: int = 0
    """number of different tokens, padding included"""

    @property
    def noun(self) -> str:
        """Return the word for several inputs in messages."""
        return {"images": "images", "columns": "rows", "tokens": "sequences"}[self.kind]


IMAGES = Inputs()
