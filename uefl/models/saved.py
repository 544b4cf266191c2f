"""The final model of an arm, in a file with its weights, clients' tensors, algorithm and classes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import nn

from .. import checkpoint
from ..algorithms.base import Algorithm, ModelSpec, find
from ..client.work import Work
from ..config import Config, Model
from ..data.federation import Federation
from ..data.inputs import IMAGES, Inputs
from ..data.notes import check_names
from ..data.pixels import as_bytes
from ..data.vectors import Vectors, is_frame, of_array
from ..engines.base import member
from ..errors import UserError, first_line, listed
from ..fields import Section, parse
from ..isolation import for_prediction, isolate
from ..json_text import parse_json
from ..paths import check_file, check_name, expanded
from ..seeds import seeded
from ..uncertainty import Prediction, ensemble, joined
from .normalization import normalization, normalized

_FORMAT = "uefl-model-4"
_BATCH = 500
_MOST_PASSES = 100_000  # as in a run
_LAYERS = threading.Lock()  # held by a call while a client's layers are in a network
Tensors = dict[str, torch.Tensor]
Samples = torch.Tensor | npt.NDArray[Any] | Sequence[str | Path]


class Member(NamedTuple):
    """One trained network, as a model has one, and an ensemble several."""

    net: nn.Module
    """if layers are private, with the mean of the clients' layers"""
    clients: dict[str, Tensors]
    """tensors of each client: weights of the network by name, and other tensors such as ``codebook``
    ``[V, d]``"""


