"""A run: its arms train one after the other on the same clients, and its folder holds all results.

config.toml          the resolved configuration
metrics.jsonl        a line per arm, round and client, and per rejected reply
summary.json         the outcome, once the run has ended
checkpoint*          the state to resume from
made.json            time, machine and versions of its start
manifest.json        the images of each client
model-*.safetensors  the final model of each arm
ends/                each arm before its last turn, to train it further
longer/              the files of a run with more rounds, until they have their places
private/             the private state of each client
samples.*            a few images of every client
silos.json           facts about clients over Flower
events.*             for TensorBoard, if it is installed
noise.key            the secret of a private run, until it has ended
plots/, report.md, report.html
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from uefl_kernels import _library as library

from . import checkpoint, config, extend, privacy
from .aggregation import check_rule
from .algorithms.base import Algorithm, Context, Record, find
from .client import together
from .client.client import Clients
from .client.workspace import Workspace, uses_bf16
from .config import Config
from .data import build
from .data.federation import Federation
from .devices import is_gpu
from .engines.base import Engine
from .engines.in_process import LocalEngine
from .errors import UserError, one_line
from .folder import MetricsFile, Silos, check_free, lock, read_silos
from .isolation import isolate
from .json_text import parse_json
from .models import custom, saved
from .paths import check_name, check_regular, command, has_file, other_capitals, read_text, special
from .report import samples
from .report.events import EventWriter, event_writer
from .report.run_folder import outcomes, own_columns, parted, read_run
from .report.write import write_report
from .seeds import derive, deterministic, make_repeatable
from .server.participants import Participants, check_joins
from .server.rounds import ServerLoop
from .server.teacher import SERVER, Teacher
from .threads import threads_for


class Observer(Protocol):
    """An object that receives the progress of a run."""

    def start(self, arms: list[str], rounds: int, clients: int) -> None:
        """Handle the start of a run with this number of rounds for each arm, or 0 without a limit."""

    def arm(self, name: str, done_rounds: int) -> None:
        """Handle the start of an arm, or its continuation after ``done_rounds`` measured rounds."""

    def client(self, arm: str, round: int, client: str) -> None:
        """Handle the start of a client's work in a round, counted from 0."""

    def round(self, arm: str, round: int, records: list[Record]) -> None:
        """Handle the metrics of a round, counted from 0, one record per client."""

    def notice(self, message: str) -> None:
        """Handle a message for the user."""


class ClientPool(Protocol):
    """The clients of a run that are not in this process."""

    silos: Silos
    """the facts about the clients' programs, after the clients have connected; may be empty"""

    clients_keep_states: bool
    """whether clients keep their private states themselves"""

    def federation(
        self, cfg: Config, data_root: Path | None, known: Silos, check: Callable[[Federation], object]
    ) -> Federation:
        """Find all clients, with the ``silos`` that are known, and ``check`` that they can be trained."""
        ...

    def engine(self, arm: str, started: Callable[[str], None]) -> Engine:
        """Return an engine for the clients in one arm, see :class:`uefl.engines.in_process.LocalEngine`."""
        ...


@isolate
def train(
    cfg: Config,
    *,
    preset: str,
    out: Path,
    device: str,
    data_root: Path | None,
    observer: Observer,
    federation: Federation | None = None,
    network: Callable[[], nn.Module] | None = None,
    deployment: ClientPool | None = None,
    pages: bool = True,
) -> dict[str, Any]:
    """Run every arm of the configuration into a new folder and return the summary.

    Args:
        preset: the name of its source, recorded in the folder.
        deployment: the engine for clients in other processes, without ``federation`` and ``network``.
        pages: write the report and the pictures at the end; ``uefl report`` can also do this later.

    Raises:
        UserError: the folder is not free, or the clients cannot be built; nothing was written.
        RunError: the run ended early, e.g. because the model diverged.
    """
    where = chosen_device(device)
    cfg = cfg.absolute()
    if deployment is None:  # clients in other processes choose the device of their own machine
        cfg = cfg.with_run(precision="bf16" if uses_bf16(cfg.run.precision, where) else "fp32")
    check_free(out)
    run = _prepare(cfg, preset, out, where, data_root, observer, federation, network, deployment)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{out} cannot be made ({error.strerror}); choose another folder with --out"
        ) from None
    with lock(out):
        if (out / "config.toml").exists():
            raise UserError(f"{out} was taken by another process just now; choose another folder with --out")
        try:
            checkpoint.write_json(out / "manifest.json", run.federation.manifest)
            checkpoint.write_json(out / "made.json", run.made())
            checkpoint.write_text(out / "config.toml", f"# {one_line(preset)}\n{cfg.to_toml()}")
        except OSError as error:  # a full disk; files that are left do not block the next start in the folder
            raise UserError(
                f"{error.filename or out} cannot be written ({error.strerror}); choose another folder with"
                " --out"
            ) from None
        return run.go({}, _START, pages)


