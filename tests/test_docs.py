"""Check docs/: examples run, and every public name of the kernels has an entry and an example."""

from __future__ import annotations

import doctest
import html
import importlib
import inspect
import itertools
import os
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import uefl
import uefl.data
import uefl_kernels
import uefl_kernels.metrics
import uefl_kernels.nn
from uefl import config
from uefl_kernels._library import _runs_on

ROOT = Path(__file__).parents[1]
API = sorted((ROOT / "docs" / "api").glob("*.md"))
ELSEWHERE = ("algorithms",)  # the tests of its algorithm run it
GUIDES = [
    page
    for page in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("guides/*.md")])
    if page.stem not in ELSEWHERE
]
PUBLIC = {f"uefl_kernels.{name}" for name in uefl_kernels.__all__} | {
    f"uefl_kernels.nn.{name}" for name in uefl_kernels.nn.__all__
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_examples_of_the_reference_give_their_output(page):
    examples = blocks(page, "pycon")
    assert examples
    torch.manual_seed(0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for text in examples:
        test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
        assert test.examples
        said: list[str] = []
        runner.run(test, out=said.append)
        assert not said, "".join(said)


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page in GUIDES for number in range(len(blocks(page, "python")))],
    ids=lambda x: getattr(x, "stem", None),
)
def test_each_python_block_of_a_guide_runs_by_itself(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks(page, "python")[number], {})


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_runs_that_a_page_names_can_be_configured(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")  # a command may continue on the next line
    for command in re.findall(r"\buefl train [a-z][^\n`;#|)]*", text):
        _, _, source, *options = shlex.split(command)
        settings = [
            value for option, value in itertools.pairwise(options) if option == "--set" and "$" not in value
        ]
        if not source.endswith(".toml"):
            config.load(source, settings)


def test_every_public_name_has_an_entry_and_an_example():
    text = "\n".join(page.read_text(encoding="utf-8") for page in API)
    # imported on first use
    entries = {name.replace(".estimator.", ".") for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert PUBLIC | {"uefl_kernels.numpy", "uefl_kernels.metrics", "uefl_kernels.nn.convert"} == {
        name for name in entries if name.startswith("uefl_kernels")
    }
    assert {name for name in entries if not name.startswith("uefl_kernels")} == {
        "uefl.models.saved.SavedModel",
        *(f"uefl.{name}" for name in uefl.__all__ if name != "__version__"),
        *(f"uefl.data.{name}" for name in uefl.data.__all__),
    }
    examples = "\n".join(code for page in API for code in blocks(page, "pycon"))
    functions = [
        name
        for name, value in vars(uefl_kernels.metrics).items()
        if getattr(value, "__module__", "") == "uefl_kernels.metrics"
    ]
    for name in [
        *(name.rpartition(".")[2] for name in PUBLIC),
        *(name for name in functions if not name.startswith("_")),
    ]:
        assert re.search(rf"\b{name}\b", examples), f"{name} has no example"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_entries_have_shapes_errors_source_and_equivalent(name):
    thing = getattr(uefl_kernels.nn if ".nn." in name else uefl_kernels, name.rpartition(".")[2])
    # the docstring of a NamedTuple has no entries, because its fields have docstrings; an error has none
    if isinstance(thing, bool) or (isinstance(thing, type) and issubclass(thing, (tuple, Exception))):
        return
    pieces = ["Raises:", "Equivalent to"]
    if name not in ("uefl_kernels.backend", "uefl_kernels.collision_report"):  # these have no paper
        pieces += ["[", "Source:"]
    assert [piece for piece in pieces if piece not in inspect.getdoc(thing)] == []


def is_there(name: str) -> bool:
    """Return True if a module or one of its members has a dotted name."""
    try:
        return pydoc.locate(name) is not None
    except pydoc.ErrorDuringImport:  # the module needs a package of an extra
        return True


def test_every_dotted_name_of_a_page_exists():
    groups = {"uefl.sources", "uefl.partitions", "uefl.networks"}  # of entry points
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = set(re.findall(r"`(uefl(?:_kernels)?(?:\.[A-Za-z_]\w*)+)", text))
    assert {name for name in names if not is_there(name)} <= groups
    assert len(names) > 20


def test_the_reference_has_no_private_members():
    # "members: true" takes all members and ignores the filters
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert 'filters: ["!^_"]' in settings
    assert [page.name for page in API if "members:" in page.read_text(encoding="utf-8")] == []
    assert not re.search(r"^ +members:", settings, re.MULTILINE)


def test_the_table_of_gpus_agrees_with_the_build():
    build = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    (generations,) = re.findall(r"^set\(GENERATIONS (.*)\)$", build, re.MULTILINE)
    wheel = (
        *(f"{generation}-real" for generation in generations.split()),
        f"{generations.split()[-1]}-virtual",
    )
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (\d+)\.(\d) \| (\S+).*? (?:sm_(\d+\w?))? *\| `(\S+)`", page, re.MULTILINE)
    assert len(rows) > 5
    for major, minor, kernels, code, product in rows:
        capability = (int(major), int(minor))
        assert (kernels == "CUDA") == _runs_on(wheel, capability), capability
        assert [code] == (
            [one.removesuffix("-real") for one in wheel[:-1] if _runs_on((one,), capability)] or [""]
        ), capability
        assert (product == "wgmma") == (capability == (9, 0)), capability


def test_every_page_is_two_clicks_away():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = settings.partition("\nnav:")[2].partition("plugins:")[0]
    named = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", navigation, re.MULTILINE)
    assert len(named) <= 25
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {link for link in re.findall(r"\]\(([^)#]+\.md)", first) if not link.startswith("..")}
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages == {*named, *linked}
    others = re.findall(
        r"^  (\S+)$", settings.partition("not_in_nav: |\n")[2].partition("\n\n")[0], re.MULTILINE
    )
    # mkdocs warns of a page that is in neither list
    assert {page for page in pages if any(fnmatch(page, other) for other in others)} == pages - {*named}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_only_its_owner_reads_the_secret_of_the_guide(tmp_path):
    (command,) = (
        line
        for line in (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8").splitlines()
        if "openssl rand" in line
    )
    subprocess.run(["sh", "-c", f"umask 022; {command}"], cwd=tmp_path, check=True)
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_links_out_of_the_docs_become_text(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    inside = importlib.import_module("links").inside
    kept = "[b](uefl.md#y), ![c](images/c.png), [d](https://a.b/c)"
    page = f"[a](../benchmarks/README.md#x), {kept}, [e](../uefl.md), [f](../../Makefile)"
    assert inside(page, "") == f"a, {kept}, e, f"
    assert inside(page, "api") == page.replace("[f](../../Makefile)", "f")


def test_links_to_kept_results_stay_links(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    inside = importlib.import_module("links").inside
    assert (
        inside("![a](../reproduction/results/a.png) [b](../reproduction/results/b.md)", "")
        == "![a](results/a.png) [b](results/b.md)"
    )
    assert inside("[b](../../reproduction/results/b.md#x)", "guides") == "[b](../results/b.md#x)"
    assert inside("[a](../../docs/uefl.md), [b](b.md)", "results") == "[a](../uefl.md), [b](b.md)"


def test_every_kept_result_that_a_page_names_is_there():
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "reproduction").rglob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)", page.read_text(encoding="utf-8"))
    ]
    assert [
        (page.name, link)
        for page, link in links
        if "result" in str(page.parent / link) and not (page.parent / link).exists()
    ] == []
    index = (ROOT / "reproduction" / "results" / "README.md").read_text(encoding="utf-8")
    kept = {path.name for path in (ROOT / "reproduction" / "results").glob("*.md")} - {"README.md"}
    assert kept == set(re.findall(r"\]\(([^/)]+\.md)\)", index))
    titles = {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in (ROOT / "reproduction").rglob("*.toml")
    }
    rows = dict(re.findall(r"^\| \[([\w-]+)\]\(.*?\) \| (.*) \|$", index, re.MULTILINE))
    assert [name for name in rows if rows[name] != titles.get(name, rows[name])] == []


def test_signs_of_docstrings_become_markdown(monkeypatch):
    pytest.importorskip("griffe", reason="mkdocstrings is not installed: make docs uses it")
    monkeypatch.syspath_prepend(ROOT / "tools")
    markdown = importlib.import_module("docstrings").markdown
    assert (
        markdown("see :func:`vq_assign`, :class:`~uefl_kernels.MCStats`::") == "see `vq_assign`, `MCStats`:"
    )
    assert (
        markdown("Args:\n    a, b: one\n        two\n")
        == "Args:\n    a: one\n        two\n    b: one\n        two\n"
    )
    assert markdown("Source: a\n    b\n    c\n\nArgs:\n    d: e\n") == "Source: a b c\n\nArgs:\n    d: e\n"


def formulas(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return [block or inline for block, inline in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, re.DOTALL)]


@pytest.mark.parametrize(
    "page",
    [page for page in GUIDES if formulas(page.read_text(encoding="utf-8"))],
    ids=lambda page: page.stem,
)
def test_every_formula_becomes_mathml_without_a_leftover_command(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    to_mathml = importlib.import_module("formulas").rendered
    for latex in formulas(page.read_text(encoding="utf-8")):
        rendered = to_mathml(f'<span class="arithmatex">\\({html.escape(latex)}\\)</span>')
        assert rendered.startswith('<span class="math"><math')
        assert not re.search(r"\\[a-zA-Z]", rendered), latex


def test_a_wide_formula_scrolls(monkeypatch):
    """On a narrow screen, the end of the formula would otherwise not be shown."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    shown = importlib.import_module("formulas").rendered('<div class="arithmatex">\\[a + b\\]</div>')
    name = re.match(r'<div class="(\w+)"><math', shown)[1]
    style = (ROOT / "docs" / "stylesheets" / "tables.css").read_text(encoding="utf-8")
    assert re.search(rf"div\.{name} {{\s*overflow-x: auto;", style)


def test_long_cells_of_a_table_are_marked(monkeypatch):
    """On a narrow screen, their columns would otherwise have a word in each line."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    marked = importlib.import_module("table_cells").marked
    page = '<td><code>{}</code></td>\n<td style="text-align: left;">{}</td>'
    assert marked(page.format("a " * 20, "b")) == page.format("a " * 20, "b")
    name = re.match(r'<td class="(\w+)"><code>', marked(page.format("a " * 40, "b")))[1]
    assert marked(page.format("a", "b " * 40)).count(f'<td class="{name}" style="text-align: left;">b b') == 1
    style = (ROOT / "docs" / "stylesheets" / "tables.css").read_text(encoding="utf-8")
    assert re.search(rf"td\.{name},[^{{]*{{\s*min-width: 9rem;", style)


def test_names_of_functions_and_primes_have_their_usual_places(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    shown = importlib.import_module("formulas").rendered(
        "<span class=\"arithmatex\">\\(\\operatorname{sg}[z] + f' + \\pi'_k\\)</span>"
    )
    assert '<mo lspace="0.1em" rspace="0.1em">sg</mo>' in shown
    assert shown.count('<mo lspace="0" rspace="0">&#x02032;</mo>') == 2
    assert "sup>" not in shown


FETCHED = re.compile(
    r"""!\[[^]]*\]\(https?:|(src|data)="https?:|<link(?![^>]+rel="canonical")[^>]+href="https?:|@import"""
    r"""|url\(["']?https?:"""
)


@pytest.mark.parametrize(
    ("text", "fetches"),
    [
        ("![a](https://a.example/b.png)", True),
        ('<script src="https://a.example/b.js">', True),
        ('<link rel="stylesheet" href="https://a.example/b.css">', True),
        ("@font-face { src: url('https://a.example/b.woff') }", True),
        ('<link rel="canonical" href="https://a.example/">', False),
        ("[a](https://a.example)", False),
    ],
)
def test_an_address_that_a_browser_fetches_is_found(text, fetches):
    assert bool(FETCHED.search(text)) == fetches


def fetching(pages):
    return [str(page.relative_to(ROOT)) for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]


def test_the_site_fetches_nothing_from_elsewhere():
    assert "://" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "stylesheets").glob("*.css")]
    assert len(pages) > 20
    assert fetching(pages) == []


def test_the_built_site_fetches_nothing_from_elsewhere():
    built = [*(ROOT / "build" / "site").rglob("*.html")]
    if not built:
        pytest.skip("no build/site: run make docs")
    assert fetching(built) == []


def test_drawings_match_their_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "drawings")
    for drawing in importlib.import_module("draw").DRAWINGS:
        name = f"{drawing.__name__.replace('_', '-')}.svg"
        drawing().save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / "images" / name).read_bytes()
    assert len([*tmp_path.iterdir()]) == len([*(ROOT / "docs" / "images").glob("*.svg")])


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=lambda page: page.stem)
def test_a_design_page_has_a_picture_numbers_and_dropped_ideas(page):
    text = page.read_text(encoding="utf-8")
    numbers = re.search(r"^## Two numbers$(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert re.search(r"!\[[^\]]+\]\(\.\./images/[a-z-]+\.svg\)", text)
    assert numbers
    assert ["**Bytes**" in numbers[1], "**Operations**" in numbers[1]] == [True, True]
    assert re.search(r"^## Tried.* dropped$", text, re.MULTILINE)
    assert len(text.split()) < 1500


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda page: page.stem
)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tutorial"}
    for language, code in re.findall(
        r"^```(python|toml|console)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        if language == "python":
            exec(code, names)
        elif language == "toml":
            Path(re.findall(r"`(\S+\.toml)`", page.read_text(encoding="utf-8"))[0]).write_text(code)
        else:
            command = [sys.executable, "-m", *shlex.split(code)]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_no_advice_installs_a_package_from_an_index():
    """No index has uefl, so that anybody could publish a package of this name."""
    files = [path for folder in ("uefl", "uefl_kernels") for path in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    advice = re.compile(r"""pip install ['"]?uefl(?![\w./-])""")
    assert not [path for path in files if advice.search(path.read_text(encoding="utf-8"))]
