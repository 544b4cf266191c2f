"""Measure nearest codewords: the search (``vq_assign``) and the forward pass of a VQ layer (``vq``).

The peers' settings were chosen by measurement on a Sapphire Rapids core: ``min(1).indices`` is faster than
``argmin(1)``, blocks that stay in the cache are faster than the whole product, and ``KMeans.predict`` is
faster than ``pairwise_distances_argmin``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from uefl_kernels import backend, vq, vq_assign

from ..cases import BenchmarkCase, Call, Gate, Op, ProviderUnavailable, needs

OpInputs = tuple[torch.Tensor, torch.Tensor]
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class SearchCase(BenchmarkCase):
    """N rows of D elements against K codewords of D / segments elements, both of one dtype."""

    n: int
    dim: int
    k: int
    segments: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.segments:
            raise ValueError(f"dim {self.dim} cannot be cut into {self.segments} segments")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not known, expected one of {', '.join(DTYPES)}")

    @property
    def flops(self) -> int:
        """Return the operations: a multiplication and an addition per row, codeword and element."""
        return 2 * self.n * self.k * self.dim

    @property
    def bytes(self) -> int:
        """Return the bytes of rows and codewords read once and int64 indices written once."""
        return (
            self.itemsize * (self.n * self.dim + self.k * self.dim // self.segments)
            + 8 * self.n * self.segments
        )

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return getattr(torch, self.dtype).itemsize


def gaussian(case: SearchCase, device: str) -> OpInputs:
    """Return x [N, D] and a shared codebook [K, d]: standard normal, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(case.n, case.dim, generator=generator)
    codebook = torch.randn(case.k, case.dim // case.segments, generator=generator)
    dtype = getattr(torch, case.dtype)
    return x.to(device, dtype), codebook.to(device, dtype)


def nearest(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Return the float64 argmin of every row.

    A float64 product finds it. Where rounding could change the result, the slow definition decides.
    """
    rows, codewords = rows_of(x, codebook).double(), codebook.double()
    half_norms, longest = codewords.square().sum(1) / 2, codewords.norm(dim=1).max()
    indices = torch.empty(len(rows), dtype=torch.int64, device=x.device)
    height = max(1, (1 << (20 if x.device.type == "cpu" else 26)) // len(codewords))
    for block, found in zip(rows.split(height), indices.split(height), strict=True):
        scores = torch.addmm(half_norms, block, codewords.T, alpha=-1)
        best, found[:] = scores.min(1)
        slack = 1e-12 * longest * (longest + block.norm(dim=1))  # thousands of times the rounding of a score
        close = (scores <= (best + slack)[:, None]).sum(1) > 1
        if close.any():
            with backend("reference"):
                found[close] = vq_assign(block[close], codewords).squeeze(1)
    return indices


def wrong_rate(inputs: OpInputs) -> Callable[[torch.Tensor], float]:
    """Return the share of indices that are not the float64 argmin."""
    right = nearest(*inputs)
    return lambda found: float((found.long().flatten() != right).double().mean())


def rows_of(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, codebook.shape[-1])


def forced(name: str, op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[OpInputs], Call]:
    """Run our kernel on one backend of the GPU."""

    def prepare(inputs: OpInputs) -> Call:
        needs("cuda", inputs[0])

        def call() -> torch.Tensor:
            with backend(name):
                return op(*inputs)

        return call

    return prepare


def matmul(inputs: OpInputs) -> Call:
    """Run the plain matrix product of the same shape: a lower bound."""
    x, codebook = inputs

    def call() -> None:
        torch.matmul(rows_of(x, codebook), codebook.T)

    return call


def block_rows(codebook: torch.Tensor) -> int:
    """Return the number of rows of a block.

    The scores of a block fill half of the second-level cache of every core. A block has at least 256 rows for
    each thread, because the product of fewer rows is slow.
    """
    return torch.get_num_threads() * max(256, (1 << 18) // len(codebook))


def blocked_matmul(inputs: OpInputs) -> Call:
    """Multiply in blocks that reuse one buffer, so nothing of size N x K is stored: a stricter lower bound.

    A search does these products and then compares.
    """
    x, codebook = inputs
    needs("cpu", x)
    block = torch.empty(block_rows(codebook), len(codebook), dtype=x.dtype)

    def call() -> None:
        for rows in rows_of(x, codebook).split(len(block)):
            torch.mm(rows, codebook.T, out=block[: len(rows)])

    return call


def cdist(inputs: OpInputs) -> Call:
    x, codebook = inputs
    return lambda: torch.cdist(rows_of(x, codebook), codebook).min(1).indices


def addmm(inputs: OpInputs) -> Call:
    """Compute |c|^2 / 2 - x c, the fastest composition of torch that we know.

    It runs in blocks on the CPU, and at once on a GPU.
    """
    x, codebook = inputs

    def call() -> torch.Tensor:
        rows, half_norms = rows_of(x, codebook), codebook.square().sum(1) / 2
        indices = torch.empty(len(rows), dtype=torch.int64, device=x.device)
        height = block_rows(codebook) if x.device.type == "cpu" else len(rows)
        for block, found in zip(rows.split(height), indices.split(height), strict=True):
            found.copy_(torch.addmm(half_norms, block, codebook.T, alpha=-1).min(1).indices)
        return indices

    return call


def faiss(inputs: OpInputs) -> Call:
    """Search an index that is built beforehand.

    Blocks of 512 queries instead of 4096 make it about a tenth faster.
    """
    import faiss

    x, codebook = inputs
    needs("cpu", x)
    faiss.omp_set_num_threads(torch.get_num_threads())
    faiss.cvar.distance_compute_blas_query_bs = 512
    index = faiss.IndexFlatL2(codebook.shape[1])
    index.add(codebook.numpy())
    rows = rows_of(x, codebook).numpy()
    return lambda: torch.from_numpy(index.search(rows, 1)[1])


def scikit_learn(inputs: OpInputs) -> Call:
    """Run ``KMeans.predict`` with the codewords as centers."""
    from sklearn.cluster import KMeans

    x, codebook = inputs
    needs("cpu", x)
    rows, codewords = rows_of(x, codebook).numpy(), codebook.numpy()
    fitted = KMeans(len(codewords), init=codewords, n_init=1, max_iter=1).fit(codewords)
    fitted.cluster_centers_ = codewords  # the fit has rounded the codewords
    return lambda: torch.from_numpy(fitted.predict(rows))


def superkmeans(inputs: OpInputs) -> Call:
    """Run ``assign``, its exact search, which has no settings."""
    from superkmeans import SuperKMeans

    x, codebook = inputs
    needs("cpu", x)
    rows, codewords = rows_of(x, codebook).numpy(), codebook.numpy()
    model = SuperKMeans(*codewords.shape, n_threads=torch.get_num_threads())
    return lambda: torch.from_numpy(model.assign(rows, codewords))


def fastkmeans(inputs: OpInputs) -> Call:
    """Call ``predict`` in blocks with 4 MB of distances instead of 51,200 rows.

    Its interface takes CPU arrays only.
    """
    from fastkmeans import FastKMeans

    x, codebook = inputs
    needs("cpu", x)
    rows, codewords = rows_of(x, codebook).numpy(), codebook.numpy()
    model = FastKMeans(
        codewords.shape[1], len(codewords), gpu=False, chunk_size_data=max(256, (1 << 20) // len(codewords))
    )
    model.centroids = codewords
    return lambda: torch.from_numpy(model.predict(rows))


def flash_kmeans(inputs: OpInputs) -> Call:
    """Run its Triton search with its own tuning tables.

    The time leaves out the norms of x, which a fit computes once.
    """
    from flash_kmeans.assign_euclid_triton import euclid_assign_triton

    x, codebook = inputs
    needs("cuda", x)
    rows = rows_of(x, codebook)[None]
    norms = rows.float().square().sum(-1)
    return lambda: euclid_assign_triton(rows, codebook[None], norms)[0]


def replayed(provider: Callable[[OpInputs], Call]) -> Callable[[OpInputs], Call]:
    """Replay the same search as a CUDA graph, without the time of the host, which is most of a small call."""

    def prepare(inputs: OpInputs) -> Call:
        needs("cuda", inputs[0])
        call = provider(inputs)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found: torch.Tensor = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return found

        return replay

    return prepare


def compiled_addmm(inputs: OpInputs) -> Call:
    """Run ``addmm`` and ``argmin`` under ``torch.compile``, which generates kernels for the comparison."""
    x, codebook = inputs
    needs("cuda", x)

    @torch.compile(fullgraph=True)
    def search(rows: torch.Tensor, codewords: torch.Tensor) -> torch.Tensor:
        return torch.addmm(codewords.square().sum(1) / 2, rows, codewords.T, alpha=-1).argmin(1)

    rows = rows_of(x, codebook)
    return lambda: search(rows, codebook)


def faiss_gpu(inputs: OpInputs) -> Call:
    """Run ``knn_gpu`` of the CUDA wheels, with cuVS: it takes and returns tensors on the GPU."""
    x, codebook = inputs
    needs("cuda", x)
    import faiss
    import faiss.contrib.torch_utils  # makes it take tensors

    if not hasattr(faiss, "StandardGpuResources"):
        raise ProviderUnavailable("this build of faiss has no GPU; install faiss-gpu-cu13-cuvs")
    resources, rows = faiss.StandardGpuResources(), rows_of(x, codebook)
    distances = torch.empty(len(rows), 1, device=x.device)
    indices = torch.empty(len(rows), 1, dtype=torch.int64, device=x.device)

    def call() -> torch.Tensor:
        faiss.knn_gpu(resources, rows, codebook, 1, D=distances, I=indices, use_cuvs=True)
        return indices

    return call


def cuvs(inputs: OpInputs) -> Call:
    """Run its exact search.

    The index holds the codewords and their norms, and is built beforehand.
    """
    x, codebook = inputs
    needs("cuda", x)
    from cuvs.neighbors import brute_force

    rows = rows_of(x, codebook)
    index = brute_force.build(codebook, metric="sqeuclidean")

    def call() -> torch.Tensor:
        return torch.as_tensor(brute_force.search(index, rows, 1)[1], device=x.device)

    return call


def eager_vq(inputs: OpInputs) -> Call:
    """Compose the layer of torch ops around ``addmm``, the fastest search of torch that we know."""
    x, codebook = inputs
    search = addmm(inputs)

    def call() -> torch.Tensor:
        rows, indices = rows_of(x, codebook), search()
        quantized = codebook[indices]
        torch.nn.functional.mse_loss(quantized, rows)
        torch.bincount(indices, minlength=codebook.shape[0])
        return indices

    return call


def vector_quantize_pytorch(inputs: OpInputs) -> Call:
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
SMOKE = SearchCase(300, 16, 24, segments=2)
MILLION = 1_000_000

OPS = {
    "vq_assign": Op(
        cases=(
            SearchCase(200_000, 64, 256),
            SearchCase(200_000, 64, 1024),
            SearchCase(50_000, 512, 256),
            SearchCase(100_000, 256, 1024),
            SearchCase(65_536, 64, 8192),
            SearchCase(9216, 512, 64),
            SearchCase(32_768, 64, 32),
            SearchCase(MILLION, 16, 256),
            SearchCase(4096, 128, 128, segments=4),
            # the rows of a streaming codec
            SearchCase(16, 64, 1024),
            SearchCase(64, 128, 1024),
            SearchCase(96, 512, 256),
        ),
        # The last ones are the grid that flash-kmeans publishes: float16, a million and 65,536 rows.
        cuda_cases=(
            *(SearchCase(MILLION, 64, k) for k in (256, 1024, 8192)),
            *(SearchCase(MILLION, dim, k, dtype="float16") for dim, k in ((64, 256), (128, 1024))),
            *(
                SearchCase(1 << 20, dim, k, dtype="float16")
                for dim in (64, 128, 256, 512)
                for k in (256, 1024, 4096, 16384)
            ),
            *(
                SearchCase(1 << 16, dim, k, dtype="float16")
                for dim in (64, 128, 512)
                for k in (256, 1024, 4096)
            ),
        ),
        smoke=SMOKE,
        inputs=gaussian,
        providers={
            "uefl": lambda inputs: lambda: vq_assign(*inputs),
            "uefl-fast": lambda inputs: lambda: vq_assign(*inputs, precision="fast"),
            "uefl-graph": replayed(lambda inputs: lambda: vq_assign(*inputs)),
            "uefl-triton": forced("triton", vq_assign),
            "matmul": matmul,
            "matmul-blocked": blocked_matmul,
            "addmm+argmin": addmm,
            "cdist+argmin": cdist,
            "faiss-cpu": faiss,
            "scikit-learn": scikit_learn,
            "superkmeans": superkmeans,
            "fastkmeans": fastkmeans,
            "flash-kmeans": flash_kmeans,
            "flash-kmeans-graph": replayed(flash_kmeans),
            "compiled": compiled_addmm,
            "faiss-gpu": faiss_gpu,
            "cuvs": cuvs,
        },
        gate=GATE,
        bytes=lambda case: case.bytes,
        flops=lambda case: case.flops,
        loose=("uefl-fast",),
    ),
    "vq": Op(
        cases=(SearchCase(9216, 512, 64), SearchCase(9216, 64, 32, segments=4), SearchCase(200_000, 64, 256)),
        cuda_cases=(SearchCase(9216, 512, 64), *(SearchCase(MILLION, 64, k) for k in (256, 1024, 8192))),
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
        covers=("vq_forward",),  # vq calls it on a GPU
        # the codewords and the counts written once
        bytes=lambda case: case.bytes + case.itemsize * case.n * case.dim + 8 * case.k,
        flops=lambda case: case.flops,
    ),
}
