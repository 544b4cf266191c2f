"""The final network of an arm, in a file that holds all it takes to use it: weights, codebooks, configuration, classes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .. import checkpoint, config
from ..config import Config
from ..data.sets import SetFederation
from ..data.silo import Federation
from ..errors import UserError
from .net import Net

_FORMAT = "uefl-model-1"


@dataclass(frozen=True)
class SavedModel:
    """A trained network and what its input must look like."""

    net: Net
    codebooks: dict[str, torch.Tensor]
    """by client, ``[V, d]``; empty for an arm without quantiser"""
    classes: tuple[str, ...]
    mean: torch.Tensor
    """``[C, 1, 1]`` on the scale 0-255"""
    std: torch.Tensor

    @torch.no_grad()
    def predict(self, images: torch.Tensor, client: str | None = None) -> torch.Tensor:
        """Class probabilities with dropout off.

        Args:
            images: ``[B, C, H, W]`` uint8, of the size that the model was trained on.
            client: whose codebook to quantise with; needed exactly where there are codebooks.

        Returns:
            ``[B, classes]`` float32.

        Raises:
            UserError: no such client.
        """
        if (client in self.codebooks) != bool(self.codebooks):
            raise UserError(f"client {client!r} has no codebook in this model; expected one of {', '.join(self.codebooks) or 'None'}")
        codebook = self.codebooks[client] if client is not None else None
        logits, _ = self.net((images - self.mean) / self.std, codebook, 0.0)
        probs: torch.Tensor = logits.float().softmax(-1)
        return probs


def save(
    path: Path, cfg: Config, federation: Federation | SetFederation, weights: dict[str, torch.Tensor], codebooks: dict[str, torch.Tensor]
) -> None:
    """Write weights by parameter name and ``codebook.<client>``, with the rest in the file's metadata."""
    about = {"classes": federation.classes, "image_shape": federation.image_shape, "mean": federation.mean, "std": federation.std}
    tensors = weights | {f"codebook.{name}": codebook for name, codebook in codebooks.items()}
    # one entry, because safetensors writes several in any order, and the same run shall give the same file
    checkpoint.save_tensors(path, tensors, {_FORMAT: json.dumps({"config": cfg.to_toml(), **about})})


def load(path: str | Path) -> SavedModel:
    """Read ``model-<arm>.safetensors`` of a run folder, on the CPU.

    Raises:
        UserError: no such file, or not a model that this version wrote.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if _FORMAT not in metadata:
        raise UserError(f"{path} is no model of this version of uefl (expected {_FORMAT!r}, found {', '.join(metadata) or 'nothing'})")
    about = json.loads(metadata[_FORMAT])
    cfg = config.from_toml(about["config"])
    net = Net(cfg, tuple(about["image_shape"]), len(about["classes"])).eval()
    codebooks = {name.removeprefix("codebook."): tensors.pop(name) for name in list(tensors) if name.startswith("codebook.")}
    net.load_state_dict(tensors, strict=False)  # the file leaves out the integer counters of batch norm
    mean, std = normalization(cfg, about["mean"], about["std"])
    return SavedModel(net, codebooks, tuple(about["classes"]), mean, std)


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
