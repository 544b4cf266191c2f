"""ResidualVQ, without comparisons with its peer."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from uefl_kernels.nn import GroupedResidualVQ, ResidualVQ, VectorQuantize

from .conftest import normal


def layer(seed=0, **options):
    torch.manual_seed(seed)
    return ResidualVQ(**({"dim": 8, "num_quantizers": 3, "codebook_size": 12} | options))


def test_each_quantizer_gets_the_residual():
    rvq, x = layer().eval(), normal(2, 30, 8)
    quantized, indices, losses, codewords = rvq(x, return_all_codes=True)
    rest = x
    for q, quantizer in enumerate(rvq.layers):
        assert torch.equal(indices[..., q], quantizer(rest)[1])
        assert torch.equal(codewords[q], quantizer.codebook[indices[..., q]])
        rest = rest - codewords[q]
    torch.testing.assert_close(quantized, codewords.sum(0))
    assert losses.tolist() == [0, 0, 0]
    torch.testing.assert_close(rvq.get_output_from_indices(indices), quantized)


def test_training_shrinks_the_error():
    rvq, x = layer(threshold_ema_dead_code=1), normal(500, 8)
    errors = [(rvq(x)[0] - x).square().mean().item() for _ in range(10)]
    assert errors[-1] < errors[0] < 1
    rests = [
        (x - codewords).square().mean() for codewords in rvq.eval()(x, return_all_codes=True)[3].cumsum(0)
    ]
    assert rests[2] < rests[1] < rests[0]


def test_gradients_reach_the_input_of_every_quantizer():
    rvq, x, weight = (
        layer(rotation_trick=False, commitment_weight=0.5),
        normal(40, 8).requires_grad_(),
        normal(40, 8, seed=1),
    )
    quantized, _, losses, codewords = rvq(x, return_all_codes=True, freeze_codebook=True)
    ((quantized * weight).sum() + losses.sum()).backward()
    # Every layer passes the gradient straight through, and each residual is x minus constants.
    rests = [x.detach() - codewords[:q].sum(0) for q in range(1, 4)]
    torch.testing.assert_close(
        x.grad, 3 * weight + sum(0.5 * 2 / x.numel() * rest for rest in rests), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("options", [{}, {"codebook_dim": 3}], ids=str)
def test_images(options):
    rvq, flat = layer(accept_image_fmap=True, **options), layer(**options)
    x = normal(2, 8, 5, 7)
    for _ in range(2):
        quantized, indices, losses = rvq(x)
        expected = flat(x.permute(0, 2, 3, 1))
    assert indices.shape == (2, 5, 7, 3)
    torch.testing.assert_close(quantized, expected[0].permute(0, 3, 1, 2))
    assert torch.equal(indices, expected[1])
    torch.testing.assert_close(losses, expected[2])
    assert rvq.eval().get_output_from_indices(indices).shape == x.shape


def test_each_quantizer_may_have_its_own_size():
    rvq = layer(codebook_size=[12, 5], num_quantizers=None)
    assert [len(codebook) for codebook in rvq.codebooks] == [12, 5]
    assert layer().codebooks.shape == (3, 12, 8)
    assert rvq(normal(40, 8))[1].amax(0).tolist() <= [11, 4]


def test_dropout_of_quantizers():
    rvq, x = (
        layer(
            quantize_dropout=True,
            quantize_dropout_cutoff_index=1,
            num_quantizers=8,
            quantize_dropout_multiple_of=2,
        ),
        normal(20, 8),
    )
    seen = set()
    for seed in range(30):
        torch.manual_seed(seed)
        quantized, indices, losses = rvq(x)
        kept = int((indices[0] >= 0).sum())
        seen.add(kept)
        assert (indices[:, kept:] == -1).all()
        assert not losses[kept:].any()
        assert quantized.shape == x.shape
    assert seen == {2, 4, 6, 8}
    for seed in range(10):  # as vector-quantize-pytorch draws
        last = random.Random(seed).randrange(1, 8)
        assert (
            int((rvq(x, rand_quantize_dropout_fixed_seed=seed)[1][0] >= 0).sum()) == last + 1 + (last + 1) % 2
        )
    assert (rvq.eval()(x)[1] >= 0).all()


def test_mask_autocast_and_compile(full_graph):
    rvq, x = layer(codebook_dim=4, threshold_ema_dead_code=1), normal(2, 10, 8).requires_grad_()
    mask = torch.arange(10).expand(2, 10) < torch.tensor([[4], [0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quantized, indices, losses = rvq(x, mask=mask)
    (quantized.float().sum() + losses.sum()).backward()
    assert quantized.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    assert not quantized[~mask].any()
    assert (indices[~mask] == -1).all()
    assert not x.grad[~mask].any()
    assert x.grad[mask].isfinite().all()
    rvq.eval()
    for got, want in zip(full_graph(rvq)(x), rvq(x), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"shared_codebook": True, "codebook_size": [3, 4, 5]},
            ValueError,
            "^ResidualVQ: shared_codebook=True.*codebook_size",
        ),
        ({"heads": 2}, ValueError, "^ResidualVQ: heads=2"),
        ({"eval_beam_size": 2}, ValueError, "eval_beam_size needs beam_size"),
        (
            {"beam_size": 2, "beam_score_quantizer_weights": [1.0]},
            ValueError,
            "beam_score_quantizer_weights.*3",
        ),
        (
            {"beam_size": 2, "implicit_neural_codebook": True},
            ValueError,
            "implicit_neural_codebook .*beam_size",
        ),
        ({"codebok_dim": 3}, TypeError, "'codebok_dim'"),
        ({"num_quantizers": None}, ValueError, "num_quantizers.*codebook_size"),
        (
            {"num_quantizers": 2, "codebook_size": [3, 3, 3]},
            ValueError,
            r"codebook_size \[3, 3, 3\].*num_quantizers=2",
        ),
        ({"num_quantizers": 0}, ValueError, "num_quantizers is 0"),
        ({"num_quantizers": None, "codebook_size": []}, ValueError, r"codebook_size \[\]"),
        ({"quantize_dropout_cutoff_index": 3}, ValueError, "quantize_dropout_cutoff_index=3.*0.*2"),
    ],
)
def test_constructor_refuses(options, error, message):
    with pytest.raises(error, match=message):
        layer(**options)


def test_forward_refuses():
    rvq = layer(codebook_dim=4)
    with pytest.raises(ValueError, match=r"^ResidualVQ: beam_size.*0"):
        rvq(normal(4, 8), beam_size=0)
    with pytest.raises(ValueError, match=r"^ResidualVQ: x .*\[\.\.\., 8\].*\[4, 7\]"):
        rvq(normal(4, 7))
    with pytest.raises(ValueError, match=r"indices.*\[\.\.\., 1 to 3\].*\[4, 5\]"):
        rvq.get_codes_from_indices(torch.zeros(4, 5).long())
    images = layer(accept_image_fmap=True)
    with pytest.raises(ValueError, match=r"x .*\[B, 8, H, W\].*\[4, 8\]"):
        images(normal(4, 8))
    with pytest.raises(ValueError, match=r"mask.*accept_image_fmap"):
        images(normal(4, 8, 2, 2), mask=torch.ones(4, 2, 2).bool())


def test_padding_revives_no_codeword_that_all_quantizers_share():
    rvq = ResidualVQ(
        dim=8, num_quantizers=2, codebook_size=16, shared_codebook=True, threshold_ema_dead_code=2
    )
    mask = torch.arange(40) < 30
    for step in range(3):
        rvq(normal(2, 40, 8, seed=step).masked_fill(~mask[:, None], 1000.0), mask=mask.expand(2, 40))
    assert rvq.codebooks.abs().max() < 100


def test_implicit_codewords_of_as_many_positions_as_codewords():
    """Each position has all K codewords, not one."""
    torch.manual_seed(0)
    rvq = ResidualVQ(dim=8, num_quantizers=2, codebook_size=6, implicit_neural_codebook=True).eval()
    x = normal(1, 6, 8)
    for one, several in zip(rvq(x)[:2], rvq(x.expand(2, 6, 8))[:2], strict=True):
        assert torch.equal(one[0], several[0])


class InTurn(ResidualVQ):
    """Run the quantizers one by one."""

    def _stages(self, *_):
        return None


def run(rvq, x):
    """Return the results, gradients and state after a step."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    quantized, indices, losses = rvq(x)
    scalar = quantized.float().square().sum() + losses.sum()
    if scalar.requires_grad:
        scalar.backward()
    gradients = [held.grad for held in (x, *rvq.parameters()) if held.grad is not None]
    counted = [quantizer.counts for quantizer in rvq.layers]
    return [quantized, indices, losses, *gradients, *rvq.state_dict().values(), *counted]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotation_trick": False, "commitment_weight": 0.5},
        {"commitment_weight": 0.0},
        {"learnable_codebook": True},
        {"learnable_codebook": True, "ema_update": False, "codebook_dim": 4},
        {"threshold_ema_dead_code": 2},
        {"kmeans_init": True, "threshold_ema_dead_code": 1},
        {"codebook_size": (5, 9, 7), "num_quantizers": None},
        {"shared_codebook": True},
        {"quantize_dropout": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [4, 300])
