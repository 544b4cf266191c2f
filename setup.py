"""Install the package.

CMakeLists.txt builds the kernels. Without a compiler that works the Python part is installed, with one
warning. UEFL_REQUIRE_KERNELS=1 makes that an error, and UEFL_BUILD=off (or 0, no, false) does not try.
CMAKE_ARGS, quoted as in a shell, and MAX_JOBS go to CMake. Without build isolation, install the packages that
``tools/backend/build_backend.py`` names first.
"""

import logging
import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
REQUIRED = os.environ.get("UEFL_REQUIRE_KERNELS", "").lower() not in ("", "off", "0", "no", "false")
NOTE = "_not_compiled.txt"  # next to the modules: why there are no kernels, for `uefl doctor`
SIGNS = {  # messages of CMake and their meaning
    "No CMAKE_CXX_COMPILER could be found": "no C++ compiler was found",
    "Could not find the compiler specified in the environment variable CXX": (
        "the C++ compiler that CXX names was not found"
    ),
    "is not able to compile a simple test program": "the C++ compiler does not work",
    "CXX20": "the C++ compiler has no C++20",
}
ADVICE = "install g++ 12 or newer, or choose a compiler: CXX=g++-13 pip install ."
# which cannot read a license expression, and says so in pages
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"uefl: setuptools {setuptools.__version__} is too old to build this, 77 or newer is needed: pip"
        " install 'setuptools>=77'"
    )
# every file that setuptools copies: the one line that matters would be lost between them
logging.disable(logging.INFO)


class NotCompiled(Exception):
    """Why the kernels cannot be compiled here, as half a sentence."""


def program(name):
    """Return the path of cmake or ninja: from the Python package if it can be imported, else from PATH."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == name and file.parent.name in ("bin", "Scripts") and os.access(file.locate(), os.X_OK):
            return Path(file.locate()).resolve()
    found = shutil.which(name)
    if found is None:
        raise NotCompiled(f"{name} is not installed: pip install {name}")
    return Path(found)


def run(log, *command):
    """Run a command, and return whether it succeeded.

    Its output goes to the end of a file, since pip hides it or buries the reason under it.
    """
    with log.open("ab") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode == 0


def reason(log):
    """Return half a sentence on why the configuration failed."""
    text = " ".join(log.read_text(encoding="utf-8", errors="replace").split())
    if "UEFL_CUDA=ON but" in text:
        return text[text.rindex("UEFL_CUDA=ON but") :].partition(" -- Configuring incomplete")[0]
    for sign, meaning in SIGNS.items():
        if sign in text:
            return f"{meaning}; {ADVICE}"
    return f"CMake failed; its output is in {log}"


class CMakeBuild(build_ext):
    """Builds every compiled module of the package in one CMake run."""

    def build_extensions(self):
        """Configure, build, and put the modules into the package.

        If this fails, put a note with the reason there.
        """
        out = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        out.mkdir(parents=True, exist_ok=True)
        (out / NOTE).unlink(missing_ok=True)
        try:
            # editable: one folder for good, where a second build compiles only what has changed
            build = ROOT / "build" / "kernels" if self.editable_mode else Path(self.build_temp).resolve()
            self.compile(out, build)
        except NotCompiled as error:
            if REQUIRED:
                sys.exit(
                    f"uefl: the kernels cannot be compiled (UEFL_BUILD=off installs without them): {error}"
                )
            for extension in self.extensions:
                # of an earlier build, of other sources
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            (out / NOTE).write_text(f"{error}\n", encoding="utf-8")
            print(
                f"warning: uefl: installed without compiled kernels, so ops are slower: {error}",
                file=sys.stderr,
            )

    def copy_extensions_to_source(self):
        """Copy the modules into the source folder of an editable installation.

        If they were not built, copy the note that replaces them.
        """
        built, package = Path(self.build_lib) / "uefl_kernels", ROOT / "uefl_kernels"
        for name in [
            NOTE,
            *(Path(self.get_ext_filename(extension.name)).name for extension in self.extensions),
        ]:
            (package / name).unlink(missing_ok=True)
        super().copy_extensions_to_source()
        if (built / NOTE).exists():
            shutil.copy(built / NOTE, package)

    def compile(self, out, build):
        """Run CMake once, or raise NotCompiled if it fails."""
        for package in ("torch", "pybind11"):
            if find_spec(package) is None:
                raise NotCompiled(
                    f"{package} is not installed, and the build is not isolated: pip install {package}"
                )
        log = build / "build.log"
        build.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        # an earlier configuration may have failed or had another compiler; its objects can stay
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        for found in (build / "CMakeFiles").glob("[0-9]*"):
            shutil.rmtree(found)
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
        if not run(log, *configure, *shlex.split(os.environ.get("CMAKE_ARGS", ""))):
            raise NotCompiled(reason(log))
        if not run(
            log,
            program("cmake"),
            "--build",
            build,
            "--parallel",
            os.environ.get("MAX_JOBS", str(os.cpu_count())),
        ):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            first = next((line.strip() for line in lines if "error" in line), "no error is named")
            raise NotCompiled(f"the compiler failed: {first}; all of its output is in {log}")


compiled = os.environ.get("UEFL_BUILD", "").lower() not in ("off", "0", "no", "false")
modules = [
    Extension("uefl_kernels._C", sources=[], py_limited_api=True, optional=not REQUIRED),
    Extension("uefl_kernels._host", sources=[], optional=not REQUIRED),
]
setup(ext_modules=modules if compiled else [], cmdclass={"build_ext": CMakeBuild})
