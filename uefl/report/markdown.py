"""``report.md`` and the pictures it shows."""

from __future__ import annotations

from pathlib import Path

from .folder import Run, read_run
from .plots import write_plots
from .tables import arm_table, client_table, protocol_table

_SILOS_LEGEND = (
    "Accuracy, entropy (nats, of the mean over the {several}), perplexity, NLL and ECE are means over the clients' test splits at the "
    "last round; the third column is the mean and the standard deviation of the accuracy over the rounds that it names.\n"
)
_SETS_LEGEND = (
    "Accuracy, entropy (nats), NLL and ECE are of the one model on the test images, which are dealt to the clients, at the last round; "
    "the third column is the mean and the standard deviation of the accuracy over the rounds that it names.{selected}\n"
)
_SELECTED = " Selected: accuracy of the model that was best on the server's validation images, and its round."


_NO_TEST_LEGEND = (
    "There are no test images, hence no accuracy: the entropy (nats) is of the one model's predictions of the clients' own images, at the "
    "last round.\n"
)


_PROTOCOL_LEGEND = (
    "Best: the highest mean accuracy and its round; worst 10 %: the mean over the worst tenth of the clients at the last round; global: "
    "without what is private to a client; personalised: after the client's own training; MB: what the server sent to train and got back, "
    "all rounds.\n"
)


def write_report(path: Path) -> Run:
    """Read the run folder ``path`` and write its ``plots/*.png`` and ``report.md``; returns what was read.

    Raises:
        UserError: see ``read_run``; nothing is written then.
    """
    run = read_run(path)
    pictures = write_plots(run)
    parts = [
        f"# Run {path.resolve().name}\n",
        *(f"> {note}\n" for note in _warnings(run)),
        _facts(run),
        arm_table(run).markdown(),
        _legend(run),
        protocol_table(run).markdown(),
        _PROTOCOL_LEGEND,
        *(f"![{alt}](plots/{name})\n\n{caption}\n" for name, alt, caption in pictures),
        *([] if run.on_sets else ["## Extensions\n", *(_extensions(run) or ["No client was given further codewords.\n"])]),
        *([] if run.on_sets else ["## Clients\n", client_table(run).markdown()]),
    ]
    (path / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return run


def _legend(run: Run) -> str:
    if not run.on_sets:
        return _SILOS_LEGEND.format(several="members" if run.config.run.uncertainty == "ensemble" else "passes")
    if not run.measured("accuracy"):
        return _NO_TEST_LEGEND
    return _SETS_LEGEND.format(selected=_SELECTED if "selected" in arm_table(run).header else "")


def _warnings(run: Run) -> list[str]:
    """What a reader must know before the numbers."""
    notes = []
    if not run.finished:
        notes.append(f"**Unfinished.** The numbers are those of the rounds so far; `uefl train --resume {run.path}` continues.")
    for name, arm in run.arms.items():
        if arm.get("rejected"):
            notes.append(f"**{name}: {arm['rejected']} rejected updates.** Not finite or out of bounds, they were left out of the average.")
    return notes


def _facts(run: Run) -> str:
    c = run.config
    partition = c.data.partition.model_dump(mode="json") if c.data.partition is not None else {}
    voices = "members" if c.run.uncertainty == "ensemble" else "passes"
    budget = counted(c.training.local_steps, "step") if c.training.local_steps else counted(c.training.local_epochs, "local epoch")
    iterations = c.training.iterations()
    rounds = f"{' + '.join(map(str, iterations))} {'round' if iterations == [1] else 'rounds'}"
    facts = {
        "data": f"{c.data.source}, {len(run.clients)} clients{''.join(f', {key} {value}' for key, value in partition.items())}",
        "training": f"{rounds} of {budget}, batch {c.training.batch_size}, {c.training.optimizer} with learning rate {c.training.lr:g}",
        "model": f"{c.model.encoder}{f' of width {c.model.width}' if 'cnn' in c.model.encoder else ''}",
        **({} if run.on_sets else {"uncertainty": f"{getattr(c.run, voices)} {voices}"}),
        **{f"arm {name}": _parameters(run, name) for name in run.arms},
        "seed": f"{c.run.seed}",
    }
    return "".join(f"- {key}: {value}\n" for key, value in facts.items()) + "- every key: [config.toml](config.toml)\n"


def counted(number: int, what: str) -> str:
    """``1 round``, ``2 rounds``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _parameters(run: Run, name: str) -> str:
    """The algorithm of an arm, and the parameters that are not at their defaults."""
    arm = run.config.arms[name]
    fields = type(arm.parameters).model_fields
    own = [f"{key} {getattr(arm.parameters, key)}" for key, field in fields.items() if getattr(arm.parameters, key) != field.default]
    return ", ".join([arm.algorithm, *own])


def _extensions(run: Run) -> list[str]:
    lines = []
    for arm in run.arms:
        when: dict[int, list[str]] = {}
        for r in run.of(arm):
            if r["extended"]:
                when.setdefault(r["round"], []).append(r["client"])
        lines += [f"- {arm}, after {counted(round, 'round')}: {', '.join(clients)}\n" for round, clients in sorted(when.items())]
    return lines
