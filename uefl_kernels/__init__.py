"""Exact, fused kernels for vector quantization and k-means as PyTorch ops, on CPU and GPU.

Torch is imported at the first use of a name that needs it, so that ``uefl_kernels.numpy`` works without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import doctor as doctor
    from . import metrics as metrics
    from . import nn as nn
    from ._api import *  # noqa: F403


_SUBMODULES = ("doctor", "metrics", "nn", "numpy")  # names that need no import of their own


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    # `from uefl_kernels import _x` asks here before it looks for a submodule
    if name == "__all__" or not name.startswith("_"):
        api = import_module("._api", __name__)
        if name == "__all__" or name in api.__all__:
            found = globals()[name] = getattr(
                api, name
            )  # the next access to this name does not call this function
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *import_module("._api", __name__).__all__})
