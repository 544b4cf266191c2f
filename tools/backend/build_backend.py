"""Wrap setuptools: check the Python version, and ask for a compiler's packages only where needed.

They are needed where kernels are compiled.
"""

import os
import re
import sys
from pathlib import Path

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

# pip looks at requires-python only after all of this was installed; a backend runs in the sources' folder
(_LEAST,) = re.findall(r'^requires-python = ">=(.+)"$', Path("pyproject.toml").read_text(), re.MULTILINE)
if sys.version_info[:2] < tuple(map(int, _LEAST.split("."))):
    this = f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
    sys.exit(f"uefl: Python {_LEAST} or newer is needed; this is Python {this}")

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    """Return the packages that compile the kernels, for which torch has the headers."""
    if os.environ.get("UEFL_BUILD", "").lower() in ("off", "0", "no", "false"):
        return []
    return ["cmake>=3.26", "ninja", "pybind11>=2.13", "torch>=2.10"]


get_requires_for_build_editable = get_requires_for_build_wheel
