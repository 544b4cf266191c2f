"""mc_dropout_mlp: masks against the definition, statistics against float64, gradients against autograd and finite differences."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from uefl_kernels import COMPILED, MCStats, backend, mc_dropout_mlp
from uefl_kernels._philox import philox
from uefl_kernels.ops.mc_dropout_mlp import reference

from .conftest import normal

FIELDS = MCStats._fields
SHAPES = {  # B, D, then the layers
    "one layer": (5, 7, 3),
    "two layers": (37, 20, 33, 10),
    "one class": (3, 4, 5, 1),
    "many classes": (17, 9, 24, 43),
    "three layers": (50, 12, 33, 17, 10),
    "wide": (16, 8, 40, 100, 13),
    "no rows": (0, 6, 8, 4),
}


def mlp(shape, dtype=torch.float32, offset=0.0):
    x = normal(*shape[:2], dtype=dtype, offset=offset)
    fans = list(itertools.pairwise(shape[1:]))
    weights = [(normal(fan_out, fan_in, seed=i + 1) / math.sqrt(fan_in)).to(dtype) for i, (fan_in, fan_out) in enumerate(fans)]
    return x, weights, [normal(fan_out, seed=i + 9, dtype=dtype) for i, (_, fan_out) in enumerate(fans)]


def stacked(x, weights, biases, *, p, passes, activation="gelu", logit_dropout=False, consistent=False, seed=0):
    """The composition of the docstring, in float64, with all passes kept; differentiable."""
    act, generator = reference.ACTIVATIONS[activation], torch.tensor(seed)

    def drop(value, t, stream):
        keep = reference.dropout_mask(generator, *value.shape, t, stream, p, consistent)
        return torch.where(keep, value * reference.scale(p), 0.0)

    probs = []
    for t in range(passes):
        hidden = x.double()
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = drop(act(hidden), t, i - 1) if i > 0 else hidden
            hidden = F.linear(hidden, weight.double(), bias.double())
        probs.append((drop(hidden, t, len(weights) - 1) if logit_dropout else hidden).softmax(-1))
    stack = torch.stack(probs)
    mean = stack.mean(0)
    entropy, expected = torch.special.entr(mean).sum(-1), torch.special.entr(stack).sum(-1).mean(0)
    return MCStats(mean, entropy, expected, entropy - expected, (stack - mean).square().mean(0))


def assert_close(found, expected, tolerance):
    for name, got, want in zip(FIELDS, found, expected, strict=True):
        assert got.shape == want.shape, name
        assert got.dtype == want.dtype, name
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


KNOWN_ANSWERS = [  # Random123, kat_vectors
    ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, seed, expected):
    """On tensors, and on arrays, where k-means draws from it."""
    assert [int(word) for word in philox([torch.tensor(word) for word in counter], torch.tensor(seed))] == expected
    assert [int(word[0]) for word in philox([np.array([word], np.uint64) for word in counter], seed)] == expected


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (200, 8), (0, 3)])
def test_masks_are_those_of_the_definition(shape, consistent):
    for seed, pass_, stream, p in ((0, 0, 0, 0.5), (2**62 + 12345, 99, 3, 0.1), (7, 2**31, 1, 0.99999999), (7, 1, 0, 0.0)):
        arguments = (torch.tensor(seed), *shape, pass_, stream, p, consistent)
        found, expected = torch.ops.uefl.dropout_mask(*arguments), torch.ops.uefl_reference.dropout_mask(*arguments)
        assert found.dtype == expected.dtype == torch.bool
        assert torch.equal(found, expected)


def test_the_first_masks_by_hand():
    """Counter zero, key zero: the known answer above, cut into halves."""
    halves = [word >> shift & 0xFFFF for word in KNOWN_ANSWERS[0][2] for shift in (0, 16)]
    keep = torch.ops.uefl.dropout_mask(torch.tensor(0), 1, 8, 0, 0, 0.6, False)
    assert keep[0].tolist() == [half >= round(0.6 * 65536) for half in halves]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_drop_the_right_share_independently(p):
    rows, columns, passes = 256, 512, 8
    keep = torch.stack([torch.ops.uefl.dropout_mask(torch.tensor(3), rows, columns, t, 0, p, False) for t in range(passes)])
    drop = 1 - keep.double()
    deviation = math.sqrt(p * (1 - p))
    n = drop.numel()
    assert abs(float(drop.mean()) - reference.threshold(p) / 65536) < 4 * deviation / math.sqrt(n)
    centred = (drop - p) / deviation
    for dim in range(3):  # neighbours in pass, row and column, and a neighbouring stream
        correlation = (centred * centred.roll(1, dim)).mean()
        assert abs(float(correlation)) < 4.5 / math.sqrt(n)
    other = torch.ops.uefl.dropout_mask(torch.tensor(3), rows, columns, 0, 1, p, False)
    assert abs(float((centred[0] * ((1 - other.double()) - p) / deviation).mean())) < 4.5 / math.sqrt(rows * columns)
    for dim in ((1, 2), (0, 2), (0, 1)):  # the spread of the shares of each pass, row and column is that of independent draws
        count = n / drop.shape[({0, 1, 2} - set(dim)).pop()]
        spread = (centred.mean(dim) * math.sqrt(count)).square().mean()
        assert 0.2 < float(spread) < 2.6


def test_a_consistent_mask_is_one_row_for_all():
    keep = torch.ops.uefl.dropout_mask(torch.tensor(1), 40, 30, 2, 0, 0.5, True)
    assert bool((keep == keep[:1]).all())
    assert not torch.equal(keep[:1], torch.ops.uefl.dropout_mask(torch.tensor(1), 1, 30, 3, 0, 0.5, True))


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_the_definition(shape, activation):
    x, weights, biases = mlp(shape)
    for p, passes, logit_dropout, consistent in ((0.3, 5, False, False), (0.1, 2, True, True), (0.5, 1, True, False)):
        options = {"p": p, "passes": passes, "activation": activation, "logit_dropout": logit_dropout, "consistent": consistent, "seed": 5}
        expected = stacked(x, weights, biases, **options)
        with backend("reference"):
            assert_close(mc_dropout_mlp(x, weights, biases, **options), MCStats(*(t.float() for t in expected)), 2e-6)
        assert_close(mc_dropout_mlp(x, weights, biases, **options), MCStats(*(t.float() for t in expected)), 3e-6)


def test_float64_runs_on_the_definition():
    x, weights, biases = mlp((20, 6, 12, 5), torch.float64)
    options = {"p": 0.3, "passes": 6, "logit_dropout": True, "seed": 2}
    assert_close(mc_dropout_mlp(x, weights, biases, **options), stacked(x, weights, biases, **options), 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The first layer is computed in the dtype of x, as in torch; from there on it is float32."""
    x, weights, biases = mlp((40, 16, 32, 10), dtype)
    options = {"p": 0.2, "passes": 5, "seed": 1}
    hidden = F.gelu(F.linear(x, weights[0], biases[0]))
    wide = mc_dropout_mlp(hidden.double(), [torch.eye(32).double(), weights[1].double()], [None, biases[1].double()], p=0.2, passes=1)
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
    assert_close(mc_dropout_mlp(x, weights, biases, p=0.3, passes=10, seed=0), MCStats(*(t.float() for t in expected)), 1e-5)


