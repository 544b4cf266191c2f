"""The content of a report, in order, for ``report.md`` and ``report.html``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..paths import command
from ..text_table import Table
from . import plots
from .compare import Comparison, configurations
from .run_folder import RunFolder
from .style import Picture
from .tables import arm_table, client_tables, last_rounds, protocol_table, rejected_table
from .words import count, label

_NORMAL = 1.96  # 95 % of a normal distribution lie within this number of standard deviations
_MOST_CLASSES = 20  # columns of a table
ReportElement = str | list[str] | Table | Picture
"""A paragraph, a list, a table or a picture. In text, only `` `code` `` is markup."""

_CLIENTS_LEGEND = (
    "Accuracy, entropy (nats, of the mean over the {several}), NLL and ECE are means over the clients' test"
    " splits at the {round} round; the third column is the mean and the standard deviation of the accuracy"
    " over the rounds in its title.{selected}"
)
_SETS_LEGEND = (
    "Accuracy, entropy (nats), NLL and ECE are of the global model on all test images, at the last round; the"
    " third column is the mean and the standard deviation of the accuracy over the rounds in its"
    " title.{selected}"
)
_SELECTED = " Selected: accuracy of the model with the best validation accuracy, and its round."
_BY_HOLDOUT = (
    " Selected: the round with the best mean accuracy on the clients' holdout images; the saved model and the"
    " numbers of the tables are of this round, where this report says the last round. Confusion matrices and"
    " the sections of algorithms are of the last round."
)
_NO_TEST_LEGEND = (
    "There are no test images, so there is no accuracy. Entropy (nats) is of the predictions for the clients'"
    " own images, at the last round."
)

_PROTOCOL_LEGEND = (
    "Best: the highest mean accuracy and its round; worst 10 %: the mean over the worst tenth of the clients"
    " at the last round; global: without the private layers of clients; personalized: after the local"
    " training of the client; to target: first round with the accuracy `run.target_accuracy`; MB: tensors"
    " that the server sent and received, for training and measurement, in all rounds."
)


_DIFFERENCES_LEGEND = (
    "Accuracy is the mean over a run's last four rounds. Differences are within a run, between arms with the"
    " same seed and data, with the 95 % confidence interval of their mean (Student's t)."
)
_REJECTED_LEGEND = "Replies of clients that are in no average and no measurement, by arm, client and reason."


@dataclass(frozen=True)
class ReportSection:
    """A heading with its elements."""

    title: str
    """empty for the first section"""
    elements: list[ReportElement]


@dataclass(frozen=True)
class Content:
    """A whole report."""

    title: str
    warnings: list[str]
    """sentences to read before the numbers"""
    sections: list[ReportSection]


def content(run: RunFolder, pictures: list[Picture]) -> Content:
    """Return the report of a run with these pictures, without empty sections."""
    by_name = {picture.name: picture for picture in pictures}

    def shown(*names: str) -> list[ReportElement]:
        return [by_name[name] for name in names if name in by_name]

    sections = [
        ReportSection(
            "",
            [
                *verdict(run),
                _facts(run),
                arm_table(run),
                _legend(run),
                protocol_table(run),
                _PROTOCOL_LEGEND,
                *shown("arms.png", "loss.png"),
            ],
        ),
        ReportSection("Rejected replies", _rejected(run)),
        ReportSection("Clients over the rounds", shown("accuracy.png", "entropy.png")),
        *_findings(run, by_name),
        ReportSection("Predictions", shown("reliability.png", "classes.png", "confusion.png")),
        ReportSection(
            "Images", [*shown("samples.png"), *(p for p in pictures if p.name.startswith("uncertain-"))]
        ),
        ReportSection("Clients", [*([] if run.on_sets else client_tables(run)), *_class_counts(run)]),
    ]
    return Content(
        f"Run {run.path.resolve().name}",
        _warnings(run),
        [section for section in sections if section.elements],
    )


def comparison(compared: Comparison, pictures: list[Picture]) -> Content:
    """Return the page over several runs: differences, curves, configurations, and the arms of each run."""
    sections = [
        ReportSection(
            "", [_DIFFERENCES_LEGEND, *compared.tables, *([compared.notes] if compared.notes else [])]
        ),
        ReportSection("Curves", list(pictures)),
        ReportSection("Configurations", [configurations(compared.runs)]),
        ReportSection(
            "Runs", [block for run in compared.runs for block in (f"`{run.path}`", arm_table(run))]
        ),
    ]
    title = f"Comparison of {count(len(compared.runs), 'run')}"
    return Content(title, [], [section for section in sections if section.elements])


def verdict(run: RunFolder) -> list[ReportElement]:
    """Return a sentence on the best of several arms, and on how large a chance difference may be."""
    means = {name: arm["accuracy_last4"]["mean"] for name, arm in run.arms.items()}
    ranked = sorted((name for name in means if means[name] is not None), key=lambda name: -means[name])
    if len(ranked) < 2:
        return []
    best, second = ranked[:2]
    one, two = means[best], means[second]
    found = (
        f"`{best}` has the highest accuracy over the {last_rounds(run)}: {one:.3f}; `{second}` follows with"
        f" {two:.3f}."
    )
    images = sum(
        sum(client.get("test", {}).get("images_of_class", ()))
        for client in run.manifest.get("silos", {}).values()
    )
    if images:
        half = _NORMAL * math.sqrt((one * (1 - one) + two * (1 - two)) / images)
        chance = f"With {images} test images, a difference of up to {half:.3f} may be chance (95 %)"
        found += (
            f" {chance}: the difference here, {one - two:.3f}, is"
            f" {'within' if one - two <= half else 'beyond'} that."
        )
    return [f"{found} This is one seed; other seeds differ too (`uefl report RUN RUN ...` compares them)."]


def _class_counts(run: RunFolder) -> list[ReportElement]:
    """Return a table of the training images of each class and client."""
    if len(run.classes) > _MOST_CLASSES:
        return []
    rows = []
    for name, client in _labeled(run.manifest.get("silos", {})):
        counts = np.sum(
            [part["images_of_class"] for use, part in client.items() if use in ("train", "holdout")], axis=0
        )
        rows.append([run.labels.get(name) or label(name), *map(str, counts)])
    table = Table("images of each class", ["client", *run.classes], rows)
    return ["Training images of each class, including the holdout:", table] if rows else []


def _labeled(clients: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, client) for name, client in clients.items() if "images_of_class" in client.get("train", {})
    ]


def _legend(run: RunFolder) -> str:
    """Explain the columns of the table of arms."""
    header = arm_table(run).header
    added = "".join(f" `{key}`: {about}." for key, about in run.columns.items() if key in header)
    return f"{_usual_legend(run)}{added}"


def _usual_legend(run: RunFolder) -> str:
    if not run.on_sets:
        return _CLIENTS_LEGEND.format(
            several="members" if run.config.run.uncertainty == "ensemble" else "passes",
            round="selected" if run.by_holdout else "last",
            selected=_BY_HOLDOUT if run.by_holdout else "",
        )
    if not run.measured("accuracy"):
        return _NO_TEST_LEGEND
    return _SETS_LEGEND.format(selected=_SELECTED if "selected" in arm_table(run).header else "")


def _warnings(run: RunFolder) -> list[str]:
    notes = [run.edited] if run.edited else []
    if not run.finished:
        notes.append(
            "Unfinished: the numbers are from the finished rounds;"
            f" `{command('train', '--resume', run.path)}` continues."
        )
    for name, arm in run.arms.items():
        if arm.get("rejected"):
            notes.append(
                f"{name}: {count(arm['rejected'], 'rejected reply', 'rejected replies')}"
                f"{'; see the table below' if run.rejected else ''}."
            )
    return notes + [
        f"{arm}: {warning}." for arm, findings in run.findings.items() for warning in findings.warnings
    ]


def _rejected(run: RunFolder) -> list[ReportElement]:
    table = rejected_table(run)
    return [] if table is None else [_REJECTED_LEGEND, table, *([table.note] if table.note else [])]


def _facts(run: RunFolder) -> list[str]:
    c = run.config
    partition = c.data.partition.model_dump(mode="json") if c.data.partition is not None else {}
    voices = "members" if c.run.uncertainty == "ensemble" else "passes"
    budget = (
        count(c.training.local_steps, "step")
        if c.training.local_steps
        else count(c.training.local_epochs, "local epoch")
    )
    iterations = c.training.iterations()
    rounds = f"{' + '.join(map(str, iterations))} round{'' if iterations == [1] else 's'}"
    facts = {
        "data": (
            f"{c.data.source}, {count(len(run.clients), 'client')}"
            f"{''.join(f', {key} {value}' for key, value in partition.items())}"
        ),
        "training": (
            f"{rounds} of {budget}, batch {c.training.batch_size}, {c.training.optimizer} with learning rate"
            f" {c.training.lr:g}"
        ),
        "model": f"{c.model.encoder}{f' of width {c.model.width}' if 'cnn' in c.model.encoder else ''}",
        **({} if run.on_sets else {"uncertainty": f"{getattr(c.run, voices)} {voices}"}),
        **{f"arm {name}": _parameters(run, name) for name in run.arms},
        **({} if c.run.privacy == "none" else {"privacy": _privacy(run)}),
        "seed": f"{c.run.seed}",
        **_made(run),
        "every key": "`config.toml`",
    }
    notes = [f"note: {note}" for note in run.made.get("notes", ())]
    return [f"{key}: {value}" for key, value in facts.items()] + notes


def _made(run: RunFolder) -> dict[str, str]:
    """Return the date, host and versions of the run, if its folder has them."""
    made = run.made
    if not made:
        return {}
    how = f"{made['precision']}, {count(made['threads'], 'thread')}, {made['device']}"
    versions = f"uefl {made['version']}, torch {made['torch']}, Python {made['python']}"
    return {
        "begun": f"{made['begun']}, on {made['host']} ({made['machine']})",
        "computed with": f"{how}; {versions}",
    }


def _privacy(run: RunFolder) -> str:
    """Describe the mechanism of privacy, and name the files outside its guarantee."""
    r = run.config.run
    spent = (
        f"epsilon in the table is for a single arm, at delta {r.delta:g}; the epsilon of all arms together is"
        " in `summary.json`"
    )
    outside = (
        "the measurements of clients, this report and all files of metrics have no noise and no guarantee"
    )
    return (
        f"{r.privacy}, clip_norm {r.clip_norm:g}, noise_multiplier {r.noise_multiplier:g}; {spent}; {outside}"
    )


def _parameters(run: RunFolder, name: str) -> str:
    """Return the algorithm of an arm, and its parameters that differ from their defaults."""
    arm = run.config.arms[name]
    fields = type(arm.parameters).model_fields
    own = [
        f"{key} {getattr(arm.parameters, key)}"
        for key, field in fields.items()
        if getattr(arm.parameters, key) != field.default
    ]
    return ", ".join([arm.algorithm, *own])


def _findings(run: RunFolder, pictures: dict[str, Picture]) -> list[ReportSection]:
    """Return the sections that the algorithms add, one for each title."""
    sections = []
    for title in dict.fromkeys(findings.title for findings in run.findings.values()):
        same = {arm: findings for arm, findings in run.findings.items() if findings.title == title}
        lines = [f"{arm}: {line}" for arm, findings in same.items() for line in findings.lines]
        headers = {tuple(findings.header): None for findings in same.values() if findings.rows}
        tables = [
            Table(
                title,
                ["arm", *header],
                [[arm, *row] for arm, f in same.items() if tuple(f.header) == header for row in f.rows],
            )
            for header in headers
        ]
        names = [
            plots.shares_file(findings.shares, arm)
            for arm, findings in same.items()
            if findings.shares is not None
        ]
        elements: list[ReportElement] = [
            *([lines] if lines else []),
            *tables,
            *(pictures[name] for name in names if name in pictures),
        ]
        sections.append(ReportSection(title, elements))
    return sections
