"""VectorQuantize without other layers: results and gradients, codewords and their revival, masks, layouts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from uefl_kernels import vq_assign
from uefl_kernels.nn import LossBreakdown, ResidualVQ, VectorQuantize

from .conftest import normal
from .nn_layers import KINDS, layer, state

# --- results and gradients ---------------------------------------------------------------------------------


def test_output_is_the_codeword_to_the_bit():
    for rotation in (True, False):
        vq = layer(rotation_trick=rotation)
        x, codewords = normal(5, 7, 8).requires_grad_(), vq.codebook.clone()
        quantized, indices, _ = vq(x)
        assert torch.equal(quantized, codewords[indices])
        assert torch.equal(indices, vq_assign(x, codewords).squeeze(-1))


def test_straight_through_gradient_and_commitment():
    vq, x, weight = (
        layer(rotation_trick=False, commitment_weight=0.3),
        normal(40, 8).requires_grad_(),
        normal(40, 8, seed=1),
    )
    quantized, _, loss = vq(x)
    ((quantized * weight).sum() + loss).backward()
    expected = weight + 0.3 * 2 / x.numel() * (x - quantized).detach()
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(loss, 0.3 * F.mse_loss(x, quantized))


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rotation_gradient_equals_the_rotation_matrix(dtype, drawn):
    vq, x, weight = (
        layer(commitment_weight=0.0, freeze_codebook=True, stochastic_sample_codes=drawn),
        normal(30, 8, dtype=dtype),
        normal(30, 8, seed=1, dtype=dtype),
    )
    x.requires_grad_()
    quantized, _, _ = vq(x)
    (quantized * weight).sum().backward()
    for row, code, g, got in zip(
        x.detach().double(), quantized.detach().double(), weight.double(), x.grad.double(), strict=True
    ):
        u, v = row / row.norm(), code / code.norm()
        w = (u + v) / (u + v).norm()
        scaled = (
            code.norm() / row.norm() * (torch.eye(8, dtype=torch.float64) - 2 * w.outer(w) + 2 * v.outer(u))
        )
        torch.testing.assert_close(scaled @ row, code, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got, scaled.T @ g, rtol=1e-5, atol=1e-6)


def test_rotation_of_a_zero_vector_is_finite():
    x = torch.zeros(3, 8, requires_grad=True)
    vq = layer()
    codewords = vq.codebook.clone()
    quantized, indices, loss = vq(x)
    (quantized.sum() + loss).backward()
    assert torch.equal(quantized, codewords[indices])
    assert x.grad.isfinite().all()


def test_learned_codewords_get_the_gradient_of_the_loss():
    vq, x = layer(learnable_codebook=True, commitment_weight=0.5), normal(40, 8).requires_grad_()
    quantized, indices, loss = vq(x)
    (quantized.sum() + loss).backward()
    a, b = x.detach().clone().requires_grad_(), vq.codebook.detach().clone().requires_grad_()
    expected = 0.5 * F.mse_loss(b[indices], a)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(vq._codebook.embed.grad[0], b.grad)
    assert "_codebook.embed" in dict(vq.named_parameters())
    assert not layer().codebook.requires_grad


def test_averages_do_not_disturb_the_backward_pass():
    """Codewords move in place between forward and backward.

    The gradient uses the chosen codewords.
    """
    gradients = []
    for freeze in (True, False):
        vq, x = (
            layer(rotation_trick=False, decay=0.0, threshold_ema_dead_code=0 if freeze else 2),
            normal(40, 8).requires_grad_(),
        )
        vq(x, freeze_codebook=freeze)[2].backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_projections_learn_also_from_data_without_gradient():
    vq = layer(**KINDS["projected"])
    vq(normal(40, 8))[0].sum().backward()
    assert vq.project_in.weight.grad.any()


def test_eval_neither_learns_nor_routes():
    for kind in KINDS.values():
        vq = layer(threshold_ema_dead_code=2, **kind).eval()
        before = state(vq)
        quantized, _, loss = vq(normal(40, 8).requires_grad_())
        assert loss.item() == 0
        assert not loss.requires_grad
        assert quantized.requires_grad == (vq.has_projections or vq.learnable_codebook)
        assert all(torch.equal(value, before[name]) for name, value in state(vq).items())


def test_loss_breakdown():
    vq = layer(commitment_weight=0.25)
    *_, loss, terms = vq(normal(40, 8), return_loss_breakdown=True)
    assert isinstance(terms, LossBreakdown)
    torch.testing.assert_close(loss, terms.commitment * 0.25)
    assert [t.item() for t in terms[1:]] == [0, 0, 0]


# --- codewords --------------------------------------------------------------------------------------------


def test_one_average_by_hand():
    vq, x = layer(decay=0.75, eps=1e-3), normal(60, 8)
    codewords = vq.codebook.clone()
    indices = vq(x)[1]
    one_hot = F.one_hot(indices, 10).double()
    size = 0.75 + 0.25 * one_hot.sum(0)
    total = 0.75 * codewords.double() + 0.25 * one_hot.T @ x.double()
    smooth = (size + 1e-3) / (size.sum() + 10 * 1e-3) * size.sum()
    torch.testing.assert_close(vq.codebook.double(), total / smooth[:, None], rtol=1e-6, atol=1e-7)


def test_orthogonal_codewords_take_an_optimizer():
    """First the averages move the codewords, and then a step of the optimizer.

    The gradient of this step is taken at the codewords before the averages moved them.
    """
    options = {"orthogonal_reg_weight": 0.1}
    optimized = layer(
        **options, in_place_codebook_optimizer=lambda codewords: torch.optim.SGD(codewords, 0.5)
    )
    averaged, x = layer(**options), normal(40, 8)
    codewords = averaged.codebook.detach().clone().requires_grad_()
    optimized(x), averaged(x)
    nearest = torch.cdist(x, codewords.detach()).argmin(-1)
    (gradient,) = torch.autograd.grad((codewords[nearest] - x).square().mean(), codewords)
    torch.testing.assert_close(optimized.codebook, averaged.codebook - 0.5 * gradient)


def test_accumulated_batches_equal_one_batch():
    whole, parts = layer(), layer()
    x = normal(60, 8)
    whole(x)
    for batch, accumulate in ((x[:25], True), (x[25:40], True), (x[40:], False)):
        parts(batch, accum_ema_update=accumulate)
    torch.testing.assert_close(state(parts), state(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_dead_codewords_move_to_distinct_rows(kind):
    vq, x = layer(threshold_ema_dead_code=2, decay=0.0, codebook_size=30, **KINDS[kind]), normal(50, 8)
    seen = vq.project_in(x).detach().unflatten(-1, (vq.heads, -1))
    seen = F.normalize(seen, dim=-1) if kind == "cosine" else seen
    vq(x)
    for codebook, counts in enumerate(vq.counts.view(-1, 30)):
        rows = (seen[:, codebook] if kind == "per head" else seen.flatten(0, 1)).contiguous()
        revived = vq._codebook.embed[codebook].detach()[counts == 0]
        hits = (revived[:, None] - rows).abs().amax(-1) < 1e-6
        assert len(revived) > 0
        assert hits.any(1).all()
        assert len(set(hits.int().argmax(1).tolist())) == len(revived)
        assert (vq._codebook.cluster_size[codebook][counts == 0] == 2).all()
        assert torch.equal(vq._codebook.embed_avg[codebook][counts == 0], 2 * revived)


def test_more_dead_codewords_than_rows():
    """Each row replaces one random dead codeword, and later batches replace the other dead codewords."""
    vq = layer(threshold_ema_dead_code=1, decay=0.0, codebook_size=100, ema_update=False)
    x, start = normal(7, 8), vq.codebook.clone()
    vq(x)
    changed = (vq.codebook != start).any(-1)
    assert changed.sum() == 7
    assert {tuple(r) for r in vq.codebook[changed].tolist()} == {tuple(r) for r in x.tolist()}
    for step in range(60):
        vq(normal(7, 8, seed=step))
    assert (vq.codebook != start).any(-1).sum() > 80


def test_revival_draws_rows_from_the_whole_batch():
    vq, x = (
        layer(threshold_ema_dead_code=1, decay=0.0, codebook_size=2),
        torch.arange(1000.0)[:, None].expand(1000, 8) + 1,
    )
    taken = []
    for seed in range(60):
        torch.manual_seed(seed)
        vq.codebook = torch.stack([torch.zeros(8), torch.full((8,), 1e6)])
        vq(x)
        taken.append(vq.codebook[1, 0].item())
    assert min(taken) < 200 < 800 < max(taken)


def test_a_codeword_at_the_threshold_is_not_revived():
    vq, x = layer(threshold_ema_dead_code=1, decay=0.0, codebook_size=30), normal(50, 8)
    indices = vq(x)[1]
    once = (vq.counts == 1).nonzero().flatten()
    assert len(once) > 3
    assert torch.allclose(vq.codebook[once], x[(indices == once[:, None]).int().argmax(1)], atol=1e-3)


def test_revival_skips_rows_that_are_not_finite():
    vq, x = layer(threshold_ema_dead_code=1, decay=0.0, codebook_size=30), normal(50, 8)
    x[::2, 3] = float("nan")
    vq(x)
    assert vq.codebook.isfinite().all()
    assert (vq.codebook[vq.counts == 0][:, None] == x[1::2]).all(-1).any(1).sum() > 5


def test_usage_and_perplexity():
    vq = layer(heads=4, codebook_dim=2)
    indices = vq(normal(40, 8))[1]
    assert torch.equal(vq.counts, torch.bincount(indices.flatten(), minlength=10))
    p = vq.counts.double()[vq.counts > 0] / 160
    assert vq.perplexity.item() == pytest.approx(math.exp(-(p * p.log()).sum()), rel=1e-6)
    assert vq.usage.item() == pytest.approx((vq.counts > 0).double().mean().item())
    vq = layer(heads=4, codebook_dim=2, separate_codebook_per_head=True).eval()
    vq(normal(40, 8))
    torch.testing.assert_close(vq.perplexity, torch.special.entr(vq.counts / 40).sum(-1).exp())
    assert vq.usage.shape == (4,)
    assert vq.counts.sum(-1).tolist() == [40] * 4
    vq(normal(0, 8))
    assert vq.perplexity.tolist() == [1] * 4


def test_kmeans_init():
    centers = torch.eye(8)[:4] * 10
    x = centers.repeat(50, 1) + 0.1 * normal(200, 8)
    vq = layer(codebook_size=4, kmeans_init=True, freeze_codebook=True).eval()
    best = min(
        (
            vq := layer(seed, codebook_size=4, kmeans_init=True).eval(),
            vq(x),
            (vq.codebook[vq(x)[1]] - x).square().mean(),
        )[2]
        for seed in range(8)
    )
    assert best < 0.02
    before = vq.codebook.clone()
    vq(normal(30, 8))
    assert torch.equal(vq.codebook, before)
    assert vq.state_dict()["_codebook.initted"].item()


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cosine_sim": True}, {"heads": 2, "codebook_dim": 4, "separate_codebook_per_head": True}],
)
def test_kmeans_init_does_not_wait_for_the_device(options):
    """Fake tensors have no values, so the test fails if the code reads a value and waits for a GPU."""
    with FakeTensorMode():
        vq = layer(kmeans_init=True, **options)
        assert vq(torch.empty(5, 30, 8))[0].shape == (5, 30, 8)
    assert not any(module.waiting for module in vq.modules() if hasattr(module, "waiting"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "make", ["one", "residual", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_kmeans_init_refuses_what_is_not_finite(make, bad):
    """A refused batch changes neither the layer nor the random generator.

    The layer accepts the same batch if the bad row is masked.
    """
    options = {"dim": 8, "codebook_size": 5, "kmeans_init": True, "kmeans_iters": 1}
    module = ResidualVQ(num_quantizers=2, **options) if make == "residual" else layer(**options)
    run = module if make in ("one", "residual") else torch.compile(module, fullgraph=True, backend=make)
    x, before, drawn = normal(2, 9, 8), state(module), torch.get_rng_state()
    x[1, 4, 2] = bad
    with pytest.raises(RuntimeError, match=r"^(VectorQuantize|ResidualVQ): .*k-means.*NaN"):
        run(x)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in state(module).items())
    assert module(x, mask=x.isfinite().all(-1))[0].isfinite().all()
    assert all(value for name, value in state(module).items() if name.endswith("initted"))


def test_kmeans_init_waits_for_rows_and_accepts_few():
    vq = layer(kmeans_init=True)
    vq(torch.empty(0, 8))
    assert not vq._codebook.initted
    vq(normal(1, 3, 8), mask=torch.tensor([[True, False, True]]))
    assert vq._codebook.initted
    assert vq.codebook.isfinite().all()


# --- masks and layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "cosine"]
)  # with a mask, the loss uses the original input, as in the peer
def test_mask_is_the_same_as_leaving_rows_out(kind):
    options = {"kmeans_init": kind != "learnable", "codebook_size": 5} | KINDS[kind]
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(1)) < 0.6
    x, weight = normal(3, 40, 8), normal(3, 40, 8, seed=1)
    layers, gradients = (layer(**options), layer(**options)), []
    dirty = x.masked_fill(~mask[..., None], float("nan"))
    for vq, rows, given in ((layers[0], dirty, {"mask": mask}), (layers[1], x[mask], {})):
        rows = rows.clone().requires_grad_()
        torch.manual_seed(1)
        quantized, indices, loss = vq(rows, **given)
        weights = weight if given else weight[mask]
        ((quantized * weights).sum() + loss).backward()
        gradients.append((rows.grad[mask] if given else rows.grad, loss, indices[mask] if given else indices))
        if given:
            assert not quantized[~mask].any()
            assert (indices[~mask] == -1).all()
            assert not rows.grad[~mask].nan_to_num(7).any()
    if kind != "heads":  # there k-means draws the rows in another order
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for name, value in layers[0].state_dict().items():
            torch.testing.assert_close(value, layers[1].state_dict()[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(layers[0].counts, layers[1].counts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: layer(use_cosine_sim=True),
        lambda: layer(codebook_dim=3, layernorm_after_project_in=True),
        lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10, codebook_dim=3),
        lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10, codebook_dim=3, project_each=True),
        lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=10, diveq=True, threshold_ema_dead_code=1),
    ],
    ids=["cosine", "projected", "residual", "each", "diveq"],
)
def test_padding_of_nan_reaches_no_gradient(make):
    vq, mask = make(), torch.arange(40) < 30
    x = normal(3, 40, 8).masked_fill(~mask[:, None], torch.nan).requires_grad_()
    quantized, _, loss = vq(x, mask=mask.expand(3, 40))
    (quantized.square().sum() + loss.sum()).backward()
    assert x.grad[:, :30].isfinite().all()
    assert (x.grad[:, 30:] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in vq.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    "options", [{"codebook_diversity_loss_weight": 1.0}, {"commitment_use_cross_entropy_loss": True}], ids=str
)
def test_losses_of_assignments_leave_padding_out(options):
    """This differs from the peer, which includes the padding in the diversity."""
    vq, x, mask = layer(freeze_codebook=True, **options), normal(3, 40, 8), torch.arange(40) < 17
    loss = vq(x.masked_fill(~mask[:, None], torch.nan), mask=mask.expand(3, 40))[2]
    torch.testing.assert_close(loss, vq(x[:, :17])[2])


@pytest.mark.parametrize("kind", KINDS)
def test_mask_keeps_padding_out_of_the_codewords(kind):
    vq = layer(threshold_ema_dead_code=1, decay=0.0, codebook_size=30, **KINDS[kind])
    mask = torch.arange(40).expand(3, 40) < torch.tensor([[5], [0], [20]])
    x = normal(3, 40, 8).masked_fill(~mask[..., None], 1e9)
    vq(x, mask=mask)
    assert vq.codebook.abs().max() < 100
    assert vq.codebook.abs().amax(-1).min() > 0  # no revived codeword is padding
    assert vq.counts.sum() == 25 * vq.heads
    vq(x, mask=torch.zeros_like(mask))
    assert vq.codebook.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_agree(kind):
    maps = normal(2, 8, 5, 7)
    results = []
    for options, x, back in (
        ({"accept_image_fmap": True}, maps, lambda q: q.movedim(1, -1).reshape(-1, 8)),
        ({"channel_last": False}, maps.flatten(2), lambda q: q.movedim(1, -1).reshape(-1, 8)),
        ({}, maps.permute(0, 2, 3, 1), lambda q: q.reshape(-1, 8)),
        ({}, maps.permute(0, 2, 3, 1).reshape(-1, 8), lambda q: q),
    ):
        vq = layer(threshold_ema_dead_code=1, **options, **KINDS[kind])
        for _ in range(3):
            quantized, indices, loss = vq(x)
        assert quantized.shape == x.shape
        assert indices.shape == ((2, 5, 7) if x.dim() == 4 else (2, 35) if x.dim() == 3 else (70,)) + (
            (vq.heads,) if vq.heads > 1 else ()
        )
        results.append((back(quantized.detach()), indices.flatten(), loss.detach(), vq.codebook.detach()))
    for other in results[1:]:
        for got, want in zip(results[0], other, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"accept_image_fmap": True}, {"channel_last": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_output_from_indices_is_the_output(kind, options):
    vq = layer(**KINDS[kind], **options).eval()
    x = (
        normal(2, 8, 5, 7)
        if "accept_image_fmap" in options
        else normal(2, 8, 6)
        if options
        else normal(2, 6, 8)
    )
    mask = None if "accept_image_fmap" in options else torch.arange(6).expand(2, 6) < torch.tensor([[3], [6]])
    quantized, indices, _ = vq(x, mask=mask)
    output = vq.get_output_from_indices(indices)
    assert output.shape == quantized.shape
    torch.testing.assert_close(output, quantized, rtol=1e-6, atol=1e-7)
    if kind in ("shared", "cosine", "learnable", "per head"):
        assert torch.equal(vq.get_codes_from_indices(indices), output)


@pytest.mark.parametrize(
    "make",
    [
        lambda: VectorQuantize(8, 16),
        lambda: VectorQuantize(8, 16, commitment_weight=0.0),
        lambda: VectorQuantize(8, 16, freeze_codebook=True),
        lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16),
        lambda: ResidualVQ(dim=8, num_quantizers=3, codebook_size=16, beam_size=2),
    ],
)
def test_a_loss_without_gradients_can_be_called_backward_on(make):
    """As in the peer, ``backward`` works, although neither vectors nor averaged codewords need a gradient."""
    layer, x = make(), normal(2, 30, 8)
    layer(x)[2].sum().backward()
    assert x.grad is None
    assert not layer.eval()(x)[2].requires_grad
    with torch.no_grad():
        assert not layer.train()(x)[2].requires_grad


def test_channels_of_feature_maps_are_second_in_any_case():
    torch.manual_seed(0)
    vq, other = (VectorQuantize(8, 16, accept_image_fmap=True, channel_last=last) for last in (True, False))
    other.load_state_dict(vq.state_dict())
    x = normal(2, 8, 4, 5)
    for got, want in zip(other(x), vq(x), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(other.decode(other.encode(x)), vq.decode(vq.encode(x)))
