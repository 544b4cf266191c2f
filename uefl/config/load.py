"""Read a configuration from a preset, a TOML file with an optional base, and ``--set``.

A file with ``base = "PRESET"`` is merged with the preset key by key. Only ``[data.partition]`` is replaced
whole if it names another scheme; ``--set data.partition.scheme=...`` does the same. If the file has tables
``[arms.NAME]``, the run has exactly these arms. Each arm starts from the arm of the same name in the base, if
there is one. ``arms = ["a", "b"]`` selects arms by name, from the base or with the defaults of the algorithm
of the same name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import UnknownAlgorithm, UserError, nearest
from ..fields import shown, unknown
from ..paths import check_file, command, expanded, read_text
from .config import SECTIONS, Config, from_table
from .keys import all_keys, named, places, sections_with, whole_keys

_GROUPS = ("start", "codebooks", "sets", "own")
"""folders of presets, in the order of the listing"""
_FIRST = {"run": "seed", "data": "source", "model": "encoder", "training": "lr"}
"""section: the key to suggest to a user who sets the section itself"""


def presets() -> dict[str, str]:
    """Return the name of each preset and the first comment line of its file, group by group."""
    return {name: about for group in preset_groups().values() for name, about in group.items()}


def preset_groups() -> dict[str, dict[str, str]]:
    """Return the presets by group."""
    return {
        group: {
            f.name[:-5]: f.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for f in _files(group)
        }
        for group in _GROUPS
    }


def preset_text(name: str) -> str:
    """Return the TOML text of a preset.

    Raises:
        UserError: the preset does not exist.
    """
    for group in _GROUPS:
        for file in _files(group):
            if file.name == f"{name}.toml":
                return file.read_text(encoding="utf-8")
    raise UserError(
        f"no preset {name!r}{nearest(name, presets())}; see `uefl presets`, or give the path of a .toml file"
    )


def load(
    source: str | Mapping[str, Any], overrides: list[str] | None = None, *, given: bool = False, **keys: Any
) -> Config:
    """Read a preset, a TOML file or a table, then apply ``key=value`` overrides.

    Args:
        source: name of a preset, the path of a .toml file, or sections as a mapping.
        overrides: ``"key=value"`` in TOML syntax (a bare word is taken as a string); the key is
            ``SECTION.key``, ``arms.NAME.key``, or a bare key that only one section has. A bare parameter of
            algorithms goes to every arm that has it.
        given: the network is an object in Python. The network replaces the section ``[model]`` of a preset.
            Keys of this section in other places would have no effect, and are refused.
        keys: further keys, with values of their types. A mapping for a section is merged with the section. A
            mapping for ``arms`` replaces all arms. None is ignored.

    Raises:
        UserError: unknown preset or key, an ambiguous key, a value of the wrong type or out of its range.
    """
    try:
        return _load(source, overrides or [], given, keys)
    except RecursionError:
        raise UserError("the configuration has too many tables or lists inside each other") from None


def _load(
    source: str | Mapping[str, Any], overrides: list[str], given: bool, keys: Mapping[str, Any]
) -> Config:
    table = _read(source) if isinstance(source, str) else _copy(source)
    if given and isinstance(source, str) and source in presets():
        table.pop("model", None)
    table = _with_base(table, given)
    _override(table, overrides)
    for key, value in keys.items():
        if key == "arms" and isinstance(value, Mapping):
            table["arms"] = _picked(value, {})
        elif key in SECTIONS and isinstance(value, Mapping):
            table[key] = merged(table.get(key, {}), _copy(value))
        elif value is not None:
            _put(table, key, value)
    if given and isinstance(table.get("model", {}), Mapping):
        table["model"] = {"encoder": "given", **table.get("model", {})}
    return from_table(table)


def _override(table: dict[str, Any], items: list[str]) -> None:
    """Apply ``--set``.

    A bare key may belong to a partition or an arm that another item names. The order of the items does not
    matter.
    """
    pairs = []
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or "\n" in item.strip():
            raise UserError(f"--set {shown(item)}: expected key=value, in one line")
        pairs.append((key.strip(), _parse(value.strip())))
    # a new scheme removes the keys of the old one
    pairs.sort(key=lambda pair: pair[0].rpartition(".")[2] != "scheme")
    after = _copy(table)
    for key, value in pairs:
        if "." in key or key in ("arms", "scheme"):
            _put(after, key, _copy(value))
    for key, value in pairs:
        # also look at arms that a later item leaves out
        _put(
            table, key, value, {**after, "arms": named(after.get("arms", {})) | named(table.get("arms", {}))}
        )


def load_whole(path: Path) -> Config:
    """Read the configuration of a run folder, which has every key.

    Raises:
        UserError: the file cannot be read, is cut off, or comes from another version.
    """
    table = _read(str(path))
    advice = (
        "The file was changed, is incomplete, or comes from another version of uefl; restore it, or start a"
        " new run"
    )
    missing = [name for name in (*SECTIONS, "arms") if name not in table]
    if missing:
        raise UserError(f"{path} lacks the section [{missing[0]}]. {advice}")
    try:
        config = from_table(table)
    except UnknownAlgorithm as error:
        raise UserError(
            f"{path}: {error}: in Python, first import the script that registers it, then call uefl.load or"
            " uefl.resume"
        ) from None
    except UserError as error:
        raise UserError(f"{path}: {error}. {advice}") from None
    absent = next(_absent(config.table(), table), None)
    if absent is not None:
        raise UserError(f"{path} lacks the key {absent!r}. {advice}")
    return config


def _put(table: dict[str, Any], key: str, value: Any, places_of: dict[str, Any] | None = None) -> None:
    """Set one key of a table by its full name, or by its bare name in the places of ``places_of``."""
    section, dot, rest = key.partition(".")
    if section == "arms":
        _put_arm(table, rest, value)
        return
    if section in SECTIONS and dot:
        *path, last = rest.split(".")
        inner = table
        for name in (section, *path):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise UserError(f"--set {key}: {name!r} is not a table")
        if last == "scheme" and inner.get("scheme", value) != value:
            inner.clear()  # keys of the old scheme do not belong to the new one
        inner[last] = value
        return
    if key in SECTIONS:
        example = f"{key}.{_FIRST[key]}={value if isinstance(value, str) else 'VALUE'}"
        raise UserError(f"key {key!r} is a section; set one of its keys, as in {example}")
    found = places(key, table if places_of is None else places_of)
    sections = [place for place in found if not place.startswith("arms.")]
    arms = [place for place in found if place.startswith("arms.")]
    if not found:
        known = whole_keys(table) if dot else {*SECTIONS, *all_keys(table)}
        raise unknown(key, "", known, sections_with)
    if len(sections) + bool(arms) > 1:
        listed = ", ".join(f"{place}.{key}" for place in found)
        raise UserError(f"key {key!r} is ambiguous; write one of {listed}")
    for place in found:
        _put(table, f"{place}.{key}", value)


def _put_arm(table: dict[str, Any], rest: str, value: Any) -> None:
    arms = table["arms"] = named(table.get("arms", {}))
    if not rest:
        table["arms"] = _picked(value, arms)
        return
    name, dot, key = rest.rpartition(".")
    if not dot:
        if not isinstance(value, Mapping):
            raise UserError(f"--set arms.{rest}: expected arms.NAME.key=value")
        arms[rest] = dict(value)
        return
    arms.setdefault(name, {})[key] = value


def _picked(value: Any, arms: dict[str, Any]) -> dict[str, Any]:
    """Return the arms of ``value``, a mapping or a list of names in ``arms``, as a mapping."""
    if isinstance(value, Mapping):
        copied: dict[str, Any] = _copy(value)
        return copied
    # a shell may have removed the quotes of a list
    if isinstance(value, str) and ("," in value or value.startswith("[")):
        listed = ",".join('"{}"'.format(name.strip(" '\"")) for name in value.strip("[ ]").split(","))
        raise UserError(f"key 'arms': {shown(value)} is one name; write a list as 'arms=[{listed}]'")
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, (list, tuple))
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise UserError(
            f"key 'arms': expected different names of arms, or tables [arms.NAME]; got {shown(value)}"
        )
    return {name: arms.get(name, {}) for name in names}


def _files(group: str) -> list[Traversable]:
    folder = resources.files("uefl") / "presets" / group
    return sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)


def _read(source: str) -> dict[str, Any]:
    path = expanded(source)
    if path.suffix.lower() != ".toml":
        if source not in presets() and path.exists():
            raise _not_configuration(path)
        return tomllib.loads(preset_text(source))
    check_file(path, "the configuration", "expected a .toml file")
    try:
        table = tomllib.loads(read_text(path, "utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not TOML or UTF-8, or a number with too many digits
        raise UserError(f"{path} is not valid TOML: {error}") from None
    if "cases" in table:
        raise UserError(f"{path} is a suite, with cases; run it with: {command('suite', path)}")
    return table


def _not_configuration(path: Path) -> UserError:
    """Return an error with the command for a path that is neither a preset nor a .toml file."""
    if (path / "config.toml").is_file():
        return UserError(
            f"{path} is a run folder; continue it with: {command('train', '--resume', path)}, or give its"
            " config.toml and another --out"
        )
    own = command("train", "own-silos", "--set", f"data.source={path}")
    return UserError(f"{path} is no preset and no .toml file; to train on your own data, run: {own}")


def _with_base(table: dict[str, Any], given: bool = False) -> dict[str, Any]:
    """Fill in the values of the base preset that a file does not set."""
    if "base" not in table:
        return table
    base = table.pop("base")
    if not isinstance(base, str) or base not in presets():
        raise UserError(f"key 'base': expected the name of a preset, got {shown(base)}; see `uefl presets`")
    whole = _with_base(tomllib.loads(preset_text(base)))
    if given:
        whole.pop("model", None)
    result = whole | {
        name: merged(whole.get(name, {}), value) for name, value in table.items() if name != "arms"
    }
    if "arms" in table:
        before = named(whole.get("arms", {}))
        result["arms"] = {
            name: merged(before.get(name, {}), keys) for name, keys in _picked(table["arms"], before).items()
        }
    return result


def merged(before: Any, now: Any) -> Any:
    """Merge two tables key by key, but replace a partition of another scheme."""
    if (
        not isinstance(before, Mapping)
        or not isinstance(now, Mapping)
        or before.get("scheme", now.get("scheme")) != now.get("scheme", before.get("scheme"))
    ):
        return now
    return {**before, **{key: merged(before.get(key), value) for key, value in now.items()}}


def _copy(value: Any) -> Any:
    """Copy a table with the tables in it, whose keys must be text."""
    if not isinstance(value, Mapping):
        return value
    for key in value:
        if not isinstance(key, str):
            raise UserError(f"key {shown(key)}: expected the name of a key as text, got {type(key).__name__}")
    return {key: _copy(inner) for key, inner in value.items()}


def _absent(whole: Mapping[str, Any], table: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key, value in whole.items():
        name = f"{place}{key}"
        if key not in table:
            yield name
        elif isinstance(value, Mapping) and isinstance(table[key], Mapping):
            yield from _absent(value, table[key], f"{name}.")


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
