"""What a report says, in order; ``report.md`` and ``report.html`` are two ways to write it down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import plots
from .folder import Run
from .plots import Picture
from .tables import Table, arm_table, client_table, last_rounds, left_out_table, protocol_table
from .words import count, label

_NORMAL = 1.96  # of a normal distribution, 95 % lie within so many standard deviations
_MOST_CLASSES = 20  # columns of a table
Block = str | list[str] | Table | Picture
"""A paragraph, a list, a table or a picture. In text, only `` `code` `` is markup."""

_SILOS_LEGEND = (
    "Accuracy, entropy (nats, of the mean over the {several}), NLL and ECE are means over the clients' test"
    " splits at the last round; the third column is the mean and the standard deviation of the accuracy over"
    " the rounds that it names."
)
_SETS_LEGEND = (
    "Accuracy, entropy (nats), NLL and ECE are of the one model on the test images, which are dealt to the"
    " clients, at the last round; the third column is the mean and the standard deviation of the accuracy"
    " over the rounds that it names.{selected}"
)
_SELECTED = " Selected: accuracy of the model that was best on the server's validation images, and its round."
_NO_TEST_LEGEND = (
    "There are no test images, hence no accuracy: the entropy (nats) is of the one model's predictions of the"
    " clients' own images, at the last round."
)

_PROTOCOL_LEGEND = (
    "Best: the highest mean accuracy and its round; worst 10 %: the mean over the worst tenth of the clients"
    " at the last round; global: without what is private to a client; personalised: after the client's own"
    " training; MB: tensors that the server sent, to train or only to measure, and got back, all rounds and"
    " clients."
)


_LEFT_OUT_LEGEND = (
    "Answers of clients that count in no average and no measurement, by arm, client and reason; rounds count"
    " from 1."
)


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    """empty for the first one"""
    blocks: list[Block]


@dataclass(frozen=True)
class Content:
    """A whole report."""

    title: str
    warnings: list[str]
    """what a reader must know before the numbers"""
    sections: list[Section]


def content(run: Run, pictures: list[Picture]) -> Content:
    """The report of a run with these pictures; sections that have nothing to show are left out."""
    by_name = {picture.name: picture for picture in pictures}

    def shown(*names: str) -> list[Block]:
        return [by_name[name] for name in names if name in by_name]

    sections = [
        Section(
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
        Section("Left out of the averages", _left_out(run)),
        Section("Clients over the rounds", shown("accuracy.png", "entropy.png")),
        *_findings(run, by_name),
        Section("Predictions", shown("reliability.png", "classes.png", "confusion.png")),
        Section("Images", shown("samples.png")),
        Section("Clients", [*([] if run.on_sets else [client_table(run)]), *_class_counts(run)]),
    ]
    return Content(
        f"Run {run.path.resolve().name}", _warnings(run), [section for section in sections if section.blocks]
    )


def verdict(run: Run) -> list[Block]:
    """Say which arm is ahead, and how large a difference between arms may be chance; nothing for a single arm
    or without accuracy."""
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
        sum(silo.get("test", {}).get("images_of_class", ()))
        for silo in run.manifest.get("silos", {}).values()
    )
    if images:
        half = _NORMAL * math.sqrt((one * (1 - one) + two * (1 - two)) / images)
        chance = f"With {images} test images, a difference of up to {half:.3f} may be chance (95 %)"
        found += (
            f" {chance}: this one, {one - two:.3f}, is {'within' if one - two <= half else 'beyond'} that."
        )
    return [f"{found} This is one seed; other seeds differ too (`uefl report RUN RUN ...` compares them)."]


def _class_counts(run: Run) -> list[Block]:
    """The training images of each class that every client has."""
    if len(run.classes) > _MOST_CLASSES:
        return []
    rows = []
    for name, silo in _labeled(run.manifest.get("silos", {})):
        counts = np.sum(
            [part["images_of_class"] for use, part in silo.items() if use in ("train", "holdout")], axis=0
        )
        rows.append([run.labels.get(name) or label(name), *map(str, counts)])
    table = Table("images of each class", ["client", *run.classes], rows)
    return ["Training images of each class, those held out included:", table] if rows else []


def _labeled(silos: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, silo) for name, silo in silos.items() if "images_of_class" in silo.get("train", {})]


def _legend(run: Run) -> str:
    """Explain the columns of the table, those of the algorithms too."""
    header = arm_table(run).header
    added = "".join(f" `{key}`: {about}." for key, about in run.columns.items() if key in header)
    return f"{_usual_legend(run)}{added}"


def _usual_legend(run: Run) -> str:
    if not run.on_sets:
        return _SILOS_LEGEND.format(
            several="members" if run.config.run.uncertainty == "ensemble" else "passes"
        )
    if not run.measured("accuracy"):
        return _NO_TEST_LEGEND
    return _SETS_LEGEND.format(selected=_SELECTED if "selected" in arm_table(run).header else "")


def _warnings(run: Run) -> list[str]:
    notes = []
    if not run.finished:
        notes.append(
            f"Unfinished: the numbers are those of the rounds so far; `uefl train --resume {run.path}`"
            " continues."
        )
    for name, arm in run.arms.items():
        if arm.get("rejected"):
            notes.append(
                f"{name}: {count(arm['rejected'], 'answer')} of clients left"
                f" out{'; see the table below' if run.left_out else ''}."
            )
    return notes + [
        f"{arm}: {warning}." for arm, findings in run.findings.items() for warning in findings.warnings
    ]


def _left_out(run: Run) -> list[Block]:
    table = left_out_table(run)
    return [] if table is None else [_LEFT_OUT_LEGEND, table, *([table.note] if table.note else [])]


def _facts(run: Run) -> list[str]:
    c = run.config
    partition = c.data.partition.model_dump(mode="json") if c.data.partition is not None else {}
    voices = "members" if c.run.uncertainty == "ensemble" else "passes"
    budget = (
        count(c.training.local_steps, "step")
        if c.training.local_steps
        else count(c.training.local_epochs, "local epoch")
    )
    plan = c.training.iterations()
    rounds = f"{' + '.join(map(str, plan))} round{'' if plan == [1] else 's'}"
    facts = {
        "data": (
            f"{c.data.source},"
            f" {count(len(run.silos), 'client')}{''.join(f', {key} {value}' for key, value in partition.items())}"
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
    return [f"{key}: {value}" for key, value in facts.items()]


def _made(run: Run) -> dict[str, str]:
    """When and where the run was made, as far as its folder says."""
    made = run.made
    if not made:
        return {}
    how = f"{made['precision']}, {count(made['threads'], 'thread')}, {made['device']}"
    versions = f"uefl {made['version']}, torch {made['torch']}, Python {made['python']}"
    return {
        "begun": f"{made['begun']}, on {made['host']} ({made['machine']})",
        "computed with": f"{how}; {versions}",
    }


def _privacy(run: Run) -> str:
    """The mechanism, and what is outside of its guarantee."""
    r = run.config.run
    spent = (
        f"epsilon of the table at delta {r.delta:g}, of each arm alone; that of all arms together is in"
        " `summary.json`"
    )
    outside = (
        "what clients measure, this report and every file of metrics are without noise, and outside of it"
    )
    return (
        f"{r.privacy}, clip_norm {r.clip_norm:g}, noise_multiplier {r.noise_multiplier:g}; {spent}; {outside}"
    )


def _parameters(run: Run, name: str) -> str:
    """The algorithm of an arm, and the parameters that are not at their defaults."""
    arm = run.config.arms[name]
    fields = type(arm.parameters).model_fields
    own = [
        f"{key} {getattr(arm.parameters, key)}"
        for key, field in fields.items()
        if getattr(arm.parameters, key) != field.default
    ]
    return ", ".join([arm.algorithm, *own])


def _findings(run: Run, pictures: dict[str, Picture]) -> list[Section]:
    """Return the sections that the algorithms add; arms whose findings have the same title share one."""
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
        blocks: list[Block] = [
            *([lines] if lines else []),
            *tables,
            *(pictures[name] for name in names if name in pictures),
        ]
        sections.append(Section(title, blocks))
    return sections
