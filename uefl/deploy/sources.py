"""The data of the clients of one process.

A silo has its own folder. A process with simulated clients has shares of a data set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import Config, from_toml
from ..data import build, labeled, priors, unlabeled_sets
from ..data.federation import Federation, LabeledData, SetData, Split
from ..data.folder_listing import visible
from ..data.notes import check_names
from ..data.partitions.base import Deal
from ..data.partitions.leave_one_out import LeaveOneOut, measured_only
from ..data.partitions.natural import Natural
from ..data.sources import own_folder, own_sets, own_table
from ..errors import UserError, listed
from ..paths import resolved

if TYPE_CHECKING:
    from ..data.dataset import DataSet
    from ..data.settings import Data


def simulated(cfg: Config, data_root: Path | None) -> Federation:
    """Return the federation that a configuration describes."""
    return build(cfg.data, kind=cfg.kind, seed=cfg.run.seed, data_root=data_root)  # type: ignore[arg-type]


class ClientSource:
    """The data of one client, or of all clients of the federation that the configuration describes.

    This process builds the federation again.

    Args:
        name: name of the client; None: the source has the data of all clients.
        data_root: where the files of data sets lie; None: the environment variable UEFL_DATA.
    """

    def __init__(self, name: str | None, data_root: Path | None = None) -> None:
        self.name, self._root = name, data_root
        self._built = lru_cache(2)(lambda text: self._build(from_toml(text)))

    def federation(self, cfg: Config) -> Federation:
        """Return a federation that contains this client, with the classes and the shape of its own images.

        The last two federations are kept.
        """
        return self._built(cfg.to_toml())

    def _build(self, cfg: Config) -> Federation:
        return simulated(cfg, self._root)

    def data(
        self, client: str, cfg: Config, classes: tuple[str, ...], channels: int
    ) -> LabeledData | SetData:
        """Return the images of a client, in the given number of channels.

        Labels are positions in ``classes``.
        """
        return self.federation(cfg).by_name[client].load()


def own(path: Path, name: str | None, label: str = "label") -> ClientSource:
    """Return the source of a path: a table, unlabeled sets in ``clients``, or else labeled images.

    Images are ``FOLDER/CLASS/image.png`` or ``FOLDER/train|test/CLASS/image.png``. The server cannot name
    another file. A table is read as :mod:`uefl.data.sources.own_table` does. The report of a silo has every
    value of the column of labels. So the silo names this column, and refuses runs with another one.

    Args:
        path: the folder, or the file of a table. A table is read now.
        name: name of the silo; None: the name of the folder or file, or of the client in it.
        label: for a table, the column with the classes.
    """
    inside = path / "clients"
    if path.suffix.lower() in own_table.SUFFIXES and not path.is_dir():
        silo = name or path.stem
        check_names("silo", [silo])
        frame = own_table.frame_of(path, label)

        def table(data: Data) -> DataSet:
            if data.label != label:
                raise UserError(
                    f"the run has data.label = {data.label!r}; the labels of this silo are in column"
                    f" {label!r} (--label)"
                )
            return own_table.data_set(path, frame, data, silo)

        return OwnLabeled(silo, table)
    if inside.is_dir() and any(entry.is_dir() or entry.suffix.lower() == ".npz" for entry in visible(inside)):
        return OwnSets(path, name)
    silo = name or resolved(path).name
    check_names("silo", [silo])
    images = own_folder.read_one(path, silo)
    return OwnLabeled(silo, lambda data: images)


class OwnLabeled(ClientSource):
    """Labeled images, or the rows of a table.

    Only the sizes and splits of the configuration have an effect. The silo that the partition leaves out is
    measured only, on all of its images.

    Args:
        name: name of the silo.
        table: returns its inputs and labels.
    """

    def __init__(self, name: str, table: Callable[[Data], DataSet]) -> None:
        super().__init__(name)
        self._table = table

    def _build(self, cfg: Config) -> Federation:
        assert self.name is not None
        if cfg.kind != "labeled":
            raise UserError(
                "this silo has labeled images; the arms need unlabeled sets, as clients/NAME/SET/*.png"
            )
        data = cfg.data.model_copy(update={"clients": None, "partition": None})
        scheme, table = cfg.data.partition, self._table(data)
        if isinstance(scheme, LeaveOneOut) and scheme.domain == self.name:
            deal = Deal((), (measured_only(table, self.name, *table.of_group(self.name)),))
        else:
            deal = Natural().deal(table, data, cfg.run.seed)
        return labeled.federate(table, deal, data, cfg.run.seed, partition={"scheme": Natural.name})

    def data(self, client: str, cfg: Config, classes: tuple[str, ...], channels: int) -> LabeledData:
        """Return the images of this silo."""
        found = super().data(client, cfg, classes, channels)
        assert isinstance(found, LabeledData)
        here = self.federation(cfg).classes
        unknown = [name for name in here if name not in classes]
        if unknown:
            raise UserError(f"class {unknown[0]!r} of this silo is not a class of the run")
        place = torch.tensor([classes.index(name) for name in here])

        def fitted(split: Split) -> Split:
            return Split(_in_color(split.images, channels), place[split.labels])

        test = fitted(found.test)
        return LabeledData(
            fitted(found.train), test if found.holdout is found.test else fitted(found.holdout), test
        )


class OwnSets(ClientSource):
    """The folder of one client with its own unlabeled sets.

    Images are ``FOLDER/clients/NAME/SET/image.png`` or ``FOLDER/clients/NAME.npz``, with
    ``FOLDER/priors.csv`` and test images, if any.

    Args:
        path: the folder.
        name: name of the silo; None: the name of the client.
    """

    def __init__(self, path: Path, name: str | None) -> None:
        self._made = own_sets.read(path)
        names = [client.name for client in self._made.clients]
        if len(names) > 1:
            raise UserError(
                f"{path / 'clients'} holds {listed(names)}; a silo is one client: give each client its"
                " own folder"
            )
        if self._made.labeled is not None or self._made.validation is not None:
            raise UserError(
                f"{path} has labeled or validation images; these images belong to the server, in its"
                " data.source"
            )
        if name not in (None, names[0]):
            raise UserError(
                f"--name {name}: the client in {path} is called {names[0]}, in priors too; omit --name,"
                " or rename it"
            )
        check_names("silo", names)
        super().__init__(names[0])

    def _build(self, cfg: Config) -> Federation:
        if cfg.kind != "sets":
            raise UserError("this silo has unlabeled sets; the arms need labeled images, as CLASS/*.png")
        data = cfg.data.model_copy(update={"prior_smoothing": 0.0})
        return unlabeled_sets.federate(self._made, {"scheme": "given"}, data, cfg.run.seed, whole=False)

    def data(self, client: str, cfg: Config, classes: tuple[str, ...], channels: int) -> SetData:
        """Return the sets of this silo.

        The server has checked that its classes match the run.
        """
        found = super().data(client, cfg, classes, channels)
        assert isinstance(found, SetData)
        test = found.test
        return replace(
            found,
            images=_in_color(found.images, channels),
            priors=torch.from_numpy(priors.smoothed(found.priors.numpy(), cfg.data.prior_smoothing)),
            test=test if test is None else replace(test, images=_in_color(test.images, channels)),
        )


def _in_color(images: torch.Tensor, channels: int) -> torch.Tensor:
    """Return images, which may be gray, in this number of channels, and columns or tokens as they are."""
    if images.dim() != 4:
        return images
    return images.expand(-1, channels, -1, -1).contiguous()