def test_leading_dimensions_and_strides():
    x, weights, biases = mlp((24, 10, 16, 5))
    flat = mc_dropout_mlp(x, weights, biases, p=0.3, seed=4)
    shaped = mc_dropout_mlp(x.reshape(2, 3, 4, 10), weights, biases, p=0.3, seed=4)
    assert shaped.mean_probs.shape == (2, 3, 4, 5)
    assert shaped.entropy.shape == (2, 3, 4)
    for got, want in zip(shaped, flat, strict=True):
        assert torch.equal(got.flatten(), want.flatten())
    logits = normal(10, 6).T  # the kernel reads x itself here
    strided = torch.ops.uefl.mc_dropout_mlp(logits, torch.empty(0), [10], [0.3], 5, "gelu", False, torch.tensor(1))
    dense = torch.ops.uefl.mc_dropout_mlp(logits.contiguous(), torch.empty(0), [10], [0.3], 5, "gelu", False, torch.tensor(1))
    assert all(map(torch.equal, strided, dense))
    assert mc_dropout_mlp(x[0], weights, biases, p=0.3).mean_probs.shape == (5,)


def test_rates_of_each_dropout():
    """Layers before the first live dropout run once, which changes no value."""
    x, weights, biases = mlp((30, 8, 12, 9, 4))
    whole = mc_dropout_mlp(x, weights, biases, p=[0.0, 0.4], seed=3)
    hidden = F.gelu(F.linear(x, weights[0], biases[0]))
    part = mc_dropout_mlp(hidden, weights[1:], biases[1:], p=0.4, seed=3)
    assert_close(whole, part, 1e-6)
    logits_only = mc_dropout_mlp(x, weights, biases, p=[0, 0, 0.4], logit_dropout=True, seed=3)
    hidden = F.gelu(F.linear(hidden, weights[1], biases[1]))
    assert_close(logits_only, mc_dropout_mlp(hidden, weights[2:], biases[2:], p=0.4, logit_dropout=True, seed=3), 1e-6)


