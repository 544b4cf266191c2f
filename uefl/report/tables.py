"""The tables of a report, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..text_table import Table
from .run_folder import RunFolder
from .words import label, spans

_MOST = 50  # rows on rejected replies

Columns = dict[str, Callable[[dict[str, Any]], str]]
"""the cell of an arm, by header"""


def arm_table(run: RunFolder) -> Table:
    """Return the outcome of each arm (:func:`summarize`), without columns that no arm has."""
    columns: Columns = {
        "accuracy": lambda arm: number(arm["accuracy"]),
        last_rounds(run): lambda arm: plus_minus(arm["accuracy_last4"]["mean"], arm["accuracy_last4"]["sd"]),
        "selected": lambda arm: _at_round(arm.get("selected")),
        "entropy": lambda arm: number(arm["entropy"]),
        "NLL": lambda arm: number(arm["nll"]),
        "ECE": lambda arm: number(arm["ece"]),
        "epsilon": lambda arm: number(arm.get("epsilon"), 2),
    }
    own = {
        key: {name: own_number(_own(run, name, key)) for name in run.arms}
        for key in run.columns
        if key not in columns
    }
    added = [key for key, cells in own.items() if set(cells.values()) != {"-"}]
    header, rows = _filled(run, columns, ("entropy",))
    header, rows = [*header, *added], [[*row, *(own[key][row[0]] for key in added)] for row in rows]
    reported = "selected" if run.by_holdout else "last"
    several = f"{last_rounds(run)}: mean ± standard deviation over these rounds"
    note = f"accuracy: of the {reported} round; {several}" if "accuracy" in header else ""
    return Table(f"{run.path}{'' if run.finished else ' (unfinished)'}", header, rows, note=note)


def _own(run: RunFolder, arm: str, key: str) -> float | None:
    """Return the mean of a column over the training clients, or else over the unseen ones."""
    found = run.mean(arm, key)
    return run.arms[arm].get(key) if found is None else found


def protocol_table(run: RunFolder) -> Table:
    """Return the best round, the worst clients, other measurements, the time and the traffic of each arm."""
    columns: Columns = {
        "best": lambda arm: _at_round(arm.get("best")),
        "worst 10 %": lambda arm: number(arm.get("worst_tenth")) if len(arm["clients"]) > 1 else "-",
        "global": lambda arm: number(arm.get("global_accuracy")),
        "personalized": lambda arm: number(arm.get("personalized_accuracy")),
        "unseen": lambda arm: number(arm.get("unseen_accuracy")),
        "to target": _reached,
        "rejected": lambda arm: str(arm.get("rejected", "-")),
        "rounds": lambda arm: str(arm["rounds"]),
        "seconds": lambda arm: number(arm.get("seconds"), 1),
        "CPU s": lambda arm: number(arm.get("cpu_seconds"), 1),
        "MB sent": lambda arm: number(arm["bytes_sent"] / 1e6, 1) if "bytes_sent" in arm else "-",
        "MB back": lambda arm: number(arm["bytes_received"] / 1e6, 1) if "bytes_received" in arm else "-",
    }
    header, rows = _filled(run, columns, ("rejected", "rounds", "seconds", "MB sent", "MB back"))
    return Table("clients, time and traffic", header, rows, note="MB: to train and to measure")


def _filled(run: RunFolder, columns: Columns, always: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows without the columns that no arm has."""
    kept = [
        name
        for name, cell in columns.items()
        if name in always or any(cell(arm) != "-" for arm in run.arms.values())
    ]
    return ["arm", *kept], [[name, *(columns[key](arm) for key in kept)] for name, arm in run.arms.items()]


def _at_round(found: dict[str, Any] | None) -> str:
    return f"{number(found['accuracy'])} @ {found['round']}" if found else "-"


def last_rounds(*runs: RunFolder) -> str:
    """Return the name of the last rounds over which accuracy is averaged, at most four."""
    counts = {min(4, arm["rounds"]) for run in runs for arm in run.arms.values()}
    most = max(counts)
    return (f"last {most} rounds" if most > 1 else "last round") + (" or fewer" if len(counts) > 1 else "")


def tables(run: RunFolder) -> list[Table]:
    """Return the tables of a report: arms, protocol, clients, and rejected replies if there are any.

    With unlabeled sets there is no table of clients, because the clients share the model and the test images.
    """
    rejected = rejected_table(run)
    return [
        arm_table(run),
        protocol_table(run),
        *([] if run.on_sets else client_tables(run)),
        *([rejected] if rejected else []),
    ]


def client_tables(run: RunFolder) -> list[Table]:
    """Return a table of each metric at the last round, with a row per client and a column per arm.

    The metrics are accuracy, entropy and those of an algorithm that differ between clients.
    """

    def table(key: str, text: Callable[[Any], str]) -> Table:
        cells = {
            arm: [text(found["clients"].get(client, {}).get(key)) for client in run.measured_clients]
            for arm, found in run.arms.items()
        }
        arms = [arm for arm in cells if text is number or len(set(cells[arm])) > 1]
        rows = [
            [run.labels[client], *(cells[arm][i] for arm in arms)]
            for i, client in enumerate(run.measured_clients)
        ]
        return Table("", [f"{key} per client", *arms], rows)

    own = [table(key, own_number) for key in run.columns]
    return [table("accuracy", number), table("entropy", number), *(one for one in own if len(one.header) > 1)]


def rejected_table(run: RunFolder) -> Table | None:
    """Return the rounds of the rejected replies by arm, client and reason, or None if there are none."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for line in run.rejected:
        rounds.setdefault((line["arm"], line["client"], line["reason"]), []).append(line["round"])
    if not rounds:
        return None
    rows = [
        [arm, run.labels.get(client) or label(client), spans(found), str(len(found)), reason]
        for (arm, client, reason), found in rounds.items()
    ]
    more = f"{len(rows) - _MOST} more rows are in metrics.jsonl" if len(rows) > _MOST else ""
    header = ["arm", "client", "rounds", "times", "why"]
    return Table("rejected replies", header, rows[:_MOST], numeric=False, note=more)


def _reached(arm: dict[str, Any]) -> str:
    if "rounds_to_target" not in arm:
        return "-"
    return str(arm["rounds_to_target"]) if arm["rounds_to_target"] is not None else "never"


def number(value: Any, digits: int = 3) -> str:
    """Format a number with fixed digits, and None as a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def own_number(value: float | None) -> str:
    """Format a metric of an algorithm with four digits, or a whole number with all digits."""
    if value is None:
        return "-"
    return str(int(value)) if value == int(value) else f"{value:.4g}"


def plus_minus(mean: float | None, sd: float | None) -> str:
    """Format mean and deviation in one cell."""
    return "-" if mean is None else f"{number(mean)} ± {number(sd)}"
