"""How many rows the certificate of the search on tensor cores (fp16_error in csrc/common/certificate.h) leaves open.

They are searched again, so their share is a share of the time. Simulated in float64, with the constants of the C++ itself.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from .conftest import normal

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++")
SOURCE = """
#include "common/certificate.h"
extern "C" void terms(long d, double half_square, double radius, double rest_radius, double* found) {
  const uefl::ErrorTerms t = uefl::fp16_error(d, half_square, radius, rest_radius, true);
  found[0] = t.constant, found[1] = t.norm, found[2] = t.square, found[3] = t.rest;
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def fp16_error(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    (folder / "terms.cpp").write_text(SOURCE)
    library = folder / "terms.so"
    subprocess.run([COMPILER, "-std=c++20", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", folder / "terms.cpp", "-o", library], check=True)
    function = ctypes.CDLL(str(library)).terms
    function.argtypes, function.restype = [ctypes.c_long, *[ctypes.c_double] * 3, ctypes.POINTER(ctypes.c_double)], None

    def terms(*arguments):
        found = (ctypes.c_double * 4)()
        function(*arguments, found)
        return list(found)

    return terms


def in_float16(values, lengths):
    """Rounded to float16 once a power of two has taken the length into [2^14, 2^15)."""
    scale = torch.exp2(14 - lengths.log2().floor())
    return (values * scale).half().double() / scale


def open_rows(x, codebook, terms_of):
    """Which rows stay open, and how many codewords each of those has within the limit of its candidates; see is_certain()."""
    y, b, d = x.double(), codebook.double(), x.shape[1]
    half_square, radius = b.square().sum(1).max().item() / 2, b.norm(dim=1).max()
    rest_radius = (b - in_float16(b, radius)).norm(dim=1).max().item()
    norm = y.norm(dim=1)
    rest = (y - in_float16(y, norm[:, None])).norm(dim=1)
    constant, by_norm, by_square, by_rest = terms_of(d, half_square, radius.item(), rest_radius)
    reach = half_square + norm.max().item() * radius.item()  # the scores are integers in units of the last bit of a base above that
    unit = 2.0 ** (torch.tensor(1.1 * reach).log2().floor().item() + 2 - 23)
    error = 1.01 * (constant + norm * (by_norm + norm * by_square) + rest * by_rest) + unit
    scores = b.square().sum(1) / 2 - y @ b.T
    best, second = scores.topk(2, dim=1, largest=False).values.T
    flagged = second - best <= 2.02 * error
    candidates = (scores <= (best + 2.2 * (error + unit))[:, None]).sum(1)
    return flagged, candidates[flagged]


@pytest.mark.parametrize(
    ("dtype", "d", "k", "share"),
    [
        (torch.float32, 64, 256, 0.027),
        (torch.float32, 64, 1024, 0.038),
        (torch.float32, 64, 8192, 0.050),
        (torch.float16, 64, 256, 0.002),
        (torch.float16, 128, 1024, 0.006),
    ],
    ids=str,
)
def test_few_rows_stay_open(fp16_error, dtype, d, k, share):
    rows = 20000 if k < 8192 else 4000
    flagged, candidates = open_rows(normal(rows, d, dtype=dtype), normal(k, d, seed=1, dtype=dtype), fp16_error)
    found = flagged.double().mean().item()
    spread = 2 * (share / rows) ** 0.5  # two standard deviations of a count
    assert found <= 1.1 * share + spread, f"{found:.4f} of the rows"
    assert found >= 0.7 * share - spread, f"{found:.4f} of the rows: fewer than planned, lower the bound"
    assert candidates.double().mean() <= 3
    assert (candidates > 8).double().mean() <= 0.002, "too many candidates to keep: scored against all codewords"


def test_a_common_offset_must_be_taken_away(fp16_error):
    """Why rows and codewords are centred: the certificate knows lengths only."""
    x, codebook = normal(5000, 64, offset=3), normal(256, 64, seed=1, offset=3)
    raw, _ = open_rows(x, codebook, fp16_error)
    mean = codebook.double().mean(0)
    centred, _ = open_rows(x - mean, codebook - mean, fp16_error)
    assert raw.double().mean() > 5 * centred.double().mean()
    assert centred.double().mean() < 0.05
