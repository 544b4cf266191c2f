"""VectorQuantize and ResidualVQ agree with vector-quantize-pytorch.

The same state gives the same results, and the same codewords after training.

Tolerances. Indices: equal; random float32 data has no distance so close that the peer's float32 evaluation
takes another one. Values: rtol 1e-5 and atol 1e-6, some ten float32 roundings of numbers of order 1 - the
peer's rotation, sums over the batch in float32 (ours are fixed point), and the averages of a few steps on
top.
"""

from __future__ import annotations

import pytest
import torch

from uefl_kernels.nn import ResidualVQ, VectorQuantize

from .conftest import normal

peer = pytest.importorskip(
    "vector_quantize_pytorch", reason="the peer, vector-quantize-pytorch, is not installed"
)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

# name -> constructor arguments on top of dim=16, codebook_size=24
OPTIONS = {
    "plain": {},
    "straight-through": {"rotation_trick": False},
    "rotation": {"rotation_trick": True},
    "projected": {"codebook_dim": 6},
    "heads": {"heads": 4, "codebook_dim": 4},
    "heads projected": {"heads": 3, "codebook_dim": 5},
    "codebook per head": {"heads": 4, "codebook_dim": 4, "separate_codebook_per_head": True},
    "codebook per head projected": {"heads": 2, "codebook_dim": 3, "separate_codebook_per_head": True},
    "decay and eps": {"decay": 0.99, "eps": 1e-2},
    "frozen": {"freeze_codebook": True},
    "cosine": {"use_cosine_sim": True},
    "cosine heads": {
        "use_cosine_sim": True,
        "heads": 4,
        "codebook_dim": 4,
        "separate_codebook_per_head": True,
    },
    "commitment": {"commitment_weight": 0.25},
    "no commitment": {"commitment_weight": 0.0},
    "learnable": {"learnable_codebook": True, "ema_update": False},
    "learnable per head": {
        "learnable_codebook": True,
        "ema_update": False,
        "heads": 4,
        "codebook_dim": 4,
        "separate_codebook_per_head": True,
        "rotation_trick": False,
    },
    "no averages": {"ema_update": False},
    "k-means": {"kmeans_init": True},
    "k-means heads": {"kmeans_init": True, "kmeans_iters": 3, "heads": 4, "codebook_dim": 4},
    "k-means per head": {
        "kmeans_init": True,
        "heads": 4,
        "codebook_dim": 4,
        "separate_codebook_per_head": True,
    },
    "k-means cosine": {"kmeans_init": True, "use_cosine_sim": True},
}
MASKED = (
    "plain",
    "straight-through",
    "decay and eps",
    "frozen",
    "cosine",
    "commitment",
    "learnable",
    "no averages",
    "k-means",
)


def pair(**options):
    """Return our layer and the peer's in the same state: ours loads the peer's state_dict."""
    options = {"dim": 16, "codebook_size": 24} | options
    torch.manual_seed(0)
    theirs = peer.VectorQuantize(**options)
    ours = VectorQuantize(**options)
    assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
    assert {k: (v.shape, v.dtype) for k, v in ours.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.state_dict().items()
    }
    return ours, theirs


