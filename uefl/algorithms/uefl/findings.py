"""What a report says of extensible codebooks: which clients were given further codewords, and why the others were not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ...findings import Findings, History, Shares


class Decision(NamedTuple):
    """What was decided after an iteration."""

    round: int
    """rounds trained until then"""
    threshold: float
    entropies: dict[str, float]
    """of each client, in nats: what was compared with the threshold"""
    extended: tuple[str, ...]
    """clients that got codewords after it"""

    @property
    def above(self) -> list[str]:
        """Clients above the threshold."""
        return [client for client, entropy in self.entropies.items() if entropy > self.threshold]

    @property
    def least(self) -> str:
        """The client with the least entropy."""
        return min(self.entropies, key=lambda name: self.entropies[name])

    @property
    def most(self) -> str:
        """The client with the highest entropy."""
        return max(self.entropies, key=lambda name: self.entropies[name])


def findings(history: History) -> Findings:
    """Every decision as a sentence and as a row, and how often each codeword is used."""
    decided = list(decisions(history))
    beyond = next((d.threshold for d in decided if history.classes and beyond_reach(d.threshold, history.classes)), None)
    return Findings(
        "Extensions",
        [_sentence(history, d) for d in decided] or [_undecided(history)],
        ["after round", "threshold", "least entropy", "highest entropy", "above", "extended"],
        [
            [
                str(d.round),
                _number(d.threshold),
                *(f"{_number(d.entropies[client])} {history.labels[client]}" for client in (d.least, d.most)),
                str(len(d.above)),
                str(len(d.extended)),
            ]
            for d in decided
        ],
        [] if beyond is None else [f"the threshold of {_number(beyond)} nats cannot be reached: {beyond_reach(beyond, history.classes)}"],
        _usage(history),
    )


def decisions(history: History) -> Iterator[Decision]:
    """All decisions, in their order."""
    lines = history.records
    decided = [r for r in lines if r.get("threshold") is not None and r.get("deciding_entropy") is not None]
    for round in sorted({r["round"] for r in decided}):
        here = [r for r in decided if r["round"] == round]
        after = (r["client"] for r in lines if r["iteration"] == here[0]["iteration"] + 1 and r["extended"])
        yield Decision(round + 1, here[0]["threshold"], {r["client"]: r["deciding_entropy"] for r in here}, tuple(dict.fromkeys(after)))


def beyond_reach(threshold: float, classes: int) -> str:
    """Why no entropy can exceed a threshold; empty where one can."""
    most = math.log(classes)
    return "" if threshold < most else f"no entropy over {classes} classes can exceed ln {classes} = {most:.3f}; lower gamma"


def nats(threshold: float, classes: int) -> str:
    """A threshold with its unit, and why no entropy over so many classes exceeds it where that is so; 0 classes: it is of no entropy."""
    reason = beyond_reach(threshold, classes) if classes else ""
    return f"{_number(threshold)} nats{f' ({reason})' if reason else ''}"


def _sentence(history: History, d: Decision) -> str:
    if d.above:
        names = ", ".join(f"{history.labels[name]} ({_number(d.entropies[name])})" for name in d.above)
        end = "extended before the next round" if d.extended else "the arm ended there, so that none was extended"
        return f"after round {d.round}, above the threshold of {_number(d.threshold)} nats: {names}; {end}."
    highest = f"the highest entropy, {_number(d.entropies[d.most])} nats of {history.labels[d.most]}"
    most, limit = history.classes, ""
    if most:
        reason = beyond_reach(d.threshold, most)
        limit = f"; {reason}" if reason else f" (at most it could be ln {most} = {math.log(most):.3f})"
    return f"after round {d.round}, no client was extended, because {highest}, is not above the threshold of {_number(d.threshold)}{limit}."


def _undecided(history: History) -> str:
    if any(r["extended"] for r in history.records):
        return "codebooks were extended."
    return "its codebook is never extended." if history.finished else "no decision about extensions so far."


def _usage(history: History) -> Shares | None:
    counts = {r["client"]: r["usage"] for r in history.records if r.get("usage")}
    if not counts:
        return None
    codewords = min(map(len, counts.values()))  # every client has the shared ones, and extensions are as large
    return Shares(
        "usage",
        "Codeword usage",
        counts,
        f"codeword (shared: the first {codewords}; then the client's extensions)",
        "Share of each client's test vectors that took each codeword; grey: codewords that it does not have.",
        codewords,
    )


def _number(value: float) -> str:
    return f"{value:.3f}"
