"""``report.md`` and the pictures it shows."""

from __future__ import annotations

from pathlib import Path

from .folder import Run, read_run
from .plots import write_plots
from .tables import arm_table, client_table

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
        *(f"![{alt}](plots/{name})\n\n{caption}\n" for name, alt, caption in pictures),
        *([] if run.config.on_sets else ["## Extensions\n", *(_extensions(run) or ["No client was given further codewords.\n"])]),
        *([] if run.config.on_sets else ["## Clients\n", client_table(run).markdown()]),
    ]
    (path / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return run


def _legend(run: Run) -> str:
    if not run.config.on_sets:
        return _SILOS_LEGEND.format(several="members" if run.config.uncertainty == "ensemble" else "passes")
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
    if c.on_sets:
        return _set_facts(run)
    rounds = " + ".join(map(str, c.iterations()))
    passes = f"{c.passes} passes, dropout {'off' if c.mode == 'legacy' else 'on'}"
    voices = f"{c.members} members" if c.uncertainty == "ensemble" else passes
    facts = {
        "data": f"{c.data}, {len(run.clients)} clients",
        "training": f"{rounds} rounds of {c.local_epochs} local epochs, batch {c.batch_size}, learning rate {c.lr:g}",
        "model": f"{c.encoder}{f' of width {c.width}' if c.encoder == 'cnn' else ''}, {c.codewords} codewords in {c.segments} segment(s)",
        "extension": f"entropy above {1 + c.gamma:g} x {c.reference}, {voices}, {c.threshold} threshold",
        "seed": f"{c.seed}, mode {c.mode}",
    }
    return "".join(f"- {key}: {value}\n" for key, value in facts.items()) + "- every key: [config.toml](config.toml)\n"


def _set_facts(run: Run) -> str:
    c = run.config
    own = "your own sets" if c.path is not None and c.path.is_dir() else f"{c.sets} sets each, split {c.split}, {c.labeled} labeled images"
    inexact = f", noise {c.prior_noise:g}, smoothing {c.prior_smoothing:g}" if c.prior_noise or c.prior_smoothing else ""
    facts = {
        "data": f"{c.data}, {len(run.clients)} clients, {own}; priors {c.priors}{inexact}",
        "training": f"{c.rounds[0]} rounds of {c.local_epochs} local epoch(s), batch {c.batch_size}, learning rate {c.lr:g}, loss {c.loss}",
        "model": f"{c.encoder} of width {c.width}" if "cnn" in c.encoder else c.encoder,
        "seed": f"{c.seed}",
    }
    return "".join(f"- {key}: {value}\n" for key, value in facts.items()) + "- every key: [config.toml](config.toml)\n"


def _extensions(run: Run) -> list[str]:
    lines = []
    for arm in run.arms:
        when: dict[int, list[str]] = {}
        for r in run.of(arm):
            if r["extended"]:
                when.setdefault(r["round"], []).append(r["client"])
        lines += [f"- {arm}, after {round} rounds: {', '.join(clients)}\n" for round, clients in sorted(when.items())]
    return lines
