"""Errors of the transition ops, and inputs that only look wrong."""

from __future__ import annotations

import pytest
import torch

from uefl_kernels import (
    backend,
    log_transition_matrix,
    log_transition_probs,
    transition_double_softmax,
    transition_nll,
)

from .transition_cases import LOGITS, TARGETS

BACKENDS = ("auto", "reference")

Z, Y, A = torch.zeros(3, 4), torch.tensor([0, 1, 1]), torch.zeros(2, 4)
WRONG = {
    "no tensor": (([[1.0]], Y, A), {}, TypeError, r"logits.*torch\.Tensor.*list"),
    "logits dtype": (
        (Z.int(), Y, A),
        {},
        TypeError,
        r"logits.*torch\.int32.*float32, bfloat16, float16.*float64",
    ),
    "targets dtype": ((Z, Y.float(), A), {}, TypeError, r"targets.*torch\.float32.*int64"),
    "matrix dtype": ((Z, Y, A.half()), {}, TypeError, r"log_transition.*torch\.float16.*float32.*float64"),
    "logits shape": ((Z[0], Y, A), {}, ValueError, r"logits.*\[B, K\].*\[4\]"),
    "no classes": ((Z[:, :0], Y, A), {}, ValueError, r"class.*\[3, 0\]"),
    "targets shape": ((Z, Y[:2], A), {}, ValueError, r"targets.*\[3\].*logits.*\[2\]"),
    "classes differ": ((Z, Y, A[:, :3]), {}, ValueError, r"log_transition.*\[M, 4\].*\[G, M, 4\].*\[2, 3\]"),
    "no sets": ((Z, Y, A[:0]), {}, ValueError, r"log_transition.*\[0, 4\]"),
    "groups missing": ((Z, Y, A[None]), {}, ValueError, r"log_transition \[1, 2, 4\].*groups \[B\]"),
    "groups given": ((Z, Y, A), {"groups": Y}, ValueError, r"log_transition \[2, 4\].*groups"),
    "groups shape": ((Z, Y, A[None]), {"groups": Y[:1]}, ValueError, r"groups.*\[3\]"),
    "marginal shape": ((Z, Y, A), {"log_marginal": A}, ValueError, r"log_marginal.*\[4\].*got \[2, 4\]"),
    "matrix learns": ((Z, Y, A.clone().requires_grad_()), {}, ValueError, "log_transition.*gradient"),
    "no targets": ((Z, None, A), {}, TypeError, "targets.*NoneType"),
    "ignore_index": ((Z, Y, A), {"ignore_index": 1.0}, TypeError, r"ignore_index.*int.*1\.0"),
    "no bool": ((Z, Y, A), {"ignore_index": True}, TypeError, "ignore_index.*int.*True"),
    "65 bits": ((Z, Y, A), {"ignore_index": 2**63}, TypeError, "ignore_index.*64 bits"),
    "device": ((Z.to("meta"), Y, A), {}, ValueError, "logits .*meta.*log_transition .*cpu"),
}


@pytest.mark.parametrize("loss", [transition_nll, transition_double_softmax])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, loss):
    arguments, options, error, message = WRONG[case]
    with pytest.raises(error, match=f"^{loss.__name__}: .*{message}"):
        loss(*arguments, **options)


INF = torch.inf
WRONG_VALUES = {
    "target": ((Z, torch.tensor([0, 1, 2]), A), {}, r"targets\[2\].*2.*0 to 1"),
    "negative target": ((Z, torch.tensor([0, -1, 0]), A), {}, r"targets\[1\].*-1.*0 to 1"),
    "group": ((Z, Y, torch.stack([A, A])), {"groups": Y + 1}, r"groups\[1\].*2.*0 to 1.*log_transition"),
    "NaN": (
        (Z, Y, torch.tensor([[0, 0, torch.nan, 0], [0, 0, 0, 0]])),
        {},
        "log_transition.*group 0.*NaN.*class 2",
    ),
    "infinity": (
        (Z, Y, torch.tensor([[0, INF, 0, 0], [0, 0, 0, 0]])),
        {},
        "log_transition.*group 0.*NaN.*class 1",
    ),
    "nothing": ((Z, Y, A - INF), {}, "log_transition.*group 0 .*-inf.*prior"),
    "empty set": (
        (Z, Y, torch.tensor([[0.0] * 4, [-INF] * 4])),
        {},
        r"targets\[1\].*1.*log_transition.*group 0.*-inf",
    ),
}

SHARES = r"log_transition.*group {}.*\b1\b.*set {}.*log_transition_matrix"