@isolate
def resume(
    out: Path,
    *,
    device: str,
    data_root: Path | None,
    observer: Observer,
    federation: Federation | None = None,
    network: Callable[[], nn.Module] | None = None,
    deployment: ClientPool | None = None,
    pages: bool = True,
    more_rounds: int = 0,
) -> dict[str, Any]:
    """Continue the run in a folder as :func:`uefl.resume` does, or return the summary of a finished run.

    On the same device and with the same number of threads, the result has the same bits as without the
    interruption.

    Raises:
        UserError: there is no run, it comes from another version, or the data have changed.
        RunError: the run stopped early, as in :func:`train`.
    """
    where = chosen_device(device)
    check_name(out, "the run folder")
    if special(out):
        raise UserError(f"{out} is {special(out)}; expected a run folder")
    if not has_file(out / "config.toml"):
        free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        advice = (
            f"start one with: {command('train', 'PRESET', '--out', out)}"
            if free
            else "expected a run folder, as `uefl train` writes it"
        )
        other = other_capitals(out) or other_capitals(out / "config.toml")
        raise UserError(f"{out} holds no run (no config.toml){other}; {advice}")
    with lock(out):
        extend.finish(out)
        cfg = config.load_whole(out / "config.toml")
        preset = read_text(out / "config.toml").splitlines()[0].removeprefix("# ")

        def prepared(cfg: Config, then: dict[str, Any] | None) -> _Run:
            cfg = cfg if then is None else cfg.with_run(threads=then["threads"])
            return _prepare(cfg, preset, out, where, data_root, observer, federation, network, deployment)

        if more_rounds:
            if has_file(out / "summary.json"):
                read_run(out)  # edited files are an error before the further rounds are trained
            run = _with_more_rounds(out, cfg, more_rounds, preset, prepared)
        elif has_file(out / "summary.json"):
            summary = _written_summary(out)
            read_run(out)  # a damaged file is an error, without the notice
            if pages and not all((out / name).exists() for name in ("report.md", "report.html")):
                write_report(out)
            (out / privacy.KEY).unlink(missing_ok=True)
            observer.notice(
                f"{out} is a finished run; to run it again, name another folder or remove this one"
            )
            return summary
        else:
            found = checkpoint.load(out)
            if found is None:
                MetricsFile(out).check_new(next(iter(cfg.arms)))
                extend.check_none(out)
            run = prepared(cfg, None if found is None else found[1].get("made_with"))
        tensors, plain = checkpoint.load(out) or ({}, _START)
        return run.go(tensors, plain, pages)


def _with_more_rounds(
    out: Path, cfg: Config, rounds: int, preset: str, prepared: Callable[[Config, dict[str, Any]], _Run]
) -> _Run:
    """Return a finished run with more rounds, and change its folder once all checks have passed."""
    longer = extend.with_more_rounds(cfg, rounds)
    try:
        then = extend.stage(out, cfg, rounds, preset)
        run = prepared(longer, then)
        run.check_origin(then)
        run.check_files([extend.kept(out, name) for name in cfg.arms])
        extend.commit(out)
    finally:
        extend.discard(out)
    return run


_FILES = ("manifest.json", "metrics.jsonl", "summary.json", "silos.json", "report.md", "report.html")
_START: dict[str, Any] = {"arm": 0, "seconds": {}, "cpu_seconds": {}, "metrics_bytes": 0}


