"""The Python interface: train, resume and load runs; their metrics as a table, their models to predict with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import config, report
from . import run as runs
from .algorithms.base import Algorithm, register, registry
from .config import Config
from .errors import UserError
from .models import saved

if TYPE_CHECKING:
    import pandas

    from .data.federation import Federation
    from .run import Observer


class Run:
    """A run folder.

    Attributes:
        path: the folder.
        config: what was run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read = report.read_run(self.path)
        self.config: Config = self._read.config

    def __repr__(self) -> str:
        state = "finished" if self._read.finished else "unfinished"
        return f"Run({str(self.path)!r}, {state}: {', '.join(self._read.arms)})"

    @property
    def summary(self) -> dict[str, Any]:
        """By arm, the outcome: accuracy, entropy, the clients at the last round, bytes; as in summary.json."""
        return self._read.arms

    @property
    def metrics(self) -> pandas.DataFrame:
        """A row per arm, round and client, as in metrics.jsonl."""
        import pandas

        return pandas.DataFrame.from_records(self._read.records)

    def model(self, arm: str | None = None) -> saved.SavedModel:
        """The trained model of an arm; without a name, of the only one.

        Raises:
            UserError: no such arm, or several, or none that has ended.
        """
        if arm is None:
            return saved.load(self.path)
        if arm not in self.config.arms:
            raise UserError(f"no arm {arm!r} in {self.path}; it has {', '.join(self.config.arms)}")
        return saved.load(self.path / f"model-{arm}.safetensors")


def train(
    source: str | Mapping[str, Any] | Config = "demo",
    *,
    out: str | Path,
    device: str = "auto",
    data_root: str | Path | None = None,
    federation: Federation | None = None,
    arms: Mapping[str, Any] | list[str] | None = None,
    observer: Observer | None = None,
    **overrides: Any,
) -> Run:
    """Run every arm of a configuration into a new folder.

    Args:
        source: name of a preset, path of a .toml file, sections as a mapping, or a checked configuration.
        out: the run folder.
        device: ``auto``, ``cpu`` or ``cuda``.
        data_root: where torchvision's data sets lie; None: the environment variable UEFL_DATA.
        federation: clients in the place of those that ``source`` names.
        arms: by name, an instance of an algorithm, or a table of parameters as in ``[arms.NAME]``; or names. None: those of ``source``.
        observer: is told how the run goes; None: nobody.
        overrides: keys as with ``--set``, bare or a section with a mapping: ``lr=1e-3``, ``run={"seed": 1}``.

    Raises:
        UserError: what was asked for cannot be done as asked; nothing was written.
        RunError: the run could not finish honestly; ``uefl.load(out)`` reads what there is.
    """
    if isinstance(source, Config):
        if overrides or arms is not None:
            raise UserError("a checked configuration takes no overrides; give a preset, a path or a mapping")
        cfg = source
    else:
        cfg = config.load(source, arms=None if arms is None else _tables(arms), **overrides)
    preset = source if isinstance(source, str) else "python"
    root = None if data_root is None else Path(data_root)
    runs.train(cfg, preset=preset, out=Path(out), device=device, data_root=root, observer=observer or Nobody(), federation=federation)
    return Run(out)


def resume(
    out: str | Path,
    *,
    device: str = "auto",
    data_root: str | Path | None = None,
    federation: Federation | None = None,
    observer: Observer | None = None,
) -> Run:
    """Go on with the run in a folder; arguments as of :func:`train`. The result is the same, bit for bit, as without the interruption."""
    root = None if data_root is None else Path(data_root)
    runs.resume(Path(out), device=device, data_root=root, observer=observer or Nobody(), federation=federation)
    return Run(out)


def load(path: str | Path) -> Run:
    """Read a run folder, of a finished run or of one that is still going.

    Raises:
        UserError: not a run folder, or a file in it that is damaged or of another version.
    """
    return Run(path)


class Nobody:
    """An observer that looks away."""

    def start(self, arms: list[str], rounds: int, clients: int) -> None:
        """The run begins."""

    def arm(self, name: str, done_rounds: int) -> None:
        """An arm begins, or goes on."""

    def client(self, arm: str, round: int, client: str) -> None:
        """A client begins."""

    def round(self, arm: str, round: int, records: list[dict[str, Any]]) -> None:
        """A round is measured."""

    def notice(self, message: str) -> None:
        """Something worth knowing happened."""


def _tables(arms: Mapping[str, Any] | list[str]) -> Any:
    """Instances of algorithms as the tables that stand for them in a configuration; their classes become known by name."""
    if not isinstance(arms, Mapping):
        return list(arms)
    return {name: _table(name, arm) if isinstance(arm, Algorithm) else arm for name, arm in arms.items()}


def _table(arm: str, algorithm: Algorithm) -> dict[str, Any]:
    names = {kind: name for name, kind in registry().items()}
    if type(algorithm) not in names:
        register(arm, type(algorithm))
    return {"algorithm": names.get(type(algorithm), arm), **json.loads(algorithm.parameters.model_dump_json())}
