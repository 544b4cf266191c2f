"""The ways in which a run ends early; the command line turns each into one line and an exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The user asked for something that cannot be done; the message says what to change. Exit code 2, nothing was written."""


class UnknownAlgorithm(UserError):
    """No algorithm has a name, in this process; a script may register it."""


class RunError(Exception):
    """A run that started but could not finish honestly (quorum lost, diverged model). Exit code 1."""


class InvalidPriors(UserError, ValueError):
    """Class priors or sets that no client can be trained with; the message names the client, and the set where there is one."""


def nearest(word: str, words: Iterable[str]) -> str:
    """`` (did you mean 'x'?)``, or nothing."""
    close = difflib.get_close_matches(word, list(words), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
