"""``vq_backward``: the gradient of ``vq`` with respect to x, elementwise and in one pass.

The op is private: autograd calls it.

For each segment, q is the codeword, which the op looks up again by its index, and g is the gradient of
``quantized`` (0 if it is absent)::

    straight through   grad_x = g + pull (x - q)
    rotation           grad_x = lambda R^T g + pull (x - q)        see estimator="rotation" of vq

On the CPU, an index out of range is an error. On a GPU, a check would make the host wait: for such an index,
CUDA C++ and Triton read no codeword and give NaN. x and g may have any strides; grad_x has the strides of
``torch.empty_like(x)``. Bytes that must move: x, g and grad_x, once each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..._library import define, define_triton


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[..., D]``"""
    codebook: torch.Tensor
    """``[K, d]`` or ``[S, K, d]``"""
    indices: torch.Tensor
    """``[..., S]`` int64"""
    grad_quantized: torch.Tensor | None
    """the shape of x"""
    pull: torch.Tensor
    """scalar: the weight of x - q"""
    rotation: bool


define(__name__, "vq_backward", Arguments, ["grad_x"], fake=lambda given: torch.empty_like(given.x))
define_triton("vq_backward")
