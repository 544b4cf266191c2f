"""NaN and infinity, small default dtypes, and tensors without values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import uefl_kernels
from uefl_kernels import mc_dropout_mlp
from uefl_kernels.nn import ResidualVQ

from .conftest import normal
from .nn_layers import KINDS, layer


@pytest.fixture
def bfloat16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_do_not_follow_a_small_default_dtype(bfloat16, kind):
    vq = layer(threshold_ema_dead_code=1, kmeans_init=kind != "learnable", **KINDS[kind])
    assert {value.dtype for name, value in vq._codebook.state_dict().items() if name != "initted"} == {
        torch.float32
    }
    quantized, _, loss = vq(normal(40, 8, dtype=torch.bfloat16).requires_grad_())
    assert quantized.dtype == torch.bfloat16
    assert loss.dtype == vq.perplexity.dtype == torch.float32
    (quantized.float().sum() + loss).backward()


def test_averages_follow_a_large_one():
    torch.set_default_dtype(torch.float64)
    try:
        assert layer().codebook.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_quantize_dropout_of_fake_tensors_keeps_all():
    with FakeTensorMode():
        rvq = ResidualVQ(dim=8, num_quantizers=4, codebook_size=5, quantize_dropout=True)
        quantized, indices, losses = rvq(torch.empty(6, 8))
    assert (quantized.shape, indices.shape, losses.shape) == ((6, 8), (6, 4), (4,))


@pytest.mark.parametrize(
    "options", [{}, {"commitment_weight": 0.0}, {"stochastic_sample_codes": True}], ids=str
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_row_of_nan_gets_codeword_zero_and_a_nan_loss(kind, training, options):
    vq, x = layer(**KINDS[kind], **options).train(training), normal(40, 8)
    assert not vq(x)[2].isnan()
    codewords, x[3, 0] = vq.codebook.clone(), torch.nan
    quantized, indices, loss = vq(x)
    assert loss.isnan()
    if "stochastic_sample_codes" not in options:  # its straight-through estimator adds the NaN of x
        assert quantized.isfinite().all()
    if not (training and "stochastic_sample_codes" in options):
        assert not indices[3].flatten()[0]
    assert vq.codebook.isfinite().all()
    masked = torch.arange(40) != 3
    assert not vq(x, mask=masked)[2].isnan()
    assert training or torch.equal(vq.codebook, codewords)


def test_batch_of_nan_makes_every_residual_loss_nan():
    rvq = ResidualVQ(dim=8, num_quantizers=3, codebook_size=5).eval()
    assert rvq(torch.full((4, 8), torch.nan))[2][0].isnan()
    assert not rvq(normal(4, 8))[2].any()


def test_mc_dropout_of_a_layer_without_dropout_is_refused():
    """All passes of such a layer would be equal."""
    with pytest.raises(ValueError, match="input_dropout=True"):
        mc_dropout_mlp(normal(4, 8), [normal(3, 8)], p=0.5)
    assert mc_dropout_mlp(normal(4, 8), [normal(3, 8)], p=0.5, input_dropout=True).mutual_info.any()


def test_nn_is_imported_with_the_package():
    assert uefl_kernels.nn.ResidualVQ is ResidualVQ
    assert "nn" in dir(uefl_kernels)


def test_sizes_are_shown():
    assert repr(layer(heads=2, codebook_dim=3)).startswith(
        "VectorQuantize(\n  dim=8, codebook_size=10, codebook_dim=3, heads=2\n"
    )
