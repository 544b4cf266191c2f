"""The resident network of an arm on one device, with its precision, normalization and augmentation."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from ..data.rotate import augment
from ..devices import is_gpu
from ..engines.base import Message
from ..models.flat import FlatModule
from ..models.normalization import normalization, normalized
from ..seeds import derive, seeded
from .recording import is_static, recorder_of

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm, Context
    from ..data.federation import Federation
    from ..data.inputs import Inputs
    from ..data.settings import Data

_PRIVATE = {"values": "net.values", "buffers": "net.buffers"}
"""names of the private tensors of the network in the state of a client"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h


class Workspace:
    """One network, set in place for each client in turn, with its precision and image transforms.

    Args:
        algorithm: bound to its context; builds the network.
        federation: the clients, for the mean and the deviation of their pixels.
    """

    def __init__(
        self, algorithm: Algorithm, data: Data, federation: Federation, device: torch.device
    ) -> None:
        self.algorithm = algorithm
        self.context: Context = algorithm.context
        self.device = device
        if device.type == "cpu":
            _keep_freed_memory()
        self.flat = self._built(self.context.seed)
        self.net = self.flat.module
        masks = self.flat.private(algorithm.is_private)
        self._rest = None if masks is None else [mask.nonzero().flatten() for mask in masks]
        self._shared = None if masks is None else [(~mask).nonzero().flatten() for mask in masks]
        self.autocast = uses_bf16(self.context.run.precision, device)
        static = self.context.run.cuda_graphs and is_static(algorithm)
        self.recorder = recorder_of(device) if static else None
        self.augmentation = data.augment
        inputs = federation.inputs
        mean, std = normalization(data.normalize, federation.mean, federation.std, inputs)
        self._mean, self._std = mean.to(device), std.to(device)
        self._variances = self._running("running_var")
        """positions of running variances among the shared ``buffers``"""
        self._noise = _noise(self.context.shape, inputs, mean, std).to(device)

    def initial(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Create a network and return the shared ``values`` and ``buffers``, and the private tensors.

        Every client starts with these private tensors.
        """
        flat = self._built(seed)
        return self._cut(flat, self._shared), {
            _PRIVATE[name]: tensor for name, tensor in self._private(flat).items()
        }

    def _built(self, seed: int) -> FlatModule:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            return FlatModule(self.algorithm.build_model(self.context.spec).to(self.device))

    def load(self, message: Message) -> None:
        """Put a model into the network."""
        self.flat.reset()
        flats = (self.flat.values.data, self.flat.buffers)
        for i, (name, flat) in enumerate(zip(("values", "buffers"), flats, strict=True)):
            if self._shared is None or self._rest is None:
                flat.copy_(message.tensors[name])
            else:
                flat[self._shared[i]] = message.tensors[name]
                flat[self._rest[i]] = message.private[_PRIVATE[name]]

    def shared(self) -> dict[str, torch.Tensor]:
        """Return ``values`` and ``buffers`` without the private tensors.

        Without private tensors, the result shares memory with the network.
        """
        return self._cut(self.flat, self._shared)

    def private(self) -> dict[str, torch.Tensor]:
        """Return the private tensors of the network in the form that is sent.

        The mapping is empty if nothing is private.
        """
        return {_PRIVATE[name]: tensor for name, tensor in self._private(self.flat).items()}

    def named(
        self, tensors: dict[str, torch.Tensor], private: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return copies of a model's weights by name, from its shared and private tensors."""
        self.load(Message(tensors, private=private))
        return {
            name: tensor.clone()
            for name, tensor in self.flat.named(self.flat.values.detach(), self.flat.buffers).items()
        }

    def private_names(self) -> list[str]:
        """Return the names of the private weights."""
        owners = dict(self.net.named_modules(remove_duplicate=False))  # a module may have two names
        weights = self.flat.named(self.flat.values.detach(), self.flat.buffers)
        return [name for name in weights if self.algorithm.is_private(name, owners[name.rpartition(".")[0]])]

    def extremes(
        self, tensors: Mapping[str, torch.Tensor], private: Mapping[str, torch.Tensor], predict: bool = True
    ) -> dict[str, float]:
        """Return the lowest running ``variance`` of a model, and outputs for one input of noise.

        The outputs are the largest ``logit`` and the largest output of any ``layer``, or NaN. The host waits
        for the device once.

        Args:
            tensors: shared ``values`` and ``buffers``.
            private: the private tensors to load with them.
            predict: whether to load the network and compute the outputs.
        """
        zero = torch.zeros(1, dtype=torch.float64, device=self.device)
        found = {"variance": torch.cat([tensors["buffers"][self._variances].double(), zero]).min()}
        if predict:
            outputs = []

            def keep(module: torch.nn.Module, inputs: object, output: object) -> None:
                if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
                    outputs.append(output.abs().max().double())

            hooks = [module.register_forward_hook(keep) for module in self.net.modules()]
            try:
                found["logit"] = self._logits(tensors, private).abs().max().double()
            finally:
                for hook in hooks:
                    hook.remove()
            found["layer"] = torch.stack([found["logit"], *outputs]).max()
        return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))

    @torch.no_grad()
    def _logits(
        self, tensors: Mapping[str, torch.Tensor], private: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        self.load(Message(dict(tensors), private=dict(private)))
        training = self.net.training
        self.net.eval()
        with torch.random.fork_rng(devices=[]), self.amp():
            logits: torch.Tensor = self.net(self.example)
        self.net.train(training)
        return logits

    @property
    def example(self) -> torch.Tensor:
        """Return one input of the network: noise, normalized."""
        return self.normalize(self._noise)

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize uint8 [B, C, H, W] to float32, channels-last.

        Other inputs are as in :func:`uefl.models.normalization.normalized`.
        """
        return normalized(images, self._mean, self._std)

    def prepared(self, images: torch.Tensor) -> torch.Tensor:
        """Augment and normalize training images ``[B, C, H, W]`` uint8 -> float32."""
        return self.normalize(augment(images, self.augmentation))

    def amp(self) -> AbstractContextManager[None]:
        """Return the autocast context of every forward pass.

        It caches no parameter in bfloat16: within a context of the caller, the copy would outlive the step.
        """
        kind = self.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.autocast, cache_enabled=False)

    def _cut(self, flat: FlatModule, index: list[torch.Tensor] | None) -> dict[str, torch.Tensor]:
        weights = {"values": flat.values.detach(), "buffers": flat.buffers}
        return (
            weights
            if index is None
            else {name: weight[i] for (name, weight), i in zip(weights.items(), index, strict=True)}
        )

    def _running(self, kind: str) -> torch.Tensor:
        floating = [(name, buffer) for name, buffer in self.net.named_buffers() if buffer.is_floating_point()]
        of_kind = [
            torch.full((buffer.numel(),), name.endswith(kind), device=self.device)
            for name, buffer in floating
        ]
        mask = torch.cat(of_kind) if of_kind else torch.zeros(0, dtype=torch.bool, device=self.device)
        return (mask if self._shared is None else mask[self._shared[1]]).nonzero().flatten()

    def _private(self, flat: FlatModule) -> dict[str, torch.Tensor]:
        return {} if self._rest is None else self._cut(flat, self._rest)


def fresh(algorithm: Algorithm, client: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Create the tensors of :meth:`~uefl.Algorithm.client_state`.

    The result depends only on the seed and the client.

    Raises:
        TypeError: a value is not a tensor.
    """
    with seeded(device, algorithm.context.seed, "server", "client_state", client):
        state = algorithm.client_state(client)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{type(algorithm).__name__}.client_state: {name!r} is of type {type(tensor).__name__};"
                " expected a tensor"
            )
    return {name: tensor.to(device) for name, tensor in state.items()}


def _noise(shape: tuple[int, ...], inputs: Inputs, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return one input of noise, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    if inputs.kind == "images":
        return torch.randint(256, (1, *shape), dtype=torch.uint8, generator=generator)
    if inputs.kind == "tokens":
        return torch.randint(inputs.vocabulary, (1, *shape), generator=generator)
    return mean + std * torch.randn(1, *shape, dtype=torch.float64, generator=generator)


def _keep_freed_memory() -> None:
    """Stop glibc from returning freed memory to the system.

    A training step allocates and frees tensors of megabytes. The system would map and clear the pages in
    every step: 5000 page faults per step of the demo, 8 % of its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest value that every version accepts
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Return True if the network computes in bfloat16 for a value of ``run.precision``.

    ``auto`` uses bfloat16 if the hardware supports it: AMX or AVX512_BF16 on a CPU, tensor cores on a GPU.
    oneDNN also runs it with AVX2, ten times slower than float32.
    """
    if precision != "auto":
        return precision == "bf16"
    if is_gpu(device):
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported()  # every CPU with AMX has AVX512_BF16
