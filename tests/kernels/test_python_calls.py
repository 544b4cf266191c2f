"""Count the Python functions that run in one training step.

The host's part of a small step is the time of these functions. docs/design/vq-layer.md quotes the numbers.
"""

from __future__ import annotations

import sys

import pytest
import torch

from uefl_kernels import vq, vq_with_sums
from uefl_kernels.nn import VectorQuantize

from .conftest import normal


def functions(step):
    """Return the files and names of the functions that a step calls, the third time it runs."""
    found = []

    def note(frame, event, _):
        if event == "call":
            found.append((frame.f_code.co_filename, frame.f_code.co_name))

    step(), step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def op(call, learned, backward):
    x, codebook = normal(64, 8).requires_grad_(), normal(9, 8).requires_grad_(learned)

    def step():
        found = call(x, codebook)
        out = found[0] if call is vq_with_sums else found
        if backward:
            (out.quantized.sum() + out.loss).backward()

    return step


def layer(**options):
    x, quantize = normal(64, 8).requires_grad_(), VectorQuantize(8, 9, **options)

    def step():
        quantized, _, loss = quantize(x)
        (quantized.sum() + loss).backward()

    return step


def alone():
    """Only the backward pass, as the caller starts it."""
    x = normal(64, 8).requires_grad_()
    return lambda: x.sum().backward()


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (op(vq, False, True), 37),
        (op(vq, True, True), 37),
        (op(vq_with_sums, False, True), 34),
        (layer(), 155),
        (layer(learnable_codebook=True, ema_update=False), 116),
    ],
    ids=["vq", "vq, learned", "vq with sums", "layer", "layer, learned"],
)
def test_a_training_step_calls_few_functions(step, most):
    assert len(functions(step)) - len(functions(alone())) <= most


@pytest.mark.parametrize("differentiable", [False, True])
def test_eager_calls_skip_the_registered_autograd(differentiable):
    """torch would find it in the dispatcher, and call Python from there."""
    x, codebook = normal(64, 8), normal(9, 8).requires_grad_(differentiable)
    found = functions(lambda: vq(x, codebook))
    assert not [name for name, _ in found if name.endswith("_library/autograd.py")]
    assert [function for _, function in found].count("_setup") == differentiable


def test_transforms_keep_the_whole_op():
    x, codebook = normal(5, 4, 8).requires_grad_(), normal(9, 8)
    batched = torch.func.vmap(lambda rows: vq(rows, codebook).loss)(x)
    expected = torch.stack([vq(rows, codebook).loss for rows in x])
    torch.testing.assert_close(batched, expected)
    for loss in (batched.sum(), expected.sum()):
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.abs().sum() > 0
