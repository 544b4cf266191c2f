"""Exact, fused kernels for vector quantisation and k-means as PyTorch ops, on CPU and GPU.

Torch is imported at the first use of a name that needs it, so that ``uefl_kernels.numpy`` works without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import nn as nn
    from ._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # `from uefl_kernels import numpy` asks here first, and for submodules of private name, too.
    if name == "nn":
        return import_module(".nn", __name__)
    if name == "__all__" or not (name == "numpy" or name.startswith("_")):
        api = import_module("._api", __name__)
        if name == "__all__" or name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "nn", *import_module("._api", __name__).__all__})
