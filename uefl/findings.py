"""The section that an algorithm adds to a report, made from the records of its arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class History:
    """The records of one arm of a run, finished or not."""

    records: list[dict[str, Any]]
    """lines of metrics.jsonl of the clients that train, by round and client"""
    labels: Mapping[str, str]
    """short names of the clients for display"""
    classes: int
    """0 if the run folder does not tell"""
    finished: bool


@dataclass(frozen=True)
class Shares:
    """Counts of every client, drawn as a picture with a row per client, in percent of the row."""

    name: str
    """name of the file; the name of the arm follows"""
    title: str
    counts: Mapping[str, Sequence[float]]
    """by client; where the lists differ in length, the picture is gray behind the end of a shorter one"""
    label: str
    """label of the horizontal axis"""
    caption: str
    group: int
    """columns between two white lines"""


@dataclass(frozen=True)
class Findings:
    """A section of a report.

    Sections with the same title form one section. Each part has the name of its arm.
    """

    title: str
    lines: list[str] = field(default_factory=list)
    """sentences; the report puts the name of the arm before each"""
    header: list[str] = field(default_factory=list)
    """column names of the table"""
    rows: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """sentences that a reader must know before the numbers"""
    shares: Shares | None = None
