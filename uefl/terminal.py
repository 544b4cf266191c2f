"""Replacements for characters that a terminal lacks."""

from __future__ import annotations

import codecs
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

from .paths import named

OUTPUT = Path("the output")
"""the name of stdout in messages of errors"""
_PLAIN = {"±": "+-", "−": "-", "–": "-", "…": "...", "°": " deg"}


closed_streams: set[str] = set()
"""streams that were closed when the command began"""


def open_closed_streams() -> None:
    """Open the null device for closed streams, so that no file of the run gets their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            closed_streams.add(name)
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this stream
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


class _Output(io.TextIOWrapper):
    """A stream that names itself in the errors of the system."""

    def write(self, text: str) -> int:
        """Write a text."""
        with named(OUTPUT):
            return super().write(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with named(OUTPUT):
            super().flush()


class _Messages(io.TextIOWrapper):
    """A stream that drops what cannot be written, so that the result of a command sets its exit code."""

    def write(self, text: str) -> int:
        """Write a text."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with suppress(OSError):
            super().flush()


def replace_streams() -> None:
    """Name stdout in its errors, and drop messages that stderr cannot take."""
    for name, kind in (("stdout", _Output), ("stderr", _Messages)):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            encoding, errors, by_line = stream.encoding, stream.errors, stream.line_buffering
            setattr(sys, name, kind(stream.detach(), encoding, errors, line_buffering=by_line))


def write_nearest_characters() -> None:
    """Make stdout and stderr replace unsupported characters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="nearest-character")


def say(text: str, *, error: bool = False) -> None:
    """Print a line to stdout or stderr, which ``typer.echo`` would bypass in a locale of ASCII."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


def nearest_characters(text: str, encoding: str) -> str:
    """Return a text, which may become longer, as a terminal of this encoding shows it."""
    return text.encode(encoding, "nearest-character").decode(encoding)


def _nearest_character(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


codecs.register_error("nearest-character", _nearest_character)
