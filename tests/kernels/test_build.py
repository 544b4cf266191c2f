"""The build with an nvcc that is broken or older than the newest GPU, and with its own options."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh

ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

BROKEN = "exit 1"
TOO_OLD = f'case "$*" in *c++20*) exit 1;; esac; exec {NVCC} "$@"'
WITHOUT_100 = f"""case "$*" in
  *--list-gpu-arch*) printf 'compute_75\\ncompute_80\\ncompute_90\\n';;
  *_100*) exit 1;;
  *) exec {NVCC} "$@";;
esac"""
real = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


@pytest.fixture
def configure(tmp_path):
    def run(nvcc: str, cuda: str) -> tuple[int, str]:
        """Return CMake's exit code and its output, white space collapsed, with a shell script as nvcc."""
        compiler = tmp_path / "nvcc"
        compiler.write_text(f"#!/bin/sh\n{nvcc}\n")
        compiler.chmod(0o755)
        options = [f"-DPython3_EXECUTABLE={sys.executable}", f"-DUEFL_CUDA={cuda}"]
        environment = os.environ | {
            "CUDACXX": str(compiler),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = [CMAKE, "-S", ROOT, "-B", tmp_path / "build", "-GNinja", *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)

    return run


@pytest.mark.slow
@pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    ("nvcc", "says"),
    [
        pytest.param(BROKEN, r"\bnvcc\b", id="broken"),
        pytest.param(TOO_OLD, r"\bsm_80, sm_90a .*\bsm_100\b", id="too-old", marks=real),
    ],
)
def test_unusable_nvcc_is_an_error_only_if_cuda_is_requested(configure, nvcc, says):
    code, output = configure(nvcc, "AUTO")
    assert code == 0, output
    assert re.search(rf"CMake Warning .*\bCUDA\b.*{says}", output)
    code, output = configure(nvcc, "ON")
    assert code != 0
    assert re.search(rf"CMake Error .*\bUEFL_CUDA=ON\b.*{says}", output)


@pytest.mark.slow
@real
def test_architectures_that_nvcc_does_not_know_are_left_out(configure):
    code, output = configure(WITHOUT_100, "AUTO")
    assert code == 0, output
    assert " 80-real,90a-real,90-virtual " in output


def test_uefl_build():
    modules = {"off": 0, "OFF": 0, "0": 0, "no": 0, "false": 0, "on": 2, "1": 2, "": 2}
    code = (
        "import os, sys, setuptools; from distutils.core import run_setup\n"
        "for value in sys.argv[1:]:\n"
        "    os.environ['UEFL_BUILD'] = value\n"
        "    print(len(run_setup('setup.py', stop_after='init').ext_modules or []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert [*map(int, done.stdout.split())] == [*modules.values()]


@pytest.fixture
def build(tmp_path):
    """Run setup.py with packages ``cmake`` and ``ninja`` that only write down their arguments.

    Their scripts are not on PATH.
    """
    for name in ("cmake", "ninja"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/{name}-arguments\n')
        script.chmod(0o755)
        metadata = tmp_path / "site" / f"{name}-9.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
        (metadata / "RECORD").write_text(f"../bin/{name},,\n")

    def run(**environment: str) -> set[str]:
        """Return the arguments of cmake."""
        packages = f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-temp",
            tmp_path / "temp",
            "--build-lib",
            tmp_path / "lib",
        ]
        environment = os.environ | {"PYTHONPATH": packages} | environment
        subprocess.run(command, capture_output=True, cwd=ROOT, env=environment, check=True)
        return set((tmp_path / "cmake-arguments").read_text().splitlines())

    return run


def test_cmake_args_are_split_as_by_a_shell(build):
    assert {"-DONE=a b", "-DTWO=c"} <= build(CMAKE_ARGS="-DONE='a b' -DTWO=c")


def test_cmake_and_ninja_need_not_be_on_path(build, tmp_path):
    assert f"-DCMAKE_MAKE_PROGRAM={tmp_path / 'bin' / 'ninja'}" in build(PATH=os.defpath)


def test_a_missing_program_is_named():
    code = (
        "import importlib.metadata as metadata\n"
        "found = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'ninja': raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.distribution = distribution\n"
        "import runpy; runpy.run_path('setup.py')['program']('ninja')"
    )
    environment = os.environ | {"PATH": "/nowhere", "UEFL_BUILD": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 1
    assert "pip install ninja" in done.stderr


@pytest.fixture
def broken(tmp_path):
    """Build in a copy of the sources with a compiler that fails.

    Return the process and the folder of the modules.
    """
    source = tmp_path / "Quellen mit Ümlaut"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    package = source / "uefl_kernels"
    package.mkdir()
    shutil.copy(ROOT / "uefl_kernels" / "_version.py", package)
    (package / "__init__.py").touch()
    (package / "_C.abi3.so").touch()  # from an earlier build, from other sources

    def run(**environment: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        environment = os.environ | {"UEFL_BUILD": "", "UEFL_REQUIRE_KERNELS": ""} | environment
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        return subprocess.run(command, capture_output=True, text=True, cwd=source, env=environment), package

    return run


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("/nowhere/c++", "CXX"),
        ("false", "C++"),
        pytest.param("old-c++", "has no C++20", marks=pytest.mark.slow),
    ],
)
def test_without_a_compiler_there_is_one_warning_and_a_note(broken, compiler, says, tmp_path):
    old = tmp_path / "old-c++"  # defines the version of GCC as 7
    old.write_text('#!/bin/sh\nexec c++ -U__GNUC__ -D__GNUC__=7 "$@"\n')
    old.chmod(0o755)
    done, package = broken(CXX=str(old) if compiler == old.name else shutil.which(compiler) or compiler)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "uefl" in line]
    assert line.startswith("warning: uefl: ")
    assert says in line
    assert "g++ 12" in line
    assert says in (package / "_not_compiled.txt").read_text()
    assert not list(package.glob("*.so"))


