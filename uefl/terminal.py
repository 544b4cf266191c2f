"""Replacements for characters that a terminal lacks."""

from __future__ import annotations

import codecs
import io
import sys

_PLAIN = {"±": "+-", "−": "-", "–": "-", "…": "...", "°": " deg"}


def write_nearest_characters() -> None:
    """Have stdout and stderr replace characters that they lack."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest-character")


def nearest_characters(text: str, encoding: str) -> str:
    """Return a text as a terminal of this encoding shows it, which may be longer: so that tables are laid out
    for it."""
    return text.encode(encoding, "nearest-character").decode(encoding)


def _nearest_character(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


codecs.register_error("nearest-character", _nearest_character)
