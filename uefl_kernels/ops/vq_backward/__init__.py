"""``vq_backward``: the gradient of ``vq`` with respect to x, elementwise and in one pass; it is private:
autograd calls it.

Per segment, with q the codeword gathered again from the indices and g the gradient of ``quantized`` (absent:
0)::

    straight through   grad_x = g + pull (x - q)
    rotation           grad_x = lambda R^T g + pull (x - q)        see estimator="rotation" of vq

An index out of range is an error on the CPU; on a GPU, where a check would stall the device, CUDA C++ and
Triton read nothing for it and give NaN. x and g may have any strides; grad_x has the strides of
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