@pytest.mark.parametrize("name", BACKENDS)
def test_shares_instead_of_their_logarithms(name):
    shares = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    with backend(name):
        for matrix in (shares, shares.double(), torch.full((2, 4), 0.2501).bfloat16().float()):
            for call in (transition_nll, transition_double_softmax):
                with pytest.raises(RuntimeError, match=f"^{call.__name__}: {SHARES.format(0, 1)}"):
                    call(Z[:2].to(matrix.dtype), Y[1:], matrix)
            with pytest.raises(RuntimeError, match=f"^log_transition_probs: {SHARES.format(0, 0)}"):
                log_transition_probs(Z.to(matrix.dtype), matrix)
        with pytest.raises(RuntimeError, match=f"^transition_nll: {SHARES.format(1, 0)}"):
            transition_nll(Z, Y * 0, torch.stack([A, shares]), groups=Y)


@pytest.mark.parametrize("name", BACKENDS)
def test_logarithms_may_be_above_zero(name):
    """A prior of a set may exceed the prior of the target, so its logarithm may be above zero.

    Counts are as good as shares, and a constant changes nothing.
    """
    counts = torch.tensor([[2.0, 1.0, 1.0], [1.0, 3.0, 1.0]], dtype=torch.float64)
    shares = torch.tensor([[0.85, 0.1, 0.05], [0.3, 0.3, 0.4]], dtype=torch.float64)
    with backend(name):
        above = log_transition_matrix(shares), log_transition_matrix(shares, torch.tensor([0.9, 0.1]))
        for matrix in (*above, shares.log() + 7, counts.log()):
            assert (matrix[0] > 0).any()
            log_g = log_transition_probs(LOGITS[:2], matrix)
            torch.testing.assert_close(
                transition_nll(LOGITS[:2], TARGETS[:2].clamp(max=1), matrix), -log_g[[0, 1], [0, 1]]
            )
        one = log_transition_matrix(torch.full((1, 7), 1 / 7))  # zeros up to rounding
        assert transition_nll(LOGITS[:, [0] * 7], torch.zeros(3, dtype=torch.int64), one).abs().max() < 1e-12


@pytest.mark.parametrize("name", BACKENDS)
def test_weights_whose_logarithms_look_like_shares(name):
    """The weights are accepted with a constant added, and for one class as they are."""
    weights, first = (
        torch.tensor([[1.0, torch.e]], dtype=torch.float64).log(),
        torch.zeros(3, dtype=torch.int64),
    )
    with backend(name):
        with pytest.raises(RuntimeError, match=f"^transition_nll: {SHARES.format(0, 0)}"):
            transition_nll(LOGITS[:, :2], first, weights)
        # a single set has probability 1
        assert transition_nll(LOGITS[:, :2], first, weights + 1).abs().max() < 1e-12
        for matrix in (torch.tensor([[1.0], [0.0]]), torch.tensor([[0.995], [-0.005]])):
            log_g = torch.tensor([1.0, 0.0]).log_softmax(0).expand(3, 2)
            torch.testing.assert_close(log_transition_probs(Z[:, :1], matrix), log_g)
            torch.testing.assert_close(transition_nll(Z[:, :1], first, matrix), -log_g[:, 0])
            torch.testing.assert_close(
                transition_double_softmax(Z[:, :1], first, matrix), -log_g.exp().log_softmax(1)[:, 0]
            )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values(case, name):
    arguments, options, message = WRONG_VALUES[case]
    with backend(name), pytest.raises(RuntimeError, match=f"^transition_nll: {message}"):
        transition_nll(*arguments, **options)


DIRECT = {
    "logits": ((Z.int(), Y, A[None], A[:1], None), ".*logits.*float32"),
    "logits shape": ((Z[0], Y, A[None], A[:1], None), "logits.*shape"),
    "matrix": ((Z, Y, A, A[:1], None), "log_transition.*shape"),
    "matrix dtype": ((Z, Y, A[None].int(), A[:1], None), "log_transition.*float32.*float64"),
    "marginal": ((Z, Y, A[None], A, None), r"log_marginal.*\[1, 4\]"),
    "targets": ((Z, Y.int(), A[None], A[:1], None), "targets.*int64"),
    "groups": ((Z, Y, torch.stack([A, A]), A, None), r".*groups.*log_transition.*\[1, M, K\]"),
}


@pytest.mark.parametrize("case", DIRECT)
def test_direct_calls_are_guarded(case):
    arguments, message = DIRECT[case]
    with pytest.raises(RuntimeError, match=f"^transition_nll: {message}"):
        torch.ops.uefl.transition_nll(*arguments, -100, True)
