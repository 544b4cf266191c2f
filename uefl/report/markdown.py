"""``report.md`` and the pictures it shows."""

from __future__ import annotations

from pathlib import Path

from .folder import Run, read_run
from .plots import write_plots
from .tables import arm_table, client_table


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
        "Accuracy, entropy (nats, of the mean over the passes), perplexity, NLL and ECE are means over the clients' test splits at the "
        "last round; the third column is the mean and the standard deviation of the accuracy over the last four rounds.\n",
        *(f"![{alt}](plots/{name})\n\n{caption}\n" for name, alt, caption in pictures),
        "## Extensions\n",
        *(_extensions(run) or ["No client was given further codewords.\n"]),
        "## Clients\n",
        client_table(run).markdown(),
    ]
    (path / "report.md").write_text("\n".join(parts), encoding="utf-8")
    return run


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
    rounds, dropout = " + ".join(map(str, c.iterations())), "off" if c.mode == "legacy" else "on"
    facts = {
        "data": f"{c.data}, {len(run.clients)} clients",
        "training": f"{rounds} rounds of {c.local_epochs} local epochs, batch {c.batch_size}, learning rate {c.lr:g}",
        "model": f"{c.encoder}{f' of width {c.width}' if c.encoder == 'cnn' else ''}, {c.codewords} codewords in {c.segments} segment(s)",
        "extension": f"entropy above {1 + c.gamma:g} x {c.reference}, {c.passes} passes, dropout {dropout}, {c.threshold} threshold",
        "seed": f"{c.seed}, mode {c.mode}",
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
