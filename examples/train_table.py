"""Train on a table: the 569 x 30 breast cancer data of scikit-learn, split over four hospitals.

``python examples/train_table.py`` takes about ten seconds on a CPU and needs scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas
from sklearn.datasets import load_breast_cancer

import uefl


def main() -> dict[str, float]:
    """Write one .csv for each hospital, train, and predict the rows of one of them."""
    parser = argparse.ArgumentParser(description="Train FedAvg and UEFL on a table.")
    parser.add_argument("--rounds", type=int, nargs="+", default=[4, 1], help="rounds of each iteration")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", default="runs/train-table", help="a new folder for the run")
    args = parser.parse_args()

    cancer = load_breast_cancer()
    table = pandas.DataFrame(cancer.data, columns=cancer.feature_names)
    table["label"] = cancer.target_names[cancer.target]
    with TemporaryDirectory() as folder:
        # the hospitals differ: each has tumors of other sizes
        hospitals = pandas.qcut(
            table["mean area"].rank(method="first") + 150 * (table.index % 4), 4, labels=False
        )
        for number, rows in table.groupby(hospitals):
            rows.to_csv(Path(folder) / f"hospital-{number}.csv", index=False)
        keys = {
            "data": {"source": folder, "train_per_client": 80, "test_per_client": 20},
            "model": {"encoder": "mlp", "width": 32, "hidden": 32},
            "training": {"rounds": args.rounds, "local_epochs": 4, "batch_size": 32, "lr": 3e-3},
            "run": {"metrics": ["balanced_accuracy"]},
        }
        run = uefl.train(
            keys,
            arms={"fedavg": {}, "uefl": {"codewords": 16, "segments": 4}},
            device=args.device,
            out=args.out,
        )
    print(f"{'arm':8} {'accuracy':>8} {'balanced':>8} {'entropy':>8}")
    for arm, found in run.summary.items():
        print(f"{arm:8} {found['accuracy']:8.3f} {found['balanced_accuracy']:8.3f} {found['entropy']:8.3f}")
    probabilities = run.model("fedavg").predict(table)
    correct = probabilities.argmax(1).numpy() == 1 - cancer.target
    print(f"accuracy of FedAvg on all rows: {correct.mean():.3f}")
    print(f"report: {run.path / 'report.html'}")
    return {arm: found["accuracy"] for arm, found in run.summary.items()}


if __name__ == "__main__":
    main()