def test_one_op_has_the_bits_of_one_quantizer_after_the_other(options, n):
    rvq = layer(**options)
    other = InTurn(**{"dim": 8, "num_quantizers": 3, "codebook_size": 12} | options)
    other.load_state_dict(rvq.state_dict())
    for training in (True, True, False):
        x = normal(2, n, 8, seed=int(training))
        for got, want in zip(run(rvq.train(training), x), run(other.train(training), x), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotation_trick", False),
        ("route_gradients_to_input", False),
        ("commitment_weight", 3.0),
        ("freeze_codebook", True),
        ("sync_update_v", 0.5),
        ("codebook_diversity_loss_weight", 1.0),
        ("decay", 0.1),
        ("manual_ema_update", True),
    ],
)
def test_options_of_one_quantizer(name, value):
    rvq, other = layer(), InTurn(dim=8, num_quantizers=3, codebook_size=12)
    other.load_state_dict(rvq.state_dict())
    x = normal(2, 40, 8)
    for each in (rvq, other):
        setattr(each.layers[1], name, value)
    for got, want in zip(run(rvq, x), run(other, x), strict=True):
        assert torch.equal(got, want)


def test_one_quantizer_that_learns():
    rvq = layer(ema_update=False)
    rvq.layers[1] = VectorQuantize(8, 12, learnable_codebook=True)
    rvq(normal(2, 40, 8).requires_grad_())[2].sum().backward()
    assert rvq.layers[1]._codebook.embed.grad.any()


