"""The program of a silo, or of a process with simulated clients.

The process reads only the data of its clients, keeps the data and a network in memory, and replies to the
messages of a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from .. import __version__
from ..algorithms.base import find
from ..client.client import Client, DataCache
from ..client.workspace import Workspace, fresh, uses_bf16
from ..config import from_toml
from ..data.federation import Federation, SetData
from ..data.labeled import trained_on
from ..data.notes import of_clients
from ..data.prepare import Preparation
from ..data.unlabeled_sets import PriorCoverage
from ..engines import faults
from ..engines.base import Message, Reply, join, member, split
from ..engines.codec import Header, Packet, Unreadable, message_of, packed_reply
from ..errors import UserError
from ..seeds import make_repeatable
from ..server.checks import printable
from ..threads import threads_for
from .privacy_floor import PrivacyFloor
from .setting import PROTOCOL, Setting
from .silo_folder import Refusal, SiloFolder, States
from .sources import ClientSource

_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (torch.OutOfMemoryError, "memory"),
    (MemoryError, "memory"),
    (RuntimeError, "computation"),
    (UserError, "data"),
    (Unreadable, "unreadable"),
)


_LINES, _LINE = 200, 2000  # most lines of an error in the log, and most characters of a line


class SiloProgram:
    """Replies to a message, as a packet.

    The text of an error goes to the log of this process, and its code goes to the server.

    Args:
        source: the data of the clients that this process stands for.
        device: where the work is done.
        floor: the least privacy that the silo accepts; None: the server's choice.
        algorithms: the accepted algorithms; None: all that are installed.
        kept: the folder with the secret and the private states of the silo; None: the process simulates
            clients, and the server keeps their states.
    """

    def __init__(
        self,
        source: ClientSource,
        device: torch.device,
        floor: PrivacyFloor | None = None,
        algorithms: Collection[str] | None = None,
        kept: SiloFolder | None = None,
    ) -> None:
        self._source, self._device, self._floor, self._algorithms = source, device, floor, algorithms
        self._log = logging.getLogger("uefl.silo")
        self._threads = torch.get_num_threads()
        self._kept = kept
        self._secret = None if kept is None else kept.secret
        self._key = self._secret or secrets.token_bytes(32)
        self._images: DataCache
        self._arm: tuple[str, str, Workspace] | None = None
        """the setting, the name of the arm, and its network"""

    def __call__(self, packet: Packet | None) -> Packet:
        """Reply to one message, or to None for an unreadable one, and never raise."""
        client = self._source.name or ""
        try:
            if packet is None:
                raise Unreadable("the packet is not a message")
            header, _ = packet
            if (header.get("protocol"), header.get("uefl")) != (PROTOCOL, __version__):
                words = "no reply to a run of another version of uefl: the run has %s, this silo has %s"
                self._log.warning(words, printable(str(header.get("uefl")), 20), __version__)
                return _fault(client, "version")
            if header["ask"] == "refused":
                self._log.warning("refused by a run: %s", printable(str(header["why"])))
                return Packet({"client": client, "error": None}, {})
            if header["ask"] == "report":
                return self._report(header)
            if header["client"] != (self._source.name or header["client"]):
                return _fault(client, "misdirected")
            client = header["client"]
            message = message_of(packet)
            self._log.info("%s", printable(f"arm {header['arm']!r}: {split(message)[0].options}"))
            handler = self._client(header)
            if self._kept is not None or "state" in split(message)[0].options:
                handler = partial(self._with_own_state, header, handler)
            return packed_reply(self._guarded(handler, message))
        except Exception as error:
            known = isinstance(error, UserError)  # its message is enough without a traceback
            lines = [f"{faults.LINE}{error}"] if known else traceback.format_exc().splitlines()
            self._log.error("%s", "\n".join(printable(line, _LINE) for line in lines[-_LINES:]))
            codes = (code for kind, code in _CODES if isinstance(error, kind))
            return _fault(client, error.code if isinstance(error, Refusal) else next(codes, "program"))

    def _report(self, header: Header) -> Packet:
        """Return the facts about this client's data that the server needs: no image and no name of a file."""
        cfg = from_toml(header["config"])
        if self._floor is not None:
            self._floor.check_run(cfg.run)
        for arm in cfg.arms.values():
            self._check_algorithm(arm.algorithm)
        federation = self._source.federation(cfg)
        # the silo builds only its own part of the federation
        for note in (note for note in federation.notes if note not in of_clients(1)):
            self._log.warning("note: %s", note)
        if self._source.name is None:  # the server has built the same federation, and compares the digests
            return Packet({"client": "", "error": None, "federation": federation.digest}, {})
        client = federation.by_name[self._source.name]
        found = client.load()
        reach = None
        if isinstance(found, SetData):
            trained = [found.images]
            reach = PriorCoverage.of(found.priors.numpy(), found.sizes.numpy())._asdict()
        else:
            trained = trained_on(found)
        standard = cfg.data.normalize == "standard"
        statistics = Preparation(federation.shape, federation.inputs, standard=standard).statistics()
        statistics.add(*trained)
        report: dict[str, Any] = {
            "client": client.name,
            "error": None,
            "kind": federation.kind,
            "classes": federation.classes,
            "shape": federation.shape,
            "inputs": asdict(federation.inputs),
            "sizes": asdict(client.sizes),
            "content": _content(federation, client.name),
            "reach": reach,
            "federation": federation.digest,
            "torch": torch.__version__,
            "precision": "bf16" if uses_bf16(cfg.run.precision, self._device) else "fp32",
        }
        return Packet(report, statistics.report())

    def _guarded(self, client: Callable[[Message], Reply], message: Message) -> Reply:
        """Return the reply of a client, with at least the privacy that this process requires."""
        if self._floor is None:
            return client(message)
        assert self._arm is not None
        run = self._arm[2].context.run
        self._floor.check_message(run, message)
        reply = client(message)
        if reply.tensors:
            self._floor.count(run)
            self._log.info("%s", self._floor.describe())
        return reply

    def _with_own_state(self, header: Header, client: Callable[[Message], Reply], message: Message) -> Reply:
        """Return the reply of a client that keeps its private states here, with the names of new states."""
        assert self._arm is not None
        setting, workspace, members = Setting.of_header(header), self._arm[2], split(message)
        if any(each.private or not isinstance(each.options.get("state"), str) for each in members):
            raise Unreadable(
                "a message may only have the name of a private state, because the state stays at its silo"
            )
        if self._kept is None:
            raise Refusal("state", "a process of a simulated client needs --state, a folder for its states")
        states = States(self._kept.folder, setting.run_identity(), header["arm"], header["client"])
        names = [str(each.options["state"]) for each in members]
        had = [
            states.read(name) if name else self._fresh(workspace, header["client"], int(each.options["seed"]))
            for name, each in zip(names, members, strict=True)
        ]
        reply = client(join([replace(each, private=own) for each, own in zip(members, had, strict=True)]))
        new = (
            [reply.private] if len(members) == 1 else [member(reply.private, i) for i in range(len(members))]
        )
        round = int(members[0].options["round"])
        reply.states = [
            name if _same(own, state) else states.write(state, name, round)
            for name, own, state in zip(names, had, new, strict=True)
        ]
        reply.private = {}
        return reply

    def _fresh(self, workspace: Workspace, client: str, seed: int) -> dict[str, torch.Tensor]:
        """Return the private state that a client starts with."""
        algorithm = workspace.algorithm.bound(replace(workspace.context, seed=seed))
        start = workspace.initial(seed)[1] if workspace.private_names() else {}
        return start | fresh(algorithm, client, self._device)

    def _client(self, header: Header) -> Callable[[Message], Reply]:
        """Return a client in the arm of its message, on a network that stays loaded between messages."""
        place = json.dumps(header["setting"])
        if self._arm is None or (place, header["arm"]) != self._arm[:2]:
            setting = Setting.of_header(header)
            workspace = self._workspace(setting, header["arm"])  # it may fail, so nothing is replaced before
            if self._arm is None or place != self._arm[0]:
                read = partial(
                    self._source.data, cfg=setting.cfg(), classes=setting.classes, channels=setting.shape[0]
                )
                self._images = DataCache(read, self._device)
            self._arm = place, header["arm"], workspace
        return Client(
            header["client"], partial(self._images, header["client"]), self._arm[2], self._key, self._secret
        )

    def _workspace(self, setting: Setting, name: str) -> Workspace:
        cfg = setting.cfg()
        make_repeatable(setting.threads or self._threads, self._device)
        arm = cfg.arms[name]
        self._check_algorithm(arm.algorithm)
        context = setting.context()
        # all weights come in messages: this process opens no file that the server names
        context = replace(context, model=context.model.model_copy(update={"pretrained": False}))
        about = (setting.classes, setting.shape, setting.mean, setting.std)
        federation = Federation(cfg.kind, (), *about, inputs=setting.inputs)  # type: ignore[arg-type]
        workspace = Workspace(
            find(arm.algorithm)(arm.parameters).bound(context), cfg.data, federation, self._device
        )
        if not setting.threads:
            torch.set_num_threads(threads_for(workspace.net, workspace.example, cfg.training.batch_size))
        if self._floor is not None:
            self._floor.check_run(cfg.run)
            self._floor.check_arm(cfg, name, workspace)
        return workspace

    def _check_algorithm(self, name: str) -> None:
        if self._algorithms is not None and name not in self._algorithms:
            raise Refusal(
                "algorithm",
                f"the run has the algorithm {name!r}; this silo accepts only"
                f" {', '.join(sorted(self._algorithms))}",
            )


def _same(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a state is unchanged, or raise RuntimeError if the new one is not finite."""
    for name, tensor in after.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RuntimeError(f"private {name} is not finite")
    return not after or (
        before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
    )


def _fault(client: str, code: str) -> Packet:
    return packed_reply(Reply(client, error=code))


def _content(federation: Federation, name: str) -> dict[str, dict[str, Any]]:
    """Return, for each split, the hash of its images and the number of images per class.

    For sets, return a hash of contents and priors.
    """
    manifest = federation.manifest
    entry = manifest["silos"].get(name) or manifest["unseen"].get(name, {})
    kept = ("sha256", "images_of_class")
    found = {
        part: {key: split[key] for key in kept if key in split}
        for part, split in entry.items()
        if isinstance(split, dict)
    }
    if "sets" in entry.get("train", {}):
        text = json.dumps([entry["train"]["sets"], entry["train"]["priors"]])
        found["train"]["sets_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return found
