"""``vq_forward`` in Triton.

The search of ``vq_assign`` is followed by ``triton_epilogue.py``, and by a second phase for open rows.

Under ``TRITON_INTERPRET=1`` also on CPU tensors. Interpreted and compiled in the tests; right on an H100 in
small cases, not timed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# No postponed annotations here: Triton reads the types of the arguments.
import torch
import triton
import triton.language as tl

from ...vq_assign.triton import _rows, assign
from ...vq_assign.triton_epilogue import Epilogue, _begin, _fixed
from .composed import Arguments, Result

# Rows and the largest number of elements of a tile; not tuned on a GPU yet.
_ROWS, _ELEMENTS = 64, 64


def vq_forward(given: Arguments) -> Result:
    """Return quantized, indices, error, counts, largest and fixed."""
    x, codebook, scales, metric, exact = given
    count, d = codebook.shape[:-1].numel(), codebook.shape[-1]
    codebook = codebook.contiguous()
    with_sums = 0 if scales is None else count
    counts = torch.zeros(count, dtype=torch.int64, device=x.device)
    largest, fixed = counts.new_zeros(with_sums), counts.new_zeros(with_sums, d)
    quantized = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rounded = codebook.to(x.dtype) if codebook.dtype != x.dtype else None
    sums = Epilogue(sums=fixed, scales=scales, largest=largest) if with_sums else Epilogue()
    epilogue = sums._replace(counts=counts, codewords=codebook, rounded=rounded, quantized=quantized)
    indices, errors = assign(x, codebook, metric, exact, epilogue)
    return quantized, indices, errors.sum(), counts, largest, fixed


@triton.jit(do_not_specialize=["outputs", "outer", "segments", "codebooks", "k"])
def _add(
    x,
    indices,
    scales,
    wanted,
    fixed,
    outputs: tl.int64,
    outer: tl.int64,
    segments: tl.int64,
    codebooks: tl.int64,
    k: tl.int64,
    stride_a: tl.int64,
    stride_b: tl.int64,
    stride_d: tl.int64,
    FLAT: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    if tl.load(wanted) != 0:
        output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        valid = output < outputs
        codebook = output % codebooks
        begin = _begin(output, codebook, segments, codebooks, outer, stride_a, stride_b, stride_d, FLAT, D)
        code = codebook * k + tl.load(indices + output, mask=valid, other=0)
        scale = tl.load(scales + code, mask=valid, other=0.0)
        valid = valid & (scale > 0)
        for start in tl.range(0, D, ELEMENTS):
            j = start + tl.arange(0, ELEMENTS)
            inside = valid[:, None] & (j < D)[None, :]
            value = tl.load(x + begin[:, None] + j[None, :] * stride_d, mask=inside, other=0.0).to(tl.float64)
            tl.atomic_add(
                fixed + code[:, None] * D + j[None, :],
                _fixed(value * scale[:, None]),
                mask=inside,
                sem="relaxed",
            )


def add(
    x: torch.Tensor, codebook: torch.Tensor, indices: torch.Tensor, scales: torch.Tensor, fixed: torch.Tensor
) -> None:
    """Add as ``reference.add`` does.

    Rows of codewords with scale 0 are not read; if all are 0 every program ends at once.
    """
    k, d = codebook.shape[-2:]
    outputs = indices.numel()
    if outputs == 0:
        return
    rows, flat, strides = _rows(x, codebook)
    shape = (outputs, rows.shape[1], indices.shape[-1], len(fixed) // k, k, *strides)
    with torch.cuda.device_of(x):
        _add[(triton.cdiv(outputs, _ROWS),)](
            rows,
            indices,
            scales,
            (scales > 0).any().int(),
            fixed,
            *shape,
            flat,
            d,
            _ROWS,
            min(_ELEMENTS, 1 << (d - 1).bit_length()),
        )
