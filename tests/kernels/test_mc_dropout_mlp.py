"""mc_dropout_mlp: statistics against float64, special values, determinism, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from uefl_kernels import COMPILED, MCStats, backend, mc_dropout_mlp
from uefl_kernels.ops.mc_dropout_mlp import composed

from .conftest import normal
from .mc_dropout_cases import SHAPES, assert_close, mlp, stacked


@pytest.mark.every_variant
@pytest.mark.parametrize("activation", composed.ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_the_definition(shape, activation):
    x, weights, biases = mlp(shape)
    for p, passes, logit_dropout, consistent in (
        (0.3, 5, False, False),
        (0.1, 2, True, True),
        (0.5, 1, True, False),
    ):
        options = {
            "p": p,
            "passes": passes,
            "activation": activation,
            "logit_dropout": logit_dropout,
            "consistent": consistent,
            "seed": 5,
        }
        options["logit_dropout"] |= len(weights) == 1  # the model has no other dropout
        expected = stacked(x, weights, biases, **options)
        with backend("reference"):
            assert_close(
                mc_dropout_mlp(x, weights, biases, **options), MCStats(*(t.float() for t in expected)), 2e-6
            )
        assert_close(
            mc_dropout_mlp(x, weights, biases, **options), MCStats(*(t.float() for t in expected)), 3e-6
        )


def test_float64_runs_on_the_definition():
    x, weights, biases = mlp((20, 6, 12, 5), torch.float64)
    options = {"p": 0.3, "passes": 6, "logit_dropout": True, "seed": 2}
    assert_close(mc_dropout_mlp(x, weights, biases, **options), stacked(x, weights, biases, **options), 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The first layer is computed in the dtype of x, as in torch.

    The next layers are computed in float32.
    """
    x, weights, biases = mlp((40, 16, 32, 10), dtype)
    options = {"p": 0.2, "passes": 5, "seed": 1}
    hidden = F.gelu(F.linear(x, weights[0], biases[0]))
    wide = mc_dropout_mlp(
        hidden.double(),
        [torch.eye(32).double(), weights[1].double()],
        [None, biases[1].double()],
        p=0.2,
        passes=1,
    )
    assert wide.mean_probs.dtype == torch.float64
    with backend("reference"):
        expected = mc_dropout_mlp(x, weights, biases, **options)
    assert_close(mc_dropout_mlp(x, weights, biases, **options), expected, 2e-6)
    widened = stacked(x, weights, biases, **options)
    torch.testing.assert_close(expected.mean_probs, widened.mean_probs.float(), atol=0.02, rtol=0)


def test_large_logits_stay_within_the_promised_tolerance():
    x, weights, biases = mlp((100, 16, 64, 10))
    weights[1] *= 10
    expected = stacked(x, weights, biases, p=0.3, passes=10)
    assert_close(
        mc_dropout_mlp(x, weights, biases, p=0.3, passes=10, seed=0),
        MCStats(*(t.float() for t in expected)),
        1e-5,
    )


def test_leading_dimensions_and_strides():
    x, weights, biases = mlp((24, 10, 16, 5))
    flat = mc_dropout_mlp(x, weights, biases, p=0.3, seed=4)
    shaped = mc_dropout_mlp(x.reshape(2, 3, 4, 10), weights, biases, p=0.3, seed=4)
    assert shaped.mean_probs.shape == (2, 3, 4, 5)
    assert shaped.entropy.shape == (2, 3, 4)
    for got, want in zip(shaped, flat, strict=True):
        assert torch.equal(got.flatten(), want.flatten())
    logits = normal(10, 6).T  # without layers, the kernel reads x with its strides
    strided = torch.ops.uefl.mc_dropout_mlp(
        logits, torch.empty(0), [10], [0.3], 5, "gelu", False, torch.tensor(1)
    )
    dense = torch.ops.uefl.mc_dropout_mlp(
        logits.contiguous(), torch.empty(0), [10], [0.3], 5, "gelu", False, torch.tensor(1)
    )
    assert all(map(torch.equal, strided, dense))
    assert mc_dropout_mlp(x[0], weights, biases, p=0.3).mean_probs.shape == (5,)


def test_rates_of_each_dropout():
    """Layers before the first live dropout run once, which changes no value."""
    x, weights, biases = mlp((30, 8, 12, 9, 4))
    whole = mc_dropout_mlp(x, weights, biases, p=[0.0, 0.4], seed=3)
    hidden = F.gelu(F.linear(x, weights[0], biases[0]))
    piece = mc_dropout_mlp(hidden, weights[1:], biases[1:], p=0.4, seed=3)
    assert_close(whole, piece, 1e-6)
    logits_only = mc_dropout_mlp(x, weights, biases, p=[0, 0, 0.4], logit_dropout=True, seed=3)
    hidden = F.gelu(F.linear(hidden, weights[1], biases[1]))
    assert_close(
        logits_only, mc_dropout_mlp(hidden, weights[2:], biases[2:], p=0.4, logit_dropout=True, seed=3), 1e-6
    )


def test_without_dropout_all_passes_agree():
    x, weights, biases = mlp((9, 8, 12, 4))
    stats = mc_dropout_mlp(x, weights, biases, p=0.0, passes=1000)
    expected = F.linear(F.gelu(F.linear(x, weights[0], biases[0])), weights[1], biases[1]).softmax(-1)
    torch.testing.assert_close(stats.mean_probs, expected, atol=1e-6, rtol=0)
    assert float(stats.mutual_info.max()) < 1e-6
    assert float(stats.variance.max()) == 0


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_one_pass_has_no_spread(name):
    if name == "cpu" and not COMPILED:
        pytest.skip("not compiled")
    with backend(name):
        stats = mc_dropout_mlp(*mlp((9, 8, 12, 4)), p=0.5, passes=1, seed=0)
    assert float(stats.variance.abs().max()) == 0
    assert float(stats.mutual_info.max()) < 1e-6


