"""Measure the model or the ensemble that the server has sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from uefl_kernels import metrics

from ..data.federation import LabeledData, Split
from ..metrics.base import measured
from ..uncertainty import Prediction, ensemble, joined
from .work import recorded

if TYPE_CHECKING:
    from ..algorithms.base import Algorithm
    from .work import Work

_BATCH = 500
_BINS = 15  # bins of the confidence, the same as for the ECE
_MOST_CLASSES = 100  # a larger confusion matrix makes lines long and a plot unreadable
Metrics = dict[str, float | list[int] | list[float]]


@torch.no_grad()
def predictions(algorithm: Algorithm, work: Work) -> dict[str, Prediction]:
    """Predict the ``test`` and the ``holdout`` images of a client with the loaded network.

    A client without test images predicts its training images, as ``own``.
    """
    work.net.eval()
    splits = {"test": work.test, "holdout": work.data.holdout if isinstance(work.data, LabeledData) else None}
    predictions: dict[str, Prediction] = {}
    for name, split in splits.items():
        if split is None or len(split) == 0:
            continue
        if name == "holdout" and split is work.test:  # the published code decides by the test split
            predictions[name] = predictions["test"]
        else:
            predictions[name] = predict(algorithm, work, split.images)
    return predictions or {"own": predict(algorithm, work, work.train.images)}


@torch.no_grad()
def predict(algorithm: Algorithm, work: Work, images: torch.Tensor) -> Prediction:
    """Predict images ``[N, C, H, W]`` uint8 with the loaded network.

    Raises:
        TypeError: the algorithm does not return a prediction.
    """
    work.net.eval()
    normalize = work.workspace.normalize
    # a saved model has only these private tensors: a prediction with another one fails here, not later with
    # the saved model
    seen = replace(
        work,
        private={name: tensor for name, tensor in work.private.items() if name in algorithm.private_predicts},
    )
    predictions = [algorithm.predict(seen, normalize(batch)) for batch in images.split(_BATCH)]
    if not isinstance(predictions[0], Prediction):
        raise TypeError(
            f"{type(algorithm).__name__}.predict: expected a Prediction of uefl.uncertainty, got"
            f" {type(predictions[0]).__name__}"
        )
    return joined(predictions)


@torch.no_grad()
def summarized(algorithm: Algorithm, work: Work, members: list[dict[str, Prediction]], last: bool) -> Metrics:
    """Return the metrics of the members' mean prediction."""
    values: dict[str, torch.Tensor] = {}
    counts: Metrics = {}
    for name in members[0]:
        prediction = ensemble([one[name] for one in members])
        if name == "holdout":
            split = _split(work, name)
            values["holdout_accuracy"] = metrics.accuracy(prediction.probs, split.labels)
            values["holdout_nll"] = metrics.nll(prediction.probs, split.labels)
            values["holdout_entropy"] = prediction.entropy.double().mean()
            values["holdout_entropy_se"] = (
                prediction.entropy.double().std(correction=0) / max(1, len(split) - 1) ** 0.5
            )
            continue
        if name == "test":
            labels = _split(work, name).labels
            values |= {
                "accuracy": metrics.accuracy(prediction.probs, labels),
                "nll": metrics.nll(prediction.probs, labels),
                "ece": metrics.ece(prediction.probs, labels),
                "brier": metrics.brier(prediction.probs, labels),
            }
            for own_name in work.workspace.context.run.metrics:
                values[own_name] = measured(own_name, prediction.probs, labels)
            counts = _counts(prediction.probs, labels) if last else {}
        values["entropy"] = prediction.entropy.double().mean()
        values["entropy_deterministic"] = prediction.entropy_deterministic.double().mean()
        values["mutual_info"] = prediction.mutual_info.double().mean()
    device = work.workspace.device
    result: Metrics = dict(
        zip(
            values,
            torch.stack([value.double().to(device) for value in values.values()]).tolist(),
            strict=True,
        )
    )
    name = "test" if "test" in members[0] else "own"
    own = algorithm.measure(work, [dict(one[name].extra) for one in members], last)
    return result | counts | recorded(own, f"{type(algorithm).__name__}.measure")


def list_lengths(classes: int) -> dict[str, int]:
    """Return the length of each metric that is a list."""
    return {"reliability": 2 * _BINS, "confusion": classes * classes, "confidence": _BINS}


def _counts(probs: torch.Tensor, labels: torch.Tensor) -> Metrics:
    """Return the counts that a report plots.

    Their size does not depend on the number of images. ``confusion`` ``[classes * classes]``: images by class
    and predicted class, row by row. ``reliability``: for each bin of the confidence, images and correct
    predictions. ``confidence``: the sum of the confidences in each bin.
    """
    classes, labels = probs.shape[1], labels.cpu()  # on the CPU, sums have one order
    confidence, predicted = probs.double().cpu().max(1)
    bins = (confidence * _BINS).long().clamp(0, _BINS - 1)
    images, right = (
        torch.bincount(bins, weight, minlength=_BINS) for weight in (None, (predicted == labels).double())
    )
    found: Metrics = {"reliability": torch.stack([images, right.long()], 1).flatten().tolist()}
    if classes <= _MOST_CLASSES:
        found["confusion"] = torch.bincount(
            labels * classes + predicted, minlength=classes * classes
        ).tolist()
    return found | {"confidence": torch.bincount(bins, confidence, minlength=_BINS).tolist()}


def _split(work: Work, name: str) -> Split:
    split = getattr(work.data, name)
    assert isinstance(split, Split)
    return split
