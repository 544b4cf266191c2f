"""NaN and infinity, small default dtypes, tensors without values, and scaled losses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import uefl_kernels
from uefl_kernels import mc_dropout_mlp
from uefl_kernels.nn import FSQ, LFQ, MCDropout, ResidualVQ

from .conftest import normal
from .nn_layers import KINDS, layer, state


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


# --- losses that a GradScaler scales ------------------------------------------------------------------------

LEARNED = {"learnable_codebook": True}
OPTIMIZED = LEARNED | {"in_place_codebook_optimizer": lambda codewords: torch.optim.SGD(codewords, 0.1)}
SHARED = {"dim": 8, "num_quantizers": 2, "codebook_size": 10, "shared_codebook": True}
SCALED = {
    "averages": lambda: layer(threshold_ema_dead_code=1),
    "learned": lambda: layer(**LEARNED),
    "weighted": lambda: layer(codebook_loss_weight=0.5, **LEARNED),
    "optimized": lambda: layer(**OPTIMIZED),
    "shared": lambda: ResidualVQ(**SHARED, **OPTIMIZED),
    "residual": lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10),
    "binary": lambda: LFQ(codebook_size=16, dim=8, commitment_loss_weight=1.0),
    "scalar": lambda: FSQ([5, 5], dim=8),
    "head": lambda: MCDropout(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), passes=3),
}


def train(name, scale, dtype=torch.float32, infinite=()):
    """Return the states before and after each step.

    The losses of the steps ``infinite`` are infinite. As most loops do, clear the gradients before the
    backward pass, after the forward pass.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), SCALED[name]())
    own = name in ("optimized", "shared")  # then the layer has an optimizer for its codewords
    given = [value for key, value in model.named_parameters() if not (own and key.endswith("embed"))]
    optimizer = torch.optim.SGD(given, lr=0.05)
    scaler, states = torch.amp.GradScaler("cpu", init_scale=scale), [state(model)]
    for step in range(4):
        torch.manual_seed(step)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            result = model(normal(4, 8, seed=step))
        loss = (result[0].float() - normal(4, 8, seed=9)).square().sum()
        loss = loss + sum(each.sum() for each in result[1:] if each.requires_grad)
        optimizer.zero_grad()
        scaler.scale(loss * (torch.inf if step in infinite else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        states.append(state(model))
    return states, {parameter for parameter, _ in model.named_parameters()}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_losses_move_parameters_as_plain_ones(name):
    torch.testing.assert_close(train(name, 2.0**16)[0], train(name, 1.0)[0], rtol=0, atol=0)
    torch.testing.assert_close(
        train(name, 2.0**8, torch.float16)[0][-1], train(name, 1.0, torch.float16)[0][-1], rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("name", SCALED)
def test_skipped_steps_change_no_parameter(name):
    """A step after skipped steps changes them, and the layer's own optimizer steps in the forward pass."""
    states, parameters = train(name, 2.0**16, infinite=(1, 2))
    for step in (1, 2):
        for parameter in parameters:
            moved = not torch.equal(states[step][parameter], states[step + 1][parameter])
            assert moved == (name in ("optimized", "shared") and parameter.endswith("embed"))
    assert all(value.isfinite().all() for value in states[-1].values())
    assert any(not torch.equal(states[3][parameter], states[4][parameter]) for parameter in parameters)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_an_optimizer_of_the_layer_skips_such_rows(value):
    vq, other, start = layer(**OPTIMIZED), layer(**OPTIMIZED), layer(**OPTIMIZED).codebook
    x, mask = normal(40, 8), torch.arange(40) != 3
    x[3, 5] = value
    vq(x), other(x, mask=mask)
    torch.testing.assert_close((vq.codebook - start) * 40, (other.codebook - start) * 39)


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [1e19, 1e30, 1e37])
def test_angles_of_rows_whose_squares_overflow(scale, compiled):
    cosine = layer(use_cosine_sim=True, freeze_codebook=True, rotation_trick=False)
    call = torch.compile(cosine, backend="eager", fullgraph=True) if compiled else cosine
    x, huge = (normal(2, 50, 8, scale=factor).requires_grad_() for factor in (1.0, scale))
    quantized, indices, loss = call(huge)
    torch.testing.assert_close(indices, (x @ cosine.codebook.T).argmax(-1))
    torch.testing.assert_close(quantized, cosine.codebook[indices])
    loss.backward()
    cosine(x)[2].backward()
    torch.testing.assert_close(huge.grad * scale, x.grad)
