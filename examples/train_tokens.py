"""Train on sequences of tokens.

The task is to tell whether an opening bracket stands before the closing one.

Every client has its own alphabet of letters between the brackets. ``python examples/train_tokens.py`` takes
about ten seconds on a CPU and makes its data itself.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

import uefl

LENGTH = 16
OPEN, CLOSE, LETTERS = 1, 2, 8
"""tokens of the brackets, and how many letters a client has; 0 is padding"""

Part = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def sequences(count: int, client: int, rng: np.random.Generator) -> Part:
    """Draw sequences ``[count, LENGTH]`` and labels: 1 if an opening bracket stands before a closing one."""
    tokens = rng.integers(3 + LETTERS * client, 3 + LETTERS * (client + 1), (count, LENGTH))
    labels = rng.integers(0, 2, count)
    for row, label in zip(tokens, labels, strict=True):
        first, second = np.sort(rng.choice(LENGTH - 4, 2, replace=False))
        row[[first, second]] = (OPEN, CLOSE) if label else (CLOSE, OPEN)
        row[rng.integers(LENGTH - 4, LENGTH) :] = 0
    return tokens, labels


def main() -> dict[str, float]:
    """Train on three clients, print a table, and predict one sequence."""
    parser = argparse.ArgumentParser(description="Train FedAvg and UEFL on sequences of tokens.")
    parser.add_argument("--rounds", type=int, nargs="+", default=[4, 1], help="rounds of each iteration")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", default="runs/train-tokens", help="a new folder for the run")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    run = uefl.train(
        clients={f"client-{i}": (sequences(200, i, rng), sequences(60, i, rng)) for i in range(3)},
        model={"encoder": "conv1d", "width": 32, "hidden": 64},
        training={"rounds": args.rounds, "local_epochs": 4, "batch_size": 32, "lr": 3e-3},
        arms={"fedavg": {}, "uefl": {"codewords": 32, "segments": 4}},
        device=args.device,
        out=args.out,
    )
    print(f"{'arm':8} {'accuracy':>8} {'entropy':>8}")
    for arm, found in run.summary.items():
        print(f"{arm:8} {found['accuracy']:8.3f} {found['entropy']:8.3f}")
    said = run.model("fedavg").predict(sequences(1, 0, rng)[0], uncertainty=True)
    print(f"one sequence: probabilities {said.probs[0].tolist()}, entropy {said.entropy[0]:.3f}")
    print(f"report: {run.path / 'report.html'}")
    return {arm: found["accuracy"] for arm, found in run.summary.items()}


if __name__ == "__main__":
    main()
