"""The report's section on extensible codebooks: the extended clients, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...findings import Findings, History, Shares

RECORDED = {"entropy": ("threshold", "deciding_entropy"), "loss": ("loss_threshold", "deciding_loss")}
"""metrics of a decision by criterion: the threshold and the value compared with it, in nats"""
COLUMNS = frozenset(
    {"codewords", "extended", "extension_gain", *(name for pair in RECORDED.values() for name in pair)}
)
"""metrics that only the server computes"""


class Decision(NamedTuple):
    """A decision after an iteration."""

    round: int
    """rounds trained until then"""
    criterion: str
    """``entropy`` or ``loss``"""
    threshold: float
    measured: dict[str, float]
    """value of each client that is compared with the threshold, in nats"""
    extended: tuple[str, ...]
    """clients that were extended after it"""
    classes: int
    """number of classes if the values are entropies, otherwise 0"""

    @property
    def above(self) -> list[str]:
        """Return the clients above the threshold."""
        return [client for client, value in self.measured.items() if value > self.threshold]

    @property
    def least(self) -> str:
        """Return the client with the least entropy or loss."""
        return min(self.measured, key=lambda name: self.measured[name])

    @property
    def most(self) -> str:
        """Return the client with the highest entropy or loss."""
        return max(self.measured, key=lambda name: self.measured[name])


def findings(history: History, shared: int, drawn: bool = False) -> Findings:
    """Return every decision as a sentence and as a row, and how often each codeword is used.

    Args:
        shared: codewords that a client has from the start; an extension has the same number.
        drawn: whether randomly drawn clients are extended instead of the ones above the threshold.
    """
    decided = list(decisions(history))
    reasons = ((d.threshold, unreachable_threshold(d.threshold, d.classes)) for d in decided)
    warnings = [
        f"the threshold of {_number(threshold)} nats cannot be reached: {reason}"
        for threshold, reason in reasons
        if reason
    ]
    return Findings(
        "Extensions",
        [_sentence(history, d, drawn) for d in decided] or [_undecided(history)],
        ["after round", "of", "threshold", "least", "highest", "above", "extended"],
        [
            [
                str(d.round),
                d.criterion,
                _number(d.threshold),
                *(f"{_number(d.measured[client])} {history.labels[client]}" for client in (d.least, d.most)),
                str(len(d.above)),
                str(len(d.extended)),
            ]
            for d in decided
        ],
        warnings[:1],
        _usage(history, shared),
    )


def decisions(history: History) -> Iterator[Decision]:
    """Yield all decisions in order."""
    lines = history.records
    for criterion, (threshold, value) in RECORDED.items():
        decided = [r for r in lines if r.get(threshold) is not None and r.get(value) is not None]
        for round in sorted({r["round"] for r in decided}):
            here = [r for r in decided if r["round"] == round]
            after = (
                r["client"] for r in lines if r["iteration"] == here[0]["iteration"] + 1 and r.get("extended")
            )
            measured = {r["client"]: r[value] for r in here}
            classes = history.classes if criterion == "entropy" else 0
            extended = tuple(dict.fromkeys(after))
            yield Decision(round, criterion, here[0][threshold], measured, extended, classes)


def unreachable_threshold(threshold: float, classes: int) -> str:
    """Return why no entropy can exceed a threshold, or nothing if one can or with 0 classes."""
    if not classes or threshold < math.log(classes):
        return ""
    return f"no entropy over {classes} classes can exceed ln {classes} = {math.log(classes):.3f}; lower gamma"


def nats(threshold: float, classes: int) -> str:
    """Return a threshold with its unit, and a remark if no entropy can exceed it."""
    reason = unreachable_threshold(threshold, classes)
    return f"{_number(threshold)} nats{f' ({reason})' if reason else ''}"


def _sentence(history: History, d: Decision, drawn: bool) -> str:
    if d.above:
        names = ", ".join(f"{history.labels[name]} ({_number(d.measured[name])})" for name in d.above)
        end = "extended before the next round" if d.extended else "no round has followed yet"
        if not d.extended and history.finished:
            end = "the arm ended there, so that none was extended"
        if drawn and d.extended:
            end = f"as many were drawn, and {end}: {', '.join(history.labels[name] for name in d.extended)}"
        return (
            f"after round {d.round}, {d.criterion} above the threshold of {_number(d.threshold)} nats:"
            f" {names}; {end}."
        )
    highest = f"the highest {d.criterion}, {_number(d.measured[d.most])} nats of {history.labels[d.most]}"
    limit = ""
    if d.classes:
        reason = unreachable_threshold(d.threshold, d.classes)
        most = f" (at most it could be ln {d.classes} = {math.log(d.classes):.3f})"
        limit = f"; {reason}" if reason else most
    return (
        f"after round {d.round}, no client was extended, because {highest}, is not above the threshold of"
        f" {_number(d.threshold)}{limit}."
    )


def _undecided(history: History) -> str:
    if any(r.get("extended") for r in history.records):
        return "codebooks were extended."
    return "its codebook is never extended." if history.finished else "no decision about extensions so far."


def _usage(history: History, shared: int) -> Shares | None:
    counts = {
        r["client"]: r["usage"] for r in history.records if _is_usage(r.get("usage"), r.get("codewords"))
    }
    if not counts:
        return None
    return Shares(
        "usage",
        "Codeword usage",
        counts,
        f"codeword (shared: the first {shared}; then the client's extensions)",
        "Share of each client's test vectors that took each codeword; gray: codewords of other clients.",
        shared,
    )


def _is_usage(found: Any, codewords: Any) -> bool:
    """Return whether a metric, which may be any value, has a count for each codeword of a client."""
    numbers = isinstance(found, list) and all(isinstance(count, (int, float)) for count in found)
    return numbers and 0 < len(found) == codewords and min(found) >= 0


def _number(value: float) -> str:
    return f"{value:.3f}"
