"""For MkDocs: a link to a file of the repository outside docs/ becomes its text; the site has no page for it."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)(?:#[^)]*)?\)")


def inside(markdown: str, folder: str) -> str:
    """The Markdown of a page in that folder of docs/ ("" for docs/ itself)."""

    def text(match: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if outside else match[0]

    return LINK.sub(text, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """What MkDocs calls for every page."""
    return inside(markdown, posixpath.dirname(page.file.src_uri))
