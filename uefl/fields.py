"""Parse tables of keys into pydantic models.

Each error is one line for the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import UserError, nearest

S = TypeVar("S", bound=BaseModel)
SectionsWith = Callable[[str], list[str]]
"""a function that returns the sections, partition schemes and algorithms that have a key"""
_TYPES = frozenset({"bool", "int", "float", "str"})  # pydantic appends these to the location of a union
_LONGEST = 80


class Section(BaseModel):
    """Keys with their types, ranges and meaning.

    The text below a key is its description. Unknown keys and wrong values are refused.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def parse(
    kind: type[S],
    place: str,
    table: dict[str, Any],
    sections_with: SectionsWith = lambda key: [],
    inside: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> S:
    """Parse the table of a section into a pydantic model, with lists as tuples.

    Args:
        sections_with: returns the sections, partition schemes and algorithms that have an unknown key.
        inside: the keys of each nested table, by the name of its section, to suggest the nearest key.

    Raises:
        UserError: the first key that is unknown, of a wrong type, or out of its range.
    """
    try:
        found = kind(**{key: tuples(value) for key, value in table.items()})
    except ValidationError as error:
        raise _refused(error, place, kind, sections_with, inside) from None
    _check_integers(place, table)
    return found


def _check_integers(key: str, value: Any) -> None:
    """Refuse an integer of more than 64 bits, because arrays and tensors cannot store it."""
    if isinstance(value, (Mapping, list, tuple)):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_integers(f"{key}.{name}", part)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"key {key!r}: expected an integer of at most 64 bits; got {shown(value)}")


def unknown(
    key: str, place: str, keys: Iterable[str], sections_with: SectionsWith, listed: str = ""
) -> UserError:
    """Return the error for a key that is not in ``keys``, with the place that lists them."""
    inside = f" in [{place}]" if place else ""
    found = sections_with(key)
    hint = (
        f"; it is a key of {', '.join(found)}"
        if found
        else nearest(key, [word for word in keys if word != key])
    )
    return UserError(f"unknown key {key!r}{inside}{hint}; {listed or '`uefl keys` lists the keys'}")


def check_unused(values: BaseModel, key: str, why: str, section: str = "") -> None:
    """Refuse a key without effect, unless it has its default, as in the file of a run folder.

    Raises:
        UserError: the key has another value; the message begins with ``section``.
    """
    default, value = type(values).model_fields[key].default, getattr(values, key)
    if value != default:
        at = "" if default is None else f"expected its default {default!r}, so set it to that or "
        raise UserError(
            f"key '{section}{key}': {at}omit it: {why}; got {getattr(value, 'name', shown(value))}"
        )


def shown(value: Any) -> str:
    """Return a value as one line of limited length."""
    text = repr(list(value) if isinstance(value, tuple) else value).replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _refused(
    error: ValidationError,
    place: str,
    kind: type[BaseModel],
    sections_with: SectionsWith,
    inside: Mapping[str, Iterable[str]],
) -> UserError:
    """Turn the first error of pydantic into a user error."""
    found = error.errors(include_url=False)[0]
    where = [
        name
        for name in map(str, found["loc"])
        if not name.startswith(("function-", "is-instance", "tuple")) and name not in _TYPES
    ]
    key = ".".join([place, *where])
    if found["type"] == "extra_forbidden":
        if len(where) > 1:
            within = ".".join([place, *where[:-1]])
            return unknown(where[-1], within, inside.get(within, ()), sections_with)
        keys, ours = kind.model_fields, kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        return unknown(
            where[-1], place, keys, sections_with, "" if ours else f"it has {', '.join(keys) or 'no keys'}"
        )
    if found["type"] == "missing":
        return UserError(f"key {key!r} is missing; give it a value, it has no default")
    if found["type"] == "string_unicode":
        return UserError(f"key {key!r}: {shown(found['input'])} is not UTF-8; rename the file or folder")
    message = found["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    message = (
        message.partition(", unable to parse")[0]
        .replace("a valid ", "a ")
        .replace("a integer", "an integer")
        .replace("a boolean", "true or false")
        .replace("a tuple", "a list, as in [1]")
        .replace("tuple", "list")
    )
    message = re.sub(r"^(?:Tuple|String) should have (.*?)(?: after validation.*)?$", r"expected \1", message)
    got = "" if found["type"] == "value_error" else f"; got {shown(found['input'])}"
    return UserError(f"key {key!r}: {message}{got}")


def tuples(value: Any) -> Any:
    """Return a value with lists as tuples, and integers of NumPy as integers of Python."""
    if isinstance(value, list):
        return tuple(map(tuples, value))
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value
