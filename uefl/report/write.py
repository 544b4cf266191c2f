"""Write the pages of a run folder, or of a comparison of runs: pictures, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import write_text
from . import html, markdown
from .compare import Comparison
from .content import Content, comparison, content
from .plots import draw_comparison, save, write_plots
from .run_folder import RunFolder, read_run


def write_report(path: Path) -> RunFolder:
    """Write the report of a run: ``plots/*.png``, ``report.md`` and ``report.html``.

    Raises:
        UserError: see :func:`read_run`; nothing is written then. OSError: the folder cannot be written to.
    """
    run = read_run(path)
    write_pages(content(run, write_plots(run)), path)
    return run


def write_comparison(compared: Comparison, out: Path) -> None:
    """Write the page over several runs into the folder ``out``.

    Raises:
        OSError: the folder cannot be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_pages(comparison(compared, save(draw_comparison(compared), out)), out)


def write_pages(found: Content, out: Path) -> None:
    """Write ``report.md`` and ``report.html`` with the pictures in ``plots``."""
    write_text(out / "report.md", markdown.write(found))
    write_text(out / "report.html", html.write(found, out / "plots"))


def folder_of_comparison(paths: Sequence[Path]) -> Path:
    """Return the default folder of a comparison: ``comparison`` next to the first run."""
    return paths[0].resolve().parent / "comparison"
