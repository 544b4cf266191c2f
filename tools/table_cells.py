"""Mark the long cells of tables while MkDocs builds the site.

A style sheet keeps the columns of these cells readable on a narrow screen.
"""

from __future__ import annotations

import re
from typing import Any

CELL = re.compile(r"<td((?: style=\"[^\"]*\")?)>(.*?)</td>", re.DOTALL)
LONG = 60  # letters of a long cell; a shorter one may be broken into lines


def marked(page: str) -> str:
    """Give each long cell of a page the class ``long``."""

    def cell(match: re.Match[str]) -> str:
        style, content = match.groups()
        text = " ".join(re.sub(r"<[^>]*>", "", content).split())
        return f'<td class="long"{style}>{content}</td>' if len(text) >= LONG else match[0]

    return CELL.sub(cell, page)


def on_page_content(content: str, **_: Any) -> str:
    """Run for every page of MkDocs."""
    return marked(content)
