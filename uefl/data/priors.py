"""Class priors of unlabeled sets: draw, deal, estimate, smooth and check them.

``priors`` is always ``[M, K]`` float64: row m holds the class shares of set m, and sums to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InvalidPriors, UserError, listed

if TYPE_CHECKING:
    from .federation import Split

Matrix = npt.NDArray[np.float64]

_TOLERANCE = 1e-4
_RANK = 1e-6  # singular values below this share of the largest count as zero
_CONDITION = 1e3


# --- making them ------------------------------------------------------------------------------------------


def draw_priors(rng: np.random.Generator, sets: int, classes: int) -> Matrix:
    """Draw random priors with class m mod K dominant in set m.

    Weights are U(0.1, 1), and the dominant one is ten times that. Rows are normalized.
    """
    weights = rng.uniform(0.1, 1.0, (sets, classes))
    weights[np.arange(sets), np.arange(sets) % classes] *= 10
    return normalized(weights)


def normalized(weights: Matrix) -> Matrix:
    """Divide each row by its sum."""
    rows: Matrix = weights / weights.sum(1, keepdims=True)
    return rows


def shares(count: int, weights: Matrix) -> npt.NDArray[np.int64]:
    """Split ``count`` into whole numbers proportional to ``weights [n]``.

    The largest remainders get the rest, the first ones in a tie.

    The sum is exactly ``count``, so no image is lost.
    """
    exact = count * weights / weights.sum()
    whole = np.floor(exact).astype(np.int64)
    rest = count - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    result: npt.NDArray[np.int64] = whole
    return result


def shares_of_all(count: int, weights: Matrix) -> npt.NDArray[np.int64]:
    """Return :func:`shares` such that every client has at least one.

    A client without an image gets one from the largest share, if that share keeps one.
    """
    whole = shares(count, weights)
    for i in np.flatnonzero(whole == 0):
        if whole.max() > 1:
            whole[whole.argmax()] -= 1
            whole[i] = 1
    return whole


def realized(labels: npt.NDArray[np.int64], sets: npt.NDArray[np.int64], count: int, classes: int) -> Matrix:
    """Return the class shares of ``count`` sets from labels and sets of images, zeros for an empty set."""
    table = np.zeros((count, classes))
    np.add.at(table, (sets, labels), 1)
    rows: Matrix = table / np.maximum(table.sum(1, keepdims=True), 1)
    return rows


def noisy(priors: Matrix, amount: float, rng: np.random.Generator) -> Matrix:
    """Multiply every entry by a factor from U(1 - amount, 1 + amount) and normalize the rows."""
    return normalized(priors * rng.uniform(1 - amount, 1 + amount, priors.shape))


def smoothed(priors: Matrix, amount: float) -> Matrix:
    """Return (1 - amount) priors + amount / K, with which no class is impossible and the loss is bounded."""
    mixed: Matrix = (1 - amount) * priors + amount / priors.shape[1]
    return mixed


class PriorEstimator:
    """Estimates the class shares of unlabeled sets from a labeled calibration sample.

    A multinomial logistic regression (scikit-learn) is fitted on the pixels of the sample. Its mean output
    over a set is a mixture of its mean outputs over the classes, which five-fold cross-validation measures on
    the sample; the mixture is solved for by non-negative least squares (SciPy). The estimate assumes that
    images of one class look alike in the sample and in the sets, as FedUL does.

    Source: Bella et al. 2010, "Quantification via probability estimators" (probabilistic adjusted count).

    Args:
        labeled: at least five images of every class.

    Raises:
        UserError: a class has fewer than five images in the sample.
    """

    def __init__(self, labeled: Split, classes: Sequence[str], seed: int = 0) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import StratifiedKFold, cross_val_predict

        y = labeled.labels.numpy()
        counts = np.bincount(y, minlength=len(classes))
        if counts.min() < 5:
            raise UserError(
                "estimated priors need 5 labeled images of every class; class"
                f" {classes[int(counts.argmin())]!r} has {counts.min()}: raise labeled, or add labeled images"
                " to your own"
            )
        x = _pixels(labeled.images.numpy())
        self._model = LogisticRegression(C=0.1, max_iter=200)
        folds = StratifiedKFold(5, shuffle=True, random_state=seed)
        out_of_fold = cross_val_predict(self._model, x, y, cv=folds, method="predict_proba")
        # column k: mean output over class k
        self._of_class = np.stack([out_of_fold[y == k].mean(0) for k in range(len(classes))], axis=1)
        self._model.fit(x, y)

    def __call__(self, images: Sequence[npt.NDArray[np.uint8]]) -> Matrix:
        """Estimate the shares ``[M, K]`` float64 of sets of images ``[n_m, C, H, W]`` uint8."""
        from scipy.optimize import nnls

        rows = []
        for batch in images:
            mixture = self._model.predict_proba(_pixels(batch)).mean(0)
            # the last equation, with a large weight, requires a sum of one
            share, _ = nnls(np.vstack([self._of_class, np.full(len(mixture), 1e3)]), np.append(mixture, 1e3))
            rows.append(share)
        return normalized(np.array(rows))


def _pixels(batch: npt.NDArray[np.uint8]) -> Matrix:
    return batch.reshape(len(batch), -1) / 255.0


# --- checking them ----------------------------------------------------------------------------------------


def check_priors(
    client: str, priors: Matrix, sizes: npt.NDArray[np.int64], classes: int, names: Sequence[str] = ()
) -> tuple[Matrix, list[str]]:
    """Return priors that a client can be trained with, and notes on corrections.

    Args:
        priors: ``[M, K]`` class shares, one row per set.
        sizes: ``[M]`` images of each set.
        names: other names of the sets, for the messages; may be empty.

    Raises:
        InvalidPriors: the priors are not such a matrix; the message names client and set.
    """
    priors = np.asarray(priors, dtype=np.float64)
    if priors.ndim != 2 or priors.shape[1] != classes:
        raise InvalidPriors(
            f"client {client!r}: expected priors of shape [sets, {classes} classes], got {list(priors.shape)}"
        )
    if len(priors) < 2:
        raise InvalidPriors(
            f"client {client!r} has {len(priors)} set; expected 2 or more, one set has no information about"
            " the classes"
        )
    if len(sizes) != len(priors):
        raise InvalidPriors(
            f"client {client!r} has {len(sizes)} sets and {len(priors)} rows of priors; expected one row"
            " per set"
        )
    total = priors.sum(1)
    for bad, what in (
        (sizes <= 0, "the set is empty; lower sets or raise train_per_client"),
        (~np.isfinite(priors).all(1), "priors are not finite"),
        ((priors < 0).any(1), "a prior is negative"),
        (total == 0, "all priors are zero"),
        (
            np.abs(total - 1) > _TOLERANCE,
            f"priors do not sum to 1 within {_TOLERANCE:g}; divide them by their sum",
        ),
    ):
        if bad.any():
            at = int(bad.argmax())
            row = ", ".join(f"{p:.6g}" for p in priors[at])
            raise InvalidPriors(
                f"client {client!r}, {_set(at, names)}: {what} ({sizes[at]} images, priors {row})"
            )
    off = np.abs(total - 1)
    at = int(off.argmax())
    note = f"client {client!r}, {_set(at, names)}: priors sum to {total[at]:.7g}; rows were normalized"
    return normalized(priors), [note] if off[at] > 1e-7 else []


def _set(m: int, names: Sequence[str]) -> str:
    return f"set {m} ({names[m]})" if names else f"set {m}"


def check_targets(client: str, sets: npt.NDArray[np.generic], count: int) -> None:
    """Refuse sets ``[n]`` of images that are not whole numbers in [0, count).

    Raises:
        InvalidPriors: a set is not valid; the message has the first one.
    """
    if sets.dtype.kind not in "iu":
        raise InvalidPriors(f"client {client!r}: expected integers as sets, got {sets.dtype}")
    outside = (sets < 0) | (sets >= count)  # type: ignore[operator]
    if outside.any():
        raise InvalidPriors(f"client {client!r}: set {sets[outside][0]} of an image is outside [0, {count})")


def notes(
    client: str,
    priors: Matrix,
    sizes: npt.NDArray[np.int64],
    classes: Sequence[str],
    names: Sequence[str] = (),
) -> list[str]:
    """Return notes on priors with which a client's sets may not determine a classifier on their own."""
    count, found = len(priors), []
    if count < len(classes):
        found.append(
            f"client {client!r}: {count} sets for {len(classes)} classes; fewer sets than classes cannot"
            " distinguish all classes"
        )
    singular = _singular_values(priors, sizes)
    rank = _rank(singular)
    if rank < len(classes):
        found.append(f"client {client!r}: its priors have rank {rank}, less than the {len(classes)} classes")
    elif singular[0] > _CONDITION * singular[-1]:
        found.append(
            f"client {client!r}: its priors are ill-conditioned ({singular[0] / singular[-1]:.0f}); its sets"
            " are nearly alike"
        )
    absent = [classes[k] for k in np.flatnonzero(priors.sum(0) == 0)]
    if absent:
        found.append(f"client {client!r} has no image of class {listed(absent)}")
    _, first, inverse = np.unique(priors, axis=0, return_index=True, return_inverse=True)
    for m, same in enumerate(first[inverse.ravel()]):
        if same != m:
            pair = f"{_set(int(same), names)} and {_set(m, names)}"
            found.append(
                f"client {client!r}: {pair} have the same priors, so they do not help to distinguish classes"
            )
            break
    return found


def full_rank(priors: Matrix, sizes: npt.NDArray[np.int64]) -> bool:
    """Return True if the sets of this client determine a classifier of all classes."""
    return bool(_rank(_singular_values(priors, sizes)) == priors.shape[1])


def _singular_values(priors: Matrix, sizes: npt.NDArray[np.int64]) -> Matrix:
    values: Matrix = np.linalg.svd(np.sqrt(sizes / sizes.sum())[:, None] * priors, compute_uv=False)
    return values


def _rank(singular: Matrix) -> int:
    return int((singular > _RANK * singular[0]).sum())
