"""Add the saved results to the site and turn links to files outside docs/ into text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)(?:#[^)]*)?\)")
RESULTS = re.compile(r"\((?:\.\./)+reproduction/results/")
DOCS = "(../../docs/"  # from a page of the kept results


def inside(markdown: str, folder: str) -> str:
    """Return the Markdown of a page in that folder of docs/ ("" for docs/ itself)."""

    def text(match: re.Match[str]) -> str:
        outside = posixpath.normpath(posixpath.join(folder, match[2])).startswith("..")
        return match[1] if outside else match[0]

    here = RESULTS.sub(f"({posixpath.relpath('results', folder or '.')}/", markdown)
    return LINK.sub(text, here.replace(DOCS, "(../") if folder == "results" else here)


def on_files(files: Any, *, config: Any) -> Any:
    """Add reproduction/results to the pages, as results/.

    MkDocs calls this function once.
    """
    from mkdocs.structure.files import File

    root = Path("reproduction")
    for path in sorted(root.glob("results/*")):
        files.append(
            File(path.relative_to(root).as_posix(), str(root), config.site_dir, config.use_directory_urls)
        )
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Convert the links of a page.

    MkDocs calls this function.
    """
    return inside(markdown, posixpath.dirname(page.file.src_uri))
