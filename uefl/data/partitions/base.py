"""What a scheme of a partition is, and the registry of schemes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from ..federation import Kind
from ..registry import Registry


class Scheme(BaseModel):
    """A way to deal the images of a source to clients; its fields are the keys of ``[data.partition]`` beside ``scheme``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: ClassVar[str]
    """what ``scheme`` says; set by :func:`partition`"""
    kind: ClassVar[Kind] = "labeled"

    @model_serializer(mode="wrap")
    def _with_name(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {"scheme": self.name, **fields}


PARTITIONS: Registry[type[Scheme]] = Registry(__package__, "partition")

AnyScheme = TypeVar("AnyScheme", bound=type[Scheme])


def partition(name: str) -> Callable[[AnyScheme], AnyScheme]:
    """Register a scheme under the name that ``[data.partition] scheme = ...`` gives it."""

    def register(scheme: AnyScheme) -> AnyScheme:
        PARTITIONS.add(name, scheme)
        scheme.name = name
        return scheme

    return register


def from_table(value: Any) -> Any:
    """The scheme that a table names, for pydantic; what is no table goes on as it is.

    Raises:
        ValueError: the table has no ``scheme``, or names one that does not exist.
    """
    if not isinstance(value, dict):
        return value
    table = dict(value)
    name = table.pop("scheme", None)
    if not isinstance(name, str):
        raise ValueError(f"give the name of a partition as scheme; there are {', '.join(PARTITIONS)}")
    return PARTITIONS[name].model_validate(table)
