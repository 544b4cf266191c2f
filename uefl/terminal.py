"""Replacements for characters that a terminal lacks."""

from __future__ import annotations

import codecs
import io
import os
import sys

_PLAIN = {"±": "+-", "−": "-", "–": "-", "…": "...", "°": " deg"}


def open_closed_streams() -> None:
    """Open the null device for stdin, stdout and stderr where the caller has closed them.

    Otherwise a file of the run could get the number of a closed stream, and output of libraries would go into
    it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


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
