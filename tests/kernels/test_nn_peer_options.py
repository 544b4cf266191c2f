"""All other arguments of VectorQuantize, and classes built on it, against vector-quantize-pytorch.

Tolerances are the ones of test_nn_peer.
"""

from __future__ import annotations

import pytest
import torch

from uefl_kernels.nn import GroupedResidualVQ, ResidualSimVQ, ResidualVQ, SimVQ, VectorQuantize

from .conftest import normal

peer = pytest.importorskip(
    "vector_quantize_pytorch", reason="the peer, vector-quantize-pytorch, is not installed"
)

from .test_nn_peer import CLOSE, compare, pair, residual_pair, same_state  # noqa: E402


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


LEARNED = {"learnable_codebook": True, "ema_update": False}
OPTIONS = {
    "drawn": {"stochastic_sample_codes": True, "sample_codebook_temp": 0.7},
    "drawn heads": {"stochastic_sample_codes": True, "heads": 4, "codebook_dim": 4},
    "drawn per head": {
        "stochastic_sample_codes": True,
        "heads": 4,
        "codebook_dim": 4,
        "separate_codebook_per_head": True,
    },
    "drawn cosine": {"stochastic_sample_codes": True, "use_cosine_sim": True, "rotation_trick": False},
    "drawn, straight through": {
        "stochastic_sample_codes": True,
        "rotation_trick": False,
        "straight_through": True,
    },
    "straight through": {"rotation_trick": False, "straight_through": True, "heads": 2, "codebook_dim": 8},
    "orthogonal": {"orthogonal_reg_weight": 10, "orthogonal_reg_max_codes": 10},
    "orthogonal active": {
        "orthogonal_reg_weight": 3,
        "orthogonal_reg_active_codes_only": True,
        "ema_update": False,
    },
    "orthogonal per head": {
        "orthogonal_reg_weight": 3,
        "heads": 4,
        "codebook_dim": 4,
        "separate_codebook_per_head": True,
    },
    "own optimizer": {"in_place_codebook_optimizer": sgd, **LEARNED},
    "own optimizer, heads": {"in_place_codebook_optimizer": sgd, "heads": 2, "codebook_dim": 8, **LEARNED},
    "own optimizer, later": {
        "in_place_codebook_optimizer": sgd,
        "manual_in_place_optimizer_update": True,
        **LEARNED,
    },
    "own optimizer, orthogonal": {"in_place_codebook_optimizer": sgd, "orthogonal_reg_weight": 3},
    "own optimizer, orthogonal, fixed averages": {
        "in_place_codebook_optimizer": sgd,
        "orthogonal_reg_weight": 3,
        "ema_update": False,
    },
    "norm": {"codebook_dim": 6, "layernorm_after_project_in": True},
    "affine": {"affine_param": True},
    "affine learned": {"affine_param": True, "sync_update_v": 0.3, "rotation_trick": False, **LEARNED},
    "affine heads": {"affine_param": True, "heads": 4, "codebook_dim": 4, "separate_codebook_per_head": True},
    "sync_update_v": {"sync_update_v": 0.5, **LEARNED},
    # Without noise, because the peer draws other numbers for it if codewords are revived.
    "directional": {
        "directional_reparam": True,
        "threshold_ema_dead_code": 1e-9,
        "directional_reparam_variance": 0,
    },
    # Without moving averages, because the backward pass of the peer's distances reads the updated codewords.
    "cross entropy": {"commitment_use_cross_entropy_loss": True, "ema_update": False},
    "cross entropy heads": {
        "commitment_use_cross_entropy_loss": True,
        "heads": 2,
        "codebook_dim": 8,
        "ema_update": False,
    },
    "diversity": {
        "codebook_diversity_loss_weight": 0.5,
        "codebook_diversity_temperature": 3.0,
        "ema_update": False,
    },
    "diversity heads": {
        "codebook_diversity_loss_weight": 0.5,
        "heads": 2,
        "codebook_dim": 8,
        "ema_update": False,
    },
    "manual averages": {"manual_ema_update": True},
    "to the codewords": {"route_gradients_to_input": False, **LEARNED},
    "what changes nothing": {
        "sync_codebook": False,
        "sync_kmeans": False,
        "sample_codebook_temp": 0.3,
        "orthogonal_reg_max_codes": 8,
        "sync_affine_param": False,
        "affine_param_batch_decay": 0.5,
    },
}
# The peer's gumbel noise is drawn for the padding, too, and its codewords' optimizer sees the input before it
# is normalized.
MASKED = (
    "drawn",
    "straight through",
    "orthogonal",
    "own optimizer",
    "affine",
    "sync_update_v",
    "cross entropy",
)


