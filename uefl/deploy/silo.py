"""One client as a process of its own: it reads its own data only, keeps them and its network, and answers the messages of a run."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from flwr.app import RecordDict

from ..algorithms.base import find
from ..client.client import Client, on_device
from ..client.workspace import Workspace
from ..config import from_toml
from ..data.federation import Federation, LabeledData, SetData
from ..data.prepare import PixelCounts
from ..data.unlabeled import Reach
from ..engines.base import Message, Reply, split
from ..engines.flower import faults
from ..engines.flower.codec import Header, Unreadable, pack, pack_reply, unpack, unpack_message
from ..errors import UserError
from .setting import Setting, understood
from .sources import Source

_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (torch.OutOfMemoryError, faults.MEMORY),
    (MemoryError, faults.MEMORY),
    (RuntimeError, faults.COMPUTATION),
    (UserError, faults.DATA),
    (Unreadable, faults.UNREADABLE),
)


class SiloProgram:
    """Answers messages; callable with their content.

    What goes wrong is written to the log of this process, and told to the server as a code.

    Args:
        source: the data.
        device: where the work is done.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device
        self._log = logging.getLogger("uefl.silo")
        self._threads = torch.get_num_threads()
        self._key = secrets.token_bytes(32)
        self._setting = ""
        self._data: LabeledData | SetData | None = None
        self._arm: tuple[str, Client] | None = None

    def __call__(self, records: RecordDict) -> RecordDict:
        """The answer to one message; never raises."""
        name = self._source.name
        try:
            header, parts = unpack(records)
            if not understood(header):
                return self._fault(faults.VERSION)
            if header["ask"] == "report":
                return self._report(header)
            if header["client"] != name:
                return self._fault(faults.MISDIRECTED)
            message = unpack_message(header, parts)
            self._log.info("arm %s: %s", header["arm"], split(message)[0].options)
            return pack_reply(self._client(header)(message))
        except Exception as error:
            self._log.error("%s", traceback.format_exc())
            return self._fault(next((code for kind, code in _CODES if isinstance(error, kind)), faults.PROGRAM))

    def _fault(self, code: str) -> RecordDict:
        return pack_reply(Reply(self._source.name, error=code))

    def _report(self, header: Header) -> RecordDict:
        """What the server has to know of this client's data, none of which is an image or the name of a file."""
        cfg = from_toml(header["config"])
        federation = self._source.federation(cfg)
        (silo,) = (silo for silo in (*federation.silos, *federation.unseen) if silo.name == self._source.name)
        counts = PixelCounts(federation.image_shape[0])
        found = silo.load()
        reach = None
        if isinstance(found, SetData):
            counts.add(found.images)
            reach = Reach.of(found.priors.numpy(), found.sizes.numpy())._asdict()
        else:
            for split in (found.train,) if found.holdout is found.test else (found.train, found.holdout):
                counts.add(split.images)
        report: dict[str, Any] = {
            "client": silo.name,
            "error": None,
            "kind": federation.kind,
            "classes": federation.classes,
            "image_shape": federation.image_shape,
            "sizes": asdict(silo.sizes),
            "content": _content(federation, silo.name),
            "reach": reach,
            "federation": federation.digest,
            "torch": torch.__version__,
        }
        return pack(report, pixels={"counts": counts.counts})

    def _client(self, header: Header) -> Callable[[Message], Reply]:
        """The client in the arm of a message, on a network that stays loaded from one message to the next."""
        place = json.dumps(header["setting"])
        if place != self._setting:
            self._setting, self._data, self._arm = place, None, None
        if self._arm is None or self._arm[0] != header["arm"]:
            self._arm = header["arm"], self._made(Setting.from_plain(header["setting"]), header["arm"])
        return self._arm[1]

    def _made(self, setting: Setting, name: str) -> Client:
        cfg = setting.cfg()
        torch.set_num_threads(setting.threads or self._threads)
        if self._data is None:
            found = self._source.data(cfg, setting.classes, setting.image_shape[0])
            self._data = on_device(found, self._device)
        data, arm = self._data, cfg.arms[name]
        kind = "labeled" if isinstance(data, LabeledData) else "sets"
        federation = Federation(kind, (), setting.classes, setting.image_shape, setting.mean, setting.std)  # type: ignore[arg-type]
        workspace = Workspace(find(arm.algorithm)(arm.parameters).bound(setting.context()), cfg.data, federation, self._device)
        return Client(self._source.name, lambda: data, workspace, self._key)


def _content(federation: Federation, name: str) -> dict[str, dict[str, Any]]:
    """Of each split, the hash of its images and how many there are of each class; of sets a hash of what is in which, and of priors."""
    manifest = federation.manifest
    entry = manifest["silos"].get(name) or manifest["unseen"].get(name, {})
    kept = ("sha256", "images_of_class")
    found = {part: {key: split[key] for key in kept if key in split} for part, split in entry.items() if isinstance(split, dict)}
    if "sets" in entry.get("train", {}):
        told = json.dumps([entry["train"]["sets"], entry["train"]["priors"]])
        found["train"]["sets_sha256"] = hashlib.sha256(told.encode()).hexdigest()
    return found
