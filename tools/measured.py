"""For MkDocs: the page of measured times, a table for each machine, out of benchmarks/results/*.csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MARK = "<!-- a table for each machine -->"


def tables() -> str:
    """Markdown."""
    return "\n\n".join(table(path) for path in sorted(RESULTS.glob("*.csv")))


def table(path: Path) -> str:
    """Of one machine; the rows of a shape from the fastest to the slowest, with the share of wrong answers beside."""
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["median_ms"]]
    cases: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"], row["threads"]), []).append(row)
    versions = ", ".join(f"torch {one}" for one in sorted({row["torch"] for row in rows}))
    dates = sorted(row["date"] for row in rows)
    lines = [
        f"## {rows[0]['machine']}",
        "",
        f"{versions}; measured from {dates[0]} to {dates[-1]}.",
        "",
        "| op | shape | threads | provider | median, ms | peak, MB | error | what the error is |",
        "|:--|:--|--:|:--|--:|--:|--:|:--|",
    ]
    for (op, shape, threads), of_case in cases.items():
        for row in sorted(of_case, key=lambda row: float(row["median_ms"])):
            provider = f"{row['provider']} ({row['variant']})" if row["variant"] else row["provider"]
            name = f"**{provider}**" if row["provider"] == "uefl" else provider
            peak = f"{float(row['peak_mb']):.0f}" if row["peak_mb"] else ""
            time = f"{float(row['median_ms']):.4g}"
            lines.append(f"| {op} | {shape} | {threads} | {name} | {time} | {peak} | {row['error']} | {row['gate']} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What MkDocs calls for every page."""
    return markdown.replace(MARK, tables()) if MARK in markdown else markdown
