"""The Python interface: train, resume and load runs.

:class:`Run` returns the metrics as a table, and the trained models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn

from . import config
from . import run as runs
from .algorithms.base import ALGORITHMS, Algorithm, find, register, registry
from .config import Config, Model
from .data import PARTITIONS, SOURCES, from_arrays
from .deploy.choices import CHOICES, Choice
from .errors import UserError
from .isolation import isolate
from .metrics import METRICS
from .models import custom, saved
from .models.networks import NETWORKS
from .paths import check_name, expanded, has_file
from .progress import LiveProgress, PlainProgress
from .registry import Registry
from .report.run_folder import read_run

if TYPE_CHECKING:
    import pandas

    from .data.federation import Federation
    from .run import Observer

OwnNetwork = nn.Module | Callable[[], nn.Module]
"""A module with the starting weights, or a function that makes a new module with weights from torch's
generator."""


class Run:
    """A run folder.

    Args:
        model: the network of the run, if it was given in Python.

    Attributes:
        path: the folder.
        config: the configuration of the run.
    """

    def __init__(self, path: str | Path, *, model: OwnNetwork | None = None) -> None:
        self.path = expanded(path).absolute()
        self._network = None if model is None else custom.factory(model)
        self._read = read_run(self.path)
        self.config: Config = self._read.config

    def __repr__(self) -> str:
        state = "finished" if self._read.finished else "unfinished"
        return f"Run({str(self.path)!r}, {state}: {', '.join(self._read.arms)})"

    @property
    def summary(self) -> dict[str, Any]:
        """Return the outcome of each arm as in summary.json: accuracy, entropy, the clients, bytes."""
        return self._read.arms

    @property
    def metrics(self) -> pandas.DataFrame:
        """Return a row per arm, round and client, with NaN or None for a value that was not measured.

        Rounds count from 1, as in :attr:`summary`, the report and metrics.jsonl.
        """
        import pandas

        table: pandas.DataFrame = pandas.DataFrame.from_records(self._read.records)
        return table

    @property
    def rejected(self) -> pandas.DataFrame:
        """Return a row per rejected reply: ``arm``, ``iteration``, ``round``, ``client``, ``reason``."""
        import pandas

        table = pandas.DataFrame(
            self._read.rejected, columns=["arm", "iteration", "round", "client", "reason"]
        )
        return table

    def model(self, arm: str | None = None) -> saved.SavedModel:
        """Return the trained model of an arm, or of the only arm if there is no name.

        Raises:
            UserError: no such arm, several arms, or no finished arm; the network was given in Python and
                ``model`` is missing.
        """
        if arm is None:
            return saved.load(self.path, self._network)
        if arm not in self.config.arms:
            raise UserError(f"no arm {arm!r} in {self.path}; it has {', '.join(self.config.arms)}")
        file = self.path / f"model-{arm}.safetensors"
        if not has_file(file):
            if has_file(self.path / "summary.json"):
                raise UserError(f"{file} does not exist, and the run has ended; restore it, or train again")
            raise UserError(
                f"{file} does not exist: arm {arm!r} has not ended; continue with"
                f" uefl.resume({str(self.path)!r})"
            )
        found = saved.load(file, self._network)
        if type(found.algorithm) is not find(self.config.arms[arm].algorithm):
            raise UserError(f"{file} is a model of another algorithm than arm {arm!r}; restore it")
        return found


def _config(source: Any, arms: Any, overrides: dict[str, Any], *, given: bool) -> Config:
    """Return the checked configuration, with the encoder ``given`` if a network comes from Python."""
    if isinstance(source, Config):
        if overrides or arms is not None:
            raise UserError("a checked configuration takes no overrides; give a preset, a path or a mapping")
        return source
    if not isinstance(source, (str, Path, Mapping)):
        raise UserError(
            "expected the name of a preset, the path of a .toml file or a mapping of sections, got"
            f" {type(source).__name__}"
        )
    return config.load(
        source if isinstance(source, Mapping) else str(source),
        given=given,
        arms=None if arms is None else _tables(arms),
        **overrides,
    )


def _with_network(cfg: Config, model: Any, *, replaced: bool) -> Config:
    """Return the configuration for a network from Python, which may replace the section ``[model]``."""
    if isinstance(model, nn.Module) and cfg.run.uncertainty == "ensemble":
        raise UserError(
            "model: the members of an ensemble need different weights; give a function that makes modules"
        )
    if cfg.model.encoder != "given" and not replaced:
        named = f"the section [model] names the encoder {cfg.model.encoder!r}"
        raise UserError(f"model: a network is given and {named}; omit one of them")
    return replace(cfg, model=Model.model_validate({"encoder": "given"}))


@isolate
def train(
    source: str | Mapping[str, Any] | Config = "demo",
    *,
    out: str | Path,
    clients: Mapping[str, tuple[Any, Any]] | int | None = None,
    model: OwnNetwork | Mapping[str, Any] | None = None,
    arms: Mapping[str, Any] | Sequence[str] | None = None,
    federation: Federation | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    observer: Observer | None = None,
    engine: str | Choice = "local",
    **overrides: Any,
) -> Run:
    """Run every arm of a configuration into a new folder.

    The result does not depend on contexts and settings of the caller, such as autocast, ``no_grad`` or a
    default dtype. The run does not change these settings. If several threads of a process call this function,
    the runs wait for each other.

    Args:
        source: name of a preset, path of a .toml file, sections as a mapping, or a checked configuration.
        out: the run folder.
        clients: your own data by the name of each client, ``(train, test)`` as :func:`uefl.data.from_arrays`
            takes them: pairs of images and labels as arrays or tensors, or torch ``Dataset`` s. These data
            replace the data of ``source``. A number sets the key ``data.clients``.
        model: your own network from normalized images ``[B, C, H, W]`` to logits ``[B, classes]``: a module,
            which is copied with its weights for every arm, or a function that makes a new module. It replaces
            the section ``[model]`` of a preset. If your own file, mapping or keys have this section, the call
            raises UserError. For an arm with a codebook, the network needs a method ``tokens(images)`` that
            returns ``[B, T, D]``, and a module ``head`` from such tensors to logits; the quantizer runs
            between the two. Alternatively, a mapping: the section ``[model]``.
        arms: a mapping from names to instances of an algorithm or to tables of parameters as in
            ``[arms.NAME]``; or a sequence of names of arms of ``source``. None: all arms of ``source``.
        federation: clients that replace the clients of ``source``, as :func:`uefl.data.build` and
            :func:`uefl.data.from_arrays` return them; not together with ``clients``.
        device: ``auto``, ``cpu`` or ``cuda``.
        data_root: the folder of torchvision's data sets; None: the environment variable UEFL_DATA.
        observer: receives the progress of the run; None: the logger ``uefl``, at level INFO.
        engine: ``local``, all clients in this process; ``distributed``, clients divided among processes of
            this machine; ``flower``, each client in its own process on this machine; or
            :class:`uefl.Distributed` or :class:`uefl.Flower`, which may name a SuperLink. Objects given in
            Python stay in this process: with an engine other than ``local``, clients, networks, federations
            and unregistered algorithms are refused.
        overrides: keys as with ``--set``: key names, or a section with a mapping: ``lr=1e-3``, ``run={"seed":
            1}``.

    Raises:
        UserError: the request cannot be carried out; nothing was written.
        RunError: the run ended early, e.g. because the model diverged; ``uefl.load(out)`` reads the rounds
            that finished.
    """
    if isinstance(clients, int):
        overrides["clients"] = clients
    if isinstance(model, Mapping):
        overrides["model"] = model
    out = expanded(out).absolute()  # the run finds its folder again if something changes the current one
    network = None if model is None or isinstance(model, Mapping) else custom.factory(model)
    cfg = _config(source, arms, overrides, given=network is not None)
    if network is not None:
        checked = isinstance(source, Config) and cfg.model == Model.model_validate({})
        cfg = _with_network(cfg, model, replaced=checked)
    federation = _federation(cfg, clients, federation)
    if federation is not None:
        unused = {"source": "arrays", "clients": None, "partition": None, "first_classes": 0}
        cfg = replace(cfg, data=cfg.data.model_copy(update=unused))
    given = {"federation": federation, "network": network}
    with _surroundings(cfg, out, engine, device, data_root, observer, **given) as keys:
        preset = str(source) if isinstance(source, (str, Path)) else "python"
        runs.train(cfg, preset=preset, out=out, **keys)
    return Run(out, model=network)


@isolate
def resume(
    out: str | Path,
    *,
    clients: Mapping[str, tuple[Any, Any]] | None = None,
    model: OwnNetwork | None = None,
    arms: Mapping[str, Algorithm] | None = None,
    federation: Federation | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    observer: Observer | None = None,
    engine: str | Choice = "local",
    more_rounds: int = 0,
) -> Run:
    """Continue the run in a folder.

    The result is the same, bit for bit, as without the interruption.

    ``more_rounds`` is a number of rounds that a finished run trains in addition, in its last iteration. The
    result is the same as if the run had had these rounds from the start.

    The other arguments are as in :func:`train`. Give the same objects again: the clients, the network, and,
    in a new process, algorithms that are not registered by an installed package.

    Raises:
        UserError: there is no run, it comes from another version, or other objects were given.
        RunError: the run stopped early, as in :func:`train`.
    """
    if type(more_rounds) is not int or more_rounds < 0:
        raise UserError(f"more_rounds: expected an integer of 0 or more, got {more_rounds!r}")
    for name, arm in (arms or {}).items():
        if not isinstance(arm, Algorithm):
            raise UserError(
                f"arm {name!r}: expected an instance of uefl.Algorithm, got {type(arm).__name__}; parameters"
                " are in config.toml"
            )
        _table(name, arm)
    out = expanded(out).absolute()  # the run finds its folder again if something changes the current one
    check_name(out, "the run folder")
    cfg = config.load_whole(out / "config.toml") if has_file(out / "config.toml") else None
    if clients is not None and cfg is not None:
        federation = _federation(cfg, clients, federation)
    network = None if model is None else custom.factory(model)
    given = {"federation": federation, "network": network}
    with _surroundings(cfg, out, engine, device, data_root, observer, **given) as keys:
        runs.resume(out, more_rounds=more_rounds, **keys)
    return Run(out, model=network)


def load(path: str | Path, *, model: OwnNetwork | None = None) -> Run:
    """Read the folder of a finished or an unfinished run.

    Args:
        model: the network of the run, if it was given in Python. Only :meth:`Run.model` needs it.

    Raises:
        UserError: the folder is not a run folder, or a file in it is damaged or of another version.
    """
    return Run(path, model=model)


@contextmanager
def _surroundings(
    cfg: Config | None,
    out: Path,
    engine: str | Choice,
    device: str,
    data_root: str | Path | None,
    observer: Observer | None,
    **given: Any,
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a run, except for its configuration and its folder.

    Args:
        cfg: the configuration. None: the folder has no run, and :func:`uefl.run.resume` raises an error.
        given: the objects that were given in Python, or None.
    """
    root = None if data_root is None else expanded(data_root).absolute()
    observer = _isolated_observer(PlainProgress() if observer is None else observer)
    keys = given | {"device": device, "data_root": root, "observer": observer}
    if engine == "local":
        yield keys
        return
    named = repr(engine) if isinstance(engine, str) else f"uefl.{engine!r}"
    if isinstance(engine, str) and engine in CHOICES:
        engine = CHOICES[engine]()
    if not isinstance(engine, Choice):
        names = ", ".join(map(repr, ("local", *CHOICES)))
        classes = ", ".join(f"uefl.{kind.__name__}(...)" for kind in CHOICES.values())
        raise UserError(f"engine: expected {names}, or one of {classes}; got {engine!r}")
    for key, name in {"federation": "clients or federation", "network": "model"}.items():
        if given[key] is not None:
            raise UserError(
                f"{name}: an object given in Python stays in this process; name it in the configuration, or"
                " omit engine"
            )
    for registry_of, name, what in _registered(cfg):
        if not registry_of.known_elsewhere(name):
            raise UserError(
                f"{what} {name!r} is registered in this process only; install it as a package, or omit engine"
            )
    go_on = f"uefl.resume({str(out)!r}, engine={named})"
    with engine.deployment(device, observer.notice, go_on) as deployment:
        yield keys | {"deployment": deployment}


