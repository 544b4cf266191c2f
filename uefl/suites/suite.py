"""The definition of a suite: cases, the arms and seeds of each, and the numbers that a paper prints for them.

A file ``NAME.toml`` begins with a comment line about its purpose, and holds:

``against``             the baseline arm of all comparisons
``measures``            the measures of its table, in order; the first one is drawn
``axis``                for a sweep: the meaning of ``x`` in its cases
``front``               two measures to minimize together; their Pareto front is drawn
``[all]``               sections of a configuration that every case begins with
``cpu_base``            a file of sections that ``[cpu]`` begins with, relative to the suite's folder
``[cpu]``               sections that ``--scale cpu`` changes in every case
``[cases.NAME]``        sections of the case, on top of ``[all]``; ``base`` may name a preset; ``x`` for a
                        sweep; ``against`` names the case with the baseline arm, if the cases differ in
                        keys outside of arms, as ``training.lr``
``label``, ``panel``    in a case of a sweep: its tick label, and its panel of the picture
``[cases.NAME.cpu]``    sections that ``--scale cpu`` changes in this case
``[cases.NAME.paper]``  ``ARM = {MEASURE = NUMBER}``: numbers of the paper
``[averages.NAME]``     ``cases``: their mean is a row of its own, paired by seed; ``paper`` has the
                        paper's numbers for it

A run has one arm and one seed. So arms and seeds can train at the same time, and a new arm does not repeat
the runs of other arms.

The suites of the papers are not part of the package: they lie in ``reproduction/`` of the repository.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .. import config
from ..config import Config
from ..config.config import NAME, SECTIONS
from ..config.keys import named
from ..config.load import merged
from ..errors import UserError, nearest
from ..fields import parse, shown
from ..paths import check_file, command, expanded, read_text

Scale = Literal["cpu", "paper"]
Sections = dict[str, Any]
# the suites of the clone that uefl runs from, or in which uefl is started
_FOLDERS = (Path(__file__).parents[2] / "reproduction", Path("reproduction"))
# files and folders that a suite writes next to the folders of its cases
_TAKEN = ("plots", "report.md", "report.html", "results.json", "suite.lock")
_PART_OF = {"table5": "table1"}  # the same runs; its numbers are the numbers of table 1 by domain


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Case(_Table):
    """One block of rows of a suite's table: a federation and the arms that train on it."""

    base: str | None = None
    against: str | None = None
    run: Sections = {}
    data: Sections = {}
    model: Sections = {}
    training: Sections = {}
    arms: Any = {}
    cpu: Sections = {}
    paper: dict[str, dict[str, float]] = {}
    x: float | None = None
    label: str | None = None
    panel: str = ""

    def sections(self) -> Sections:
        """Return the sections of a configuration that the case names."""
        return self.model_dump(
            include={"base", "run", "data", "model", "training", "arms"}, exclude_unset=True
        )


class Average(_Table):
    """A row of a suite's table: the mean over several cases."""

    cases: list[str] = Field(min_length=2)
    paper: dict[str, dict[str, float]] = {}


class Suite(_Table):
    """A file of cases."""

    name: str
    about: str
    against: str
    measures: tuple[str, ...] = Field(("accuracy", "entropy"), min_length=1)
    axis: str | None = None
    front: tuple[str, str] | None = None
    cpu_base: str | None = None
    all: Sections = {}
    cpu: Sections = {}
    cases: dict[str, Case] = Field(min_length=1)
    averages: dict[str, Average] = {}

    def configs(self, scale: Scale) -> dict[str, Config]:
        """Return the configuration of every case, with all its arms.

        Raises:
            UserError: a case that is named is not a configuration, or no case has the arm to compare with.
        """
        made = {}
        for name, case in self.cases.items():
            table = merged(self.all, case.sections())
            if isinstance(case.arms, list):
                table["arms"] = {arm: named(self.all.get("arms")).get(arm, {}) for arm in map(str, case.arms)}
            if scale == "cpu":
                for sections in (self.cpu, case.cpu):
                    table = merged(table, sections)
            try:
                made[name] = config.load(table).absolute()
                self._check_paper(case.paper, list(made[name].arms))
            except UserError as error:
                raise UserError(f"suite {self.name!r}, case {name!r}: {error}") from None
        arms = dict.fromkeys(arm for cfg in made.values() for arm in cfg.arms)
        if self.against not in arms:
            raise UserError(
                f"suite {self.name!r}, key 'against': no case has an arm {self.against!r}; there are"
                f" {', '.join(arms)}"
            )
        self._check_averages(made)
        for name in self.cases:
            of, arm = self.baseline(name)
            if of not in made:
                raise UserError(
                    f"suite {self.name!r}, case {name!r}, key 'against': no case {of!r}{nearest(of, made)}"
                )
            if of != name and arm not in made[of].arms:
                raise UserError(
                    f"suite {self.name!r}, case {name!r}, key 'against': case {of!r} has no arm {arm!r}"
                )
        return made

    def baseline(self, case: str) -> tuple[str, str]:
        """Return the case and the arm that the arms of a case, or of an average, are compared with."""
        return (self.cases[case].against if case in self.cases else None) or case, self.against

    def paper(self, row: str) -> dict[str, dict[str, float]]:
        """Return the numbers of the paper for a case or an average."""
        return (self.cases[row] if row in self.cases else self.averages[row]).paper

    def _check_averages(self, made: dict[str, Config]) -> None:
        for name, average in self.averages.items():
            unknown = next((case for case in average.cases if case not in made), None)
            if unknown is not None:
                raise UserError(
                    f"suite {self.name!r}, key 'averages.{name}.cases': no case"
                    f" {unknown!r}{nearest(unknown, made)}"
                )
            if name in made:
                raise UserError(
                    f"suite {self.name!r}, key 'averages': {name!r} is a case already; choose another name"
                )
            arms = [
                arm
                for arm in made[average.cases[0]].arms
                if all(arm in made[case].arms for case in average.cases)
            ]
            self._check_paper(average.paper, arms)

    def _check_paper(self, paper: dict[str, dict[str, float]], arms: list[str]) -> None:
        """Check that a paper's numbers belong to an arm of the case and to a measure of the suite."""
        for arm, numbers in paper.items():
            for what, name, known in (
                ("arm", arm, arms),
                *(("measure", measure, self.measures) for measure in numbers),
            ):
                if name not in known:
                    raise UserError(
                        f"key 'paper': there is no {what} {name!r}{nearest(name, known)}; there are"
                        f" {', '.join(known)}"
                    )


