"""Layers have options for codecs that vector-quantize-pytorch lacks.

FSP and HierarchicalVQ are compared with their definitions.

The options are: search by angle, two loss weights, and a projection for each quantizer.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from uefl_kernels.nn import FSP, HierarchicalVQ, ResidualVQ, VectorQuantize
from uefl_kernels.nn.fsp import build_cdf_act

from .conftest import normal

LEARNED = {"learnable_codebook": True, "rotation_trick": False}


def layer(**options):
    torch.manual_seed(0)
    made = VectorQuantize(8, 16, **options)
    with torch.no_grad():
        made.codebook = normal(16, 8, seed=5) * torch.linspace(0.1, 4, 16).unsqueeze(-1)
    return made


# --- cosine_search ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, LEARNED, {"heads": 2, "codebook_dim": 8}], ids=str)
def test_the_angle_chooses_and_lengths_stay(options):
    vq, x = layer(cosine_search=True, **options).eval(), normal(2, 30, 8) * 3
    rows = vq.project_in(x).unflatten(-1, (vq.heads, 8))
    cosines = F.normalize(rows.double(), dim=-1) @ F.normalize(vq.codebook.double(), dim=-1).t()
    quantized, indices, _ = vq(x)
    indices = indices if vq.heads > 1 else indices.unsqueeze(-1)
    assert torch.equal(indices, cosines.argmax(-1))
    assert torch.equal(quantized, vq.project_out(vq.codebook[indices].flatten(-2)))
    far = layer(**options).eval()(x)[1]
    assert not torch.equal(far, indices.squeeze(-1) if vq.heads == 1 else indices)


def test_several_codewords_by_the_angle():
    vq, x = layer(cosine_search=True).eval(), normal(30, 8)
    cosines = F.normalize(x.double(), dim=-1) @ F.normalize(vq.codebook.double(), dim=-1).t()
    quantized, indices, loss = vq(x, topk=3)
    assert torch.equal(indices, cosines.topk(3, dim=-1).indices)
    assert torch.equal(quantized, vq.codebook[indices])
    torch.testing.assert_close(loss, (x.unsqueeze(1) - quantized).square().mean(-1))


def test_drawn_by_the_angle():
    vq, x = layer(cosine_search=True, stochastic_sample_codes=True), normal(400, 8)
    vq.freeze_codebook = True
    cold, warm = (vq(x, sample_codebook_temp=temperature)[1] for temperature in (1e-4, 100.0))
    nearest = vq.eval()(x)[1]
    assert torch.equal(cold, nearest)
    assert (warm == nearest).float().mean() < 0.3


def test_averages_of_a_search_by_the_angle_keep_lengths():
    vq, x = layer(cosine_search=True, decay=0.0, eps=0.0), normal(300, 8)
    indices = vq.eval()(x)[1]
    vq.train()(x)
    for code in indices.unique():
        torch.testing.assert_close(vq.codebook[code], x[indices == code].mean(0), rtol=1e-5, atol=1e-6)


# --- two weights of the loss -----------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rotation", [False, True])
def test_two_weights_scale_the_two_losses(rotation, masked):
    options = LEARNED | {"rotation_trick": rotation, "commitment_weight": 0.25, "codebook_loss_weight": 1.5}
    vq, x = layer(**options), normal(2, 30, 8).requires_grad_()
    mask = torch.arange(30).expand(2, 30) < torch.tensor([[30], [7]]) if masked else None
    _, indices, loss, terms = vq(x, mask=mask, return_loss_breakdown=True)
    loss.backward()
    got = x.grad, vq._codebook.embed.grad[0]
    kept = torch.ones(2, 30, dtype=torch.bool) if mask is None else mask
    codewords, rows = vq.codebook.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    chosen = codewords[indices[kept]]
    commitment = F.mse_loss(rows[kept], chosen.detach())
    want = 0.25 * commitment + 1.5 * F.mse_loss(chosen, rows[kept].detach())
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(terms.commitment, commitment)
    for g, w in zip(got, (rows.grad, codewords.grad), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-6)


def test_a_weight_of_codewords_set_later():
    first, later = layer(**LEARNED, codebook_loss_weight=3.0), layer(**LEARNED)
    later.codebook_loss_weight = 3.0
    for vq in (first, later):
        vq(normal(30, 8))[2].backward()
    assert torch.equal(first._codebook.embed.grad, later._codebook.embed.grad)
    assert first.eval()(normal(30, 8))[2] == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        LEARNED | {"commitment_weight": 0.0},
        LEARNED | {"commitment_use_cross_entropy_loss": True},
        LEARNED | {"codebook_loss_weight": -1.0},
    ],
    ids=str,
)
def test_codebook_loss_weight_without_a_loss_is_refused(options):
    with pytest.raises(ValueError, match="codebook_loss_weight"):
        VectorQuantize(8, 16, **{"codebook_loss_weight": 1.0} | options)


def test_searches_by_the_angle_exclude_each_other():
    with pytest.raises(ValueError, match="cosine_search"):
        VectorQuantize(8, 16, use_cosine_sim=True, cosine_search=True)


# --- projections of each quantizer -----------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"beam_size": 2}, LEARNED], ids=str)
def test_each_quantizer_projects_on_its_own(options):
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, codebook_dim=3, num_quantizers=3, codebook_size=16, project_each=True, **options)
    x = normal(2, 30, 8)
    quantized, indices, losses, codewords = rvq(x, return_all_codes=True)
    assert codewords.shape == (3, 2, 30, 8)
    assert losses.shape == (3,)
    quantized, indices, *_ = rvq.eval()(x)
    torch.testing.assert_close(rvq.decode(indices), quantized)
    if "beam_size" not in options:
        residual = x
        for layer in rvq.layers:
            residual = residual - layer(residual)[0]
        torch.testing.assert_close(x - residual, quantized)
    assert rvq.codebooks.shape == (3, 16, 3)
    assert not rvq.has_projections


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"cosine_search": True},
        LEARNED | {"codebook_loss_weight": 3.0, "freeze_codebook": False},
        {"codebook_dim": 3, "project_each": True},
    ],
    ids=str,
)
def test_a_residual_quantizer_is_its_quantizers_one_by_one(options, training):
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, **{"freeze_codebook": True} | options)
    x = normal(2, 30, 8).requires_grad_()
    quantized, indices, losses = rvq.train(training)(x)
    residual, found = x, []
    for quantizer in rvq.layers:
        codewords, chosen, loss = quantizer(residual)
        residual = residual - codewords.detach()
        found.append((chosen, loss))
    torch.testing.assert_close(quantized, x - residual)
    assert torch.equal(indices, torch.stack([chosen for chosen, _ in found], -1))
    torch.testing.assert_close(losses, torch.stack([loss for _, loss in found]))


@pytest.mark.parametrize("name", ["shared_codebook", "diveq", "implicit_neural_codebook"])
def test_options_incompatible_with_own_projections(name):
    with pytest.raises(ValueError, match="project_each"):
        ResidualVQ(
            dim=8, codebook_dim=3, num_quantizers=3, codebook_size=16, project_each=True, **{name: True}
        )


# --- FSP -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "normal", "laplace", "cauchy"])
def test_an_activation_and_its_inverse(name):
    function, inverse = build_cdf_act(name)
    x = normal(200).double()
    p = function(x)
    assert ((p > 0) & (p < 1)).all()
    torch.testing.assert_close(inverse(p), x)
    assert (p.sort().values == p[x.argsort()]).all()


def test_fsp_returns_the_middle_of_the_bin():
    fsp, x = FSP([5, 3], act_name="sigmoid").eval(), normal(40, 2) * 2
    quantized, indices, _, info = fsp(x)
    places = (x.sigmoid() * torch.tensor([5, 3])).floor()
    assert torch.equal(info["level_indices"], places)
    assert torch.equal(indices.long(), (places * torch.tensor([1, 5])).sum(-1).long())
    middle = (places + 0.5) / torch.tensor([5, 3])
    torch.testing.assert_close(quantized, (middle - 0.5) * 12**0.5)
    torch.testing.assert_close(fsp.decode(indices.to(torch.uint8)), quantized)


def test_fsp_moves_within_a_bin_in_training():
    fsp, x = FSP([4], act_name="sigmoid"), normal(5000, 1)
    quantized, _, _, info = fsp(x)
    moved = quantized / 12**0.5 + 0.5 - x.sigmoid()
    assert moved.abs().max() <= 1 / 8 + 1e-6
    assert moved.std() > 0.05
    assert 0.9 < info["p_accept_prob"] < 1
    fsp.quantize_rate = 1.0
    assert torch.equal(fsp(x)[0], fsp.eval()(x)[0])


def test_fsp_of_one_vector_has_a_finite_loss():
    for norm in ("kurt", "none"):
        assert FSP([5, 3], vector_norm=norm)(normal(1, 2))[2].isfinite()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"levels": []}, "levels"),
        ({"levels": [5], "quantize_rate": 1.5}, "quantize_rate"),
        ({"levels": [5], "act_name": "relu"}, "act_name"),
        ({"levels": [5], "vector_norm": "l2"}, "vector_norm"),
    ],
)
def test_fsp_that_cannot_be_made(options, name):
    with pytest.raises(ValueError, match=name):
        FSP(**options)
    with pytest.raises(ValueError, match="shape"):
        FSP([5, 3])(normal(2, 3))


# --- HierarchicalVQ --------------------------------------------------------------------------


def hierarchy(**options):
    torch.manual_seed(0)
    options = {"dim": 8, "codebook_size": 16, "scales": (1, 2, 4), "kmeans_init": False} | options
    return HierarchicalVQ(accept_image_fmap=True, **options)


def test_the_scales_of_a_map_one_after_the_other():
    layer, x = hierarchy(quant_resi=0.0).eval(), normal(2, 8, 4, 4)
    residual = x.double()
    quantized, indices, loss = layer(x)
    for scale, found in zip((1, 2, 4), indices, strict=True):
        pooled = residual.unflatten(2, (scale, -1)).unflatten(4, (scale, -1)).mean((3, 5)).movedim(1, -1)
        distances = (pooled.unsqueeze(-2) - layer.vq.codebook.double()).square().sum(-1)
        assert torch.equal(found, distances.argmin(-1))
        codewords = layer.vq.codebook.double()[found].movedim(-1, 1)
        size = (4, 4)
        residual = residual - F.interpolate(codewords, size=size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(quantized.double(), x.double() - residual, rtol=1e-5, atol=1e-5)
    assert loss == 0


def test_padding_of_a_map_changes_nothing():
    layer, mask = hierarchy().eval(), torch.ones(2, 4, 4, dtype=torch.bool)
    mask[1, 2:] = False
    x = normal(2, 8, 4, 4)
    first = layer(x, mask=mask)
    second = layer(x.masked_fill(~mask.unsqueeze(1), float("nan")), mask=mask)
    for got, want in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert torch.equal(got, want)
    assert (first[1][-1] >= 0).equal(mask)
    assert not first[0].movedim(1, -1)[~mask].any()


def test_scales_that_are_left_out_in_training():
    layer, x = hierarchy(nested_dropout=1.0), normal(2, 8, 4, 4)
    cutoffs = {layer(x, return_cutoff=True)[3] for _ in range(20)}
    assert cutoffs == {0, 1}
    assert layer.eval()(x, return_cutoff=True)[3] is None


def test_a_map_of_another_size():
    layer = hierarchy().eval()
    x = normal(2, 8, 6, 8)
    quantized, indices, _ = layer(x)
    output = layer.get_output_from_indices(indices, full_shape=(6, 8))
    torch.testing.assert_close(output, quantized)
    assert layer.decode(indices).shape == (2, 8, 4, 4)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"scales": ()}, "scales"),
        ({"scales": (2, 1)}, "scales"),
        ({"scales": (0, 1)}, "scales"),
        ({"scales": ((1, 2, 3),)}, "scales"),
        ({"scales": 4}, "scales"),
        ({"scales": (1, 2.5)}, r"scales\[1\]"),
        ({"codebook_size": (8, 16, 16)}, "shared_codebook"),
        ({"codebook_size": (8, 16), "shared_codebook": False}, "codebook_size"),
        ({"nested_dropout": 2.0}, "nested_dropout"),
        ({"accept_3d_fmap": True}, "accept_3d_fmap"),
    ],
)
def test_a_hierarchy_that_cannot_be_made(options, name):
    with pytest.raises(ValueError, match=name):
        hierarchy(**options)


def test_input_that_does_not_fit_a_hierarchy():
    layer = hierarchy()
    for shape, message in (((2, 7, 4, 4), "x .*8.*7"), ((2, 8, 4), "x .*4 dimensions")):
        with pytest.raises(ValueError, match=f"HierarchicalVQ: {message}"):
            layer(normal(*shape))
    with pytest.raises(ValueError, match="decode"):
        layer(normal(2, 8, 4, 4), indices=torch.zeros(2, 4, 4))
    with pytest.raises(ValueError, match="3 tensors"):
        layer.decode((torch.zeros(2, 1, 1, dtype=torch.long),))
