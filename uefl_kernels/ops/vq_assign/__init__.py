"""``vq_assign``: the index of the nearest codeword, exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..._checks import check_search, packed
from ..._library import define, define_triton, resolve
from . import fallback


class Arguments(NamedTuple):
    """Arguments of the op."""

    x: torch.Tensor
    """``[..., D]``"""
    codebook: torch.Tensor
    """``[K, d]`` or ``[S, K, d]``"""
    metric: str
    exact: bool


def _fallback(given: Arguments) -> torch.Tensor:
    fallback.require_valid("vq_assign", given.codebook)
    return fallback.search(given.x, given.codebook, given.metric)


def _fake(given: Arguments) -> torch.Tensor:
    x = given.x
    return x.new_empty(*x.shape[:-1], x.shape[-1] // given.codebook.shape[-1], dtype=torch.int64)


define(__name__, "vq_assign", Arguments, ["indices"], fake=_fake, fallback=_fallback)
define_triton("vq_assign")


def vq_assign(
    x: torch.Tensor, codebook: torch.Tensor, *, metric: str = "l2", precision: str = "exact"
) -> torch.Tensor:
    """Return the index of the nearest codeword for each segment of each row.

    The result is the argmin of the float64 distance of the given values, summed in the order of the elements.
    Ties go to the lowest index. The result is the same on every backend, for any batch size and number of
    threads.

    A row with NaN gets index 0. Under ``"l2"``, a row with an infinity, or with a length above about 2^511,
    gets index 0, too, because its distance to every codeword is infinite. Differences below about 2^-537 have
    squares of zero, so such distances are ties. Under ``"cosine"``, a codeword with a length below about
    2^-537 counts as zero. Multiply such data by a power of two.

    Args:
        x: ``[..., D]``, float32, bfloat16, float16 or float64; any strides. D is cut into S = D / d
            contiguous segments.
        codebook: ``[K, d]``, shared by all segments, or ``[S, K, d]``, one codebook for each segment; any
            dtype that x may have, also a different one. It must be finite, and at most 2^480 in float64, so
            that no sum of squares overflows. This is checked on the CPU only, because the host would wait for
            a GPU. A GPU never chooses a codeword with a NaN or an infinity if another codeword is finite.
        metric: ``"l2"`` (squared Euclidean distance) or ``"cosine"`` (the codewords' scale does not matter).
        precision: ``"exact"`` as above, or ``"fast"``: the codeword with the best score of the first phase,
            without a proof. On the CPU this phase is float32; with AMX it is three bfloat16 products, which
            keep about 16 bits. On a GPU it is one float16 product, as accurate as TF32, or float32 in CUDA
            C++ if tensor cores cannot run the call. If a row or codebook is too large for float16, with a
            length above about 2^60, a GPU returns the exact index.

    Returns:
        indices ``[..., S]``, int64. No gradient.

    Raises:
        TypeError: a dtype that is not one of the four.
        ValueError: shapes, devices, metric or precision that do not fit.
        RuntimeError: the codebook is not finite or beyond 2^480, or a forced backend is absent.

    Source: van den Oord et al. 2017, "Neural Discrete Representation Learning", eq. 1.

    Equivalent to (``[K, d]``, "l2", but without an N x K matrix)::

        rows = x.reshape(*x.shape[:-1], -1, d).double()
        ((rows.unsqueeze(-2) - codebook.double()) ** 2).sum(-1).argmin(-1)
    """
    check_search("vq_assign", x, codebook, metric, precision)
    codebook = packed("vq_assign", "codebook", codebook)
    given = Arguments(x, codebook, metric, precision == "exact")
    indices: torch.Tensor = resolve("vq_assign", x)(*given)
    return indices
