"""What is measured: for every op its shapes, inputs, ourselves and the peers, and the least work that the answer takes.

A provider is prepared once with the inputs and returns the call to be timed; the call returns the indices, or None where it
gives no answer and is only a ruler. One whose library is not installed, or that does not fit the device, raises ImportError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uefl_kernels import backend, vq, vq_assign

Call = Callable[[], torch.Tensor | None]
Provider = Callable[[torch.Tensor, torch.Tensor], Call]


@dataclass(frozen=True)
class Shape:
    """N rows of D elements against K codewords of D / segments elements."""

    n: int
    dim: int
    k: int
    segments: int = 1

    @property
    def name(self) -> str:
        """NxDxK, and xS with several segments: what ``--shape`` takes."""
        suffix = f"x{self.segments}" if self.segments > 1 else ""
        return f"{self.n}x{self.dim}x{self.k}{suffix}"

    @property
    def search_flops(self) -> int:
        """A multiplication and an addition per row, codeword and element."""
        return 2 * self.n * self.k * self.dim

    @property
    def search_bytes(self) -> int:
        """float32 rows and codewords read once, int64 indices written once."""
        return 4 * self.n * self.dim + 4 * self.k * self.dim // self.segments + 8 * self.n * self.segments


@dataclass(frozen=True)
class Op:
    """One row of the registry; ``providers`` begins with ourselves."""

    shapes: tuple[Shape, ...]
    inputs: Callable[[Shape, str], tuple[torch.Tensor, torch.Tensor]]
    providers: dict[str, Provider]
    bytes: Callable[[Shape], int]
    flops: Callable[[Shape], int]


SMOKE = Shape(300, 16, 24, segments=2)


def gaussian(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, D] and a shared codebook [K, d], standard normal, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.n, shape.dim, generator=generator)
    return x.to(device), torch.randn(shape.k, shape.dim // shape.segments, generator=generator).to(device)


def float64_indices(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """The definition of the right answer."""
    with backend("reference"):
        return vq_assign(x, codebook)


def _rows(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, codebook.shape[-1])


def _on_cpu(x: torch.Tensor) -> None:
    if x.device.type != "cpu":
        raise ImportError("runs on the CPU only")


def _forced(name: str, op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Provider:
    def prepare(x: torch.Tensor, codebook: torch.Tensor) -> Call:
        if x.device.type != "cuda":
            raise ImportError("needs an NVIDIA GPU")

        def call() -> torch.Tensor:
            with backend(name):
                return op(x, codebook)

        return call

    return prepare


def _matmul(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    """The ruler: the bare product of the same shape, which no search that multiplies everything should be slower than."""

    def call() -> None:
        torch.matmul(_rows(x, codebook), codebook.T)

    return call


def _cdist(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    return lambda: torch.cdist(_rows(x, codebook), codebook).argmin(1)


def _addmm(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    return lambda: torch.addmm(codebook.square().sum(1) / 2, _rows(x, codebook), codebook.T, alpha=-1).argmin(1)


def _faiss(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    import faiss

    _on_cpu(x)
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatL2(codebook.shape[1])
    index.add(codebook.numpy())
    rows = _rows(x, codebook).numpy()
    return lambda: torch.from_numpy(index.search(rows, 1)[1])


def _sklearn(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    from sklearn.metrics import pairwise_distances_argmin

    _on_cpu(x)
    rows, codes = _rows(x, codebook).numpy(), codebook.numpy()
    return lambda: torch.from_numpy(pairwise_distances_argmin(rows, codes))


def _eager_vq(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    def call() -> torch.Tensor:
        rows = _rows(x, codebook)
        indices = torch.cdist(rows, codebook).argmin(1)
        quantized = codebook[indices]
        torch.nn.functional.mse_loss(quantized, rows)
        torch.bincount(indices, minlength=codebook.shape[0])
        return indices

    return call


def _vector_quantize_pytorch(x: torch.Tensor, codebook: torch.Tensor) -> Call:
    from vector_quantize_pytorch import VectorQuantize

    k, d = codebook.shape
    layer = VectorQuantize(dim=d, codebook_size=k, rotation_trick=False).to(x.device).eval()
    layer.codebook = codebook
    rows = _rows(x, codebook)[None]

    @torch.no_grad()
    def call() -> torch.Tensor:
        indices: torch.Tensor = layer(rows)[1]
        return indices

    return call


REGISTRY: dict[str, Op] = {
    "vq_assign": Op(
        shapes=(
            Shape(200_000, 64, 256),
            Shape(200_000, 64, 1024),
            Shape(50_000, 512, 256),
            Shape(100_000, 256, 1024),
            Shape(9216, 512, 64),
        ),
        inputs=gaussian,
        providers={
            "uefl": lambda x, codebook: lambda: vq_assign(x, codebook),
            "uefl-fast": lambda x, codebook: lambda: vq_assign(x, codebook, precision="fast"),
            "uefl-triton": _forced("triton", vq_assign),
            "matmul": _matmul,
            "addmm+argmin": _addmm,
            "cdist+argmin": _cdist,
            "faiss": _faiss,
            "scikit-learn": _sklearn,
        },
        bytes=lambda shape: shape.search_bytes,
        flops=lambda shape: shape.search_flops,
    ),
    "vq": Op(
        shapes=(Shape(9216, 512, 64), Shape(9216, 64, 32, segments=4), Shape(200_000, 64, 256)),
        inputs=gaussian,
        providers={
            "uefl": lambda x, codebook: lambda: vq(x, codebook).indices,
            "uefl-triton": _forced("triton", lambda x, codebook: vq(x, codebook).indices),
            "matmul": _matmul,
            "eager": _eager_vq,
            "vector-quantize-pytorch": _vector_quantize_pytorch,
        },
        bytes=lambda shape: shape.search_bytes + 4 * shape.n * shape.dim + 8 * shape.k,  # the codewords and the counts written once
        flops=lambda shape: shape.search_flops,
    ),
}