def test_kernels_that_are_required_end_the_build_in_one_sentence(broken):
    done, package = broken(CXX="/nowhere/c++", UEFL_REQUIRE_KERNELS="1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("uefl: ")
    assert "UEFL_BUILD=off" in last
    assert not (package / "_not_compiled.txt").exists()


def test_a_failed_configuration_leaves_nothing_for_the_next(build, tmp_path):
    folder = tmp_path / "temp"
    stale, kept = (
        ("CMakeCache.txt", "CMakeFiles/4.4.4/CMakeCXXCompiler.cmake"),
        "CMakeFiles/uefl_cpu.dir/vq.cpp.o",
    )
    for name in (*stale, kept, "build.ninja"):  # the last of an earlier build that succeeded
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    build()
    assert not any((folder / name).exists() for name in stale)
    assert (folder / kept).exists()


def test_missing_kernels_warn_once_at_first_use(tmp_path):
    for file in (ROOT / "uefl_kernels").glob("*.py"):
        (tmp_path / "uefl_kernels").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "uefl_kernels")
    (tmp_path / "uefl_kernels" / "_not_compiled.txt").write_text("no compiler, for this test\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from uefl_kernels import _library;"
        " print(_library.load_error())"
    )
    done = fresh.python(code)
    assert (done.returncode, done.stdout) == (0, "no compiler, for this test\n")
    assert done.stderr.count("no compiler, for this test") == 1
    assert "RuntimeWarning" in done.stderr


def test_a_python_that_is_too_old_is_named():
    code = (
        "import sys; sys.version_info = (3, 10, 4); sys.path.insert(0, 'tools/backend'); import build_backend"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert re.search(r"Python 3\.11.*Python 3\.10", done.stderr)


def test_only_a_build_of_kernels_needs_torch(monkeypatch):
    backend = runpy.run_path(str(ROOT / "tools" / "backend" / "build_backend.py"))
    monkeypatch.setenv("UEFL_BUILD", "off")
    assert backend["get_requires_for_build_wheel"]() == []
    monkeypatch.setenv("UEFL_BUILD", "")
    assert any(line.startswith("torch") for line in backend["get_requires_for_build_editable"]())


def test_old_setuptools_are_named():
    code = "import setuptools, runpy; setuptools.__version__ = '76.1.0'; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert re.search("76\\.1\\.0.*'setuptools>=77'", done.stderr)


NO_GPU, HOPPER, OLD_AND_NEW, NEWER = "exit 9", "echo 9.0", "echo 8.9; echo 10.0; echo 8.0", "echo 12.0"


@pytest.mark.slow
@real
@pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        pytest.param(NO_GPU, "UEFL_CUDA=AUTO", id="none"),
        pytest.param(HOPPER, " 90a-real,90-virtual ", id="hopper"),
        pytest.param(OLD_AND_NEW, " 80-real,100-real,100-virtual ", id="two generations"),
        pytest.param(NEWER, " 80-real,90a-real,100-real,100-virtual ", id="newer than all"),
    ],
)
def test_local_kernels_are_for_the_gpus_of_this_machine(tmp_path, gpus, says):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{gpus}\n")
    tool.chmod(0o755)
    options = [f"-DPython3_EXECUTABLE={sys.executable}", "-DUEFL_CUDA=LOCAL", f"-DNVIDIA_SMI={tool}"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [CMAKE, "-S", ROOT, "-B", tmp_path / "build", "-GNinja", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PATH": path}, check=True
    )
    assert says in re.sub(r"\s+", " ", done.stdout)


def test_kernels_do_not_include_torch():
    """Only ``csrc/ops`` includes torch, and only ``host.cpp`` Python, since kernels take raw pointers."""
    speaking = {
        path.relative_to(ROOT / "csrc").parts[0]
        for path in (ROOT / "csrc").rglob("*.*")
        if re.search(r"#include.*\b(torch|ATen|c10|pybind11|Python\.h)", path.read_text(encoding="utf-8"))
    }
    assert speaking == {"ops", "host.cpp"}