@dataclass(frozen=True)
class SavedModel:
    """A trained model and the shape, kind and scale of its input."""

    members: tuple[Member, ...]
    algorithm: Algorithm
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    """shape of one input, such as (C, H, W)"""
    image_size: int
    """side of the square, in pixels, to which the run resized every image; 0: it resized none"""
    mean: torch.Tensor
    """result of :func:`uefl.models.normalization.normalization`"""
    std: torch.Tensor
    passes: int = 0
    """draws with dropout on that the run took for its uncertainty; 0: none, as for an ensemble"""
    inputs: Inputs = IMAGES

    def __repr__(self) -> str:
        networks = f"{len(self.members)} x {type(self.members[0].net).__name__}"
        private = f" with parts of {listed(self.clients)}" if self.clients else ""
        return f"SavedModel({networks}{private}: {list(self.shape)} -> {len(self.classes)} classes)"

    @property
    def clients(self) -> tuple[str, ...]:
        """Return the clients that have a part of their own: layers, or tensors of the algorithm."""
        return tuple(self.members[0].clients)

    def to(self, device: torch.device | str) -> SavedModel:
        """Return a copy on another device, such as ``"cuda"``, whose inputs and predictions are on the CPU.

        Raises:
            UserError: the device does not exist on this machine.
        """
        try:
            there = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise UserError(f"device {str(device)!r} is missing: {first_line(error)}") from None

        def moved(own: Tensors) -> Tensors:
            return {name: tensor.to(there) for name, tensor in own.items()}

        members = tuple(
            Member(deepcopy(net).to(there), {client: moved(own) for client, own in clients.items()})
            for net, clients in self.members
        )
        return replace(self, members=members, mean=self.mean.to(there), std=self.std.to(there))

    @overload
    def predict(
        self, images: Samples, client: str | None = None, *, uncertainty: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def predict(
        self,
        images: Samples,
        client: str | None = None,
        *,
        uncertainty: Literal[True],
        passes: int | None = None,
        seed: int = 0,
    ) -> Prediction: ...
    def predict(
        self,
        images: Samples,
        client: str | None = None,
        *,
        uncertainty: bool = False,
        passes: int | None = None,
        seed: int = 0,
    ) -> torch.Tensor | Prediction:
        """Predict class probabilities with dropout off, or with the uncertainty that the run measures.

        Args:
            images: a tensor or a NumPy array ``[B, C, H, W]``, or ``[B, H, W]`` for gray images: uint8,
                pixels 0 to 255, or floats in [0, 1], which are rounded to 8 bits as by :func:`uefl.train`.
                The images need the size that the model was trained on; :func:`uefl.data.rotate.resize`
                resizes images as a run does. Or a list of paths of image files, see :meth:`read`. A model of
                columns takes floats ``[B, F]`` or a DataFrame, a model of tokens integers ``[B, L]``.
            client: the client with the parts to predict with. None: of a client that was not trained. Then
                the codebook is the one of :meth:`fitting`, and private layers have the mean of the clients'
                weights.
            uncertainty: also return entropies, from draws with dropout on (MC dropout), or from the members
                of an ensemble.
            passes: draws; None: the number of the run.
            seed: seed of the draws. The draws for an image also depend on its position among the images.

        Returns:
            ``[B, classes]`` float32, on the CPU: the mean over the members of an ensemble. With
            ``uncertainty`` a :class:`uefl.uncertainty.Prediction`: ``probs`` ``[B, classes]``, and
            ``entropy`` and ``mutual_info`` ``[B]`` in nats.

        Raises:
            UserError: the images have another type or shape; the client is unknown; ``client`` is None, and
                the parts of the clients have neither a mean nor a best one; ``passes`` is below 1, or given
                without ``uncertainty``.

        Equivalent to::

            x = (images - mean) / std
            # with the client's layers
            torch.stack([algorithm.infer(net, x, tensors_of_client).softmax(-1) for net in networks]).mean(0)
        """
        if passes is not None and (type(passes) is not int or not 1 <= passes <= _MOST_PASSES):
            raise UserError(f"passes: expected an integer from 1 to {_MOST_PASSES}, got {passes!r}")
        if passes is not None and not uncertainty:
            raise UserError("passes: the draws are for uncertainty=True, and without it there are none")
        with for_prediction(self.mean.device, draws=bool(uncertainty)), torch.no_grad():
            pixels = self._pixels(images)
            client = self._part(pixels, client)
            if not uncertainty:
                return torch.cat([self._predict(batch, client) for batch in pixels.split(_BATCH)])
            passes = self.passes if passes is None else passes
            drawn = []
            for i, batch in enumerate(pixels.split(_BATCH)):
                with seeded(self.mean.device, seed, "predict", i):
                    drawn.append(
                        ensemble([self._draw(member, batch, client, passes) for member in self.members])
                    )
            whole = joined([prediction._replace(extra={}) for prediction in drawn])
            return Prediction(*(tensor.cpu() for tensor in whole[:4]))  # type: ignore[arg-type]

    @property
    def has_codebooks(self) -> bool:
        """Return True if clients have codebooks, or other tensors with a measurable fit to images."""
        return bool(self.clients) and type(self.algorithm).misfit is not Algorithm.misfit

    def fitting(self, images: Samples) -> str | None:
        """Return the client with the codebook of the least mean quantization error on a new client's images.

        Returns:
            The name of the client, or None if clients have no parts or no such measure.
        """
        errors = self.misfits(images)
        return min(errors, key=lambda name: errors[name]) if errors else None

    def misfits(self, images: Samples) -> dict[str, float]:
        """Return the misfit of each client's codebook, summed over the images, if it can be measured."""
        with for_prediction(self.mean.device), torch.no_grad():
            return self._misfits(self._pixels(images))

    def read(self, paths: Sequence[str | Path]) -> torch.Tensor:
        """Read image files by :mod:`uefl.data.pixels`, in the channels and the size of the model.

        Returns:
            ``[B, C, H, W]`` uint8.

        Raises:
            UserError: files cannot be read; the message names all of them.
        """
        from ..data.images import on_files

        images = on_files([expanded(path) for path in paths])
        return images.fitted(np.arange(images.count), self.shape)

    def module(self, client: str | None = None) -> nn.Module:
        """Return a module to export.

        The inputs of the module are images ``[B, C, H, W]`` (float32, 0 to 255), columns ``[B, F]`` (float64)
        or tokens ``[B, L]`` (int64). The outputs are probabilities ``[B, classes]``.

        Args:
            client: the client of the private tensors; None: as in :meth:`predict`, if there is no codebook to
                choose.

        Raises:
            UserError: the client is unknown, or there are several codebooks and no name.
        """
        if client is None and self.has_codebooks:
            raise UserError(
                "client: a module has one codebook; name a client (--client on the command line):"
                f" {self._expected()}"
            )
        if client is not None or not self._shared():
            self._check(client)
        return Exported(self, client)

    def _predict(self, pixels: torch.Tensor, client: str | None) -> torch.Tensor:
        x, probs = self._normalized(pixels), []
        for each in self.members:
            with _layers(each, client) as tensors:
                probs.append(self.algorithm.infer(each.net, x, tensors).float().softmax(-1))
        return torch.stack(probs).mean(0).cpu()

    def _draw(self, member: Member, pixels: torch.Tensor, client: str | None, passes: int) -> Prediction:
        """Predict a batch as in a run: by dropout passes, or by the draws of the algorithm."""
        with _layers(member, client) as tensors:
            turn = Work.of_saved_model(member.net, tensors, passes)
            return self.algorithm.predict(turn, self._normalized(pixels))

    def _normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        return normalized(pixels.to(self.mean.device), self.mean, self.std)

    def _part(self, pixels: torch.Tensor, client: str | None) -> str | None:
        """Return the client with the parts to predict with, or None for the mean of the layers."""
        if client is None and self.has_codebooks:
            errors = self._misfits(pixels)
            return min(errors, key=lambda name: errors[name])
        self._check(client)
        return client

    def _check(self, client: str | None) -> None:
        if client not in (*self.clients, *([None] if self._shared() else [])):
            raise UserError(
                f"client {client!r} has no tensors of its own in this model; expected {self._expected()}"
            )

    def _shared(self) -> bool:
        """Return True if private tensors are layers, which have a mean, but not all layers of the network."""
        net = {
            name for name, weight in self.members[0].net.state_dict().items() if weight.is_floating_point()
        }
        return all(own.keys() < net for own in self.members[0].clients.values())

    def _misfits(self, pixels: torch.Tensor) -> dict[str, float]:
        """Return the mean misfit over the images and the members by client, empty without a misfit."""
        found: dict[str, float] = {}
        for client in self.clients if self.has_codebooks else ():
            total = 0.0
            for batch in pixels.split(_BATCH):
                x = self._normalized(batch)
                for each in self.members:
                    with _layers(each, client) as tensors:
                        misfit = self.algorithm.misfit(each.net, x, tensors)
                    assert misfit is not None
                    total += float(misfit.double().sum())
            found[client] = total
        return found

    def _expected(self) -> str:
        return f"one of {listed(self.clients)}" if self.clients else "None, its clients share all of it"

    def _pixels(self, images: Samples) -> torch.Tensor:
        """Check images, because another scale would give a wrong result, and return ``[B, C, H, W]``."""
        if (
            isinstance(images, (list, tuple))
            and images
            and all(isinstance(path, (str, Path)) for path in images)
        ):
            return self.read(images)
        if self.inputs.kind != "images":
            return self._vectors(images)
        if not isinstance(images, (torch.Tensor, np.ndarray)):
            got = type(images).__name__
            if isinstance(images, (list, tuple)):
                got += f" of {type(images[0]).__name__}" if images else " of length 0"
            raise UserError(f"images: expected a tensor, a NumPy array or a list of paths, got {got}")
        pixels, _ = as_bytes(images, "images")
        channels, height, width = self.shape
        if pixels.dim() == 3 and channels == 1:
            pixels = pixels[:, None]
        if pixels.dim() != 4 or pixels.shape[1:] != self.shape:
            if images.shape[1:] == (height, width, channels):
                last = " (channels come before height and width: permute them)"
            elif self.image_size and pixels.dim() == 4 and pixels.shape[1] == channels:
                size = self.image_size
                last = (
                    f"; the run resized its images to {size}x{size}:"
                    f" uefl.data.rotate.resize(torch.as_tensor(images), {size}) does the same"
                )
            else:
                last = ""
            raise UserError(
                f"images: expected shape [B, {channels}, {height}, {width}], got {list(images.shape)}{last}"
            )
        return pixels

    def _vectors(self, inputs: Any) -> torch.Tensor:
        """Check inputs and return columns ``[B, F]`` float64 or tokens ``[B, L]`` int64."""
        if not isinstance(inputs, (torch.Tensor, np.ndarray)) and not is_frame(inputs):
            raise UserError(
                f"inputs: expected a tensor, a NumPy array or a DataFrame, got {type(inputs).__name__}"
            )
        return self.table(inputs, "inputs").values

    def table(self, inputs: Any, where: str) -> Vectors:
        """Return columns, found by name in a DataFrame, or tokens in the form that the model takes.

        Raises:
            UserError: a column is missing, or the inputs have another kind, length or vocabulary.
        """
        kind, names, (length,) = self.inputs.kind, self.inputs.names, self.shape
        if is_frame(inputs):
            by_name = {str(column): column for column in inputs.columns}
            absent = [name for name in names if name not in by_name]
            if absent:
                raise UserError(f"{where}: column {absent[0]!r} is missing; the model was trained on it")
            inputs = inputs[[by_name[name] for name in names]] if names else inputs
        found = of_array(inputs, where, self.inputs.vocabulary)
        if found.inputs.kind != kind or found.values.shape[1] != length:
            got = f"{found.inputs.kind} {list(found.values.shape)}"
            raise UserError(f"{where}: expected {kind} [B, {length}], got {got}")
        return found


@contextmanager
def _layers(member: Member, client: str | None) -> Iterator[Tensors]:
    """Load the client's layers into the network inside the context, and yield its other tensors."""
    own = member.clients[client] if client is not None else {}
    weights = member.net.state_dict()
    names = [name for name in own if name in weights]
    rest = {name: tensor for name, tensor in own.items() if name not in weights}
    with _LAYERS:  # also for the modes of dropout layers, which draws change
        before = {name: weights[name].clone() for name in names}
        for name in names:
            weights[name].copy_(own[name])
        try:
            yield rest
        finally:
            for name, tensor in before.items():
                weights[name].copy_(tensor)


class Exported(nn.Module):
    """The networks of a saved model with the parts of one client, to be moved, exported and saved."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: SavedModel, client: str | None) -> None:
        super().__init__()
        self._infer = model.algorithm.infer
        self.nets = nn.ModuleList()
        self._names: list[list[str]] = []
        for i, each in enumerate(model.members):
            with _layers(each, client) as rest:
                self.nets.append(deepcopy(each.net))
            self._names.append(sorted(rest))
            for j, name in enumerate(self._names[i]):
                self.register_buffer(f"own_{i}_{j}", rest[name].clone())
        self.register_buffer("mean", model.mean.clone())
        self.register_buffer("std", model.std.clone())
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute inputs, as in :meth:`SavedModel.module` -> probabilities ``[B, classes]``."""
        x = normalized(images, self.mean, self.std)
        probs = []
        for i, net in enumerate(self.nets):
            tensors = {name: getattr(self, f"own_{i}_{j}") for j, name in enumerate(self._names[i])}
            probs.append(self._infer(net, x, tensors).float().softmax(-1))
        return torch.stack(probs).mean(0)


def save(
    path: Path,
    cfg: Config,
    arm: str,
    federation: Federation,
    networks: Sequence[tuple[Tensors, Mapping[str, Tensors]]],
) -> None:
    """Write weights by parameter name and ``TENSOR.CLIENT``, with the rest in the file's metadata.

    Args:
        networks: weights of each member and the tensors of each client, read one client at a time; names of
            an ensemble's begin with the number of the member.
    """
    own = {client: sorted(tensors) for client, tensors in networks[0][1].items() if tensors}
    about = {
        "algorithm": cfg.arms[arm].algorithm,
        "parameters": cfg.arms[arm].parameters.model_dump(mode="json"),
        "model": cfg.model.model_dump(mode="json"),
        "normalize": cfg.data.normalize,
        "image_size": cfg.data.image_size,
        "members": len(networks),
        "passes": 0 if cfg.run.uncertainty == "ensemble" else cfg.run.passes,
        "clients": own,
        "classes": federation.classes,
        "shape": federation.shape,
        "mean": federation.mean,
        "std": federation.std,
        **({} if federation.inputs == IMAGES else {"inputs": asdict(federation.inputs)}),
    }
    checkpoint.save_groups(path, partial(_groups, networks), {_FORMAT: json.dumps(about)})


def _groups(networks: Sequence[tuple[Tensors, Mapping[str, Tensors]]]) -> Iterator[Tensors]:
    """Yield the weights of every network, then the tensors of each client, by their names in the file."""
    for i, (weights, clients) in enumerate(networks):
        prefix = f"{i}." if len(networks) > 1 else ""
        yield {f"{prefix}{name}": tensor for name, tensor in weights.items()}
        for client, tensors in clients.items():
            yield {f"{prefix}{name}.{client}": tensor for name, tensor in tensors.items()}


class _Description(Section):
    """The metadata of a file, with checks because the file may come from someone else."""

    algorithm: str
    parameters: dict[str, Any]
    model: dict[str, Any]
    normalize: Literal["standard", "imagenet", "centered", "raw"]
    image_size: int = Field(ge=0)
    members: int = Field(ge=1)
    passes: int = Field(ge=0, le=_MOST_PASSES)
    clients: dict[str, list[str]]
    classes: tuple[str, ...]
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    inputs: dict[str, Any] = Field({})

    def kind_of_inputs(self) -> Inputs:
        """Return the kind of the inputs.

        Raises:
            ValueError: the shape, the names of the classes or the normalization do not match it.
        """
        inputs = Inputs(**self.inputs | {"names": tuple(self.inputs.get("names", ()))})
        check_names("class", self.classes)
        check_names("column", inputs.names)
        images = inputs.kind == "images"
        channels = {"images": self.shape[:1], "columns": self.shape, "tokens": (0,)}[inputs.kind]
        if len(self.shape) != (3 if images else 1) or {(len(self.mean),), (len(self.std),)} != {channels}:
            raise ValueError(
                f"{len(self.mean)} means and {len(self.std)} deviations for {inputs.kind} of shape"
                f" {list(self.shape)}"
            )
        return inputs


@isolate
def load(path: str | Path, network: Callable[[], nn.Module] | None = None) -> SavedModel:
    """Read ``model-<arm>.safetensors`` of a run folder, on the CPU.

    Args:
        path: the file, or a run folder with one model.
        network: a function that makes the network, if the network was given in Python.

    Raises:
        UserError: the file does not exist, is not a model of a run, or has values or weights that do not fit
            each other; the algorithm is not registered here; the folder holds several models, or none. The
            message names the file.
    """
    path = expanded(path)
    check_name(path, "the model")
    path = _file(path)
    check_file(path, "the model", "expected model-<arm>.safetensors of a run folder")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a mapping
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as a model ({error}); expected model-<arm>.safetensors of a run folder"
        ) from None
    if _FORMAT not in metadata:
        raise UserError(
            f"{path} is not a model of this version of uefl (expected {_FORMAT!r}, found"
            f" {', '.join(metadata) or 'nothing'})"
        )
    if checkpoint.SUM in metadata and metadata[checkpoint.SUM] != checkpoint.checksum(tensors, metadata):
        raise UserError(f"{path} is damaged (its checksum does not match); restore it, or train again")
    try:
        about = parse(_Description, "description", parse_json(metadata[_FORMAT]))
        if network is not None or about.model.get("encoder") != "given":
            return _model(about, tensors, network)
    except (UserError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path}: {error}. The file was changed, or comes from another version of uefl; restore it"
        ) from None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"{path}: its description is damaged ({error}). The file was changed; restore it"
        ) from None
    raise UserError(
        f"{path}: the network was given in Python; give it again: uefl.load(out, model=...).model(arm)"
    )


