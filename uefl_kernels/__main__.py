"""The command ``uefl``.

It is the command of the federated layer, or only ``uefl doctor`` if just the kernels are installed.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module


def main() -> None:
    """Run the command line.

    Without the packages of the federated layer, print how to install them.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports prints no traceback
    spin_briefly()
    os.environ["MPLBACKEND"] = "agg"  # pictures are files, whatever backend the user's windows have
    try:
        import_module("uefl")
    except ImportError as error:
        sys.exit(_kernels_alone(str(error)))
    import_module("uefl.cli").main()


def spin_briefly() -> None:
    """Limit how long waiting threads of OpenMP spin, so that other programs get the cores.

    OpenMP reads the variables when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _kernels_alone(missing: str) -> int:
    if sys.argv[1:] != ["doctor"]:
        print(f"error: {missing}", file=sys.stderr)
        return 2
    from . import doctor

    try:
        print(doctor.text(doctor.collect()), f"{'federated layer':<22} absent: {missing}", sep="\n")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    main()
