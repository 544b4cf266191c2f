"""csrc/cuda compiles for every supported GPU architecture.

Needs nvcc and no GPU.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import sass

ARCHITECTURES = ("80", "90a", "100")
OTHERS = ("86", "89", "120")  # they compile the code of 80 and 100, for other numbers of registers and bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all_cores,
    pytest.mark.skipif(sass.NVCC is None, reason="nvcc is not installed"),
]


@pytest.fixture(scope="module")
def begun(request):
    """Compile every source for every architecture asked for, one on each core, ahead of the tests."""
    asked = {item.callspec.params["build"] for item in request.session.items if item.module is request.module}
    with ThreadPoolExecutor(os.cpu_count()) as processes:
        yield {
            name: {source.stem: processes.submit(sass.compiled, source.stem, name) for source in sass.SOURCES}
            for name in (*ARCHITECTURES, *OTHERS)
            if name in asked
        }
        processes.shutdown(cancel_futures=True)


@pytest.fixture(
    scope="module",
    params=[*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.large) for name in OTHERS)],
    ids="sm_{}".format,
)
def build(request, begun):
    """Return the output of nvcc and ptxas for one architecture, and the machine code of each source.

    Warnings are errors.
    """
    log, code = "", {}
    for stem, future in begun[request.param].items():
        code[stem], said = future.result()
        log += said
    return request.param, log, code


def test_every_kernel_is_there_for_every_dtype(build):
    _, _, targets = build
    code = "".join(target.read_bytes().decode("latin-1") for target in targets.values())
    transition = ("nll", "probs", "probs_backward", "row_totals", "class_totals", "proportion")
    search = ("search_mma", "search_wgmma", "pack_codebook")
    for kernel in (*search, "gather", "row_sums", "row_squares", "backward", *transition):
        for dtype in ("float", "double", "__half", "__nv_bfloat16"):
            if (kernel, dtype) == ("search_wgmma", "double"):
                continue
            mangled = {"float": "f", "double": "d"}.get(dtype, f"{len(dtype)}{dtype}")
            assert re.search(f"{len(kernel)}{kernel}I{mangled}", code), f"{kernel}<{dtype}>"
    for kernel in (
        "4headILi2ELb0E",
        "4headILi4ELb1E",
        "9pack_rowsI6__half",
        "12pack_weights",
        "7combine",
        "12dropout_mask",
    ):
        assert kernel in code, kernel


def test_products_of_sm_90a_run_asynchronously(build):
    """Where the compiler cannot follow the registers, it serializes the products and prints a message."""
    _, log, _ = build
    assert "serialized" not in log


@pytest.mark.parametrize(
    ("kernel", "architectures", "expected"),
    [
        ("search_wgmma", ["90a"], ("HGMMA.64x128x16.F32", "UBLKCP", "SYNCS")),
        ("search_mma", ["80", "90a", "100"], ("HMMA.16816.F32", "LDSM", "LDGSTS")),
    ],
)
def test_the_instructions_are_those_of_the_architecture(build, kernel, architectures, expected):
    architecture, _, _ = build
    if architecture not in architectures:
        pytest.skip(f"{kernel} is not looked at for sm_{architecture}")
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is not installed")
    found = sass.instances("vq_assign", architecture, kernel)
    assert len(found) >= 4
    for name, lines in found.items():
        used = sass.operations(lines)
        for instruction in expected:
            assert any(one.startswith(instruction) for one in used), f"{name}: no {instruction}"


def test_nothing_spills(build):
    """No kernel spills registers, with four exceptions.

    These are the state of the MC dropout head between pairs of passes, one float64 number per block of sums,
    the sums of k-means on sm_100 (outside of their loop, except for one of its 600 instructions), and
    addresses of a float64 iteration of k-means on sm_120.
    """
    architecture, log, _ = build
    spilled = {
        name: int(stored)
        for name, stored in re.findall(r"Function properties for (\S+)\n.* (\d+) bytes spill stores", log)
    }
    assert spilled
    for name, stored in spilled.items():
        allowed = {
            "4headILi2E": 160,
            "8row_sumsIfLb1EdE": 8,
            r"8row_sumsI\w+?Lb0E": 40 if architecture == "100" else 0,
            "7advanceIddE": 48 if architecture == "120" else 0,
        }
        most = next((most for kernel, most in allowed.items() if re.search(kernel, name)), 0)
        assert stored <= most, f"{name}: {stored} bytes"


def test_shared_memory_needs_no_opt_in(build):
    _, log, _ = build
    assert max(map(int, re.findall(r"(\d+) bytes smem", log))) <= 48 * 1024
