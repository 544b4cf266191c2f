"""Build a federation from the reports of silos.

The server knows only counts and hashes of the silos' images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..config import Config
from ..data import manifest as record
from ..data.federation import ClientData, Federation, LabeledData, ServerData, SetData, Sizes
from ..data.inputs import Inputs
from ..data.notes import listed
from ..data.partitions.leave_one_out import LeaveOneOut
from ..data.partitions.natural import Natural
from ..data.prepare import Preparation, prepare_for, statistics_of
from ..data.sources import own_sets
from ..data.unlabeled_sets import USE, LabeledRows, PriorCoverage, check_doubts, doubts_of_all
from ..errors import UserError

if TYPE_CHECKING:
    from ..engines.flower.roster import Report

Shape = tuple[int, ...]
_NAMED = 8
"""columns in a message"""


def check_asked(cfg: Config) -> None:
    """Refuse settings that silos with their own data cannot have, before the server waits for silos.

    Raises:
        UserError: a partition that deals images, or a setting that needs the images or random numbers of all
            clients in one process.
    """
    data = cfg.data
    if isinstance(data.partition, LeaveOneOut) and data.clients is not None:
        raise UserError(
            "key 'clients': the number of silos is not set here, every silo at the "
            "SuperLink takes part; leave it out"
        )
    if isinstance(data.partition, LeaveOneOut) and data.partition.per_domain:
        raise UserError("key 'per_domain': silos at a SuperLink use all of their images; leave it out")
    if data.partition is not None and not isinstance(data.partition, LeaveOneOut | Natural):
        raise UserError(
            f"partition {data.partition.name!r} deals images; silos at a SuperLink bring their own: leave"
            " it out"
        )
    for key in ("labeled", "validation"):
        if getattr(data, key):
            raise UserError(f"key {key!r}: the server has all images of its data.source; leave it out")
    if data.priors == "estimated":
        raise UserError(
            "key 'priors': 'estimated' needs labeled images next to the sets, and silos "
            "have none; give each silo a priors.csv"
        )
    if data.prior_noise:
        raise UserError(
            "key 'prior_noise': is drawn over all clients in one process; leave it out, or run without"
            " --superlink"
        )


def fitting(reports: Mapping[str, Report], cfg: Config) -> tuple[list[str], dict[str, str]]:
    """Find the most silos that can be trained together.

    Args:
        reports: by name, in their order of arrival; each has passed :func:`.report.refusal`.
        cfg: of the run.

    Returns:
        Their names, and for the name of each other silo the reason against it.
    """
    why = {}
    for name, (header, parts) in reports.items():
        if cfg.data.normalize == "standard" and header["inputs"]["kind"] == "columns" and not parts:
            why[name] = "its report has no moments of its columns, which data.normalize = 'standard' needs"
    reports = {name: report for name, report in reports.items() if name not in why}
    groups: dict[Any, list[str]] = {}
    for name, (header, _) in reports.items():
        key: Any = tuple(header["shape"][1:]) if header["inputs"]["kind"] == "images" else _form(header)
        if _sets(cfg):
            key = (key, tuple(header["classes"]), bool(header["sizes"]["test"]))
        groups.setdefault(key, []).append(name)
    most = max(groups.values(), key=len, default=[])
    for name in reports.keys() - set(most):
        pair = {one: reports[one][0] for one in (most[0], name)}
        try:
            _shape(pair, {}, cfg.data.image_size)
            _classes(pair, cfg)
        except UserError as error:
            why[name] = str(error)
    return most, why


def agree(reports: Mapping[str, Report], cfg: Config, place: str) -> Federation:
    """Return the federation of these silos.

    Their images cannot be read here.

    Classes of labeled images are the union over all silos, sorted by name; sets have the same classes at all
    silos. If one silo or the server has images in color, all images are in color. Mean and deviation are
    exact over all training images, from the counts of the 256 gray levels. The server's own images, for arms
    that learn from sets, are read here.

    Args:
        reports: by name.
        cfg: of the run.
        place: of the SuperLink, for the manifest.

    Raises:
        UserError: silos that cannot be trained together; the message names the one that differs.
    """
    headers = {name: reports[name][0] for name in sorted(reports)}
    for name, header in headers.items():
        if header["kind"] != cfg.kind:
            raise UserError(f"silo {name!r} has {header['kind']} data, the arms need {cfg.kind}")
    scheme = cfg.data.partition or Natural()
    apart = scheme.domain if isinstance(scheme, LeaveOneOut) else None
    if apart is not None and (apart not in headers or len(headers) == 1):
        raise UserError(
            f"key 'domain': expected one of several silos that are there, {', '.join(headers)}; got {apart!r}"
        )
    classes = _classes(headers, cfg)
    server = own_sets.read_server(cfg.data.path, classes) if _sets(cfg) and cfg.data.path is not None else {}
    notes = _notes(headers, cfg, classes, server)
    shape, inputs = _shape(headers, server, cfg.data.image_size), _inputs(next(iter(headers.values())))
    held = {}
    for part, rows in server.items():  # of arms on unlabeled sets, which are images
        _, height, width = shape
        prepare = Preparation(shape[0], cfg.data.image_size, (shape[0], height, width))
        held[part] = rows.load(prepare)
    statistics = statistics_of(shape, inputs, cfg.data.normalize == "standard")
    for name in headers:
        statistics.join(reports[name][1])
    if "labeled" in held:
        statistics.add(held["labeled"].images)
    content = record.ImageHashes()
    entries = {name: _entry(header, classes) for name, header in headers.items()}
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
        "server": {
            part: content.entry(
                rows.images, rows.rows, rows.labels, f"server/{part}", USE[part], len(classes)
            )
            for part, rows in server.items()
        },
    }
    silos = [ClientData(name, Sizes(**_sizes(header)), _elsewhere(name)) for name, header in headers.items()]
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
    headers: Mapping[str, Mapping[str, Any]], cfg: Config, classes: tuple[str, ...], server: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return notes on priors, the server's images, precisions and versions.

    With ``data.strict``, doubtful priors are refused.
    """
    doubts = (
        check_doubts(
            doubts_of_all([PriorCoverage(**header["reach"]) for header in headers.values()], classes),
            strict=cfg.data.strict,
        )
        if _sets(cfg)
        else []
    )
    if _sets(cfg) and not server:
        doubts.append(
            f"the server has no images of its own: {cfg.data.path} holds neither labeled nor validation"
            " images"
        )
    versions = {header["torch"] for header in headers.values()} | {torch.__version__}
    exact = [name for name, header in headers.items() if header["precision"] == "fp32"]
    if 0 < len(exact) < len(headers):
        doubts.append(
            f"{listed(exact)} compute{'s' if len(exact) == 1 else ''} in float32, the others in bfloat16:"
            " with run.precision = 'fp32' all do the same"
        )
    if len(versions) > 1:
        doubts.append(
            f"the silos and the server have torch {', '.join(sorted(versions))}; results may differ in the"
            " last bits"
        )
    return tuple(doubts)


