"""Report installed packages, compiled kernels, and the backend of each op with its reason.

``uefl doctor`` prints the report, also if only the kernels are installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from typing import Any

from ._version import __version__

ENVIRONMENT = ("UEFL_BACKEND", "UEFL_DATA", "UEFL_CPU", "UEFL_CUDA_SEARCH")

COMPILE = (
    "install g++ 12 or newer (Debian, Ubuntu: apt-get install g++), then run `pip install .` in the sources"
    " again"
)


def collect() -> dict[str, Any]:
    """Return all facts about the installation, as plain values.

    Keys: ``versions``, ``compiled`` (``loaded``, ``reason`` and ``advice``), ``cpu`` (``variant``,
    ``features``, ``reason``), ``cuda`` (one entry per device), ``ops`` (op, device, backend and why),
    ``environment``.

    Raises:
        ValueError: UEFL_BACKEND is not a backend, or this processor does not have the instruction set that
            UEFL_CPU names.
    """
    library = importlib.import_module(f"{__package__}._library")
    import torch

    reason = library.load_error()
    cpu = _cpu()
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    return {
        "versions": {
            "python": platform.python_version(),
            "uefl": __version__,
            **{name: _version(name) for name in ("torch", "triton", "numpy")},
        },
        "compiled": {
            "loaded": reason is None,
            "reason": reason,
            "advice": None if reason is None else COMPILE,
        },
        "cpu": cpu,
        "cuda": [
            {"name": torch.cuda.get_device_name(d), "capability": list(torch.cuda.get_device_capability(d))}
            for d in devices
            if d.type == "cuda"
        ],
        "ops": [{"op": op, "device": str(d), **_choice(op, d, cpu)} for op in library.ops() for d in devices],
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of ``collect`` about the machine, as lines of a table with two columns."""
    compiled, cpu = found["compiled"], found["cpu"]
    features = [name for name, present in (cpu["features"] or {}).items() if present]
    return [
        *found["versions"].items(),
        ("compiled ops", "loaded" if compiled["loaded"] else f"absent: {compiled['reason']}"),
        *(() if compiled["loaded"] else (("to compile them", compiled["advice"]),)),
        ("CPU kernels", cpu["variant"] or f"unknown: {cpu['reason']}"),
        ("CPU features", " ".join(features) or "unknown"),
        *(
            (f"CUDA device {i}", f"{d['name']}, sm_{d['capability'][0]}{d['capability'][1]}")
            for i, d in enumerate(found["cuda"])
        ),
        *(() if found["cuda"] else (("CUDA devices", "none"),)),
        *((name, value or "not set") for name, value in found["environment"].items()),
    ]


def text(found: dict[str, Any]) -> str:
    """Return the facts of ``collect`` in plain lines."""
    choices = [(c["op"], f"{c['device']}: {c['backend']} ({c['why']})") for c in found["ops"]]
    return "\n".join(f"{name:<22} {value}" for name, value in [*facts(found), *choices])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> dict[str, Any]:
    """Ask the NumPy front end for the processor.

    The front end may be absent. It raises an error if UEFL_CPU names a variant that this processor cannot
    run.
    """
    try:
        host = importlib.import_module("uefl_kernels._host")
        return {"variant": str(host.variant()), "features": dict(host.cpu_features()), "reason": None}
    except ModuleNotFoundError:
        reason = "the module _host is not built"
    except ImportError as error:
        reason = str(error).splitlines()[0]
    except (RuntimeError, ValueError) as error:
        raise ValueError(str(error).splitlines()[0]) from None
    return {"variant": None, "features": None, "reason": reason}


def _choice(op: str, device: Any, cpu: dict[str, Any]) -> dict[str, str]:
    """Find the backend of an op on a device: the choice of the dispatcher, without a call."""
    import torch

    from . import _library as library

    forced = os.environ.get("UEFL_BACKEND") or "auto"
    if forced != "auto":
        try:
            library.resolve(op, torch.empty(0, device=device))
        except RuntimeError as error:
            return {"backend": "error", "why": str(error)}
        return {"backend": forced, "why": f"UEFL_BACKEND={forced}"}
    if device.type == "cpu":
        if library.has_kernel("uefl", op, "CPU"):
            return {"backend": "cpu", "why": f"compiled, {cpu['variant'] or 'variant unknown'}"}
        absent = library.load_error()
        return {
            "backend": "reference",
            "why": "compiled kernels are absent" if absent else "consists of PyTorch code and other ops",
        }
    if not library.has_kernel("uefl_cuda", op, "CUDA"):
        missing = "no CUDA C++ kernel, or built without nvcc"
    elif library.cuda_architecture_built(device):
        return {"backend": "cuda", "why": "CUDA C++ kernels are built for this architecture"}
    else:
        missing = "the CUDA C++ kernels were not built for this GPU"
    if not library.has_kernel("uefl_triton", op, "CUDA"):
        return {"backend": "reference", "why": f"{missing}; no Triton kernel"}
    if library.triton_available():
        return {"backend": "triton", "why": missing}
    return {"backend": "reference", "why": f"{missing}, and Triton is not installed"}
