"""Read a run folder: configuration, metrics and summary of a run, finished or not."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import config as configuration
from ..algorithms.base import Algorithm, find
from ..checkpoint import digest, read_index
from ..errors import UserError
from ..findings import Findings, History
from ..json_text import parse_json
from ..metrics.base import described
from ..paths import check_name, command, has_file, other_capitals, read_text, special
from .words import labels, mean

Record = dict[str, Any]
"""A line of metrics.jsonl: arm, round, client, and its measurements or the reason of a rejected reply"""

_PLACE = frozenset({"arm", "iteration", "round", "client"})
_KEYS = _PLACE | {"accuracy", "entropy", "nll", "ece"}
_BYTES = ("bytes_sent", "bytes_received")
_TEXTS = frozenset({"arm", "client", "reason"})
_COUNTS = ("confusion", "reliability", "confidence")
_OF_SERVER = frozenset({"aggregate_accuracy", "validation_accuracy", "server_loss"})
_FOLDERS = {
    "*": "it is a folder of runs",
    "*/seed-*": "it is a case of a suite, whose runs are in ARM/seed-N",
    "*/*/seed-*": "it is the folder of a suite, whose runs are in CASE/ARM/seed-N",
}
MADE = frozenset(("begun", "host", "machine", "python", "version", "torch", "device", "threads", "precision"))
"""keys of made.json"""
_SCHEMA = 2
_CAUGHT_UP = 0.95  # share of the mean accuracy of the other clients
_WORST = 0.1  # share of the clients
_LARGEST = 2.0**1000
_SAME = 1e-6  # other versions may add numbers in another order


@dataclass(frozen=True)
class RunFolder:
    """A run folder in memory."""

    path: Path
    config: configuration.Config
    records: list[Record]
    """lines of whole rounds, by arm, round and client; rounds count from 1"""
    arms: dict[str, Record]
    """outcome by arm, from summary.json; for an unfinished run from the records, without seconds"""
    finished: bool
    manifest: Record = field(default_factory=dict)
    """content of manifest.json; empty without this file"""
    made: Record = field(default_factory=dict)
    """content of made.json: date, host, versions, notes on the data; empty if there is no such file"""
    rejected: list[Record] = field(default_factory=list)
    """lines of rejected replies, each with its reason"""
    edited: str = ""
    """a warning, if config.toml has other values than at the last checkpoint"""

    @property
    def measured_clients(self) -> list[str]:
        """Return the names of the training clients that were measured, in the order of the run."""
        return list(dict.fromkeys(r["client"] for r in self.records if not r.get("unseen")))

    @property
    def clients(self) -> list[str]:
        """Return the names of all training clients, from the manifest or else from the records."""
        return list(self.manifest.get("silos", ())) or self.measured_clients

    @cached_property
    def angles(self) -> dict[str, float]:
        """Return the rotation of the images of each client, in degrees.

        The mapping is empty for data without rotations, and if some clients were not measured.
        """
        data, names = self.config.data, sorted(self.measured_clients)
        angles = getattr(data.partition, "angles", ())
        each = np.repeat(angles, getattr(data.partition, "clients_per_angle", 1)).tolist()
        if not each or len(names) != (data.clients or len(each)):
            return {}
        return {name: each[i * len(each) // len(names)] for i, name in enumerate(names)}

    @cached_property
    def labels(self) -> dict[str, str]:
        """Return short names of the clients for tables."""
        return labels(dict.fromkeys([*(r["client"] for r in self.records), *self.clients]))

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, or an empty sequence without a manifest."""
        return tuple(labels(self.manifest.get("classes", ())).values())

    def counts(self, arm: str, key: str) -> npt.NDArray[np.float64] | None:
        """Return the sum over the clients of a list of numbers, such as a confusion matrix.

        Only the last measurement of an iteration has such lists. None: no record has the key.
        """
        lines = [r for r in self.of(arm) if r.get(key) is not None]
        last = [r[key] for r in lines if r["round"] == lines[-1]["round"]]
        return np.sum(np.array(last, dtype=np.float64), axis=0) if last else None

    def of(self, arm: str) -> list[Record]:
        """Return the records of the training clients of one arm."""
        return [r for r in self.records if r["arm"] == arm and not r.get("unseen")]

    @cached_property
    def algorithms(self) -> dict[str, Algorithm]:
        """Return the algorithm of each arm, with its parameters."""
        return {name: find(arm.algorithm)(arm.parameters) for name, arm in self.config.arms.items()}

    @property
    def columns(self) -> dict[str, str]:
        """Return the metrics that the algorithms add to a report, with a description of each."""
        return {key: about for columns in own_columns(self.config).values() for key, about in columns.items()}

    @cached_property
    def findings(self) -> dict[str, Findings]:
        """Return, by arm, the sections that algorithms add to a report."""
        histories = {
            arm: History(self.of(arm), self.labels, len(self.classes), self.finished) for arm in self.arms
        }
        found = {arm: self.algorithms[arm].findings(history) for arm, history in histories.items()}
        return {arm: findings for arm, findings in found.items() if findings is not None}

    def mean(self, arm: str, key: str) -> float | None:
        """Return the mean of a metric over the clients in the reported round, or None if none measured it."""
        number = self.reported_round(arm)
        return mean([r for r in self.of(arm) if r["round"] == number], key, self.config.run.metrics)

    @property
    def by_holdout(self) -> bool:
        """Return True if results are those of the round that is best on the clients' holdout images."""
        return self.config.run.select == "holdout"

    def reported_round(self, arm: str) -> int:
        """Return the number of the last round, or with ``run.select = "holdout"`` of the selected one."""
        selected = self.arms[arm].get("selected") if self.by_holdout else None
        return int(selected["round"] if selected else self.of(arm)[-1]["round"])

    def measured(self, key: str) -> bool:
        """Return whether any record has a metric."""
        return any(r.get(key) is not None for r in self.records)

    @property
    def on_sets(self) -> bool:
        """Return True if the arms learn from unlabeled sets."""
        return self.config.kind == "sets"

    def series(self, arm: str, key: str) -> npt.NDArray[np.float64]:
        """Return a metric of an arm as ``[rounds, clients]``, with NaN for missing numbers."""
        row = {round: i for i, round in enumerate(sorted({r["round"] for r in self.of(arm)}))}
        column = {client: i for i, client in enumerate(self.measured_clients)}
        values = np.full((len(row), len(column)), np.nan)
        for r in self.of(arm):
            value = r.get(key)
            values[row[r["round"]], column[r["client"]]] = (
                value if isinstance(value, (int, float)) else np.nan
            )
        return values


