"""Lay out a wheel for Hugging Face's kernel hub: ``python tools/hub.py WHEEL FOLDER``.

One library serves every torch from 2.10 on, with CUDA and without (LibTorch's stable ABI), so the variants of
FOLDER/build hold the same files. ``uefl_kernels.numpy`` depends on the version of Python and is not on the
hub. kernel-builder cannot build these variants from the sources: it gives all sources of a backend the same
flags, and our kernels need the flags of their instruction set.

The ops register under fixed names, so a process that has loaded these kernels from the hub cannot load
another version of them.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def metadata(version: str, backend: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a variant for build.toml and the loader."""
    general = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]
    name = f"{general['name'].replace('-', '_')}_{backend['type']}_{version.replace('.', '_')}"
    return {
        "id": name,
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": backend,
    }


def variants() -> dict[str, dict[str, Any]]:
    """Return the backend of each folder of build/."""
    build = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))
    abi, cuda = build["torch"]["minver"].replace(".", ""), build["general"]["cuda"]["minver"].replace(".", "")
    architectures = build["kernel"]["uefl_cuda"]["cuda-capabilities"]
    return {
        f"torch-stable-abi{abi}-cpu-x86_64-linux": {"type": "cpu"},
        f"torch-stable-abi{abi}-cu{cuda}-x86_64-linux": {"type": "cuda", "archs": architectures},
    }


def lay_out(wheel: Path, folder: Path) -> list[Path]:
    """Return the folders of the variants."""
    version = wheel.name.split("-")[1]
    made = []
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]  # folders
        files = [
            name
            for name in names
            if name.startswith("uefl_kernels/") and not re.search(r"/(_host\.|numpy\.py$)", name)
        ]
        for variant, backend in variants().items():
            target = folder / "build" / variant
            for name in files:
                path = target / name.removeprefix("uefl_kernels/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
            (target / "metadata.json").write_text(
                json.dumps(metadata(version, backend), indent=2) + "\n", encoding="utf-8"
            )
            made.append(target)
    return made


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for made in lay_out(Path(sys.argv[1]), Path(sys.argv[2])):
        print(made)
