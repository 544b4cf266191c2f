"""Collect the ops of all families, one file each.

``REGISTRY`` holds their rows by op.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ..cases import Op

REGISTRY: dict[str, Op[Any]] = {}
for _file in iter_modules(__path__):
    REGISTRY |= import_module(f"{__name__}.{_file.name}").OPS
