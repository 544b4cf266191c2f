"""A picture of the input of a quantizer.

The picture shows features of test images and the codewords of their client, on the two principal axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..api import Run, load
from ..data import build
from ..data.federation import LabeledData
from ..models.net import Net
from ..models.saved import SavedModel
from ..report import style
from ..report.style import Matrix, legend

_IMAGES = 40  # of each client
_MOST = 9  # clients
_COLUMNS = 3
_AT_ONCE = 256  # images


def draw(folder: Path, data_root: Path | None) -> Figure | None:
    """Draw a panel for each of the first clients of a finished run of one arm with a codebook.

    The axes are the principal ones of the features of all these clients. A dot is a feature vector, or one of
    its segments if there are several.
    """
    run = load(folder)
    (arm,) = run.config.arms
    if not (folder / f"model-{arm}.safetensors").exists():
        return None
    model = run.model(arm)
    net, own = model.members[0]
    codebooks = {
        client: tensors["codebook"].numpy() for client, tensors in own.items() if "codebook" in tensors
    }
    if not codebooks or not isinstance(net, Net):
        return None
    found = {
        name: tokens_of(model, data.test.images[:_IMAGES]).numpy()
        for name, data in islice(data_of(run, codebooks, data_root), _MOST)
    }
    keys = run.config.table()["arms"][arm]
    return panels(found, codebooks, int(keys["codewords"]), residual=keys.get("extension") == "residual")


def data_of(run: Run, names: Collection[str], data_root: Path | None) -> Iterator[tuple[str, LabeledData]]:
    """Yield the images of some clients of a run, in the order of the run."""
    federation = build(run.config.data, kind="labeled", seed=run.config.run.seed, data_root=data_root)
    for client in federation.clients:
        if client.name in names:
            data = client.load()
            assert isinstance(data, LabeledData)
            yield client.name, data


@torch.no_grad()
def tokens_of(model: SavedModel, images: torch.Tensor) -> torch.Tensor:
    """Return the tokens [N, ..., D] of images [N, C, H, W], by the first member of an ensemble."""
    net = model.members[0].net.eval()
    assert isinstance(net, Net)
    return torch.cat([net.tokens((some - model.mean) / model.std) for some in images.split(_AT_ONCE)])


def panels(
    found: Mapping[str, Matrix], codebooks: Mapping[str, Matrix], shared: int, *, residual: bool = False
) -> Figure:
    """Draw tokens ``[..., D]`` and codewords ``[..., V, d]`` by client, of all segments in one panel.

    All clients share the first ``shared`` codewords. With ``residual``, new codewords quantize residuals,
    which are differences of features, so they are plotted as offsets from the mean.
    """
    every = np.concatenate([tokens.reshape(-1, codebooks[name].shape[-1]) for name, tokens in found.items()])
    center = every.mean(0)
    axes = np.linalg.svd(every - center, full_matrices=False)[2][:2].T
    figure, grid = style.panels(len(found), _COLUMNS, 2.9, 2.6, 0.5, 0.0, sharex=True, sharey=True)
    for ax, (name, tokens) in zip(grid.flat, found.items(), strict=False):
        first = (codebooks[name][..., :shared, :] - center) @ axes
        added = (codebooks[name][..., shared:, :] - (0 if residual else center)) @ axes
        dots = (tokens.reshape(-1, len(center)) - center) @ axes
        ax.scatter(*dots.T, s=3, color="#56B4E9", alpha=0.5, linewidths=0)
        ax.scatter(*first.reshape(-1, 2).T, s=14, color="#000000", marker="x", linewidths=0.8)
        ax.scatter(*added.reshape(-1, 2).T, s=14, color="#D55E00", marker="^", linewidths=0)
        ax.set_title(f"{name}, {first[..., 0].size + added[..., 0].size} codewords")
    what = f"codeword added to this client{', from the mean on' if residual else ''}"
    entries = [("feature", "o", "#56B4E9"), ("shared codeword", "x", "#000000"), (what, "^", "#D55E00")]
    marks = [
        Line2D([], [], ls="", label=label, marker=marker, color=color) for label, marker, color in entries
    ]
    legend(figure, marks)
    return figure
