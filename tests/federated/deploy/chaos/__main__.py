"""Cause faults: ``python -m tests.federated.deploy.chaos [NAME]...``.

Without a name, run all scenarios and write docs/faults.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from uefl.text_table import Table

from .scenarios import SCENARIOS, running_scenarios

PAGE = Path(__file__).parents[4] / "docs" / "faults.md"
ABOUT = """# What faults do to a deployed run

`make chaos` writes this page. Each row was run with real processes on one machine: a SuperLink (the
message server of Flower), three silos and a run of three rounds. The column `wanted` has the
outcome that we want, and `found` the outcome of the test, with the exit code. The table has no
times and nothing that depends on the machine. metrics.jsonl and the report name every rejected
reply, with its round and the reason, but have no text of an exception. In a row with "bit for bit",
the metrics have the same bits as in a run in one process.

"""


def results(names: list[str]) -> tuple[Table, int]:
    """Return the table of these faults, and how many of them did not end as wanted."""
    rows, failed = [], 0
    with running_scenarios() as execute:
        for name in names:
            fault = SCENARIOS[name]
            print(f"{name}: {fault.fault} ...", file=sys.stderr)
            try:
                found, right = execute(name), "yes"
            except AssertionError as error:
                found, right = str(error), "NO"
                failed += 1
            rows.append([name, fault.fault, fault.wanted, found, right])
    return Table("faults", ["name", "fault", "wanted", "found", "as wanted"], rows, numeric=False), failed


if __name__ == "__main__":
    names = sys.argv[1:]
    for name in names:
        if name not in SCENARIOS:
            sys.exit(f"no fault {name!r}; there are {', '.join(SCENARIOS)}")
    table, failed = results(names or list(SCENARIOS))
    print(table.markdown())
    if not names:
        PAGE.write_text(ABOUT + table.markdown(), encoding="utf-8")
    sys.exit(1 if failed else 0)