@dataclass(frozen=True, eq=False)
class Job:
    """One run of a suite."""

    case: str
    arm: str
    seed: int
    config: Config
    folder: Path

    @property
    def rounds(self) -> int:
        """Return the number of rounds that the job trains."""
        return sum(self.config.training.iterations())


def suites() -> dict[str, str]:
    """Return the first comment line of every suite of the papers by name, none outside of a clone."""
    return {name: _about(file.read_text(encoding="utf-8")) for name, file in _files().items()}


def called(name: str) -> str:
    """Return the suite that a name means: table 5 has the runs of table 1."""
    return _PART_OF.get(name, name)


def load(name: str) -> Suite:
    """Read a suite by its name, or a ``.toml`` file by its path.

    Raises:
        UserError: the suite or the file does not exist, or the file is not a suite.
    """
    path = expanded(name)
    if path.suffix.lower() != ".toml":
        files = _files()
        if name not in files:
            raise UserError(
                f"no suite {name!r}{nearest(name, files)}; see `uefl suite`, or give the path of a .toml file"
            )
        path = files[name]
    text, table = _read(path)
    if {*SECTIONS, "arms"} & table.keys():
        raise UserError(f"{path} is a configuration, not a suite; run it with: {command('train', path)}")
    suite = parse(Suite, path.stem, {"name": path.stem, "about": _about(text), **table})
    if suite.cpu_base is not None:
        suite = suite.model_copy(update={"cpu": merged(_read(path.parent / suite.cpu_base)[1], suite.cpu)})
    if suite.axis is not None and all(case.x is None for case in suite.cases.values()):
        raise UserError(
            f"key 'axis': no case has a value on the axis {suite.axis!r}; give cases an `x`, or omit the axis"
        )
    for case in suite.cases:
        if case in _TAKEN:
            raise UserError(
                f"key 'cases': {case!r} is a file or folder that the suite writes itself; choose another name"
            )
        if not NAME.fullmatch(case):
            raise UserError(
                f"key 'cases': {shown(case)} cannot be the name of a folder; expected up to 40 letters,"
                " digits, '.', '_' and '-'"
            )
    return suite


def _read(path: Path) -> tuple[str, Sections]:
    """Return a TOML file as text and as a table."""
    check_file(path, "the suite", "expected a .toml file")
    try:
        text = read_text(path, "utf-8-sig")  # some editors write a byte order mark first
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def jobs(suite: Suite, scale: Scale, seeds: int, out: Path, threads: int) -> list[Job]:
    """Return all runs of a suite, seed by seed from that of the case, so that a stop leaves whole seeds.

    If two cases have the same configuration for an arm, as in a sweep, they share the folder of this run.

    Raises:
        UserError: a case is not a valid configuration.
    """
    made: list[Job] = []
    folders: dict[str, Path] = {}
    for i in range(seeds):
        for case, cfg in suite.configs(scale).items():
            seed = cfg.run.seed + i
            for arm in cfg.arms:
                config = replace(cfg.with_run(seed=seed, threads=threads), arms={arm: cfg.arms[arm]})
                folder = folders.setdefault(config.to_toml(), out / case / arm / f"seed-{seed}")
                made.append(Job(case, arm, seed, config, folder))
    return made


def _files() -> dict[str, Path]:
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return {file.stem: file for file in sorted(folder.glob("*.toml"), key=_by_number)} if folder else {}


def _by_number(file: Path) -> tuple[str, int]:
    digits = file.stem[len(file.stem.rstrip("0123456789")) :]
    return file.stem.removesuffix(digits), int(digits or 0)


def _about(text: str) -> str:
    first, *_ = text.splitlines() or [""]
    return first.lstrip("# ") if first.startswith("#") else "a suite without a description"
