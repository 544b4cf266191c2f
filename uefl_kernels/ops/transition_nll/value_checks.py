"""Checks of the values of transition ops, on the CPU only: on a GPU they would wait for the device."""

from __future__ import annotations

import torch


def require_rows(
    op: str, targets: torch.Tensor, ignored: torch.Tensor, group: torch.Tensor, log_transition: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's row (0 if ignored) and whether the target counts.

    On the CPU a wrong target raises RuntimeError.
    """
    m = log_transition.shape[1]
    inside = (targets >= 0) & (targets < m) & ~ignored
    rows = torch.where(inside, targets, 0)
    if targets.device.type == "cpu":
        wrong = ~(inside | ignored)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"{op}: targets[{b}] is {int(targets[b])}, expected the index of a set, 0 to {m - 1}"
            )
        mine = log_transition[group, rows]
        empty = inside & (mine == -torch.inf).all(1)
        if bool(empty.any()):
            b = int(empty.nonzero()[0])
            raise RuntimeError(
                f"{op}: targets[{b}] is {int(targets[b])}, but log_transition of group {int(group[b])} is"
                " -inf for every class of this set; a set with samples needs a class with a positive prior"
            )
        shares = inside & are_shares(mine)
        if bool(shares.any()):
            b = int(shares.nonzero()[0])
            raise RuntimeError(_shares(op, int(group[b]), int(targets[b])))
    return rows, inside


def require_groups(
    op: str, groups: torch.Tensor | None, b: int, log_transition: torch.Tensor
) -> torch.Tensor:
    """Return the group of each row.

    A group out of range raises RuntimeError on the CPU and is clamped elsewhere.
    """
    if groups is None:
        return torch.zeros(b, dtype=torch.int64, device=log_transition.device)
    g = log_transition.shape[0]
    if groups.device.type == "cpu":
        wrong = (groups < 0) | (groups >= g)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"{op}: groups[{b}] is {int(groups[b])}, expected 0 to {g - 1}, the groups of log_transition"
            )
    return groups.clamp(0, g - 1)


def require_matrix(op: str, log_marginal: torch.Tensor) -> None:
    """Raise RuntimeError for NaN or +inf in the matrix, by its column sums, which are small.

    This is checked on the CPU only.
    """
    if log_marginal.device.type != "cpu":
        return
    wrong = log_marginal.isnan() | (log_marginal == torch.inf)
    if bool(wrong.any()):
        g, k = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"{op}: log_transition of group {g} holds NaN or +inf for class {k}; expected logarithms of"
            " priors, -inf for 0"
        )
    empty = (log_marginal == -torch.inf).all(1)
    if bool(empty.any()):
        g = int(empty.nonzero()[0])
        raise RuntimeError(
            f"{op}: log_transition of group {g} is -inf for every class; at least one class needs a positive"
            " prior"
        )


def require_logarithms(op: str, log_transition: torch.Tensor) -> None:
    """Raise RuntimeError for shares instead of logarithms, which would give plausible numbers.

    This is checked on the CPU only.
    """
    if log_transition.device.type == "cpu" and bool((shares := are_shares(log_transition)).any()):
        raise RuntimeError(_shares(op, *shares.nonzero()[0].tolist()))


def are_shares(rows: torch.Tensor) -> torch.Tensor:
    """Return for rows [..., K] whether they look like shares.

    Shares are not negative, sum to 1 within 0.01, and have more than one class. A single class is valid: it
    adds only a constant. Logarithms of priors or counts never look like shares; logarithms of other weights
    (1 to e) may.
    """
    return (rows >= 0).all(-1) & ((rows.sum(-1) - 1).abs() <= 0.01) & (rows.shape[-1] > 1)


def _shares(op: str, group: int, of_set: int) -> str:
    return (
        f"{op}: log_transition of group {group} has shares that sum to 1 for set {of_set}, expected"
        " their logarithms; use log_transition_matrix"
    )
