"""The commands of docs/deploy.md, as a reader of the page would copy them."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "deploy.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class WalkThrough:
    """A section of the page.

    It has a line that sets variables, commands on the server, at a hospital and on the server again, and a
    file.

    Args:
        title: title of the section.
        changes: text of the page, and its replacement.
    """

    def __init__(self, title: str, changes: dict[str, str]) -> None:
        (section,) = (piece for piece in PAGE.read_text().split("\n## ") if piece.startswith(title))
        for old, new in changes.items():
            assert old in section, old
            section = section.replace(old, new)
        blocks = _BLOCK.findall(section)
        ((export,), self.first, self.hospital, self.last) = (
            re.sub(r"\\\n *", "", text).splitlines() for kind, text in blocks if kind == "console"
        )
        (self.file,) = (text for kind, text in blocks if kind == "toml")
        self.variables = dict(pair.split("=") for pair in export.removeprefix("export ").split())

    def at(self, hospital: str) -> list[str]:
        """Return the commands at a hospital.

        The page has the commands of the first of two hospitals.
        """
        return [line.replace("ulm", hospital) for line in self.hospital]
