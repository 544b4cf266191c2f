"""Checkpoints of a run: tensors in safetensors, everything else in JSON.

``checkpoint.json`` names its tensor file and is renamed into place last. A run killed at any moment leaves
the previous pair or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_bytes

from .errors import UserError
from .json_text import parse_json
from .paths import has_file, named, neighbor, opened, read_text

SCHEMA = 4
SUM = "sha256"
_INDEX = "checkpoint.json"
_TENSORS = re.compile(r"checkpoint-[0-9a-f]{16}\.safetensors")


def save(directory: Path, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
    """Write both files and remove the tensors of the previous checkpoint."""
    new = directory / "checkpoint.new"
    save_tensors(new, tensors)
    found = digest(new)
    name = f"checkpoint-{found[:16]}.safetensors"
    os.replace(new, directory / name)
    index = {"schema": SCHEMA, "tensors": name, "sha256": found, "state": plain}
    write_json(directory / _INDEX, index | {"state_sha256": _digest_of(plain)})
    for other in directory.glob("checkpoint-*.safetensors"):
        if other.name != name:
            other.unlink()


def load(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Read the checkpoint of a run, or return None if there is none yet.

    Raises:
        UserError: a file has another schema version, or is missing, truncated or altered.
    """
    if not has_file(directory / _INDEX):
        return None
    index = read_index(directory)
    path = directory / index["tensors"]
    if not has_file(path):
        raise UserError(
            f"{directory / _INDEX} names {path.name}, which is missing; restore it, or start again in another"
            " folder"
        )
    if digest(path) != index["sha256"]:
        raise UserError(
            f"{path} is truncated or altered (its checksum does not match); start again in another folder"
        )
    try:
        return load_file(path), index["state"]
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def save_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    with replaced(path) as temporary:
        try:
            save_file(copies(tensors), temporary, metadata)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(path)) from None
        temporary.chmod(0o666 & ~_umask())


def save_groups(
    path: Path, groups: Callable[[], Iterable[dict[str, torch.Tensor]]], metadata: dict[str, str]
) -> None:
    """Write the dictionaries of two equal calls as :func:`save_tensors` does, one at a time in memory.

    The metadata get :func:`checksum` under the key ``SUM``.
    """
    found: dict[str, dict[str, Any]] = {}
    sums: dict[str, str] = {}
    for group in groups():
        found |= _header_and_bytes(group)[0]
        sums |= _sums(group)
    end = 0
    layout: dict[str, Any] = {"__metadata__": metadata | {SUM: _sum_of(sums, metadata)}}
    # largest items first, so that each tensor begins at a multiple of its item size
    for name in sorted(found, key=lambda name: (-_item_size(found[name]), name)):
        start, stop = found[name]["data_offsets"]
        layout[name] = found[name] | {"data_offsets": [end, end + stop - start]}
        end += stop - start
    header = json.dumps(layout, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with replaced(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for group in groups():
            described, values = _header_and_bytes(group)
            for name, about in described.items():
                file.seek(8 + len(header) + layout[name]["data_offsets"][0])
                file.write(values[slice(*about["data_offsets"])])


def checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Return a hash of a file's tensors and of its metadata without the key ``SUM``, in any order."""
    return _sum_of(_sums(tensors), {key: text for key, text in metadata.items() if key != SUM})


def _sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    flat = {name: tensor.detach().cpu().reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    return {name: hashlib.sha256(values.numpy().data).hexdigest() for name, values in flat.items()}


def _sum_of(sums: Mapping[str, str], metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([sums, metadata], sort_keys=True).encode()).hexdigest()


def _header_and_bytes(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], memoryview]:
    """Return dtype, shape and offsets of each tensor, and the bytes, as safetensors writes them."""
    whole = memoryview(save_bytes(copies(tensors)))
    begin = 8 + int.from_bytes(whole[:8], "little")
    header: dict[str, dict[str, Any]] = json.loads(bytes(whole[8:begin]))
    return header, whole[begin:]


def _item_size(about: dict[str, Any]) -> int:
    start, stop = about["data_offsets"]
    return int((stop - start) // max(math.prod(about["shape"]), 1))


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU, because safetensors refuses tensors that share memory."""
    return {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()
    }


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    with replaced(path) as temporary:
        temporary.write_bytes(data)


def read_index(directory: Path) -> dict[str, Any]:
    """Read ``checkpoint.json``.

    Raises:
        UserError: the file has another schema version, or is truncated or altered.
    """
    path = directory / _INDEX
    try:
        index = parse_json(read_text(path))
        schema = index["schema"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is truncated, or is not a checkpoint; start again in another folder"
        ) from None
    if schema != SCHEMA:
        raise UserError(
            f"{path} has schema {schema}, this version of uefl reads schema {SCHEMA}; resume with the version"
            " that wrote it"
        )
    if not {"tensors", "sha256", "state"} <= set(index) or not _TENSORS.fullmatch(str(index["tensors"])):
        raise UserError(f"{path} is incomplete or altered; start again in another folder")
    if index.get("state_sha256", whole := _digest_of(index["state"])) != whole:  # earlier versions wrote none
        raise UserError(f"{path} is altered (its checksum does not match); start again in another folder")
    return dict(index)


def _digest_of(state: Any) -> str:
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield the name of a new file, which takes the place of ``path`` once its bytes are on the disk.

    The name has a fixed suffix, and no file of this name stays after an error or a killed process.

    Raises:
        OSError: the new file cannot be written; ``path`` is as before.
    """
    temporary = neighbor(path, ".tmp")
    with named(path):
        try:
            temporary.unlink(missing_ok=True)
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
