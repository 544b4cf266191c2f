"""The final network of an arm, in a file that holds all it takes to use it: weights, codebooks, configuration, classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from .. import checkpoint, config
from ..config import Config
from ..data.sets import SetFederation
from ..data.silo import Federation
from ..engines.base import member, number
from ..errors import UserError
from .net import Net

_FORMAT = "uefl-model-1"
_BATCH = 500


class Member(NamedTuple):
    """One trained network; an ensemble has several, any other model one."""

    net: Net
    codebooks: dict[str, torch.Tensor]
    """by client, ``[V, d]``; empty for an arm without quantiser"""


@dataclass(frozen=True)
class SavedModel:
    """A trained model and what its input must look like."""

    members: tuple[Member, ...]
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    """(C, H, W)"""
    image_size: int
    """what the run resized every image to, a square; 0: none was"""
    mean: torch.Tensor
    """``[C, 1, 1]`` on the scale 0-255"""
    std: torch.Tensor

    def __repr__(self) -> str:
        networks = f"{len(self.members)} x {type(self.members[0].net).__name__}"
        codebooks = f" with codebooks of {', '.join(self.clients)}" if self.clients else ""
        return f"SavedModel({networks}{codebooks}: {list(self.image_shape)} -> {len(self.classes)} classes)"

    @property
    def clients(self) -> tuple[str, ...]:
        """Those that have a codebook of their own."""
        return tuple(self.members[0].codebooks)

    @torch.no_grad()
    def predict(self, images: torch.Tensor | npt.NDArray[np.uint8], client: str | None = None) -> torch.Tensor:
        """Class probabilities with dropout off; of an ensemble, the mean over its members.

        Args:
            images: ``[B, C, H, W]`` uint8, pixels 0 to 255, of the size that the model was trained on, as
                :func:`uefl.data.rotate.resize` makes it where the run did; grey ones may be ``[B, H, W]``. A tensor or a NumPy array.
            client: whose codebook to quantise with; needed exactly where there are codebooks.

        Returns:
            ``[B, classes]`` float32, on the CPU.

        Raises:
            UserError: images of another type or shape, no such client.

        Equivalent to: ``torch.stack([net(normalised, codebook).softmax(-1) for net, codebook in members]).mean(0)``
        """
        pixels = self._pixels(images)
        if client not in (self.clients or (None,)):
            raise UserError(f"client {client!r} has no codebook in this model; expected {self._expected()}")
        parts = [self._predict(batch, client) for batch in pixels.split(_BATCH)]
        return torch.cat(parts)

    def _predict(self, pixels: torch.Tensor, client: str | None) -> torch.Tensor:
        x = (pixels - self.mean) / self.std
        logits = [net(x, codebooks[client] if client is not None else None, 0.0)[0] for net, codebooks in self.members]
        return torch.stack([each.float().softmax(-1) for each in logits]).mean(0)

    def _expected(self) -> str:
        return f"one of {', '.join(self.clients)}" if self.clients else "None, its arm has no quantiser"

    def _pixels(self, images: torch.Tensor | npt.NDArray[np.uint8]) -> torch.Tensor:
        """``[B, C, H, W]``, after checks: numbers on another scale would give a result, and a wrong one."""
        if not isinstance(images, (torch.Tensor, np.ndarray)):
            raise UserError(f"images: expected a tensor or a NumPy array, got {type(images).__name__}")
        if images.dtype not in (torch.uint8, np.uint8):
            raise UserError(
                f"images: expected uint8, pixels 0 to 255, got {images.dtype}; those on the scale 0-1 are first to be multiplied by 255"
            )
        pixels = torch.from_numpy(np.ascontiguousarray(images)) if isinstance(images, np.ndarray) else images.cpu()
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


def save(
    path: Path,
    cfg: Config,
    federation: Federation | SetFederation,
    networks: Sequence[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]],
) -> None:
    """Write weights by parameter name and ``codebook.<client>``, with the rest in the file's metadata.

    Args:
        networks: weights and codebooks of each member; names of an ensemble's begin with the number of the member.
    """
    about = {"classes": federation.classes, "image_shape": federation.image_shape, "mean": federation.mean, "std": federation.std}
    parts = [weights | {f"codebook.{name}": codebook for name, codebook in codebooks.items()} for weights, codebooks in networks]
    # one entry, because safetensors writes several in any order, and the same run shall give the same file
    metadata = {_FORMAT: json.dumps({"config": cfg.to_toml(), **about})}
    checkpoint.save_tensors(path, number(parts) if cfg.uncertainty == "ensemble" else parts[0], metadata)


def load(path: str | Path) -> SavedModel:
    """Read ``model-<arm>.safetensors`` of a run folder, on the CPU.

    Args:
        path: the file; or the run folder, where it holds one model.

    Raises:
        UserError: no such file, or not a model as a run writes it, with values or weights that do not go together; a folder that holds
            several models, or none. The message names the file.
    """
    path = _file(Path(path))
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if _FORMAT not in metadata:
        raise UserError(f"{path} is no model of this version of uefl (expected {_FORMAT!r}, found {', '.join(metadata) or 'nothing'})")
    try:
        return _model(json.loads(metadata[_FORMAT]), tensors)
    except (UserError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: {error}. The file was changed, or is of another version of uefl; restore it") from None


def _model(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> SavedModel:
    cfg, shape, classes = config.from_toml(about["config"]), tuple(about["image_shape"]), tuple(about["classes"])
    parts = [member(tensors, i) for i in range(cfg.members)] if cfg.uncertainty == "ensemble" else [tensors]
    if sum(map(len, parts)) != len(tensors):
        raise UserError(f"key 'members': the file holds other networks than those of {cfg.members} members")
    mean, std = normalization(cfg, about["mean"], about["std"])
    return SavedModel(tuple(_member(cfg, shape, len(classes), part) for part in parts), classes, shape, cfg.image_size, mean, std)


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


def _member(cfg: Config, image_shape: tuple[int, int, int], classes: int, tensors: dict[str, torch.Tensor]) -> Member:
    net = Net(replace(cfg, pretrained=False), image_shape, classes).eval()
    codebooks = {name.removeprefix("codebook."): tensors.pop(name) for name in list(tensors) if name.startswith("codebook.")}
    expected, found = _shapes(net.state_dict()), _shapes(tensors)
    if found != expected:
        name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
        raise UserError(
            f"weights {name!r}: the network of its configuration has {expected.get(name, 'none')}, the file {found.get(name, 'none')}"
        )
    net.load_state_dict(tensors, strict=False)
    return Member(net, codebooks)


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Without the integer counters of batch norm, which a file leaves out."""
    return {name: list(value.shape) for name, value in weights.items() if value.is_floating_point()}


def normalization(cfg: Config, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the pixels on the scale 0-255, ``[C, 1, 1]``, from those of the data set on the scale 0-1."""
    channels = len(mean)
    if cfg.normalize == "raw":
        shift, scale = torch.zeros(channels), torch.ones(channels)
    elif cfg.normalize == "imagenet":
        if channels != 3:
            raise UserError(f"key 'normalize': 'imagenet' is for images of 3 channels, these have {channels}; use 'standard'")
        shift, scale = 255 * torch.tensor([0.485, 0.456, 0.406]), 255 * torch.tensor([0.229, 0.224, 0.225])
    else:
        shift, scale = 255 * torch.tensor(mean), 255 * torch.tensor(std)
    return shift[:, None, None], scale[:, None, None]