@pytest.mark.parametrize("name", OPTIONS)
def test_same_results_and_codewords_over_training_steps(name):
    ours, theirs = pair(**OPTIONS[name])
    for step in range(4):
        compare(ours, theirs, normal(3, 40, 16, seed=step))
    if name == "manual averages":
        for layer in (ours, theirs):
            layer._codebook.update_ema()
        same_state(ours, theirs)
    if name == "own optimizer, later":
        for layer in (ours, theirs):
            layer.update_in_place_optimizer()
        same_state(ours, theirs)
    if "affine" not in name:  # the peer moves its averages outside training, too
        ours.eval(), theirs.eval()
        compare(ours, theirs, normal(3, 40, 16, seed=7))


@pytest.mark.parametrize("name", [name for name in MASKED if not OPTIONS[name].get("heads")])
def test_same_results_with_a_mask(name):
    ours, theirs = pair(**OPTIONS[name])
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(5)) < 0.7
    for step in range(3):
        compare(ours, theirs, normal(3, 40, 16, seed=step), mask=mask)


def test_lengths():
    ours, theirs = pair()
    for step in range(3):
        compare(ours, theirs, normal(3, 40, 16, seed=step), lens=torch.tensor([5, 40, 17]))
    last = VectorQuantize(16, 24, channel_last=False)  # where the peer takes the channels for the length
    last.load_state_dict(ours.state_dict())
    got, want = (
        last.eval()(normal(3, 40, 16).mT, lens=torch.tensor([5, 40, 17])),
        ours.eval()(normal(3, 40, 16), lens=torch.tensor([5, 40, 17])),
    )
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].mT, want[0])


def test_padding_is_returned_unchanged():
    ours, theirs = pair(return_zeros_for_masked_padding=False)
    compare(ours, theirs, normal(3, 40, 16), lens=torch.tensor([5, 40, 17]))


@pytest.mark.parametrize("name", ["plain", "projected", "heads"])
def test_volumes(name):
    options = {"plain": {}, "projected": {"codebook_dim": 6}, "heads": {"heads": 4, "codebook_dim": 4}}[name]
    ours, theirs = pair(accept_3d_fmap=True, **options)
    for step in range(3):
        compare(ours, theirs, normal(2, 16, 3, 4, 5, seed=step))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cosine_sim": True}, {"codebook_dim": 6}, {"rotation_trick": False}, LEARNED],
    ids=str,
)
def test_several_codewords(options, training):
    ours, theirs = pair(**options)
    ours.train(training), theirs.train(training)
    x, mask = normal(3, 40, 16), torch.arange(40).expand(3, 40) < torch.tensor([[5], [40], [17]])
    for given in ({}, {"mask": mask}):
        found = []
        for layer in (ours, theirs):
            rows = x.clone().requires_grad_()
            quantized, indices, losses = layer(rows, topk=3, **given)
            total = (quantized * normal(3, 40, 3, 16, seed=2)).sum() + losses.sum()
            found.append(
                (
                    quantized.detach(),
                    indices,
                    losses.detach(),
                    torch.autograd.grad(total, rows, allow_unused=True)[0],
                )
            )
        assert torch.equal(found[0][1], found[1][1])
        for got, want in zip(*found, strict=True):
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    same_state(ours, theirs)


