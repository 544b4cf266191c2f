"""A training step of the layer takes little memory.

Torch's allocator counts it, so the number is deterministic, unlike the size of the process.
"""

from __future__ import annotations

import gc

import pytest
import torch

from uefl_kernels import COMPILED

from .conftest import normal
from .nn_layers import layer

pytestmark = pytest.mark.skipif(
    not COMPILED, reason="the compiled kernels are absent; the reference makes no promise"
)


def peak(step):
    """Return the peak bytes of tensors during the step, above the bytes before it."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        step()
    held = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotation_trick": False},
        {"heads": 4, "codebook_dim": 16},
        {"accept_image_fmap": True},
        {"learnable_codebook": True},
    ],
    ids=["rotation", "straight through", "heads", "image", "learnable"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_step_stores_little_besides_its_results(dtype, options):
    """The results quantized and the gradient of x are as large as x.

    All else, without the indices, is a twentieth of it.
    """
    vq = layer(dim=64, codebook_size=16, **options)
    size = (16, 64, 32, 32) if "accept_image_fmap" in options else (16, 1024, 64)
    x, g = normal(*size, dtype=dtype).requires_grad_(), normal(*size, seed=1, dtype=dtype)
    kept = []

    def step():
        quantized, indices, loss = vq(x)
        torch.autograd.backward((quantized, loss), (g, torch.ones_like(loss)))
        kept.extend((quantized, indices))

    step()  # allocated once
    x.grad = None
    kept.clear()
    bytes_of_x, indices = x.numel() * x.element_size(), 8 * 16 * 1024 * options.get("heads", 1)
    beyond_results = peak(step) - 2 * bytes_of_x - indices
    assert 0 <= beyond_results <= 0.05 * bytes_of_x


def codebooks(size):
    """Return the number of live tensors of this size with memory of their own."""
    gc.collect()
    tensors = (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))
    return len({found.untyped_storage().data_ptr() for found in tensors if found.shape[-2:] == size})


@pytest.mark.parametrize("steps_between", [False, True])
def test_passes_without_gradient_keep_no_codebook(steps_between):
    """Such a pass cannot run again, so no copy of its codewords is needed."""
    vq, x = layer(dim=8, codebook_size=97, decay=0.99), normal(1, 64, 8)
    before = codebooks((97, 8))
    for _ in range(20):
        with torch.no_grad():
            vq(x)
        if steps_between:
            vq(x.requires_grad_())[0].sum().backward()
    assert before > 0
    assert codebooks((97, 8)) <= before + 1
