"""Where images come from: one module per data set."""

from ..registry import Registry
from ..sources_old import (  # until every caller has moved
    FASHION_CLASSES,
    OwnSilos,
    Pool,
    cifar10,
    digits,
    idx_files,
    npz_file,
    read_npz,
    read_split,
    take,
)

SOURCES: Registry[object] = Registry(__package__, "data set")

__all__ = [
    "FASHION_CLASSES",
    "SOURCES",
    "OwnSilos",
    "Pool",
    "cifar10",
    "digits",
    "idx_files",
    "npz_file",
    "read_npz",
    "read_split",
    "take",
]
