"""``lfq_entropy``: the entropies of lookup-free quantization, without a probability for each row and code.

The op is private: :class:`uefl_kernels.nn.LFQ` calls it. A row of d elements has a probability for each of
2^d codes with elements +1 and -1: the softmax of the products of the row and the codes. The op returns the
mean entropy of a row, and the mean of the probabilities over the rows. The logarithm is taken of at least
1e-5.

The softmax over all codes is the product of the softmax over the higher half of the bits and the softmax over
the lower half. So N rows need 2 N 2^(d/2) exponentials instead of N 2^d, and the mean is a product of two
matrices. The entropy needs log max(p, 1e-5) of each code, which is the larger one of a sum and a constant. A
block of rows is computed at a time, forward and backward, so memory does not grow with N 2^d.

Source: Yu et al. 2024, "Language Model Beats Diffusion: Tokenizer is Key to Visual Generation", eq. 4. That
the softmax is a product over the bits: Zhao et al. 2024, "Image and Video Tokenization with Binary Spherical
Quantization".
"""

from __future__ import annotations

from typing import Any

import torch

from ..._checks import check_reverse_mode
from ..._library import define, define_autograd, define_vmap, forced
from . import composed


def _fake(given: composed.Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    _, codebooks, d = given.rows.shape
    return given.rows.new_empty(()), given.rows.new_empty(codebooks, 2**d)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(gradient: Any, ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
    given = composed.GradientArguments(*ctx.saved_tensors, *grads)
    if torch.is_grad_enabled():  # create_graph=True: the gradient is differentiated again
        return composed.lfq_entropy_backward(given)
    return gradient(*given)  # type: ignore[no-any-return]


define(
    __name__,
    "lfq_entropy_backward",
    composed.GradientArguments,
    ["grad_rows"],
    fake=lambda given: torch.empty_like(given.rows),
    fallback=composed.lfq_entropy_backward,
)
define(
    __name__,
    "lfq_entropy",
    composed.Arguments,
    ["entropy", "mean"],
    fake=_fake,
    fallback=composed.lfq_entropy,
)
define_autograd("lfq_entropy", _backward, _setup_context, gradient="lfq_entropy_backward")
define_vmap("lfq_entropy")


def lfq_entropy(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the mean entropy of rows ``[N, C, d]`` (a scalar), and the mean probabilities ``[C, 2^d]``.

    Both have the dtype of the rows. Codes are numbered by their bits, the first element highest.
    """
    check_reverse_mode("lfq_entropy", rows)
    # plain PyTorch, whatever the backend
    kernel = torch.ops.uefl_reference if forced() == "reference" else torch.ops.uefl
    found: tuple[torch.Tensor, torch.Tensor] = kernel.lfq_entropy(*composed.Arguments(rows))
    return found
