"""csrc/cuda compiles for every generation of GPU that the package promises; needs nvcc and no GPU."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"), key=lambda path: path.name != "vq_assign.cu")  # the one that takes longest
ARCHITECTURES = ("80", "90a", "100")
NVCC = shutil.which("nvcc")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")]


@pytest.fixture(scope="module")
def begun(request, tmp_path_factory):
    """Every source for every architecture asked for, one at a time on each core: those of the next are compiled while one is looked at."""
    asked = {item.callspec.params["build"] for item in request.session.items if item.module is request.module}
    folder = tmp_path_factory.mktemp("cuda")

    def compiled(source, architecture):
        flags = ["-cubin", f"-arch=sm_{architecture}", "-std=c++20", "-O3", "-Xptxas=-v", "-Werror=all-warnings"]
        paths = [f"-I{ROOT / 'csrc'}", "-isystem", Path(torch.__file__).parent / "include"]
        defines = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
        target = folder / f"{source.stem}_{architecture}.cubin"
        return target, subprocess.run([NVCC, *flags, *paths, *defines, source, "-o", target], capture_output=True, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as processes:
        architectures = [name for name in ARCHITECTURES if name in asked]
        yield {name: {source.stem: processes.submit(compiled, source, name) for source in SOURCES} for name in architectures}
        processes.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=ARCHITECTURES, ids="sm_{}".format)
def build(request, begun):
    """What nvcc and ptxas said of all sources for one architecture, and the machine code of each."""
    log, code = "", {}
    for stem, future in begun[request.param].items():
        target, done = future.result()
        assert done.returncode == 0, done.stderr[-3000:]
        log += done.stderr
        code[stem] = target
    return request.param, log, code


def test_every_kernel_is_there_for_every_dtype(build):
    _, _, targets = build
    code = "".join(target.read_bytes().decode("latin-1") for target in targets.values())
    transition = ("nll", "probs", "probs_backward", "row_totals", "class_totals", "proportion")
    for kernel in ("search", "search_tensor", "search_deep", "search_wgmma", "rescore", "finish_open", "pack_exact", *transition):
        for dtype in ("float", "double", "__half", "__nv_bfloat16"):
            if (kernel, dtype) == ("search_wgmma", "double"):
                continue
            mangled = {"float": "f", "double": "d"}.get(dtype, f"{len(dtype)}{dtype}")
            assert re.search(f"{len(kernel)}{kernel}I{mangled}(Li8)?E", code), f"{kernel}<{dtype}>"
    for kernel in ("4headILi2ELb0E", "4headILi4ELb1E", "4tailILb0E", "9pack_rowsI6__half", "12pack_weights", "7combine", "12dropout_mask"):
        assert kernel in code, kernel


def test_products_of_sm_90a_run_asynchronously(build):
    """The compiler waits after every product where it cannot follow the registers, and says so."""
    _, log, _ = build
    assert "serialized" not in log


def instructions(target, kernel):
    """The machine instructions of the instances of a kernel, by function; skips without a disassembler (Triton brings one)."""
    folder = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin"
    disassembler = shutil.which("nvdisasm") or shutil.which("nvdisasm", path=folder)
    if disassembler is None:
        pytest.skip("nvdisasm is not installed")
    listing = subprocess.run([disassembler, "-c", target], capture_output=True, text=True, check=True).stdout
    functions = re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.MULTILINE)[1:]
    return {
        f.partition(",")[0]: re.findall(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", f) for f in functions if f"{len(kernel)}{kernel}I" in f[:300]
    }


@pytest.mark.parametrize(
    ("kernel", "architectures", "expected"),
    [
        ("search_wgmma", ["90a"], ("HGMMA.64x128x16.F32", "UBLKCP", "SYNCS")),
        ("search_deep", ["80", "90a", "100"], ("HMMA.16816.F32", "LDSM", "LDGSTS")),
    ],
)
def test_the_instructions_are_those_of_the_architecture(build, kernel, architectures, expected):
    architecture, _, targets = build
    if architecture not in architectures:
        pytest.skip(f"{kernel} is not for sm_{architecture}")
    found = instructions(targets["vq_assign"], kernel)
    assert len(found) == (3 if kernel == "search_wgmma" else 4)
    for name, used in found.items():
        for instruction in expected:
            assert any(one.startswith(instruction) for one in used), f"{name}: no {instruction}"


def test_nothing_spills(build):
    _, log, _ = build
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    assert spilled
    assert set(spilled) == {"0"}


def test_shared_memory_needs_no_opt_in(build):
    _, log, _ = build
    assert max(map(int, re.findall(r"(\d+) bytes smem", log))) <= 48 * 1024
