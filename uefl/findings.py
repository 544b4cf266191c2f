"""What an algorithm adds to a report: a section that it makes from the records of its arm, in words, numbers and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class History:
    """What is known of one arm of a run, finished or not."""

    records: list[dict[str, Any]]
    """lines of metrics.jsonl of the clients that are trained on, by round and client"""
    labels: Mapping[str, str]
    """short names of the clients, to show them by"""
    classes: int
    """0: the run folder does not say"""
    finished: bool


@dataclass(frozen=True)
class Shares:
    """Counts of every client, drawn as a picture with a row per client, in percent of the row."""

    name: str
    """of the file, before that of the arm"""
    title: str
    counts: Mapping[str, Sequence[float]]
    """by client; where the lists differ in length, the picture is grey behind the end of a shorter one"""
    label: str
    """of the horizontal axis"""
    caption: str
    group: int
    """columns between two white lines"""


@dataclass(frozen=True)
class Findings:
    """A section of a report. Sections of several arms with one title stand together; the report says which arm each part is of."""

    title: str
    lines: list[str] = field(default_factory=list)
    """sentences, which the name of the arm precedes"""
    header: list[str] = field(default_factory=list)
    """of a table"""
    rows: list[list[str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """sentences that a reader must know before the numbers"""
    shares: Shares | None = None
