"""Train FedAvg and UEFL on clients with rotated images, and print the accuracy of each.

``python examples/train_uefl.py`` trains on the digits of the package and takes about a minute. ``--data mnist
--root ROOT`` trains on MNIST in the folder ROOT, and ``--device cuda`` uses a GPU.
"""

from __future__ import annotations

import argparse

import uefl


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description="Train FedAvg and UEFL on rotated images.")
    parser.add_argument("--data", default="digits", help="digits, mnist, fashion_mnist or cifar10")
    parser.add_argument("--root", help="folder of torchvision's data sets")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[6, 3], help="rounds before and after codebooks grow"
    )
    parser.add_argument("--out", default="runs/train-uefl", help="a new folder for the run")
    args = parser.parse_args()

    run = uefl.train(
        data={
            "source": args.data,
            "clients": 6,
            "train_per_client": 200,
            "test_per_client": 50,
            "partition": {"scheme": "rotations", "angles": [0, 0, -50, -50, 120, 120]},
        },
        model={"encoder": "cnn", "width": 8},
        training={"rounds": args.rounds, "local_epochs": 2, "lr": 1e-3, "batch_size": 64},
        arms={
            "fedavg": {},
            "uefl": {"codewords": 32, "segments": 4, "gamma": 0.1, "stop_when_certain": False},
        },
        device=args.device,
        data_root=args.root,
        out=args.out,
    )
    print(f"{'arm':8} {'accuracy':>8} {'entropy':>8}")
    for arm, found in run.summary.items():
        print(f"{arm:8} {found['accuracy']:8.3f} {found['entropy']:8.3f}")
    print(f"report: {run.path / 'report.html'}")


if __name__ == "__main__":
    main()
