"""Find the sections, partition schemes and algorithms that have a key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from .sections import Model, RunSection, Training


def sections_with(key: str) -> list[str]:
    """Return the sections, partition schemes and algorithms that have a key."""
    from ..algorithms.base import registry
    from ..data.partitions.base import PARTITIONS

    sections = [f"[{name}]" for name, known in fields({}).items() if key in known]
    schemes = [name for name in PARTITIONS if key in PARTITIONS[name].model_fields]
    algorithms = [name for name, kind in registry().items() if key in kind.Parameters.model_fields]
    arm, _, own = key.rpartition(".")
    if key == "algorithm" or (arm in registry() and own in registry()[arm].Parameters.model_fields):
        return [f"[arms.{arm or 'NAME'}]"]
    return (
        sections
        + ([f"[data.partition] with scheme = {' or '.join(map(repr, schemes))}"] if schemes else [])
        + ([f"arms with algorithm = {' or '.join(map(repr, algorithms))}"] if algorithms else [])
    )


def whole_keys(table: dict[str, Any]) -> set[str]:
    """Return every ``section.key``, to suggest the nearest one."""
    return {f"{name}.{key}" for name, keys in fields(table).items() for key in keys}


def places(key: str, table: dict[str, Any]) -> list[str]:
    """Return the sections that have the key, and the arms of ``table`` that have it as ``arms.NAME``."""
    found = [name for name, known in fields(table).items() if key in known]
    from ..algorithms.base import registry

    algorithms = registry()
    arms = named(table.get("arms", {}))
    return found + [
        f"arms.{name}"
        for name, keys in arms.items()
        if (kind := algorithms.get(str(keys.get("algorithm", name)))) is not None
        and key in kind.Parameters.model_fields
    ]


def named(arms: Any) -> dict[str, Any]:
    """Return the arms, or a list of their names, as tables, and anything else as an empty table."""
    if isinstance(arms, dict):
        return {str(name): keys if isinstance(keys, dict) else {} for name, keys in arms.items()}
    names = [arms] if isinstance(arms, str) else arms
    return {str(name): {} for name in names} if isinstance(names, (list, tuple)) else {}


def fields(table: dict[str, Any]) -> dict[str, set[str]]:
    """Return the keys of every section, in ``[data.partition]`` the keys of its scheme."""
    from ..data.partitions.base import PARTITIONS
    from ..data.settings import Data

    kinds: dict[str, type[BaseModel]] = {
        "run": RunSection,
        "data": Data,
        "model": Model,
        "training": Training,
    }
    found = {name: set(kind.model_fields) - {"partition"} for name, kind in kinds.items()}
    data = table.get("data", {})
    partition = data.get("partition", {}) if isinstance(data, dict) else {}
    scheme: Any = partition.get("scheme") if isinstance(partition, dict) else None
    known = isinstance(scheme, str) and scheme in PARTITIONS
    return found | {"data.partition": {"scheme", *(PARTITIONS[scheme].model_fields if known else ())}}


def all_keys(table: dict[str, Any]) -> set[str]:
    """Return every key of the sections and of all algorithms, to suggest the nearest one."""
    from ..algorithms.base import registry

    return {key for keys in fields(table).values() for key in keys} | {
        key for kind in registry().values() for key in kind.Parameters.model_fields
    }
