"""Decoding gives the shape and the dtype that ``forward`` gives.

The tests have models of every dtype, images, rotations and inputs without rows.
"""

from __future__ import annotations

import pytest
import torch

from uefl_kernels.nn import (
    FSP,
    FSQ,
    LFQ,
    GroupedResidualFSQ,
    GroupedResidualLFQ,
    HierarchicalVQ,
    LatentQuantize,
    ResidualFSQ,
    ResidualLFQ,
    ResidualVQ,
    VectorQuantize,
)

from .conftest import normal
from .test_nn_codes import LAYERS

MORE = {
    "projected": lambda: VectorQuantize(8, 16, codebook_dim=3),
    "cosine": lambda: VectorQuantize(8, 16, use_cosine_sim=True),
    "residual, projected": lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, codebook_dim=3),
    "fsq, not projected": lambda: FSQ([5, 3, 4, 4, 5, 4, 5, 8]),
    "fsq, rotated": lambda: FSQ([5, 4], dim=8, orthogonal_rotation=True),
    "lfq, rotated": lambda: LFQ(dim=8, codebook_size=16, orthogonal_rotation=True),
    "residual fsq, rotated": lambda: ResidualFSQ(
        levels=[5, 5], dim=8, num_quantizers=3, orthogonal_rotation=True
    ),
    "residual lfq, rotated": lambda: ResidualLFQ(
        dim=8, codebook_size=16, num_quantizers=3, orthogonal_rotation=True
    ),
    "fsp, not projected": lambda: FSP([5, 3, 4, 4, 5, 4, 5, 8]),
    "latent": lambda: LatentQuantize([5, 4], 8),
    "latent, fixed": lambda: LatentQuantize([5, 4], 8, optimize_values=False),
}


