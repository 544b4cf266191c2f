"""Check the layout for Hugging Face's kernel hub, built from a wheel and loaded under another name."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Import the folder of a variant as kernels.get_local_kernel does. No other uefl_kernels can be imported.
_LOAD = """
import importlib.util, sys
sys.modules["uefl_kernels"] = None  # an import of the package by this name fails
spec = importlib.util.spec_from_file_location("loaded_from_the_hub", sys.argv[1] + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import torch
x, codebook = torch.randn(50, 8), torch.randn(7, 8)
assert torch.equal(module.vq_assign(x, codebook)[:, 0], torch.cdist(x.double(), codebook.double()).argmin(1))
print(module.COMPILED, module.vq(x, codebook).quantized.shape == x.shape, len(module.kmeans(x, 3).centers))
"""


@pytest.fixture(scope="module")
def hub():
    spec = importlib.util.spec_from_file_location("hub_tool", ROOT / "tools" / "hub.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_variants_have_the_files_of_every_python(hub, tmp_path):
    wheel = tmp_path / "uefl-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (
            "__init__.py",
            "_C.abi3.so",
            "_host.cpython-311-x86_64-linux-gnu.so",
            "numpy.py",
            "ops/vq/__init__.py",
        ):
            archive.writestr(f"uefl_kernels/{name}", name)
        archive.writestr("uefl/cli.py", "")
        archive.writestr("uefl_kernels/", "")
    cpu, cuda = hub.lay_out(wheel, tmp_path / "hub")
    assert (cpu.name, cuda.name) == (
        "torch-stable-abi210-cpu-x86_64-linux",
        "torch-stable-abi210-cu130-x86_64-linux",
    )
    for variant in (cpu, cuda):
        held = {str(path.relative_to(variant)) for path in variant.rglob("*") if path.is_file()}
        assert held == {"__init__.py", "_C.abi3.so", "ops/vq/__init__.py", "metadata.json"}
    assert json.loads((cuda / "metadata.json").read_text())["backend"] == {
        "type": "cuda",
        "archs": ["8.0", "9.0a", "10.0"],
    }


def test_the_hub_metadata_has_the_architectures_and_torch(hub):
    text = (ROOT / "CMakeLists.txt").read_text()
    for architecture in ("80", "90a", "100"):
        assert architecture in text.partition("set(GENERATIONS ")[2].partition(")")[0].split()
    assert "TORCH_TARGET_VERSION=0x020a000000000000ULL" in text  # 2.10
    assert hub.variants().keys() == {
        "torch-stable-abi210-cpu-x86_64-linux",
        "torch-stable-abi210-cu130-x86_64-linux",
    }


@pytest.mark.slow
@pytest.mark.all_cores
def test_a_variant_loads_from_its_path_by_another_name(hub, published_wheel, tmp_path):
    variant, _ = hub.lay_out(published_wheel, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, variant], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "3"]
