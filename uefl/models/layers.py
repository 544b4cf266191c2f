"""Layers of a network by kind, for algorithms that treat them separately."""

from __future__ import annotations

from typing import Literal

from torch import nn

from ..errors import UserError

LayerChoice = Literal["last", "head", "all"]


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


class FrozenStatistics:
    """Make batch norm normalize by the batch, also in evaluation, without a change of its statistics."""

    def __init__(self, net: nn.Module) -> None:
        self._norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

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