def test_without_dropout_all_passes_agree():
    x, weights, biases = mlp((9, 8, 12, 4))
    stats = mc_dropout_mlp(x, weights, biases, p=0.0, passes=1000)
    expected = F.linear(F.gelu(F.linear(x, weights[0], biases[0])), weights[1], biases[1]).softmax(-1)
    torch.testing.assert_close(stats.mean_probs, expected, atol=1e-6, rtol=0)
    assert float(stats.mutual_info.max()) < 1e-6
    assert float(stats.variance.max()) == 0


def test_no_bias():
    x, weights, _ = mlp((9, 8, 12, 4))
    zeros = [torch.zeros(len(weight)) for weight in weights]
    expected = mc_dropout_mlp(x, weights, zeros, p=0.3, seed=1)
    assert_close(mc_dropout_mlp(x, weights, p=0.3, seed=1), expected, 0)
    assert_close(mc_dropout_mlp(x, weights, [None, zeros[1]], p=0.3, seed=1), expected, 0)


def test_bounds_hold_over_many_inputs():
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


def test_a_dropped_value_leaves_nothing_behind():
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
    plain = torch.stack([F.linear(F.dropout(hidden, 0.3), weights[1], biases[1]).softmax(-1) for _ in range(4000)])
    stats = mc_dropout_mlp(x, weights, biases, p=0.3, passes=4000)
    torch.testing.assert_close(stats.mean_probs, plain.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(stats.variance, plain.var(0), atol=0.003, rtol=0)


def test_same_bits_every_time_and_for_any_number_of_threads():
    hidden, weights, biases = mlp((500, 16, 48, 20, 10))
    parameters = torch.cat([part for weight, bias in zip(weights, biases, strict=True) for part in (weight.flatten(), bias)])
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            for consistent in (False, True):
                arguments = (hidden, parameters, [16, 48, 20, 10], [0.2, 0.1, 0.1, 0.3], 5, "gelu", consistent, torch.tensor(6))
                results.append([torch.ops.uefl.mc_dropout_mlp(*arguments) for _ in range(20 if count == 2 else 2)])
    finally:
        torch.set_num_threads(threads)
    for i in (0, 1):
        runs = [run for group in results[i::2] for run in group]
        assert all(torch.equal(got, want) for run in runs for got, want in zip(run, runs[0], strict=True))


def test_a_row_does_not_depend_on_the_size_of_the_batch():
    x, weights, biases = mlp((100, 10, 16, 5))
    parameters = torch.cat([part for weight, bias in zip(weights, biases, strict=True) for part in (weight.flatten(), bias)])
    whole, part = (
        torch.ops.uefl.mc_dropout_mlp(rows, parameters, [10, 16, 5], [0.1, 0.4, 0.0], 5, "relu", False, torch.tensor(6))
        for rows in (x, x[:37])
    )
    for got, want in zip(part, whole, strict=True):
        assert torch.equal(got, want[:37])


def loss_of(stats):
    weight = torch.arange(1, stats.mean_probs.shape[-1] + 1, dtype=stats.mean_probs.dtype)
    return (stats.mean_probs * weight).square().sum() + stats.entropy.sum() + 2 * stats.mutual_info.sum() + (stats.variance * weight).sum()


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("logit_dropout", [False, True])
def test_gradients_match_autograd_over_all_passes(activation, logit_dropout):
    x, weights, biases = mlp((11, 6, 9, 8, 4))
    gradients = []
    for function, dtype in ((stacked, torch.float64), (mc_dropout_mlp, torch.float32), (mc_dropout_mlp, torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights, *biases)]
        options = {"p": 0.3, "passes": 4, "activation": activation, "logit_dropout": logit_dropout, "seed": 7}
        loss_of(function(leaves[0], leaves[1:4], leaves[4:], **options)).backward()
        gradients.append([leaf.grad.double() for leaf in leaves])
    for expected, single, double in zip(*gradients, strict=True):
        torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(double, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("consistent", [False, True])
def test_gradcheck(consistent):
    x, weights, biases = mlp((3, 4, 5, 3), torch.float64)

    def run(*leaves):
        return mc_dropout_mlp(leaves[0], leaves[1:3], leaves[3:], p=0.3, passes=3, logit_dropout=True, consistent=consistent, seed=1)

    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in (x, *weights, *biases)])


