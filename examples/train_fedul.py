"""Train on unlabeled sets with known class priors (FedUL).

The server has a few labeled images, or none.

``python examples/train_fedul.py`` trains on the digits of the package and takes about a minute. ``--data
mnist --root ROOT`` trains on MNIST in the folder ROOT, and ``--device cuda`` uses a GPU.
"""

from __future__ import annotations

import argparse

import uefl


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(
        description="Train FedUL, FedUL with labeled images at the server, and a supervised control."
    )
    parser.add_argument("--data", default="digits", help="digits, mnist, fashion_mnist or cifar10")
    parser.add_argument("--root", help="folder of torchvision's data sets")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of training")
    parser.add_argument("--out", default="runs/train-fedul", help="a new folder for the run")
    args = parser.parse_args()

    run = uefl.train(
        "fedul-demo",
        data={"source": args.data},
        arms=["fedul", "fedul-m1", "supervised"],
        rounds=[args.rounds],
        device=args.device,
        data_root=args.root,
        out=args.out,
    )
    print(f"{'arm':12} {'error':>8}")
    for arm, found in run.summary.items():
        print(f"{arm:12} {1 - found['accuracy']:8.3f}")
    print(f"report: {run.path / 'report.html'}")


if __name__ == "__main__":
    main()
