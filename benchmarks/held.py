"""Restrict every provider of a comparison to an older instruction set."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Our kernels; MKL, ATen and oneDNN of torch; OpenBLAS of NumPy, SciPy and faiss; faiss (the second name is
# for 1.13 and newer). superkmeans has no such setting and uses everything.
HELD = {
    "avx512": {  # without VNNI, which float32 does not use
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
        "MKL_CBWR": "COMPATIBLE",  # SSE2; MKL ignores the other variable on AMD CPUs
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Nehalem",
        "FAISS_OPT_LEVEL": "generic",
        "FAISS_SIMD_LEVEL": "NONE",
    },
}


def add_options(parser: argparse.ArgumentParser, folder: Path, what: str) -> None:
    """Add ``--held`` and ``--save`` to a parser. ``folder`` is the default folder for ``what`` the program
    saves."""
    default = os.path.relpath(folder, Path(__file__).parents[1])
    parser.add_argument(
        "--held",
        choices=list(HELD),
        help="hold everyone to these instructions; saved as a machine of its own",
    )
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=folder,
        metavar="FOLDER",
        help=f"put {what} into FOLDER/<machine>.csv, in place of older ones (default: {default})",
    )


def hold(to: str | None, module: str, arguments: list[str] | None) -> None:
    """Restart ``python -m module`` in this process with the limits of ``to``, because libraries read them
    when they are loaded."""
    if to is not None and not HELD[to].items() <= os.environ.items():
        os.environ.update(HELD[to])
        os.execv(
            sys.executable,
            [sys.executable, "-m", module, *(sys.argv[1:] if arguments is None else arguments)],
        )
