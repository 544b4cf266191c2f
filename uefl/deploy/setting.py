"""Facts that every client of a run needs.

Every message has these facts, so a silo that has just been started again needs nothing else.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from .. import __version__
from ..algorithms.base import Context
from ..config import Config, from_toml
from ..data.federation import Federation
from ..data.inputs import IMAGES, Inputs
from ..engines.codec import Unreadable
from ..privacy import without_statistics

PROTOCOL = 6


@dataclass(frozen=True)
class Setting:
    """The configuration, and what all clients have agreed on."""

    config: str
    """as TOML"""
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    clients: tuple[str, ...]
    """names of the training clients, sorted"""
    threads: Annotated[int, Field(ge=0, le=1024)]
    """CPU threads; 0: the silo chooses the number for the network"""
    inputs: Inputs = IMAGES

    @classmethod
    def of(cls, cfg: Config, federation: Federation, threads: int) -> Setting:
        """Return the setting of a run over this federation."""
        federation = without_statistics(cfg, federation)
        names = tuple(sorted(client.name for client in federation.clients))
        about = (federation.classes, federation.shape, federation.mean, federation.std)
        return cls(cfg.to_toml(), *about, names, threads, federation.inputs)

    @classmethod
    def of_header(cls, header: dict[str, Any]) -> Setting:
        """Return the setting from the header that :func:`task` makes, or raise Unreadable."""
        try:
            return _SETTING.validate_json(json.dumps(header["setting"]), strict=True)
        except ValidationError as error:
            raise Unreadable(str(error)) from None

    def run_identity(self) -> str:
        """Return the identity of a run, so that a silo recognizes it after a resume.

        The number of threads is left out, because a resumed run reads it from its checkpoint.
        """
        values = asdict(replace(self, config=self.cfg().with_run(threads=0).to_toml()))
        del values["threads"]
        return json.dumps(list(values.values()))

    def cfg(self) -> Config:
        """Return the configuration."""
        return from_toml(self.config)

    def context(self) -> Context:
        """Return the context of the run for an algorithm."""
        cfg = self.cfg()
        about = (self.classes, self.shape, self.clients)
        return Context(cfg.run.seed, cfg.run, cfg.model, cfg.training, *about, inputs=self.inputs)


_SETTING = TypeAdapter(Setting)


def without_files(cfg: Config) -> Config:
    """Return the configuration without the names of files at the server.

    A silo has its own folder, and gets weights with messages.
    """
    data = cfg.data if cfg.data.path is None else cfg.data.model_copy(update={"source": "silos"})
    return replace(
        cfg, data=data, model=cfg.model.model_copy(update={"pretrained": bool(cfg.model.pretrained)})
    )


def greeting(cfg: Config) -> dict[str, Any]:
    """Return the header that asks a client for its report."""
    return {"protocol": PROTOCOL, "uefl": __version__, "ask": "report", "config": cfg.to_toml()}


def task(setting: Setting, arm: str) -> dict[str, Any]:
    """Return the header of every message of an arm."""
    return {"protocol": PROTOCOL, "uefl": __version__, "ask": "work", "arm": arm, "setting": asdict(setting)}
