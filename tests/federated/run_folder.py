"""Run folders written by hand: two or three arms, accuracies that are easy to add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from uefl import config
from uefl.report import summarize

ROUNDS = (2, 2)
ALGORITHMS = {"one-codebook": "uefl", "fedul-m1": "fedul", "fedul-m2": "fedul", "fedavg-labeled-10": "fedavg-labeled"}


def records(arms: tuple[str, ...] = ("fedavg", "uefl"), clients: int = 3) -> list[dict[str, Any]]:
    """Accuracy = 0.1 (round + 1) + 0.01 client + 0.2 for uefl; the last client of uefl is extended before round 2."""
    lines = []
    for arm in arms:
        for round in range(sum(ROUNDS)):
            for client in range(clients):
                extended = arm == "uefl" and round >= ROUNDS[0] and client == clients - 1
                codewords = None if arm == "fedavg" else 8 if extended else 4
                line = {
                    "arm": arm,
                    "iteration": int(round >= ROUNDS[0]),
                    "round": round,
                    "client": f"silo-{client}",
                    "accuracy": 0.1 * (round + 1) + 0.01 * client + 0.2 * (arm == "uefl"),
                    "entropy": 1.0 - 0.1 * round,
                    "entropy_deterministic": 0.5,
                    "holdout_entropy": 0.6,
                    "nll": 0.7,
                    "ece": 0.05,
                    "perplexity": None if arm == "fedavg" else 3.0 + client,
                    "perplexity_full": None if arm == "fedavg" else 3.5,
                    "train_loss": 0.4,
                    "codewords": codewords,
                    "extended": extended and round == ROUNDS[0],
                }
                if codewords and round == sum(ROUNDS) - 1:
                    line["usage"] = list(range(codewords))
                lines.append(line)
    return lines


def write(path: Path, lines: list[dict[str, Any]] | None = None, *, finished: bool = True, rejected: int = 0, **keys: Any) -> Path:
    """A run folder of these records; ``keys`` go into its configuration, as with ``--set``."""
    lines = records() if lines is None else lines
    clients = len({line["client"] for line in lines})
    arms = list(dict.fromkeys(line["arm"] for line in lines))
    algorithms = {name: {"algorithm": ALGORITHMS.get(name, name)} for name in arms}
    table = {"data": {"clients": clients}, "training": {"rounds": list(ROUNDS)}, "arms": algorithms}
    cfg = config.load(table, **keys)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(f"# demo\n{cfg.to_toml()}")
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        outcome = summarize(lines)
        for arm in outcome.values():
            arm |= {"seconds": 1.5, "rejected": rejected}
        (path / "summary.json").write_text(json.dumps({"schema": 2, "preset": "demo", "seed": cfg.run.seed, "arms": outcome}))
    return path
