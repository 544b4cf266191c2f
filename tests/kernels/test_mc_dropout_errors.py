"""Errors of mc_dropout_mlp, and direct calls of its ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uefl_kernels import COMPILED, mc_dropout_mlp

from .mc_dropout_cases import mlp

X, W, B = mlp((4, 6, 8, 3))
WRONG = {
    "no layers": (lambda: mc_dropout_mlp(X, [], p=0.1), ValueError, "weights.*empty"),
    "biases": (lambda: mc_dropout_mlp(X, W, B[:1], p=0.1), ValueError, "2 weights.*1 biases"),
    "x is a list": (lambda: mc_dropout_mlp([1.0], W, B, p=0.1), TypeError, r"x .*torch\.Tensor.*list"),
    "x is an array": (
        lambda: mc_dropout_mlp(X.numpy(), W, B, p=0.1),
        TypeError,
        r"x .*ndarray; torch\.from_numpy",
    ),
    "one weight": (lambda: mc_dropout_mlp(X, W[0], B, p=0.1), TypeError, "weights.*list.*Tensor"),
    "one bias": (lambda: mc_dropout_mlp(X, W, B[0], p=0.1), TypeError, "biases.*list.*Tensor"),
    "no weights": (lambda: mc_dropout_mlp(X, None, B, p=0.1), TypeError, "weights.*list.*NoneType"),
    "parameters": (lambda: mc_dropout_mlp(X, (w for w in W), p=0.1), TypeError, "weights.*list.*generator"),
    "flag": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, consistent="yes"),
        TypeError,
        "consistent.*True.*False.*'yes'",
    ),
    "dtype of x": (lambda: mc_dropout_mlp(X.int(), W, B, p=0.1), TypeError, r"x .*torch\.int32.*float32"),
    "dtype of weight": (
        lambda: mc_dropout_mlp(X, [W[0].int(), W[1]], B, p=0.1),
        TypeError,
        r"weights\[0\].*torch\.int32",
    ),
    "device": (
        lambda: mc_dropout_mlp(X, [W[0].to("meta"), W[1]], B, p=0.1),
        ValueError,
        r"x .*cpu.*weights\[0\].*meta",
    ),
    "scalar": (lambda: mc_dropout_mlp(X[0, 0], W, B, p=0.1), ValueError, r"x .*\[..., D\]"),
    "width": (
        lambda: mc_dropout_mlp(X[:, :5], W, B, p=0.1),
        ValueError,
        r"weights\[0\].*\[out, 5\].*x.*\[8, 6\]",
    ),
    "chain": (
        lambda: mc_dropout_mlp(X, W[:1] * 2, B, p=0.1),
        ValueError,
        r"weights\[1\].*\[out, 8\].*weights\[0\]",
    ),
    "bias": (lambda: mc_dropout_mlp(X, W, B[::-1], p=0.1), ValueError, r"biases\[0\].*\[8\]"),
    "p of one": (lambda: mc_dropout_mlp(X, W, B, p=1.0), ValueError, r"p .*\[0, 1\).*1\.0"),
    "p negative": (lambda: mc_dropout_mlp(X, W, B, p=[-0.1]), ValueError, r"p .*\[0, 1\).*got -0\.1"),
    "p NaN": (lambda: mc_dropout_mlp(X, W, B, p=float("nan")), ValueError, r"p .*\[0, 1\).*nan"),
    "rates": (lambda: mc_dropout_mlp(X, W, B, p=[0.1, 0.1]), ValueError, "p .*2 rates.*list.*1"),
    "passes": (lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=0), ValueError, "passes.*got 0"),
    "many passes": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=2**32),
        ValueError,
        r"passes.*2\^32.*got 4294967296",
    ),
    "half a pass": (lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=2.5), ValueError, r"passes.*got 2\.5"),
    "activation": (lambda: mc_dropout_mlp(X, W, B, p=0.1, activation="elu"), ValueError, "activation 'elu'"),
    "dtypes": (
        lambda: mc_dropout_mlp(X.double(), W, B, p=0.1),
        TypeError,
        r"x .*torch\.float64.*weights\[0\] torch\.float32",
    ),
    "dtypes of biases": (
        lambda: mc_dropout_mlp(X, W, [B[0].half(), B[1]], p=0.1),
        TypeError,
        r"x .*torch\.float32.*biases\[0\] torch\.float16",
    ),
    "no p": (lambda: mc_dropout_mlp(X, W, B, p=None), TypeError, r"p .*\[0, 1\).*None"),
    "p of text": (lambda: mc_dropout_mlp(X, W, B, p="a"), TypeError, r"p .*\[0, 1\).*'a'"),
    "p in a tensor": (lambda: mc_dropout_mlp(X, W, B, p=torch.tensor(0.1)), TypeError, r"p .*tensor\(0\.1"),
    "p with text": (lambda: mc_dropout_mlp(X, W, B, p=["a"]), TypeError, r"p .*\[0, 1\).*\['a'\]"),
    "activations": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, activation=["gelu"]),
        ValueError,
        r"activation \['gelu'\]",
    ),
    "passes is True": (lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=True), ValueError, "passes.*True"),
    "seed is True": (lambda: mc_dropout_mlp(X, W, B, p=0.1, seed=True), ValueError, "seed.*True"),
    "seed": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, seed=-1),
        ValueError,
        r"seed.*\[0, 2\^63\).*None.*got -1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=f"mc_dropout_mlp: {message}"):
        call()


def test_rates_of_numpy():
    for p in (np.float32(0.5), [np.float64(0.5)], (0.5,)):
        assert torch.equal(
            mc_dropout_mlp(X, W, B, p=p, seed=1).mean_probs, mc_dropout_mlp(X, W, B, p=0.5, seed=1).mean_probs
        )


SEED = torch.tensor(0)
GOOD = [X, torch.zeros(21), [6, 3], [0.1, 0.1], 2, "gelu", False, SEED]
WRONG_DIRECT = {
    "dtype": (0, X.double(), "x .*float32, bfloat16.*float16"),
    "shape": (0, X[0], r"x .*\[B, widths\[0\]\]"),
    "parameters": (1, torch.zeros(20), "parameters.*weights.*bias"),
    "dtype of parameters": (1, torch.zeros(21).double(), "parameters.*float32"),
    "no widths": (2, [], "widths.*p"),
    "widths": (2, [6, 0], "widths.*1"),
    "p": (3, [0.1, 1.0], r"p .*\[0, 1\)"),
    "passes": (4, 0, r"passes.*\[1, 2\^32\)"),
    "many passes": (4, 2**32, r"passes.*\[1, 2\^32\)"),
    "activation": (5, "elu", "activation.*'relu'"),
    "seed": (7, torch.zeros(2, dtype=torch.int64), "seed.*int64"),
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
        ((torch.zeros(2, dtype=torch.int64), 1, 1, 0, 0, 0.1, False), "seed.*int64"),
        ((SEED, -1, 1, 0, 0, 0.1, False), "rows.*columns"),
        ((SEED, 1, 1, -1, 0, 0.1, False), "pass.*stream"),
        ((SEED, 1, 1, 0, 0, 1.0, False), r"p .*\[0, 1\)"),
    ],
)
def test_direct_calls_of_the_mask_are_guarded(arguments, message):
    with pytest.raises(RuntimeError, match=f"dropout_mask: {message}"):
        torch.ops.uefl.dropout_mask(*arguments)
