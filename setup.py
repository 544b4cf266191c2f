"""A thin driver: CMakeLists.txt builds the kernels, setup.py says where the result goes.

UEFL_BUILD=off (or 0, no, false) installs pure Python on the reference ops. CMAKE_ARGS, quoted as in a shell, and MAX_JOBS are
handed on.
"""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def program(name, folder):
    """The program of the Python package of that name, which need not be on PATH; else the one that is."""
    try:
        return str(Path(getattr(importlib.import_module(name), folder)) / name)
    except (ImportError, AttributeError):
        return name


class CMakeBuild(build_ext):
    """Builds every compiled module of the package in one CMake run."""

    def build_extensions(self):
        """Configure, build, and leave the modules beside the package."""
        out = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        build = Path(self.build_temp).resolve()
        cmake, ninja = program("cmake", "CMAKE_BIN_DIR"), program("ninja", "BIN_DIR")
        configure = [
            cmake,
            "-S",
            ROOT,
            "-B",
            build,
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
        ]
        subprocess.run([*configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))], check=True)
        subprocess.run([cmake, "--build", build, "--parallel", os.environ.get("MAX_JOBS", str(os.cpu_count()))], check=True)


compiled = os.environ.get("UEFL_BUILD", "").lower() not in ("off", "0", "no", "false")
setup(
    ext_modules=[Extension("uefl_kernels._C", sources=[], py_limited_api=True), Extension("uefl_kernels._host", sources=[])]
    if compiled
    else [],
    cmdclass={"build_ext": CMakeBuild},
)
