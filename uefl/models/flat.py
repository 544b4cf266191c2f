"""One tensor for all parameters of a module, one for all its floating-point buffers.

A federated round sends, sets, averages, checks and steps a model. With one tensor, each of these is one
operation instead of one operation a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn


class FlatModule:
    """Moves the parameters and floating-point buffers of ``module`` into flat tensors, in place.

    Attributes:
        values: ``[P]`` float32, a leaf with the flat gradient in ``.grad``, for an optimizer.
        trained: the parameters of the module that require a gradient; views of ``values``.
        buffers: ``[Q]`` float32, running means and variances. Other buffers, such as the number of batches
            that batch norm has seen, are part of no message; :meth:`reset` sets them to their first values.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        running = [b for b in module.buffers() if b.is_floating_point()]
        device = parameters[0].device
        self.module = module
        self.values = nn.Parameter(torch.empty(sum(p.numel() for p in parameters), device=device))
        self.values.grad = torch.zeros_like(self.values)
        self.trained = [p for p in parameters if p.requires_grad]
        self.buffers = torch.empty(sum(b.numel() for b in running), device=device)
        self._others = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        for p, view in zip(parameters, self.split(self.values.data), strict=True):
            view.copy_(p.data)
            p.data = view
        self.share_gradient(True)
        offset = 0
        for b in running:
            view = _view(self.buffers, offset, b)
            view.copy_(b)
            b.data = view
            offset += b.numel()

    def storages(self) -> frozenset[int]:
        """Return the addresses of the memory of both flat tensors, which every step changes."""
        return frozenset(t.untyped_storage().data_ptr() for t in (self.values.data, self.buffers))

    def share_gradient(self, share: bool) -> None:
        """Make the parameters' gradients parts of the flat gradient, or tensors of their own.

        Autograd adds to a gradient that exists. If there is none, it keeps the tensor that it has computed,
        which is faster.
        """
        assert self.values.grad is not None
        parts = self.split(self.values.grad)
        for p, part in zip(self.module.parameters(), parts, strict=True):
            p.grad = part if share else None

    def drop_gradients(self) -> None:
        """Remove the gradients of the trained parameters."""
        for p in self.trained:
            p.grad = None

    def fill_gradients(self) -> None:
        """Set the gradient of each trained parameter that the loss does not use to 0, so that an optimizer
        treats it like the others."""
        for p in self.trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each parameter in a flat tensor ``[P]``, as views."""
        parameters = list(self.module.parameters())
        ends = itertools.accumulate((p.numel() for p in parameters), initial=0)
        return [_view(flat, begin, p) for begin, p in zip(ends, parameters, strict=False)]

    def set(self, values: torch.Tensor, buffers: torch.Tensor) -> None:
        """Overwrite the parameters ``[P]`` and the buffers ``[Q]`` in place."""
        self.values.data.copy_(values)
        self.buffers.copy_(buffers)

    def reset(self) -> None:
        """Reset buffers that are not floating-point to their first values, so that no client affects the next
        through them."""
        for buffer, first in self._others:
            buffer.copy_(first)

    def private(
        self, is_private: Callable[[str, nn.Module], bool]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return masks ``[P]`` and ``[Q]``, bool: parameter and buffer elements for which ``is_private`` is
        true; None if there are none."""
        owners = {
            f"{prefix}.{name}" if prefix else name: owner
            for prefix, owner in self.module.named_modules()
            for name, _ in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        }
        floating = [(name, b) for name, b in self.module.named_buffers() if b.is_floating_point()]
        masks = []
        for tensors, flat in ((list(self.module.named_parameters()), self.values), (floating, self.buffers)):
            parts = [
                torch.full((t.numel(),), is_private(name, owners[name]), device=flat.device)
                for name, t in tensors
            ]
            masks.append(torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool, device=flat.device))
        return (masks[0], masks[1]) if any(bool(mask.any()) for mask in masks) else None

    def named(self, values: torch.Tensor, buffers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a state dict without integers: views, by name, of flat tensors ``[P]`` and ``[Q]`` laid out
        as this module's.

        A parameter that two layers share has its two names; buffers that a state dict leaves out are left
        out.
        """
        views: dict[int, torch.Tensor] = {}
        for tensors, flat in ((self.module.parameters(), values), (self.module.buffers(), buffers)):
            offset = 0
            for t in tensors:
                if t.is_floating_point():
                    views[id(t)] = _view(flat, offset, t)
                    offset += t.numel()
        weights = self.module.state_dict(keep_vars=True)
        return {name: views[id(t)] for name, t in weights.items() if id(t) in views}


def _view(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the elements from ``offset`` on in the shape of ``like``; maps stay channels-last, which
    convolutions prefer."""
    piece = flat[offset : offset + like.numel()]
    if like.dim() != 4:
        return piece.view(like.shape)
    o, i, h, w = like.shape
    return piece.view(o, h, w, i).permute(0, 3, 1, 2)
