"""Which clients were given further codewords, and why the others were not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .folder import Run
from .tables import Table, number
from .words import beyond_reach, count


class Decision(NamedTuple):
    """What an arm decided after an iteration."""

    arm: str
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


def decisions(run: Run) -> list[Decision]:
    """All decisions, arm by arm."""
    return [decision for arm in run.arms for decision in _of_arm(run, arm)]


def _of_arm(run: Run, arm: str) -> Iterator[Decision]:
    lines = run.of(arm)
    decided = [r for r in lines if r.get("threshold") is not None and r.get("deciding_entropy") is not None]
    for round in sorted({r["round"] for r in decided}):
        here = [r for r in decided if r["round"] == round]
        after = (r["client"] for r in lines if r["iteration"] == here[0]["iteration"] + 1 and r["extended"])
        entropies = {r["client"]: r["deciding_entropy"] for r in here}
        yield Decision(arm, round + 1, here[0]["threshold"], entropies, tuple(dict.fromkeys(after)))


def table(run: Run) -> Table | None:
    """One row per decision; None where there was none."""
    found = decisions(run)
    rows = [
        [
            d.arm,
            str(d.round),
            number(d.threshold),
            *(f"{number(d.entropies[client])} {run.labels[client]}" for client in (_least(d), _most(d))),
            str(len(d.above)),
            str(len(d.extended)),
        ]
        for d in found
    ]
    header = ["arm", "after round", "threshold", "least entropy", "highest entropy", "above", "extended"]
    return Table("extensions", header, rows) if rows else None


def sentences(run: Run) -> list[str]:
    """One for every decision, and one for every arm that has a codebook and decided nothing."""
    lines = [_sentence(run, decision) for decision in decisions(run)]
    decided = {decision.arm for decision in decisions(run)}
    for arm, outcome in run.arms.items():
        if outcome.get("perplexity") is not None and arm not in decided:
            lines.append(f"{arm}: {_undecided(run, arm)}")
    return lines


def _sentence(run: Run, d: Decision) -> str:
    start = f"{d.arm}, after {count(d.round, 'round')}: "
    if d.above:
        names = ", ".join(f"{run.labels[name]} ({number(d.entropies[name])})" for name in d.above)
        what = f"above the threshold of {number(d.threshold)} nats: {names}"
        return f"{start}{what}; " + ("extended before the next round." if d.extended else "the arm ended there, so that none was extended.")
    most = _most(d)
    why = (
        f"the highest entropy, {number(d.entropies[most])} nats of {run.labels[most]}, is not above the threshold of {number(d.threshold)}"
    )
    reach = beyond_reach(d.threshold, len(run.classes)) if run.classes else ""
    limit = (
        f"; {reach}" if reach else f" (at most it could be ln {len(run.classes)} = {math.log(len(run.classes)):.3f})" if run.classes else ""
    )
    return f"{start}no client was extended, because {why}{limit}."


def _undecided(run: Run, arm: str) -> str:
    if any(r["extended"] for r in run.of(arm)):
        return "codebooks were extended."
    return "no decision about extensions so far." if not run.finished else "its codebook is never extended."


def out_of_reach(run: Run) -> dict[str, str]:
    """Arms whose threshold no client could ever exceed, and why."""
    if not run.classes:
        return {}
    found: dict[str, str] = {}
    for d in decisions(run):
        reason = beyond_reach(d.threshold, len(run.classes))
        if reason:
            found.setdefault(d.arm, f"the threshold of {number(d.threshold)} nats cannot be reached: {reason}")
    return found


def _least(d: Decision) -> str:
    return min(d.entropies, key=lambda name: d.entropies[name])


def _most(d: Decision) -> str:
    return max(d.entropies, key=lambda name: d.entropies[name])
