"""VectorQuantize: precision, compile, determinism, copies and state, errors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.config

from uefl_kernels.nn import ResidualVQ, SimVQ, VectorQuantize

from .conftest import no_waiting, normal
from .nn_layers import KINDS, layer, state

# --- precision, compile, determinism, state ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_half_precision(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer(threshold_ema_dead_code=1, **KINDS[kind]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quantized, _, loss = model(normal(40, 8))
    assert quantized.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    (quantized.float().sum() + loss).backward()
    assert model[0].weight.grad.isfinite().all()
    model = model.to(torch.bfloat16)
    assert all(
        v.dtype not in (torch.bfloat16, torch.float16)
        for name, v in model.state_dict().items()
        if "_codebook" in name
    )
    x = normal(40, 8, dtype=torch.bfloat16).requires_grad_()
    quantized, _, loss = model(x)
    (quantized.sum() + loss).backward()
    assert quantized.dtype == x.grad.dtype == torch.bfloat16
    assert model.to(torch.float64)[1].codebook.dtype == torch.float64


def test_half_precision_chooses_the_nearest_of_the_values_given():
    vq, x = layer(freeze_codebook=True), normal(200, 8, dtype=torch.bfloat16)
    assert torch.equal(vq(x)[1], vq(x.float())[1])


@pytest.mark.parametrize(
    ("kind", "backend", "masked"),
    [  # a mask needs a second graph, so with inductor each kind runs either with or without a mask
        ("heads", "aot_eager", (False, False, True)),
        *(
            pytest.param(kind, "inductor", (i % 2 == 0,) * 3, marks=pytest.mark.slow)
            for i, kind in enumerate(KINDS)
        ),
    ],
)
@torch._inductor.config.patch(fallback_random=True)  # compiled code draws the same numbers
def test_compiles_without_a_break(kind, backend, masked):
    """A graph break would also synchronize with the device.

    Moving averages and revival compile without a break, too.
    """
    torch._dynamo.reset()  # dynamo limits the versions of a function, and all kinds share its functions
    plain, compiled = (layer(threshold_ema_dead_code=1, **KINDS[kind]) for _ in range(2))
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    mask = torch.arange(20).expand(2, 20) < 15
    for step, given in enumerate({"mask": mask} if with_mask else {} for with_mask in masked):
        gradients = []
        for call in (plain, run):
            x = normal(2, 20, 8, seed=step).requires_grad_()
            torch.manual_seed(step)
            quantized, indices, loss = call(x, **given)
            (quantized.square().sum() + loss).backward()
            gradients.append((x.grad, indices, loss.detach()))
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)


def test_same_seed_same_bits():
    states = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        vq = layer(kmeans_init=True, threshold_ema_dead_code=1, heads=2, codebook_dim=4)
        for step in range(4):
            vq(normal(3000, 8, seed=step))
        states.append(state(vq))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_restored_layers_continue_alike(kind):
    first = layer(threshold_ema_dead_code=1, kmeans_init=True, **KINDS[kind])
    first(normal(40, 8))
    restored = layer(1, threshold_ema_dead_code=1, kmeans_init=True, **KINDS[kind])
    restored.load_state_dict(first.state_dict())
    for other in (copy.deepcopy(first), restored):
        start = copy.deepcopy(first)
        for vq in (start, other):
            torch.manual_seed(7)
            vq(normal(40, 8, seed=1))
        assert all(torch.equal(value, start.state_dict()[name]) for name, value in other.state_dict().items())


def test_names_in_the_state():
    assert {
        k: list(v.shape)
        for k, v in layer(heads=2, codebook_dim=3, separate_codebook_per_head=True).state_dict().items()
    } == {
        "project_in.weight": [6, 8],
        "project_in.bias": [6],
        "project_out.weight": [8, 6],
        "project_out.bias": [8],
        "_codebook.initted": [],
        "_codebook.cluster_size": [2, 10],
        "_codebook.embed_avg": [2, 10, 3],
        "_codebook.embed": [2, 10, 3],
    }


def test_codebook_can_be_set_and_read():
    for kind in ("shared", "per head"):
        vq = layer(**KINDS[kind])
        codewords = normal(*vq.codebook.shape, seed=3)
        vq.codebook = codewords
        assert torch.equal(vq.codebook, codewords)
        with pytest.raises(ValueError, match=r"codebook.*\[.*10, .\].*\[3, 3\]"):
            vq.codebook = torch.zeros(3, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_rows_that_are_not_finite(kind):
    vq = layer(threshold_ema_dead_code=1, **KINDS[kind])
    quantized, indices, loss = vq(torch.empty(0, 8))
    assert quantized.shape == (0, 8)
    assert indices.shape[0] == 0
    assert loss.item() == 0
    vq(torch.full((4, 8), float("nan")))


@pytest.mark.parametrize(
    "options",
    [
        {"codebook_diversity_loss_weight": 1.0},
        {"stochastic_sample_codes": True},
        {"commitment_use_cross_entropy_loss": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_no_rows_have_a_loss_of_zero(options):
    vq, x = layer(**options), torch.empty(2, 0, 8, requires_grad=True)
    quantized, _, loss = vq(x)
    (quantized.sum() + loss).backward()
    assert loss == 0


@pytest.mark.parametrize("topk", [1, 4])
def test_distances_do_not_follow_autocast(topk):
    """bfloat16 cannot tell these codewords apart: they are far from zero and close together."""
    vq = VectorQuantize(8, 500, stochastic_sample_codes=True).eval()
    vq.codebook, x = 20 + normal(500, 8), 20 + normal(40, 8, seed=1)
    found = vq(x, topk=topk)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vq(x, topk=topk)[1], found)
    drawn = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            drawn.append(vq.train()(x, freeze_codebook=True)[1])
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimVQ(8, 64),
        lambda: VectorQuantize(
            8,
            64,
            vq_bridge=torch.nn.Linear(8, 8),
            learnable_codebook=True,
            ema_update=False,
            codebook_diversity_loss_weight=1.0,
        ),
        lambda: ResidualVQ(dim=8, num_quantizers=2, codebook_size=64, implicit_neural_codebook=True),
    ],
    ids=["SimVQ", "vq_bridge", "implicit_neural_codebook"],
)
def test_codewords_that_a_module_makes_do_not_follow_autocast(make):
    torch.manual_seed(0)
    found, model = [], make()
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(
                model(normal(400, 8), **({} if isinstance(model, SimVQ) else {"freeze_codebook": True}))
            )
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_optimizer_of_replaced_codewords_is_an_error():
    """The optimizer would move nothing."""
    vq = layer(
        learnable_codebook=True,
        in_place_codebook_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    vq.load_state_dict(state(vq), assign=True)
    with pytest.raises(RuntimeError, match=r"in_place_codebook_optimizer.*replaced"):
        vq(normal(30, 8))
    vq.in_place_codebook_optimizer = torch.optim.SGD(vq._codebook.parameters(), lr=0.1)
    before = state(vq)["_codebook.embed"]
    vq(normal(30, 8))
    assert not torch.equal(vq._codebook.embed, before)


def test_optimizer_of_a_frozen_layer_moves_nothing():
    vq = layer(
        learnable_codebook=True,
        in_place_codebook_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ).requires_grad_(False)
    before = state(vq)
    quantized, _, loss = vq(normal(30, 8))
    loss.backward()
    assert all(parameter.grad is None for parameter in vq.parameters())
    assert torch.equal(vq._codebook.embed, before["_codebook.embed"])
    assert torch.equal(quantized, vq.eval()(normal(30, 8))[0])


def test_a_batch_of_nan_does_not_reach_the_averages():
    vq = layer()
    quantized, _, loss = vq(torch.full((4, 8), float("nan")))
    assert loss.isnan()
    assert quantized.isfinite().all()
    assert vq.codebook.isfinite().all()


def test_rows_of_nan_do_not_move_the_affine_map():
    x, maps = normal(40, 8), []
    for rows in (x, torch.cat([x, torch.full((4, 8), torch.nan)])):
        vq = layer(affine_param=True)
        for _ in range(2):
            vq(rows)
        vq(torch.full((4, 8), torch.nan))  # no finite row
        maps.append((vq._codebook.batch_mean, vq._codebook.batch_variance))
    torch.testing.assert_close(*maps)


def test_an_affine_map_begins_with_the_first_batch_that_has_rows():
    found = []
    for batches in ([normal(40, 8)], [normal(0, 8), torch.full((4, 8), torch.nan), normal(40, 8)]):
        vq = layer(affine_param=True, freeze_codebook=True)
        for rows in batches:
            vq(rows)
        found.append(state(vq))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_decays_of_an_affine_map():
    vq = layer(affine_param=True, affine_param_batch_decay=0.0, affine_param_codebook_decay=1.0)
    codewords, rows = vq.codebook.clone(), normal(40, 8, seed=1)
    for seed in range(2):
        vq(normal(40, 8, seed=seed))
    for name, values in (("codebook", codewords), ("batch", rows)):
        for moment, expected in (("mean", values.mean(0)), ("variance", values.var(0, correction=0))):
            torch.testing.assert_close(getattr(vq._codebook, f"{name}_{moment}")[0, 0], expected)


def test_statistics_of_an_affine_map_that_a_checkpoint_lacks():
    vq = layer(affine_param=True)
    new = {name: value for name, value in state(vq).items() if "batch_" not in name}
    new["_codebook.codebook_mean"] += 5  # the peer leaves it unset until the first batch
    other = layer(affine_param=True)
    other.load_state_dict(new)
    assert all(torch.equal(value, state(vq)[name]) for name, value in state(other).items())
    other = layer(affine_param=True).to("meta")
    other.load_state_dict(new, assign=True)
    assert torch.equal(other(normal(40, 8))[0], vq(normal(40, 8))[0])
    other = layer(affine_param=True)
    new = {name: value for name, value in state(vq).items() if "batch_" not in name}
    with pytest.raises(RuntimeError, match="batch_mean"):
        other.load_state_dict(new)
    for flag in ("yes", torch.zeros(3)):
        with pytest.raises(RuntimeError, match="codebook_mean_needs_init"):
            other.load_state_dict(new | {"_codebook.codebook_mean_needs_init": flag})


@pytest.mark.parametrize(
    "options",
    [
        {"stochastic_sample_codes": True},
        {"stochastic_sample_codes": True, "straight_through": True, "rotation_trick": False},
        {"commitment_use_cross_entropy_loss": True},
        {"cosine_search": True},
    ],
    ids=["drawn", "straight through", "cross entropy", "cosine search"],
)
def test_float64_rows_and_float32_codewords(options):
    quantized, _, loss = layer(**options)(normal(20, 8).double())
    assert quantized.dtype == torch.float64
    assert loss.isfinite()


def test_implicit_codewords_stay_float32_in_half_precision():
    vq = ResidualVQ(dim=8, codebook_size=6, num_quantizers=2, implicit_neural_codebook=True).bfloat16()
    assert {parameter.dtype for parameter in vq.mlps.parameters()} == {torch.float32}
    assert vq(normal(20, 8).bfloat16())[0].dtype == torch.bfloat16


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codebok_dim": 3}, TypeError, "'codebok_dim'"),
        ({"codebook_size": 0}, ValueError, "codebook_size.*0"),
        ({"dim": 8.0}, ValueError, r"dim.*8\.0"),
        ({"decay": "0.8"}, ValueError, r"decay.*'0\.8'"),
        ({"threshold_ema_dead_code": -1}, ValueError, "threshold_ema_dead_code.*-1"),
        ({"dim": True}, ValueError, "dim.*True"),
        ({"kmeans_iters": 0}, ValueError, "kmeans_iters.*0"),
        ({"kmeans_iters": 2.5}, ValueError, r"kmeans_iters.*2\.5"),
        ({"heads": -1}, ValueError, "heads.*-1"),
        ({"decay": 1.5}, ValueError, r"decay.*1\.5"),
        ({"commitment_weight": -1.0}, ValueError, r"commitment_weight.*-1\.0"),
        ({"eps": float("nan")}, ValueError, "eps.*nan"),
        (
            {"learnable_codebook": True, "ema_update": True},
            ValueError,
            "learnable_codebook=True .*ema_update=True",
        ),
        (
            {"learnable_codebook": True, "use_cosine_sim": True},
            ValueError,
            "learnable_codebook=True .*use_cosine_sim=True",
        ),
        (
            {"accept_image_fmap": True, "accept_3d_fmap": True},
            ValueError,
            "accept_image_fmap.*accept_3d_fmap",
        ),
        ({"straight_through": True}, ValueError, "straight_through.*rotation_trick=False"),
        (
            {"learnable_codebook": True, "straight_through": True},
            ValueError,
            "learnable_codebook=True .*straight_through=True",
        ),
        ({"directional_reparam": True}, ValueError, "set threshold_ema_dead_code above 0"),
        ({"sync_update_v": 0.5}, ValueError, "sync_update_v.*learnable_codebook=True"),
        (
            {"in_place_codebook_optimizer": torch.optim.SGD},
            ValueError,
            "sync_update_v.*learnable_codebook=True",
        ),
        ({"sync_update_v": 2}, ValueError, "sync_update_v.*2"),
        (
            {"affine_param": True, "use_cosine_sim": True},
            ValueError,
            "affine_param=True.*use_cosine_sim=True",
        ),
        ({"orthogonal_reg_weight": -1}, ValueError, "orthogonal_reg_weight.*-1"),
    ],
)
def test_constructor_refuses(options, error, message):
    with pytest.raises(error, match=message):
        layer(**options)


def test_arguments_at_the_defaults_of_the_peer_pass():
    layer(affine_param=False, sync_kmeans=True, orthogonal_reg_weight=0, straight_through=False)(
        normal(4, 8), lens=None, topk=None
    )


@pytest.mark.parametrize(
    ("x", "given", "error", "message"),
    [
        (torch.zeros(4, 7), {}, ValueError, r"^VectorQuantize: x .*\[\.\.\., 8\].*\[4, 7\]"),
        (torch.zeros(8), {}, ValueError, r"x .*\[\.\.\., 8\].*\[8\]"),
        (torch.zeros(4, 8).long(), {}, TypeError, r"x .*torch\.int64.*float32"),
        (torch.zeros(4, 8).to_sparse(), {}, TypeError, r"x .*sparse_coo.*to_dense\(\)"),
        (torch.zeros(4, 8), {"mask": [True] * 4}, TypeError, r"mask.*torch\.Tensor.*list"),
        ([1.0], {}, TypeError, r"x .*torch\.Tensor.*list"),
        (torch.zeros(4, 8), {"mask": torch.ones(4)}, TypeError, r"mask.*torch\.float32.*bool"),
        (torch.zeros(4, 8), {"mask": torch.ones(3).bool()}, ValueError, r"mask.*\[4\].*x \[4, 8\].*\[3\]"),
        (torch.zeros(4, 8), {"topk": 0}, ValueError, "topk.*0"),
        (torch.zeros(4, 8), {"lens": torch.ones(4)}, TypeError, r"lens.*torch\.float32.*int64.*int32"),
        (torch.zeros(4, 8), {"lens": torch.ones(4).long()}, ValueError, r"lens.*\[B\].*x"),
        (
            torch.zeros(4, 3, 8),
            {"lens": torch.ones(4).long(), "mask": torch.ones(4, 3).bool()},
            ValueError,
            "mask.*lens",
        ),
        (torch.zeros(4, 8), {"maks": None}, TypeError, "'maks'"),
        (torch.zeros(4, 8), {"sample_codebook_temp": "a"}, ValueError, "sample_codebook_temp.*'a'.*number"),
        (torch.zeros(4, 8), {"indices": torch.zeros(3).long()}, ValueError, r"indices.*\[4\].*\[3\]"),
        (torch.zeros(4, 8), {"codebook_transform_fn": 3}, ValueError, "codebook_transform_fn.*3.*function"),
        (
            torch.zeros(4, 8),
            {"codebook_transform_fn": lambda codewords: codewords[:, None]},
            ValueError,
            r"codebook_transform_fn.*4 rows.*\[1, 1, 10, 8\]",
        ),
        (torch.zeros(4, 8, device="meta"), {}, ValueError, "^VectorQuantize: x .*meta.*cpu"),
    ],
)
def test_forward_refuses(x, given, error, message):
    vq = layer()
    before = state(vq)
    with pytest.raises(error, match=message):
        vq(x, **given)
    assert all(torch.equal(value, before[name]) for name, value in state(vq).items())


@pytest.mark.parametrize("weight", [3, torch.ones(3), lambda sums, sizes: None])
def test_weights_of_a_batch_that_do_not_fit(weight):
    with pytest.raises(ValueError, match=r"^VectorQuantize: ema_update_weight"):
        layer()(normal(4, 8), ema_update_weight=weight)


def test_images_and_channels():
    vq = layer(accept_image_fmap=True)
    with pytest.raises(ValueError, match=r"x .*\[B, 8, H, W\].*\[2, 8, 5\]"):
        vq(torch.zeros(2, 8, 5))
    with pytest.raises(ValueError, match=r"mask.*accept_image_fmap"):
        vq(torch.zeros(2, 8, 5, 5), mask=torch.ones(2, 5, 5).bool())
    with pytest.raises(ValueError, match=r"x .*\[B, 8, \.\.\.\].*\[2, 5, 8\]"):
        layer(channel_last=False)(torch.zeros(2, 5, 8))


def test_indices_are_checked():
    vq = layer(heads=2, codebook_dim=4)
    with pytest.raises(TypeError, match=r"indices.*torch\.float32"):
        vq.get_codes_from_indices(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"indices.*\[\.\.\., 2\].*2 heads.*\[3, 5\]"):
        vq.get_output_from_indices(torch.zeros(3, 5).long())


def test_codewords_that_are_not_finite():
    vq = layer()
    vq._codebook.embed[0, 3, 2] = float("inf")
    with pytest.raises(RuntimeError, match=r"codebook.*NaN"):
        vq(normal(4, 8))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_wait_for_the_gpu(kind):
    vq, mask = (
        layer(threshold_ema_dead_code=1, **KINDS[kind]).cuda(),
        (torch.arange(20) < 15).expand(3, 20).cuda(),
    )
    x = normal(3, 20, 8).cuda().requires_grad_()
    vq(x)
    with no_waiting():
        for given in ({}, {"mask": mask}):
            quantized, _, loss = vq(x, **given)
            (quantized.sum() + loss).backward()
