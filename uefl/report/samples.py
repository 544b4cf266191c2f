"""Keep a few images of every client in the run folder, so that a report can show them without the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import load

from .. import checkpoint
from ..data.federation import LabeledData, SetData
from ..errors import UserError
from ..models.saved import SavedModel
from ..paths import read_bytes
from .run_folder import RunFolder
from .style import Drawing, Picture, canvas, drawn, drawn_classes

_FILE = "samples.safetensors"
_CLIENTS, _IMAGES = 12, 10
Tensors = dict[str, torch.Tensor]
SampleRow = tuple[np.ndarray, list[str]]
"""images ``[n, C, H, W]`` of a client, and the text below each; no text for unlabeled images"""


def write(folder: Path, names: Sequence[str], data: Callable[[str], LabeledData | SetData]) -> None:
    """Keep training images of the first clients, sorted by class or by set, unless there are samples."""
    if (folder / _FILE).exists():
        return
    tensors = {}
    for i, name in enumerate(names[:_CLIENTS]):
        found = data(name)
        images, order = (
            (found.train.images, found.train.labels)
            if isinstance(found, LabeledData)
            else (found.images, found.sets)
        )
        chosen = order.argsort(stable=True)[
            torch.linspace(0, len(order) - 1, min(_IMAGES, len(order))).round().long().to(order.device)
        ]
        tensors[f"{i}.images"] = images[chosen].cpu().contiguous()
        if isinstance(found, LabeledData):
            tensors[f"{i}.labels"] = order[chosen].cpu().contiguous()
    checkpoint.save_tensors(folder / _FILE, tensors)


def write_uncertain(
    folder: Path,
    arm: str,
    model: SavedModel,
    names: Sequence[str],
    data: Callable[[str], LabeledData | SetData],
) -> None:
    """Keep the first clients' labeled test images with the highest entropy, and their predictions."""
    tensors = {}
    for i, name in enumerate(names[:_CLIENTS]):
        found = data(name)
        if not isinstance(found, LabeledData) or not len(found.test.labels):
            continue
        prediction = model.predict(
            found.test.images.cpu(), name if name in model.clients else None, uncertainty=True
        )
        chosen = prediction.entropy.argsort(descending=True, stable=True)[:_IMAGES]
        probability, predicted = prediction.probs[chosen].max(1)
        tensors[f"{i}.images"] = found.test.images.cpu()[chosen].contiguous()
        tensors[f"{i}.labels"] = found.test.labels.cpu()[chosen].contiguous()
        tensors[f"{i}.predicted"] = predicted.contiguous()
        tensors[f"{i}.probability"] = probability.contiguous()
        tensors[f"{i}.entropy"] = prediction.entropy[chosen].contiguous()
    if tensors:
        checkpoint.save_tensors(folder / _uncertain(arm), tensors)


def check(folder: Path, arms: Iterable[str]) -> None:
    """Check that a report can read the images that are there already.

    Raises:
        UserError: a file is damaged.
    """
    for name in (_FILE, *map(_uncertain, arms)):
        _read(folder / name)


def draw(run: RunFolder) -> Iterator[Drawing]:
    """Draw the training images of the clients, and the uncertain test images of each arm.

    Raises:
        UserError: a file of images is damaged.
    """
    names = drawn_classes(run)

    def name(label: torch.Tensor) -> str:
        return names[label] if names else str(int(label))

    makers: dict[str, Callable[[Tensors, Callable[[torch.Tensor], str]], Drawing]] = {
        _FILE: partial(_training_images, run)
    }
    makers |= {_uncertain(arm): partial(_uncertain_images, run, arm) for arm in run.arms}
    for file, make in makers.items():
        path = run.path / file
        if not (tensors := _read(path)):
            continue
        try:
            drawing = make(tensors, name)
        except (KeyError, IndexError, ValueError, TypeError, StopIteration, RuntimeError):
            raise UserError(f"{path} has no images of this run; delete it to report without images") from None
        yield drawing


