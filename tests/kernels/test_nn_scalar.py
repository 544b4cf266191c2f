"""FSQ, LFQ and the small layers against their definitions in float64."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import uefl_kernels.nn
from uefl_kernels.nn import (
    FSP,
    FSQ,
    LFQ,
    BinaryMapper,
    GroupedResidualFSQ,
    LatentQuantize,
    RandomProjectionQuantizer,
    ResidualFSQ,
    ResidualLFQ,
    Sequential,
)

from .conftest import normal


def test_fsq_rounds_to_the_levels():
    x = normal(40, 2).double() * 2
    quantized, indices = FSQ([5, 3])(x)
    sizes = torch.tensor([5.0, 3.0], dtype=torch.float64)
    levels = (x.tanh() * (sizes - 1) * 1.001 / 2).round()
    torch.testing.assert_close(quantized, levels / (sizes // 2))
    assert torch.equal(indices.long(), ((levels + sizes // 2) * torch.tensor([1, 5])).sum(-1).long())


def test_gradient_of_fsq_ignores_rounding():
    """The gradient is that of tanh(x + shift) half - offset, for an even and an odd number of levels."""
    x, weight = normal(40, 2).double().requires_grad_(), normal(40, 2, seed=1).double()
    quantized, _ = FSQ([4, 5])(x)
    (quantized * weight).sum().backward()
    sizes, offset = (torch.tensor(values, dtype=torch.float64) for values in ([4.0, 5.0], [0.5, 0.0]))
    half = (sizes - 1) * 1.001 / 2
    bounded = (x.detach() + (offset / half).atanh()).tanh()
    torch.testing.assert_close(quantized.detach(), (bounded * half - offset).round() / (sizes // 2))
    torch.testing.assert_close(x.grad, weight * (1 - bounded.square()) * half / (sizes // 2))


def test_lfq_returns_signs_and_passes_the_gradient():
    """The sign of zero is negative."""
    x, weight = torch.tensor([[0.3, -2.0, 0.0]], requires_grad=True), torch.tensor([[0.7, -1.5, 2.0]])
    quantized, indices, _ = LFQ(dim=3)(x)
    assert quantized.tolist() == [[1.0, -1.0, -1.0]]
    assert indices.tolist() == [0b100]
    (quantized * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_the_bound_of_residuals_halves():
    layer = ResidualLFQ(dim=4, num_quantizers=3, codebook_size=16, soft_clamp_input_value=8.0)
    assert [each.soft_clamp_input_value for each in layer.layers] == [8.0, 4.0, 2.0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_fsq_indices_name_all_codewords(symmetric):
    layer = FSQ([4, 3, 5], preserve_symmetry=symmetric)
    assert torch.equal(layer.codes_to_indices(layer.implicit_codebook), torch.arange(60, dtype=torch.int32))
    assert layer.bits_per_vector == pytest.approx(torch.tensor(60.0).log2().item())


def test_lfq_entropies_cover_all_codewords():
    layer = LFQ(dim=4, codebook_size=16, diversity_gamma=0.5).double()
    x = normal(30, 4).double()
    _, losses = layer(x, inv_temperature=0.7, return_loss_breakdown=True)
    codewords = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    probs = (-(x.unsqueeze(1).float().double() - codewords).square().sum(-1) * 0.7).softmax(-1)
    sample = torch.special.entr(probs).sum(-1).mean()
    batch = torch.special.entr(probs.mean(0)).sum()
    torch.testing.assert_close(losses.per_sample_entropy.double(), sample, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses.batch_entropy.double(), batch, rtol=1e-4, atol=1e-4)


def test_lfq_entropy_of_a_share_of_the_rows():
    layer, x = LFQ(dim=4, frac_per_sample_entropy=0.1), normal(10, 4)
    found, *alone = (
        layer(rows, inv_temperature=1.0, return_loss_breakdown=True)[1].per_sample_entropy
        for rows in (x, *x.split(1))
    )
    assert (torch.stack(alone) - found).abs().min() < 1e-6


def test_lfq_mask_of_positions_leaves_them_out():
    layer = LFQ(dim=4, commitment_loss_weight=1.0)
    x, mask = normal(2, 10, 4), torch.rand(2, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    torch.testing.assert_close(layer(x, mask=mask)[2], layer(x[mask])[2])
    assert layer(x, mask=torch.zeros_like(mask))[2] == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_masks_that_do_not_fit_lfq(residual, training):
    layer = ResidualLFQ(dim=4, codebook_size=16, num_quantizers=2) if residual else LFQ(dim=4)
    x, mask = normal(2, 10, 4), torch.ones(2, 10, dtype=torch.bool)
    for wrong, error in (
        (mask.int(), TypeError),  # an int mask would choose the rows 0 and 1
        (mask.float(), TypeError),
        (mask.numpy(), TypeError),
        (mask[:, :9], ValueError),
        (mask[0], ValueError),
        (mask.unsqueeze(-1), ValueError),
    ):
        with pytest.raises(error, match="LFQ: mask"):
            layer.train(training)(x, mask=wrong)
    layer(x, mask=mask[:, 0])


def test_latent_quantize_returns_the_nearest_value():
    layer = LatentQuantize([5, 4], 2)
    with torch.no_grad():
        layer.values_per_latent[0].add_(0.07)
    x = normal(3, 2, 20)
    quantized, indices, _ = layer(x)
    for place, values in enumerate(layer.values_per_latent):
        distance = (x[:, place, :, None].double() - values.double()).abs()
        assert torch.equal(quantized[:, place], values[distance.argmin(-1)])
    assert torch.equal(layer.decode(indices), quantized)


def test_binary_mapper_gives_the_gradient_of_the_probabilities():
    layer, logits = BinaryMapper(3), normal(5, 3).double().requires_grad_()
    weight = normal(5, 8).double()
    (layer(logits, calc_aux_loss=False)[0] * weight).sum().backward()
    other = logits.detach().requires_grad_()
    bits = torch.tensor([[(code >> bit) & 1 for bit in range(3)] for code in range(8)], dtype=torch.float64)
    probs = other.sigmoid().unsqueeze(1)
    ((bits * probs + (1 - bits) * (1 - probs)).prod(-1) * weight).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_sequential_returns_the_quantizers_results():
    layer = Sequential(nn.Linear(6, 2), FSQ([5, 3]), nn.Linear(2, 4))
    output, indices = layer(normal(2, 7, 6))
    assert output.shape == (2, 7, 4)
    assert indices.shape == (2, 7)
    for wrong in ((nn.Linear(2, 2),), (FSQ([5, 3]), FSQ([5, 3]))):
        with pytest.raises(ValueError, match=r"got [02]"):
            Sequential(*wrong)


def test_residual_fsq_of_channels_second_decodes():
    layer = ResidualFSQ(levels=[5, 3], dim=6, num_quantizers=3, is_channel_first=True).eval()
    quantized, indices = layer(normal(2, 6, 9))
    assert indices.shape == (2, 3, 9)
    torch.testing.assert_close(layer.decode(indices), quantized)


SCALAR = {
    "FSQ": (lambda: FSQ([8, 5, 5], dim=6), (2, 7, 6)),
    "LFQ": (lambda: LFQ(dim=6, codebook_size=16), (2, 7, 6)),
    "FSP": (lambda: FSP([8, 5, 5], dim=6), (2, 7, 6)),
    "LatentQuantize": (lambda: LatentQuantize([5, 4], 6), (2, 6, 7)),
    "BinaryMapper": (lambda: BinaryMapper(6, deterministic_on_eval=True), (2, 7, 6)),
    "ResidualFSQ": (lambda: ResidualFSQ(levels=[5, 3], dim=6, num_quantizers=2), (2, 7, 6)),
    "ResidualLFQ": (lambda: ResidualLFQ(dim=6, codebook_size=16, num_quantizers=2), (2, 7, 6)),
    "GroupedResidualFSQ": (
        lambda: GroupedResidualFSQ(levels=[5, 3], dim=6, num_quantizers=2, groups=2),
        (2, 7, 6),
    ),
    "RandomProjectionQuantizer": (
        lambda: RandomProjectionQuantizer(dim=6, codebook_size=8, codebook_dim=4),
        (2, 7, 6),
    ),
}


def tensors(found):
    found = found if isinstance(found, tuple) else (found,)
    return [value for value in found if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("way", ["to_empty", "assign"])
@pytest.mark.parametrize("name", SCALAR)
def test_layers_made_on_the_meta_device(name, way):
    make, shape = SCALAR[name]
    layer = make()
    with torch.device("meta"):
        other = make()
    repr(other)
    if way == "to_empty":
        other.to_empty(device="cpu")
    other.load_state_dict(layer.state_dict(), assign=way == "assign")
    for got, want in zip(other.buffers(), layer.buffers(), strict=True):
        assert torch.equal(got, want)
    x = normal(*shape)
    for got, want in zip(tensors(other.eval()(x)), tensors(layer.eval()(x)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SCALAR)
def test_scalar_layers_take_no_rows(name, training):
    make, shape = SCALAR[name]
    for value in tensors(make().train(training)(torch.empty(0, *shape[1:]))):
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", SCALAR)
def test_input_that_is_no_tensor_of_floats(name):
    make, shape = SCALAR[name]
    x = normal(*shape)
    for wrong in (x.numpy(), x.tolist(), x.long(), x > 0, x.to_sparse()):
        with pytest.raises(TypeError, match=name.removeprefix("Grouped")):
            make()(wrong)
    for wrong in (x[:, :5, :5], x.new_zeros(())):
        with pytest.raises(ValueError, match=name.removeprefix("Grouped")):
            make()(wrong)


@pytest.mark.parametrize(
    "layer",
    [FSQ([8] * 11), LatentQuantize([8] * 11, 11), FSP([8] * 11)],
    ids=["FSQ", "LatentQuantize", "FSP"],
)
def test_indices_of_more_codewords_than_int32_can_number(layer):
    x = 3 * (normal(2, 11, 30) if isinstance(layer, LatentQuantize) else normal(2, 30, 11))
    quantized, indices, *_ = layer.eval()(x)
    assert indices.dtype == torch.int64
    assert indices.max() > 2**31
    torch.testing.assert_close(layer.decode(indices), quantized)


@pytest.mark.parametrize("name", ["FSQ", "LFQ", "FSP", "LatentQuantize", "ResidualLFQ"])
@pytest.mark.parametrize("wrong", [-2, 10**6])
def test_indices_of_no_codeword_are_refused(name, wrong):
    make, shape = SCALAR[name]
    layer = make().eval()
    indices = layer.encode(normal(*shape)).long()
    indices.view(-1)[3] = wrong
    with pytest.raises(IndexError, match="indices"):
        layer.decode(indices)


def test_more_codewords_than_int64_can_number():
    for make in (FSQ, FSP, lambda levels: LatentQuantize(levels, len(levels))):
        with pytest.raises(ValueError, match="levels"):
            make([8] * 22)
    layer = FSQ([8] * 22, return_indices=False)
    assert layer(normal(5, 22))[1] is None
    with pytest.raises(ValueError, match="levels"):
        layer.codes_to_indices(normal(5, 22))


@pytest.mark.parametrize("act_name", ["tanh", "sigmoid", "normal", "laplace", "cauchy"])
def test_fsp_can_be_pickled(act_name):
    layer, x = FSP([8, 5], act_name=act_name).eval(), normal(9, 2)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], layer(x)[0])


def test_gradients_of_fsp_are_finite_for_equal_rows():
    x = torch.zeros(5, 2, requires_grad=True)
    FSP([8, 5], vector_norm="kurt")(x)[2].backward()
    assert torch.isfinite(x.grad).all()


def test_binary_mapper_refuses_nan():
    with pytest.raises(ValueError, match="logits"):
        BinaryMapper(3)(torch.full((2, 3), torch.nan))
    with FakeTensorMode():
        assert BinaryMapper(3)(torch.zeros(2, 3))[0].shape == (2, 8)


def test_the_entropy_of_lfq_refuses_transforms():
    layer, x = LFQ(dim=4, codebook_size=16), normal(3, 5, 4)
    with pytest.raises(RuntimeError, match=r"torch\.func\.grad"):
        torch.func.grad(lambda x: layer(x)[2])(x)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda x: layer(x)[2], (x,), (x,))


WRONG = [
    ("FSQ", {"levels": [2, 5]}, "levels"),
    ("FSQ", {"levels": [4, 5], "noise_dropout": 0.5}, "noise_dropout"),
    ("FSQ", {"levels": [4], "num_codebooks": 2, "keep_num_codebooks_dim": False}, "num_codebooks"),
    ("LFQ", {}, "dim"),
    ("LFQ", {"codebook_size": 12}, "codebook_size=12"),
    ("LFQ", {"dim": 4, "frac_per_sample_entropy": 0.0}, "frac_per_sample_entropy"),
    ("LFQ", {"dim": 4, "soft_clamp_input_value": 0.5}, "soft_clamp_input_value"),
    ("GroupedResidualFSQ", {"levels": [3], "num_quantizers": 2, "dim": 7, "groups": 2}, "groups=2"),
    ("LatentQuantize", {"levels": [5], "dim": 4, "in_place_codebook_optimizer": torch.optim.SGD}, "in_place"),
    ("BinaryMapper", {"bits": 0}, "bits"),
    ("BinaryMapper", {"bits": 63}, "bits"),
    *(
        (kind, options | {"levels": levels}, "levels")
        for kind, options in {
            "FSQ": {},
            "FSP": {},
            "ResidualFSQ": {"num_quantizers": 2},
            "GroupedResidualFSQ": {"num_quantizers": 2, "dim": 4, "groups": 2},
            "LatentQuantize": {"dim": 2},
        }.items()
        for levels in (None, "85", [8.5, 5], *([] if kind == "LatentQuantize" else [8]))
    ),
]


@pytest.mark.parametrize(("kind", "options", "match"), WRONG)
def test_scalar_options_that_do_not_fit_are_refused(kind, options, match):
    with pytest.raises(ValueError, match=match):
        getattr(uefl_kernels.nn, kind)(**options)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (
            FSQ([5, 3]),
            "dim levels codebook_dim codebook_size num_codebooks preserve_symmetry has_projections",
        ),
        (LFQ(dim=4), "dim codebook_dim codebook_size codebook_scale num_codebooks has_projections"),
        (LatentQuantize([5, 4], 2), "dim codebook_dim codebook_size num_codebooks has_projections"),
        (BinaryMapper(3), "bits num_codes"),
    ],
    ids=["FSQ", "LFQ", "LatentQuantize", "BinaryMapper"],
)
def test_scalar_attributes_that_are_fixed_refuse_a_value(layer, names):
    for name in names.split():
        if hasattr(layer, name):
            with pytest.raises(AttributeError, match=name):
                setattr(layer, name, 3)
