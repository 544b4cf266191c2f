"""Convert the few reStructuredText marks of our docstrings to Markdown for mkdocstrings.

Docstrings are read in editors and terminals, too, so they stay as they are.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?(?:[\w.]+\.)?(\w+)`")
LITERAL = re.compile(r"::$", re.MULTILINE)
# "k, seed: as kmeans" below Args
ENTRY = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
# griffe shows "Source: a paper" as a box if its next lines are indented
HANGING = re.compile(r"^\w[\w ]*: \S.*(?:\n +\S.*)+", re.MULTILINE)


def markdown(text: str) -> str:
    """Convert names to code, blocks after a colon to code blocks, and joint arguments to entries.

    A paragraph with a hanging indent becomes one line.
    """

    def entries(match: re.Match[str]) -> str:
        return "\n".join(f"{match[1]}{name}: {match[3]}" for name in match[2].split(", "))

    text = HANGING.sub(lambda match: " ".join(match[0].split()), text)
    return ENTRY.sub(entries, LITERAL.sub(":", ROLE.sub(r"`\1`", text)))


class Markdown(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
