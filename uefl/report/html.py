"""Write the content of a report as one HTML page, with the pictures inside."""

from __future__ import annotations

import base64
import re
from html import escape
from pathlib import Path

from .content import Block, Content
from .style import Picture
from .tables import Table

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
.scroll { overflow-x: auto; margin: .75rem 0; }
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
@media (max-width: 40rem) { body { padding: 1rem .75rem; } }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
""".strip()


def write(content: Content, plots: Path) -> str:
    """Return the text of the file. ``plots`` is the folder of the pictures."""
    title = escape(content.title)
    links = "".join(
        f'<a href="#{_anchor(section.title)}">{section.title}</a>'
        for section in content.sections
        if section.title
    )
    parts = [
        "<!doctype html>",
        (
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,'
            ' initial-scale=1">'
        ),
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *(f"<p class=warning>{_text(note)}</p>" for note in content.warnings),
        f"<nav>{links}</nav>",
    ]
    for section in content.sections:
        parts += [f'<h2 id="{_anchor(section.title)}">{section.title}</h2>'] if section.title else []
        parts += [_block(block, plots) for block in section.blocks]
    return "\n".join([*parts, "</body></html>\n"])


def _block(block: Block, plots: Path) -> str:
    if isinstance(block, str):
        return f"<p>{_text(block)}</p>"
    if isinstance(block, list):
        return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in block) + "</ul>"
    if isinstance(block, Table):
        return block.html()
    return _picture(block, plots)


def _picture(picture: Picture, plots: Path) -> str:
    data = base64.b64encode((plots / picture.name).read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(picture.alt)}">'
    return f"<figure>{image}<figcaption>{_text(picture.caption)}</figcaption></figure>"


def _text(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
