"""The training loop.

All training of a run calls :func:`fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..devices import is_gpu
from .recording import replayed

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm
    from ..models.flat import FlatModule
    from .work import Batch, Work


class Outcome(NamedTuple):
    """The mean loss, the number of steps and the optimizer of a call of :func:`fit`."""

    loss: float
    """mean over the images of all steps; NaN if there was no step"""
    steps: int
    optimizer: torch.optim.Optimizer


def fit(
    algorithm: Algorithm,
    work: Work,
    *,
    loss: Callable[[Work, Batch], torch.Tensor] | None = None,
    epochs: int | None = None,
    moments: dict[str, torch.Tensor] | None = None,
) -> Outcome:
    """Train the loaded network.

    The batches of all epochs are drawn first, so that random draws of a step cannot change them. Dropout and
    augmentation then draw from the same generator.

    Args:
        loss: replaces ``algorithm.loss``.
        epochs: replaces the configured number of epochs or steps.
        moments: the state of the optimizer from :func:`moments_of`; None: a new optimizer.

    Raises:
        TypeError: a tensor of ``work.trained`` is not a leaf that requires a gradient, or the loss is not a
            scalar tensor.
    """
    flat, device = work.workspace.flat, work.workspace.device
    gradient = flat.gradient if _changes_gradients(algorithm) else None
    flat.share_gradient(gradient is not None)
    optimizer = optimizer_of(algorithm, work, flat.trained)
    if moments is not None:
        _resume(optimizer, flat, moments)
    schedule = schedule_of(algorithm, work, epochs)
    work.epochs = len(schedule)
    measure = loss or algorithm.loss
    total, image_count = torch.zeros((), device=device), 0

    def step(batch: Batch) -> None:
        """Take one step.

        Except for counters, the step only changes tensors, in place. So it can be replayed.
        """
        if gradient is None:
            flat.drop_gradients()
        elif not algorithm.regularize(work, gradient):
            gradient.zero_()
        for tensor in work.trained.values():
            tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.zero_()
        value = measure(work, batch)
        check_scalar(algorithm, value)
        value.backward()  # type: ignore[no-untyped-call]
        if gradient is None:
            flat.gather_gradients()
        else:
            algorithm.before_step(work, gradient)
        optimizer.step()
        total.add_(value.detach(), alpha=len(batch.positions))
        work.step += 1
        algorithm.after_batch(work, batch)

    work.net.train()
    # Algorithm.static_step refers to the algorithm's own loss, so a step with another loss is not replayed
    is_own_loss = getattr(measure, "__func__", None) is type(algorithm).loss
    with replayed(step, work, schedule) if is_own_loss else nullcontext(step) as take:
        for work.epoch, batches in enumerate(schedule):
            for work.epoch_step, positions in enumerate(batches):
                take(work.batch(positions.to(device)))
                image_count += len(positions)
    (total_loss,) = work.read(total)
    return Outcome(total_loss / image_count if image_count else math.nan, work.step, optimizer)


def moments_of(outcome: Outcome, flat: FlatModule) -> dict[str, torch.Tensor]:
    """Return copies of the optimizer's state.

    Each state has the shape ``[P]``, except the scalar ``step``. SGD without momentum has no state.
    """
    states, moments = outcome.optimizer.state, dict[str, torch.Tensor]()
    for name, value in states[flat.trained[0]].items() if flat.trained else ():
        if name == "step":
            moments[name] = value.clone()
        elif isinstance(value, torch.Tensor):
            moments[name] = torch.zeros_like(flat.values.data)
            for parameter, moment in zip(flat.module.parameters(), flat.split(moments[name]), strict=True):
                if parameter.requires_grad:
                    moment.copy_(states[parameter][name])
    return moments


def _resume(optimizer: torch.optim.Optimizer, flat: FlatModule, moments: dict[str, torch.Tensor]) -> None:
    """Set the state of a new optimizer to ``moments`` from :func:`moments_of`."""
    split = {name: flat.split(value.clone()) for name, value in moments.items() if name != "step"}
    for i, parameter in enumerate(flat.module.parameters()):
        state = {name: moment[i] for name, moment in split.items()}
        optimizer.state[parameter] = state | ({"step": moments["step"].clone()} if "step" in moments else {})


def _changes_gradients(algorithm: Algorithm) -> bool:
    """Return whether an algorithm overrides a method that reads or changes the flat gradient."""
    from ..algorithms.base import Algorithm

    return any(
        getattr(type(algorithm), method) is not getattr(Algorithm, method)
        for method in ("regularize", "before_step")
    )


def check_scalar(algorithm: Algorithm, value: object) -> None:
    """Check a loss.

    Raises:
        TypeError: the loss is not a scalar tensor.
    """
    if not isinstance(value, torch.Tensor) or value.shape:
        got = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"{type(algorithm).__name__}.loss: expected the mean over the batch, a scalar tensor; got {got}"
        )


def schedule_of(algorithm: Algorithm, work: Work, epochs: int | None = None) -> list[list[torch.Tensor]]:
    """Return the batches of every epoch.

    With ``local_steps``, the last epoch may have fewer batches.
    """
    steps_left = work.training.local_steps if epochs is None else 0
    if not steps_left:
        return [
            list(algorithm.epoch(work))
            for _ in range(work.training.local_epochs if epochs is None else epochs)
        ]
    schedule: list[list[torch.Tensor]] = []
    while steps_left > 0:
        batches = list(algorithm.epoch(work))[:steps_left]
        if not batches:
            break
        schedule.append(batches)
        steps_left -= len(batches)
    return schedule


def optimizer_of(
    algorithm: Algorithm, work: Work, parameters: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return a new optimizer of ``parameters`` and of the leaves in ``work.trained``.

    Raises:
        TypeError: a tensor of ``work.trained`` is not a leaf that requires a gradient.
    """
    for name, tensor in work.trained.items():
        if not (tensor.is_leaf and tensor.requires_grad):  # the optimizer would skip it silently
            raise TypeError(
                f"work.trained: {name!r} is not a leaf that requires a gradient; store"
                " TENSOR.detach().clone().requires_grad_() there"
            )
    training, lr = work.training, work.training.lr_in(work.round)
    at_base_rate = [*parameters, *(t for name, t in work.trained.items() if name not in work.rates)]
    groups: list[dict[str, Any]] = [
        {"params": at_base_rate, "lr": lr},
        *({"params": [work.trained[name]], "lr": lr * rate} for name, rate in work.rates.items()),
    ]
    weight_decay = algorithm.weight_decay(work)
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=training.lr, momentum=training.momentum, weight_decay=weight_decay, fused=True
        )
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    on_gpu = is_gpu(work.workspace.device)
    # only a capturable step fits in a CUDA graph; the kernel is the same
    return kind(groups, lr=training.lr, weight_decay=weight_decay, fused=True, capturable=on_gpu)