def run(layer, x, weight, seed=0, **arguments):
    """Return results, gradients of x and of the parameters, and the state after one step."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(seed)
    quantized, indices, loss, terms = layer(x, return_loss_breakdown=True, **arguments)
    gradients = {}
    total = (quantized * weight).sum() + 3 * loss
    if total.requires_grad:
        total.backward()
        gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        if x.grad is not None:
            gradients["x"] = x.grad
    return quantized.detach(), indices, loss.detach(), tuple(t.detach() for t in terms), gradients


def compare(ours, theirs, x, **arguments):
    weight = normal(*x.shape, seed=9)
    got, want = run(ours, x, weight, **arguments), run(theirs, x, weight, **arguments)
    assert torch.equal(got[1], want[1])
    assert got[1].dtype == want[1].dtype
    for g, w in ((got[0], want[0]), (got[2], want[2]), *zip(got[3], want[3], strict=True)):
        assert g.shape == w.shape
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, **CLOSE)
    # A parameter that gets no gradient is None with the peer and zero here, or the other way round.
    for name in got[4].keys() | want[4].keys():
        g, w = (gradients.get(name, torch.zeros(())) for gradients in (got[4], want[4]))
        torch.testing.assert_close(*torch.broadcast_tensors(g, w), rtol=1e-4, atol=1e-5)
    same_state(ours, theirs)


def same_state(ours, theirs):
    for (name, g), w in zip(
        ours.state_dict().items(), (theirs.state_dict()[k] for k in ours.state_dict()), strict=True
    ):
        # sums over a batch cancel, so the largest terms set their rounding
        scale = max(1.0, float(w.float().abs().max()))
        torch.testing.assert_close(
            g, w, rtol=1e-5, atol=1e-6 * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_same_results_and_codewords_over_training_steps(name):
    ours, theirs = pair(**OPTIONS[name])
    for step in range(5):
        compare(ours, theirs, normal(3, 40, 16, seed=step))
    if not OPTIONS[name].keys() & {"freeze_codebook", "ema_update"}:
        assert not torch.equal(ours.codebook, pair(**OPTIONS[name])[0].codebook)


@pytest.mark.parametrize("name", OPTIONS)
def test_same_results_in_eval(name):
    ours, theirs = pair(**OPTIONS[name])
    ours.eval(), theirs.eval()
    for x in (normal(3, 40, 16), normal(7, 16, seed=1)):
        compare(ours, theirs, x)


@pytest.mark.parametrize("name", MASKED)
def test_same_results_with_a_mask(name):
    ours, theirs = pair(**OPTIONS[name])
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(5)) < 0.7
    for step in range(4):
        compare(ours, theirs, normal(3, 40, 16, seed=step), mask=mask)


@pytest.mark.parametrize("name", ["plain", "projected", "heads", "codebook per head", "cosine", "k-means"])
@pytest.mark.parametrize(
    ("layout", "shape"), [("accept_image_fmap", (2, 16, 5, 7)), ("channel_last", (2, 16, 35))]
)
def test_same_results_with_channels_second(layout, shape, name):
    ours, theirs = pair(**OPTIONS[name], **{layout: layout == "accept_image_fmap"})
    for step in range(3):
        compare(ours, theirs, normal(*shape, seed=step))


def test_one_vector_per_row():
    ours, theirs = pair(heads=4, codebook_dim=4)
    for step in range(3):
        compare(ours, theirs, normal(30, 16, seed=step))


def test_freezing_for_one_call():
    ours, theirs = pair()
    for step, freeze in enumerate((True, False, None)):
        compare(ours, theirs, normal(3, 40, 16, seed=step), freeze_codebook=freeze)


@pytest.mark.parametrize(
    "options", [{}, {"use_cosine_sim": True}, {"learnable_codebook": True, "ema_update": False}], ids=str
)
def test_dead_codewords_are_revived_alike(options):
    """All rows of a batch are equal, because the draws of the two layers differ."""
    ours, theirs = pair(threshold_ema_dead_code=0.9, **options)
    before = ours.codebook.detach().clone()
    for step in range(4):
        compare(ours, theirs, normal(1, 1, 16, seed=step).expand(3, 40, 16))
    # all but the one that took every row, where no average moves it
    assert (ours.codebook != before).any(-1).sum() >= 23


def test_revival_keeps_the_same_codewords():
    """With distinct rows, the codewords that are not revived and all sizes still agree."""
    ours, theirs = pair(threshold_ema_dead_code=1)
    x = normal(3, 40, 16)
    run(ours, x, 1.0), run(theirs, x, 1.0)
    torch.testing.assert_close(ours._codebook.cluster_size, theirs._codebook.cluster_size, **CLOSE)
    rows = {tuple(row) for row in x.reshape(-1, 16).tolist()}
    revived = torch.tensor([tuple(row) in rows for row in ours.codebook.tolist()])
    assert 0 < revived.sum() < 24
    assert revived.tolist() == [tuple(row) in rows for row in theirs.codebook.tolist()]
    torch.testing.assert_close(ours.codebook[~revived], theirs.codebook[~revived], **CLOSE)


@pytest.mark.parametrize("name", OPTIONS)
def test_same_start_from_the_same_seed(name):
    layers = []
    for kind in (VectorQuantize, peer.VectorQuantize):
        torch.manual_seed(3)
        layers.append(kind(dim=16, codebook_size=24, **OPTIONS[name]))
    same_state(*layers)


@pytest.mark.parametrize(
    "name", ["plain", "projected", "heads", "codebook per head", "codebook per head projected"]
)
def test_indices_back_to_codes_and_output(name):
    ours, theirs = pair(**OPTIONS[name])
    indices = ours.eval()(normal(3, 40, 16))[1]
    torch.testing.assert_close(
        ours.get_codes_from_indices(indices), theirs.get_codes_from_indices(indices), **CLOSE
    )
    if name != "heads":  # where heads share their codewords the peer's output keeps them apart, or fails
        torch.testing.assert_close(
            ours.get_output_from_indices(indices), theirs.get_output_from_indices(indices), **CLOSE
        )


def test_peer_loads_ours():
    ours, theirs = pair(codebook_dim=6)
    run(ours, normal(3, 40, 16), 1.0)
    theirs.load_state_dict(ours.state_dict())
    x = normal(3, 40, 16, seed=1)
    compare(ours, theirs, x)


def test_codebook_can_be_set():
    codewords = normal(24, 16, seed=4)
    ours, theirs = pair()
    ours.codebook = codewords
    with torch.no_grad():
        theirs.codebook = (
            codewords  # the peer forgets the codewords in the next step, unless the averages are set, too
        )
        theirs._codebook.embed_avg.copy_(codewords)
    compare(ours, theirs, normal(3, 40, 16))


RESIDUAL = {
    "plain": {},
    "sizes": {"codebook_size": (24, 10, 5), "num_quantizers": None},
    "projected": {"codebook_dim": 6},
    "gradient": {"quant_grad_frac": 0.5, "rotation_trick": False, "commitment_weight": 0.25},
    "k-means": {"kmeans_init": True, "decay": 0.9, "codebook_size": 8},
    "cosine": {"use_cosine_sim": True},
}


def residual_pair(**options):
    options = {"dim": 16, "num_quantizers": 3, "codebook_size": 24} | options
    torch.manual_seed(0)
    theirs = peer.ResidualVQ(**options)
    ours = ResidualVQ(**options)
    assert list(ours.load_state_dict(theirs.state_dict())) == [[], []]
    for name in ("codebook_dim", "codebook_sizes", "has_projections", "num_quantizers"):
        assert getattr(ours, name) == getattr(theirs, name)
    return ours, theirs


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_same_results_and_codewords(name, masked):
    ours, theirs = residual_pair(**RESIDUAL[name])
    # clusters of one row leave rests near zero, which the peer's float32 cannot tell apart
    n = 400 if name == "k-means" else 40
    given = {"mask": torch.arange(n).expand(3, n) < torch.tensor([[n // 2], [n], [n // 6]])} if masked else {}
    for step in range(4):
        results = []
        for layer in (ours, theirs):
            x = normal(3, n, 16, seed=step).requires_grad_()
            torch.manual_seed(step)
            quantized, indices, losses, codewords = layer(x, *given.values(), return_all_codes=True)
            ((quantized * normal(3, n, 16, seed=9)).sum() + losses.sum()).backward()
            results.append((quantized.detach(), losses.detach(), codewords.detach(), x.grad, indices))
        for got, want in zip(*results, strict=True):
            # The gradient of the rotation is scaled by |codeword| / |rest|, which has the roundings of rests
            # near zero.
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 if got is results[0][3] else 1e-5)
        same_state(ours, theirs)
    ours.eval(), theirs.eval()
    x = normal(2, 9, 16)
    for got, want in zip(ours(x), theirs(x), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    torch.testing.assert_close(
        ours.get_output_from_indices(ours(x)[1]), theirs.get_output_from_indices(theirs(x)[1]), **CLOSE
    )


def test_residual_codes_of_fewer_indices():
    ours, theirs = residual_pair(quantize_dropout=True)
    indices = torch.randint(24, (2, 9, 2))
    torch.testing.assert_close(
        ours.get_codes_from_indices(indices), theirs.get_codes_from_indices(indices), **CLOSE
    )
    torch.testing.assert_close(
        ours.get_output_from_indices(indices), theirs.get_output_from_indices(indices), **CLOSE
    )