def ops_of(rvq, x):
    """Return the names of the ops of a call."""
    with Names() as mode:
        rvq(x)
    return mode.names


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "uefl":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_call_is_one_op():
    rvq, x = layer(), normal(2, 5, 8)
    assert ops_of(rvq, x) == ["rvq", "ema_update"]
    assert ops_of(rvq.eval(), x) == ["rvq"]
    assert ops_of(layer(shared_codebook=True).eval(), x) == ["rvq"]


@pytest.mark.parametrize(
    "options",
    [
        {"use_cosine_sim": True},
        {"shared_codebook": True},
        {"affine_param": True},
        {"quant_grad_frac": 0.5},
        {"stochastic_sample_codes": True},
        {"implicit_neural_codebook": True},
        {"kmeans_init": True},
    ],
    ids=str,
)
def test_options_that_need_the_quantizers_one_by_one(options):
    assert "rvq" not in ops_of(layer(**options), normal(2, 20, 8))


@pytest.mark.parametrize("name", ["layers.1", "layers.1._codebook"])
def test_a_hook_of_a_quantizer_runs(name):
    rvq, seen = layer(), []
    rvq.get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    rvq(normal(2, 5, 8))
    assert seen == [1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"beam_size": 3}, {"shared_codebook": True}, {"codebook_size": (12, 5, 7)}], ids=str
)
def test_usage_of_each_quantizer(options, training, masked):
    rvq = layer(**options).train(training)
    rvq(normal(2, 40, 8, seed=1))
    indices = rvq(normal(2, 30, 8), mask=torch.arange(30).expand(2, 30) < 20 if masked else None)[1]
    pairs = zip(indices.unbind(-1), rvq.codebook_sizes, strict=True)
    counts = [torch.bincount(chosen[chosen >= 0], minlength=size) for chosen, size in pairs]
    counts = [sum(counts)] * 3 if rvq.shared_codebook else counts
    assert all(torch.equal(one.counts, count) for one, count in zip(rvq.layers, counts, strict=True))
    torch.testing.assert_close(rvq.usage, torch.stack([(count > 0).float().mean() for count in counts]))
    entropies = torch.stack([torch.special.entr(count / count.sum()).sum() for count in counts])
    torch.testing.assert_close(rvq.perplexity, entropies.exp())


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}], ids=str)
def test_a_quantizer_that_is_left_out_chooses_nothing(options):
    rvq, x = layer(**options), normal(2, 30, 8)
    rvq(x)
    assert (rvq.usage > 0).all()
    rvq(x, n_q=1)
    assert (rvq.usage > 0).tolist() == [True, False, False]
    assert rvq.perplexity[1:].tolist() == [1, 1]


def test_usage_of_groups():
    groups = GroupedResidualVQ(dim=8, groups=2, num_quantizers=3, codebook_size=12)
    groups(normal(2, 30, 8))
    for name in ("usage", "perplexity"):
        assert torch.equal(getattr(groups, name)[1], getattr(groups.rvqs[1], name))
        assert getattr(groups, name).shape == (2, 3)
