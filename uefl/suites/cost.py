"""The costs of a trained model: its parameters, and the time of a prediction."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from ..api import load
from ..checkpoint import write_json
from ..json_text import parse_json
from ..models.normalization import blank
from ..models.saved import SavedModel
from ..paths import read_text

ON_GPU = "milliseconds_gpu"
MEASURES = frozenset({"parameters_millions", "milliseconds", ON_GPU})
_WARM, _REPEATS = 20, 200


def measure(folder: Path, gpu: bool) -> None:
    """Write ``cost.json`` of a finished run once: millions of parameters, milliseconds per prediction."""
    known = read(folder)
    if not (folder / "summary.json").exists() or (known and (ON_GPU in known or not gpu)):
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
    found = {"parameters_millions": parameters / 1e6, "milliseconds": milliseconds(model, client)}
    if gpu:
        found[ON_GPU] = milliseconds(model.to("cuda"), client)
    write_json(folder / "cost.json", found)


def milliseconds(model: SavedModel, client: str | None) -> float:
    """Return the median time of a prediction of one image, with the transfer of image and result."""
    image = blank(1, model.shape, model.inputs)
    times = []
    for i in range(_WARM + _REPEATS):
        begun = time.perf_counter()
        model.predict(image, client=client)
        if i >= _WARM:
            times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def read(folder: Path) -> dict[str, float]:
    """Return the result of :func:`measure`, or an empty mapping if it is missing or damaged."""
    try:
        found = parse_json(read_text(folder / "cost.json"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
