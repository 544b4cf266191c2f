"""Keep all parameters of a module in one flat tensor, and all floating-point buffers in another one.

A federated round sends, sets, averages, checks and updates a model. With a flat tensor, each of these is one
operation instead of one operation per layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn


class FlatModule:
    """Move the parameters and floating-point buffers of ``module`` into flat tensors, in place.

    Attributes:
        module: the module.
        values: ``[P]`` float32, all parameters: a leaf with the flat gradient in ``.grad``.
        trained: the parameters of the module that require a gradient, as views of ``values``.
        buffers: ``[Q]`` float32, such as running means and variances. Other buffers, such as the batch
            counter of batch norm, are not part of messages. :meth:`reset` sets them to their first values.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        floating = [b for b in module.buffers() if b.is_floating_point()]
        device = parameters[0].device
        self.module = module
        self._parameters = parameters  # stored, because module.parameters() takes longer than a small message
        self._floating = floating
        self.values = nn.Parameter(torch.empty(sum(p.numel() for p in parameters), device=device))
        self.gradient = torch.zeros_like(self.values.data)
        self.trained = [p for p in parameters if p.requires_grad]
        self.buffers = torch.empty(sum(b.numel() for b in floating), device=device)
        self._other_buffers = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]
        for p, view in zip(parameters, self.split(self.values.data), strict=True):
            view.copy_(p.data)
            p.data = view
        self._gradients = self.split(self.gradient)
        self.share_gradient(True)
        for b, view in zip(floating, self.split_buffers(self.buffers), strict=True):
            view.copy_(b)
            b.data = view
        self._places = [
            (f"{prefix}.{name}" if prefix else name, owner, name, t.data_ptr())
            for prefix, owner in module.named_modules()
            for name, t in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        ]

    def storages(self) -> frozenset[int]:
        """Return the addresses of both flat tensors in memory, which every step changes."""
        return frozenset(t.untyped_storage().data_ptr() for t in (self.values.data, self.buffers))

    def replaced(self) -> str | None:
        """Return the name of a parameter or buffer whose memory the module has replaced, or None.

        The new memory is not part of messages, and would pass from one client to the next.
        """
        return next(
            (name for _, owner, name, place in self._places if getattr(owner, name).data_ptr() != place), None
        )

    def share_gradient(self, share: bool) -> None:
        """Make the gradients of the parameters views of the flat gradient, or remove them.

        Autograd adds to an existing gradient. If there is no gradient, autograd keeps the computed tensor,
        which is faster.
        """
        self.values.grad = self.gradient if share else None
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient if share else None

    def drop_gradients(self) -> None:
        """Remove the gradients of the trained parameters and of ``values``."""
        for p in (self.values, *self.trained):
            p.grad = None

    def gather_gradients(self) -> None:
        """Make the gradient of each trained parameter complete after a backward pass.

        A loss may use ``values`` itself; its gradient is added. A parameter that the loss does not use gets
        zeros, so that the optimizer treats it like the others.
        """
        whole = self.values.grad
        gradients = None if whole is None else dict(zip(self._parameters, self.split(whole), strict=True))
        for p in self.trained:
            if gradients is not None:
                p.grad = gradients[p] if p.grad is None else p.grad.add_(gradients[p])
            elif p.grad is None:
                p.grad = torch.zeros_like(p)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter as a slice of flat tensors ``[..., P]``, as views ``[..., *shape]``."""
        return _slices(flat, self._parameters)

    def split_buffers(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each floating-point buffer as a slice of flat tensors ``[..., Q]``, as views."""
        return _slices(flat, self._floating)

    def set(self, values: torch.Tensor, buffers: torch.Tensor) -> None:
        """Overwrite the parameters ``[P]`` and the buffers ``[Q]`` in place."""
        self.values.data.copy_(values)
        self.buffers.copy_(buffers)

    def reset(self) -> None:
        """Set other buffers to their first values, so that no client affects the next one through them."""
        for buffer, first in self._other_buffers:
            buffer.copy_(first)

    def private(
        self, is_private: Callable[[str, nn.Module], bool]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return bool masks ``[P]`` and ``[Q]`` of private parameters and buffers, or None if there are none.

        Args:
            is_private: returns whether a tensor is private, given its name and the module that owns it.
        """
        owners = {whole: owner for whole, owner, *_ in self._places}
        floating = [(name, b) for name, b in self.module.named_buffers() if b.is_floating_point()]
        masks = []
        for tensors, flat in ((list(self.module.named_parameters()), self.values), (floating, self.buffers)):
            flags = [
                torch.full((t.numel(),), is_private(name, owners[name]), device=flat.device)
                for name, t in tensors
            ]
            masks.append(torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool, device=flat.device))
        return (masks[0], masks[1]) if any(bool(mask.any()) for mask in masks) else None

    def named(self, values: torch.Tensor, buffers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the floating-point tensors of a state dict, as views of flat tensors.

        A parameter that two layers share has both names. Buffers that are not persistent are not included.

        Args:
            values: ``[P]``, in the layout of :attr:`values`.
            buffers: ``[Q]``, in the layout of :attr:`buffers`.
        """
        tensors = (*self._parameters, *self._floating)
        slices = (*self.split(values), *self.split_buffers(buffers))
        views = {id(t): view for t, view in zip(tensors, slices, strict=True)}
        weights = self.module.state_dict(keep_vars=True)
        return {name: views[id(t)] for name, t in weights.items() if id(t) in views}


def _slices(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive slices of flat tensors ``[..., n]`` with the sizes of other tensors."""
    ends = itertools.accumulate((t.numel() for t in like), initial=0)
    return [_view(flat, begin, t) for begin, t in zip(ends, like, strict=False)]


def _view(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return elements of flat tensors ``[..., n]`` from ``offset`` on, as a view in the shape of ``like``.

    A tensor of four dimensions is channels-last, because convolutions are then faster.
    """
    piece, several = flat[..., offset : offset + like.numel()], flat.shape[:-1]
    if like.dim() != 4:
        return piece.view(several + like.shape)
    o, i, h, w = like.shape
    return piece.view((*several, o, h, w, i)).movedim(-1, -3)
