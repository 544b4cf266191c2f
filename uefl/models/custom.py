"""A network that was given in Python instead of one that the configuration names."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..data.inputs import IMAGES, Inputs
from ..errors import UserError, first_line
from ..seeds import derive
from .net import TokenNet
from .normalization import blank

if TYPE_CHECKING:
    from ..data.federation import Federation


def factory(model: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that copies the given module with its weights, or checks what the given one makes.

    Raises:
        UserError: ``model`` is neither a module nor such a function.
    """
    if isinstance(model, nn.Module):
        _check_parameters(model)
        return lambda: _copied(model)
    if not callable(model):
        raise UserError(
            "model: expected a torch module, a function that makes one, or a dict of the section [model];"
            f" got {type(model).__name__}"
        )
    return lambda: _checked(model())


def _copied(net: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(net)
    except Exception as error:  # any attribute may fail, such as a lock or a result with a gradient
        raise UserError(
            f"model: it cannot be copied: {first_line(error)}; give a function that makes it"
        ) from None


def _checked(net: nn.Module) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise UserError(f"model: the function returned {type(net).__name__}; expected a torch module")
    _check_parameters(net)
    return net


class CustomNet(TokenNet):
    """A network with an encoder and a head, for a quantizer between them.

    Args:
        net: a module with a method ``tokens`` from images ``[B, C, H, W]``, normalized, to ``[B, T, D]`` (or
            more axes between B and D), and a module ``head`` from tensors of that shape to logits ``[B,
            classes]``; its own ``forward`` is not used.

    Raises:
        UserError: the module lacks ``tokens`` or ``head``, or returns tokens of another shape.
    """

    def __init__(self, net: nn.Module, shape: tuple[int, ...], inputs: Inputs = IMAGES) -> None:
        super().__init__()
        needs = (
            "a codebook needs a network with a method tokens(images) -> [B, T, D] and a module head(tokens)"
            " -> logits [B, classes]"
        )
        if not callable(getattr(net, "tokens", None)):
            raise UserError(f"model: {needs}; {type(net).__name__} has no method 'tokens'")
        if not isinstance(getattr(net, "head", None), nn.Module):
            raise UserError(f"model: {needs}; {type(net).__name__} has no module 'head'")
        self.net = net
        shape = self._token_shape(blank(2, shape, inputs))
        if len(shape) < 3 or shape[0] != 2:
            raise UserError(f"model: {needs}; for two images its tokens have the shape {list(shape)}")
        self.dim, self.positions = shape[-1], math.prod(shape[1:-1])

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        """Map tokens to logits."""
        head: nn.Module = self.net.head  # type: ignore[assignment]
        return head

    def tokens(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images [B, C, H, W], normalized -> tokens [B, ..., D]."""
        tokens: torch.Tensor = self.net.tokens(images)  # type: ignore[operator]
        return tokens

    @torch.no_grad()
    def _token_shape(self, probe: torch.Tensor) -> torch.Size:
        training, probe = self.training, probe.to(next(self.parameters()).device)
        probe = probe.float() if probe.dtype != torch.int64 else probe
        try:
            tokens = self.eval().tokens(probe)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"model: 'tokens' cannot take normalized inputs {list(probe.shape)}: {first_line(error)}"
            ) from None
        self.train(training)
        if not isinstance(tokens, torch.Tensor):
            raise UserError(f"model: 'tokens' returned {type(tokens).__name__}; expected a tensor [B, T, D]")
        return tokens.shape


@torch.no_grad()
def check(net: nn.Module, normalize: Callable[[torch.Tensor], torch.Tensor], federation: Federation) -> None:
    """Run the network on two inputs of zeros, and on one, because a client may have one test input.

    Args:
        normalize: converts uint8 ``[B, C, H, W]`` to the input of the network.

    Raises:
        UserError: the network cannot take images of this shape, changes them in place, or does not return
            logits ``[B, classes]``, for example because it returns probabilities.
    """
    device = next(net.parameters()).device
    for count in (2, 1):
        probe = normalize(blank(count, federation.shape, federation.inputs).to(device))
        _check_logits(net, probe, len(federation.classes))


def _check_logits(net: nn.Module, probe: torch.Tensor, classes: int) -> None:
    training, count = net.training, len(probe)
    version = probe._version  # every change in place raises this number
    try:
        logits = net.eval()(probe)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"model: in evaluation it cannot take normalized inputs {list(probe.shape)}: {first_line(error)}"
        ) from None
    finally:
        net.train(training)
    if probe._version != version:  # a further pass or the next loss would get the changed inputs
        raise UserError("model: it changes its inputs in place; change a copy, as with x.clone()")
    found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != [count, classes]:
        raise UserError(
            f"model: expected logits {[count, classes]} for inputs {list(probe.shape)}, got {found}"
        )
    sums = logits.float().sum(1)
    if bool((logits >= 0).all()) and torch.allclose(sums, torch.ones_like(sums)):
        raise UserError("model: expected logits; the network returns probabilities, so omit its softmax")


def _check_parameters(net: nn.Module) -> None:
    """Check that one float32 tensor can hold all parameters, and a file the state, or raise UserError."""
    if not any(True for _ in net.parameters()):
        raise UserError("model: it has no parameters to train")
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise UserError(
            "model: all of its parameters are frozen (requires_grad is False); unfreeze the parameters to"
            " train"
        )
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise UserError(f"model: {name!r} has no shape yet; call the module with one image first")
        if tensor.is_meta:
            raise UserError(f"model: {name!r} is on the meta device; give a module that has its weights")
        if tensor.is_inference():
            raise UserError(
                f"model: {name!r} was made in inference_mode and cannot be trained; make the module outside"
            )
    for name, parameter in net.named_parameters():
        if parameter.dtype != torch.float32:
            raise UserError(
                f"model: {name!r} is {parameter.dtype}; expected float32 (the key run.precision decides about"
                " bfloat16)"
            )
        if not parameter.isfinite().all():
            raise UserError(f"model: {name!r} holds numbers that are not finite")
    extra = [name for name in net.state_dict() if name.rpartition(".")[2] == "_extra_state"]
    if extra:
        raise UserError(f"model: {extra[0]!r} would not be saved; keep this state in a buffer")


def digest(network: Callable[[], nn.Module], seed: int) -> str:
    """Return the SHA-256 of a new network with a given seed: names, shapes and weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "init"))
        weights = network().state_dict()
    total = hashlib.sha256()
    for name, tensor in weights.items():
        total.update(f"{name} {list(tensor.shape)} ".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
