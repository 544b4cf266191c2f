"""Check `pip install .` with kernels and in pure Python (UEFL_BUILD=off), and the published wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_USE = """
import torch, uefl_kernels
x, codebook = torch.randn(50, 8), torch.randn(7, 8)
expected = torch.cdist(x.double(), codebook.double()).argmin(1)
assert torch.equal(uefl_kernels.vq_assign(x, codebook)[:, 0], expected)
from uefl.config import presets
assert "demo" in presets()
print(uefl_kernels.__file__, uefl_kernels.COMPILED)
"""


def wheel(tmp_path: Path, **variables: str) -> Path:
    """Build from a copy, so that no build of the working tree leaks in."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "runs", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignore)
    environment = os.environ | variables
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, env=environment)
    (built,) = tmp_path.glob("*.whl")
    return built


def names(built: Path) -> list[str]:
    with zipfile.ZipFile(built) as archive:
        archive.extractall(built.parent / "site")
        return archive.namelist()


def use(site: Path) -> list[str]:
    """Run the installed copy in another folder and return its path and whether it is compiled."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", _USE],
        check=True,
        capture_output=True,
        text=True,
        cwd=site.parent,
        env=environment,
    )
    return done.stdout.split()


def test_one_minimum_python_everywhere():
    """The Makefile and the build backend read it in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    least = project["project"]["requires-python"].removeprefix(">=")
    tagged = [name.rpartition(" ")[2] for name in project["project"]["classifiers"] if "Python :: 3" in name]
    tags = [f"cp{version.replace('.', '')}" for version in tagged]
    assert least == tagged[0]
    assert project["tool"]["cibuildwheel"]["build"].split() == [f"{tag}-*" for tag in tags]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    said = [found for page in pages for found in re.findall(r"\bC?Python (3\.\d+)", page.read_text())]
    assert said
    assert {*said} == {least}
    assert f"CPython {least} to {tagged[-1]}" in (ROOT / "CONTRIBUTING.md").read_text()
    workflows = "\n".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    assert {*re.findall(r"python-version: (.*)", workflows)} == {f'"{least}"'}
    assert f"CPython {least} to {tagged[-1]}" in workflows
    assert re.findall(r"python: \[(.*)\]", workflows) == [", ".join(tags)]


def test_an_older_python_is_refused_before_anything_is_installed(tmp_path):
    """The sources ask for a version that does not exist."""
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "Makefile", tmp_path)
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub('(requires-python = .*)3.*"', '\\g<1>3.99"', text))
    for command in (
        [sys.executable, "-c", "import sys; sys.path.insert(0, 'tools/backend'); import build_backend"],
        ["make", ".venv/.tools", f"PYTHON={sys.executable}"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode != 0
        assert "Python 3.99" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.slow
@pytest.mark.all_cores
def test_the_published_wheel_runs_without_a_compiler(published_wheel):
    """Run the README's snippet in a bare environment, and check size, names and manylinux tag."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "wheel.py", "check", published_wheel],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    content = names(published_wheel)
    for needed in ("uefl/presets/start/demo.toml", "uefl/report/plots.py"):
        assert needed in content


@pytest.mark.slow
def test_a_wheel_without_a_compiler(tmp_path):
    built = wheel(tmp_path, UEFL_BUILD="off", PATH="/nonexistent")
    assert not any(name.endswith(".so") for name in names(built))
    assert built.name.endswith("py3-none-any.whl")
    assert use(tmp_path / "site")[1] == "False"


def test_a_broken_wheel_is_not_passed(tmp_path):
    spec = importlib.util.spec_from_file_location("wheel_tool", ROOT / "tools" / "wheel.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    built = tmp_path / "uefl-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(built, "w") as archive:
        archive.writestr("tests/test_x.py", "")
        archive.writestr(
            "uefl-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: uefl\nVersion: 0.1.0\n"
        )
        archive.writestr(
            "uefl-0.1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
        )
        archive.writestr("uefl-0.1.0.dist-info/RECORD", "")
    said = "\n".join(tool.faults(built))
    for fault in (
        "no manylinux tag",
        "uefl_kernels/_C.abi3.so is missing",
        "expected one uefl_kernels/_host",
        "tests/test_x.py is not part",
    ):
        assert fault in said


def test_workflows_call_existing_targets_and_scripts():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = [
        path.read_text()
        for path in [ROOT / ".ci" / "run", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    ]
    called = {
        target
        for text in texts
        for target in re.findall(r"^(?:\s*- run: |check )?make ([a-z0-9-]+)\b", text, re.MULTILINE)
    }
    assert {"setup", "lint", "test", "test-slow", "docs", "ctest", "bench-smoke"} <= called <= targets
    for script in {
        script for text in texts for script in re.findall(r"\b(?:tools|benchmarks)/\w+\.\w+", text)
    }:
        assert (ROOT / script).exists(), script
    *_, last, end = texts[0].splitlines()  # its last line comes from pytest
    assert (last, end) == ("make test || failed=1", "exit $failed")


def test_pre_commit_has_the_pinned_tools():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if re.fullmatch(r"[\w-]+==[\w.]+", line))
    hooks = re.findall(r"repo: \S+/(\S+)\n    rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    for repository, version in hooks:
        name = {"ruff-pre-commit": "ruff", "mirrors-clang-format": "clang-format"}.get(repository)
        assert name is None or pinned[name] == version
    assert {"ruff-pre-commit", "mirrors-clang-format"} <= {repository for repository, _ in hooks}
