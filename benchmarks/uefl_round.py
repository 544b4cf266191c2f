"""Compare a UEFL round with the published loop, in turns.

Both have the same clients, network, codebook, batches and threads.

python -m benchmarks.uefl_round [PRESET] [--threads 1] [--turns 3] [--bf16] [--held avx2] [--save] [--set
key=value]...
                                [--device cuda] [--processes 2,4]

Without arguments the program runs a whole round of the paper's setting: 9 clients x 20 epochs of 2,000 images
at width 128, which takes many hours on a CPU. ``--set width=16 --set clients=3 --set angles=[0,-50,120] --set
train_per_client=500 --set test_per_client=125`` is about 700 times less work. uefl trains the arms of the
preset. The default preset has ``uefl-published``, which repeats the published loop with its mistakes. ``demo
--set arms=uefl --set precision=fp32`` is a round of the demo with our UEFL. All rounds belong to the first
iteration, before any codebook is extended. The first turn is not counted.

The published loop measures the test images after every local epoch. After the round it measures them 20 times
with dropout off and gets the same numbers 20 times. The row ``published, once`` leaves these repetitions out.
On a machine with other jobs, compare the CPU seconds on one thread.

With ``--device cuda`` everything runs on a GPU, and each of our arms has one more row, with its steps in CUDA
graphs. ``--processes 2,4`` adds rows with 2 and 4 processes that share the clients. On a GPU they share the
GPU and use CUDA graphs. The CPU seconds in such a row cover only the server.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from uefl import config
from uefl.client.workspace import uses_bf16
from uefl.config import Config
from uefl.data import Federation, build
from uefl.data.federation import LabeledData
from uefl.deploy.workers import on_workers
from uefl.models.normalization import normalization
from uefl.seeds import make_repeatable

from . import round_times
from .held import restrict

_TEST_BATCH = 100


class NetworkOutput(NamedTuple):
    """The output of the network for B images."""

    logits: torch.Tensor
    loss: torch.Tensor
    """codebook loss and commitment loss"""
    perplexity: torch.Tensor


class PublishedBlock(nn.Module):
    """A residual block of constant width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, C, H, W] to [B, C, H, W]."""
        return torch.relu(self.layers(x) + x)


class PublishedUEFLNet(nn.Module):
    """The paper's network.

    It has three stages, a quantizer that makes the whole table of distances, two linear layers, and dropout
    on the logits.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        width: int,
        hidden: int,
        classes: int,
        codewords: int,
        segments: int,
        p: float,
    ) -> None:
        super().__init__()
        inputs, side, stages = image_shape[0], image_shape[1], []
        for channels in (width, 2 * width, 4 * width):
            stages += [nn.Conv2d(inputs, channels, 3, padding=1), PublishedBlock(channels), nn.MaxPool2d(2)]
            inputs, side = channels, side // 2
        self.encoder = nn.Sequential(*stages)
        self.codebook = nn.Parameter(torch.randn(codewords, inputs // segments))
        dropout = nn.Dropout(p)
        self.head = nn.Sequential(
            nn.Linear(inputs * side * side, hidden), nn.GELU(), dropout, nn.Linear(hidden, classes), dropout
        )

    def forward(self, x: torch.Tensor) -> NetworkOutput:
        """Return the logits of images [B, C, H, W]."""
        features = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = features.view(-1, self.codebook.shape[1])
        distance = (
            flat.square().sum(1, keepdim=True) + self.codebook.square().sum(1) - 2 * flat @ self.codebook.T
        )
        chosen = torch.zeros_like(distance).scatter_(1, distance.argmin(1, keepdim=True), 1)
        quantized = (chosen @ self.codebook.to(chosen.dtype)).view(features.shape)
        mse = nn.functional.mse_loss
        loss = mse(quantized, features.detach()) + 0.25 * mse(quantized.detach(), features)
        use = chosen.mean(0)
        perplexity = torch.exp(-(use * torch.log(use + 1e-10)).sum())
        passed = features + (quantized - features).detach()
        return NetworkOutput(self.head(passed.permute(0, 3, 1, 2).flatten(1)), loss, perplexity)


class PublishedUEFLLoop:
    """Run the published loop, written from its description because it has no license.

    It copies the model for every client, creates a new optimizer each round, and averages state dicts entry
    by entry. Each client keeps its codebook. Batches are slices of one tensor, which is no slower than a
    loader.

    Args:
        once: leave out the repeated measurements.
        bf16: compute in bfloat16. The published loop does not.
    """

    def __init__(
        self, cfg: Config, name: str, federation: Federation, *, once: bool, bf16: bool, device: str = "cpu"
    ) -> None:
        self.training, self.once, self.bf16, self.device = cfg.training, once, bf16, device
        self.passes = 1 if once else cfg.run.passes
        of_arm, model = cfg.arms[name].parameters, cfg.model
        sizes = (model.width, model.hidden, len(federation.classes), of_arm.codewords, of_arm.segments)  # type: ignore[attr-defined]
        self.server = PublishedUEFLNet(federation.shape, *sizes, model.dropout).to(device)
        self.codebooks = [self.server.codebook.detach().clone() for _ in federation.clients]
        mean, std = normalization(cfg.data.normalize, federation.mean, federation.std)
        data = [client.load() for client in federation.clients]
        labeled = [each for each in data if isinstance(each, LabeledData)]
        self.train_data, self.test_data = (
            [(((split.images - mean) / std).to(device), split.labels.to(device)) for split in splits]
            for splits in ([each.train for each in labeled], [each.test for each in labeled])
        )

    def train(self) -> None:
        """Train the local epochs of every client and average everything except the codebooks.

        A GPU uses the fastest kernels, as published.
        """
        repeatable = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            self._train()
        finally:
            torch.use_deterministic_algorithms(repeatable, warn_only=True)

    def _train(self) -> None:
        total = {
            name: torch.zeros_like(tensor)
            for name, tensor in self.server.state_dict().items()
            if name != "codebook"
        }
        for k, (images, labels) in enumerate(self.train_data):
            model = self._of_client(k)
            optimizer = torch.optim.Adam(model.parameters(), lr=self.training.lr)
            for _ in range(self.training.local_epochs):
                model.train()
                for batch in torch.randperm(len(images)).split(self.training.batch_size):
                    optimizer.zero_grad()
                    output = self._forward(model, images[batch])
                    loss = nn.functional.cross_entropy(output.logits.float(), labels[batch]) + output.loss
                    loss.backward()
                    loss.item()
                    optimizer.step()
                if not self.once:
                    self._measure(model, k)
            self.codebooks[k] = model.codebook.detach().clone()
            for name, tensor in total.items():
                tensor += (model.state_dict()[name] / len(self.train_data)).to(tensor.dtype)
        self.server.load_state_dict(total, strict=False)

    def measure(self) -> None:
        """Measure accuracy, entropy and perplexity of every client, ``passes`` times."""
        for _ in range(self.passes):
            for k in range(len(self.test_data)):
                self._measure(self._of_client(k), k)

    def _of_client(self, k: int) -> PublishedUEFLNet:
        model = copy.deepcopy(self.server)
        model.codebook.data.copy_(self.codebooks[k])
        return model

    @torch.no_grad()
    def _measure(self, model: PublishedUEFLNet, k: int) -> None:
        model.eval()
        images, labels = self.test_data[k]
        for x, y in zip(images.split(_TEST_BATCH), labels.split(_TEST_BATCH), strict=True):
            output = self._forward(model, x)
            probs = output.logits.float().softmax(1)
            (probs.argmax(1) == y).sum().item()
            (-(probs * torch.log(probs + 1e-45)).sum()).item()
            output.perplexity.item()

    def _forward(self, model: PublishedUEFLNet, x: torch.Tensor) -> NetworkOutput:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.bf16):
            output: NetworkOutput = model(x)
        return output


def main(arguments: list[str] | None = None) -> None:
    """Time a few rounds of every implementation in turn, after an uncounted one, and print the medians."""
    parser = round_times.parser(__doc__, "mnist-9-published")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", default="", metavar="N,N", help="rows with the clients in N processes")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU; leave it out to measure on the CPU")
    restrict(args.held, "benchmarks.uefl_round", arguments)
    # a run and the processes of its clients do the same
    make_repeatable(args.threads, torch.device(args.device))
    cfg, device = config.load(args.preset, args.set), args.device
    cfg = cfg.with_run(precision="bf16" if uses_bf16(cfg.run.precision, torch.device(device)) else "fp32")
    federation = build(cfg.data, kind="labeled", seed=cfg.run.seed)
    first = next(iter(cfg.arms))
    with ExitStack() as stack:
        loops: dict[str, round_times.Loop] = {
            name: round_times.UeflLoop(cfg, name, federation, device) for name in cfg.arms
        }
        graphs = cfg.with_run(cuda_graphs=True) if device == "cuda" else cfg
        if graphs != cfg:
            loops |= {
                f"{name}, CUDA graphs": round_times.UeflLoop(graphs, name, federation, device)
                for name in cfg.arms
            }
        for count in map(int, filter(None, args.processes.split(","))):
            workers = stack.enter_context(on_workers(count, device, print, "the same command"))
            workers.federation(graphs, None, {})
            for name in cfg.arms:
                loops[f"{name}, {count} processes"] = round_times.UeflLoop(
                    graphs, name, federation, device, workers.engine(name, lambda client: None)
                )
        for bf16 in (False, True) if args.bf16 else (False,):
            for once in (False, True):
                name = "published" + ", once" * once + ", bfloat16" * bf16
                loops[name] = PublishedUEFLLoop(cfg, first, federation, once=once, bf16=bf16, device=device)
        images = sum(client.sizes.train for client in federation.clients) * cfg.training.local_epochs
        title = (
            f"{args.preset}: {len(federation.clients)} clients, {images} images, width {cfg.model.width},"
            f" {cfg.run.precision}"
        )
        round_times.compare(loops, title, args)


if __name__ == "__main__":
    main()