def test_gradient_of_the_logits_alone():
    """No layer after the first dropout."""
    x = normal(4, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: mc_dropout_mlp(x, [torch.eye(5).double()], p=0.4, logit_dropout=True, seed=1), [x])


def test_second_derivative_is_an_error():
    x, weights, biases = mlp((3, 4, 5, 3))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(mc_dropout_mlp(x, weights, biases, p=0.3, seed=0).entropy.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="mc_dropout_mlp: has no second derivative"):
        gradient.sum().backward()


def test_opcheck():
    arguments = (normal(5, 6).requires_grad_(), normal(6 * 4 + 4).requires_grad_(), [6, 4], [0.3, 0.2], 3, "gelu", False, torch.tensor(1))
    torch.library.opcheck(torch.ops.uefl.mc_dropout_mlp.default, arguments)
    torch.library.opcheck(torch.ops.uefl.dropout_mask.default, (torch.tensor(1), 3, 9, 0, 0, 0.5, False))


def test_compile_fullgraph():
    x, weights, biases = mlp((9, 8, 12, 4))
    weights[0].requires_grad_()
    seeded = torch.compile(lambda x: mc_dropout_mlp(x, weights, biases, p=0.3, seed=1), fullgraph=True, backend="aot_eager")
    stats = seeded(x)
    assert_close(stats, mc_dropout_mlp(x, weights, biases, p=0.3, seed=1), 1e-6)
    loss_of(stats).backward()
    compiled, weights[0].grad = weights[0].grad, None
    loss_of(mc_dropout_mlp(x, weights, biases, p=0.3, seed=1)).backward()
    torch.testing.assert_close(compiled, weights[0].grad)

    follows = torch.compile(lambda x: mc_dropout_mlp(x, weights, biases, p=0.3), fullgraph=True, backend="aot_eager")
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(follows(x).mean_probs)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_autocast():
    x, weights, biases = mlp((9, 8, 12, 4))
    with torch.autocast("cpu", torch.bfloat16):
        stats = mc_dropout_mlp(x, weights, biases, p=0.3, seed=1)
    assert stats.mean_probs.dtype == torch.float32
    torch.testing.assert_close(stats.mean_probs, mc_dropout_mlp(x, weights, biases, p=0.3, seed=1).mean_probs, atol=0.02, rtol=0)


def test_nothing_of_the_size_of_all_passes_is_allocated():
    """The definition and the backward, in Python: peak memory does not grow with the number of passes."""
    x, weights, biases = mlp((200, 16, 64, 10))
    x.requires_grad_()

    def peak(passes):
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            loss_of(mc_dropout_mlp(x, weights, biases, p=0.3, passes=passes, seed=1)).backward()
        live = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most

    peak(2)
    assert peak(40) < 1.5 * peak(4)


VARIANT = """
import torch
from tests.kernels.test_mc_dropout_mlp import *
for shape in SHAPES.values():
    x, weights, biases = mlp(shape)
    for activation in reference.ACTIVATIONS:
        options = dict(p=0.3, passes=3, activation=activation, logit_dropout=True, seed=5)
        expected = stacked(x, weights, biases, **options)
        assert_close(mc_dropout_mlp(x, weights, biases, **options), MCStats(*(t.float() for t in expected)), 3e-6)
"""


