"""Compare the inertia of our fits with scikit-learn's.

Each of the shapes of ``kmeans`` is fitted with ten seeds, one start, and greedy k-means++.

python -m benchmarks.kmeans_inertia [--seeds 10] [--init k-means++] [--threads 1]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.cluster import KMeans

from benchmarks.ops.kmeans import CASES, features
from uefl_kernels import kmeans


def main() -> None:
    """Print, for each shape, how the inertia compares with scikit-learn's.

    The line has the ratio of the means, and the range of single seeds relative to scikit-learn's mean.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--init", default="k-means++")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table(
        title=f"inertia / scikit-learn's mean with k-means++; ours: {args.seeds} seeds, init {args.init}"
    )
    for column in ("N, d, k", "mean of ours", "our seeds, least and most", "its seeds, least and most"):
        table.add_column(column, justify="right")
    for case in CASES:
        x, k = features(case, "cpu")
        ours = np.array(
            [float(kmeans(x, k, seed=seed, init=args.init, n_init=1).inertia) for seed in range(args.seeds)]
        )
        its = np.array(
            [KMeans(k, random_state=seed, n_init=1).fit(x.numpy()).inertia_ for seed in range(args.seeds)]
        )
        ranges = (
            f"{seeds.min() / its.mean():.4f} to {seeds.max() / its.mean():.4f}" for seeds in (ours, its)
        )
        table.add_row(case.name, f"{ours.mean() / its.mean():.4f}", *ranges)
    Console().print(table)


if __name__ == "__main__":
    main()
