"""Format counts, spans and names for tables, pictures and the terminal."""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_LONGEST = 32  # characters of a client's name


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 round``, ``2 rounds``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def mean(records: Iterable[Mapping[str, Any]], key: str, weighted: Collection[str] = ()) -> float | None:
    """Return the mean over clients, in ``weighted`` metrics by test inputs, or None if no record has it."""
    found = [record for record in records if record.get(key) is not None]
    weights = [record.get("tested", 0) for record in found] if key in weighted else []
    if not found:
        return None
    return statistics.fmean([record[key] for record in found], weights if sum(weights) else None)


def means(records: list[dict[str, Any]]) -> str:
    """Return the means of accuracy, entropy and epsilon of a round over the training clients, as text."""
    trained = [record for record in records if not record.get("unseen")]
    found = {key: mean(trained, key) for key in ("accuracy", "entropy", "epsilon")}
    return "  ".join(f"{key} {value:.3f}" for key, value in found.items() if value is not None)


def spans(numbers: Iterable[int]) -> str:
    """Return ``1, 3-5`` for 1, 3, 4 and 5, without duplicates."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges)


def label(name: str) -> str:
    """Return a name as one short line, without control characters and without the middle of a long name."""
    plain = " ".join("".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in name).split()) or repr(
        name
    )
    if len(plain) <= _LONGEST:
        return plain
    tail = (_LONGEST - 1) // 3
    return f"{plain[: _LONGEST - 1 - tail]}…{plain[-tail:]}"


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return a distinct label for every name."""
    made: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        text, number = label(name), 2
        while text in taken:
            text, number = f"{label(name)} ({number})", number + 1
        taken.add(text)
        made[name] = text
    return made
