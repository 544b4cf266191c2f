"""Run folders written by hand: two or three arms, accuracies that are easy to add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from uefl import config
from uefl.algorithms.base import registry
from uefl.report.run_folder import outcomes

ROUNDS = (2, 2)
CLASSES = ("0", "1", "2", "3")


def records(arms: tuple[str, ...] = ("fedavg", "uefl"), clients: int = 3) -> list[dict[str, Any]]:
    """Return records with accuracy = 0.1 (round + 1) + 0.01 client + 0.2 for uefl.

    The last client of uefl is extended before round 2.

    Of 100 images of each class and client, in the last round, 61 are predicted right by every arm, 13 as each
    other class.
    """
    lines = []
    for arm in arms:
        for round in range(sum(ROUNDS)):
            for client in range(clients):
                extended = arm == "uefl" and round >= ROUNDS[0] and client == clients - 1
                codewords = 0 if arm == "fedavg" else 8 if extended else 4
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
                    "train_loss": 0.4,
                    "bytes_sent": 1000,
                    "bytes_received": 500,
                }
                if codewords:
                    line |= {
                        "perplexity": 3.0 + client,
                        "codewords": codewords,
                        "extended": extended and round == ROUNDS[0],
                    }
                if round == sum(ROUNDS) - 1:
                    line |= {"confusion": [61 if i % 5 == 0 else 13 for i in range(16)]}
                    line |= {"reliability": [0, 0, 100, 50, 300, 194], "confidence": [0.0, 55.0, 240.0]}
                    if codewords:
                        line["usage"] = list(range(codewords))
                lines.append(line)
    return lines


def table(arms: tuple[str, ...], **keys: Any) -> dict[str, Any]:
    """Return a small configuration with ``keys`` as in ``--set``, and uefl for arms of other names."""
    known = registry()
    sets = known.get(arms[0], known["uefl"]).kind == "sets"
    plan: dict[str, Any] = {"rounds": [sum(ROUNDS)] if sets else list(ROUNDS)}
    tables = {arm: {} if arm in known else {"algorithm": "uefl"} for arm in arms}
    for arm, own in tables.items():
        if "codewords" in known[own.get("algorithm", arm)].Parameters.model_fields:
            own |= {"codewords": 4, "segments": 1}
    return config.load({"training": plan, "arms": tables}, **keys).table()


def write(
    path: Path,
    lines: list[dict[str, Any]] | None = None,
    *,
    finished: bool = True,
    classes: Any = CLASSES,
    **keys: Any,
) -> Path:
    """Write a run folder of records with rounds from 0, with ``keys`` in its configuration."""
    lines = records() if lines is None else lines
    arms = tuple(dict.fromkeys(line["arm"] for line in lines))
    cfg = config.from_table(table(arms, **keys))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(f"# demo\n{cfg.to_toml()}")
    (path / "manifest.json").write_text(json.dumps({"classes": list(classes)}))
    written = [line | {"round": line["round"] + 1} for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    if finished:
        outcome = outcomes(lines, cfg)
        for arm in outcome.values():
            arm["seconds"] = 1.5
        (path / "summary.json").write_text(
            json.dumps({"schema": 2, "preset": "demo", "seed": cfg.run.seed, "arms": outcome})
        )
    return path
