"""Refusals of mc_dropout_mlp, and direct calls of its ops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uefl_kernels import COMPILED, mc_dropout_mlp

from .mc_dropout_cases import mlp

X, W, B = mlp((4, 6, 8, 3))
WRONG = {
    "no layers": (lambda: mc_dropout_mlp(X, [], p=0.1), ValueError, "weights is empty"),
    "biases": (lambda: mc_dropout_mlp(X, W, B[:1], p=0.1), ValueError, "2 weights and 1 biases"),
    "x is a list": (
        lambda: mc_dropout_mlp([1.0], W, B, p=0.1),
        TypeError,
        "x must be a torch.Tensor, got list",
    ),
    "x is an array": (
        lambda: mc_dropout_mlp(X.numpy(), W, B, p=0.1),
        TypeError,
        "x must be .*, got ndarray; torch.from_numpy makes it one",
    ),
    "one weight": (
        lambda: mc_dropout_mlp(X, W[0], B, p=0.1),
        TypeError,
        "weights must be a list of tensors, one for each layer, got Tensor",
    ),
    "one bias": (
        lambda: mc_dropout_mlp(X, W, B[0], p=0.1),
        TypeError,
        "biases must be a list of tensors, one for each layer, got Tensor",
    ),
    "no weights": (
        lambda: mc_dropout_mlp(X, None, B, p=0.1),
        TypeError,
        "weights must be a list of tensors, .*, got NoneType",
    ),
    "parameters": (
        lambda: mc_dropout_mlp(X, (w for w in W), p=0.1),
        TypeError,
        "weights must be a list of tensors, .*, got generator",
    ),
    "flag": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, consistent="yes"),
        TypeError,
        "consistent must be True or False, got 'yes'",
    ),
    "dtype of x": (
        lambda: mc_dropout_mlp(X.int(), W, B, p=0.1),
        TypeError,
        r"x has dtype torch.int32, expected float32",
    ),
    "dtype of weight": (
        lambda: mc_dropout_mlp(X, [W[0].int(), W[1]], B, p=0.1),
        TypeError,
        r"weights\[0\] has dtype torch.int32",
    ),
    "device": (
        lambda: mc_dropout_mlp(X, [W[0].to("meta"), W[1]], B, p=0.1),
        ValueError,
        r"x is on cpu and weights\[0\] on meta",
    ),
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
    "rates": (
        lambda: mc_dropout_mlp(X, W, B, p=[0.1, 0.1]),
        ValueError,
        "p has 2 rates, expected one number or a list of 1, one",
    ),
    "passes": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=0),
        ValueError,
        "passes must be an integer of at least 1, got 0",
    ),
    "many passes": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=2**32),
        ValueError,
        r"passes must be below 2\^32.*; got 4294967296",
    ),
    "passes of a kind": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=2.5),
        ValueError,
        "passes must be an integer of at least 1, got 2.5",
    ),
    "activation": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, activation="elu"),
        ValueError,
        "activation 'elu' is not known, expected one of",
    ),
    "dtypes": (
        lambda: mc_dropout_mlp(X.double(), W, B, p=0.1),
        TypeError,
        r"x has dtype torch.float64 and weights\[0\] torch.float32, before the first dropout; convert one",
    ),
    "dtypes of biases": (
        lambda: mc_dropout_mlp(X, W, [B[0].half(), B[1]], p=0.1),
        TypeError,
        r"x has dtype torch.float32 and biases\[0\] torch.float16, before the first dropout; convert one",
    ),
    "no p": (
        lambda: mc_dropout_mlp(X, W, B, p=None),
        TypeError,
        r"p must be a number in \[0, 1\), or a list .*, got None",
    ),
    "p of text": (
        lambda: mc_dropout_mlp(X, W, B, p="a"),
        TypeError,
        r"p must be a number in \[0, 1\), or a list .*, got 'a'",
    ),
    "p in a tensor": (
        lambda: mc_dropout_mlp(X, W, B, p=torch.tensor(0.1)),
        TypeError,
        r"p must be a number in .*, got tensor\(0.1",
    ),
    "p with text": (
        lambda: mc_dropout_mlp(X, W, B, p=["a"]),
        TypeError,
        r"p must be a number in \[0, 1\), or a list .*, got \['a'\]",
    ),
    "activations": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, activation=["gelu"]),
        ValueError,
        r"activation \['gelu'\] is not known",
    ),
    "passes of truth": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, passes=True),
        ValueError,
        "passes must be an integer .*, got True",
    ),
    "seed of truth": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, seed=True),
        ValueError,
        "seed must be an integer in .*, got True",
    ),
    "seed": (
        lambda: mc_dropout_mlp(X, W, B, p=0.1, seed=-1),
        ValueError,
        r"seed must be an integer in \[0, 2\^63\) or None, got -1",
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
    "dtype": (0, X.double(), "x must be float32, bfloat16 or float16"),
    "shape": (0, X[0], r"x must have shape \[B, widths\[0\]\]"),
    "parameters": (1, torch.zeros(20), "parameters must hold"),
    "dtype of parameters": (1, torch.zeros(21).double(), "parameters must be float32"),
    "no widths": (2, [], "widths and p must be as many"),
    "widths": (2, [6, 0], "widths must be at least 1"),
    "p": (3, [0.1, 1.0], r"p must be in \[0, 1\)"),
    "passes": (4, 0, r"passes must be in \[1, 2\^32\)"),
    "many passes": (4, 2**32, r"passes must be in \[1, 2\^32\)"),
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
