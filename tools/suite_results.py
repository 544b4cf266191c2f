"""Save the results of a suite: ``python tools/suite_results.py runs/table1-cpu ...``.

The program writes files into reproduction/results: NAME.json has the numbers of every seed, NAME.md the
tables of the report, and NAME.png the curve of a sweep or the accuracy over the rounds. If the suite drew a
Pareto front, or the perplexity or a loss over the rounds, these pictures are NAME-KEY.png.

If the averages of a suite or the numbers of a paper have changed, ``python tools/suite_results.py
reproduction/results/NAME.json`` writes the tables of NAME.md, the curve of a sweep and the Pareto front again
from the saved numbers.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from uefl.report.plots import save
from uefl.suites import report
from uefl.suites.suite import load

PLACE = Path(__file__).parents[1] / "reproduction" / "results"
LARGEST = 60_000  # bytes of a picture
MORE = {
    "front": "The Pareto front",
    "local": "Global and local models",
    "perplexity": "Perplexity over the rounds",
    "train_loss": "Training loss over the rounds",
    "server_loss": "Loss of the server's step over the rounds",
    "nll": "Test loss over the rounds",
}
_COLORS = 64  # of a picture that would be larger
_PATH = re.compile(r"(?<!\S)/[^\s:,]+")  # of the machine that the suite ran on


def _kept(picture: Path, place: Path) -> bool:
    """Copy a picture, with fewer colors if it is too large, and return False if it still is."""
    if picture.stat().st_size <= LARGEST:
        shutil.copyfile(picture, place)
        return True
    with Image.open(picture) as full:
        full.convert("RGB").quantize(_COLORS).save(place, optimize=True)
    if place.stat().st_size > LARGEST:
        place.unlink()
        return False
    return True


def keep(folder: Path, place: Path = PLACE) -> None:
    """Copy the numbers, tables and picture of a suite's folder into ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    found = json.loads(
        (folder / "results.json").read_text(encoding="utf-8"),
        parse_float=lambda text: float(f"{float(text):.5g}"),
    )
    name = found["suite"]
    found["missing"] = {run: _PATH.sub("ROOT", why) for run, why in found["missing"].items()}
    text = (folder / "report.md").read_text(encoding="utf-8")
    pages = [text.partition("## Curves")[0].partition("## Missing runs")[0].rstrip()]
    picture = next(
        (p for p in (folder / "plots" / f"{kind}.png" for kind in ("sweep", "curves")) if p.exists()), None
    )
    if picture is not None and _kept(picture, place / f"{name}.png"):
        what = "The sweep" if picture.stem == "sweep" else "Accuracy over the rounds"
        pages.append(f"![{what}, {name}]({name}.png)")
    for key, what in MORE.items():
        picture = folder / "plots" / f"{key}.png"
        if picture.exists() and _kept(picture, place / f"{name}-{key}.png"):
            pages.append(f"![{what}, {name}]({name}-{key}.png)")
    pages.append(f"Every number by seed: [{name}.json]({name}.json)")
    if found["missing"]:
        pages += ["## Missing runs", "\n".join(f"- {line}" for line in report.reasons(found["missing"]))]
    (place / f"{name}.json").write_text(_short(found), encoding="utf-8")
    (place / f"{name}.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")


class SavedResult(report.SuiteResult):
    """Provide the numbers of a saved file instead of runs."""

    numbers: dict[str, Any]

    def values(self, case: str, arm: str, measure: str) -> dict[int, float]:
        """Return one measure by seed."""
        if case in self.suite.averages:
            return super().values(case, arm, measure)
        found = self.numbers.get(case, {}).get(arm, {}).get(measure, {})
        return {int(seed): value for seed, value in found.items()}


def again(path: Path) -> None:
    """Write the tables and the sweep of a saved page from its numbers, and keep the rest of the page."""
    found = json.loads(path.read_text(encoding="utf-8"))
    result = SavedResult(
        load(found["suite"]),
        found["scale"],
        {(case, arm): {} for case, arms in found["cases"].items() for arm in arms},
        {},
    )
    object.__setattr__(result, "numbers", found["cases"])
    tables = iter(
        [
            report.table(result),
            *(block for block in report.differences(result) if isinstance(block, report.Table)),
        ]
    )
    page = path.with_suffix(".md")
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"(?:^\|.*\n)+", lambda _: next(tables).markdown(), text, flags=re.MULTILINE), encoding="utf-8"
    )
    with TemporaryDirectory() as folder:
        for picture in save(report.draw_means(result), Path(folder)):
            end = {"sweep.png": ".png", "front.png": "-front.png"}[picture.name]
            _kept(Path(folder) / "plots" / picture.name, path.with_name(path.stem + end))


def _short(found: dict[str, Any]) -> str:
    """Return JSON with the numbers of an arm's seeds on one line."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\{([^{}]*)\}", lambda inner: "{" + " ".join(inner[1].split()) + "}", text) + "\n"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("error: name folders of suites, or files of reproduction/results")
    for argument in sys.argv[1:]:
        numbers = Path(argument) if argument.endswith(".json") else Path(argument) / "results.json"
        if not numbers.is_file():
            sys.exit(f"error: {numbers} does not exist; expected the folder of a suite, or NAME.json")
        (again if argument.endswith(".json") else keep)(Path(argument))
