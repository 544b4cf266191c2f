"""Searches without an op: the k nearest codewords, temperature zero, shared and frozen codebooks."""

from __future__ import annotations

import pytest
import torch

from uefl_kernels.nn import FSP, FSQ, ResidualVQ
from uefl_kernels.nn._losses import orthogonal
from uefl_kernels.nn._shared import directional

from .conftest import normal
from .nn_layers import layer, state

SCALES = {
    "offset": (1.0, 1e4),
    "tiny": (1e-30, 0.0),
    "small": (1e-6, 0.0),
    "large": (1e30, 0.0),
    "small, offset": (1e-3, 10.0),
}


def distances(x, codewords):
    return (x.double().unsqueeze(-2) - codewords.double()).square().sum(-1)


def scaled(name, **options):
    """Return a layer and rows ``[2, 60, 8]`` of one scale and place."""
    scale, place = SCALES[name]
    vq = layer(codebook_size=40, **options)
    with torch.no_grad():
        vq._codebook.embed.copy_(normal(1, 40, 8, seed=1) * scale + place)
    return vq, normal(2, 60, 8, seed=2) * scale + place


@pytest.mark.parametrize("name", SCALES)
def test_the_k_nearest_at_every_scale(name):
    vq, x = scaled(name)
    indices = vq.eval()(x, topk=5)[1]
    want = distances(x, vq.codebook)
    assert torch.equal(want.gather(-1, indices), want.sort(-1).values[..., :5])


def test_the_k_nearest_of_rows_far_from_the_codewords():
    vq = layer(codebook_size=40)
    x = normal(2, 60, 8, seed=2) * torch.logspace(0, 5, 60).unsqueeze(-1)
    want = distances(x, vq.codebook)
    assert torch.equal(want.gather(-1, vq.eval()(x, topk=5)[1]), want.sort(-1).values[..., :5])


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(
    "options",
    [
        {"stochastic_sample_codes": True, "sample_codebook_temp": 0},
        {"straight_through": True, "rotation_trick": False},
    ],
    ids=["temperature 0", "straight through"],
)
def test_codewords_that_are_not_drawn_are_nearest(name, options):
    vq, x = scaled(name, ema_update=False, **options)
    indices = vq(x)[1]
    want = distances(x, vq.codebook)
    assert torch.equal(want.gather(-1, indices.unsqueeze(-1)).squeeze(-1), want.amin(-1))


