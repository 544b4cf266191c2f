"""A table of class shares (priors) of the user's own unlabeled sets: priors.csv or priors.json in a folder.

priors.csv: the columns client, set, then one per class; its header gives the classes and their order.
priors.json: ``{"NAME": {"SET": {"CLASS": share}}}``.
"""

from __future__ import annotations

import csv
import io
import json
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InvalidPriors, listed
from ..paths import check_fits, other_capitals, read_text


class SetPriors(NamedTuple):
    """The priors of a set, and where they are written."""

    shares: list[float]
    place: str


class PriorTable(NamedTuple):
    """Priors by client and set, and the classes in the order of their columns, all empty without a table."""

    file: str
    rows: dict[str, dict[str, SetPriors]]
    classes: tuple[str, ...]


def read(root: Path) -> PriorTable:
    """Read the table in a folder, or return an empty one if there is none.

    Raises:
        InvalidPriors: the table cannot be read, or an entry is missing or occurs twice.
    """
    if (root / "priors.csv").exists():
        path = root / "priors.csv"
        check_fits(path)
        try:
            text = read_text(path, "utf-8-sig")  # spreadsheets put a mark in front
        except UnicodeDecodeError as error:
            raise InvalidPriors(f"{path} is not UTF-8 text ({error}); save it as CSV UTF-8") from None
        reader = csv.reader(io.StringIO(text))
        try:
            # a row ends in this line
            numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
        except csv.Error as error:
            raise InvalidPriors(
                f"{path}, line {reader.line_num}: {error}; look for a quotation mark that is not closed"
            ) from None
        header = numbered[0][1] if numbered else []
        if header[:2] != ["client", "set"] or len(header) < 4:
            found = ",".join(header) if numbered else "nothing"
            hint = "; separate the cells by commas, not semicolons" if ";" in found else ""
            raise InvalidPriors(f"{path}: expected the header client,set,CLASS,CLASS,...; got {found}{hint}")
        classes = tuple(header[2:])
        if "" in classes:
            raise InvalidPriors(f"{path}: column {classes.index('') + 3} of the header has no class name")
        if len(set(classes)) < len(classes):
            raise InvalidPriors(f"{path}: the header names a class twice: {','.join(classes)}")
        table: dict[str, dict[str, SetPriors]] = {}
        for line, row in numbered[1:]:
            if not any(row):
                continue
            if len(row) != len(header):
                raise InvalidPriors(f"{path}, line {line}: {len(row)} cells, expected {len(header)}")
            if row[1] in table.setdefault(row[0], {}):
                raise InvalidPriors(f"{path}, line {line}: client {row[0]!r}, set {row[1]!r} occurs twice")
            shares = [_number(cell, f"{path}, line {line}") for cell in row[2:]]
            table[row[0]][row[1]] = SetPriors(shares, f"{path.name}, line {line}")
        return PriorTable(path.name, table, classes)
    if (root / "priors.json").exists():
        return _read_json(root / "priors.json")
    for name in ("priors.csv", "priors.json"):
        if other := other_capitals(root / name):
            raise InvalidPriors(f"{root / name} does not exist{other}")
    return PriorTable("", {}, ())


def _read_json(path: Path) -> PriorTable:
    def entries(pairs: Any, place: str, unit: str) -> dict[str, Any]:
        """Return the entries of an object, each name once.

        By default, json would keep the last of several entries with one name.
        """
        if not (isinstance(pairs, tuple) and pairs):
            got = reprlib.repr(pairs) if pairs else "nothing"
            raise InvalidPriors(
                f'{path}: expected {{"CLIENT": {{"SET": {{"CLASS": share}}}}}}; got {got}{place}'
            )
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise InvalidPriors(f"{path}: {unit} {name!r} occurs twice{place}")
            found[name] = value
        return found

    check_fits(path)
    try:
        content = json.loads(read_text(path, "utf-8-sig"), object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise InvalidPriors(f"{path} is not JSON ({error})") from None
    named = {
        client: {
            name: entries(row, f" in client {client!r}, set {name!r}", "class")
            for name, row in entries(rows, f" in client {client!r}", "set").items()
        }
        for client, rows in entries(content, "", "client").items()
    }
    classes = tuple(next(iter(next(iter(named.values())).values())))
    for client, rows in named.items():
        for name, row in rows.items():
            differing = [k for k in (*row, *classes) if (k in row) != (k in classes)]
            if differing:
                raise InvalidPriors(
                    f"{path}: client {client!r}, set {name!r}: expected the classes of the first set; only"
                    f" one of the two has {listed(differing)}"
                )

    def shares(client: str, name: str) -> list[float]:
        return [_number(named[client][name][k], f"{path}, client {client!r}, set {name!r}") for k in classes]

    table = {
        client: {name: SetPriors(shares(client, name), path.name) for name in rows}
        for client, rows in named.items()
    }
    return PriorTable(path.name, table, classes)


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidPriors(f"{where}: {reprlib.repr(value)} is not a number in [0, 1]") from None