def is_model(path: Path) -> bool:
    """Return True if a file is a model as a run writes it, of any version."""
    try:
        with safe_open(str(path), "pt") as file:
            return any(name.startswith("uefl-model-") for name in file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _model(about: _Description, tensors: Tensors, network: Callable[[], nn.Module] | None) -> SavedModel:
    kind = find(about.algorithm)
    algorithm = kind(parse(kind.Parameters, "parameters", about.parameters))
    settings = parse(Model, "model", about.model | {"pretrained": False})
    count, inputs = about.members, about.kind_of_inputs()
    if count > max(len(tensors), 1):
        raise UserError(
            f"key 'description.members': expected 1 to {max(len(tensors), 1)}, the number of members"
            f" with tensors in the file; got {count}"
        )
    networks = [member(tensors, i) for i in range(count)] if count > 1 else [tensors]
    if sum(map(len, networks)) != len(tensors):
        raise UserError(f"key 'description.members': the file does not hold the networks of {count} members")
    mean, std = normalization(about.normalize, about.mean, about.std, inputs)
    spec = ModelSpec(settings, about.shape, len(about.classes), network, inputs)
    members = tuple(_member(algorithm, spec, about.clients, one) for one in networks)
    return SavedModel(
        members, algorithm, about.classes, about.shape, about.image_size, mean, std, about.passes, inputs
    )


def _file(path: Path) -> Path:
    """Return the one model of a folder."""
    if not path.is_dir():
        return path
    models = sorted(path.glob("model-*.safetensors"))
    if not models:
        raise UserError(f"{path} holds no model-<arm>.safetensors; a run writes one when an arm has ended")
    if len(models) > 1:
        arms = ", ".join(model.stem.removeprefix("model-") for model in models)
        raise UserError(
            f"{path} holds the models of several arms; name one of {arms} (--arm on the command line), or"
            " load its file model-<arm>.safetensors"
        )
    return models[0]


def _member(algorithm: Algorithm, spec: ModelSpec, clients: dict[str, list[str]], tensors: Tensors) -> Member:
    own: dict[str, Tensors] = {}
    for client, names in clients.items():
        absent = [name for name in names if f"{name}.{client}" not in tensors]
        if absent:
            raise UserError(f"{absent[0]!r} of client {client!r} is missing")
        own[client] = {name: tensors.pop(f"{name}.{client}") for name in names}
    # a network of the file's description may be too large to make
    with torch.device("cpu" if spec.given is not None else "meta"):
        net = algorithm.build_model(spec)
    expected, found = _shapes(net.state_dict()), _shapes(tensors)
    if found != expected:
        name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
        raise UserError(
            f"weights {name!r}: the network of its configuration has {expected.get(name, 'none')}, the file"
            f" {found.get(name, 'none')}"
        )
    net = (net if spec.given is not None else algorithm.build_model(spec)).eval()
    net.load_state_dict(tensors, strict=False)
    return Member(net, own)


def _shapes(weights: Tensors) -> dict[str, list[int]]:
    """Return the shapes of all tensors except the integer counters of batch norm."""
    return {name: list(value.shape) for name, value in weights.items() if value.is_floating_point()}