def read_run(path: Path) -> RunFolder:
    """Read a run folder.

    A run without summary.json is unfinished. Then an incomplete last line or round is dropped.

    Raises:
        UserError: the folder is not a run folder, or a file is damaged or of another version.
    """
    check_name(path, "the run folder")
    if not path.exists():
        raise UserError(
            f"{path} does not exist{other_capitals(path)}; expected a run folder, with config.toml"
        )
    if not path.is_dir():
        raise UserError(f"{path} is {special(path) or 'a file'}; expected a run folder, with config.toml")
    for name in ("config.toml", "metrics.jsonl"):
        if not has_file(path / name):
            held = (
                f"{what}: name runs in it, as {path}/{runs}"
                for runs, what in _FOLDERS.items()
                if any(path.glob(f"{runs}/config.toml"))
            )
            advice = next(held, "expected a run folder, as `uefl train` writes it")
            raise UserError(f"{path} has no {name}{other_capitals(path / name)}; {advice}")
    finished = has_file(path / "summary.json")
    config = configuration.load_whole(path / "config.toml")
    records, rejected = _read_lines(path / "metrics.jsonl", finished, config)
    if not records:
        why = "".join(
            f", rejected {line['client']} in round {line['round']}: {line['reason']}"
            for line in rejected[-1:]
        )
        advice = (
            "the file is damaged: restore it, or train again"
            if finished
            else f"continue with `{command('train', '--resume', path)}`"
        )
        raise UserError(f"{path / 'metrics.jsonl'} holds no finished round yet{why}; {advice}")
    arms = outcomes([*rejected, *records], config)
    arms = _read_summary(path / "summary.json", arms) if finished else arms
    return RunFolder(
        path,
        config,
        records,
        arms,
        finished,
        _read_manifest(path / "manifest.json"),
        _read_made(path),
        rejected,
        _edited(path, config),
    )


