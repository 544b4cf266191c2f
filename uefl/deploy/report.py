"""The report of a silo before a run: its schema, and the reasons to refuse it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from ..data.inputs import Kind
from ..data.notes import check_names
from ..data.vectors import MOST_TOKENS
from ..engines import faults
from ..errors import UserError

if TYPE_CHECKING:
    from ..engines.flower.roster import Report

_CLASSES = 10_000
"""of one silo: the last layer of the network has a row for each"""
_IMAGES = 10**9
"""of one silo, in each split"""
_LENGTH = 100_000
"""columns of a table, or tokens of a sequence"""
_LARGEST = 1e100
"""mean of a column: its square is finite"""
_VALUES = 2**28
"""of one image: a picture of a camera has a tenth"""

Count = Annotated[int, Field(ge=0, le=_IMAGES)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Split(_Part):
    sha256: Sha256
    sets_sha256: Sha256 = ""
    images_of_class: Sequence[Count] = ()


class _Sizes(_Part):
    train: Count
    holdout: Count
    test: Count
    sets: Sequence[Count]


class _Inputs(_Part):
    kind: Kind
    names: Sequence[str]
    vocabulary: Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class _Reach(_Part):
    has: Sequence[bool]
    full_rank: bool


class _Header(BaseModel):
    model_config = ConfigDict(strict=True)

    client: str
    kind: Literal["labeled", "sets"]
    classes: Annotated[Sequence[str], Field(max_length=_CLASSES)]
    shape: Sequence[PositiveInt]
    inputs: _Inputs
    sizes: _Sizes
    content: dict[Literal["train", "holdout", "test"], _Split]
    reach: _Reach | None
    torch: Annotated[str, Field(pattern="^[0-9A-Za-z.+_-]{1,40}$")]
    precision: Literal["bf16", "fp32"]


def refusal(report: Report) -> str | None:
    """Return why a node that reports cannot be a silo of a run, or None."""
    told, parts = report
    error = told.get("error")
    if error is not None:
        return faults.describe(error if isinstance(error, str) else "")
    try:
        header = _Header.model_validate(told)
        check_names("silo", [header.client])
        check_names("class", header.classes)
        check_names("column", header.inputs.names)
    except ValidationError as invalid:
        key = invalid.errors(include_url=False, include_input=False)[0]["loc"][0]
        return f"its report is not complete, or has an impossible value: key {key!r}"
    except UserError as invalid:
        return str(invalid)
    if not _is_consistent(header):
        return "its report contradicts itself"
    refused = _images_refusal if header.inputs.kind == "images" else _vectors_refusal
    return refused(header, parts)


def _is_consistent(header: _Header) -> bool:
    """Return whether the parts of a report match each other."""
    sizes, inputs, reach = header.sizes, header.inputs, header.reach
    for part, split in header.content.items():
        counts, labeled = split.images_of_class, "images_of_class" in split.model_fields_set
        if labeled and (len(counts) != len(header.classes) or sum(counts) != getattr(sizes, part)):
            return False
    if header.kind == "labeled":
        fits_kind = not sizes.sets
    else:
        known = reach is not None and len(reach.has) == len(header.classes)
        fits_kind = known and len(sizes.sets) > 0 and sum(sizes.sets) == sizes.train
    return (
        fits_kind
        and bool(header.content.keys() & {"train", "test"})
        and len(header.shape) == (3 if inputs.kind == "images" else 1)
        and (inputs.vocabulary > 0) == (inputs.kind == "tokens")
        and not (inputs.names and inputs.kind == "images")
    )


def _images_refusal(header: _Header, parts: dict[str, dict[str, torch.Tensor]]) -> str | None:
    """Return why a silo of images cannot be one of a run, or None if it can."""
    channels, height, width = header.shape
    if channels not in (1, 3) or math.prod(header.shape) > _VALUES:
        return (
            f"it has images of {channels} x {height} x {width}; expected 1 or 3 channels, and at most"
            f" {_VALUES} values"
        )
    counts = parts.get("pixels", {}).get("counts")
    wrong = "its histogram does not match the number and the shape of its images"
    if counts is None or counts.dtype != torch.int64 or list(counts.shape) != [channels, 256]:
        return wrong
    sums = {sum(row) for row in counts.tolist()}  # of Python's integers, which do not overflow
    possible = {images * height * width for images in _rows(header)}
    return wrong if int(counts.min()) < 0 or len(sums) != 1 or not sums <= possible else None


def _vectors_refusal(header: _Header, parts: dict[str, dict[str, torch.Tensor]]) -> str | None:
    """Return why a silo of columns or tokens cannot be one of a run, or None if it can."""
    (length,) = header.shape
    if length > _LENGTH or len(header.inputs.names) not in (0, length):
        return f"it has inputs of length {length}, expected at most {_LENGTH}, and a name for each or none"
    if not parts:  # of tokens, or of columns that are not standardized
        return None
    moments = parts.get("columns", {}).get("moments")
    if moments is None or moments.dtype != torch.float64 or list(moments.shape) != [3, length]:
        return "its moments do not match its number of columns"
    rows, means, squares = moments
    if not bool((rows == rows[0]).all()) or float(rows[0]) not in _rows(header):
        return "its moments do not match its number of rows"
    finite = (means.abs() <= _LARGEST) & (squares >= 0) & (squares <= _LARGEST**2)
    return None if bool(finite.all()) else "its moments are not finite"


def _rows(header: _Header) -> tuple[int, int]:
    """Return the possible numbers of training rows: without and with the holdout."""
    return header.sizes.train, header.sizes.train + header.sizes.holdout
