"""Errors that end a run early.

The command line prints each error in one line, and sets an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The request cannot be carried out.

    The message names the change to make. Nothing was written; the exit code is 2.
    """


class UnknownAlgorithm(UserError):
    """No algorithm of this name is registered in this process, but a script may register it."""


class UnfitClient(UserError):
    """Data of one client that an algorithm cannot train on."""

    def __init__(self, client: str, why: str) -> None:
        super().__init__(f"client {client!r} {why}")
        self.client = client


class RunError(Exception):
    """A run that stopped early (exit code 1), for example without a quorum or with a diverged model."""


class UnusableFile(UserError, OSError):
    """A file that cannot be read, such as a folder, a pipe or a device."""

    def __str__(self) -> str:
        """Name the file and the reason."""
        return f"{self.filename} cannot be used ({self.strerror})"


class InvalidPriors(UserError, ValueError):
    """Class priors or sets that no client can train on, with the client and the set in the message."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters, or its class without a text."""
    line = str(error).strip().partition("\n")[0]
    return line[:200] or type(error).__name__


def one_line(text: str) -> str:
    """Return a text with ? for each line end and other character that is not printed, as in file names."""
    return "".join(character if character.isprintable() else "?" for character in text)


def listed(words: Iterable[object], separator: str = ", ", most: int = 10) -> str:
    """Return words in one line, or only the first ones of many, with the number of the others."""
    whole = list(map(str, words))
    return separator.join(whole[:most] + ([f"and {len(whole) - most} more"] if len(whole) > most else []))


def nearest(word: str, words: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for a word that differs little, or in case only, or an empty string."""
    folded = {each.casefold(): each for each in words}
    close = difflib.get_close_matches(word.casefold(), folded, 1)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""
