"""Print how the loss of clients changed after an extension: ``python reproduction/extensions.py [FOLDER]``.

FOLDER has the runs of the suite ``late``, as ``uefl suite late`` leaves it: the numbers that the table needs
are first read from there and saved. docs/reproduction.md has the table. A change is from the last round
before a decision to the last round before the next one. Clients that join between them are left out.
"""

from __future__ import annotations

import json
import sys
import tomllib
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from uefl.report.compare import interval
from uefl.text_table import Table

RESULTS = Path(__file__).parent / "results" / "extensions.json"
MEASURES = ("holdout_nll", "accuracy")
Change = dict[str, Any]
"""of one client after one decision: its place, whether it was extended, and how far each measure moved"""


def changes(records: list[Change], control: list[Change], joins: dict[str, int]) -> list[Change]:
    """Return the changes of clients in a run, and as ``control`` of the same clients without extensions."""
    of, of_control = ({(r["round"], r["client"]): r for r in lines} for lines in (records, control))
    ends = {r["iteration"]: r["round"] for r in sorted(records, key=lambda r: r["round"])}
    grown = {(r["iteration"], r["client"]) for r in records if r.get("extended")}
    return [
        {"round": before, "client": client, "extended": (iteration, client) in grown}
        | {key: round(of[after, client][key] - of[before, client][key], 5) for key in MEASURES}
        | {
            f"control_{key}": round(of_control[after, client][key] - of_control[before, client][key], 5)
            for key in MEASURES
        }
        for (_, before), (iteration, after) in pairwise(sorted(ends.items()))
        for client in sorted({client for _, client in of})
        if joins.get(client, 1) <= before
    ]


def read(folder: Path) -> list[Change]:
    """Return the changes of all runs of UEFL in the folder of the suite, with FedAvg as control."""
    paths = sorted(folder.glob("*/uefl/seed-*/config.toml"))
    if not paths:
        sys.exit(f"error: {folder} has no run CASE/uefl/seed-N; expected the folder of the suite late")
    found = []
    for path in paths:
        run, config = path.parent, tomllib.loads(path.read_text(encoding="utf-8"))
        records, control = (
            [json.loads(line) for line in (one / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            for one in (run, run.parents[1] / "fedavg" / run.name)
        )
        place = {"case": run.parts[-3], "seed": config["run"]["seed"]}
        found += [place | change for change in changes(records, control, config["run"].get("joins", {}))]
    return found


def table(found: list[Change]) -> Table:
    """Compare extended clients with the other clients, and with themselves in the runs of FedAvg."""
    rows = []
    for case, of_case in groupby(found, key=lambda change: change["case"]):
        lines = list(of_case)
        extended = [change for change in lines if change["extended"]]
        row = [case, f"{sum(c['holdout_nll'] < 0 for c in extended)} of {len(extended)}"]
        for key in MEASURES:
            others = [change[key] for change in lines if not change["extended"]]
            beyond = [
                fmean(change[key] - change[f"control_{key}"] for change in of_seed)
                for _, of_seed in groupby(extended, key=lambda change: change["seed"])
            ]
            row += [f"{fmean(c[key] for c in extended):+.3f}", f"{fmean(others):+.3f}", interval(beyond)]
        rows.append(row)
    names = [
        f"{what}, {of}" for what in ("loss", "accuracy") for of in ("extended", "others", "minus FedAvg")
    ]
    return Table("After an extension", ["case", "loss fell", *names], rows)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(f"error: expected at most one folder; got {len(sys.argv) - 1}")
    for folder in sys.argv[1:]:
        lines = ",\n".join(json.dumps(change) for change in read(Path(folder)))
        RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(table(json.loads(RESULTS.read_text(encoding="utf-8"))).markdown())