def _training_images(run: RunFolder, tensors: Tensors, name: Callable[[torch.Tensor], str]) -> Drawing:
    labels = {i: tensors.get(f"{i}.labels") for i in _clients(tensors)}
    rows = {
        i: (tensors[f"{i}.images"].numpy(), [] if of is None else [name(label) for label in of])
        for i, of in labels.items()
    }
    which = _which(run, rows)
    order = "by class" if any(texts for _, texts in rows.values()) else "by set"
    caption = f"Training images{which}, before normalization, sorted {order}."
    return Picture("samples.png", "Images of the clients", caption), _grid(run, rows)


def _uncertain_images(
    run: RunFolder, arm: str, tensors: Tensors, name: Callable[[torch.Tensor], str]
) -> Drawing:
    rows = {}
    for i in _clients(tensors):
        each = (tensors[f"{i}.{key}"] for key in ("labels", "predicted", "probability", "entropy"))
        texts = [
            f"{_short(name(true))}: {_short(name(predicted))}\np {p:.2f}  H {spread:.2f}"
            for true, predicted, p, spread in zip(*each, strict=True)
        ]
        rows[i] = tensors[f"{i}.images"].numpy(), texts
    caption = (
        f"Test images{_which(run, rows)} with the highest entropy in arm {arm}. Below each: its class,"
        " the predicted class, the probability p of that class, and the entropy H in nats."
    )
    picture = Picture(f"uncertain-{arm}.png", f"Most uncertain images of arm {arm}", caption)
    return picture, _grid(run, rows)


def _uncertain(arm: str) -> str:
    return f"uncertain-{arm}.safetensors"


def _read(path: Path) -> Tensors:
    """Read a file of images, or return an empty mapping if there is none."""
    if not path.exists():
        return {}
    try:
        return load(read_bytes(path))
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}; delete it to report without images") from None


def _clients(tensors: Tensors) -> list[int]:
    return sorted(int(key.partition(".")[0]) for key in tensors if key.endswith(".images"))


def _which(run: RunFolder, rows: dict[int, SampleRow]) -> str:
    shown, clients = len(rows), len(run.clients)
    return f" of the first {shown} of {clients} clients" if clients > shown else " of each client"


def _short(name: str) -> str:
    return name if len(name) < 8 else f"{name[:6]}…"


def _grid(run: RunFolder, rows: dict[int, SampleRow]) -> Figure:
    """Draw a row of images per client, with a text of up to two lines below each image."""
    height, width = next(iter(rows.values()))[0].shape[2:]
    lines = max((text.count("\n") + 1 for _, texts in rows.values() for text in texts), default=0)
    cell = 0.72 if lines < 2 else 0.9
    gap_x, gap_y = max(1, width // 12), max(1, height // 12) + lines * (height // 4)
    sheet = np.full((len(rows) * (height + gap_y), _IMAGES * (width + gap_x), 3), 255, dtype=np.uint8)
    figure = canvas(
        1.6 + cell * _IMAGES, max(cell * len(rows) * (height + gap_y) / (width + gap_x), 1.2) + 0.1
    )
    ax = figure.subplots()
    for row, (images, texts) in enumerate(rows.values()):
        top = row * (height + gap_y)
        for column, image in enumerate(images):
            left = column * (width + gap_x)
            sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
            if texts:
                text = texts[column] if lines > 1 or len(texts[column]) < 12 else f"{texts[column][:10]}…"
                where = (left + width / 2, top + height + gap_y / 2 - 0.5)
                ax.text(*where, text, ha="center", va="center", fontsize=6.5, color="#444444")
    ax.imshow(sheet, interpolation="nearest")
    ax.set_yticks(
        [row * (height + gap_y) + height / 2 for row in range(len(rows))],
        labels=[drawn(run)[run.clients[i]] for i in rows],
    )
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return figure
