"""A machine that has more held to the instructions of one that has less, for everyone who takes part in a comparison."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Ours, torch's MKL, ATen and oneDNN, the OpenBLAS of NumPy, SciPy and faiss, and faiss itself, whose second name is that of 1.13 and newer.
# superkmeans takes what it finds.
HELD = {
    "avx512": {  # without VNNI; what it does for float32 is the same
        "UEFL_CPU": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "OPENBLAS_CORETYPE": "SkylakeX",
        "FAISS_OPT_LEVEL": "avx512",
        "FAISS_SIMD_LEVEL": "AVX512",
    },
    "avx2": {
        "UEFL_CPU": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "FAISS_OPT_LEVEL": "avx2",
        "FAISS_SIMD_LEVEL": "AVX2",
    },
    "portable": {  # ours has SSE2; the least that oneDNN and OpenBLAS can be held to is SSE4
        "UEFL_CPU": "portable",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",  # SSE2; an AMD CPU does not hear the other one
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
        "FAISS_OPT_LEVEL": "generic",
        "FAISS_SIMD_LEVEL": "NONE",
    },
}


def add_options(parser: argparse.ArgumentParser, folder: Path, what: str) -> None:
    """``--held`` and ``--save``, of every program that measures; ``what`` it saves goes into a folder, this one where none is named."""
    default = os.path.relpath(folder, Path(__file__).parents[1])
    parser.add_argument("--held", choices=list(HELD), help="hold everyone to these instructions; saved as a machine of its own")
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=folder,
        metavar="FOLDER",
        help=f"put {what} into FOLDER/<machine>.csv, in place of older ones (default: {default})",
    )


def hold(to: str | None, module: str, arguments: list[str] | None) -> None:
    """Begin ``python -m module`` anew in this process, held to ``to``, unless it already is: libraries read it when they are loaded."""
    if to is not None and not HELD[to].items() <= os.environ.items():
        os.environ.update(HELD[to])
        os.execv(sys.executable, [sys.executable, "-m", module, *(sys.argv[1:] if arguments is None else arguments)])
