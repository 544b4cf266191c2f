"""The Triton kernel of mc_dropout_mlp agrees with the definition.

It is interpreted, and compiled ahead of time for three generations of GPU.
"""

import itertools

import pytest
import torch

from uefl_kernels import backend, mc_dropout_mlp

from . import ahead
from .mc_dropout_cases import FIELDS, mlp

if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)
pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize(("shape", "p"), [((5, 33), 0.3), ((70, 40), 0.1), ((1, 1), 0.999), ((0, 4), 0.5)])
def test_masks_equal_the_definition(shape, p, consistent):
    for seed in (0, 2**62 + 12345):
        arguments = (torch.tensor(seed), *shape, 7, 2, p, consistent)
        assert torch.equal(
            torch.ops.uefl_triton.dropout_mask(*arguments), torch.ops.uefl_reference.dropout_mask(*arguments)
        )


SHAPES = (
    (70, 9, 33, 10),
    (5, 6, 40, 3),
    (17, 8, 20),
    (3, 4, 5, 1),
    (0, 4, 5, 2),
    (70, 5, 33, 66, 10),
    (5, 4, 9, 300),
    (0, 3, 4, 5, 2),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "logit_dropout", "consistent"),
    [  # every pair of values
        (shape, logit_dropout, logit_dropout == bool(i % 2))
        for i, shape in enumerate(SHAPES)
        for logit_dropout in (False, True)
    ],
    ids=str,
)
def test_equals_the_definition(shape, logit_dropout, consistent):
    x, weights, biases = mlp(shape)
    options = {"p": 0.3, "passes": 3, "logit_dropout": logit_dropout, "consistent": consistent, "seed": 5}
    if len(weights) == 1 and not logit_dropout:
        options["input_dropout"] = True  # otherwise a single layer has no dropout
    with backend("reference"):
        expected = mc_dropout_mlp(x, weights, biases, **options)
    with backend("triton"):
        found = mc_dropout_mlp(x, weights, biases, **options)
    for name, got, want in zip(FIELDS, found, expected, strict=True):
        torch.testing.assert_close(
            got, want, rtol=0, atol=3e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "consistent"), [(10, False), (10, True), (300, True)])
def test_logit_dropout_with_strides_and_in_half_precision(classes, consistent):
    """The cases include more classes than one program keeps in registers."""
    for logits in (torch.randn(classes, 40).T, torch.randn(40, classes).bfloat16()):
        arguments = (logits, torch.empty(0), [classes], [0.3], 3, "gelu", consistent, torch.tensor(1))
        found, expected = (
            torch.ops.uefl_triton.mc_dropout_mlp(*arguments),
            torch.ops.uefl_reference.mc_dropout_mlp(*arguments),
        )
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=3e-6)


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "tanh"])
def test_deeper_heads_take_every_activation(activation):
    """Values that are not finite make NaN in the statistics of their rows only."""
    x, weights, biases = mlp((5, 6, 7, 8, 3))
    x[1, 2] = torch.nan
    options = {"p": 0.2, "passes": 2, "activation": activation, "seed": 3}
    with backend("reference"):
        expected = mc_dropout_mlp(x, weights, biases, **options)
    with backend("triton"):
        found = mc_dropout_mlp(x, weights, biases, **options)
    for name, got, want in zip(FIELDS, found, expected, strict=True):
        torch.testing.assert_close(
            got, want, rtol=0, atol=3e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert not found.mean_probs[2:].isnan().any()


@pytest.mark.parametrize("widths", [(3,), (3, 4), (3, 5, 4)], ids=str)
def test_units_more_than_2_31_elements_apart(widths):
    """x is a view by columns of 4 GB of address space, of which few pages are touched."""
    stride = 1 << 30
    x = torch.empty(2 * stride + 2, dtype=torch.bfloat16).as_strided((2, 3), (1, stride))
    x.copy_(torch.randn(2, 3))
    count = sum(outputs * (inputs + 1) for inputs, outputs in itertools.pairwise(widths))
    arguments = (x, torch.randn(count), widths, [0.3] * len(widths), 3, "relu", False, torch.tensor(1))
    found, expected = (
        torch.ops.uefl_triton.mc_dropout_mlp(*arguments),
        torch.ops.uefl_reference.mc_dropout_mlp(*arguments),
    )
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=3e-6)


def test_masks_of_late_passes():
    """Passes and streams are counted in 32 bits."""
    arguments = (torch.tensor(9), 3, 20, 2**32 - 1, 2**31, 0.5, False)
    assert torch.equal(
        torch.ops.uefl_triton.dropout_mask(*arguments), torch.ops.uefl_reference.dropout_mask(*arguments)
    )


COMPILE = """
import json
from tests.kernels.ahead import build
import uefl_kernels.ops.mc_dropout_mlp.triton as kernels

TYPES = {"seed": "*i64", "keep": "*i1", "scale": "fp32", "logit_scale": "fp32"}
TYPES |= dict.fromkeys(("rows", "row_stride", "column_stride"), "i64") | dict.fromkeys(
    ("x", "weights", "bias", "out", "source", "mean_out", "entropy_out", "variance_out", "moment_out"),
    "*fp32"
)
report = []
for kernel, layers in (
    (kernels._mask, 0), (kernels._statistics, 0), (kernels._statistics, 1),
    (kernels._layer, 0), (kernels._accumulate, 0)
):
    constants = {"CONSISTENT": False, "LAYERS": layers, "UNITS": kernels._UNITS, "CLASSES": 16,
                 "ROWS": kernels._FEW_ROWS if kernel is kernels._accumulate else kernels._ROWS,
                 "COLUMNS": kernels._COLUMNS, "ACTIVATION": "gelu"}
    for architecture in (80, 90, 100):
        built = build(kernel, architecture, constants, TYPES, "i32")
        found = {"code": len(built.asm["cubin"]), "shared": built.metadata.shared}
        report.append({"architecture": architecture} | found)
print(json.dumps(report))
"""


@pytest.mark.slow
def test_compiles_for_every_generation(tmp_path):
    rows = ahead.report(COMPILE, tmp_path)
    assert {row["architecture"] for row in rows if row["code"] > 0} == {80, 90, 100}
    assert len(rows) == 15
    assert max(row["shared"] for row in rows) < 99 * 1024