def _isolated_observer(observer: Observer) -> Observer:
    """Return an observer whose calls do not change the settings of the run.

    Raises:
        UserError: the observer lacks a method.
    """
    ours = (PlainProgress.client, LiveProgress.client)  # called for each client, and change no setting
    apart: Any = SimpleNamespace()
    for name in ("start", "arm", "client", "round", "notice"):
        method = getattr(observer, name, None)
        if not callable(method):
            raise UserError(
                f"observer: {type(observer).__name__} has no method {name!r}; expected the methods of"
                " uefl.progress.PlainProgress"
            )
        setattr(apart, name, method if getattr(method, "__func__", None) in ours else isolate(method))
    return apart  # type: ignore[no-any-return]


def _registered(cfg: Config | None) -> Iterator[tuple[Registry[Any], str, str]]:
    """Yield the names of a configuration that other processes must know, with their registries."""
    if cfg is None:
        return
    for name, arm in cfg.arms.items():
        yield ALGORITHMS, arm.algorithm, f"arm {name!r}: the algorithm"
    if cfg.data.source in SOURCES:
        yield SOURCES, cfg.data.source, "the data set"
    if cfg.data.partition is not None:
        yield PARTITIONS, cfg.data.partition.name, "the partition"
    if cfg.model.encoder != "given":
        yield NETWORKS, cfg.model.encoder, "the network"
    for name in cfg.run.metrics:
        yield METRICS, name, "the metric"


