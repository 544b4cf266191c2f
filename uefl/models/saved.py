"""The final model of an arm, in a file that holds all it takes to use it: weights, what belongs to each client, algorithm, classes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .. import checkpoint
from ..algorithms.base import Algorithm, ModelSpec, find
from ..config import Config, Model
from ..data.federation import Federation
from ..data.pixels import as_bytes
from ..engines.base import member
from ..errors import UserError
from ..fields import parse
from ..isolation import isolate, plain_torch
from ..paths import check_file
from .normalization import normalization

_FORMAT = "uefl-model-2"
_BATCH = 500
_LAYERS = threading.Lock()  # a call that has put a client's layers into a network is alone with it
Tensors = dict[str, torch.Tensor]


class Member(NamedTuple):
    """One trained network; an ensemble has several, any other model one."""

    net: nn.Module
    """of an algorithm with private layers, with the mean of the clients'"""
    clients: dict[str, Tensors]
    """what belongs to each client: weights of the network by name, and other tensors such as ``codebook`` ``[V, d]``"""


@dataclass(frozen=True)
class SavedModel:
    """A trained model and what its input must look like."""

    members: tuple[Member, ...]
    algorithm: Algorithm
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    """(C, H, W)"""
    image_size: int
    """side of the square, in pixels, to which the run resized every image; 0: it resized none"""
    mean: torch.Tensor
    """``[C, 1, 1]`` on the scale 0-255"""
    std: torch.Tensor

    def __repr__(self) -> str:
        networks = f"{len(self.members)} x {type(self.members[0].net).__name__}"
        parts = f" with parts of {', '.join(self.clients)}" if self.clients else ""
        return f"SavedModel({networks}{parts}: {list(self.image_shape)} -> {len(self.classes)} classes)"

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that have a part of their own: layers, or tensors of the algorithm."""
        return tuple(self.members[0].clients)

    def to(self, device: torch.device | str) -> SavedModel:
        """The model on another device, such as ``"cuda"``; images and predictions stay on the CPU. This one is left where it is.

        Raises:
            UserError: no such device here.
        """
        try:
            there = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise UserError(f"device {str(device)!r} is not here: {str(error).splitlines()[0]}") from None

        def moved(own: Tensors) -> Tensors:
            return {name: tensor.to(there) for name, tensor in own.items()}

        members = tuple(
            Member(deepcopy(net).to(there), {client: moved(own) for client, own in clients.items()}) for net, clients in self.members
        )
        return replace(self, members=members, mean=self.mean.to(there), std=self.std.to(there))

    def predict(self, images: torch.Tensor | npt.NDArray[Any], client: str | None = None) -> torch.Tensor:
        """Class probabilities with dropout off; of an ensemble, the mean over its members.

        Args:
            images: ``[B, C, H, W]`` uint8, pixels 0 to 255, or floats in [0, 1], which are rounded to 8 bits as :func:`uefl.train` rounds
                them. Their size is the one that the model was trained on, as :func:`uefl.data.rotate.resize` makes it where the run did;
                grey ones may be ``[B, H, W]``. A tensor or a NumPy array.
            client: whose parts to predict with; needed exactly where there are any.

        Returns:
            ``[B, classes]`` float32, on the CPU.

        Raises:
            UserError: images of another type or shape, no such client.

        Equivalent to::

            x = (images - mean) / std
            torch.stack([algorithm.infer(net, x, tensors_of_client).softmax(-1) for net in networks]).mean(0)  # with the client's layers
        """
        with plain_torch(), torch.no_grad():
            pixels = self._pixels(images)
            if client not in (self.clients or (None,)):
                raise UserError(f"client {client!r} has no part of its own in this model; expected {self._expected()}")
            parts = [self._predict(batch, client) for batch in pixels.split(_BATCH)]
            return torch.cat(parts)

    def _predict(self, pixels: torch.Tensor, client: str | None) -> torch.Tensor:
        x = (pixels.to(self.mean.device) - self.mean) / self.std
        return torch.stack([self._logits(each, x, client).float().softmax(-1) for each in self.members]).mean(0).cpu()

    def _logits(self, member: Member, x: torch.Tensor, client: str | None) -> torch.Tensor:
        """The logits of one member, with the client's layers put in their places for this call."""
        own = member.clients[client] if client is not None else {}
        weights = member.net.state_dict()
        layers = [name for name in own if name in weights]
        rest = {name: tensor for name, tensor in own.items() if name not in layers}
        if not layers:
            return self.algorithm.infer(member.net, x, rest)
        with _LAYERS:
            before = {name: weights[name].clone() for name in layers}
            for name in layers:
                weights[name].copy_(own[name])
            try:
                return self.algorithm.infer(member.net, x, rest)
            finally:
                for name, tensor in before.items():
                    weights[name].copy_(tensor)

    def _expected(self) -> str:
        return f"one of {', '.join(self.clients)}" if self.clients else "None, its clients share all of it"

    def _pixels(self, images: torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
        """``[B, C, H, W]``, after checks: numbers on another scale would give a result, and a wrong one."""
        if not isinstance(images, (torch.Tensor, np.ndarray)):
            raise UserError(f"images: expected a tensor or a NumPy array, got {type(images).__name__}")
        pixels, _ = as_bytes(images, "images")
        channels, height, width = self.image_shape
        if pixels.dim() == 3 and channels == 1:
            pixels = pixels[:, None]
        if pixels.dim() != 4 or pixels.shape[1:] != self.image_shape:
            if images.shape[1:] == (height, width, channels):
                last = " (channels come before height and width: permute them)"
            elif self.image_size and pixels.dim() == 4 and pixels.shape[1] == channels:
                size = self.image_size
                last = (
                    f"; the run resized its images to {size}x{size}: uefl.data.rotate.resize(torch.as_tensor(images), {size}) does the same"
                )
            else:
                last = ""
            raise UserError(f"images: expected shape [B, {channels}, {height}, {width}], got {list(images.shape)}{last}")
        return pixels


def save(path: Path, cfg: Config, arm: str, federation: Federation, networks: Sequence[tuple[Tensors, Mapping[str, Tensors]]]) -> None:
    """Write weights by parameter name and ``TENSOR.CLIENT``, with the rest in the file's metadata.

    Args:
        path: of the file.
        cfg: of the run.
        arm: the arm whose model it is.
        federation: for classes, image shape and normalisation.
        networks: of each member, its weights and what belongs to each client, of which one at a time is looked at; names of an ensemble's
            begin with the number of the member.
    """
    own = {client: sorted(tensors) for client, tensors in networks[0][1].items() if tensors}
    about = {
        "algorithm": cfg.arms[arm].algorithm,
        "parameters": cfg.arms[arm].parameters.model_dump(mode="json"),
        "model": cfg.model.model_dump(mode="json"),
        "normalize": cfg.data.normalize,
        "image_size": cfg.data.image_size,
        "members": len(networks),
        "clients": own,
        "classes": federation.classes,
        "image_shape": federation.image_shape,
        "mean": federation.mean,
        "std": federation.std,
    }
    checkpoint.save_parts(path, _Parts(networks), {_FORMAT: json.dumps(about)})


class _Parts(Iterable[Tensors]):
    """The weights of every network, then what belongs to each client, by the names that they have in the file."""

    def __init__(self, networks: Sequence[tuple[Tensors, Mapping[str, Tensors]]]) -> None:
        self._networks = networks

    def __iter__(self) -> Iterator[Tensors]:
        for i, (weights, clients) in enumerate(self._networks):
            prefix = f"{i}." if len(self._networks) > 1 else ""
            yield {f"{prefix}{name}": tensor for name, tensor in weights.items()}
            for client, tensors in clients.items():
                yield {f"{prefix}{name}.{client}": tensor for name, tensor in tensors.items()}


@isolate
def load(path: str | Path, network: Callable[[], nn.Module] | None = None) -> SavedModel:
    """Read ``model-<arm>.safetensors`` of a run folder, on the CPU.

    Args:
        path: the file; or the run folder, where it holds one model.
        network: makes the network of a model that was trained with one given in Python.

    Raises:
        UserError: no such file, or not a model as a run writes it, with values or weights that do not go together; an algorithm that is not
            registered here; a folder that holds several models, or none. The message names the file.
    """
    path = _file(Path(path))
    check_file(path, "the model", "expected model-<arm>.safetensors of a run folder")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if _FORMAT not in metadata:
        raise UserError(f"{path} is no model of this version of uefl (expected {_FORMAT!r}, found {', '.join(metadata) or 'nothing'})")
    try:
        about = json.loads(metadata[_FORMAT])
        if network is not None or about["model"]["encoder"] != "given":
            return _model(about, tensors, network)
    except (UserError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: {error}. The file was changed, or is of another version of uefl; restore it") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: its description is damaged ({error}). The file was changed; restore it") from None
    raise UserError(f"{path}: its network was given in Python; give it again: uefl.load(out, model=...).model(arm)")


def _model(about: dict[str, Any], tensors: Tensors, network: Callable[[], nn.Module] | None) -> SavedModel:
    kind = find(about["algorithm"])
    algorithm = kind(parse(kind.Parameters, "parameters", about["parameters"]))
    settings = parse(Model, "model", about["model"] | {"pretrained": False})
    shape, classes, count = tuple(about["image_shape"]), tuple(about["classes"]), int(about["members"])
    parts = [member(tensors, i) for i in range(count)] if count > 1 else [tensors]
    if sum(map(len, parts)) != len(tensors):
        raise UserError(f"key 'members': the file holds other networks than those of {count} members")
    mean, std = normalization(about["normalize"], about["mean"], about["std"])
    spec = ModelSpec(settings, shape, len(classes), network)  # type: ignore[arg-type]
    members = tuple(_member(algorithm, spec, about["clients"], part) for part in parts)
    return SavedModel(members, algorithm, classes, shape, about["image_size"], mean, std)  # type: ignore[arg-type]


def _file(path: Path) -> Path:
    """The one model of a folder."""
    if not path.is_dir():
        return path
    models = sorted(path.glob("model-*.safetensors"))
    if not models:
        raise UserError(f"{path} holds no model-<arm>.safetensors; a run writes one when an arm has ended")
    if len(models) > 1:
        raise UserError(f"{path} holds the models of several arms; load one of them: {', '.join(map(str, models))}")
    return models[0]


def _member(algorithm: Algorithm, spec: ModelSpec, clients: dict[str, list[str]], tensors: Tensors) -> Member:
    net = algorithm.build_model(spec).eval()
    own: dict[str, Tensors] = {}
    for client, names in clients.items():
        absent = [name for name in names if f"{name}.{client}" not in tensors]
        if absent:
            raise UserError(f"{absent[0]!r} of client {client!r} is missing")
        own[client] = {name: tensors.pop(f"{name}.{client}") for name in names}
    expected, found = _shapes(net.state_dict()), _shapes(tensors)
    if found != expected:
        name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
        raise UserError(
            f"weights {name!r}: the network of its configuration has {expected.get(name, 'none')}, the file {found.get(name, 'none')}"
        )
    net.load_state_dict(tensors, strict=False)
    return Member(net, own)


def _shapes(weights: Tensors) -> dict[str, list[int]]:
    """Return the shapes of all tensors but the integer counters of batch norm, which a file leaves out."""
    return {name: list(value.shape) for name, value in weights.items() if value.is_floating_point()}
