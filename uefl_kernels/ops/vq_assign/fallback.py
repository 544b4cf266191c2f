"""``vq_assign`` where no kernel is compiled: a blocked matrix product, and the definition for undecided rows.

The product ranks the codewords of a row by the score s = |c|^2 / 2 - x.c (cosine: s = -x.c). For l2, s is
half the squared distance minus |x|^2 / 2. A bound on all rounding errors gives a gap: if two scores differ by
more, the definition orders the two codewords in the same way. A row is decided if its best score is ahead of
all others by this gap. For other rows the definition (``distances.py``) is evaluated on the few codewords
within the bound, or on all codewords if they are many or if NaN or an overflow leaves no bound. So the
indices agree with the definition.
"""

from __future__ import annotations

import torch

from . import distances
from .distances import require_valid as require_valid

# scores of a block of rows: some megabytes, which stay in the cache between passes
_BLOCK_ELEMENTS = 1 << 21
_FEWEST_ROWS = 16
_FEW = 8  # most codewords of a row that are evaluated one by one
_PAIR_ELEMENTS = 1 << 20  # most elements of the float64 differences in memory at one time
# magnitudes of a codebook with products far from the limits of float32
_NARROW = 1e-12, 1e12
_LONGEST = 1 << 16  # elements of a codeword that float32 can add up: (d + 6) 2^-24 must be far below 1


