"""From the reports of silos to a federation: the server knows the images by their numbers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..data import manifest as record
from ..data.federation import Federation, LabeledData, SetData, Silo, Sizes
from ..data.notes import check_names
from ..data.prepare import PixelCounts
from ..engines import faults
from ..engines.flower.members import Report
from ..errors import UserError


def refused(report: Report) -> str | None:
    """Why a node that reports cannot be a silo of a run, or None."""
    header, parts = report
    if header.get("error") is not None:
        return faults.words(header["error"])
    try:
        check_names("silo", [str(header["client"])])
        Sizes(**_sizes(header))
        classes, shape, counts = header["classes"], header["image_shape"], parts["pixels"]["counts"]
        sound = all(isinstance(name, str) for name in classes) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)
        if not sound or counts.dtype != torch.int64 or list(counts.shape) != [shape[0], 256] or int(counts.min()) < 0:
            return "its report does not fit itself"
    except UserError as error:
        return str(error)
    except (KeyError, TypeError, ValueError):
        return "its report is not complete"
    return None


def agree(reports: Mapping[str, Report], kind: str, *, image_size: int, seed: int, place: str) -> Federation:
    """The federation of these silos, whose images cannot be read here.

    Classes are the union over all silos, sorted by name; images are in colour where those of one silo are. Mean and deviation are those of
    all images that are trained on, exactly, from how often each of the 256 grey levels occurs.

    Args:
        reports: by name.
        kind: of the data that the arms take.
        image_size: of the configuration, for the manifest.
        seed: of the run, for the manifest.
        place: of the SuperLink, for the manifest.

    Raises:
        UserError: silos that cannot be trained together; the message names the one that differs.
    """
    names = sorted(reports)
    headers = {name: reports[name][0] for name in names}
    first = names[0]
    for name in names:
        if headers[name]["kind"] != kind:
            raise UserError(f"silo {name!r} has {headers[name]['kind']} data, the arms need {kind}")
        (_, h, w), (_, h0, w0) = headers[name]["image_shape"], headers[first]["image_shape"]
        if (h, w) != (h0, w0):
            raise UserError(f"silo {name!r} has images of {w}x{h}, silo {first!r} of {w0}x{h0}; set image_size to resize all to one square")
    classes = tuple(sorted({one for header in headers.values() for one in header["classes"]}))
    if len(classes) < 2:
        raise UserError(f"all silos have one class, {classes[0]!r}; a classifier needs two or more")
    channels = max(header["image_shape"][0] for header in headers.values())
    pixels = PixelCounts(channels)
    for name in names:
        pixels.counts += reports[name][1]["pixels"]["counts"].expand(channels, -1)
    manifest = {
        "schema": record.SCHEMA,
        "kind": kind,
        "source": {"name": f"silos at {place}"},
        "partition": {"scheme": "natural"},
        "seed": seed,
        "image_size": image_size,
        "classes": list(classes),
        "silos": {name: _entry(header, classes) for name, header in headers.items()},
        "unseen": {},
        "server": {},
    }
    mean, std = pixels.mean_and_std()
    silos = tuple(Silo(name, Sizes(**_sizes(header)), _elsewhere(name)) for name, header in headers.items())
    versions = {header["torch"] for header in headers.values()} | {torch.__version__}
    mixed = f"the silos and the server have torch {', '.join(sorted(versions))}; results may differ in the last bits"
    shape = (channels, *headers[first]["image_shape"][1:])
    return Federation(
        kind,  # type: ignore[arg-type]
        silos,
        classes,
        shape,
        mean,
        std,
        notes=(mixed,) if len(versions) > 1 else (),
        manifest=manifest,
        digest=record.digest(manifest),
        here=False,
    )


def _sizes(header: dict[str, Any]) -> dict[str, Any]:
    return {**header["sizes"], "sets": tuple(header["sizes"]["sets"])}


def _entry(header: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    """A silo's part of the manifest, its classes among those of all."""

    def of(split: dict[str, Any]) -> dict[str, Any]:
        counts = dict(zip(header["classes"], split["images_of_class"], strict=True))
        return {"sha256": split["sha256"], "images_of_class": [counts.get(name, 0) for name in classes]}

    return {part: of(split) for part, split in header["content"].items()}


def _elsewhere(name: str) -> Any:
    def load() -> LabeledData | SetData:
        raise UserError(f"the images of silo {name!r} stay with it; an arm that reads them at the server cannot run over Flower")

    return load
