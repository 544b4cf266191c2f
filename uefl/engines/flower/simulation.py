"""Flower's simulation as the transport: nodes without a process each, whose messages Ray hands to actors on
this machine.

Needs the extra ``ray``. Our own loop asks through the same Grid as at a SuperLink. Ray itself pickles what
goes to its actors, and it listens on every address of this machine; so it is told to take nothing from
anybody without the token that this process makes.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import RUN_ID_NUM_BYTES, SUPERLINK_NODE_ID, TASK_ID_NUM_BYTES
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce.metrics import VceMetrics
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes, start_vce
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.server.superlink.linkstate.utils import generate_rand_int_from_bytes
from flwr.serverapp import Grid
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from .address import Unreachable

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # spares a warning
}
"""read by Ray when it is imported, which start_vce does, and when it starts"""


class Placed:
    """Who is there, in the place of :class:`.members.Members`: clients whose nodes are known from the start
    and never move.

    Args:
        nodes: by name.
        check: raises where the simulation has ended.
    """

    def __init__(self, nodes: dict[str, int], check: Callable[[], None]) -> None:
        self.nodes = {name: (node, "") for name, node in nodes.items()}
        self._check = check

    def look(self) -> list[str]:
        """Nobody has moved.

        Raises:
            Unreachable: the simulation has ended.
        """
        self._check()
        return []


@contextmanager
def simulated(
    names: Sequence[str], answer: Callable[[RecordDict], RecordDict], actors: int, gpus: float = 0.0
) -> Iterator[tuple[Grid, Placed]]:
    """Clients in actors of Ray, for as long as the context lasts.

    Args:
        names: of the clients.
        answer: to the content of a message to any client; is pickled to the actors, and must not raise.
        actors: processes that do the work.
        gpus: what each of them takes of a GPU.

    Raises:
        Unreachable: the simulation ended by itself.
    """
    os.environ |= _ENVIRONMENT  # a run restores the environment of its caller, so each sets it
    # what fails comes as a reply, or ends the simulation
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    states = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
    state, run = states.state(), Run.create_empty(generate_rand_int_from_bytes(RUN_ID_NUM_BYTES))
    run.primary_task_id, run.federation_id = (
        generate_rand_int_from_bytes(TASK_ID_NUM_BYTES),
        NOOP_FEDERATION_ID,
    )
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run.run_id, SUPERLINK_NODE_ID
    state.run_ids[run.run_id] = RunRecord(run=run)  # type: ignore[attr-defined]
    state.task_store[run.primary_task_id] = Task(task_id=run.primary_task_id, run_id=run.run_id)  # type: ignore[attr-defined]
    grid = InMemoryGrid(state_factory=states)
    grid.set_run(run)
    mapping = _register_nodes(len(names), states)
    ray = {
        "num_cpus": actors,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
    }
    config = {
        "init_args": ray | {"_node_ip_address": "127.0.0.1"},
        "client_resources": {"num_cpus": 1, "num_gpus": gpus},
        "actor": {},
    }
    stop, failed = threading.Event(), list[Exception]()

    def work() -> None:
        try:
            start_vce(
                backend_name="ray",
                backend_config_json_stream=json.dumps(config),
                app_dir="",
                is_app=False,
                f_stop=stop,
                run=run,
                metrics=VceMetrics(),
                client_app=_app(answer),
                state_factory=states,
                existing_nodes_mapping=mapping,
            )
        except Exception as error:
            failed.append(error)

    def check() -> None:
        if not thread.is_alive():
            raise Unreachable(
                "Flower's simulation has ended:"
                f" {failed[0].__cause__ or failed[0] if failed else 'nobody knows why'}"
            )

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield grid, Placed({names[number]: node for node, number in mapping.items()}, check)
    finally:
        stop.set()
        thread.join()


def _app(answer: Callable[[RecordDict], RecordDict]) -> ClientApp:
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        return Message(answer(message.content), reply_to=message)

    return app
