"""Write a trained model in the formats of other programs."""

from __future__ import annotations

import importlib
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import uefl_kernels

from . import checkpoint
from .errors import UserError, first_line
from .folder import check_no_file_of_a_run, writing
from .isolation import isolated
from .models.normalization import blank
from .models.saved import SavedModel, is_model
from .paths import check_name, check_place, resolved, special


def write(model: SavedModel, path: Path, client: str | None = None) -> None:
    """Write the module of :meth:`SavedModel.module` to a file, in the format of its suffix.

    ``.safetensors`` is the state dict. ``.pt2`` is a program of ``torch.export`` for any number of inputs.
    Loading it needs no package except torch. ``.onnx`` is ONNX for any number of inputs; writing it needs
    onnx and onnxscript. The metadata of each file have the classes, and kind, shape and dtype of the inputs.

    Args:
        model: the trained model, on the CPU.
        path: the file; it is replaced as a whole or not at all.
        client: the client with the part of the model to write; None: see :meth:`SavedModel.module`.

    Raises:
        UserError: the suffix or the client is unknown, a package is missing, the format lacks an operation of
            the model, or the file cannot be written or is a model of a run folder.
    """
    check_name(path, "the file")
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: expected a file that ends in {', '.join(FORMATS)}")
    if special(path):
        raise UserError(f"{path} is {special(path)}; expected a file")
    check_place(path)
    path = resolved(path)  # a link stays a link
    about = {"classes": list(model.classes), "shape": list(model.shape), "client": client, **_inputs(model)}
    check_no_file_of_a_run(path)
    if is_model(path):
        raise UserError(f"{path} is the model of a run and would be replaced; choose another name")
    with writing(path), isolated(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user of a command cannot act on torch's warnings
        module = model.module(client)
        example = blank(2, model.shape, model.inputs)
        example = example.float() if model.inputs.kind == "images" else example
        try:
            with checkpoint.replaced(path) as temporary:
                FORMATS[path.suffix.lower()](module, example, temporary, about)
        except OSError as error:
            place = error.filename or path
            raise UserError(f"{place} cannot be written ({error.strerror or error})") from None


def _inputs(model: SavedModel) -> dict[str, object]:
    """Return the kind and the dtype of the inputs, for the metadata."""
    if model.inputs.kind == "images":
        return {"inputs": "images", "dtype": "float32", "scale": "0-255"}
    if model.inputs.kind == "columns":
        return {"inputs": "columns", "dtype": "float64", "columns": list(model.inputs.names)}
    return {"inputs": "tokens", "dtype": "int64", "vocabulary": model.inputs.vocabulary}


def _state_dict(module: nn.Module, example: torch.Tensor, path: Path, about: dict[str, object]) -> None:
    checkpoint.save_tensors(path, module.state_dict(), {"uefl-export": json.dumps(about)})


def _program(module: nn.Module, example: torch.Tensor, path: Path, about: dict[str, object]) -> None:
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    known = torch.export.default_decompositions()
    own = {op: plain for op, plain in uefl_kernels.decompositions().items() if op not in known}
    if any(node.target in own for node in program.graph.nodes):  # a file with our ops needs our package
        program = program.run_decompositions(own)
    whole = io.BytesIO()  # if torch wrote the file, a full disk would end the process
    torch.export.save(program, whole, extra_files={"uefl.json": json.dumps(about)})
    path.write_bytes(whole.getbuffer())


def _onnx(module: nn.Module, example: torch.Tensor, path: Path, about: dict[str, object]) -> None:
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise UserError(
                f"ONNX needs the package {package}; install it with: pip install onnx onnxscript"
            ) from None
    keys: dict[str, Any] = {
        "dynamo": True,
        "verbose": False,
        "input_names": ["images"],
        "output_names": ["probabilities"],
        "external_data": False,
    }
    try:
        shapes = ({0: torch.export.Dim("batch")},)
        exported = torch.export.export(module, (example,), dynamic_shapes=shapes)
        program = torch.onnx.export(exported.run_decompositions(uefl_kernels.decompositions()), **keys)
    except RuntimeError as error:  # an error of torch.export or of the ONNX exporter
        reason = first_line(error.__cause__ or error)
        raise UserError(f"this model cannot be exported to ONNX ({reason}); export it as .pt2") from None
    assert program is not None
    program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
    program.save(str(path))


FORMATS: dict[str, Callable[[nn.Module, torch.Tensor, Path, dict[str, object]], None]] = {
    ".safetensors": _state_dict,
    ".pt2": _program,
    ".onnx": _onnx,
}
"""The writer of each suffix."""
