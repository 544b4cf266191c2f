"""Compare a round of FedAvg over many small clients with a plain PyTorch loop and with other simulators.

python -m benchmarks.simulation [--clients 200] [--images 20] [--cohort 50] [--batch 10] [--save]

The network is the CNN of PyTorch's MNIST example, with 1.2 million parameters. In each turn, every loop
trains for one round with one local epoch of SGD. Compare the CPU seconds. pfl-research, fluke-fl and Flower's
simulation (flwr and ray) run if they are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from uefl import config
from uefl.data.federation import ClientData, Federation, LabeledData, Split

from . import held
from .round_times import Loop, UeflLoop, compare, parser

LR = 0.05
ClientTensors = tuple[torch.Tensor, torch.Tensor]
"""normalized images ``[n, 1, 28, 28]`` float32 and labels ``[n]`` of one client"""


class Cnn(nn.Sequential):
    """The network of PyTorch's MNIST example: 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()),
            *(nn.Dropout(0.5), nn.Linear(128, 10)),
        )


class TrainingLoop:
    """A loop without measurements, because only training is compared."""

    def measure(self) -> None:
        """Do nothing."""


class PlainLoop(TrainingLoop):
    """Run FedAvg as a short PyTorch script: one network, a fused optimizer, a sum of weighted parameters.

    Args:
        clients: images and labels of each client.
        cohort: number of clients in a round.
        batch: number of images in a step.
        network: builds the network.
    """

    def __init__(
        self, clients: list[ClientTensors], cohort: int, batch: int, network: Callable[[], nn.Module] = Cnn
    ) -> None:
        self._clients, self._cohort, self._batch = clients, cohort, batch
        torch.manual_seed(0)
        self._net = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = [p.detach().clone() for p in self._net.parameters()]

    def train(self) -> None:
        """Train every participant, and average."""
        parameters = list(self._net.parameters())
        sums, total = [torch.zeros_like(p) for p in self.model], 0
        self._net.train()
        for client in torch.randperm(len(self._clients))[: self._cohort]:
            images, labels = self._clients[client]
            torch._foreach_copy_([p.data for p in parameters], self.model)
            train_epoch(self._net, images, labels, self._batch)
            torch._foreach_add_(sums, [p.data for p in parameters], alpha=len(labels))
            total += len(labels)
        self.model = list(torch._foreach_div(sums, total))


def train_epoch(net: nn.Module, images: torch.Tensor, labels: torch.Tensor, batch: int) -> None:
    """Train a network for one local epoch of SGD."""
    optimizer = torch.optim.SGD(net.parameters(), LR, fused=True)
    for chosen in torch.randperm(len(labels)).split(batch):
        optimizer.zero_grad()
        cross_entropy(net(images[chosen]), labels[chosen]).backward()
        optimizer.step()


class UeflTraining(TrainingLoop, UeflLoop):
    """Run an arm without measuring its model."""


class PflLoop(TrainingLoop):
    """Run pfl-research with its simulated backend. :class:`PlainLoop` documents the arguments."""

    def __init__(self, clients: list[ClientTensors], cohort: int, batch: int) -> None:
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        class Module(Cnn):
            def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                self.train()
                return cross_entropy(self(images), labels)

            def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
                return {}

        torch.manual_seed(0)
        net = Module()
        self._model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
        data = FederatedDataset(
            lambda user: Dataset(raw_data=list(clients[user])),
            get_user_sampler("random", list(range(len(clients)))),
        )
        self._backend = SimulatedBackend(data, data)
        training = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=batch, local_num_steps=None
        )
        self._algorithm = FederatedAveraging()
        self._params = NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        )
        self._training, self._iteration = training, 1  # iteration 0 would evaluate

    def train(self) -> None:
        """Train every participant, and average."""
        contexts, _, _ = self._algorithm.get_next_central_contexts(
            self._model, self._iteration, self._params, self._training, None
        )
        statistics, metrics = self._backend.gather_results(
            model=self._model, training_algorithm=self._algorithm, central_context=contexts[0]
        )
        self._algorithm.process_aggregated_statistics(contexts[0], metrics, self._model, statistics)
        self._iteration += 1


