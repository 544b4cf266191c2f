"""Nearest codewords: the search alone (``vq_assign``) and the whole forward of a VQ layer (``vq``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uefl_kernels import backend, vq, vq_assign

from ..registry import Call, Case, Gate, Op, needs

Inputs = tuple[torch.Tensor, torch.Tensor]
CHECKED_PRODUCTS = 1 << 29  # about this many float64 differences are evaluated to check one case


@dataclass(frozen=True)
class Search(Case):
    """N rows of D elements against K codewords of D / segments elements."""

    n: int
    dim: int
    k: int
    segments: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition per row, codeword and element."""
        return 2 * self.n * self.k * self.dim

    @property
    def bytes(self) -> int:
        """float32 rows and codewords read once, int64 indices written once."""
        return 4 * self.n * self.dim + 4 * self.k * self.dim // self.segments + 8 * self.n * self.segments


def gaussian(case: Search, device: str) -> Inputs:
    """x [N, D] and a shared codebook [K, d], standard normal, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.n, case.dim, generator=generator)
    return x.to(device), torch.randn(case.k, case.dim // case.segments, generator=generator).to(device)


def wrong_rate(inputs: Inputs) -> Callable[[torch.Tensor], float]:
    """Share of indices that are not the float64 argmin, over all rows or an even sample of those of a large case."""
    x, codebook = inputs
    products = x.numel() * len(codebook)
    checked = torch.arange(0, len(x), max(1, products // CHECKED_PRODUCTS), device=x.device)
    with backend("reference"):
        right = vq_assign(x[checked], codebook)
    return lambda found: float((found.reshape(-1, right.shape[1])[checked] != right).double().mean())


def rows_of(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, codebook.shape[-1])


def forced(name: str, op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Inputs], Call]:
    """Ours on one backend of the GPU."""

    def prepare(inputs: Inputs) -> Call:
        needs("cuda", inputs[0])

        def call() -> torch.Tensor:
            with backend(name):
                return op(*inputs)

        return call

    return prepare


def matmul(inputs: Inputs) -> Call:
    """The ruler: the bare product of the same shape, which no search that multiplies everything should be slower than."""
    x, codebook = inputs

    def call() -> None:
        torch.matmul(rows_of(x, codebook), codebook.T)

    return call


def cdist(inputs: Inputs) -> Call:
    x, codebook = inputs
    return lambda: torch.cdist(rows_of(x, codebook), codebook).argmin(1)


def addmm(inputs: Inputs) -> Call:
    x, codebook = inputs
    return lambda: torch.addmm(codebook.square().sum(1) / 2, rows_of(x, codebook), codebook.T, alpha=-1).argmin(1)


def faiss(inputs: Inputs) -> Call:
    import faiss

    x, codebook = inputs
    needs("cpu", x)
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatL2(codebook.shape[1])
    index.add(codebook.numpy())
    rows = rows_of(x, codebook).numpy()
    return lambda: torch.from_numpy(index.search(rows, 1)[1])


def scikit_learn(inputs: Inputs) -> Call:
    from sklearn.metrics import pairwise_distances_argmin

    x, codebook = inputs
    needs("cpu", x)
    rows, codes = rows_of(x, codebook).numpy(), codebook.numpy()
    return lambda: torch.from_numpy(pairwise_distances_argmin(rows, codes))


def eager_vq(inputs: Inputs) -> Call:
    x, codebook = inputs

    def call() -> torch.Tensor:
        rows = rows_of(x, codebook)
        indices = torch.cdist(rows, codebook).argmin(1)
        quantized = codebook[indices]
        torch.nn.functional.mse_loss(quantized, rows)
        torch.bincount(indices, minlength=codebook.shape[0])
        return indices

    return call


def vector_quantize_pytorch(inputs: Inputs) -> Call:
    from vector_quantize_pytorch import VectorQuantize

    x, codebook = inputs
    k, d = codebook.shape
    layer = VectorQuantize(dim=d, codebook_size=k, rotation_trick=False).to(x.device).eval()
    layer.codebook = codebook
    rows = rows_of(x, codebook)[None]

    @torch.no_grad()
    def call() -> torch.Tensor:
        indices: torch.Tensor = layer(rows)[1]
        return indices

    return call


GATE = Gate("wrong indices", limit=0.0, against=wrong_rate)
SMOKE = Search(300, 16, 24, segments=2)

OPS = {
    "vq_assign": Op(
        cases=(
            Search(200_000, 64, 256),
            Search(200_000, 64, 1024),
            Search(50_000, 512, 256),
            Search(100_000, 256, 1024),
            Search(65_536, 64, 8192),
            Search(9216, 512, 64),
            Search(32_768, 64, 32),
            Search(1_000_000, 16, 256),
            Search(4096, 128, 128, segments=4),
        ),
        smoke=SMOKE,
        inputs=gaussian,
        providers={
            "uefl": lambda inputs: lambda: vq_assign(*inputs),
            "uefl-fast": lambda inputs: lambda: vq_assign(*inputs, precision="fast"),
            "uefl-triton": forced("triton", vq_assign),
            "matmul": matmul,
            "addmm+argmin": addmm,
            "cdist+argmin": cdist,
            "faiss": faiss,
            "scikit-learn": scikit_learn,
        },
        gate=GATE,
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
        loose=("uefl-fast",),
    ),
    "vq": Op(
        cases=(Search(9216, 512, 64), Search(9216, 64, 32, segments=4), Search(200_000, 64, 256)),
        smoke=SMOKE,
        inputs=gaussian,
        providers={
            "uefl": lambda inputs: lambda: vq(*inputs).indices,
            "uefl-triton": forced("triton", lambda x, codebook: vq(x, codebook).indices),
            "matmul": matmul,
            "eager": eager_vq,
            "vector-quantize-pytorch": vector_quantize_pytorch,
        },
        gate=GATE,
        bytes=lambda case: case.bytes + 4 * case.n * case.dim + 8 * case.k,  # the codewords and the counts written once
        flops=lambda case: case.flops,
    ),
}
