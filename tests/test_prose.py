"""Prose and names of the repository are plain and short.

``tools/prose.py`` counts odd turns of phrase.
"""

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from tests.test_cpp_sources import class_names, code, parameters_and_aliases, sources

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def prose():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module("prose")


SOURCES = ("uefl", "uefl_kernels", "tests", "benchmarks", "examples", "tools", "docs")


class Definition(NamedTuple):
    """A module, class or function.

    ``lines`` do not count the docstring, and ``summary`` is the docstring's first line.
    """

    path: Path
    name: str
    kind: Literal["module", "class", "function"]
    lines: int
    summary: str


@pytest.fixture(scope="module")
def definitions(prose):
    """Return the definitions of the repository's Python files, which are parsed once."""
    files = [path for folder in (*SOURCES, "reproduction") for path in (ROOT / folder).rglob("*.py")]
    found = []
    for path in [ROOT / "setup.py", *files]:
        module = ast.parse(path.read_text(encoding="utf-8"))
        found.append(
            Definition(path, path.stem, "module", 0, (ast.get_docstring(module) or "").partition("\n")[0])
        )
        for node in prose.statements(module):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = node.body[0] if ast.get_docstring(node) else None
                lines = node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)
                summary = doc.value.value.partition("\n")[0] if doc else ""
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                found.append(Definition(path, node.name, kind, lines, summary))
    return found


def test_odd_turns_of_phrase_stay_below_the_bound(prose):
    """Each folder has at most 20 per 10,000 words, and folders of tests 40."""
    found = defaultdict(list)
    for path in prose.files_of("."):
        name, sentences = path.relative_to(ROOT), list(prose.sentences([path]))
        for folder in name.parents[: len(name.parents) - 1] or name.parents:
            found[folder] += sentences
    assert len(found) > 60
    for folder, sentences in found.items():
        worst = sorted(sentences, key=lambda sentence: -sentence.marks)[:5]
        bound = 40 if folder.parts[:1] == ("tests",) else 20
        assert prose.rate(sentences) <= bound, "\n".join(f"{one.place}: {one.text}" for one in worst)


def test_marks_are_counted_in_every_kind_of_file(prose, tmp_path):
    (tmp_path / "a.py").write_text('"""Whose it is, beside them."""\nx = 1  # anew\n')
    (tmp_path / "a.h").write_text('int a;  // likewise\nf("the sum of all is made "\n  "anew");\n')
    (tmp_path / "a.md").write_text("Nothing but for this.\n\n```\nanew\n```\n\n| x | anew |\n|---|---|\n")
    (tmp_path / "a.toml").write_text(
        "# The color of\n# nobody\na = '#anew'  # anew\nabout = 'how it is made anew'\n"
    )
    (tmp_path / "a.yml").write_text("- name: anew\n  value: |\n    likewise\n    anew\n  other: anew\n")
    (tmp_path / "CMakeLists.txt").write_text('message(STATUS "This program is made " "anew")  # anew\n')
    (tmp_path / "Makefile").write_text('a:  # anew\n\techo $(@:%.anew=%)\n\techo "it is made anew here"\n')
    marks = {path.name: sum(s.marks for s in prose.sentences([path])) for path in tmp_path.iterdir()}
    assert marks == {
        "a.py": 2,
        "a.h": 2,
        "a.md": 2,
        "a.toml": 3,
        "a.yml": 3,
        "CMakeLists.txt": 2,
        "Makefile": 2,
    }


def test_names_of_tests_fit_in_a_line(definitions):
    names = [each.name for each in definitions if each.kind == "function" and each.name.startswith("test_")]
    assert len(names) > 1000
    assert [name for name in names if len(name) > 60] == []


def test_functions_fit_a_screen(definitions):
    assert [
        f"{each.path.relative_to(ROOT)}::{each.name}: {each.lines}"
        for each in definitions
        if each.kind == "function" and each.lines > 60
    ] == []


def test_summaries_of_functions_have_a_verb_and_a_subject(definitions):
    """A helper's summary is an imperative, and a test's summary a sentence that can be read without its name.

    Ruff holds the rest: a summary is one line that ends with a full stop, and a blank line follows.
    """
    nouns = {"A", "An", "The", "Of", "As", "Such"}
    pronouns = {"It", "Its", "They", "Their", "Them", "Otherwise", "And", "But", "So", "Nor"}
    functions = [each for each in definitions if each.summary and each.kind == "function"]
    assert len(functions) > 2000
    assert [
        f"{each.path.relative_to(ROOT)}::{each.name}: {each.summary}"
        for each in functions
        if each.summary.split()[0] in (pronouns if each.name.startswith("test_") else pronouns | nouns)
    ] == []


