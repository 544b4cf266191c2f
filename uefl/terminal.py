"""What a terminal that lacks a character shows in its place."""

from __future__ import annotations

import codecs
import io
import sys

_PLAIN = {"±": "+-", "−": "-", "–": "-", "…": "...", "°": " deg"}


def write_nearest_characters() -> None:
    """Have stdout and stderr never fail for a character that they lack."""
    codecs.register_error("nearest-character", _nearest_character)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest-character")


def _nearest_character(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end
