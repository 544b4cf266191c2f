"""FSQ, LFQ and the small layers against vector-quantize-pytorch: same state, results and gradients."""

from __future__ import annotations

import pytest
import torch

import uefl_kernels.nn

from .conftest import normal

peer = pytest.importorskip(
    "vector_quantize_pytorch", reason="the peer, vector-quantize-pytorch, is not installed"
)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SEQUENCE, IMAGE = (2, 30, 16), (2, 16, 5, 6)
# name -> class, arguments, shape of the input
CASES = {
    "fsq": ("FSQ", {"levels": [8, 5, 5], "dim": 16}, SEQUENCE),
    "fsq image": ("FSQ", {"levels": [8, 5, 5], "dim": 16}, IMAGE),
    "fsq channel first": ("FSQ", {"levels": [8, 5, 4], "dim": 16, "channel_first": True}, (2, 16, 30)),
    "fsq symmetric": ("FSQ", {"levels": [2, 3, 8, 5], "dim": 16, "preserve_symmetry": True}, SEQUENCE),
    "fsq clamped": ("FSQ", {"levels": [7, 5], "dim": 16, "bound_hard_clamp": True}, SEQUENCE),
    "fsq codebooks": ("FSQ", {"levels": [4, 4, 3, 5], "num_codebooks": 4}, SEQUENCE),
    "fsq rotated": ("FSQ", {"levels": [5, 5, 5], "dim": 16, "orthogonal_rotation": True}, SEQUENCE),
    "fsq no indices": ("FSQ", {"levels": [5, 5, 5], "dim": 16, "return_indices": False}, SEQUENCE),
    "rfsq": ("ResidualFSQ", {"levels": [5, 5, 3], "dim": 16, "num_quantizers": 4}, SEQUENCE),
    "rfsq soft": (
        "ResidualFSQ",
        {"levels": [5, 3], "dim": 16, "num_quantizers": 2, "bound_hard_clamp": False},
        SEQUENCE,
    ),
    "rfsq first": (
        "ResidualFSQ",
        {"levels": [5, 3], "dim": 16, "num_quantizers": 2, "is_channel_first": True},
        IMAGE,
    ),
    "grfsq": (
        "GroupedResidualFSQ",
        {"levels": [5, 3], "dim": 16, "num_quantizers": 3, "groups": 2},
        SEQUENCE,
    ),
    "lfq": ("LFQ", {"codebook_size": 64, "dim": 16, "commitment_loss_weight": 0.5}, SEQUENCE),
    "lfq image": ("LFQ", {"codebook_size": 64, "dim": 16, "diversity_gamma": 0.3}, IMAGE),
    "lfq codebooks": ("LFQ", {"codebook_size": 16, "num_codebooks": 4}, SEQUENCE),
    "lfq spherical": ("LFQ", {"codebook_size": 64, "dim": 16, "spherical": True}, SEQUENCE),
    "lfq rotated": ("LFQ", {"codebook_size": 64, "dim": 16, "orthogonal_rotation": True}, SEQUENCE),
    "lfq cosine": ("LFQ", {"codebook_size": 64, "dim": 16, "cosine_sim_project_in": True}, SEQUENCE),
    "lfq clamped": ("LFQ", {"codebook_size": 64, "dim": 16, "soft_clamp_input_value": 3.0}, SEQUENCE),
    "lfq softplus": (
        "LFQ",
        {"codebook_size": 64, "dim": 16, "experimental_softplus_entropy_loss": True},
        SEQUENCE,
    ),
    "rlfq": ("ResidualLFQ", {"codebook_size": 32, "dim": 16, "num_quantizers": 4}, SEQUENCE),
    "grlfq": (
        "GroupedResidualLFQ",
        {"codebook_size": 16, "dim": 16, "num_quantizers": 3, "groups": 2},
        SEQUENCE,
    ),
    "latent": ("LatentQuantize", {"levels": [5, 5, 8], "dim": 16}, IMAGE),
    "latent codebooks": (
        "LatentQuantize",
        {"levels": 5, "codebook_dim": 3, "dim": 16, "num_codebooks": 4},
        IMAGE,
    ),
}


def pair(name):
    kind, options, shape = CASES[name]
    torch.manual_seed(0)
    theirs, ours = getattr(peer, kind)(**options), getattr(uefl_kernels.nn, kind)(**options)
    assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert list(theirs.load_state_dict(ours.state_dict())) == [[], []]
    return ours, theirs, shape


