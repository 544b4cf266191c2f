"""``kmeans_step`` in Triton, by the search of ``vq_assign``.

The search adds each row to its cluster while the row is in the cache.

With ``TRITON_INTERPRET=1`` it also runs on CPU tensors. The tests interpret and compile it. On an H100 it was
right in small cases; it has not been timed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from ..vq_assign.triton import assign
from ..vq_assign.triton_epilogue import Epilogue
from . import composed

_ROWS = 64


@triton.jit(do_not_specialize=["n"])
def _squares(
    x,
    centers,
    labels,
    squares,
    n: tl.int64,
    stride_n: tl.int64,
    stride_d: tl.int64,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute |x - center|^2 of each row in the order of ``composed.square_norms``.

    Launch the kernel without FMA.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels + row, mask=row < n, other=0)
    lane = tl.arange(0, 8)
    total = tl.zeros((ROWS, 8), tl.float64)
    for start in tl.range(0, D, 8):
        j = start + lane
        inside = (row < n)[:, None] & (j < D)[None, :]
        value = tl.load(x + row[:, None] * stride_n + j[None, :] * stride_d, mask=inside, other=0.0).to(
            tl.float64
        )
        difference = value - tl.load(centers + label[:, None] * D + j[None, :], mask=inside, other=0.0).to(
            tl.float64
        )
        total += difference * difference
    first, second = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, 4)), (0, 2, 1)))
    first, second = tl.split(tl.permute(tl.reshape(first + second, (ROWS, 2, 2)), (0, 2, 1)))
    first, second = tl.split(first + second)
    tl.store(squares + row, first + second, mask=row < n)


def kmeans_step(given: composed.Arguments) -> composed.Result:
    """Return labels, sums, masses and inertia.

    Inertia reads x once more, so a fit computes it last.
    """
    x, centers, weights, middle, scale, mass_scale, with_inertia = given
    k, d = centers.shape
    centers = centers.contiguous()
    weights = None if weights is None else weights.contiguous()
    sums = torch.zeros(k, d, dtype=torch.int64, device=x.device)
    masses = sums.new_zeros(k)
    epilogue = Epilogue(
        masses,
        sums=sums,
        scales=scale.contiguous(),
        middle=middle.contiguous(),
        weights=weights,
        mass_scale=mass_scale,
    )
    labels = assign(x, centers, "l2", True, epilogue)[0][:, 0]
    inertia = middle.new_zeros(())
    if with_inertia and len(x) > 0:
        squares = middle.new_empty(len(x))
        with torch.cuda.device_of(x):
            _squares[(triton.cdiv(len(x), _ROWS),)](
                x, centers, labels, squares, len(x), *x.stride(), d, _ROWS, enable_fp_fusion=False
            )
        inertia = composed.tree_sum(squares if weights is None else weights * squares)
    return labels.contiguous(), sums, masses, inertia
