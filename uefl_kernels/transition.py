"""The matrix that turns class probabilities into set probabilities."""

from __future__ import annotations

import torch

from ._checks import check_tensor

_TOLERANCE = 1e-4


def log_transition_matrix(
    class_priors: torch.Tensor,
    set_priors: torch.Tensor | None = None,
    target_prior: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log of A[m, k] = set_priors[m] * class_priors[m, k] / target_prior[k].

    The result is the argument of :func:`transition_nll`.

    Shares that sum to 1 within a tolerance are divided by their sum. The tolerance is 1e-4, or the spacing of
    their dtype at 1 if this spacing is larger. The function computes in float64. It checks the values, so on
    a GPU it waits for the device: call it once, not in every step.

    Args:
        class_priors: ``[M, K]``: the share of each class in each set; rows sum to 1. A row may have zeros.
        set_priors: ``[M]``: the share of all samples that each set holds; above 0, sums to 1. Default: equal
            shares.
        target_prior: ``[K]``: the class prior under which softmax(logits) shall be the posterior; above 0,
            sums to 1. Default: uniform.

    Returns:
        ``[M, K]`` float64 on the device of class_priors, -inf where the share of a class is 0. For logits of
        any other dtype than float64, convert it by ``.float()``.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: shapes that do not fit, or values that are not shares; the message names the set or the
            class.

    Source: Lu et al. 2022 (FedUL), Theorem 1.

    Equivalent to::

        (set_priors[:, None] * class_priors / target_prior).log()
    """
    op = "log_transition_matrix"
    optional = (("set_priors", set_priors), ("target_prior", target_prior))
    for name, tensor in [("class_priors", class_priors), *((n, p) for n, p in optional if p is not None)]:
        check_tensor(op, name, tensor)
        if tensor.is_meta:
            raise ValueError(f"{op}: {name} is on the meta device and has no values")
    if class_priors.dim() != 2 or 0 in class_priors.shape:
        raise ValueError(
            f"{op}: class_priors must have shape [M, K], sets by classes, got {list(class_priors.shape)}"
        )
    m, k = class_priors.shape
    rows = class_priors.detach().double()
    for i, row in enumerate(rows):
        _require_shares(op, f"class_priors of set {i}", row, "class", class_priors, positive=False)
    weights = rows.new_full((m,), 1 / m) if set_priors is None else set_priors.detach().to(rows)
    target = rows.new_full((k,), 1 / k) if target_prior is None else target_prior.detach().to(rows)
    for name, shares, length, unit, given in (
        ("set_priors", weights, m, "set", set_priors),
        ("target_prior", target, k, "class", target_prior),
    ):
        if list(shares.shape) != [length]:
            raise ValueError(
                f"{op}: {name} must have shape [{length}] for class_priors {[m, k]}, got {list(shares.shape)}"
            )
        _require_shares(op, name, shares, unit, shares if given is None else given, positive=True)
    return (
        (weights / weights.sum()).log()[:, None]
        + (rows / rows.sum(1, keepdim=True)).log()
        - (target / target.sum()).log()
    )


def _require_shares(
    op: str, name: str, shares: torch.Tensor, unit: str, given: torch.Tensor, *, positive: bool
) -> None:
    tolerance = max(_TOLERANCE, torch.finfo(given.dtype).eps)  # of the dtype that the shares were rounded to
    for i, share in enumerate(shares.tolist()):
        if not (0 < share < float("inf") or (share == 0 and not positive)):
            raise ValueError(
                f"{op}: {name} is {share:g} for {unit} {i}, expected a share"
                f" {'above' if positive else 'of at least'} 0"
            )
    total = float(shares.sum())
    if abs(total - 1) > tolerance:
        raise ValueError(
            f"{op}: {name} sum to {total:g}, expected 1 within {tolerance:g}; if they are counts, divide"
            " them by their sum"
        )
