"""The prose of the repository gets plainer, never odder. ``tools/prose.py`` counts."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# turns of phrase per 10,000 words. The aim is 20, and 40 for tests: lower a bound when the text below it
# improves
BOUNDS = {  # turns of phrase per 10,000 words
    "uefl": 20,
    "uefl_kernels": 20,
    "csrc": 20,
    "tests": 40,
    "benchmarks": 40,
    "tools": 20,
    "examples": 20,
    "reproduction": 20,
    "docs": 30,
    "docs/design docs/guides docs/tutorials": 20,
    "README.md CONTRIBUTING.md CHANGELOG.md": 20,
}


# names of tests with more than 60 letters: lower the number when some are gone
LONG_NAMES = 20
# Markdown lines of more than 100 characters outside of tables, code and formulas: shrink these, too
WIDE: dict[str, int] = {}


@pytest.fixture
def prose(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("prose")


@pytest.mark.parametrize("folders", BOUNDS)
def test_odd_turns_of_phrase_stay_below_the_bound(folders, prose):
    found = list(prose.sentences(prose.files_of(*folders.split())))
    assert sum(sentence.words for sentence in found) > 200
    worst = sorted(found, key=lambda sentence: -sentence.marks)[:5]
    assert prose.rate(found) <= BOUNDS[folders], "\n".join(
        f"{sentence.place}: {sentence.text}" for sentence in worst
    )


def test_marks_are_counted_in_docstrings_comments_and_markdown(prose, tmp_path):
    (tmp_path / "a.py").write_text('"""Whose it is, beside them."""\nx = 1  # anew\n')
    (tmp_path / "a.h").write_text("int a;  // likewise\nint b;\n")
    (tmp_path / "a.md").write_text("Nothing but for this.\n\n```\nanew\n```\n")
    marks = {path.name: sum(s.marks for s in prose.sentences([path])) for path in tmp_path.iterdir()}
    assert marks == {"a.py": 2, "a.h": 1, "a.md": 1}


def test_names_of_tests_fit_in_a_line():
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert sum(len(name) > 60 for name in names) <= LONG_NAMES


def wide(text: str) -> list[str]:
    """Return the lines of more than 100 characters outside of tables, code and formulas."""
    text = re.sub(r"^( *)```.*?^ *```|^\$\$.*?\$\$$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        line
        for line in text.splitlines()
        if len(line) > 100
        and not line.lstrip().startswith("|")
        and not line.startswith("    ")
        and " " in re.sub(r"`[^`]*`", "", line.strip())
    ]


@pytest.mark.parametrize(
    "name", [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
)
def test_markdown_has_at_most_100_columns(name):
    lines = wide((ROOT / name).read_text(encoding="utf-8"))
    assert len(lines) <= WIDE.get(name, 0), "\n".join(lines)


# stems as American English spells them otherwise; a name of another library is none of ours
BRITISH = re.compile(
    r"centre|centring|colour|grey(?!orrgb)|neighbour|behaviour|labell|quantis|normalis|initialis|"
    r"centralis|personalis|synchronis|generalis|minimis|maximis|optimis|linearis|organis|recognis|"
    r"summaris|specialis(?!t)|serialis|randomis|regularis|(?<!p)realis(?!t)|artefact|modell|travell",
    re.IGNORECASE,
)
SPELLED = (".py", ".md", ".toml", ".cpp", ".h", ".cu", ".cff", ".yml", ".in")
LIGHT_GREY = re.compile("lightgrey")  # as Matplotlib spells it


def test_words_and_names_are_spelled_as_in_american_english():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for folder in (
            "uefl",
            "uefl_kernels",
            "csrc",
            "tests",
            "benchmarks",
            "examples",
            "docs",
            "tools",
            "reproduction",
            ".",
        )
        for path in (ROOT.glob("*") if folder == "." else (ROOT / folder).rglob("*"))
        if path.suffix in SPELLED and path != Path(__file__)
        for match in BRITISH.finditer(LIGHT_GREY.sub("", f"{path.name} {path.read_text(encoding='utf-8')}"))
    ]
    assert found == []
