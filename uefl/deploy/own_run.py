"""A run that a user starts with ``flwr run``, for example in Flower's simulation."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

from .. import api
from ..config import Config
from ..engines.flower.address import Address, Unreachable
from ..engines.flower.engine import FlowerEngine, Roster
from ..engines.flower.link import Link
from ..engines.flower.node import reply_to
from ..errors import RunError, UserError
from ..folder import Silos
from ..run import chosen_device
from .choices import Flower
from .deployment import Check, Deployment, Joined, gather
from .silo import SiloProgram
from .silo_folder import SiloFolder, next_to
from .sources import ClientSource, own, simulated

_PLACE = "the SuperLink of this run"


@dataclass(frozen=True)
class InRun(Flower):
    """The clients of a run that Flower has started.

    Without ``silos``, each node stands for any client of the configuration.
    """

    link: Link | None = None

    @contextmanager
    def deployment(self, device: str, notice: Callable[[str], None], go_on: str) -> Iterator[Deployment]:
        """Return the clients, as :meth:`.Flower.deployment` does."""
        link = self.link
        assert link is not None

        def join(cfg: Config, root: Path | None, known: Silos, check: Check) -> Joined:
            nodes = link.nodes()
            if self.silos:
                address = Address(_PLACE, insecure=not any(node.key for node in nodes))
                return gather(cfg, link, address, self.silos, self.wait, notice, known, check)
            if not nodes:
                raise UserError(f"no node is connected to {_PLACE}; start SuperNodes, or a simulation")
            federation, numbers = simulated(cfg, root), cycle(node.number for node in nodes)
            roster = Roster(dict(zip(federation.by_name, numbers, strict=False)))
            return federation, partial(FlowerEngine, link, roster), {}

        try:
            yield Deployment(join, own_data=bool(self.silos))
        except Unreachable as error:
            raise RunError(f"{error}; continue with the same `flwr run`") from None


def train(end: socket.socket, run_config: Mapping[str, Any]) -> None:
    """Train all arms of a configuration, or continue the run in its folder.

    Args:
        end: the end of a connection to a :class:`uefl.engines.flower.messenger.Messenger`.
        run_config: ``config``, the name of a preset or the path of a file; ``out``, the run folder;
            ``silos``, the number of nodes with data of their own; and keys of the configuration.
    """
    overrides = dict(run_config)
    source, silos = str(overrides.pop("config", "demo")), int(overrides.pop("silos", 0))
    if "out" not in overrides:
        raise UserError("out: name the run folder in the configuration of the app")
    out = Path(str(overrides.pop("out")))
    with closing(Link(end, _PLACE)) as link:
        engine = InRun(silos=silos, link=link)
        if (out / "config.toml").exists():
            api.resume(out, engine=engine)
        else:
            api.train(source, out=out, engine=engine, **overrides)


def reply_frame(frame: bytes | bytearray, node_config: Mapping[str, Any]) -> bytearray:
    """Return the frame of the reply of this process to the frame of a message.

    Args:
        node_config: options of the SuperNode: ``data`` is the folder of this silo's images, ``name`` the name
            of the silo, and ``label`` the column with the classes of a table. Without ``data`` the node
            stands for any client of the configuration.
    """
    options = {key: str(node_config[key]) for key in ("data", "name", "label") if key in node_config}
    return reply_to(_program(**options), bytearray(frame))


@cache
def _program(data: str | None = None, name: str | None = None, label: str = "label") -> SiloProgram:
    """Return the program of this process, which keeps its data and its network."""
    device = chosen_device("auto")
    if data is None:
        return SiloProgram(ClientSource(None), device)
    return SiloProgram(
        own(Path(data).resolve(), name, label), device, kept=SiloFolder(next_to(Path(data), "silo"))
    )
