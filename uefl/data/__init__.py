"""The data of a federation: sources, partitions, and the clients that come out."""

from .arrays import from_arrays
from .builder import build
from .federation import Federation, LabeledData, ServerData, SetData, Silo, Sizes, Split
from .partitions import PARTITIONS, Scheme, partition
from .settings import Data
from .sources import SOURCES, source

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Data",
    "Federation",
    "LabeledData",
    "Scheme",
    "ServerData",
    "SetData",
    "Silo",
    "Sizes",
    "Split",
    "build",
    "from_arrays",
    "partition",
    "source",
]
