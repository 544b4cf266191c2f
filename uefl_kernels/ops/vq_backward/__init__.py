"""``vq_backward``: the gradient of ``vq`` with respect to x, elementwise and in one pass; autograd calls it,
users have no need to.

Per segment, with q the codeword gathered again from the indices and g the gradient of ``quantized`` (absent:
0)::

    straight through   grad_x = g + pull (x - q)
    rotation           grad_x = lambda R^T g + pull (x - q)        see estimator="rotation" of vq

An index out of range is an error on the CPU; on a GPU, where a check would stall the device, CUDA C++ and
Triton read nothing for it and give NaN. x and g may have any strides; grad_x has those of
``torch.empty_like(x)``. Bytes that must move: x, g and grad_x, once each.
"""

from __future__ import annotations

import torch

from ..._library import define, define_triton
from . import reference


def _fake(
    x: torch.Tensor,
    codebook: torch.Tensor,
    indices: torch.Tensor,
    grad_quantized: torch.Tensor | None,
    pull: torch.Tensor,
    rotation: bool,
) -> torch.Tensor:
    return torch.empty_like(x)


define(
    "vq_backward(Tensor x, Tensor codebook, Tensor indices, Tensor? grad_quantized, Tensor pull, bool"
    " rotation) -> Tensor grad_x",
    reference=reference.vq_backward,
    fake=_fake,
)
define_triton("vq_backward", f"{__name__}.triton")
