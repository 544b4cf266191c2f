"""The server's side of a run whose clients are nodes of Flower's simulation: Ray's actors do their work, on
this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from flwr.app import RecordDict

from ..config import Config
from ..data import build
from ..engines.flower.address import Unreachable
from ..engines.flower.codec import on_records
from ..engines.flower.simulation import simulated
from ..errors import RunError
from ..folder import Silos
from .deployment import Deployment, Joined
from .processes import note_crowd
from .silo import SiloProgram
from .sources import Dealt


@contextmanager
def in_simulation(
    actors: int, device: str, notice: Callable[[str], None], go_on: str
) -> Iterator[Deployment]:
    """Actors that end with the context.

    Args:
        actors: how many.
        device: theirs, ``cpu`` or ``cuda``.
        notice: called with a line for the user.
        go_on: the command that goes on with the run.

    Raises:
        RunError: the simulation has ended in the middle of the run.
    """
    with ExitStack() as stack:

        def join(cfg: Config, root: Path | None, known: Silos) -> Joined:
            federation = build(cfg.data, kind=cfg.kind, seed=cfg.run.seed, data_root=root)  # type: ignore[arg-type]
            note_crowd(actors, device, notice)
            names = sorted(silo.name for silo in (*federation.silos, *federation.unseen))
            share = torch.cuda.device_count() / actors if device == "cuda" else 0.0
            grid, placed = stack.enter_context(
                simulated(names, partial(_answer, device, root), actors, min(share, 1.0))
            )
            return federation, grid, placed, {}

        try:
            yield Deployment(join, torch.get_num_threads)
        except Unreachable as error:
            raise RunError(f"{error}; go on with: {go_on}") from None


def _answer(device: str, root: Path | None, records: RecordDict) -> RecordDict:
    """Of an actor, which keeps its program from one message to the next."""
    return _program(device, root)(records)


@cache
def _program(device: str, root: Path | None) -> Callable[[RecordDict], RecordDict]:
    return on_records(SiloProgram(Dealt(None, root), torch.device(device)))
