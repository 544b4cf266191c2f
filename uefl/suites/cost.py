"""The costs of a trained model: its parameters, the time of a prediction, and the time of k-means."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import uefl_kernels

from ..api import Run, load
from ..checkpoint import write_json
from ..json_text import parse_json
from ..models.normalization import blank
from ..models.saved import SavedModel
from ..paths import read_text
from .features import data_of, tokens_of

ON_GPU = "milliseconds_gpu"
KMEANS = "kmeans_milliseconds"
MEASURES = frozenset({"parameters_millions", "milliseconds", ON_GPU, KMEANS})
_WARM, _REPEATS = 20, 200


def measure(folder: Path, gpu: bool, data_root: Path | None = None) -> None:
    """Write ``cost.json`` into the folder of a finished run if it is missing, or lacks a number.

    The file has the millions of parameters, including the codebook, and the median milliseconds to predict
    one image on this machine's CPU and, on request, GPU. It also has the median milliseconds of the k-means
    that makes new codewords from the features of the first client, or null for a model without a codebook.
    """
    wanted = MEASURES if gpu else MEASURES - {ON_GPU}
    if not (folder / "summary.json").exists() or read(folder).keys() >= wanted:
        return
    run = load(folder)
    (arm,) = run.config.arms
    model = run.model(arm)
    client = model.clients[0] if model.clients else None
    net, own = model.members[0]
    of_client = [
        tensor for name, tensor in (own[client] if client else {}).items() if name not in net.state_dict()
    ]
    parameters = sum(tensor.numel() for tensor in (*net.parameters(), *of_client))
    found = {
        "parameters_millions": parameters / 1e6,
        "milliseconds": milliseconds(model, client),
        KMEANS: (
            _kmeans_milliseconds(run, arm, model, client, data_root)
            if client is not None and "codebook" in own[client]
            else None
        ),
    }
    if gpu:
        found[ON_GPU] = milliseconds(model.to("cuda"), client)
    write_json(folder / "cost.json", found)


def milliseconds(model: SavedModel, client: str | None) -> float:
    """Return the median time of a prediction of one image, with the transfer of image and result."""
    image = blank(1, model.shape, model.inputs)
    return _median(lambda: model.predict(image, client=client), _WARM, _REPEATS)


def _kmeans_milliseconds(run: Run, arm: str, model: SavedModel, client: str, data_root: Path | None) -> float:
    _, data = next(data_of(run, [client], data_root))
    width = model.members[0].clients[client]["codebook"].shape[-1]
    rows = tokens_of(model, data.train.images).reshape(-1, width)
    codewords = int(run.config.table()["arms"][arm]["codewords"])
    return _median(lambda: uefl_kernels.kmeans(rows, codewords, seed=0), 1, 5)


def _median(call: Callable[[], object], warm: int, repeats: int) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for i in range(warm + repeats):
        begun = time.perf_counter()
        call()
        if i >= warm:
            times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def read(folder: Path) -> dict[str, float | None]:
    """Return the result of :func:`measure`, or an empty mapping if it is missing or damaged."""
    try:
        found = parse_json(read_text(folder / "cost.json"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
