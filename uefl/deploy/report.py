"""The report of a silo before a run: its schema, and the reasons to refuse it."""

from __future__ import annotations

import json
import math
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from ..data.federation import Sizes
from ..data.inputs import Inputs
from ..data.notes import check_names
from ..data.prepare import ReportedStatistics
from ..data.unlabeled_sets import PriorCoverage
from ..data.vectors import MOST_TOKENS
from ..engines import faults
from ..engines.codec import Packet
from ..errors import UserError

_CLASSES = 10_000
"""most classes of one silo: the last layer of the network has a row for each class"""
_IMAGES = 10**9
"""most images of one silo, in each split"""
_LENGTH = 100_000
"""most columns of a table, or tokens of a sequence"""
_LARGEST = 1e100
"""largest mean of a column, so that its square is finite"""
_VALUES = 2**28
"""most values of one image: a picture of a camera has a tenth of them"""
_PROGRAM = {"precision", "torch"}

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Split(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    sha256: Sha256
    sets_sha256: Sha256 = ""
    images_of_class: tuple[Annotated[int, Field(ge=0)], ...] = ()


class SiloReport(BaseModel):
    """A report that has passed the checks of :func:`read`."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    client: str
    kind: Literal["labeled", "sets"]
    classes: Annotated[tuple[str, ...], Field(max_length=_CLASSES)]
    shape: tuple[PositiveInt, ...]
    inputs: Inputs
    sizes: Sizes
    content: dict[Literal["train", "holdout", "test"], _Split]
    reach: PriorCoverage | None
    torch: Annotated[str, Field(pattern="^[0-9A-Za-z.+_-]{1,40}$")]
    precision: Literal["bf16", "fp32"]
    statistics: ReportedStatistics = Field({}, exclude=True)
    """statistics of the inputs, for their normalization"""

    @property
    def program(self) -> dict[str, str]:
        """Return the facts about the silo's program, which may change when it starts again."""
        return self.model_dump(include=_PROGRAM)

    def has_data_of(self, other: SiloReport) -> bool:
        """Return whether two reports describe the same data."""
        return self.model_dump(exclude=_PROGRAM) == other.model_dump(exclude=_PROGRAM)


def read(packet: Packet) -> SiloReport:
    """Return the report of a silo, or raise UserError with the reason to refuse it."""
    values, statistics = packet
    if (error := values.get("error")) is not None:
        raise UserError(faults.describe(error if isinstance(error, str) else ""))
    try:
        report = SiloReport.model_validate_json(json.dumps(values))
    except ValidationError as invalid:
        place = invalid.errors(include_url=False, include_input=False)[0]["loc"]
        key = f": key {place[0]!r}" if place else ""
        raise UserError(f"its report is not complete, or has an impossible value{key}") from None
    report.statistics = statistics
    check_names("silo", [report.client])
    check_names("class", report.classes)
    check_names("column", report.inputs.names)
    if not _is_consistent(report):
        raise UserError("its report contradicts itself")
    why = _images_refusal(report) if report.inputs.kind == "images" else _vectors_refusal(report)
    if why is not None:
        raise UserError(why)
    return report


def _is_consistent(report: SiloReport) -> bool:
    """Return whether the parts of a report match each other, and its numbers are possible."""
    sizes, inputs, reach = report.sizes, report.inputs, report.reach
    for part, split in report.content.items():
        counts, labeled = split.images_of_class, "images_of_class" in split.model_fields_set
        if labeled and (len(counts) != len(report.classes) or sum(counts) != getattr(sizes, part)):
            return False
    if report.kind == "labeled":
        fits_kind = not sizes.sets
    else:
        known = reach is not None and len(reach.has) == len(report.classes)
        fits_kind = known and len(sizes.sets) > 0 and sum(sizes.sets) == sizes.train
    return (
        fits_kind
        and all(0 <= size <= _IMAGES for size in (sizes.train, sizes.holdout, sizes.test, *sizes.sets))
        and bool(report.content.keys() & {"train", "test"})
        and len(report.shape) == (3 if inputs.kind == "images" else 1)
        and (0 < inputs.vocabulary <= MOST_TOKENS if inputs.kind == "tokens" else inputs.vocabulary == 0)
        and not (inputs.names and inputs.kind == "images")
    )


def _images_refusal(report: SiloReport) -> str | None:
    """Return why a silo of images cannot be one of a run, or None if it can."""
    channels, height, width = report.shape
    if channels not in (1, 3) or math.prod(report.shape) > _VALUES:
        return (
            f"it has images of {channels} x {height} x {width}; expected 1 or 3 channels, and at most"
            f" {_VALUES} values"
        )
    counts = report.statistics.get("pixels", {}).get("counts")
    wrong = "its histogram does not match the number and the shape of its images"
    if counts is None or counts.dtype != torch.int64 or list(counts.shape) != [channels, 256]:
        return wrong
    sums = {sum(row) for row in counts.tolist()}  # a sum of integers of Python, which do not overflow
    possible = {images * height * width for images in _rows(report)}
    return wrong if int(counts.min()) < 0 or len(sums) != 1 or not sums <= possible else None


def _vectors_refusal(report: SiloReport) -> str | None:
    """Return why a silo of columns or tokens cannot be one of a run, or None if it can."""
    (length,) = report.shape
    if length > _LENGTH or len(report.inputs.names) not in (0, length):
        return f"it has inputs of length {length}, expected at most {_LENGTH}, and a name for each or none"
    if not report.statistics:  # tokens, or columns that are not standardized, have no moments
        return None
    moments = report.statistics.get("columns", {}).get("moments")
    if moments is None or moments.dtype != torch.float64 or list(moments.shape) != [3, length]:
        return "its moments do not match its number of columns"
    rows, means, squares = moments
    if not bool((rows == rows[0]).all()) or float(rows[0]) not in _rows(report):
        return "its moments do not match its number of rows"
    finite = (means.abs() <= _LARGEST) & (squares >= 0) & (squares <= _LARGEST**2)
    return None if bool(finite.all()) else "its moments are not finite"


def _rows(report: SiloReport) -> tuple[int, int]:
    """Return the possible numbers of training rows: without and with the holdout."""
    return report.sizes.train, report.sizes.train + report.sizes.holdout
