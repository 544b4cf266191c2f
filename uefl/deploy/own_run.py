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
from ..engines.flower.engine import FlowerEngine
from ..engines.flower.link import Link
from ..engines.flower.node import reply_to
from ..errors import RunError, UserError
from ..folder import Silos
from ..run import chosen_device
from .agreement import check_asked
from .choices import Flower
from .deployment import Check, Deployment, Joined, Notice, gather, simulated
from .silo import SiloProgram
from .silo_folder import SiloFolder, next_to
from .sources import PartitionedSource, own

_PLACE = "the SuperLink of this run"


class AnyNode:
    """A roster of nodes that can each reply for any client, as in a simulation.

    Args:
        link: the run.
        names: the names of the clients.
    """

    def __init__(self, link: Link, names: list[str]) -> None:
        nodes = link.nodes()
        if not nodes:
            raise UserError(f"no node is connected to {_PLACE}; start SuperNodes, or a simulation")
        self.nodes = {
            name: (node.number, node.activation) for name, node in zip(names, cycle(nodes), strict=False)
        }

    def refresh(self) -> list[str]:
        """Return no names, because no client moves to another node."""
        return []


@dataclass(frozen=True)
class InRun(Flower):
    """The clients of a run that Flower has started.

    Args:
        link: the run.
        silos: the number of nodes with data of their own; None: each node stands for any client of the
            configuration.
    """

    link: Link | None = None

    @contextmanager
    def deployment(self, device: str, notice: Callable[[str], None], go_on: str) -> Iterator[Deployment]:
        """Return the clients.

        See :meth:`.Flower.deployment`.
        """
        assert self.link is not None
        try:
            if self.silos:
                yield _with_silos(self.link, self.silos, self.wait, notice)
            else:
                yield _simulated(self.link)
        except Unreachable as error:
            raise RunError(f"{error}; continue with the same `flwr run`") from None


def _with_silos(link: Link, silos: int, patience: float, notice: Notice) -> Deployment:
    def join(cfg: Config, root: Path | None, known: Silos, check: Check) -> Joined:
        check_asked(cfg)
        keys = any(node.key for node in link.nodes())
        return gather(cfg, link, Address(_PLACE, insecure=not keys), silos, patience, notice, known, check)

    return Deployment(join, own_data=True)


def _simulated(link: Link) -> Deployment:
    def join(cfg: Config, root: Path | None, *_: object) -> Joined:
        federation, names = simulated(cfg, root)
        return federation, partial(FlowerEngine, link, AnyNode(link, names)), {}

    return Deployment(join)


def train(end: socket.socket, run_config: Mapping[str, Any]) -> None:
    """Train all arms of a configuration, or continue the run in its folder.

    Args:
        end: the end of a connection to a :class:`uefl.engines.flower.messenger.Messenger`.
        run_config: ``config``, the name of a preset or the path of a file; ``out``, the run folder;
            ``silos``, the number of nodes with data of their own; and keys of the configuration.

    Raises:
        UserError, RunError: as :func:`uefl.train`.
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
    """Return the frame of the reply of this process to a message.

    Args:
        frame: frame of the message.
        node_config: options of the SuperNode: ``data`` is the folder of this silo's images, ``name`` the name
            of the silo, and ``label`` the column with the classes of a table. Without ``data`` the node
            stands for any client of the configuration.
    """
    data, name, label = (
        None if (value := node_config.get(key)) is None else str(value) for key in ("data", "name", "label")
    )
    return reply_to(_program(data, name, label or "label"), bytearray(frame))


@cache
def _program(data: str | None, name: str | None, label: str) -> SiloProgram:
    """Return the program of this process, which keeps its data and its network."""
    device = chosen_device("auto")
    if data is None:
        return SiloProgram(PartitionedSource(None), device)
    return SiloProgram(
        own(Path(data).resolve(), name, label), device, kept=SiloFolder(next_to(Path(data), "silo"))
    )
