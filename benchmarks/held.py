"""Restrict every provider of a comparison to an older instruction set."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# By instruction set, the variables of our kernels, of MKL, ATen and oneDNN in torch, of OpenBLAS in NumPy,
# SciPy and faiss, and of faiss (FAISS_SIMD_LEVEL is for 1.13 and newer). superkmeans has no such variable and
# uses all instructions of the CPU.
HELD = {
    "avx512": {  # without VNNI, which is only for integers
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
    "portable": {  # our kernels use SSE2; oneDNN and OpenBLAS cannot go below SSE4
        "UEFL_CPU": "portable",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",  # SSE2; MKL ignores MKL_ENABLE_INSTRUCTIONS on AMD CPUs
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
        "FAISS_OPT_LEVEL": "generic",
        "FAISS_SIMD_LEVEL": "NONE",
    },
}


def add_options(parser: argparse.ArgumentParser, folder: Path, what: str) -> None:
    """Add ``--held`` and ``--save`` to a parser.

    Args:
        parser: the parser.
        folder: the default folder of ``--save``.
        what: a noun for the saved results, for the help.
    """
    default = os.path.relpath(folder, Path(__file__).parents[1])
    parser.add_argument(
        "--held",
        choices=list(HELD),
        help="restrict all packages to this instruction set; the results are saved as another machine",
    )
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=folder,
        metavar="FOLDER",
        help=f"save {what} to FOLDER/<machine>.csv and replace older ones (default: {default})",
    )


def restrict(instructions: str | None, module: str, arguments: list[str] | None) -> None:
    """Restart ``python -m module`` with the environment of an instruction set, unless it is already set.

    The restart is necessary because libraries read these variables when they are loaded.

    Args:
        instructions: a key of ``HELD``; None: do nothing.
        module: the module to restart.
        arguments: its arguments; None: the arguments of this process.
    """
    if instructions is not None and not HELD[instructions].items() <= os.environ.items():
        os.environ.update(HELD[instructions])
        os.execv(
            sys.executable,
            [sys.executable, "-m", module, *(sys.argv[1:] if arguments is None else arguments)],
        )
