"""Check the README: its Python runs, its commands and links exist."""

import re
import shlex
from pathlib import Path

import pytest

from uefl import config
from uefl.algorithms.base import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"\buefl train [^\n`;#]+", README)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_each_snippet_runs_by_itself(number, tmp_path, monkeypatch):
    """A federated run has one round here."""
    monkeypatch.chdir(tmp_path)
    exec(re.sub(r'"rounds": \[\d+\]', '"rounds": [1]', SNIPPETS[number]), {})


def test_the_snippets_are_found():
    assert len(SNIPPETS) == README.count("```python") >= 1


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_has_at_most_twelve_lines(snippet):
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_the_readme_names_can_be_configured(command):
    _, _, source, *options = shlex.split(command.replace("$s", "0"))
    named = dict(zip(options[::2], options[1::2], strict=True)) if not source.startswith("--") else {}
    assert set(named) <= {"--out", "--seed", "--set"}
    if named:
        config.load(source, [named["--set"]] if "--set" in named else None)
    else:
        assert source == "--resume" or source in config.presets()


def test_targets_modules_presets_and_links_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)\)", README)
    named = re.findall(r"presets? `([a-z0-9-]+)`|`([a-z]+-[59])`", README)
    assert all([made, links])
    assert set(made) <= targets
    for link in links:
        assert "://" in link or (ROOT / link).exists(), link
    for name in named:
        assert "".join(name) in config.presets(), name


def test_the_number_of_algorithms_is_the_registry_s():
    text = " ".join(README.split())
    ours = [kind for kind in registry().values() if kind.__module__.startswith("uefl.")]  # tests add others
    assert [int(number) for number in re.findall(r"`uefl` has (\d+) algorithms", text)] == [len(ours)]
