"""Build a federation from the reports of silos.

The server knows only counts and hashes of the silos' images.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..config import Config
from ..data import manifest as record
from ..data.federation import ClientData, Federation, LabeledData, ServerData, SetData
from ..data.partitions.leave_one_out import LeaveOneOut
from ..data.partitions.natural import Natural
from ..data.prepare import Preparation
from ..data.sources import own_sets
from ..data.unlabeled_sets import LabeledRows, check_notes, notes_of_all
from ..errors import UserError, listed

if TYPE_CHECKING:
    from .report import SiloReport

Reports = Mapping[str, "SiloReport"]
"""by name"""
InputShape = tuple[int, ...]
_NAMED = 8
"""columns in a message"""


def check_asked(cfg: Config) -> None:
    """Refuse settings that silos with their own data cannot have, before the server waits for silos."""
    data = cfg.data
    if isinstance(data.partition, LeaveOneOut) and data.clients is not None:
        raise UserError(
            "key 'clients': every silo at the SuperLink takes part, so the number is not set here; leave the"
            " key out"
        )
    if isinstance(data.partition, LeaveOneOut) and data.partition.per_domain:
        raise UserError("key 'per_domain': silos at a SuperLink use all of their images; omit it")
    if data.partition is not None and not isinstance(data.partition, LeaveOneOut | Natural):
        raise UserError(
            f"partition {data.partition.name!r} deals images, but silos at a SuperLink have their own"
            " images; omit the partition"
        )
    for key in ("labeled", "validation"):
        if getattr(data, key):
            raise UserError(f"key {key!r}: the server has all images of its data.source; omit it")
    if data.priors == "estimated":
        raise UserError(
            "key 'priors': 'estimated' needs labeled images next to the sets, and silos "
            "have none; give each silo a priors.csv"
        )
    if data.prior_noise:
        raise UserError(
            "key 'prior_noise': one process draws the noise of all clients; omit the key, or run without"
            " --superlink"
        )


def fitting(reports: Reports, cfg: Config) -> tuple[list[str], dict[str, str]]:
    """Find the largest group of silos that can train together, given their reports in order of arrival.

    Returns:
        Their names, and for the name of each other silo the reason against it.
    """
    why = {}
    groups: list[list[str]] = []
    for name, report in reports.items():
        if cfg.data.normalize == "standard" and report.inputs.kind == "columns" and not report.statistics:
            why[name] = "its report has no moments of its columns, which data.normalize = 'standard' needs"
            continue
        group = next((one for one in groups if _difference(one[0], name, reports) is None), [])
        if not group:
            groups.append(group)
        group.append(name)
    most = max(groups, key=len, default=[])
    apart = ((name, _difference(most[0], name, reports)) for name in reports.keys() - why.keys() - {*most})
    return most, why | {name: difference for name, difference in apart if difference is not None}


def agree(reports: Reports, cfg: Config, place: str) -> Federation:
    """Return the federation of these silos, whose images cannot be read here.

    Classes of labeled images are the union over all silos, sorted by name; sets have the same classes at all
    silos. If one silo or the server has images in color, all images are in color. Mean and deviation are
    exact over all training images, from the counts of the 256 gray levels. The server's own images, for arms
    that learn from sets, are read here.

    Args:
        place: address of the SuperLink, for the manifest.
    """
    reports = {name: reports[name] for name in sorted(reports)}
    sets, example = cfg.kind == "sets", next(iter(reports.values()))
    scheme = cfg.data.partition or Natural()
    apart = scheme.domain if isinstance(scheme, LeaveOneOut) else None
    if apart is not None and (apart not in reports or len(reports) == 1):
        raise UserError(
            f"key 'domain': expected one of the connected silos, {listed(reports)}; got {apart!r}"
        )
    classes = (
        example.classes
        if sets
        else tuple(sorted({one for report in reports.values() for one in report.classes}))
    )
    if len(classes) < 2 and not sets:
        raise UserError(f"all silos have one class, {classes[0]!r}; a classifier needs two or more")
    server = own_sets.read_server(cfg.data.path, classes) if sets and cfg.data.path is not None else {}
    notes = _notes(reports, cfg, classes, server)
    shape, inputs = _shape(example, reports, server, cfg.data.image_size), example.inputs
    prepare = Preparation(shape, inputs, cfg.data.image_size, cfg.data.normalize == "standard")
    held = {part: rows.load(prepare) for part, rows in server.items()}  # images for arms on unlabeled sets
    statistics = prepare.statistics()
    for report in reports.values():
        statistics.join(report.statistics)
    if "labeled" in held:
        statistics.add(held["labeled"].images)
    content = record.ImageHashes()
    entries = {name: _entry(report, classes) for name, report in reports.items()}
    manifest = {
        "schema": record.SCHEMA,
        "kind": cfg.kind,
        "source": {"name": f"silos at {place}"},
        "partition": scheme.model_dump(mode="json") | {"scheme": scheme.name},
        "seed": cfg.run.seed,
        "image_size": cfg.data.image_size,
        "classes": list(classes),
        "silos": {name: entry for name, entry in entries.items() if name != apart},
        "unseen": {name: entry for name, entry in entries.items() if name == apart},
        "server": {part: rows.entry(content, part, len(classes)) for part, rows in server.items()},
    }
    silos = [ClientData(name, report.sizes, partial(_elsewhere, name)) for name, report in reports.items()]
    return Federation(
        cfg.kind,  # type: ignore[arg-type]
        tuple(silo for silo in silos if silo.name != apart),
        classes,
        shape,
        *statistics.mean_and_std(),
        unseen=tuple(silo for silo in silos if silo.name == apart),
        server=ServerData(held.get("labeled"), held.get("validation")) if sets else None,
        notes=notes,
        manifest=manifest,
        digest=record.digest(manifest),
        here=False,
        inputs=inputs,
    )


def _notes(
    reports: Reports, cfg: Config, classes: tuple[str, ...], server: Mapping[str, LabeledRows]
) -> tuple[str, ...]:
    """Return notes on priors (errors, with ``data.strict``), the server's images, precisions and versions."""
    found = []
    if cfg.kind == "sets":
        coverages = [report.reach for report in reports.values() if report.reach is not None]
        found += check_notes(notes_of_all(coverages, classes), strict=cfg.data.strict)
        if not server:
            found.append(
                f"the server has no images of its own: {cfg.data.path} holds neither labeled nor validation"
                " images"
            )
    versions = {report.torch for report in reports.values()} | {torch.__version__}
    exact = [name for name, report in reports.items() if report.precision == "fp32"]
    if 0 < len(exact) < len(reports):
        found.append(
            f"{listed(map(repr, exact))} compute{'s' if len(exact) == 1 else ''} in float32, the others in"
            " bfloat16: with run.precision = 'fp32' all do the same"
        )
    if len(versions) > 1:
        found.append(
            f"the silos and the server have torch {', '.join(sorted(versions))}; results may differ in the"
            " last bits"
        )
    return tuple(found)


