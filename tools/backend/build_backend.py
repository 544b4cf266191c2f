"""Wrap setuptools: check the Python version, and ask for a compiler's packages only where needed.

They are needed where kernels are compiled.
"""

import os
import sys

from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

if sys.version_info < (3, 11):  # noqa: UP036 - pip looks at requires-python only after all of this was installed
    sys.exit(
        f"uefl: Python 3.11 or newer is needed; this is Python {sys.version_info[0]}.{sys.version_info[1]}"
        f" ({sys.executable})"
    )

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
