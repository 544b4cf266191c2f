"""Measure how the cost of a round grows with the number of clients.

The cost is the memory peak, the bytes and the seconds. The number of participants is fixed.

    python -m benchmarks.scale             # 100, 1,000 and 10,000 clients, FedAvg and FedPer
    python -m benchmarks.scale --clients 100000 --arms fedper --asked 200

Each row is a run of the preset ``many-clients`` in a separate process, with data, rounds, checkpoints, the
saved model and the report.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def peak() -> float:
    """Return the peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row(clients: int, arm: str, asked: int, rounds: int) -> dict[str, float]:
    """Run one row in this process.

    ``mib`` is the memory peak of the rounds; ``mib_whole`` includes the saved model and the report.
    """
    import torch

    import uefl
    from uefl.progress import PlainProgress

    peaks = []

    class PeakMemoryObserver(PlainProgress):
        def round(self, arm: str, round: int, records: list[dict[str, Any]]) -> None:
            peaks.append(peak())

    torch.set_num_threads(1)
    share = min(1.0, asked / clients)
    with tempfile.TemporaryDirectory() as folder:
        out, begun = Path(folder) / "run", time.monotonic()
        keys = {"participation": share, "evaluation": share, "rounds": [rounds], "local_epochs": 1}
        run = uefl.train(
            "many-clients",
            out=out,
            clients=clients,
            arms=[arm],
            device="cpu",
            observer=PeakMemoryObserver(),
            **keys,
        )
        whole, (found,) = time.monotonic() - begun, run.summary.values()
        files = sum(path.stat().st_size for path in (out / "private").glob("*"))
    return {
        "mib": peaks[-1],
        "mib_whole": peak(),
        "private_bytes": files,
        "bytes": (found["bytes_sent"] + found["bytes_received"]) / rounds,
        "seconds": found["seconds"] / rounds,
        "whole": whole,
    }


def measured(clients: int, arm: str, asked: int = 100, rounds: int = 3) -> dict[str, float]:
    """Run :func:`row` in a fresh, small process, because a process inherits the memory peak of its parent."""
    command = [sys.executable, "-m", "benchmarks.scale", "--row", str(clients), arm, str(asked), str(rounds)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Print a row per arm and number of clients."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--arms", nargs="+", default=["fedavg", "fedper"])
    parser.add_argument(
        "--asked",
        type=int,
        default=100,
        help="number of clients that train in a round, and of clients that measure its model",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="a line of JSON per row")
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        clients, arm, asked, rounds = options.row
        print(json.dumps(row(int(clients), arm, int(asked), int(rounds))))
        return
    if not options.json:
        print(
            "| arm | clients | asked | MiB, rounds | MiB, in all | private MB on disk | MB a round | s a"
            " round | s in all |"
        )
        print("|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for arm in options.arms:
        for clients in options.clients:
            found = measured(clients, arm, options.asked, options.rounds)
            if options.json:
                print(json.dumps({"arm": arm, "clients": clients} | found), flush=True)
                continue
            traffic = f"{found['private_bytes'] / 1e6:.2f} | {found['bytes'] / 1e6:.2f}"
            times = f"{found['seconds']:.1f} | {found['whole']:.0f}"
            memory = f"{found['mib']:.0f} | {found['mib_whole']:.0f}"
            print(
                f"| {arm} | {clients:,} | {min(options.asked, clients)} | {memory} | {traffic} | {times} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