def _shape(
    example: SiloReport, reports: Reports, server: Mapping[str, LabeledRows], image_size: int
) -> InputShape:
    """Return the shape of an input: images are in color if those of one silo, or of the server, are."""
    if example.inputs.kind != "images":
        return example.shape
    shapes = [report.shape for report in reports.values()]
    if server:
        shapes.append(Preparation.of([rows.images for rows in server.values()], image_size).shape)
        if shapes[-1][1:] != example.shape[1:]:
            raise UserError(_sizes("the server", shapes[-1], f"silo {example.client!r}", example.shape))
    return max(channels for channels, *_ in shapes), *example.shape[1:]


def _difference(first: str, name: str, reports: Reports) -> str | None:
    """Return why a silo cannot train together with the first one, or None if it can."""
    example, report = reports[first], reports[name]
    images = report.inputs.kind == "images"
    if report.inputs != example.inputs or not (images or report.shape == example.shape):
        return (
            f"silo {name!r} has {_inputs(report)}, silo {first!r} has {_inputs(example)}; all silos need the"
            " same inputs, with the same columns in the same order"
        )
    if images and report.shape[1:] != example.shape[1:]:
        return _sizes(f"silo {name!r}", report.shape, f"silo {first!r}", example.shape)
    if report.kind == "labeled":
        return None
    if report.classes != example.classes:
        these, those = ", ".join(report.classes), ", ".join(example.classes)
        return (
            f"silo {name!r} has the classes {these}, silo {first!r} {those}; use the same columns in every"
            " priors.csv"
        )
    if (report.sizes.test > 0) != (example.sizes.test > 0):
        with_them, without = (name, first) if report.sizes.test else (first, name)
        return f"silo {with_them!r} has test images, silo {without!r} has none; give them to all or to none"
    return None


def _sizes(who: str, shape: InputShape, other: str, expected: InputShape) -> str:
    (_, h, w), (_, h0, w0) = shape, expected
    return f"{who} has images of {w}x{h}, {other} of {w0}x{h0}; set image_size to resize all to one square"


def _inputs(report: SiloReport) -> str:
    """Return the inputs of a silo in words."""
    names = f" ({', '.join(report.inputs.names[:_NAMED])})" if report.inputs.names else ""
    return f"{report.inputs.kind} {list(report.shape)}{names}"


def _entry(report: SiloReport, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return a silo's part of the manifest, with its classes numbered among all classes."""
    entry: dict[str, Any] = {
        part: split.model_dump(exclude_unset=True) for part, split in report.content.items()
    }
    for split in entry.values():
        if "images_of_class" in split:  # unlabeled sets have no number of images per class
            counts = dict(zip(report.classes, split["images_of_class"], strict=True))
            split["images_of_class"] = [counts.get(name, 0) for name in classes]
    return entry


def _elsewhere(name: str) -> LabeledData | SetData:
    raise UserError(
        f"the images of silo {name!r} stay with it; an arm that reads them at the server cannot run over"
        " Flower"
    )
