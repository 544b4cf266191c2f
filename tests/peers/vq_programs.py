"""Run the code blocks of vector-quantize-pytorch's README and its examples, and write a report.

    python -m tests.peers.vq_programs CHECKOUT

Each block runs as it is, each example for three steps on random images. ``UEFL_PEER_OURS=1`` puts our layers
under the peer's name.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision

import tests.peers.vq_plugin  # noqa: F401  (puts our classes under the peer's name)

_STEPS, _IMAGES = 3, 512


def blocks(readme: str) -> list[str]:
    """Return the Python code blocks of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)


def programs(checkout: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the name and the call of every block and example."""
    for number, block in enumerate(blocks((checkout / "README.md").read_text()), 1):
        yield f"README.md::{_title(block)}[{number}]", partial(exec, block, {"__name__": "block"})
    for path in sorted((checkout / "examples").glob("*.py")):
        yield f"examples::{path.name}", partial(_train, path)


def _title(block: str) -> str:
    """Return the class of the peer's that a block is about."""
    names = re.findall(r"from vector_quantize_pytorch import (?:\(\s*)?(\w+)", block)
    return names[0] if names else "no import"


def _train(path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    namespace["train"](train_iter=_STEPS)


def _images(*_args: object, **_options: object) -> list[tuple[torch.Tensor, int]]:
    """Stand for FashionMNIST: normalized images ``[1, 28, 28]``."""
    return [(torch.rand(1, 28, 28) * 2 - 1, 0) for _ in range(_IMAGES)]


def _outcome(call: Callable[[], object]) -> str:
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()
    except Exception as error:  # whatever a program raises is its outcome
        first = (str(error).strip().splitlines() or [""])[0]
        return f"failed: {type(error).__name__}: {first[:100]}"
    return "passed"


def main() -> int:
    """Write a line for each program."""
    torchvision.datasets.FashionMNIST = _images
    found = [f"{name}\t{_outcome(call)}" for name, call in programs(Path(sys.argv[1]))]
    Path(os.environ["UEFL_PEER_REPORT"]).write_text("".join(line.replace("|", "/") + "\n" for line in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
