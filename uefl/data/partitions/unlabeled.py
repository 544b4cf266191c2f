"""Unlabeled sets dealt from a data set, each with its class shares."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ..federation import Kind
from .base import Scheme, partition


@partition("unlabeled")
class Unlabeled(Scheme):
    """Clients get unlabeled images in sets, each with its class shares."""

    kind: ClassVar[Kind] = "sets"

    split: Literal["iid", "noniid"] = Field("iid", description="a random part for each client, or two classes dominate each client")
    sets: int = Field(10, ge=2, description="sets of each client")
    overlap: bool = Field(False, description="as the published code draws them: one image may be in several sets of its client")
    legacy_column_norm: bool = Field(False, description="with overlap and iid: class weights divided by column sums, as published")
