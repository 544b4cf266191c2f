"""What a process with clients trains on: a folder of its own, or, where one machine stands for a federation, shares of a data set."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..data import build, labeled
from ..data.federation import Federation, LabeledData, SetData, Silo, Split
from ..data.partitions.natural import Natural
from ..data.sources import own_folder
from ..errors import UserError

if TYPE_CHECKING:
    from ..config import Config


class Source(Protocol):
    """The data of one client, or of all."""

    name: str | None
    """of the client; None: it has the data of every one"""

    def federation(self, cfg: Config) -> Federation:
        """A federation that has this client, with the classes and the shape that its own images have."""
        ...

    def data(self, client: str, cfg: Config, classes: tuple[str, ...], channels: int) -> LabeledData | SetData:
        """The images of a client, with labels that count in ``classes``, and in as many channels."""
        ...


class OwnFolder:
    """``FOLDER/CLASS/image.png`` or ``FOLDER/train|test/CLASS/image.png``; of the configuration only sizes and splits are looked at.

    Nothing that the server says names a file: it is this folder or none.

    Args:
        path: the folder.
        name: of the silo.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name: str | None = name
        self._table = own_folder.read_one(path, name)
        self._read = cache(self._federation)

    def federation(self, cfg: Config) -> Federation:
        """A federation of this silo alone."""
        if cfg.kind != "labeled":
            raise UserError("a silo with a folder of its own has labeled images; these arms need unlabeled sets")
        return self._read(cfg.to_toml())

    def _federation(self, text: str) -> Federation:
        from ..config import from_toml

        cfg = from_toml(text)
        data = cfg.data.model_copy(update={"clients": None, "partition": None})
        deal = Natural().deal(self._table, data, cfg.run.seed)
        return labeled.federate(self._table, deal, data, cfg.run.seed, partition={"scheme": Natural.name})

    def data(self, client: str, cfg: Config, classes: tuple[str, ...], channels: int) -> LabeledData:
        """The images of this silo."""
        federation = self.federation(cfg)
        found = federation.silos[0].load()
        assert isinstance(found, LabeledData)
        unknown = [name for name in federation.classes if name not in classes]
        if unknown:
            raise UserError(f"class {unknown[0]!r} of this silo is not among those of the run")
        place = torch.tensor([classes.index(name) for name in federation.classes])

        def fitted(split: Split) -> Split:
            return Split(split.images.expand(-1, channels, -1, -1).contiguous(), place[split.labels])

        test = fitted(found.test)
        return LabeledData(fitted(found.train), test if found.holdout is found.test else fitted(found.holdout), test)


class Dealt:
    """Clients of the federation that the configuration describes, which this process builds again for itself.

    Args:
        name: of the client; None: it stands for all of them.
        data_root: where the files of data sets lie; None: the environment variable UEFL_DATA.
    """

    def __init__(self, name: str | None, data_root: Path | None = None) -> None:
        self.name = name
        self._root = data_root
        self._built = cache(self._build)

    def federation(self, cfg: Config) -> Federation:
        """All clients; their images are read by :meth:`data`."""
        return self._built(cfg.to_toml())[0]

    def _build(self, text: str) -> tuple[Federation, dict[str, Silo]]:
        from ..config import from_toml

        cfg = from_toml(text)
        federation = build(cfg.data, kind=cfg.kind, seed=cfg.run.seed, data_root=self._root)  # type: ignore[arg-type]
        return federation, {silo.name: silo for silo in (*federation.silos, *federation.unseen)}

    def data(self, client: str, cfg: Config, classes: tuple[str, ...], channels: int) -> LabeledData | SetData:
        """The images of a client."""
        return self._built(cfg.to_toml())[1][client].load()
