"""Federated learning: algorithms, clients, runs and reports.

``uefl.train("demo", out="runs/demo")`` runs a preset, ``uefl.resume`` continues a run, ``uefl.load`` reads a
run, and ``uefl.register`` registers an algorithm under a name.

Raises:
    ImportError: a package of the extra ``federated`` is not installed.
"""

import getpass
import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_NEEDED = (
    "matplotlib",
    "mlxtend",
    "pandas",
    "PIL",
    "pydantic",
    "rich",
    "safetensors",
    "sklearn",
    "tomli_w",
    "torchvision",
    "typer",
)
if _missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise ImportError(
        f"the federated layer needs {', '.join(_missing)}; in a clone of uefl, install what it needs with:"
        " pip install '.[federated]'"
    )

try:
    getpass.getuser()
except (KeyError, OSError):  # in a container; torch names its cache after the user
    os.environ["LOGNAME"] = str(os.getuid())

try:
    # read here and not from uefl_kernels, because that package imports torch: the command line starts at
    # once
    __version__ = version("uefl")
except PackageNotFoundError:  # a source tree on the path that was never installed
    __version__ = "unknown"

if TYPE_CHECKING:
    from .algorithms.base import Algorithm, register
    from .api import Run, load, resume, train
    from .deploy.choices import Distributed, Flower
    from .errors import RunError, UserError

_PLACES = {
    **dict.fromkeys(("train", "resume", "load", "Run"), "api"),
    **dict.fromkeys(("register", "Algorithm"), "algorithms.base"),
    **dict.fromkeys(("Distributed", "Flower"), "deploy.choices"),
    **dict.fromkeys(("RunError", "UserError"), "errors"),
}

__all__ = [
    "Algorithm",
    "Distributed",
    "Flower",
    "Run",
    "RunError",
    "UserError",
    "__version__",
    "load",
    "register",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module(".data", __name__)
    if name not in _PLACES:
        raise AttributeError(f"module 'uefl' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "data"]
