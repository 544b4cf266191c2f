"""Compile csrc/cuda to machine code, and list the instructions.

This needs nvcc, but no GPU. A listing also needs the disassembler of CUDA or of Triton's package.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from threading import Lock

import torch

ROOT = Path(__file__).parents[1]
# the source that takes longest to compile comes first
SOURCES = sorted((ROOT / "csrc" / "ops" / "cuda").glob("*.cu"), key=lambda path: path.name != "vq_assign.cu")
NVCC = shutil.which("nvcc")
# GPUs without machine code in the wheel: the driver compiles the PTX of another architecture for them
SAME_PTX = {"86": "80", "89": "80", "120": "100"}
_LOCKS: defaultdict[tuple[str, str], Lock] = defaultdict(Lock)
# created at import, because several threads compile sources
_FOLDER = tempfile.TemporaryDirectory(prefix="uefl-cubin-")


@cache
def disassembler() -> str | None:
    """Return the path of nvdisasm."""
    triton = importlib.util.find_spec("triton")
    folders = [
        Path(folder) / "backends" / "nvidia" / "bin"
        for folder in (triton and triton.submodule_search_locations) or ()
    ]
    return shutil.which("nvdisasm") or next(
        filter(None, (shutil.which("nvdisasm", path=folder) for folder in folders)), None
    )


@cache
def compiled(stem: str, architecture: str) -> tuple[Path, str]:
    """Compile a source for one architecture, once per process.

    Return the machine code and the output of nvcc and ptxas. A warning is an error.
    """
    base = SAME_PTX.get(architecture, architecture)
    with _LOCKS[stem, base]:  # other threads wait for the same PTX
        ptx, said = _ptx(stem, base)
    target = Path(_FOLDER.name) / f"{stem}_{architecture}.cubin"
    return target, said + _nvcc(
        "-cubin", f"-arch=sm_{architecture}", "-O3", "-Xptxas=-v", str(ptx), "-o", str(target)
    )


@cache
def _ptx(stem: str, architecture: str) -> tuple[Path, str]:
    """Compile to PTX, once for all GPUs of a generation: this is two thirds of nvcc's work."""
    paths = [f"-I{ROOT / 'csrc'}", "-isystem", str(Path(torch.__file__).parent / "include")]
    defines = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    target = Path(_FOLDER.name) / f"{stem}_{architecture}.ptx"
    source = str(ROOT / "csrc" / "ops" / "cuda" / f"{stem}.cu")
    return target, _nvcc(
        "-ptx",
        f"-arch=compute_{architecture}",
        "-std=c++20",
        "-O3",
        *paths,
        *defines,
        source,
        "-o",
        str(target),
    )


def _nvcc(*arguments: str) -> str:
    assert NVCC is not None
    done = subprocess.run(
        [NVCC, "-Werror=all-warnings", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-3000:]}")
    return done.stderr


@cache
def listing(stem: str, architecture: str) -> dict[str, list[str]]:
    """Return the instructions of every kernel of a source, by mangled name.

    A label is a line of its own.
    """
    program = disassembler()
    assert program is not None
    target, _ = compiled(stem, architecture)
    return listed(
        subprocess.run([program, "-c", str(target)], capture_output=True, text=True, check=True).stdout
    )


def listed(text: str) -> dict[str, list[str]]:
    """Return the instructions of every kernel in the output of nvdisasm."""
    parts = re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]
    line = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:\{\s*)?([^;]+?)\s*;|^(\.L_\w+):", re.MULTILINE)
    return {part.partition(",")[0]: [code or label for code, label in line.findall(part)] for part in parts}


def instances(stem: str, architecture: str, kernel: str) -> dict[str, list[str]]:
    """Return the instances of a kernel by their mangled template arguments."""
    pattern = re.compile(f"{len(kernel)}{kernel}I(.*?)EEv")
    found = {name: pattern.search(name) for name in listing(stem, architecture)}
    return {match[1]: listing(stem, architecture)[name] for name, match in found.items() if match}


def operations(lines: list[str]) -> list[str]:
    """Return the operation of each instruction, such as ``LDG.E.128``.

    Predicates, operands and labels are left out.
    """
    return [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in lines if not line.startswith(".L_")]


def innermost_loop(lines: list[str], pattern: str | tuple[str, ...], but: str = "$^") -> list[str]:
    """Return the shortest loop with an instruction that matches ``pattern``, and none that matches ``but``.

    If there are several patterns, the loop has an instruction for each of them.
    """
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    labels = {line: i for i, line in enumerate(lines) if line.startswith(".L_")}
    loops = []
    for i, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        begin = labels.get(target[1], i) if target else i
        inside = lines[begin:i]
        if all(any(re.search(one, inner) for inner in inside) for one in patterns) and not any(
            re.search(but, inner) for inner in inside
        ):
            loops.append(lines[begin : i + 1])
    return min(loops, key=len)


def without(lines: list[str], pattern: str) -> list[str]:
    """Leave out the blocks that a branch jumps over and that match the pattern.

    The smallest block is removed first. A larger block around it may then no longer match, and stays.
    """
    while True:
        labels = {line: i for i, line in enumerate(lines) if line.startswith(".L_")}
        blocks = []
        for i, line in enumerate(lines):
            target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
            end = labels.get(target[1], 0) if target else 0
            if any(re.search(pattern, inner) for inner in lines[i + 1 : end]):
                blocks.append((end - i, i, end))
        if not blocks:
            return lines
        _, begin, end = min(blocks)
        lines = lines[: begin + 1] + lines[end:]


def tile_loop(lines: list[str]) -> list[str]:
    """Return the instructions of a multiplying warp of search_wgmma for 128 codewords.

    A thread has 64 scores, if the rows are of one chunk.
    """
    return operations(innermost_loop(lines, "HGMMA"))


SCORES = 64  # of a thread in tile_loop()
# rare blocks of search_wgmma: a change of the codebook, rows at unequal distances in memory, and the
# subtraction of the center from the rows
_SELDOM = r"MUFU\.RCP|SHFL\.IDX|\bLDG\b"


def preparing(lines: list[str]) -> list[str]:
    """Return the instructions of a warp of search_wgmma that prepares 16 rows, 64 elements of each.

    The instructions include the code for the ends of rows, which few iterations of the loop execute.
    """
    return operations(without(innermost_loop(lines, ("F2FP", "LDGSTS"), "HMMA"), _SELDOM))


def finishing(lines: list[str], *, certain: bool = True) -> list[str]:
    """Return the instructions of a warp of search_wgmma that finishes 16 rows.

    The copies of the codebook are left out: one thread makes them, while its warp waits. With
    ``certain``, the lists of open rows are left out, too.
    """
    loop = innermost_loop(lines, ("UBLKCP", "STG"))
    return operations(without(loop, f"UBLKCP|{_SELDOM}{'|POPC' if certain else ''}"))
