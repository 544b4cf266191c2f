"""Layers of a network by kind, for algorithms that treat them separately."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeVar

import torch
from torch import nn

from ..errors import UserError

LayerChoice = Literal["last", "head", "all"]
M = TypeVar("M", bound=nn.Module)


def linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Return all linear layers of a network, in their order."""
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


def layers(net: nn.Module, choice: LayerChoice, key: str) -> list[nn.Module]:
    """Return the ``last`` linear layer, the modules of the module ``head``, or ``all`` modules.

    Raises:
        UserError: the layers have no parameters; the message names ``key``, the key of the configuration.
    """
    head = getattr(net, "head", None)
    choices: dict[LayerChoice, list[nn.Module]] = {
        "last": [*linear_layers(net)[-1:]],
        "head": list(head.modules()) if isinstance(head, nn.Module) else [],
        "all": list(net.modules()),
    }
    chosen = choices[choice]
    if not any(True for module in chosen for _ in module.parameters(recurse=False)):
        what = {
            "last": "no linear layer",
            "head": "no module called 'head' that has parameters",
            "all": "no parameters",
        }[choice]
        raise UserError(
            f"key {key!r}: the network has {what}, so {choice!r} selects no layer; choose another value"
        )
    return chosen


@torch.no_grad()
def check_last(net: nn.Module, layer: nn.Module, probe: torch.Tensor, arm: str) -> None:
    """Refuse a network that does not return the output of ``layer``, or its ``log_softmax(-1)``.

    The loss and the predictions of the two are equal.

    Raises:
        UserError: another operation follows, or another layer is the last one; the message names ``arm``.
    """
    marks: list[torch.Tensor] = []

    def mark(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        marks.append(torch.arange(1.0, output.numel() + 1, device=output.device).view(output.shape))
        return marks[-1].to(output.dtype, copy=True)

    hook = layer.register_forward_hook(mark)
    try:
        output = net(probe).float()
    except (IndexError, RuntimeError, TypeError, ValueError):  # a later operation needs another shape
        output = torch.empty(0)
    finally:
        hook.remove()
    valid = (marks[0], marks[0].log_softmax(-1)) if len(marks) == 1 else ()
    if not any(output.shape == right.shape and torch.allclose(output, right) for right in valid):
        raise UserError(
            f"arm {arm!r}: the network must return the output of its last linear layer unchanged; remove"
            " later operations, such as model.logit_dropout; define the layers in order; or omit the arm"
        )


def batch_norms(net: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return all batch norm layers of a network."""
    return [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def freeze_batch_norm(net: nn.Module) -> None:
    """Make every batch norm use its running statistics also in training, so that they do not change.

    Scales and shifts are trained.

    Source: Gulrajani and Lopez-Paz 2021, "In Search of Lost Domain Generalization"; FedIIR's code.

    Raises:
        UserError: no layer has running statistics.
    """
    norms = [norm for norm in batch_norms(net) if norm.running_mean is not None]
    if not norms:
        raise UserError(
            "key 'model.frozen_batch_norm': the network has no batch norm with running statistics; omit it"
        )
    for norm in norms:
        norm.eval()
        # an attribute, not a class, so that the layer keeps its type; it can be copied and pickled
        norm.train = partial(_unchanged, norm)  # type: ignore[assignment]


def _unchanged(module: M, mode: bool = True) -> M:
    return module


class BatchStatistics:
    """Make batch norm normalize by the batch, also in evaluation, without a change of its statistics.

    Frozen batch norm stays as it is.
    """

    def __init__(self, net: nn.Module) -> None:
        self._norms = [norm for norm in batch_norms(net) if "train" not in vars(norm)]

    def __enter__(self) -> None:
        self._hidden = [
            (norm.running_mean, norm.running_var, norm.track_running_stats) for norm in self._norms
        ]
        for norm in self._norms:
            norm.running_mean = norm.running_var = None
            norm.track_running_stats = False

    def __exit__(self, *_: object) -> None:
        for norm, hidden in zip(self._norms, self._hidden, strict=True):
            norm.running_mean, norm.running_var, norm.track_running_stats = hidden
