"""Write the content of a report as Markdown, with links to its pictures."""

from __future__ import annotations

import re

from .content import Block, Content
from .tables import Table, escape_markdown


def write(content: Content) -> str:
    """Return the text of the file."""
    parts = [f"# {_text(content.title)}\n", *(f"> **{_text(note)}**\n" for note in content.warnings)]
    for section in content.sections:
        parts += [f"## {section.title}\n"] if section.title else []
        parts += [_block(block) for block in section.blocks]
    return "\n".join(parts)


def _block(block: Block) -> str:
    if isinstance(block, str):
        return f"{_text(block)}\n"
    if isinstance(block, list):
        return "".join(f"- {_text(line)}\n" for line in block)
    if isinstance(block, Table):
        return block.markdown()
    return f"![{_text(block.alt)}](plots/{block.name})\n\n{_text(block.caption)}\n"


def _text(text: str) -> str:
    """Escape text for Markdown, except code."""
    return "".join(
        part if part.startswith("`") else escape_markdown(part) for part in re.split(r"(`[^`]+`)", text)
    )
