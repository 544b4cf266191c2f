"""Write the pages of a run folder, or of a comparison of runs: pictures, Markdown and HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..checkpoint import write_text
from ..folder import in_turn
from ..paths import read_bytes, resolved
from ..text_table import Table, escape_markdown
from .compare import Comparison
from .content import Content, ReportElement, comparison, content
from .plots import draw_comparison, save, write_plots
from .run_folder import RunFolder, read_run

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #fff; --soft: #57606a; --line: #d8dee4;
  --link: #0550ae; --code: #f3f4f6; --note: #fff8e5; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #0d1117; --soft: #9198a1;
  --line: #3d444d; --link: #79b8ff; --code: #21262d; --note: #2e2608; } }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--page); }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
nav { font-size: .9rem; margin-bottom: 1rem; }
nav a { display: inline-block; margin-right: 1rem; color: var(--link); }
p, ul { overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; margin: .5rem 0; }
p.warning { border-left: 4px solid #bf8700; background: var(--note); padding: .5rem .8rem; font-weight: 600; }
.scroll { overflow-x: auto; margin: .75rem 0; /* a shadow, until the end is in sight */
  background: linear-gradient(to left, var(--page) 1rem, #0000) right / 2rem 100% no-repeat local,
  radial-gradient(farthest-side at 100% 50%, var(--soft), #0000) right / .8rem 100% no-repeat; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
th, td { text-align: left; vertical-align: bottom; }
td, th[scope=row] { white-space: nowrap; }
table.numbers td, table.numbers th[scope=col]:not(:first-child) { text-align: right;
  font-variant-numeric: tabular-nums; }
th[scope=col] { border-bottom: 2px solid var(--soft); }
th[scope=row] { font-weight: 600; }
figure { margin: 1.25rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption { font-size: .85rem; color: var(--soft); }
code { font-size: .9em; background: var(--code); padding: .1em .3em; border-radius: 3px; }
@media (max-width: 48rem) { body { padding: 1rem .75rem; } table { font-size: .75rem; }
  th, td { padding: .25rem; } }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
""".strip()


def write_report(path: Path) -> RunFolder:
    """Write the report of a run: ``plots/*.png``, ``report.md`` and ``report.html``.

    Raises:
        UserError: :func:`read_run` cannot read the folder; nothing is written then.
        OSError: the folder cannot be written to.
    """
    run = read_run(path)
    with in_turn(path / "report.html"):
        write_pages(content(run, write_plots(run)), path)
    return run


def write_comparison(compared: Comparison, out: Path) -> None:
    """Write the page over several runs into the folder ``out``.

    Raises:
        OSError: the folder cannot be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    with in_turn(out / "report.html"):
        write_pages(comparison(compared, save(draw_comparison(compared), out)), out)


def write_pages(found: Content, out: Path) -> None:
    """Write ``report.md`` and ``report.html`` with the pictures in ``plots``."""
    write_text(out / "report.md", markdown(found))
    write_text(out / "report.html", html(found, out / "plots"))


def folder_of_comparison(paths: Sequence[Path]) -> Path:
    """Return the default folder of a comparison: ``comparison`` next to the first run."""
    return resolved(paths[0]).parent / "comparison"


def markdown(content: Content) -> str:
    """Return a report in Markdown, with links to its pictures."""
    lines = [
        f"# {_markdown_text(content.title)}\n",
        *(f"> **{_markdown_text(note)}**\n" for note in content.warnings),
    ]
    for section in content.sections:
        lines += [f"## {section.title}\n"] if section.title else []
        lines += [_markdown_element(element) for element in section.elements]
    return "\n".join(lines)


def _markdown_element(element: ReportElement) -> str:
    if isinstance(element, str):
        return f"{_markdown_text(element)}\n"
    if isinstance(element, list):
        return "".join(f"- {_markdown_text(line)}\n" for line in element)
    if isinstance(element, Table):
        return element.markdown()
    return f"![{_markdown_text(element.alt)}](plots/{element.name})\n\n{_markdown_text(element.caption)}\n"


def _markdown_text(text: str) -> str:
    """Escape text for Markdown, except code."""
    return "".join(
        piece if piece.startswith("`") else escape_markdown(piece) for piece in re.split(r"(`[^`]+`)", text)
    )


def html(content: Content, plots: Path) -> str:
    """Return a report as one HTML page, with the pictures of the folder ``plots`` inside."""
    title = escape(content.title)
    links = "".join(
        f'<a href="#{_anchor(section.title)}">{section.title}</a>'
        for section in content.sections
        if section.title
    )
    lines = [
        "<!doctype html>",
        (
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,'
            ' initial-scale=1">'
        ),
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *(f"<p class=warning>{_html_text(note)}</p>" for note in content.warnings),
        f"<nav>{links}</nav>",
    ]
    for section in content.sections:
        lines += [f'<h2 id="{_anchor(section.title)}">{section.title}</h2>'] if section.title else []
        lines += [_html_element(element, plots) for element in section.elements]
    return "\n".join([*lines, "</body></html>\n"])


def _html_element(element: ReportElement, plots: Path) -> str:
    if isinstance(element, str):
        return f"<p>{_html_text(element)}</p>"
    if isinstance(element, list):
        return "<ul>" + "".join(f"<li>{_html_text(line)}</li>" for line in element) + "</ul>"
    if isinstance(element, Table):
        return element.html()
    data = base64.b64encode(read_bytes(plots / element.name)).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(element.alt)}">'
    return f"<figure>{image}<figcaption>{_html_text(element.caption)}</figcaption></figure>"


def _html_text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
