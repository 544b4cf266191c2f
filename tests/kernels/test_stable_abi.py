"""The compiled library speaks to torch only through the stable C ABI.

So one build serves CPU and CUDA torch from 2.10 on.
"""

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import uefl_kernels

INSTALLED = Path(uefl_kernels.__file__).with_name("_C.abi3.so")
STREAM = "aoti_torch_get_current_cuda_stream"

pytestmark = pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("readelf") is None, reason="binutils are not installed"
)


@pytest.fixture(
    scope="module",
    params=["installed", pytest.param("published", marks=[pytest.mark.slow, pytest.mark.all_cores])],
)
def library(request, tmp_path_factory):
    """Return the library in use, and the library of a wheel.

    A wheel also has the CUDA kernels if nvcc is installed.
    """
    if request.param == "installed":
        if not INSTALLED.exists():
            pytest.skip("the compiled kernels are not built")
        return INSTALLED
    with zipfile.ZipFile(request.getfixturevalue("published_wheel")) as archive:
        return Path(archive.extract("uefl_kernels/_C.abi3.so", tmp_path_factory.mktemp("library")))


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def undefined(library):
    """Return the type of each undefined dynamic symbol: U, or w when it is weak."""
    lines = output("nm", "-D", "--undefined-only", str(library)).splitlines()
    return {name.partition("@")[0]: kind for kind, name in (line.split() for line in lines)}


def test_no_cpp_symbol_of_torch(library):
    demangled = output("nm", "-D", "-C", "--undefined-only", str(library))
    assert re.findall(r".*\b(?:at|c10|torch|caffe2)::.*", demangled) == []


def test_no_symbol_of_this_project_is_undefined(library):
    demangled = output("nm", "-D", "-C", "--undefined-only", str(library))
    assert re.findall(r".*\buefl::.*", demangled) == []


def test_every_other_symbol_is_of_the_c_abi_or_the_system(undefined):
    shims = {name for name in undefined if name.startswith(("aoti_torch_", "torch_"))}
    assert "torch_call_dispatcher" in shims
    # symbols of the C++ library, of the compiler's runtime, and of libc
    system = re.compile(r"_Z|_ITM_|_Unwind_|__|[a-z][a-z0-9_]*$")
    assert [name for name in undefined if name not in shims and not system.match(name)] == []
    assert [name for name in undefined if "cuda" in name.lower() and name not in shims] == []


def test_shims_exist_in_the_oldest_torch_promised(undefined):
    """TORCH_TARGET_VERSION hides declarations for a newer torch.

    The sources must compile without them.
    """
    import torch

    include = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    headers = [
        *include.glob("stable/c/*.h"),
        *include.glob("inductor/aoti_torch/c/*.h"),
        *include.glob("inductor/aoti_torch/generated/*.h"),
    ]
    newer = set()
    for header in headers:
        text = header.read_text()
        for version, block in re.findall(
            r"#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_(\d+)_0(.*?)#endif", text, re.S
        ):
            if int(version) > 10:
                newer |= set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", block))
    assert newer, "no versioned declarations found: the headers have changed"
    assert newer & set(undefined) == set()


def test_torch_abi_audit_agrees(library):
    """torch-abi-audit knows by name every symbol of the stable ABI and the version it came with."""
    audit = pytest.importorskip("torch_abi_audit", reason="torch-abi-audit is not installed")
    found = audit.inspect_extension(library).torch
    assert found.uses_torch
    assert found.stable
    assert (found.unstable_symbols, found.unknown_shim_symbols) == ((), ())
    assert found.min_torch_version == "2.10.0"


def test_cuda_stream_is_optional(undefined):
    if STREAM not in undefined:
        pytest.skip("built without CUDA")
    assert undefined[STREAM] == "w"


def test_needs_no_cuda_library(library):
    needed = re.findall(r"NEEDED.*\[(.+)\]", output("readelf", "-d", str(library)))
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if re.search(r"cuda|cudart|nv|c10|python", name)] == []