def run(layer, x, weight):
    x = x.clone().requires_grad_()
    quantized, indices, *losses = layer(x)
    total = (quantized * weight).sum() + sum(loss.sum() for loss in losses)
    inputs = [x, *layer.parameters()]
    gradients = [None] * len(inputs)
    if total.requires_grad:  # outside training LFQ has none for x
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    found = [quantized.detach(), *(loss.detach() for loss in losses)]
    return found, indices, [g if g is None else g.detach() for g in gradients]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_scalar_layers_equal_the_peers(name, training):
    ours, theirs, shape = pair(name)
    x, weight = normal(*shape, seed=1), normal(*shape, seed=2)
    got, want = (run(layer.train(training), x, weight) for layer in (ours, theirs))
    if want[1] is None:
        assert got[1] is None
    else:
        assert torch.equal(got[1], want[1])
        assert got[1].dtype == want[1].dtype
    for g, w in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(g, w, **CLOSE)
    for g, w in zip(got[2], want[2], strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5 * max(1.0, float(w.abs().max())))


@pytest.mark.parametrize("name", [name for name in CASES if "no indices" not in name])
def test_scalar_layers_decode_their_indices(name):
    ours, _, shape = pair(name)
    ours.eval()
    quantized, indices = ours(normal(*shape, seed=3))[:2]
    for dtype in (torch.int64, torch.int32, torch.int16):
        torch.testing.assert_close(ours.decode(indices.to(dtype)), quantized, **CLOSE)


@pytest.mark.parametrize("name", ["rfsq", "rlfq"])
def test_residual_layers_drop_the_peers_quantizers(name):
    ours, theirs, shape = pair(name)
    for layer in (ours, theirs):
        layer.quantize_dropout = True
    x = normal(*shape, seed=4)
    for seed in range(6):
        got, want = (layer(x, rand_quantize_dropout_fixed_seed=seed) for layer in (ours, theirs))
        assert torch.equal(got[1], want[1])
        torch.testing.assert_close(got[0], want[0], **CLOSE)


@pytest.mark.parametrize("name", ["rfsq", "rlfq"])
def test_no_quantizer_is_dropped_without_gradients(name):
    """The peer does the same."""
    ours, theirs, shape = pair(name)
    for layer in (ours, theirs):
        layer.quantize_dropout = True
    for seed in range(4):
        with torch.no_grad():
            got, want = (
                layer(normal(*shape), rand_quantize_dropout_fixed_seed=seed) for layer in (ours, theirs)
            )
        assert torch.equal(got[1], want[1])
        assert (got[1] >= 0).all()


