"""The data of a federation: sources, partitions, and the resulting clients.

A name is imported when it is first used, so that the section ``[data]`` of a configuration can be checked
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import rotate as rotate
    from .builder import build
    from .federation import ClientData, Federation, LabeledData, ServerData, SetData, Sizes, Split
    from .own_arrays import from_arrays
    from .partitions import PARTITIONS, Scheme, partition
    from .settings import Data
    from .sources import SOURCES, source

_PLACES = {
    "from_arrays": "own_arrays",
    "build": "builder",
    **dict.fromkeys(
        ("Federation", "LabeledData", "ServerData", "SetData", "ClientData", "Sizes", "Split"), "federation"
    ),
    **dict.fromkeys(("PARTITIONS", "Scheme", "partition"), "partitions"),
    "Data": "settings",
    **dict.fromkeys(("SOURCES", "source"), "sources"),
}

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Data",
    "Federation",
    "LabeledData",
    "Scheme",
    "ServerData",
    "SetData",
    "ClientData",
    "Sizes",
    "Split",
    "build",
    "from_arrays",
    "partition",
    "source",
]


def __getattr__(name: str) -> Any:
    if name == "rotate":  # named by an error of `SavedModel.predict`
        return import_module(".rotate", __name__)
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "rotate"]