def test_no_bias():
    x, weights, _ = mlp((9, 8, 12, 4))
    zeros = [torch.zeros(len(weight)) for weight in weights]
    expected = mc_dropout_mlp(x, weights, zeros, p=0.3, seed=1)
    assert_close(mc_dropout_mlp(x, weights, p=0.3, seed=1), expected, 0)
    assert_close(mc_dropout_mlp(x, weights, [None, zeros[1]], p=0.3, seed=1), expected, 0)


def test_bounds_are_met_over_many_inputs():
    for scale in (0.01, 1.0, 30.0, 1e4):
        x, weights, biases = mlp((200, 6, 20, 7))
        stats = mc_dropout_mlp(x * scale, weights, biases, p=0.5, passes=9, seed=0)
        assert float((stats.mean_probs.sum(-1) - 1).abs().max()) < 1e-6
        assert float(stats.mean_probs.min()) >= 0
        assert float(stats.expected_entropy.min()) >= -1e-6
        assert float(stats.entropy.max()) <= math.log(7) + 1e-6
        assert float(stats.mutual_info.min()) >= 0
        assert float(stats.variance.min()) >= 0
        assert float(stats.variance.max()) <= 0.25 + 1e-6


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_in_their_row(value, name):
    if name == "cpu" and not COMPILED:
        pytest.skip("not compiled")
    x, weights, biases = mlp((20, 8, 12, 4))
    with backend(name):
        expected = mc_dropout_mlp(x, weights, biases, p=0.3, seed=0)
        x[7, 3] = value
        found = mc_dropout_mlp(x, weights, biases, p=0.3, seed=0)
    others = torch.arange(20) != 7
    assert bool(found.mean_probs[7].isnan().all())
    assert bool(found.expected_entropy[7].isnan())
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got[others], want[others])


def test_dropped_value_has_no_effect():
    logits = torch.tensor([[1.0, 2.0, float("nan")]])
    arguments = (torch.empty(0), [3], [0.9], 1, "gelu", False)
    for seed in range(40):
        if not torch.ops.uefl.dropout_mask(torch.tensor(seed), 1, 3, 0, 0, 0.9, False)[0, 2]:
            for ops in (torch.ops.uefl, torch.ops.uefl_reference):
                assert bool(ops.mc_dropout_mlp(logits, *arguments, torch.tensor(seed))[0].isfinite().all())


def test_follows_torchs_generator():
    x, weights, biases = mlp((9, 8, 12, 4))
    torch.manual_seed(3)
    first, second = (mc_dropout_mlp(x, weights, biases, p=0.3) for _ in range(2))
    torch.manual_seed(3)
    assert_close(mc_dropout_mlp(x, weights, biases, p=0.3), first, 0)
    assert not torch.equal(first.mean_probs, second.mean_probs)


def test_many_passes_converge_to_the_mean_of_torchs_dropout():
    torch.manual_seed(0)
    x, weights, biases = mlp((4, 6, 30, 5))
    hidden = F.gelu(F.linear(x, weights[0], biases[0]))
    plain = torch.stack(
        [F.linear(F.dropout(hidden, 0.3), weights[1], biases[1]).softmax(-1) for _ in range(4000)]
    )
    stats = mc_dropout_mlp(x, weights, biases, p=0.3, passes=4000)
    torch.testing.assert_close(stats.mean_probs, plain.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(stats.variance, plain.var(0), atol=0.003, rtol=0)


@pytest.mark.every_variant
def test_same_bits_every_time_and_for_any_number_of_threads():
    hidden, weights, biases = mlp((500, 16, 48, 20, 10))
    parameters = torch.cat(
        [piece for weight, bias in zip(weights, biases, strict=True) for piece in (weight.flatten(), bias)]
    )
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            for consistent in (False, True):
                arguments = (
                    hidden,
                    parameters,
                    [16, 48, 20, 10],
                    [0.2, 0.1, 0.1, 0.3],
                    5,
                    "gelu",
                    consistent,
                    torch.tensor(6),
                )
                results.append(
                    [torch.ops.uefl.mc_dropout_mlp(*arguments) for _ in range(20 if count == 2 else 2)]
                )
    finally:
        torch.set_num_threads(threads)
    for i in (0, 1):
        runs = [run for group in results[i::2] for run in group]
        assert all(torch.equal(got, want) for run in runs for got, want in zip(run, runs[0], strict=True))


@pytest.mark.every_variant
def test_a_row_does_not_depend_on_the_size_of_the_batch():
    x, weights, biases = mlp((100, 10, 16, 5))
    parameters = torch.cat(
        [piece for weight, bias in zip(weights, biases, strict=True) for piece in (weight.flatten(), bias)]
    )
    whole, piece = (
        torch.ops.uefl.mc_dropout_mlp(
            rows, parameters, [10, 16, 5], [0.1, 0.4, 0.0], 5, "relu", False, torch.tensor(6)
        )
        for rows in (x, x[:37])
    )
    for got, want in zip(piece, whole, strict=True):
        assert torch.equal(got, want[:37])


def test_the_layer_before_the_dropout_adds_its_own_rounding_only():
    """Only the first product may round a row differently in a batch of another size."""
    x, weights, biases = mlp((100, 200, 64, 5))
    whole = mc_dropout_mlp(x, weights, biases, p=0.3, passes=5, seed=6)
    for rows in (1, 3, 37):
        piece = mc_dropout_mlp(x[:rows], weights, biases, p=0.3, passes=5, seed=6)
        assert_close(piece, MCStats(*(value[:rows] for value in whole)), 3e-6)