def _edited(path: Path, config: configuration.Config) -> str:
    """Return a warning if the checkpoint of a run can be read and is of another configuration."""
    try:
        same = read_index(path)["state"]["made_with"]["config"] == config.digest()
    except (OSError, UserError, KeyError, TypeError):
        same = True  # there is nothing to compare with
    changed = "config.toml has been changed since the last checkpoint, and the report shows its new values"
    return "" if same else f"{changed}; restore it."


def parted(lines: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Split lines of metrics.jsonl into measurements and rejected replies."""
    both: tuple[list[Record], list[Record]] = ([], [])
    for line in lines:
        both["reason" in line].append(line)
    return both


def own_columns(config: configuration.Config) -> dict[str, dict[str, str]]:
    """Return for each arm the metrics that its algorithm and the run add, each with a description."""
    of_run = {name: described(name) for name in config.run.metrics}
    return {name: find(arm.algorithm).columns | of_run for name, arm in config.arms.items()}


def number_columns(config: configuration.Config) -> frozenset[str]:
    """Return the columns of metrics.jsonl that have numbers."""
    from ..client.work import RESERVED
    from ..server.checks import MOST

    kinds = [find(arm.algorithm) for arm in config.arms.values()]
    own = (columns for kind in kinds for columns in (kind.details, kind.server_columns))
    return (RESERVED - _TEXTS - {*_COUNTS}).union(MOST, *own_columns(config).values(), *own, _OF_SERVER)


def outcomes(lines: list[Record], config: configuration.Config) -> dict[str, Record]:
    """Return the outcome of every arm from the lines of a metrics.jsonl, see :func:`summarize`."""
    run = config.run
    return summarize(lines, run.target_accuracy, own_columns(config), run.joins, run.metrics, run.select)


def summarize(
    lines: list[Record],
    target: float = 0.0,
    columns: Mapping[str, Iterable[str]] = MappingProxyType({}),
    joins: Mapping[str, int] = MappingProxyType({}),
    weighted: Collection[str] = (),
    select: str = "last",
) -> dict[str, Record]:
    """Return the outcome of every arm from the lines of metrics.jsonl.

    Means are over the training clients at the last round, or with ``select = "holdout"`` at the selected
    one, unless said otherwise:

    - ``accuracy``, ``entropy``, ``nll``, ``ece``, and the ``columns`` of the algorithm. A column that only
      unseen clients have is the mean over these. Means of the ``weighted`` ones are weighted by test inputs.
    - ``accuracy_last4``: mean and sample deviation over the last four rounds; deviation 0 for one round.
    - ``best``: the round with the highest mean accuracy. ``selected``: the round that is best on the
      server's validation images, or with ``select = "holdout"`` on the clients' holdout images.
    - ``worst_tenth``: mean accuracy of the worst tenth of the clients.
    - ``global_accuracy``, ``personalized_accuracy``, ``personalized_entropy``, ``epsilon``: if measured.
    - ``unseen_accuracy``: mean over the unseen clients.
    - ``bytes_sent``, ``bytes_received``: by the server over the run, unseen clients included.
    - ``rounds_to_target``: first round with the accuracy ``target``, null if there is none.
    - ``arrival_accuracy``, ``late_accuracy``: mean accuracy of the clients of ``joins`` before their first
      round of training and after the last. ``rounds_to_catch_up``: mean number of rounds that they train
      until their accuracy is at least 95 % of the mean accuracy of the other clients; null if one of
      them never reaches it.
    - ``late_personalized_accuracy``: mean ``personalized_accuracy`` of the clients of ``joins``, if measured.
    - ``rejected``, ``reasons``: number of rejected replies, in total and by reason.
    - ``clients``: accuracy, entropy and columns by client.
    """
    arms = {}
    records, rejected = parted(lines)
    for arm, lines in _grouped(records, "arm"):
        reasons = Counter(line["reason"] for line in rejected if line["arm"] == arm)
        rounds = [chunk for _, chunk in _grouped([r for r in lines if not r.get("unseen")], "round")]
        selected = _selected(rounds, select)
        last = rounds[selected["selected"]["round"] - 1 if selected and select == "holdout" else -1]
        unseen = [r for r in lines if r.get("unseen") and r["round"] == last[0]["round"]]
        means = [mean(chunk, "accuracy") for chunk in rounds]
        known = [(value, i) for i, value in enumerate(means) if value is not None]
        own = tuple(columns.get(arm, ()))
        arms[arm] = {
            **{
                key: value
                for key in own
                if (value := mean(last, key, weighted)) is not None
                or (value := mean(unseen, key, weighted)) is not None
            },
            **{key: mean(last, key) for key in ("accuracy", "entropy", "nll", "ece")},
            "accuracy_last4": _spread([value for value in means[-4:] if value is not None]),
            "best": (
                {"round": (best := max(known, key=lambda k: (k[0], -k[1])))[1] + 1, "accuracy": best[0]}
                if known
                else None
            ),
            "worst_tenth": _worst([r["accuracy"] for r in last if r["accuracy"] is not None]),
            **{
                key: value
                for key in ("global_accuracy", "personalized_accuracy", "personalized_entropy", "epsilon")
                if (value := mean(last, key)) is not None
            },
            **({"unseen_accuracy": mean(unseen, "accuracy")} if unseen else {}),
            **{key: sum(r.get(key, 0) for r in lines) for key in _BYTES},
            **(
                {"rounds_to_target": next((i + 1 for value, i in known if value >= target), None)}
                if target
                else {}
            ),
            **(_late(rounds, joins) if joins else {}),
            "rounds": len(rounds),
            "rejected": reasons.total(),
            "reasons": dict(reasons),
            **selected,
            "clients": {
                r["client"]: {key: r[key] for key in ("accuracy", "entropy", *own) if key in r}
                for r in (*last, *unseen)
            },
        }
    return arms


def _late(rounds: list[list[Record]], joins: Mapping[str, int]) -> Record:
    """Return the outcome of the clients that joined later, with null for missing measurements."""
    found = [_course(rounds[first - 2 :], name, joins) for name, first in joins.items()]
    caught_up = [
        next((i for i, own, others in course if own >= _CAUGHT_UP * others), None) for course in found
    ]
    whole = all(found)
    return {
        "arrival_accuracy": statistics.fmean(course[0][1] for course in found) if whole else None,
        "late_accuracy": statistics.fmean(course[-1][1] for course in found) if whole else None,
        "late_personalized_accuracy": mean(
            [r for r in rounds[-1] if r["client"] in joins], "personalized_accuracy"
        ),
        "rounds_to_catch_up": (
            statistics.fmean(i for i in caught_up if i is not None) if None not in caught_up else None
        ),
    }


def _course(
    rounds: list[list[Record]], client: str, joins: Mapping[str, int]
) -> list[tuple[int, float, float]]:
    """Return rounds that a client has trained, its accuracy, and the mean of clients that do not join."""
    found = []
    for i, chunk in enumerate(rounds):
        own = mean([r for r in chunk if r["client"] == client], "accuracy")
        others = mean([r for r in chunk if r["client"] not in joins], "accuracy")
        if own is not None and others is not None:
            found.append((i, own, others))
    return found


def _worst(accuracies: list[float]) -> float | None:
    """Return the mean over the worst tenth of the clients, at least one."""
    if not accuracies:
        return None
    count = max(1, math.ceil(_WORST * len(accuracies) - 1e-9))
    return statistics.fmean(sorted(accuracies)[:count])


def _selected(rounds: list[list[Record]], select: str) -> dict[str, Record]:
    """Return the first round with the best validation or holdout accuracy, empty if it is not measured."""
    if select == "holdout":
        scores = [mean(chunk, "holdout_accuracy") for chunk in rounds]
    else:  # a number of the server, in the line of every client
        scores = [chunk[0].get("validation_accuracy") for chunk in rounds]
    known = [score for score in scores if score is not None]
    if not known or (select != "holdout" and len(known) < len(rounds)):
        return {}
    best = scores.index(max(known))
    return {"selected": {"round": best + 1, "accuracy": mean(rounds[best], "accuracy")}}


def _spread(values: list[float]) -> Record:
    """Return mean and sample deviation, which is 0 for a single value, or None twice for no value."""
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "sd": sd} if values else {"mean": None, "sd": None}


def _grouped(records: list[Record], key: str) -> list[tuple[Any, list[Record]]]:
    return [(value, list(lines)) for value, lines in groupby(records, key=lambda r: r[key])]


def _read_lines(
    path: Path, finished: bool, config: configuration.Config
) -> tuple[list[Record], list[Record]]:
    """Read metrics.jsonl into the parts of :func:`parted`."""
    numbers = number_columns(config)
    text = _text(path).splitlines(keepends=True)
    if text and not finished and not text[-1].endswith("\n"):
        text.pop()
    lines, seen = [], set[tuple[str, int, str]]()
    lengths: dict[str, int] = {}
    for number, line in enumerate(text, 1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if (
            not _is_record(record, numbers)
            or record["arm"] not in config.arms
            or any(
                lengths.setdefault(key, len(record[key])) != len(record[key])
                for key in _COUNTS
                if key in record
            )
        ):
            raise UserError(
                f"{path}, line {number} is not a record of a run; the file is damaged: restore it, or train"
                " again"
            )
        place = (record["arm"], record["round"], record["client"])
        if "reason" not in record and place in seen:
            raise UserError(f"{path}, line {number} occurs twice: restore the file, or train again")
        if "reason" not in record:
            seen.add(place)
        lines.append(record)
    order = list(config.arms)  # a run with more rounds puts them in order at its end
    records, rejected = parted(sorted(lines, key=lambda line: (order.index(line["arm"]), line["round"])))
    for arm in dict.fromkeys(r["arm"] for r in records):
        if all(r.get("unseen") for r in records if r["arm"] == arm):
            raise UserError(
                f"{path} has no training client of arm {arm!r}; the file is damaged: restore it, or train"
                " again"
            )
    if finished or config.run.evaluation < 1 or config.run.joins:  # rounds differ in their clients
        return records, rejected
    rounds = [chunk for _, arm in _grouped(records, "arm") for _, chunk in _grouped(arm, "round")]
    if rounds and len(rounds[-1]) < len(rounds[0]):
        rounds.pop()
    return [r for chunk in rounds for r in chunk], rejected


def _is_record(record: Any, numbers: Collection[str]) -> bool:
    """Return whether a line has the keys of a record, with values of their types.

    A metric of an algorithm may have any type, if no report takes its mean.
    """
    from ..server.checks import out_of_range

    if not isinstance(record, dict) or not record.keys() >= (_PLACE if "reason" in record else _KEYS):
        return False
    return (
        all(isinstance(record[key], str) for key in _TEXTS & record.keys())
        and all(type(record[key]) is int for key in ("iteration", "round"))
        and all(type(record.get(key, 0)) is int for key in _BYTES)
        and all(_is_measurement(value) for value in record.values())
        and all(
            record[key] is None or isinstance(record[key], (int, float)) for key in record.keys() & numbers
        )
        and out_of_range(record) is None
        and _are_counts(record)
    )


def _are_counts(record: Record) -> bool:
    """Return whether the counts of predictions in a record are lists of numbers with matching lengths."""
    found = [record.get(key, []) for key in _COUNTS]
    if not all(isinstance(row, list) and all(isinstance(x, (int, float)) for x in row) for row in found):
        return False
    confusion, reliability, confidence = map(len, found)
    return math.isqrt(confusion) ** 2 == confusion and reliability == 2 * confidence


def _is_measurement(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return all(_is_measurement(inner) for inner in (value.values() if isinstance(value, dict) else value))
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST)
    )


def _agrees(found: Any, expected: Any) -> bool:
    """Return whether a part of a summary has the numbers that the metrics give."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() >= expected.keys()
            and all(_agrees(found[key], value) for key, value in expected.items())
            and all(_is_number(found[key]) for key in found.keys() - expected.keys())
        )
    if expected is None or isinstance(expected, int):
        return type(found) is type(expected) and bool(found == expected)
    return (
        _is_number(found)
        and found is not None
        and math.isclose(found, expected, rel_tol=_SAME, abs_tol=_SAME)
    )