def _federation(cfg: Config, clients: Any, federation: Federation | None) -> Federation | None:
    """Return the clients that were given in Python, or None."""
    if clients is None or isinstance(clients, int):
        return federation
    if federation is not None:
        raise UserError("give clients or a federation, not both")
    if not isinstance(clients, Mapping):
        raise UserError(
            f"clients: expected a dict of name: (train, test), or a number; got {type(clients).__name__}"
        )
    return from_arrays(clients, data=cfg.data, seed=cfg.run.seed)


def _tables(arms: Mapping[str, Any] | Sequence[str]) -> Any:
    """Return tables that describe algorithm instances in a configuration, and register their classes."""
    if not isinstance(arms, Mapping):
        return [arms] if isinstance(arms, str) else list(arms)
    return {name: _table(name, arm) for name, arm in arms.items()}


def _table(arm: str, algorithm: Any) -> dict[str, Any]:
    if isinstance(algorithm, Mapping):
        return dict(algorithm)
    if not isinstance(algorithm, Algorithm):
        what = (
            "the class; make an instance of it" if isinstance(algorithm, type) else type(algorithm).__name__
        )
        raise UserError(
            f"arm {arm!r}: expected an instance of uefl.Algorithm or a dict of parameters, got {what}"
        )
    lost = sorted(vars(algorithm).keys() - {"parameters", "context"})
    if lost:
        raise UserError(
            f"arm {arm!r}: {lost[0]!r} of {type(algorithm).__name__} is not a parameter, so a resumed"
            " run would not have it; make it a field of the class Parameters"
        )
    names = {kind: name for name, kind in registry().items()}
    if type(algorithm) not in names:
        try:
            register(arm, type(algorithm))
        except ValueError as error:
            raise UserError(f"arm {arm!r}: another algorithm has this name ({error})") from None
    return {
        "algorithm": names.get(type(algorithm), arm),
        **json.loads(algorithm.parameters.model_dump_json()),
    }