def _prepare(
    cfg: Config,
    preset: str,
    out: Path,
    where: torch.device,
    data_root: Path | None,
    observer: Observer,
    federation: Federation | None,
    network: Callable[[], nn.Module] | None,
    deployment: ClientPool | None,
) -> _Run:
    """Build and check all that the configuration names, before anything is written."""
    checked: list[_Run] = []

    def check(federation: Federation) -> None:
        if federation.server is not None and any(client.name == SERVER for client in federation.clients):
            raise UserError(
                f"client {SERVER!r} has the name that uefl uses for the server; rename the client"
            )
        check_inputs(cfg, federation)
        hidden = privacy.without_statistics(cfg, federation)
        run = _Run(cfg, preset, out, hidden, where, observer, network, deployment)
        run.check_arms()
        checked[:] = [run]

    kinds = {find(arm.algorithm) for arm in cfg.arms.values()}
    try:
        for op in sorted({op for kind in kinds for op in kind.ops}):
            library.check(op, where)
    except RuntimeError as error:
        raise UserError(str(error)) from None
    if deployment is not None:
        if cfg.run.clients_at_once > 1:
            raise UserError(
                "key 'run.clients_at_once': clients in other processes train one after the other; set the key"
                " to 1"
            )
        deployment.federation(cfg, data_root, read_silos(out), check)
    elif federation is None:
        check(build(cfg.data, kind=cfg.kind, seed=cfg.run.seed, data_root=data_root))  # type: ignore[arg-type]
    elif federation.kind != cfg.kind:
        raise UserError(f"the arms are for {cfg.kind} data, the federation has {federation.kind} data")
    else:
        check(federation)
    return checked[0]


def check_inputs(cfg: Config, federation: Federation) -> None:
    """Refuse keys and algorithms that need images if the data are not images.

    Raises:
        UserError: an algorithm or a key that needs images.
    """
    kind = federation.inputs.kind
    if kind == "images":
        return
    for name, arm in cfg.arms.items():
        why = find(arm.algorithm).images_only
        if why:
            raise UserError(
                f"arm {name!r}: {arm.algorithm} {why}, and the data are {kind}; choose another algorithm"
            )
    if cfg.data.augment != "none":
        raise UserError(f"key 'data.augment': augmentation changes images, and the data are {kind}; omit it")
    if cfg.data.priors == "estimated":
        raise UserError(
            f"key 'data.priors': priors are estimated from images, but the data are {kind}; give the priors"
        )


def _keeps_what_predicts(workspace: Workspace) -> bool:
    """Return True if every prediction of this arm needs private tensors of a client, or their mean."""
    algorithm = workspace.algorithm
    averaged = type(algorithm).private_mean is not Algorithm.private_mean
    return bool(workspace.private_names() or (algorithm.private_predicts and averaged))


