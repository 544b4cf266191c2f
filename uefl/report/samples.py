"""A few training images of every client, kept in the run folder so that a report can show them without the
data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors import SafetensorError
from safetensors.torch import load_file

from .. import checkpoint
from ..data.federation import LabeledData, SetData
from ..errors import UserError
from .folder import Run
from .style import canvas, drawn, drawn_classes

_FILE = "samples.safetensors"
_CLIENTS, _IMAGES = 12, 10


def write(folder: Path, names: Sequence[str], data: Callable[[str], LabeledData | SetData]) -> None:
    """Keep images of the first clients, evenly spaced over their training images sorted by class, or by set
    where labels are unknown.

    Args:
        folder: of the run; nothing is done where it has samples already.
        names: of the clients.
        data: returns a client's data.
    """
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


def draw(run: Run) -> Iterator[tuple[str, str, str, Figure]]:
    """Yield file name, short text, caption and figure; nothing where the folder has no samples.

    Raises:
        UserError: the file of the samples is damaged.
    """
    path = run.path / _FILE
    if not path.exists():
        return
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}; delete it to report without images") from None
    rows = [
        (tensors[f"{i}.images"].numpy(), tensors.get(f"{i}.labels"))
        for i in range(len(tensors))
        if f"{i}.images" in tensors
    ]
    shown, all_of = len(rows), len(run.silos)
    of = f" of the first {shown} of {all_of} clients" if all_of > shown else " of each client"
    order = (
        "sorted by class"
        if any(labels is not None for _, labels in rows)
        else "one part after the other of their sets"
    )
    yield (
        "samples.png",
        "Images of the clients",
        f"Training images{of} as the model gets them, before they are normalised, {order}.",
        _grid(run, rows),
    )


def _grid(run: Run, rows: list[tuple[np.ndarray, torch.Tensor | None]]) -> Figure:
    height, width = rows[0][0].shape[2:]
    cell, names = 0.72, drawn_classes(run)
    labeled = any(labels is not None for _, labels in rows)
    gap_x, gap_y = max(1, width // 12), max(1, height // 12) + (height // 4 if labeled else 0)
    sheet = np.full((len(rows) * (height + gap_y), _IMAGES * (width + gap_x), 3), 255, dtype=np.uint8)
    figure = canvas(
        1.6 + cell * _IMAGES, max(cell * len(rows) * (height + gap_y) / (width + gap_x), 1.2) + 0.1
    )
    ax = figure.subplots()
    for i, (images, labels) in enumerate(rows):
        top = i * (height + gap_y)
        for j, image in enumerate(images):
            left = j * (width + gap_x)
            sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
            if labels is not None:
                text = names[labels[j]] if names else str(int(labels[j]))
                where = (left + width / 2, top + height + gap_y / 2 - 0.5)
                ax.text(
                    *where,
                    text if len(text) < 12 else f"{text[:10]}…",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="#444444",
                )
    ax.imshow(sheet, interpolation="nearest")
    clients = run.silos[: len(rows)]
    ax.set_yticks(
        [i * (height + gap_y) + height / 2 for i in range(len(rows))],
        labels=[drawn(run)[name] for name in clients],
    )
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return figure
