"""Write the report of a run folder: pictures, ``report.md`` and ``report.html``."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint import write_text
from . import html, markdown
from .content import content
from .folder import Run, read_run
from .plots import write_plots


def write_report(path: Path) -> Run:
    """Read the run folder ``path`` and write its ``plots/*.png``, ``report.md`` and ``report.html``; returns
    what was read.

    Raises:
        UserError: see ``read_run``; nothing is written then. OSError: the folder cannot be written to.
    """
    run = read_run(path)
    found = content(run, write_plots(run))
    write_text(path / "report.md", markdown.write(found))
    write_text(path / "report.html", html.write(found, path / "plots"))
    return run