@dataclass
class _Run:
    """All arms of a run, checked and ready to begin or to continue."""

    cfg: Config
    preset: str
    out: Path
    federation: Federation
    device: torch.device
    observer: Observer
    network: Callable[[], nn.Module] | None
    deployment: ClientPool | None

    def __post_init__(self) -> None:
        cfg, federation, device, network = self.cfg, self.federation, self.device, self.network
        self._clients_keep_states = self.deployment is not None and self.deployment.clients_keep_states
        self.privacy: privacy.Privacy | None = None
        self.metrics = MetricsFile(self.out)
        self.clients = Clients(federation.by_name.values(), device)
        names = tuple(sorted(client.name for client in federation.clients))
        examples = {client.name: client.sizes.train for client in federation.clients}
        tested = {name: client.sizes.test for name, client in federation.by_name.items()}
        about = (federation.classes, federation.shape, names, network, examples)
        about_clients = (self._clients_keep_states, federation.inputs, tested)
        self.context = Context(cfg.run.seed, cfg.run, cfg.model, cfg.training, *about, *about_clients)
        self._resident: tuple[str, Workspace] | None = None
        deterministic(device)
        first = self.workspace(next(iter(cfg.arms)))
        if network is not None:
            custom.check(first.net, first.normalize, federation)
        make_repeatable(
            cfg.run.threads or threads_for(first.net, first.example, cfg.training.batch_size), device
        )
        self.made_with = {
            "config": cfg.digest(),
            "data": federation.digest,
            "threads": torch.get_num_threads(),
            "bf16": first.autocast,
            "device": device.type,
            "torch": torch.__version__,
            **({"gpu": torch.cuda.get_device_name(device)} if is_gpu(device) else {}),
            **({"network": custom.digest(network, cfg.run.seed)} if network is not None else {}),
        }

    def check_arms(self) -> None:
        """Refuse an arm that cannot be trained."""
        cfg, federation = self.cfg, self.federation
        for name in cfg.arms:
            workspace = self.workspace(name)
            if self.network is not None:
                custom.check(workspace.net, workspace.normalize, federation)
            workspace.algorithm.check(federation, name, workspace.net)
            several = len(federation.clients) - len(cfg.run.joins)
            check_rule(cfg.run, name, workspace.algorithm.plain_means, several)
            check_joins(name, workspace.algorithm)
            privacy.check(cfg, name, workspace)
            together.check(workspace, name)
            if cfg.run.select == "holdout" and self._clients_predict(workspace):
                raise UserError(
                    f"arm {name!r}: run.select = 'holdout' keeps the best model of the server, but clients"
                    " of this arm predict with layers or tensors of their own; set select = 'last', or omit"
                    " the arm"
                )
            if self._clients_keep_states and cfg.run.private_mean and _keeps_what_predicts(workspace):
                why = (
                    "clients keep layers or tensors that predictions need, and silos do not send these, so"
                    " there is no mean"
                )
                raise UserError(f"arm {name!r}: its {why}; set run.private_mean = false")

    def _clients_predict(self, workspace: Workspace) -> bool:
        """Return True if the predictions of an arm may need private layers or tensors of a client."""
        own = set(workspace.algorithm.private_predicts)
        kept = own and (
            self._clients_keep_states
            or own & workspace.algorithm.client_state(self.context.clients[0]).keys()
        )
        return bool(workspace.private_names() or kept)

    def made(self) -> dict[str, Any]:
        """Return facts for readers: time, place and versions of the start, and the notes on the data."""
        from . import __version__

        return {
            "begun": datetime.now().astimezone().isoformat(timespec="seconds"),
            "host": platform.node(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "version": __version__,
            "torch": torch.__version__,
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "precision": "bfloat16" if self.made_with["bf16"] else "float32",
            "notes": list(self.federation.notes),
        }

    def _most_rounds(self) -> int:
        """Return the number of rounds of each arm, or 0 if an arm has no limit."""
        iterations = self.cfg.training.iterations()
        bound = [find(arm.algorithm)(arm.parameters).bound(self.context) for arm in self.cfg.arms.values()]
        endless = any(algorithm.rounds(len(iterations)) is not None for algorithm in bound)
        return 0 if endless else sum(iterations)

    def workspace(self, name: str) -> Workspace:
        """Return the resident network of an arm, built unless the last call was for the same arm."""
        if self._resident is None or self._resident[0] != name:
            arm = self.cfg.arms[name]
            algorithm: Algorithm = find(arm.algorithm)(arm.parameters).bound(self.context)
            self._resident = None  # free the memory before the next network is built
            self._resident = name, Workspace(algorithm, self.cfg.data, self.federation, self.device)
        return self._resident[1]

    def go(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any], pages: bool) -> dict[str, Any]:
        """Finish the arm that the checkpoint is in, then the arms after it."""
        self.check_origin(plain.get("made_with", self.made_with))
        later = list(self.cfg.arms)[plain["arm"] + 1 :]
        ends = [extend.kept(self.out, name) for name in later]
        self.check_files([(tensors, plain), *ends] if "state" in plain else ends)
        if "made_with" in plain:  # the report at the end needs it, and it may be damaged
            checkpoint.write_json(self.out / "manifest.json", self.federation.manifest)
        self.seconds: dict[str, float] = dict(plain["seconds"])
        self.cpu_seconds: dict[str, float] = dict(plain["cpu_seconds"])
        self.metrics.cut(plain["metrics_bytes"])
        if self.deployment is not None and self.deployment.silos:
            checkpoint.write_json(self.out / "silos.json", self.deployment.silos)
        if self.cfg.run.privacy != "none":
            self.clients.key = privacy.key_of(self.out, begun="made_with" in plain)
            self.privacy = privacy.Privacy(self.cfg.run, self.clients.key)
        self.observer.start(list(self.cfg.arms), self._most_rounds(), len(self.federation.clients))
        self.observer.notice(self.federation.describe())
        if self.privacy is not None:
            self.observer.notice(self.privacy.notice(sum(self.cfg.training.iterations())))
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        if threads > cores:
            self.observer.notice(
                f"note: {threads} threads on {cores} core{'s' if cores > 1 else ''} slow each other down; set"
                f" threads = {cores}"
            )
        for note in self.federation.notes:
            self.observer.notice(f"note: {note}")
        if self.federation.here and self.federation.inputs.kind == "images":
            samples.write(self.out, [client.name for client in self.federation.clients], self.clients.data)
        own = dict.fromkeys(key for columns in own_columns(self.cfg).values() for key in columns)
        names, (records, _) = list(self.cfg.arms), parted(self.metrics.lines())
        self._check_models(names[: plain["arm"]])
        with event_writer(self.out, records, own, self.cfg.run.metrics) as events:
            for index in range(plain["arm"], len(names)):
                arm, workspace = self._arm(names[index])
                if index == plain["arm"] and tensors:
                    try:
                        arm.restore(tensors, plain["state"])
                    except (KeyError, TypeError) as error:
                        raise UserError(
                            f"the checkpoint in {self.out} does not fit its configuration ({error}); start"
                            " again in another folder"
                        ) from None
                elif (
                    end := extend.kept(self.out, arm.name)
                ) is not None:  # a finished run that trains more rounds
                    arm.restore(end[0], end[1]["state"])
                self._finish(index, arm, workspace, events, pages)
        extend.in_order(self.metrics, names)
        summary = self._summary()
        checkpoint.write_json(self.out / "summary.json", summary)
        (self.out / privacy.KEY).unlink(missing_ok=True)
        if pages:
            write_report(self.out)
        return summary

    def check_origin(self, then: dict[str, Any]) -> None:
        """Refuse a checkpoint of another configuration or other data, and note another machine."""
        changes = {
            "config": "config.toml has been changed",
            "data": "the images of the clients have changed",
            "network": "the given network has changed",
        }
        for key, what in changes.items():
            if then.get(key) != self.made_with.get(key):
                raise UserError(
                    f"{self.out}: {what} since the checkpoint was written; restore it, or start a new run"
                )
        changed = [
            f"{key} {then.get(key)} -> {value}"
            for key, value in self.made_with.items()
            if then.get(key) != value
        ]
        if changed:
            self.observer.notice(
                "the results may differ in the last bits from a run without interruption, because these"
                f" changed: {', '.join(changed)}"
            )

    def check_files(self, states: Iterable[extend.Checkpoint | None]) -> None:
        """Check files that the rest of the run reads or replaces, before the first one is written.

        Args:
            states: the checkpoints that the run continues from.

        Raises:
            UserError: a file is damaged, or a folder is in the place of a file.
        """
        models = (f"model-{arm}.safetensors" for arm in self.cfg.arms)
        for path in (*(self.out / name for name in (*_FILES, *models)), *(self.out / "plots").glob("*.png")):
            check_regular(path)
        for path in (self.out / name for name in ("plots", "private", "ends")):
            if path.exists() and not path.is_dir():
                raise UserError(f"{path} is a file; expected a folder of the run, move the file")
        samples.check(self.out, self.cfg.arms)
        extend.private_files(self.out, self.cfg)
        if not self._clients_keep_states:
            extend.check_private(self.out, states)

    def _check_models(self, arms: list[str]) -> None:
        """Note models of ended arms that cannot be read, because no turn writes them again."""
        for arm in arms:
            if self._clients_keep_states and _keeps_what_predicts(self.workspace(arm)):
                continue
            try:
                saved.load(self.out / f"model-{arm}.safetensors", self.network)
            except UserError as error:
                self.observer.notice(f"note: arm {arm!r} has ended, and its model cannot be used: {error}")

    def _arm(self, name: str) -> tuple[ServerLoop, Workspace]:
        workspace, seed = self.workspace(name), self.cfg.run.seed

        def started(client: str) -> None:
            self.observer.client(name, arm.round, client)

        if self.cfg.run.cuda_graphs and self.deployment is None and workspace.recorder is None:
            why = "its steps are not all the same" if is_gpu(self.device) else "its clients are not on a GPU"
            self.observer.notice(f"note: arm {name!r} trains without run.cuda_graphs: {why}")
        clients = self.clients.handlers(workspace)
        group = together.together(clients, workspace)
        engine: Engine = LocalEngine(clients, started, group, self.cfg.run.clients_at_once)
        if self.deployment is not None:
            engine = self.deployment.engine(name, started)
        teacher = Teacher.of(workspace.algorithm.server_data(self.federation), workspace)
        members = self.cfg.run.members if self.cfg.run.uncertainty == "ensemble" else 1
        seeds = [derive(seed, "member", i) if i else seed for i in range(members)]
        private, notice, kept = self.out / "private", self.observer.notice, self._clients_keep_states
        arm = ServerLoop(name, workspace, seeds, engine, private, teacher, notice, self.privacy, kept)
        return arm, workspace

    def _finish(
        self, index: int, arm: ServerLoop, workspace: Workspace, events: EventWriter | None, pages: bool
    ) -> None:
        # a turn measures the round that the turn before has trained
        self.observer.arm(arm.name, arm.round - (arm.trained > 0))
        while not arm.finished:
            begun, used = time.monotonic(), time.process_time()
            try:
                records = arm.turn()
            finally:  # also if the run ends now because too many were rejected
                self.metrics.write(arm.rejected)
                arm.rejected.clear()
            self.seconds[arm.name] = self.seconds.get(arm.name, 0.0) + time.monotonic() - begun
            self.cpu_seconds[arm.name] = self.cpu_seconds.get(arm.name, 0.0) + time.process_time() - used
            if records:
                self.metrics.write(records)
                copies = [dict(record) for record in records]  # the observer may change them
                self.observer.round(arm.name, records[0]["round"], copies)
                if events is not None:
                    events.round(arm.name, records[0]["round"] + 1, records)
            if arm.finished:
                extend.keep(self.out, index, arm.name)
            tensors, state = arm.state()
            plain = {
                "arm": index,
                "seconds": self.seconds,
                "cpu_seconds": self.cpu_seconds,
                "metrics_bytes": self.metrics.bytes,
            }
            arm.files.sync(arm.named_files())
            checkpoint.save(self.out, tensors, plain | {"state": state, "made_with": self.made_with})
            arm.files.sweep(arm.named_files() | extend.private_files(self.out, self.cfg))
        if self._clients_keep_states and _keeps_what_predicts(workspace):
            self.observer.notice(
                f"note: arm {arm.name!r} has no model file here: each silo keeps its own part of the model"
            )
            return
        path = self.out / f"model-{arm.name}.safetensors"
        saved.save(path, self.cfg, arm.name, self.federation, arm.networks(workspace))
        shown = pages and self.federation.here and self.federation.inputs.kind == "images"
        if shown and self.privacy is None:  # privacy: no client's images in a report
            self._write_uncertain(arm.name)

    def _write_uncertain(self, arm: str) -> None:
        """Keep the most uncertain test images for the report."""
        names = [client.name for client in self.federation.clients]
        try:
            model = saved.load(self.out / f"model-{arm}.safetensors", self.network).to(self.device)
            samples.write_uncertain(self.out, arm, model, names, self.clients.data)
        except UserError as error:  # a model that cannot predict for some client
            self.observer.notice(f"note: no uncertain images of arm {arm!r}: {error}")

    def _summary(self) -> dict[str, Any]:
        arms = outcomes(self.metrics.lines(), self.cfg)
        for name, outcome in arms.items():
            outcome["seconds"] = round(self.seconds[name], 3)
            if self.deployment is None:  # otherwise other processes train
                outcome["cpu_seconds"] = round(self.cpu_seconds[name], 3)
        summary = {"schema": 2, "preset": self.preset, "seed": self.cfg.run.seed, "arms": arms}
        summary["metrics_sha256"] = checkpoint.digest(self.out / "metrics.jsonl")
        if self.privacy is not None:
            drawn = Participants(
                self.context.clients, self.cfg.run.participation, self.cfg.run.seed, joins=self.cfg.run.joins
            )
            releases = [self.privacy.releases(drawn, outcome["rounds"]) for outcome in arms.values()]
            summary["privacy"] = self.privacy.summary(sum(releases))
        return summary


def _written_summary(out: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    path = out / "summary.json"
    try:
        return dict(parse_json(read_text(path)))
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged; restore it, or delete it to continue the run") from None


def chosen_device(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    Raises:
        UserError: the name is unknown, or the device does not exist on this machine.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is available; use --device cpu, and see `uefl doctor`")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