def _is_number(value: Any) -> bool:
    return _is_measurement(value) and not isinstance(value, (str, list, dict, bool))


def _read_summary(path: Path, expected: dict[str, Record]) -> dict[str, Record]:
    try:
        summary = parse_json(_text(path))
        schema, arms = summary["schema"], dict(summary["arms"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is not a summary of a run; delete it to report from metrics.jsonl") from None
    if schema != _SCHEMA:
        raise UserError(
            f"{path} has schema {schema}, expected {_SCHEMA}; read it with the version of uefl that wrote it"
        )
    known = summary.get("metrics_sha256")  # absent in runs of earlier versions
    edited = "metrics_sha256" in summary and known != digest(path.with_name("metrics.jsonl"))
    if edited or not _agrees(arms, expected):
        raise UserError(
            f"{path} does not match metrics.jsonl: one of them was edited, or another version of uefl wrote"
            f" {path.name}; restore them, or delete {path.name} to report from metrics.jsonl"
        )
    return arms


def _read_manifest(path: Path) -> Record:
    try:
        manifest: Any = parse_json(_text(path)) if path.exists() else {}
    except ValueError:
        manifest = None
    if not _is_manifest(manifest):
        raise UserError(
            f"{path} is not a manifest of a run; delete it to report without the names of the classes"
        )
    return dict(manifest)


def _is_manifest(found: Any) -> bool:
    """Return whether the parts of a manifest that a report reads have their types."""
    if not isinstance(found, dict):
        return False
    classes, clients = found.get("classes", []), found.get("silos", {})
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return False
    if not isinstance(clients, dict) or not all(isinstance(client, dict) for client in clients.values()):
        return False
    parts = [
        client[use] for client in clients.values() for use in ("train", "holdout", "test") if use in client
    ]
    counts = [part.get("images_of_class", []) if isinstance(part, dict) else None for part in parts]
    return all(isinstance(of, list) and all(type(number) is int for number in of) for of in counts)


def _read_made(path: Path) -> Record:
    """Read made.json, or return nothing if it is absent or damaged: no number depends on it."""
    try:
        made = parse_json(read_text(path / "made.json"))
    except (OSError, ValueError):
        return {}
    if not isinstance(made, dict) or not made.keys() >= MADE:
        return {}
    notes = made.get("notes", [])
    texts = isinstance(notes, list) and all(isinstance(note, str) for note in notes)
    return {**made, "notes": notes if texts else []}


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; the file is damaged: restore it, or train again") from None
