"""Build a federation from the reports of silos.

The server knows only counts and hashes of the silos' images.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..config import Config
from ..data import manifest as record
from ..data.federation import ClientData, Federation, LabeledData, ServerData, SetData
from ..data.notes import listed
from ..data.partitions.leave_one_out import LeaveOneOut
from ..data.partitions.natural import Natural
from ..data.prepare import Preparation
from ..data.sources import own_sets
from ..data.unlabeled_sets import LabeledRows, check_notes, notes_of_all
from ..errors import UserError

if TYPE_CHECKING:
    from .report import SiloReport

Reports = Mapping[str, "SiloReport"]
"""by name"""
InputShape = tuple[int, ...]
_NAMED = 8
"""columns in a message"""


def check_asked(cfg: Config) -> None:
    """Refuse settings that silos with their own data cannot have, before the server waits for silos.

    Raises:
        UserError: the partition deals images, or a setting needs the images or random numbers of all clients
            in one process.
    """
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
    """Find the largest group of silos that can train together.

    Args:
        reports: the reports by name of the silo, in their order of arrival.
        cfg: configuration of the run.

    Returns:
        Their names, and for the name of each other silo the reason against it.
    """
    why = {}
    groups: dict[Hashable, list[str]] = {}
    for name, report in reports.items():
        if cfg.data.normalize == "standard" and report.inputs.kind == "columns" and not report.statistics:
            why[name] = "its report has no moments of its columns, which data.normalize = 'standard' needs"
            continue
        shape = report.shape[1:] if report.inputs.kind == "images" else report.shape
        of_sets = (report.classes, report.sizes.test > 0) if _sets(cfg) else None
        groups.setdefault((shape, report.inputs, of_sets), []).append(name)
    most = max(groups.values(), key=len, default=[])
    for name in reports.keys() - why.keys() - set(most):
        pair = {one: reports[one] for one in (most[0], name)}
        try:
            _shape(pair, {}, cfg.data.image_size)
            _classes(pair, cfg)
        except UserError as error:
            why[name] = str(error)
    return most, why


def agree(reports: Reports, cfg: Config, place: str) -> Federation:
    """Return the federation of these silos.

    Their images cannot be read here.

    Classes of labeled images are the union over all silos, sorted by name; sets have the same classes at all
    silos. If one silo or the server has images in color, all images are in color. Mean and deviation are
    exact over all training images, from the counts of the 256 gray levels. The server's own images, for arms
    that learn from sets, are read here.

    Args:
        reports: the reports by name of the silo.
        cfg: configuration of the run.
        place: address of the SuperLink, for the manifest.

    Raises:
        UserError: the silos cannot train together; the message names the one that differs.
    """
    reports = {name: reports[name] for name in sorted(reports)}
    for name, report in reports.items():
        if report.kind != cfg.kind:
            raise UserError(f"silo {name!r} has {report.kind} data, the arms need {cfg.kind}")
    scheme = cfg.data.partition or Natural()
    apart = scheme.domain if isinstance(scheme, LeaveOneOut) else None
    if apart is not None and (apart not in reports or len(reports) == 1):
        raise UserError(
            f"key 'domain': expected one of the connected silos, {', '.join(reports)}; got {apart!r}"
        )
    classes = _classes(reports, cfg)
    server = own_sets.read_server(cfg.data.path, classes) if _sets(cfg) and cfg.data.path is not None else {}
    notes = _notes(reports, cfg, classes, server)
    shape = _shape(reports, server, cfg.data.image_size)
    inputs = next(iter(reports.values())).inputs
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
        server=ServerData(held.get("labeled"), held.get("validation")) if _sets(cfg) else None,
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
    if _sets(cfg):
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
            f"{listed(exact)} compute{'s' if len(exact) == 1 else ''} in float32, the others in bfloat16:"
            " with run.precision = 'fp32' all do the same"
        )
    if len(versions) > 1:
        found.append(
            f"the silos and the server have torch {', '.join(sorted(versions))}; results may differ in the"
            " last bits"
        )
    return tuple(found)


def _sets(cfg: Config) -> bool:
    return cfg.kind == "sets"


def _classes(reports: Reports, cfg: Config) -> tuple[str, ...]:
    """Return the classes of a run, and refuse sets if only some silos have test images."""
    if not _sets(cfg):
        classes = tuple(sorted({one for report in reports.values() for one in report.classes}))
        if len(classes) < 2:
            raise UserError(f"all silos have one class, {classes[0]!r}; a classifier needs two or more")
        return classes
    first, example = next(iter(reports.items()))
    for name, report in reports.items():
        if report.classes != example.classes:
            these, those = ", ".join(report.classes), ", ".join(example.classes)
            raise UserError(
                f"silo {name!r} has the classes {these}, silo {first!r} {those}; use the same columns in"
                " every priors.csv"
            )
        if (report.sizes.test > 0) != (example.sizes.test > 0):
            with_them, without = (name, first) if report.sizes.test else (first, name)
            raise UserError(
                f"silo {with_them!r} has test images, silo {without!r} has none; give them to all or to none"
            )
    return example.classes


def _shape(reports: Reports, server: Mapping[str, LabeledRows], image_size: int) -> InputShape:
    """Return the shape of one input of all silos and of the server."""
    first, example = next(iter(reports.items()))
    for name, report in reports.items():
        same_length = report.inputs.kind == "images" or report.shape == example.shape
        if report.inputs != example.inputs or not same_length:
            pair = f"silo {name!r} has {_inputs(report)}, silo {first!r} has {_inputs(example)}"
            raise UserError(
                f"{pair}; all silos need the same inputs, with the same columns in the same order"
            )
    if example.inputs.kind != "images":
        return example.shape
    shapes = {f"silo {name!r}": report.shape for name, report in reports.items()}
    if server:
        shapes["the server"] = Preparation.of([rows.images for rows in server.values()], image_size).shape
    who_is_first, (_, h0, w0) = next(iter(shapes.items()))
    for who, (_, h, w) in shapes.items():
        if (h, w) != (h0, w0):
            raise UserError(
                f"{who} has images of {w}x{h}, {who_is_first} of {w0}x{h0}; set image_size to resize all to"
                " one square"
            )
    return max(channels for channels, *_ in shapes.values()), h0, w0


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