def _sets(cfg: Config) -> bool:
    return cfg.kind == "sets"


def _classes(headers: Mapping[str, Mapping[str, Any]], cfg: Config) -> tuple[str, ...]:
    """Return the classes of a run.

    Sets are refused if only some silos have test images.
    """
    if not _sets(cfg):
        classes = tuple(sorted({one for header in headers.values() for one in header["classes"]}))
        if len(classes) < 2:
            raise UserError(f"all silos have one class, {classes[0]!r}; a classifier needs two or more")
        return classes
    first = next(iter(headers))
    for name, header in headers.items():
        if header["classes"] != headers[first]["classes"]:
            these, those = (", ".join(headers[one]["classes"]) for one in (name, first))
            raise UserError(
                f"silo {name!r} has the classes {these}, silo {first!r} {those}; write the columns of"
                " priors.csv alike"
            )
        if bool(header["sizes"]["test"]) != bool(headers[first]["sizes"]["test"]):
            with_them, without = (name, first) if header["sizes"]["test"] else (first, name)
            raise UserError(
                f"silo {with_them!r} has test images, silo {without!r} has none; give them to all or to none"
            )
    return tuple(headers[first]["classes"])


def _shape(
    headers: Mapping[str, Mapping[str, Any]], server: Mapping[str, LabeledRows], image_size: int
) -> Shape:
    """Return the shape of one input of all silos and of the server."""
    first, *others = headers
    for name in others:
        if headers[first]["inputs"]["kind"] == headers[name]["inputs"]["kind"] == "images":
            continue
        if _form(headers[name]) != _form(headers[first]):
            pair = ", ".join(f"silo {each!r} has {_inputs_in_words(headers[each])}" for each in (name, first))
            raise UserError(
                f"{pair}; all silos need the same inputs, with the same columns in the same order"
            )
    if headers[first]["inputs"]["kind"] != "images":
        return tuple(headers[first]["shape"])
    shapes = {f"silo {name!r}": tuple(header["shape"]) for name, header in headers.items()}
    if server:
        shapes["the server"] = prepare_for([rows.images for rows in server.values()], image_size).shape
    who_is_first, (_, h0, w0) = next(iter(shapes.items()))
    for who, (_, h, w) in shapes.items():
        if (h, w) != (h0, w0):
            raise UserError(
                f"{who} has images of {w}x{h}, {who_is_first} of {w0}x{h0}; set image_size to resize all to"
                " one square"
            )
    return max(channels for channels, *_ in shapes.values()), h0, w0


def _form(header: Mapping[str, Any]) -> Any:
    """Return the properties of inputs that all silos must share."""
    told = header["inputs"]
    return told["kind"], tuple(told["names"]), told["vocabulary"], tuple(header["shape"])


def _inputs(header: Mapping[str, Any]) -> Inputs:
    """Return the kind of the inputs of a report."""
    told = header["inputs"]
    return Inputs(told["kind"], tuple(told["names"]), told["vocabulary"])


def _inputs_in_words(header: Mapping[str, Any]) -> str:
    """Return the inputs of a silo in words."""
    told = header["inputs"]
    names = f" ({', '.join(told['names'][:_NAMED])})" if told["names"] else ""
    return f"{told['kind']} {list(header['shape'])}{names}"


def _sizes(header: dict[str, Any]) -> dict[str, Any]:
    return {**header["sizes"], "sets": tuple(header["sizes"]["sets"])}


def _entry(header: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return a silo's part of the manifest, with its classes numbered among all classes."""

    def of(split: dict[str, Any]) -> dict[str, Any]:
        if "images_of_class" not in split:  # of unlabeled sets
            return dict(split)
        counts = dict(zip(header["classes"], split["images_of_class"], strict=True))
        return {"sha256": split["sha256"], "images_of_class": [counts.get(name, 0) for name in classes]}

    return {part: of(split) for part, split in header["content"].items()}


def _elsewhere(name: str) -> Any:
    def load() -> LabeledData | SetData:
        raise UserError(
            f"the images of silo {name!r} stay with it; an arm that reads them at the server cannot run over"
            " Flower"
        )

    return load