def test_lfq_masks_examples_as_the_peer():
    ours, theirs, shape = pair("lfq")
    x, mask = normal(*shape, seed=5), torch.tensor([True, False])
    for g, w in zip(
        *(layer(x, mask=mask, return_loss_breakdown=True)[1] for layer in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(g, w, **CLOSE)


@pytest.mark.parametrize("codebooks", [1, 3])
def test_random_projections_equal_the_peers(codebooks):
    options = {"dim": 16, "codebook_size": 32, "codebook_dim": 8, "num_codebooks": codebooks}
    torch.manual_seed(0)
    theirs = peer.RandomProjectionQuantizer(**options)
    ours = uefl_kernels.nn.RandomProjectionQuantizer(**options)
    assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
    x = normal(2, 20, 16)
    indices = ours(x)
    assert torch.equal(indices, theirs(x))
    torch.testing.assert_close(ours(x, indices), theirs(x, indices), **CLOSE)


def test_binary_mapper_equals_the_peers():
    ours, theirs = uefl_kernels.nn.BinaryMapper(4), peer.BinaryMapper(4)
    found = []
    for layer in (ours, theirs):
        logits = normal(3, 5, 4).requires_grad_()
        torch.manual_seed(1)
        one_hot, indices, loss = layer(logits, return_indices=True)
        ((one_hot * normal(3, 5, 16, seed=2)).sum() + loss).backward()
        found.append((one_hot, indices, loss, logits.grad, layer.log_prob(logits, indices=indices)))
    for g, w in zip(*found, strict=True):
        torch.testing.assert_close(g, w, **CLOSE)


FSP_CASES = {
    "plain": ({"levels": [8, 5, 4]}, (2, 30, 3)),
    "projected": ({"levels": [8, 5, 4], "dim": 16, "quantize_rate": 0.5, "vector_norm": "kurt"}, SEQUENCE),
    "first": ({"levels": [5, 3], "dim": 16, "channel_first": True, "act_name": "laplace"}, IMAGE),
    "inverse": (
        {"levels": [5, 3], "dim": 16, "need_inv_act": True, "act_name": "normal", "quantize_rate": 1.0},
        SEQUENCE,
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", FSP_CASES)
def test_fsp_equals_the_peers(name, training):
    options, shape = FSP_CASES[name]
    torch.manual_seed(0)
    theirs, ours = peer.FSP(**options), uefl_kernels.nn.FSP(**options)
    assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
    found = []
    for layer in (ours, theirs):
        x = normal(*shape, seed=1).requires_grad_()
        torch.manual_seed(1)
        quantized, indices, loss, info = layer.train(training)(x)
        ((quantized * normal(*shape, seed=2)).sum() + loss).backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        moments = [info["norm_info"][key] for key in sorted(info["norm_info"])]
        extra = [info[key] for key in sorted(info.keys() - {"norm_info"})]
        found.append((quantized, indices, loss, x.grad, *gradients, *moments, *extra))
    assert found[0][1].dtype == found[1][1].dtype
    for g, w in zip(*found, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


HIERARCHICAL = {
    "image": ({"scales": (1, 2, 4), "accept_image_fmap": True}, (3, 8, 4, 4)),
    "levels": (
        {"scales": (1, 2, 4), "accept_image_fmap": True, "share_quant_resi": 2, "rotation_trick": True},
        (3, 8, 4, 4),
    ),
    "sequence": ({"scales": (1, 3, 6), "channel_first": False, "share_quant_resi": 0}, (3, 6, 8)),
    "volume": ({"scales": (1, (1, 2, 2), 3), "accept_3d_fmap": True, "quant_resi": 0.0}, (2, 8, 3, 3, 3)),
    "codebooks": (
        {
            "scales": ((1, 2), (2, 4)),
            "accept_image_fmap": True,
            "shared_codebook": False,
            "codebook_size": (8, 16),
        },
        (3, 8, 2, 4),
    ),
    "dropout": ({"scales": (1, 2, 4), "accept_image_fmap": True, "nested_dropout": 0.7}, (3, 8, 4, 4)),
}


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_hierarchical_vq_equals_the_peers(name):
    options, shape = HIERARCHICAL[name]
    options = {"dim": 8, "codebook_size": 16, "kmeans_init": False, "threshold_ema_dead_code": 0} | options
    torch.manual_seed(0)
    theirs, ours = peer.HierarchicalVQ(**options), uefl_kernels.nn.HierarchicalVQ(**options)
    assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
    for step in range(3):
        found = []
        for layer in (ours, theirs):
            x = normal(*shape, seed=step).requires_grad_()
            torch.manual_seed(step)
            quantized, indices, loss, cutoff = layer(x, return_cutoff=True)
            ((quantized * normal(*shape, seed=9)).sum() + loss).backward()
            found.append((quantized, loss, x.grad, *indices))
            assert cutoff is None or name == "dropout"
            state = layer.state_dict()
        for g, w in zip(*found, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
        for key, value in ours.state_dict().items():
            torch.testing.assert_close(value, state[key], rtol=1e-4, atol=1e-5)
    ours.eval(), theirs.eval()
    x = normal(*shape, seed=7)
    indices = ours.encode(x)
    torch.testing.assert_close(ours.decode(indices), ours(x)[0], **CLOSE)
    torch.testing.assert_close(ours.decode(indices), theirs.get_output_from_indices(indices), **CLOSE)


def test_hierarchical_vq_masks_as_the_peer():
    options = {"dim": 8, "codebook_size": 16, "scales": (1, 3, 6), "kmeans_init": False}
    torch.manual_seed(0)
    theirs, ours = peer.HierarchicalVQ(**options), uefl_kernels.nn.HierarchicalVQ(**options)
    ours.load_state_dict(theirs.state_dict())
    x, lens = normal(3, 8, 6, seed=1), torch.tensor([6, 3, 4])
    for g, w in zip(*(layer.eval()(x, lens=lens)[:2] for layer in (ours, theirs)), strict=True):
        for got, want in zip(g, w, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)
