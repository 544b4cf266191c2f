"""The transition and set-proportion kernels of Triton agree with the reference.

They are interpreted, and compiled ahead of time.
"""

import pytest
import torch

from uefl_kernels import backend, log_transition_probs, set_proportion_loss, transition_nll

from . import ahead
from .conftest import DTYPES, normal
from .transition_cases import CASES, NO_DISTRIBUTION, assert_near, proportion_case, transition_case

if torch.cuda.is_available():
    pytest.skip("the kernels run natively here (test_cuda.py)", allow_module_level=True)
pytest.importorskip("triton")

# units in the last place: the interpreter cuts bfloat16 off where hardware rounds, twice for a gradient
CUT = 3


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def both(call, logits):
    """Return the result and the gradient of a weighted sum, from the reference and from Triton."""
    for name in ("reference", "triton"):
        z = logits.clone().requires_grad_()
        with backend(name):
            out = call(z)
            weight = normal(*out.shape, seed=5, dtype=out.dtype)
            torch.where(out.abs() < torch.inf, out * weight, 0.0).sum().backward()
        yield out.detach(), z.grad


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), *(("groups", dtype) for dtype in DTYPES)]
)
def test_transition_equals_the_reference(case, dtype):
    logits, targets, matrix, groups = transition_case(case, dtype)
    for call, terms in (
        (lambda z: transition_nll(z, targets, matrix, groups=groups), 1),
        (lambda z: log_transition_probs(z, matrix, groups=groups), max(1.0, matrix.shape[-2] / 4)),
    ):
        expected, found = both(call, logits)
        for a, b in zip(found, expected, strict=True):
            assert_near(a, b, dtype, terms, CUT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_proportion_equals_the_reference(dtype):
    for n, k, scale in ((100, 7, 3.0), (13, 1, 3.0), (40, 130, 100.0)):
        logits, offsets, proportions = proportion_case(dtype, n, k, scale)
        expected, found = both(lambda z, o=offsets, p=proportions: set_proportion_loss(z, o, p), logits)
        for a, b in zip(found, expected, strict=True):
            assert_near(a, b, dtype, max(1.0, scale / 4), CUT)


def test_more_classes_than_a_tile_are_refused():
    with backend("triton"), pytest.raises(ValueError, match=r"16384 classes.*16385.*'reference'"):
        set_proportion_loss(torch.zeros(2, 16385), torch.tensor([0, 2]), torch.full((1, 16385), 1 / 16385))


def test_values_that_the_cpu_refuses_give_nan():
    logits, _, matrix, _ = transition_case("small")
    with backend("triton"):
        loss = transition_nll(logits[:4], torch.tensor([0, 10, -1, -100]), matrix)
        assert loss.isnan().tolist() == [False, True, True, False]
        assert (
            transition_nll(
                logits[:1], torch.tensor([0]), torch.where(matrix == matrix[1, 0], torch.nan, matrix)
            )
            .isnan()
            .all()
        )
        grouped = log_transition_probs(logits[:2], matrix[None], groups=torch.tensor([0, 1]))
        assert grouped.isnan().all(1).tolist() == [False, True]
        logits[1, 2] = torch.inf
        assert transition_nll(logits[:2], torch.tensor([0, 0]), matrix).isnan().tolist() == [False, True]
        proportions = torch.full((2, 10), 0.1)
        assert set_proportion_loss(logits[:5], torch.tensor([0, 0, 5]), proportions).isnan().all()
        assert set_proportion_loss(logits[2:7], torch.tensor([0, 2, 9]), proportions).isfinite().all()
        for rows, share in NO_DISTRIBUTION:
            assert (
                set_proportion_loss(
                    torch.tensor(rows), torch.tensor([0, len(rows)]), torch.tensor([share]).float()
                )
                .isnan()
                .all()
            ), rows


COMPILE = """
import json
import triton.language as tl
from tests.kernels.ahead import build
import uefl_kernels.ops.transition_nll.triton as nll
import uefl_kernels.ops.log_transition_probs.triton as probs
import uefl_kernels.ops.set_proportion_loss.triton as sets

report = []
for kernel in (nll._nll, probs._probs, probs._probs_backward, sets._loss):
    for element, wide in (("*bf16", tl.float32), ("*fp32", tl.float32), ("*fp64", tl.float64)):
        exact = "*fp64" if wide is tl.float64 else "*fp32"
        types = {"logits": element, "gradient": element, "k": "i32"}
        types |= {"targets": "*i64", "groups": "*i64", "offsets": "*i64"}
        types |= dict.fromkeys(("matrix", "marginal", "loss", "out", "grad", "proportions"), exact)
        constants = {"GROUPED": True, "GRADIENT": True, "WIDE": wide, "CLASSES": 16, "ROWS": 128}
        for architecture in (80, 90, 100):
            built = build(kernel, architecture, constants, types)
            report.append([kernel.__name__, architecture, len(built.asm["cubin"]), built.metadata.shared])
print(json.dumps(report))
"""


@pytest.mark.slow
def test_compiles_for_every_generation(tmp_path):
    report = ahead.report(COMPILE, tmp_path)
    assert len(report) == 36
    assert all(code > 0 and shared < 99 * 1024 for _, _, code, shared in report)
