"""A thin driver: CMakeLists.txt builds the kernels, setup.py says where the result goes.

UEFL_BUILD=off (or 0, no, false) installs pure Python on plain PyTorch. CMAKE_ARGS, quoted as in a shell, and MAX_JOBS are
handed on. Without build isolation the requirements of [build-system] in pyproject.toml have to be installed before.
"""

import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
if int(setuptools.__version__.split(".")[0]) < 77:  # which cannot read a license expression, and says so in pages
    sys.exit(f"uefl: setuptools {setuptools.__version__} is too old to build this, 77 or newer is needed: pip install 'setuptools>=77'")


def program(name):
    """Path of cmake or ninja: of the package that this Python would import, be its scripts on PATH or not; else the one on PATH."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == name and file.parent.name in ("bin", "Scripts") and os.access(file.locate(), os.X_OK):
            return Path(file.locate()).resolve()
    found = shutil.which(name)
    if found is None:
        sys.exit(f"uefl: {name} is needed to build the kernels, and was not found: pip install {name}, or set UEFL_BUILD=off")
    return Path(found)


class CMakeBuild(build_ext):
    """Builds every compiled module of the package in one CMake run."""

    def build_extensions(self):
        """Configure, build, and leave the modules beside the package."""
        out = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        build = Path(self.build_temp).resolve()
        configure = [
            program("cmake"),
            "-S",
            ROOT,
            "-B",
            build,
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}",
        ]
        subprocess.run([*configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))], check=True)
        subprocess.run([program("cmake"), "--build", build, "--parallel", os.environ.get("MAX_JOBS", str(os.cpu_count()))], check=True)


compiled = os.environ.get("UEFL_BUILD", "").lower() not in ("off", "0", "no", "false")
setup(
    ext_modules=[Extension("uefl_kernels._C", sources=[], py_limited_api=True), Extension("uefl_kernels._host", sources=[])]
    if compiled
    else [],
    cmdclass={"build_ext": CMakeBuild},
)