def test_temperature_zero_of_a_call_is_the_plain_layer():
    options = {"straight_through": True, "rotation_trick": False}
    drawn, plain = layer(stochastic_sample_codes=True, **options), layer(rotation_trick=False)
    found = []
    for vq, call in ((drawn, {"sample_codebook_temp": 0.0}), (plain, {})):
        x = normal(3, 20, 8).requires_grad_()
        quantized, indices, loss = vq(x, **call)
        ((quantized * normal(3, 20, 8, seed=1)).sum() + loss).backward()
        found.append((quantized.detach(), indices, loss.detach(), x.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


# --- the orthogonal loss of the codewords of this pass -----------------------------------------------------

ACTIVE = {"orthogonal_reg_weight": 1.0, "orthogonal_reg_active_codes_only": True, "ema_update": False}


@pytest.mark.parametrize("call", [{"topk": 3}, {"freeze_codebook": True}, {}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_orthogonal_loss_of_the_chosen_codewords(call, masked):
    vq = layer(codebook_size=40, **ACTIVE)
    vq(normal(1, 3, 8))  # this pass chooses other codewords than the next one
    mask = torch.arange(6).expand(2, 6) < torch.tensor([[2], [5]]) if masked else None
    embed = vq._codebook.embed.detach().clone()
    _, indices, _, terms = vq(normal(2, 6, 8, seed=5), mask=mask, return_loss_breakdown=True, **call)
    chosen = indices[indices >= 0].unique()
    assert len(chosen) > 3
    torch.testing.assert_close(terms.orthogonal_reg.detach(), orthogonal(embed[:, chosen], None, None))


def test_orthogonal_loss_in_a_region_that_runs_again():
    found = []
    for checkpointed in (False, True):
        vq = layer(codebook_size=40, **ACTIVE)
        total = torch.zeros(())
        for seed in range(2):  # the second pass has chosen other codewords when the first runs again
            x = normal(1, 5 + seed, 8, seed=seed)
            if checkpointed:
                loss = torch.utils.checkpoint.checkpoint(lambda x, vq=vq: vq(x)[2], x, use_reentrant=False)
            else:
                loss = vq(x)[2]
            total = total + loss
        total.backward()
        found.append(vq._codebook.embed.grad)
    torch.testing.assert_close(found[1], found[0])


# --- residuals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_cosine_sim": True}, {"threshold_ema_dead_code": 5}], ids=str)
@pytest.mark.parametrize("call", [{"freeze_codebook": True}, {}], ids=str)
def test_a_frozen_shared_codebook_stays(options, call):
    torch.manual_seed(0)
    shared = {"shared_codebook": True, "freeze_codebook": not call}
    rvq = ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, **shared, **options)
    with torch.no_grad():  # averages that do not belong to the codewords
        rvq.layers[0]._codebook.embed_avg.add_(1)
    before = state(rvq)
    x = normal(2, 20, 8).requires_grad_()
    quantized, _, losses = rvq(x, **call)
    (quantized.sum() + losses.sum()).backward()
    assert all(map(torch.equal, state(rvq).values(), before.values()))


def test_weights_of_the_losses_choose_the_beam():
    torch.manual_seed(0)
    rvq = ResidualVQ(
        dim=8, num_quantizers=2, codebook_size=6, beam_size=6, beam_score_quantizer_weights=[4.0, 1.0]
    ).eval()
    x, (first, second) = normal(60, 8), rvq.codebooks
    rest = x.unsqueeze(1) - first
    scores = 4 * distances(x, first).unsqueeze(-1) + distances(rest, second)
    best = scores.flatten(1).argmin(-1)
    assert torch.equal(rvq(x)[1], torch.stack([best // 6, best % 6], -1))


@pytest.mark.parametrize("options", [{"diveq": True}, {"commitment_weight": 0.0}], ids=str)
def test_beams_need_a_loss_to_compare(options):
    rvq = ResidualVQ(dim=8, num_quantizers=2, codebook_size=16, beam_size=2, **options)
    with pytest.raises(ValueError, match="beam_size"):
        rvq(normal(2, 10, 8))
    assert rvq.eval()(normal(2, 10, 8))[1].shape == (2, 10, 2)


def test_the_loss_of_the_k_nearest_moves_learned_codewords():
    vq = layer(learnable_codebook=True).eval()
    x = normal(2, 10, 8)
    indices, losses = vq(x, topk=3)[1:]
    losses.sum().backward()
    codewords = vq.codebook.detach().clone().requires_grad_()
    (x.unsqueeze(-2) - codewords[indices]).square().mean(-1).sum().backward()
    torch.testing.assert_close(vq._codebook.embed.grad[0], codewords.grad)


@pytest.mark.parametrize("shared", [False, True])
def test_optimizer_of_codewords_that_depend_on_earlier_ones(shared):
    torch.manual_seed(0)
    rvq = ResidualVQ(
        dim=8,
        num_quantizers=3,
        codebook_size=16,
        implicit_neural_codebook=True,
        shared_codebook=shared,
        in_place_codebook_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    x, before = normal(2, 40, 8).requires_grad_(), state(rvq)
    quantized, _, losses = rvq(x)
    (quantized.sum() + losses.sum()).backward()
    assert not torch.equal(rvq.layers[0].codebook, before["layers.0._codebook.embed"][0])
    assert x.grad.isfinite().all()


# --- noise and NaN -----------------------------------------------------------------------------------------


def test_noise_does_not_depend_on_strides():
    x = normal(2, 5, 4, 8)
    strided = x.movedim(-1, 1).contiguous().movedim(1, -1)
    noisy = FSQ([5, 5, 5, 5, 5, 5, 5, 5], preserve_symmetry=True, noise_dropout=0.5)
    for apply in (
        lambda x: noisy.maybe_apply_noise(x),
        lambda x: FSP([4] * 8)._perturbed(x.sigmoid())[0],
        lambda x: directional(x, x.flip(-1), 0.1),
    ):
        found = []
        for given in (x, strided):
            torch.manual_seed(0)
            found.append(apply(given))
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    "make", [lambda: FSQ([5, 4]), lambda: FSQ([5, 3], preserve_symmetry=True), lambda: FSP([5, 4])]
)
def test_nan_gets_the_first_level(make):
    found = make().eval()
    x = torch.tensor([[torch.nan, 3.0], [-9.0, 3.0]])
    quantized, indices = found(x)[:2]
    assert indices[0] == indices[1]
    assert quantized[0, 0].isnan()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"directional_reparam": True, "directional_reparam_variance": 0.1},
        {"orthogonal_reg_weight": 1.0, "orthogonal_reg_max_codes": 4, "ema_update": False},
        {"stochastic_sample_codes": True},
    ],
    ids=str,
)
def test_a_region_that_runs_again_draws_the_same(options, reentrant):
    # the first run revives codewords, which draws random numbers, and the second run does not
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        vqs = [layer(seed, threshold_ema_dead_code=0.5, **options) for seed in range(2)]

        def both(x, vqs=vqs):
            quantized, _, loss = vqs[0](x)
            quantized, _, more = vqs[1](quantized + x)
            return (quantized * normal(3, 20, 8, seed=4)).sum() + loss + more

        x = normal(3, 20, 8).requires_grad_()
        torch.manual_seed(1)
        run = torch.utils.checkpoint.checkpoint
        (run(both, x, use_reentrant=reentrant) if checkpointed else both(x)).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_losses_of_an_empty_batch_are_zero():
    vq = layer(codebook_diversity_loss_weight=1.0, commitment_use_cross_entropy_loss=True)
    assert vq(normal(0, 5, 8))[2] == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"affine_param": True}, {"stochastic_sample_codes": True}, {"kmeans_init": True}],
    ids=["plain", "affine", "drawn", "kmeans"],
)
@pytest.mark.parametrize("quantizers", [1, 2])
def test_updates_under_vmap_are_refused(options, quantizers):
    residual = ResidualVQ(dim=8, num_quantizers=quantizers, codebook_size=16, **options)
    vq, x = layer(**options) if quantizers == 1 else residual, normal(4, 2, 10, 8)
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap.*freeze_codebook"):
        torch.func.vmap(lambda x: vq(x)[0], randomness="different")(x)
    vq(x[0])
    vq.eval()
    torch.testing.assert_close(torch.func.vmap(lambda x: vq(x)[0])(x)[1], vq(x[1])[0])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("implicit", [False, True])
def test_vmap_in_evaluation(implicit, masked):
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, implicit_neural_codebook=implicit).eval()
    x = normal(4, 2, 10, 8)
    options = {"mask": torch.arange(10).expand(2, 10) < 6} if masked else {}
    found = torch.func.vmap(lambda x: rvq(x, **options)[:2])(x)
    for place, given in enumerate(x):
        quantized, indices, _ = rvq(given, **options)
        assert torch.equal(found[1][place], indices)
        torch.testing.assert_close(found[0][place], quantized)
