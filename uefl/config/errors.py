"""One line for everything that can be wrong with a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from ..errors import UserError, nearest
from .keys import homes

_LONGEST = 80


def refused(error: ValidationError, place: str, keys: Iterable[str]) -> UserError:
    """The first finding of pydantic as an error of the user; ``place`` is the section, ``keys`` what it may hold."""
    found = error.errors(include_url=False)[0]
    where = [str(part) for part in found["loc"] if not str(part).startswith(("function-", "is-instance", "tuple"))]
    key = ".".join([place, *where])
    if found["type"] == "extra_forbidden":
        return unknown(where[-1], place if len(where) == 1 else ".".join([place, *where[:-1]]), keys if len(where) == 1 else ())
    message = found["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    message = message.replace("a valid ", "a ").replace("a integer", "an integer").replace("tuple", "list")
    got = "" if found["type"] == "value_error" else f"; got {shown(found['input'])}"
    return UserError(f"key {key!r}: {message}{got}")


def unknown(key: str, place: str, keys: Iterable[str]) -> UserError:
    """A key that a section does not have."""
    inside = f" in [{place}]" if place else ""
    found = homes(key)
    hint = f"; it is a key of {', '.join(found)}" if found else nearest(key, [word for word in keys if word != key])
    return UserError(f"unknown key {key!r}{inside}{hint}; the keys are listed in docs/configuration.md")


def shown(value: Any) -> str:
    """A value in a line, cut where it is long."""
    text = repr(list(value) if isinstance(value, tuple) else value).replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
