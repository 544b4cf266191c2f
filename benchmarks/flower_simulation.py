"""Train rounds of FedAvg in Flower's simulation, for :mod:`benchmarks.simulation`."""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from ray import cloudpickle
from torch import nn

from .simulation import Client, TrainingLoop, train_epoch


class FlowerLoop(TrainingLoop):
    """Run Flower's FedAvg in its simulation, with one actor of Ray.

    The actor keeps one network and the images of all clients, and trains as the plain loop does. So the
    difference between the two is the work of Flower and Ray.

    Args:
        clients: images and labels of each client.
        cohort: number of clients in a round.
        batch: number of images in a step.
        network: the initial network.
    """

    def __init__(self, clients: list[Client], cohort: int, batch: int, network: nn.Module) -> None:
        self._wanted: queue.Queue[bool] = queue.Queue()
        self._trained: queue.Queue[int] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "clients.pickle"
        path.write_bytes(cloudpickle.dumps((clients, network)))  # cloudpickle also stores classes of a script
        threads = torch.get_num_threads()
        client, server = ClientApp(), ServerApp()

        @client.train()
        def train(message: Message, context: Context) -> Message:
            torch.set_num_threads(threads)
            loaded, net = _loaded(str(path))
            images, labels = loaded[int(context.node_config["partition-id"])]
            net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
            net.train()
            train_epoch(net, images, labels, batch)
            metrics = MetricRecord({"num-examples": len(labels)})
            content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
            return Message(content=content, reply_to=message)

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            share = cohort / len(clients)
            strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=len(clients))
            arrays = ArrayRecord(network.state_dict())
            while self._wanted.get():
                arrays = strategy.start(grid, arrays, num_rounds=1).arrays
                self._trained.put(len(arrays))

        logging.getLogger("flwr").setLevel(logging.WARNING)
        started = {"num_cpus": threads, "log_to_driver": False}
        resources = {"client_resources": {"num_cpus": threads}, "init_args": started}
        arguments = (server, client, len(clients), "ray", resources)
        self._simulation = threading.Thread(target=run_simulation, args=arguments, daemon=True)
        self._simulation.start()

    def train(self) -> None:
        """Train every client of the cohort, and average."""
        self._wanted.put(True)
        if not self._trained.get():
            raise RuntimeError("no client of Flower's simulation has trained; its log has the reason")

    def close(self) -> None:
        """End the simulation and the processes of Ray."""
        self._wanted.put(False)
        self._simulation.join()

    def other_cpu(self) -> float:
        """Return the CPU seconds of Ray's processes, which are descendants of this one."""
        seconds, parents = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                numbers = stat.read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended
                continue
            process = int(stat.parent.name)
            parents[process] = int(numbers[1])
            # its own time, and the time of its finished children
            seconds[process] = sum(map(int, numbers[11:15])) / os.sysconf("SC_CLK_TCK")
        return sum(seconds[process] for process in seconds if _descends(process, parents))


@cache
def _loaded(path: str) -> tuple[list[Client], nn.Module]:
    """Read the clients and the network once in each actor."""
    clients, network = cloudpickle.loads(Path(path).read_bytes())
    return clients, network.to(memory_format=torch.channels_last)


def _descends(process: int, parents: dict[int, int]) -> bool:
    """Return whether a process is a descendant of this one."""
    while process in parents:
        process = parents[process]
        if process == os.getpid():
            return True
    return False