@pytest.mark.parametrize("name", [*LAYERS, *MORE])
def test_decoding_in_models_of_every_dtype(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        layer = (LAYERS | MORE)[name]().eval().to(dtype)
        x = normal(2, 40, 8, seed=3).to(dtype)
        x = x.mT if isinstance(layer, LatentQuantize) else x
        quantized, indices, *_ = layer(x)
        decoded = layer.decode(indices)
        assert decoded.dtype == dtype
        close = {} if dtype.itemsize > 2 else {"rtol": 0.03, "atol": 0.06}  # bfloat16 rounds sums to 8 bits
        torch.testing.assert_close(decoded, quantized, **close)


def test_codes_have_the_dtype_of_the_model():
    layer = ResidualVQ(dim=8, num_quantizers=3, codebook_size=16).eval()
    indices = layer(normal(2, 10, 8))[1]
    exact = layer.get_codes_from_indices(indices)
    assert torch.equal(layer.bfloat16().get_codes_from_indices(indices), exact.bfloat16())
    assert torch.equal(layer.float().get_codes_from_indices(indices), exact)  # the codewords stayed float32


def test_decoding_after_the_meta_device():
    with torch.device("meta"):
        layer = VectorQuantize(8, 16)
    layer.bfloat16().to_empty(device="cpu").load_state_dict(VectorQuantize(8, 16).state_dict())
    assert layer.decode(torch.arange(16)).dtype == torch.bfloat16


ROTATED = {"orthogonal_rotation": True}


@pytest.mark.parametrize("options", [{}, ROTATED, {"spherical": True}], ids=str)
@pytest.mark.parametrize("lead", [(2, 4, 5), (2, 4, 3, 5), (6,), (0, 5)], ids=str)
def test_residual_lfq_reads_the_last_dimension(lead, options):
    # 4 bits, so the second dimension could be mistaken for the channels of an image
    torch.manual_seed(0)
    layer = ResidualLFQ(dim=4, codebook_size=16, num_quantizers=3, **options).eval()
    x = normal(*lead, 4)
    quantized, indices, _ = layer(x)
    flat = layer(x.reshape(-1, 1, 4))
    assert torch.equal(quantized, flat[0].view(x.shape))
    assert torch.equal(indices, flat[1].view(*lead, 3))
    torch.testing.assert_close(layer.decode(indices), quantized)


IMAGES = {
    "fsq": (GroupedResidualFSQ, {"levels": [5, 3], "dim": 16}),
    "fsq first": (GroupedResidualFSQ, {"levels": [5, 3], "dim": 16, "is_channel_first": True}),
    "fsq, rotated": (GroupedResidualFSQ, {"levels": [5, 5], "dim": 4, **ROTATED}),
    "lfq": (GroupedResidualLFQ, {"codebook_size": 16, "dim": 16}),
    "lfq, not projected": (GroupedResidualLFQ, {"codebook_size": 16, "dim": 8}),
}


@pytest.mark.parametrize("name", IMAGES)
def test_groups_of_the_channels_of_images(name):
    kind, options = IMAGES[name]
    torch.manual_seed(0)
    layer = kind(groups=2, num_quantizers=3, accept_image_fmap=True, **options).eval()
    last = {key: value for key, value in options.items() if key != "is_channel_first"}
    sequences = kind(groups=2, num_quantizers=3, **last)
    sequences.load_state_dict(layer.state_dict())
    x = normal(2, options["dim"], 4, 5)
    quantized, indices, *_ = layer(x)
    want = sequences.eval()(x.flatten(2).mT)
    torch.testing.assert_close(quantized, want[0].mT.view(x.shape))
    behind = indices.movedim(2, -1) if "first" in name else indices
    assert torch.equal(behind, want[1].view(2, 2, 4, 5, 3))
    torch.testing.assert_close(layer.decode(indices), quantized)
    assert torch.equal(layer.encode(x), indices)


def test_hierarchical_vq_under_autocast():
    torch.manual_seed(0)
    layer = HierarchicalVQ(dim=8, codebook_size=16, scales=(1, 5, 40), kmeans_init=False)
    x = normal(2, 8, 40)
    with torch.autocast("cpu", torch.bfloat16):
        quantized, indices, loss = layer(x)
    assert quantized.dtype == loss.dtype == torch.float32
    assert [tuple(found.shape) for found in indices] == [(2, 1), (2, 5), (2, 40)]
    loss.backward()


@pytest.mark.parametrize("kind", [FSQ, LFQ])
def test_rotations_are_exact_under_autocast(kind):
    torch.manual_seed(0)
    options = {"levels": [5, 5, 5, 5]} if kind is FSQ else {"codebook_size": 16}
    layer = kind(**options, **ROTATED).eval()
    x = normal(4, 50, 4)
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert torch.equal(found[1], want[1])
    assert torch.equal(found[0], want[0])


IMPLICIT = {"num_quantizers": 3, "codebook_size": 16, "implicit_neural_codebook": True}
HALF = {
    "implicit": lambda: ResidualVQ(dim=8, **IMPLICIT),
    "fsq, rotated": lambda: FSQ([5, 5], dim=8, **ROTATED),
    "lfq, rotated": lambda: LFQ(dim=8, codebook_size=16, **ROTATED),
    "residual fsq": lambda: ResidualFSQ(levels=[5, 3], dim=8, num_quantizers=3),
    "residual fsq, not projected": lambda: ResidualFSQ(levels=[5] * 8, num_quantizers=3),
}


@pytest.mark.parametrize("name", [*HALF, *LAYERS])
def test_layers_made_in_half_precision(name):
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        layer = (HALF | LAYERS)[name]()
        x = normal(2, 40, 8).bfloat16().requires_grad_()
        quantized, indices, *_ = layer(x)
        decoded = layer.decode(indices)
    finally:
        torch.set_default_dtype(torch.float32)
    assert quantized.dtype == decoded.dtype == torch.bfloat16
    quantized.sum().backward()
    assert x.grad.isfinite().all()