class FlukeLoop(TrainingLoop):
    """Run fluke-fl with the round of its server. :class:`PlainLoop` documents the arguments."""

    def __init__(self, clients: list[ClientTensors], cohort: int, batch: int) -> None:
        from fluke import FlukeENV
        from fluke.client import Client as FlukeClient
        from fluke.config import OptimizerConfigurator
        from fluke.data import FastDataLoader
        from fluke.server import Server

        FlukeENV().set_device("cpu")
        FlukeENV().open_cache("benchmark")
        FlukeENV().set_eval_cfg(task="classification", eval_every=10**9, server=False)
        torch.manual_seed(0)
        schedule = {"name": "StepLR", "step_size": 1}
        optimizer = OptimizerConfigurator({"name": torch.optim.SGD, "lr": LR}, schedule)
        fluke_clients = [
            FlukeClient(
                i,
                FastDataLoader(*data, num_labels=10, batch_size=batch, shuffle=True, single_batch=False),
                None,
                optimizer,
                nn.CrossEntropyLoss(),
                local_epochs=1,
            )
            for i, data in enumerate(clients)
        ]
        self._server = Server(Cnn(), None, fluke_clients, weighted=True)
        for client in fluke_clients:
            client.set_channel(self._server.channel)
        self._cohort, self._clients = cohort, fluke_clients

    def train(self) -> None:
        """Train every participant, and average."""
        self._server.fit(n_rounds=1, eligible_perc=self._cohort / len(self._clients), finalize=False)


def images_of(clients: int, images: int) -> Iterator[Split]:
    """Yield random images of ten classes for each client.

    A step takes the same time with any images.
    """
    rng = np.random.default_rng(0)
    for _ in range(clients):
        pixels = torch.from_numpy(rng.integers(0, 256, (images, 1, 28, 28), np.uint8))
        yield Split(pixels, torch.from_numpy(rng.integers(0, 10, images)))


def normalized(splits: list[Split]) -> list[ClientTensors]:
    """Return the normalized images and the labels of every client."""
    return [((split.images / 255 - 0.5) / 0.5, split.labels) for split in splits]


def ours(
    splits: list[Split], cohort: int, batch: int, network: Callable[[], nn.Module] = Cnn, *keys: str
) -> UeflTraining:
    """Return an arm of FedAvg with these clients.

    ``keys`` are more settings of the configuration.
    """
    silos = tuple(
        ClientData.of(f"client-{i:05d}", LabeledData(split, split, split)) for i, split in enumerate(splits)
    )
    classes = tuple(map(str, range(10)))
    federation = Federation("labeled", silos, classes, (1, 28, 28), (0.5,), (0.5,))
    share, local = f"participation={cohort / len(splits)}", (f"batch_size={batch}", "local_epochs=1")
    cfg = config.load(
        "many-clients", [share, *local, "optimizer=sgd", f"lr={LR}", "precision=fp32", *keys], given=True
    )
    return UeflTraining(cfg, "fedavg", federation, network=network)


def main(arguments: list[str] | None = None) -> None:
    """Time rounds of all loops in turns, and print the medians."""
    options = parser(__doc__)
    for key, default in {"clients": 200, "images": 20, "cohort": 50, "batch": 10}.items():
        options.add_argument(f"--{key}", type=int, default=default)
    args: argparse.Namespace = options.parse_args(arguments)
    held.restrict(args.held, "benchmarks.simulation", arguments)
    torch.set_num_threads(args.threads)
    splits = list(images_of(args.clients, args.images))
    clients = normalized(splits)
    at_end = contextlib.ExitStack()
    loops: dict[str, Loop] = {
        "uefl": ours(splits, args.cohort, args.batch, Cnn, *args.set),
        "plain loop": PlainLoop(clients, args.cohort, args.batch),
    }
    for package, loop in (("pfl", PflLoop), ("fluke", FlukeLoop)):
        if importlib.util.find_spec(package):
            loops[package] = loop(clients, args.cohort, args.batch)
    if importlib.util.find_spec("flwr") and importlib.util.find_spec("ray"):
        from .flower_simulation import FlowerLoop

        torch.manual_seed(0)
        flower = FlowerLoop(clients, args.cohort, args.batch, Cnn())
        loops["flower"] = flower
        at_end.callback(flower.close)
    args.preset = f"fedavg {args.clients}x{args.images} cohort {args.cohort} batch {args.batch}"
    with at_end:
        compare(loops, args.preset, args)


if __name__ == "__main__":
    main()
