"""Compare a FedUL round with the published loop, with the same sets, network, penalty, batches and threads.

python -m benchmarks.fedul_round [PRESET] [--threads 1] [--turns 3] [--workers 3] [--held avx2] [--save]
[--set key=value]...

Both loops run once in each turn. Without arguments, a turn is a whole round in the setting of the paper: 5
clients x 75 steps and 10,000 test images. It takes about six minutes on an idle Sapphire Rapids core. Each
turn prints a line, and the first turn is not counted.

``--set clients=2 --set train_per_client=2560 --set test_per_client=533`` runs 2 clients x 20 steps with the
same ratio of test to training images. If other jobs run on the machine, use one thread and compare the CPU
seconds, which include all processes.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from uefl import config
from uefl.config import Config
from uefl.data import Federation, SetData, build

from . import round_times
from .held import restrict

_MEAN, _STD = (0.1307,) * 3, (0.3081,) * 3


class PublishedFedULNet(nn.Module):
    """The network of the paper on three equal channels, followed by the transition from classes to sets."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for (inputs, outputs), pool in zip(pairwise((3, 64, 64, 128)), (True, True, False), strict=True):
            layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.BatchNorm2d(outputs), nn.ReLU()] + [
                nn.MaxPool2d(2)
            ] * pool
        layers.append(nn.Flatten())
        for inputs, outputs in pairwise((6272, 2048, 512)):
            layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.logits = nn.Sequential(*layers, nn.Linear(512, classes))

    def forward(self, x: torch.Tensor, priors: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the set probabilities ``[B, M]``.

        Args:
            x: images ``[B, 3, H, W]``.
            priors: class priors of each set, ``[M, K]``.
            shares: share of each set in the images, ``[M]``.
        """
        weights = self.logits(x).softmax(1) @ priors.T * shares
        return weights / weights.sum(1, keepdim=True)


class TransformedImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Convert each image to a Pillow image, transform it, and convert it back to a tensor."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor, *, rotate: bool) -> None:
        steps = [transforms.Grayscale(3), transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
        self.transform = transforms.Compose(
            [transforms.ToPILImage(), *([transforms.RandomRotation(20)] * rotate), *steps]
        )
        self.images, self.targets = images, targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[i]), self.targets[i]


class PublishedFedULLoop:
    """Run the published loop, written from its description because it has no license.

    It transforms images with Pillow in loader workers and computes in float32. Autograd differentiates the
    penalty of every tensor. Each round creates new optimizers, and averages state dicts entry by entry.

    Args:
        cfg: the configuration, with an arm ``fedul``.
        federation: the clients.
        workers: number of workers of each client's loader; 3 in the published code.
        bf16: compute in bfloat16 where uefl does. The published loop does not.
    """

    def __init__(self, cfg: Config, federation: Federation, *, workers: int, bf16: bool) -> None:
        self.config, self.bf16 = cfg, bf16
        self.server = PublishedFedULNet(len(federation.classes))
        self.models = [copy.deepcopy(self.server) for _ in federation.clients]
        self.penalty = cfg.arms["fedul"].parameters.penalty  # type: ignore[attr-defined]
        data = [client.load() for client in federation.clients]
        sets = [each for each in data if isinstance(each, SetData)]
        self.known = [(s.priors.float(), (s.sizes / s.sizes.sum()).float()) for s in sets]
        self.train_loaders = [
            DataLoader(
                TransformedImages(s.images, s.sets, rotate=True),
                cfg.training.batch_size,
                shuffle=True,
                drop_last=True,
                num_workers=workers,
            )
            for s in sets
        ]
        tests = [s.test for s in sets if s.test is not None]
        self.test_loaders = [
            DataLoader(TransformedImages(t.images, t.labels, rotate=False), 5 * cfg.training.batch_size)
            for t in tests
        ]

    def train(self) -> None:
        """Train every client for a local epoch, and average."""
        for model, loader, known in zip(self.models, self.train_loaders, self.known, strict=True):
            optimizer = torch.optim.Adam(model.parameters(), lr=self.config.training.lr)
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
                    output = model(x, *known)
                penalty = sum(parameter.abs().sum() for parameter in model.parameters())
                loss = nn.functional.cross_entropy(output.float(), y) + self.penalty * penalty
                loss.backward()
                loss.item()
                optimizer.step()
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for name, average in self.server.state_dict().items():
            if not average.is_floating_point():
                average.copy_(self.models[0].state_dict()[name])
                continue
            total = torch.zeros_like(average)
            for model in self.models:
                total += model.state_dict()[name] / len(self.models)
            average.copy_(total)
            for model in self.models:
                model.state_dict()[name].copy_(total)

    @torch.no_grad()
    def measure(self) -> None:
        """Count the correct predictions on the test images of every client, and discard the counts."""
        for model, loader in zip(self.models, self.test_loaders, strict=True):
            model.eval()
            for x, y in loader:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
                    logits = model.logits(x)
                (logits.argmax(1) == y).sum().item()


def main(arguments: list[str] | None = None) -> None:
    """Time rounds of all loops in turns, after a turn that is not counted, and print the medians."""
    parser = round_times.parser(__doc__, "fedul-mnist")
    parser.add_argument("--workers", type=int, default=3)
    args = parser.parse_args(arguments)
    restrict(args.held, "benchmarks.fedul_round", arguments)
    torch.set_num_threads(args.threads)
    cfg = config.load(args.preset, [*args.set, "validation=0"])  # both loops measure on the test images only
    federation = build(cfg.data, kind="sets", seed=cfg.run.seed)
    ours = round_times.UeflLoop(cfg, "fedul", federation)
    loops: dict[str, round_times.Loop] = {
        "uefl": ours,
        "published": PublishedFedULLoop(cfg, federation, workers=args.workers, bf16=False),
    }
    if args.bf16:
        loops["published, bfloat16"] = PublishedFedULLoop(cfg, federation, workers=args.workers, bf16=True)
    steps = sum(s.sizes.train // cfg.training.batch_size for s in federation.clients)
    round_times.compare(
        loops,
        f"{args.preset}: {len(federation.clients)} clients, {steps} steps, bf16 {ours.workspace.autocast}",
        args,
    )


if __name__ == "__main__":
    main()