def search(x: torch.Tensor, codebook: torch.Tensor, metric: str) -> torch.Tensor:
    """Run ``vq_assign`` for a finite codebook."""
    x, codebook = x.detach(), codebook.detach()
    d = codebook.shape[-1]
    segments = x.reshape(-1, x.shape[-1] // d, d)
    codebooks = [codebook] * segments.shape[1] if codebook.dim() == 2 else list(codebook)
    shared = _PackedCodebook(codebook, metric, x.dtype) if codebook.dim() == 2 else None
    found = [
        (shared or _PackedCodebook(own, metric, x.dtype)).nearest(segments[:, s])
        for s, own in enumerate(codebooks)
    ]
    return torch.stack(found, 1).reshape(*x.shape[:-1], len(codebooks))


class _PackedCodebook:
    """One codebook [K, d], ready for the product."""

    def __init__(self, codebook: torch.Tensor, metric: str, rows: torch.dtype) -> None:
        self.metric = metric
        self.exact = distances.unit(codebook.double()) if metric == "cosine" else codebook.double()
        peak = self.exact.abs().amax()
        single = (
            torch.float64 not in (rows, codebook.dtype)
            and codebook.shape[1] <= _LONGEST
            and _full_float32(codebook.device)
            and bool((peak >= _NARROW[0]) & (peak <= _NARROW[1]))
        )
        self.dtype = torch.float32 if single else torch.float64
        middle = self.exact.mean(0).to(self.dtype)
        # Distances do not change when rows and codewords are moved by the same vector, but the bound grows
        # with their lengths.
        self.middle = middle if metric == "l2" and bool(middle.abs().amax() > peak / 8) else None
        centered = self.exact if self.middle is None else self.exact - self.middle
        norms = centered.square().sum(1)
        self.centered = centered.to(self.dtype).T
        self.halves = (norms / 2 if metric == "l2" else torch.zeros_like(norms)).to(self.dtype)
        self.radius = _above(norms.amax().sqrt(), codebook.shape[1]).item()

    def nearest(self, rows: torch.Tensor) -> torch.Tensor:
        """Search rows [n, d] -> indices [n]."""
        k = len(self.halves)
        indices = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        step = max(_FEWEST_ROWS, _BLOCK_ELEMENTS // k)
        few, many = [], []  # of the rows that are not decided: (row, codeword) pairs, and rows
        for start in range(0, len(rows), step):
            scores, bound = self._scores(rows[start : start + step])
            best, index = scores.min(1)
            indices[start : start + step] = index
            limit = best + bound
            ahead = scores.scatter_(1, index[:, None], torch.inf).amin(1) > limit
            row = (~ahead).nonzero()[:, 0]
            if len(row) == 0:
                continue
            near = ~(scores[row] > limit[row, None])  # NaN is near
            near[torch.arange(len(row), device=row.device), index[row]] = True
            is_few = (near.sum(1) <= _FEW) & limit[row].isfinite()
            pairs = near[is_few].nonzero()
            few.append(torch.stack([row[is_few][pairs[:, 0]] + start, pairs[:, 1]]))
            many.append(row[~is_few] + start)
        if few:
            self._decide_pairs(rows, torch.cat(few, 1), indices)
            self._decide_rows(rows, torch.cat(many), indices)
        return indices

    def _scores(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores [n, K] of rows [n, d], and for each row [n] the least difference that decides.

        With u the unit roundoff, R the radius of the centered codebook and |x| the norm of the centered row:
        centering rounds every element of x and c once. |c|^2 / 2, the sum of d products and their difference
        are off by at most (d + 6) u (R^2 + |x| R), in any order and with or without FMA. Values below the
        smallest normal number, also if they are flushed to zero, add less than the last term. The definition
        itself is off by (d + 3) 2^-53 of a distance, which is at most (|x| + R)^2. The difference of two
        scores is off by at most twice the error of one.
        """
        d = rows.shape[1]
        centered = rows.to(self.dtype) if self.middle is None else rows.to(self.dtype) - self.middle
        with torch.autocast(rows.device.type, enabled=False):
            scores = torch.addmm(self.halves, centered, self.centered, alpha=-1)
        info = torch.finfo(self.dtype)
        norm, r = _above(torch.linalg.vector_norm(centered, dim=1), d).double(), self.radius
        bound = (
            (norm + r) * (r * (d + 6) * info.eps)
            + (norm + r).square() * ((d + 3) * 2.0**-52)
            + (norm + r + 1) * (64 * d * info.tiny)
        )
        # with room for rounding here and in the sum with the best score
        return scores, (bound * 1.1).to(self.dtype)

    def _decide_pairs(self, rows: torch.Tensor, pairs: torch.Tensor, indices: torch.Tensor) -> None:
        """Evaluate the definition for pairs [2, P] of rows and codewords, in order."""
        row, codeword = pairs
        if len(row) == 0:
            return
        step = max(1, _PAIR_ELEMENTS // rows.shape[1])
        split = zip(row.split(step), codeword.split(step), strict=True)
        distances = torch.cat([self._distances(rows[r].double(), self.exact[c]) for r, c in split])
        asked, number = row.unique_consecutive(return_inverse=True)
        least = torch.full_like(asked, torch.inf, dtype=torch.float64).scatter_reduce_(
            0, number, distances, "amin"
        )
        first = torch.where(distances == least[number], codeword, len(self.halves))
        indices[asked] = torch.full_like(asked, len(self.halves)).scatter_reduce_(0, number, first, "amin")

    def _distances(self, rows: torch.Tensor, codewords: torch.Tensor) -> torch.Tensor:
        """Compute ``reference.distances`` of rows and codewords [P, d].

        This method needs one operation per element, and ``reference.distances`` several.
        """
        difference = rows - codewords
        terms = difference * difference if self.metric == "l2" else -(rows * codewords)
        total = terms.new_zeros(len(terms))
        for term in terms.T.contiguous().unbind():
            total += term
        return total

    def _decide_rows(self, rows: torch.Tensor, asked: torch.Tensor, indices: torch.Tensor) -> None:
        """Evaluate the definition for all codewords."""
        if len(asked) == 0:
            return
        for some in asked.split(max(1, distances.BLOCK_ELEMENTS // len(self.halves))):
            indices[some] = distances.argmin(rows[some].double(), self.exact, self.metric)


def _above(norm: torch.Tensor, d: int) -> torch.Tensor:
    """Return an upper bound on the norm of vectors of d elements, from the computed norm.

    Squares, each below tiny, may have underflowed.
    """
    above: torch.Tensor = norm * 1.01 + d * 4 * float(torch.finfo(norm.dtype).tiny) ** 0.5
    return above


def _full_float32(device: torch.device) -> bool:
    """Return whether a float32 product keeps 24 bits on a device.

    Users may allow TF32 or bfloat16 for speed.
    """
    backends = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    return backends.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined, no-any-return]