@pytest.mark.skipif(not COMPILED, reason="not compiled")
@pytest.mark.parametrize("variant", ["avx512", "avx2", "portable"])
def test_every_instruction_set(variant):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {**os.environ, "UEFL_CPU": variant, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", VARIANT], env=environment, cwd=root, capture_output=True, text=True)
    if "needs instructions that this CPU lacks" in done.stderr:
        pytest.skip(f"no {variant} here")
    assert done.returncode == 0, done.stderr[-2000:]


X, W, B = mlp((4, 6, 8, 3))
WRONG = {
    "no layers": (lambda: mc_dropout_mlp(X, [], p=0.1), ValueError, "weights is empty"),
    "biases": (lambda: mc_dropout_mlp(X, W, B[:1], p=0.1), ValueError, "2 weights and 1 biases"),
    "x is a list": (lambda: mc_dropout_mlp([1.0], W, B, p=0.1), TypeError, "x must be a torch.Tensor, got list"),
    "dtype of x": (lambda: mc_dropout_mlp(X.int(), W, B, p=0.1), TypeError, r"x has dtype torch.int32, expected float32"),
    "dtype of weight": (lambda: mc_dropout_mlp(X, [W[0].int(), W[1]], B, p=0.1), TypeError, r"weights\[0\] has dtype torch.int32"),
    "device": (lambda: mc_dropout_mlp(X, [W[0].to("meta"), W[1]], B, p=0.1), ValueError, r"x is on cpu and weights\[0\] on meta"),
    "scalar": (lambda: mc_dropout_mlp(X[0, 0], W, B, p=0.1), ValueError, r"x must have shape \[..., D\]"),
    "width": (
        lambda: mc_dropout_mlp(X[:, :5], W, B, p=0.1),
        ValueError,
        r"weights\[0\] must have shape \[out, 5\] to follow x, got \[8, 6\]",
    ),
    "chain": (
        lambda: mc_dropout_mlp(X, W[:1] * 2, B, p=0.1),
        ValueError,
        r"weights\[1\] must have shape \[out, 8\] to follow weights\[0\]",
    ),
    "bias": (lambda: mc_dropout_mlp(X, W, B[::-1], p=0.1), ValueError, r"biases\[0\] must have shape \[8\]"),
    "p of one": (lambda: mc_dropout_mlp(X, W, B, p=1.0), ValueError, r"p must be in \[0, 1\), got 1.0"),
    "p negative": (lambda: mc_dropout_mlp(X, W, B, p=[-0.1]), ValueError, r"p must be in \[0, 1\), got -0.1"),
    "p NaN": (lambda: mc_dropout_mlp(X, W, B, p=float("nan")), ValueError, r"p must be in \[0, 1\), got nan"),
    "rates": (lambda: mc_dropout_mlp(X, W, B, p=[0.1, 0.1]), ValueError, "p has 2 rates, expected one number or 1"),
    "passes": (lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=0), ValueError, "passes must be an integer of at least 1, got 0"),
    "passes of a kind": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=2.5),
        ValueError,
        "passes must be an integer of at least 1, got 2.5",
    ),
    "activation": (lambda: mc_dropout_mlp(X, W, B, p=0.1, activation="elu"), ValueError, "activation 'elu' is not known, expected one of"),
    "seed": (lambda: mc_dropout_mlp(X, W, B, p=0.1, seed=-1), ValueError, r"seed must be an integer in \[0, 2\^63\) or None, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=f"mc_dropout_mlp: {message}"):
        call()


SEED = torch.tensor(0)
GOOD = [X, torch.zeros(21), [6, 3], [0.1, 0.1], 2, "gelu", False, SEED]
WRONG_DIRECT = {
    "dtype": (0, X.double(), "x must be float32, bfloat16 or float16"),
    "shape": (0, X[0], r"x must have shape \[B, widths\[0\]\]"),
    "parameters": (1, torch.zeros(20), "parameters must hold"),
    "dtype of parameters": (1, torch.zeros(21).double(), "parameters must be float32"),
    "no widths": (2, [], "widths and p must be as many"),
    "widths": (2, [6, 0], "widths must be at least 1"),
    "p": (3, [0.1, 1.0], r"p must be in \[0, 1\)"),
    "passes": (4, 0, "passes must be at least 1"),
    "activation": (5, "elu", "activation must be"),
    "seed": (7, torch.zeros(2, dtype=torch.int64), "seed must be an int64 tensor of no dimensions"),
}


@pytest.mark.skipif(not COMPILED, reason="not compiled")
@pytest.mark.parametrize("case", WRONG_DIRECT)
def test_direct_calls_are_guarded(case):
    position, value, message = WRONG_DIRECT[case]
    with pytest.raises(RuntimeError, match=f"mc_dropout_mlp: {message}"):
        torch.ops.uefl.mc_dropout_mlp(*GOOD[:position], value, *GOOD[position + 1 :])


@pytest.mark.skipif(not COMPILED, reason="not compiled")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, dtype=torch.int64), 1, 1, 0, 0, 0.1, False), "seed must be"),
        ((SEED, -1, 1, 0, 0, 0.1, False), "rows and columns"),
        ((SEED, 1, 1, -1, 0, 0.1, False), "pass and stream"),
        ((SEED, 1, 1, 0, 0, 1.0, False), r"p must be in \[0, 1\)"),
    ],
)
def test_direct_calls_of_the_mask_are_guarded(arguments, message):
    with pytest.raises(RuntimeError, match=f"dropout_mask: {message}"):
        torch.ops.uefl.dropout_mask(*arguments)