@pytest.mark.parametrize("layout", [{"accept_image_fmap": True}, {"channel_last": False}])
def test_several_codewords_of_channels_second(layout):
    ours, theirs = pair(**layout)
    x = normal(2, 16, 4, 5) if "accept_image_fmap" in layout else normal(2, 16, 20)
    for got, want in zip(ours(x, topk=2), theirs(x, topk=2), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_codewords_that_others_chose():
    for options in (
        {},
        {"heads": 4, "codebook_dim": 4},
        {"accept_image_fmap": True},
        {"use_cosine_sim": True},
    ):
        ours, theirs = pair(**options)
        x = normal(2, 16, 4, 5) if "accept_image_fmap" in options else normal(2, 20, 16)
        indices = torch.randint(
            24, (2, 4, 5) if "accept_image_fmap" in options else (2, 20, 4) if "heads" in options else (2, 20)
        )
        ours.update_indices(x, indices), theirs.update_indices(x, indices)
        same_state(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cosine_sim": True}, {"heads": 2, "codebook_dim": 8, "separate_codebook_per_head": True}],
)
def test_weights_of_the_averages(options):
    ours, theirs = pair(**options)
    codebooks = options.get("heads", 1)
    weight = torch.rand(codebooks, 24, generator=torch.Generator().manual_seed(1))
    for given in (weight, lambda sums, sizes: sizes / sizes.amax(-1, keepdim=True)):
        compare(ours, theirs, normal(3, 40, 16), ema_update_weight=given)


def test_gradient_accumulation():
    ours, theirs = pair()
    for step, accumulate in enumerate((True, True, False, True, False)):
        for layer in (ours, theirs):
            layer(normal(3, 40, 16, seed=step), accum_ema_update=accumulate)
        same_state(ours, theirs)


def test_averages_of_one_call():
    ours, theirs = pair(**LEARNED)
    compare(ours, theirs, normal(3, 40, 16), ema_update=True)
    ours, theirs = pair()
    compare(ours, theirs, normal(3, 40, 16), ema_update=False)


def test_temperature_of_one_call():
    ours, theirs = pair(stochastic_sample_codes=True)
    compare(ours, theirs, normal(3, 40, 16), sample_codebook_temp=0.1)
    compare(ours, theirs, normal(3, 40, 16), sample_codebook_temp=0.0)


def test_cross_entropy_of_given_codewords():
    for options in ({}, {"use_cosine_sim": True}, {"heads": 2, "codebook_dim": 8}):
        ours, theirs = pair(**options)
        targets = torch.randint(24, (3, 40, 2) if options.get("heads") else (3, 40))
        losses = []
        for layer in (ours, theirs):
            x = normal(3, 40, 16).requires_grad_()
            loss = layer(x, indices=targets, freeze_codebook=True)[1]
            losses.append((loss.detach(), *torch.autograd.grad(loss, x)))
        for got, want in zip(*losses, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_bridge_in_front_of_the_codewords():
    results = []
    for kind in (VectorQuantize, peer.VectorQuantize):
        torch.manual_seed(0)
        layer = kind(16, 24, vq_bridge=torch.nn.Linear(16, 16), in_place_codebook_optimizer=sgd)
        for step in range(3):
            layer.zero_grad()  # the peer's optimizer takes gradients of earlier losses, too
            quantized, indices, loss = layer(normal(3, 40, 16, seed=step).requires_grad_())
            loss.backward()
        results.append(
            (
                quantized.detach(),
                indices,
                loss.detach(),
                layer._codebook.vq_bridge.weight.grad,
                dict(layer.state_dict()),
            )
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# --- stacks -----------------------------------------------------------------------------------------------

RESIDUAL = {
    "shared": {"shared_codebook": True},
    "shared and revived": {"shared_codebook": True, "threshold_ema_dead_code": 1e-9},
    "shared cosine": {"shared_codebook": True, "use_cosine_sim": True},
    "drawn": {"stochastic_sample_codes": True, "sample_codebook_temp": 0.1, "shared_codebook": True},
    "implicit": {"implicit_neural_codebook": True},
    "implicit mlp": {
        "implicit_neural_codebook": True,
        "mlp_kwargs": {"depth": 2, "dim_hidden": 5},
        "quant_grad_frac": 0.2,
    },
    "diveq": {"diveq": True},
    "diveq projected": {"diveq": True, "codebook_dim": 6},
    "beam": {"beam_size": 3, "rotation_trick": False},
    "beam projected": {"beam_size": 2, "eval_beam_size": 4, "codebook_dim": 6, "rotation_trick": False},
    "beam weighted": {
        "beam_size": 2,
        "beam_score_quantizer_weights": [1.0, 0.5, 2.0],
        "quant_grad_frac": 0.3,
    },
    "directional": {
        "directional_reparam": True,
        "threshold_ema_dead_code": 1e-9,
        "directional_reparam_variance": 0,
    },
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_same_results_and_codewords(name, masked):
    if masked and "implicit" in name:
        pytest.skip("the peer's codewords for each row do not take a mask")
    ours, theirs = residual_pair(**RESIDUAL[name])
    mask = {"mask": torch.arange(40).expand(3, 40) < torch.tensor([[20], [40], [7]])} if masked else {}
    for step in range(3):
        results = []
        for layer in (ours, theirs):
            x = normal(3, 40, 16, seed=step).requires_grad_()
            layer.zero_grad()
            torch.manual_seed(step)
            quantized, indices, losses = layer(x, **mask)
            ((quantized * normal(3, 40, 16, seed=9)).sum() + losses.sum()).backward()
            grads = {
                key: value.grad
                for key, value in layer.named_parameters()
                if value.grad is not None and value.grad.any()
            }
            results.append((quantized.detach(), losses.detach(), x.grad, indices, grads))
        assert torch.equal(results[0][3], results[1][3])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        # in the peer, from the second layer on, the counts do not match the returned indices
        if "beam" in name:
            for layer, chosen in zip(ours.layers, results[0][3].unbind(-1), strict=True):
                sizes = 0.8 + 0.2 * torch.bincount(chosen[chosen >= 0], minlength=24)
                torch.testing.assert_close(layer._codebook.cluster_size[0], sizes)
            break
        same_state(ours, theirs)
    ours.eval(), theirs.eval()
    theirs.load_state_dict(ours.state_dict())
    x = normal(2, 9, 16)
    if "diveq" not in name:  # to which the peer adds noise in evaluation, too
        for got, want in zip(ours(x), theirs(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours.get_output_from_indices(ours(x)[1]),
        theirs.get_output_from_indices(theirs(x)[1]),
        rtol=1e-4,
        atol=1e-5,
    )


def test_residual_with_channels_second():
    """The peer raises an error here."""
    plain, second = (
        ResidualVQ(dim=16, num_quantizers=3, codebook_size=24, channel_last=last) for last in (True, False)
    )
    second.load_state_dict(plain.state_dict())
    got, want = second(normal(2, 16, 20)), plain(normal(2, 16, 20).mT)
    assert torch.equal(got[0].mT, want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(second.get_output_from_indices(got[1]), plain.get_output_from_indices(want[1]).mT)


def test_residual_cross_entropy_is_the_sum_over_layers():
    rvq = ResidualVQ(dim=16, num_quantizers=2, codebook_size=24).eval()
    x, targets = normal(2, 20, 16), torch.randint(24, (2, 20, 2))
    first, second = rvq.layers
    rest = x - first(x)[0]
    expected = first(x, indices=targets[..., 0])[1] + second(rest, indices=targets[..., 1])[1]
    torch.testing.assert_close(rvq(x, indices=targets)[1], expected)


def test_grouped():
    options = {"dim": 16, "groups": 2, "num_quantizers": 3, "codebook_size": 12}
    torch.manual_seed(0)
    theirs, ours = peer.GroupedResidualVQ(**options), GroupedResidualVQ(**options)
    images = GroupedResidualVQ(**options, accept_image_fmap=True)  # where the peer fails
    for layer in (ours, images):
        assert list(layer.load_state_dict(theirs.state_dict())) == [[], []]
    for step in range(3):
        x = normal(3, 20, 16, seed=step)
        got, want = ours(x, return_all_codes=True), theirs(x, return_all_codes=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, torch.stack(b) if isinstance(b, tuple) else b, rtol=1e-4, atol=1e-5)
        same_state(ours, theirs)
        quantized, indices, losses = images(x.mT.unflatten(-1, (4, 5)))
        torch.testing.assert_close((quantized.flatten(2).mT, indices.flatten(2, 3), losses), got[:3])
    decoded = theirs.get_output_from_indices(want[1])
    torch.testing.assert_close(ours.get_output_from_indices(got[1]), decoded, **CLOSE)
    torch.testing.assert_close(images.get_output_from_indices(indices).flatten(2).mT, decoded, **CLOSE)


@pytest.mark.parametrize(
    "options", [{}, {"rotation_trick": False}, {"channel_first": True}, {"frozen_codebook_dim": 5}], ids=str
)
@pytest.mark.parametrize("residual", [False, True])
def test_sim_vq(residual, options):
    results = []
    for kind in (ResidualSimVQ, peer.ResidualSimVQ) if residual else (SimVQ, peer.SimVQ):
        torch.manual_seed(0)
        layer = kind(dim=16, codebook_size=24, **options, **({"num_quantizers": 3} if residual else {}))
        x = (normal(3, 16, 20) if "channel_first" in options else normal(3, 20, 16)).requires_grad_()
        quantized, indices, loss = layer(x)
        ((quantized * normal(*x.shape, seed=2)).sum() + loss.sum()).backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        decoded = layer.get_output_from_indices(indices) if residual else layer.indices_to_codes(indices)
        results.append(
            (
                quantized.detach(),
                indices,
                loss.detach(),
                x.grad,
                gradients,
                decoded.detach(),
                dict(layer.state_dict()),
            )
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