def test_a_summary_is_one_sentence(definitions):
    """Further sentences follow after a blank line, and no semicolon joins two of them."""
    two = re.compile(r"(?<!et al)(?<!e\.g)[.!?] +[A-Z`\[]")
    found = [
        each
        for each in definitions
        if two.search(each.summary) or "; " in re.sub(r"``[^`]*``|`[^`]*`", "", each.summary)
    ]
    assert [f"{each.path.relative_to(ROOT)}::{each.name}: {each.summary}" for each in found] == []


def may_share_names(one: Path, other: Path) -> bool:
    """Return whether two folders may have files of the same name.

    These are siblings, two folders of ops, and ``benchmarks/ops`` or ``examples`` with any other folder,
    because their files are named after what they measure or show.
    """
    ops = ROOT / "uefl_kernels" / "ops"
    named_after_others = {ROOT / "benchmarks" / "ops", ROOT / "examples"}
    siblings = one.parent == other.parent
    return (
        siblings or (ops in one.parents and ops in other.parents) or bool({one, other} & named_after_others)
    )


def test_files_of_one_name_lie_in_sibling_folders():
    """``base.py`` has the base class of its folder's modules, in any folder."""
    places: dict[str, list[Path]] = {}
    for folder in ("uefl", "uefl_kernels", "csrc", "benchmarks", "examples", "tests", "tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".cu"):
                places.setdefault(path.name, []).append(path.parent)
    shared = {"__init__.py", "__main__.py", "conftest.py", "base.py"}
    assert len(places["reference.py"]) > 5
    assert [
        f"{name}: {one.relative_to(ROOT)}, {other.relative_to(ROOT)}"
        for name, folders in places.items()
        for one, other in combinations(folders, 2)
        if name not in shared and not may_share_names(one, other)
    ] == []


def files_below(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def rows_of(node: ast.AST, tables: dict[str, list[ast.expr]]) -> tuple[ast.expr | None, list[ast.expr]]:
    """Return the names that a statement or decorator binds, and the values that they take in turn."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
        return node.args[0], getattr(node.args[1], "elts", [])
    if isinstance(node, ast.For):
        return node.target, getattr(node.iter, "elts", [])
    if isinstance(node, ast.Assign):
        table = tables.get(ast.unparse(node.value.value)) if isinstance(node.value, ast.Subscript) else None
        return node.targets[0], table or [node.value]
    return None, []


def patterns(text: str) -> Iterator[ast.expr]:
    """Yield the patterns that a module passes as ``match=``, for a variable each of its values."""
    module, lines = ast.parse(text), text.splitlines()
    tables = {
        ast.unparse(node.targets[0]): node.value.values
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        if not any("match=" in line for line in lines[function.lineno - 1 : function.end_lineno]):
            continue  # to walk all of a function takes longer
        given = [
            node.value for node in ast.walk(function) if isinstance(node, ast.keyword) and node.arg == "match"
        ]
        yield from given
        used = {name.id for value in given for name in ast.walk(value) if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            names, rows = rows_of(node, tables)
            bound = [
                ast.unparse(name).strip("'\"") for name in getattr(names, "elts", [names] if names else [])
            ]
            for name in used.intersection(bound):
                for row in rows:
                    values = getattr(row, "elts", getattr(row, "args", [])) if len(bound) > 1 else [row]
                    yield from values[bound.index(name) :][:1]


# the names that tests give to errors and notices, and the calls that return them
MESSAGE = re.compile(r"\b(str\(error|error|note|notes|notice|notices|stderr|refus\w+|reject\w+)\b")
COMMAND = re.compile(r"\b(?:uefl|pip|python) ")


def phrases(text: str) -> Iterator[ast.Constant]:
    """Yield the texts that a module asserts to be in an error or a notice, except commands."""
    for line in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)):
        for node in (each for each in ast.walk(line.test) if isinstance(each, ast.Compare)):
            if isinstance(node.ops[0], ast.In | ast.NotIn) and MESSAGE.search(
                ast.unparse(node.comparators[0])
            ):
                for piece in ast.walk(node.left):
                    if isinstance(piece, ast.Constant) and not COMMAND.search(str(piece.value)):
                        yield piece


def test_patterns_of_errors_are_keys_and_not_sentences():
    """A message may be worded better without a change of its test."""
    two_words = re.compile(r"(?<![\w'.-])[a-z]{2,} (?:\d+,? )?[a-z]{2,}(?![\w'])")
    texts = {path: path.read_text(encoding="utf-8") for path in files_below("tests")}
    given = [
        (path, piece)
        for path, text in texts.items()
        for pattern in [*(patterns(text) if "match=" in text else ()), *phrases(text)]
        for piece in ast.walk(pattern)
    ]
    assert [
        f"{path.relative_to(ROOT)}:{piece.lineno}: {piece.value}"
        for path, piece in given
        if isinstance(piece, ast.Constant) and isinstance(piece.value, str) and two_words.search(piece.value)
    ] == []


def test_a_pattern_of_one_plain_word_is_a_name(prose):
    """The name is one of the code, or of the test's file, or a word of another library's message."""
    others = {"encrypted", "compression", "nested"}
    code = [
        path.read_text(encoding="utf-8") for name in ("uefl", "uefl_kernels") for path in files_below(name)
    ]
    names = {
        name for text in code for name in re.findall(r"[A-Za-z]\w*", prose.STRING_OR_COMMENT.sub("", text))
    }
    texts = {path: path.read_text(encoding="utf-8") for path in files_below("tests")}
    found = [
        (path, pattern.lineno, pattern.value)
        for path, text in texts.items()
        if "match=" in text
        for pattern in patterns(text)
        if isinstance(pattern, ast.Constant) and re.fullmatch("[a-z]{2,}", str(pattern.value))
    ]
    assert len(found) > 50
    assert [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path, line, word in found
        if word not in names | others and len(re.findall(rf"\b{word}\b", texts[path])) == 1
    ] == []


# Parameters of an algorithm, arguments and results of an op, and inputs of a benchmark have the same name in
# each of them.
SHARED_CLASSES = {"Arguments", "Parameters"}
SHARED_ALIASES = {"OpInputs", "Result"}
IN_BOTH_LANGUAGES = {"KMeansResult", "KMeansUnits", "SearchVariant", "SearchWork", "SparseRows"}
WITH_OR_WITHOUT_SKLEARN = {"ClusteringEstimator", "Estimator"}


@pytest.fixture(scope="module")
def classes(definitions):
    return Counter(each.name for each in definitions if each.kind == "class")


@pytest.fixture(scope="module")
def type_aliases():
    """Return the names that modules give to types, each with these types."""
    assigned = re.compile(r"^([A-Z]\w*[a-z]\w*) = (.+?)(?:  #|$)", re.MULTILINE)
    found = defaultdict(set)
    for path in (path for folder in SOURCES for path in files_below(folder)):
        for name, value in assigned.findall(path.read_text(encoding="utf-8")):
            found[name].add(value)
    return found


def test_a_class_name_occurs_once(classes):
    assert {name for name, count in classes.items() if count > 1} == SHARED_CLASSES


def test_a_type_alias_has_one_meaning(classes, type_aliases):
    assert len(type_aliases) > 70
    assert type_aliases.keys() & classes.keys() == set()
    assert {name for name, types in type_aliases.items() if types & classes.keys()} == set()
    assert {name for name, types in type_aliases.items() if len(types) > 1} == SHARED_ALIASES


def test_python_and_cpp_give_a_name_to_the_same_thing(classes, type_aliases):
    texts = [code(path) for path in sources()]
    cpp = {name for text in texts for name in [*class_names(text), *parameters_and_aliases(text)]}
    assert cpp & (classes.keys() | type_aliases.keys()) == IN_BOTH_LANGUAGES | {"Arguments"}


def test_an_import_alias_has_one_meaning():
    found = defaultdict(set)
    for path in (path for folder in SOURCES for path in files_below(folder)):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if " as " in text else ():
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                if alias.asname:
                    found[alias.asname].add(alias.name.rpartition(".")[2])
    assert len(found) > 60
    assert {name for name, things in found.items() if len(things) > 1} == WITH_OR_WITHOUT_SKLEARN


def test_the_glossary_has_at_most_forty_terms():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    _, *rows = re.findall(r"^\| (\w[^|]*) \|", text, re.MULTILINE)
    terms = [term for row in rows for term in row.split(", ")]
    assert terms == sorted(set(terms), key=terms.index)
    assert 30 < len(terms) <= 40


# synonyms of a term of the glossary, and the folders in which a synonym has no other meaning
SYNONYMS = {
    "(?i)answer": ("reply", "uefl", "tests/federated"),
    "left_out|(?:dropped|discarded|ignored) (?:repl|update)": ("rejected", "uefl"),
    "the frame (?:does|makes|calls|averages)": ("framework", "uefl", "tests/federated"),
    r"(?i)\bsites?\b": ("client", "uefl"),
    "(?i)centroid": ("center", "uefl", "uefl_kernels", "csrc", "tests/federated"),
    "(?i)code ?vector|codebook entr|prototype": ("codeword", "uefl", "uefl_kernels", "csrc"),
    r"\bCTAs?\b": ("thread block", "csrc", "uefl_kernels"),
    "(?i)communication round": ("round", "uefl"),
}


@pytest.mark.parametrize("pattern", SYNONYMS)
def test_terms_of_the_glossary_have_no_synonyms(pattern):
    term, *folders = SYNONYMS[pattern]
    assert [
        f"{path.relative_to(ROOT)}: {found[0]}, expected {term}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".h", ".cpp", ".cu")
        for found in re.finditer(pattern, path.read_text(encoding="utf-8"))
    ] == []


def test_codes_are_indices():
    """Layers call indices ``indices``, so a variable ``codes`` would have codewords.

    It is the peer's name for the bits of BinaryMapper.
    """
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files_below("uefl_kernels/nn")
        if path.name != "binary_mapper.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.arg)
        and "codes" in (getattr(node, "id", ""), getattr(node, "arg", ""))
    ] == []


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
    "name",
    [
        str(path.relative_to(ROOT))
        for folder in ("docs", "benchmarks", "reproduction", ".github", ".")
        for path in (ROOT.glob("*.md") if folder == "." else (ROOT / folder).rglob("*.md"))
        if path.parent.name != "results" or path.name == "README.md"  # the rest is generated
    ],
)
def test_markdown_has_at_most_100_columns(name):
    assert wide((ROOT / name).read_text(encoding="utf-8")) == []


def test_a_row_of_a_table_has_a_line_of_its_own():
    """A browser shows a table that was filled like a paragraph as text."""
    assert [
        f"{path.relative_to(ROOT)}: {row}"
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
        for row in re.findall(r"^.*\S *\| *:?---.*", path.read_text(encoding="utf-8"), re.MULTILINE)
        if not row.lstrip().startswith("|") or row.lstrip("| -:")
    ] == []


def test_comments_of_builds_and_suites_have_at_most_110_columns(prose):
    """A command may be wider, and the first line of a suite or preset, which is its title."""
    files = [path for path in prose.files_of(".") if path.name.endswith(prose.HASH)]
    assert len(files) > 50
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 110 and "# " in line and (number > 1 or path.suffix != ".toml")
    ] == []


def test_each_change_is_a_sentence_of_one_line():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in text.split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)", version, re.MULTILINE)
        assert set(headings) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
        assert len(headings) == len(set(headings))
        entries = version.partition("\n### ")[2].splitlines()[1:]
        changes = [line for line in entries if line and not line.startswith(("- **", "### "))]
        assert [line for line in changes if not re.fullmatch(r"  - .*\.", line) or ". " in line] == []


# stems as American English spells them otherwise; a name of another library is none of ours
BRITISH = re.findall(
    r"\w+",
    """
    centre centring colour grey neighbour behaviour labell quantis normalis initialis centralis personalis
    synchronis generalis minimis maximis optimis linearis organis recognis summaris specialis serialis
    randomis regularis realis artefact modell travell
    """,
)
# words of both, and light gray as Matplotlib spells it
AMERICAN_TOO = re.compile("greyorrgb|lightgrey|specialist|prealis|realist")
SPELLED = (".py", ".md", ".toml", ".cpp", ".h", ".cu", ".cff", ".yml", ".in")


def british(text: str) -> list[str]:
    """Return the stems that a text has, in any case.

    To search for each is much faster than one pattern.
    """
    text = text.lower()
    return [stem for stem in BRITISH if stem in text and (stem in AMERICAN_TOO.sub("", text))]


def test_words_and_names_are_spelled_as_in_american_english():
    found = [
        f"{path.relative_to(ROOT)}: {stem}"
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
        for stem in british(f"{path.name} {path.read_text(encoding='utf-8')}")
    ]
    assert found == []
