"""The interface of a network that a configuration names, and the registry of these networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import nn

from ...data.inputs import IMAGES, InputKind, Inputs
from ...errors import UserError, nearest
from ...registry import Registry
from ..heads import Head

if TYPE_CHECKING:
    from ...config import Model


class Network:
    """An encoder from inputs to features, and a head from features to logits.

    A codebook may be between encoder and head. The head may be any module. Algorithms with a codebook or with
    features of their own need the usual head, :class:`uefl.models.heads.Head`.

    Args:
        shape: shape of one input, as :class:`uefl.data.inputs.Inputs` lists it.
    """

    inputs: ClassVar[InputKind] = "images"
    """the kind of the inputs"""
    ignores: ClassVar[tuple[str, ...]] = ()
    """keys of ``[model]`` without effect on the network; a configuration that sets such a key is refused"""
    pretrained: ClassVar[bool] = False
    """whether the key ``pretrained`` may name weights for the network"""
    activation: ClassVar[type[nn.Module]] = nn.GELU
    """activation of the hidden layer of the usual head"""

    def __init__(self, settings: Model, shape: tuple[int, ...], inputs: Inputs = IMAGES) -> None:
        self.settings, self.shape, self.of = settings, shape, inputs

    def encoder(self) -> nn.Module:
        """Make the module from normalized inputs ``[B, ...]`` to features ``[B, D, H', W']``."""
        raise NotImplementedError(f"{type(self).__name__} has no method 'encoder'")

    def head(self, dim: int, positions: int, classes: int) -> nn.Module:
        """Make the module from features ``[B, H', W', D]`` to logits ``[B, classes]``.

        Args:
            dim: D, channels of the features.
            positions: H' x W', or 1 with the key ``pooled``.
        """
        keys = self.settings
        return Head(positions * dim, keys.hidden, classes, keys.dropout, keys.logit_dropout, self.activation)


NETWORKS: Registry[type[Network]] = Registry(__package__, "network", "uefl.networks")

AnyNetwork = TypeVar("AnyNetwork", bound=type[Network])


def network(name: str) -> Callable[[AnyNetwork], AnyNetwork]:
    """Register a network under the name that ``model.encoder`` gives it."""
    return NETWORKS.decorator(name)


def find(name: str) -> type[Network]:
    """Return the network of a name.

    Raises:
        UserError: no network has this name.
    """
    if name not in NETWORKS:
        hint = nearest(name, NETWORKS)
        raise UserError(f"key 'model.encoder': expected {quoted(NETWORKS)} or 'given'; got {name!r}{hint}")
    return NETWORKS[name]


def with_usual_head() -> str:
    """Return the names of the networks with the usual head, for messages."""
    return quoted(name for name in NETWORKS if NETWORKS[name].head is Network.head)


def quoted(names: Iterable[str]) -> str:
    """Return names in quotation marks, with commas."""
    return ", ".join(map(repr, names))
