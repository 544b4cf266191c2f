"""The app of a run, for Flower's programs: ``uefl.deploy.app:server`` and ``uefl.deploy.app:client``.

If ``uefl train`` or ``uefl silo`` has started it, it passes messages to their processes. Otherwise a user has
started the run, and the work is done in this process.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..engines.flower import RUN, SILO
from ..engines.flower.messenger import Messenger, connected, passed_on, readable, reply_with

server = ServerApp()
client = ClientApp()


@server.main()  # type: ignore[untyped-decorator]
def _serve(grid: Grid, context: Context) -> None:
    if RUN in os.environ:
        return Messenger(grid, connected(RUN)).work()
    from . import own_run

    here, there = socket.socketpair()

    def work() -> None:
        with there:
            Messenger(grid, there, bounded=False).work()

    with ThreadPoolExecutor(1) as pool:
        passing = pool.submit(work)
        own_run.train(here, context.run_config)
        passing.result()


@client.train()  # type: ignore[untyped-decorator]
def _reply(message: Message, context: Context) -> Message:
    if SILO in os.environ:  # the process of the silo makes the reply
        return passed_on(message)
    from . import own_run

    return reply_with(own_run.reply_frame(readable(message), context.node_config), message)
