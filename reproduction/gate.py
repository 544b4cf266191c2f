"""Compare saved results of FedGate with controls without a planned verdict: ``python reproduction/gate.py``.

docs/preregistration.md has both tables. Accuracies are means over the clients and the last four rounds. The
accuracy of fine-tuned FedAvg is from the last round, because the suite has measured it only there.
"""

from __future__ import annotations

import json
from pathlib import Path

from uefl.report.compare import half_width, interval
from uefl.text_table import Table

RESULTS = Path(__file__).parent / "results" / "gate.json"
CONTROLS = {"fine-tuned FedAvg": ("fedavg", "personalized_accuracy"), "FedBN": ("fedbn", "accuracy")}
Numbers = dict[str, dict[str, dict[str, float]]]
"""of a federation: by arm and measure, a number per seed"""


def differences(one: dict[str, float], other: dict[str, float]) -> list[float]:
    """Return the differences by seed."""
    return [one[seed] - other[seed] for seed in one]


def verdict(found: list[float]) -> str:
    """Return whether the confidence interval of the mean is above zero, below, or neither."""
    mean, half = sum(found) / len(found), half_width(found)
    return "better" if mean > half else "worse" if -mean > half else "open"


def against_controls(federations: dict[str, Numbers]) -> Table:
    """Compare FedGate with fine-tuned FedAvg and with FedBN."""
    header = ["federation", *(cell for name in CONTROLS for cell in (f"minus {name}", "verdict"))]
    rows = []
    for name, arms in federations.items():
        row = [name]
        for arm, measure in CONTROLS.values():
            found = differences(arms["fedgate"]["accuracy"], arms[arm][measure])
            row += [interval(found), verdict(found)]
        rows.append(row)
    return Table("FedGate and controls", header, rows)


def chosen_by_entropy(arms: Numbers) -> dict[str, str]:
    """Return, by seed, the arm of FedAvg and FedPer whose predictions are less uncertain."""
    return {
        seed: min(("fedavg", "fedper"), key=lambda arm: arms[arm]["entropy"][seed])
        for seed in arms["fedavg"]["entropy"]
    }


def gated_by_entropy(federations: dict[str, Numbers]) -> Table:
    """Compare the choice by entropy with the better arm, with FedPer for all and with FedGate."""
    rows = []
    for name, arms in federations.items():
        chosen = chosen_by_entropy(arms)
        accuracy = {seed: arms[arm]["accuracy"][seed] for seed, arm in chosen.items()}
        best = {seed: max(arms[arm]["accuracy"][seed] for arm in ("fedavg", "fedper")) for seed in chosen}
        rows.append(
            [
                name,
                f"{sum(arm == 'fedper' for arm in chosen.values())} of {len(chosen)}",
                f"{sum(accuracy[seed] == best[seed] for seed in chosen)} of {len(chosen)}",
                *(interval(differences(accuracy, arms[arm]["accuracy"])) for arm in ("fedper", "fedgate")),
            ]
        )
    header = ["federation", "chooses FedPer", "chooses the better", "minus FedPer", "minus FedGate"]
    return Table("The choice by entropy", header, rows)


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    print(against_controls(found).markdown())
    print(gated_by_entropy(found).markdown())
