"""What `pip install .` puts on a machine: with kernels, and in pure Python where UEFL_BUILD=off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_USE = """
import torch, uefl_kernels
x, codebook = torch.randn(50, 8), torch.randn(7, 8)
assert torch.equal(uefl_kernels.vq_assign(x, codebook)[:, 0], torch.cdist(x.double(), codebook.double()).argmin(1))
from uefl.config import presets
assert "demo" in presets()
print(uefl_kernels.__file__, uefl_kernels.COMPILED)
"""


def wheel(tmp_path: Path, **variables: str) -> Path:
    """Build from a copy, as from a source distribution: nothing of the working tree's build may leak in."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "runs", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"} | variables
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, env=environment)
    (built,) = tmp_path.glob("*.whl")
    return built


def names(built: Path) -> list[str]:
    with zipfile.ZipFile(built) as archive:
        archive.extractall(built.parent / "site")
        return archive.namelist()


def use(site: Path) -> list[str]:
    """Run the installed copy from elsewhere and return where it came from and whether it is compiled."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", _USE], check=True, capture_output=True, text=True, cwd=site.parent, env=environment)
    return done.stdout.split()


@pytest.mark.slow
def test_a_wheel_with_kernels(tmp_path):
    content = names(wheel(tmp_path, CMAKE_ARGS="-DUEFL_CUDA=OFF"))
    modules = ("uefl_kernels/_C.abi3.so", "uefl_kernels/py.typed", "uefl/py.typed", "uefl/report/plots.py")
    for needed in (*modules, "uefl/presets/start/demo.toml"):
        assert needed in content
    assert any(name.startswith("uefl_kernels/_host.") for name in content)
    assert not any(name.startswith(("tests", "benchmarks", "csrc")) for name in content)
    assert use(tmp_path / "site") == [str(tmp_path / "site" / "uefl_kernels" / "__init__.py"), "True"]


@pytest.mark.slow
def test_a_wheel_without_a_compiler(tmp_path):
    built = wheel(tmp_path, UEFL_BUILD="off", PATH="/nonexistent")
    assert not any(name.endswith(".so") for name in names(built))
    assert built.name.endswith("py3-none-any.whl")
    assert use(tmp_path / "site")[1] == "False"
