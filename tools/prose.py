"""Count turns of phrase that make prose hard to read: ``python tools/prose.py [FOLDER ...]``.

The program reads docstrings, comments, messages and Markdown with its tables, also the comments and messages
of the build, of suites, of scripts and of workflows. It prints the rate per 10,000 words of each folder, and
the worst sentences. Codebases that are pleasant to read have 3 to 20.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CODE = (".h", ".cpp", ".cu", ".cuh")
HASH = (".toml", ".yml", ".sh", "Makefile", "CMakeLists.txt")  # their comments begin with this sign
YAML_TEXT = re.compile(
    r"^(?P<indent> *)(?:- +)?(?:name|title|about|label|value|(?:site_)?description): +"
    r"(?:[|>]-?\n(?P<block>(?:(?P=indent) +.*\n|\n)+)|(?P<line>[^\s|>].*\n))",
    re.MULTILINE,
)
MARKS = [
    re.compile(mark)
    for mark in (
        r"that of",
        r"those of",
        r"(?:of|by|in|from|with) which",
        r"in the place of",
        r"anew",
        r"but for",
        r"\bbeside(?!s)\b",
        r"\balone\b",
        r"\bnobody\b|\bno one\b",
        r"\bwhose\b",
        r"\blikewise\b",
        r"\bso many\b|\bas many\b",
        r"\bwhat (?:is|it|a|the|was|they|he|one|does|stands|has)\b",
        r"\bthat it\b|\bthat they\b",
        r"\bthose (?:that|who)\b|\bthem that\b",
        r"\bis said\b|\bsays of\b|\bsaid to\b",
        r"\bhear of\b|\bheld to\b|\bleant\b|\breckon",
        r"^(?:What|How|Who|Where|Whether) .*[^?]$",
        r"^As there",
    )
]


class Sentence(NamedTuple):
    """A sentence, its place, and how many marks it has."""

    place: str
    text: str
    words: int
    marks: int


def sentences(files: list[Path]) -> Iterator[Sentence]:
    """Yield the sentences of docstrings, comments, messages and Markdown paragraphs."""
    for path in files:
        for line, prose in _blocks(path.name, path.read_text(encoding="utf-8")):
            plain = re.sub(r"``[^`]*``|`[^`]*`|\$[^$]*\$", "X", prose)
            for text in re.split(r"(?<=[.!?;:])\s+|\n\s*[-*]\s", re.sub(r"\s*\n\s*", " ", plain)):
                words, marks = (
                    len(re.findall(r"[A-Za-z']+", text)),
                    sum(len(mark.findall(text.strip())) for mark in MARKS),
                )
                yield Sentence(f"{path}:{line}", text.strip(), words, marks)


def rate(found: list[Sentence]) -> float:
    """Return the number of marks per 10,000 words."""
    return 1e4 * sum(sentence.marks for sentence in found) / max(1, sum(sentence.words for sentence in found))


def files_of(*folders: str) -> list[Path]:
    """Return the files below some folders that git knows and that have prose."""
    listed = subprocess.run(
        ["git", "ls-files", *folders], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.splitlines()
    endings = (".py", ".md", *CODE, *HASH)
    return [ROOT / name for name in listed if name.endswith(endings) and (ROOT / name).is_file()]


def _blocks(name: str, text: str) -> Iterator[tuple[int, str]]:
    if name.endswith(".py"):
        yield from _python(text)
    elif name.endswith((*CODE, *HASH)):
        start = r".*?//+ ?" if name.endswith(CODE) else r"(?:.*?\s)?#+(?: |$)"
        for match in re.finditer(rf"(?:^{start}.*\n)+", text, re.MULTILINE):
            yield text[: match.start()].count("\n") + 1, re.sub(rf"(?m)^{start}", "", match[0])
        yield from _strings(text, quotes=name.endswith(HASH), comment="//" if name.endswith(CODE) else "#")
        if name.endswith(".yml"):
            for match in YAML_TEXT.finditer(text):
                yield text[: match.start()].count("\n") + 1, match["block"] or match["line"]
    else:
        without_code = re.sub(
            r"^```.*?^```", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
        )
        for match in re.finditer(r"(?:^[^\n|][^\n]*\n)+", without_code, re.MULTILINE):
            yield text[: match.start()].count("\n") + 1, match[0]
        for match in re.finditer(r"^\|.*$", without_code, re.MULTILINE):  # a cell is a sentence
            yield (
                text[: match.start()].count("\n") + 1,
                re.sub(r"\s*(?<!\\)\|\s*", "; ", match[0]).strip("; "),
            )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or statement, at any depth, without the nodes of their expressions."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, part, []):
            yield child
            yield from statements(child)


# A string, which may contain a hash sign, or a comment. To tokenize takes longer than all the rest.
STRING_OR_COMMENT = re.compile(
    r'''""".*?"""|\'{3}.*?\'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*''', re.DOTALL
)


def _python(text: str) -> Iterator[tuple[int, str]]:
    tree = ast.parse(text)
    for node in statements(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for paragraph in re.split(r"\n\s*\n", node.value.value):
                yield node.lineno, paragraph
    yield from _messages(tree)
    for match in STRING_OR_COMMENT.finditer(text):
        if match[0].startswith("#"):
            yield text[: match.start()].count("\n") + 1, match[0].lstrip("# ")


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the strings of at least five words, without docstrings, and with X for values in f-strings."""
    parts: set[ast.AST] = set()  # docstrings, and parts of longer strings; a parent comes before its children
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            parts.add(node.value)
            continue
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        else:
            continue
        if len(re.findall(r"[A-Za-z']+", text)) >= 5:
            yield node.lineno, text


def _strings(text: str, *, quotes: bool, comment: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of at least five words, where strings that follow one another are one.

    With ``quotes``, strings may also have single or three double quotes.
    """
    double = r'(?:"(?:\\.|[^"\\\n])*"\s*)+'
    string = rf'""".*?"""|{double}|\'[^\'\n]*\'' if quotes else double
    for match in re.finditer(rf"{comment}[^\n]*|{string}", text, re.DOTALL):
        words = re.sub(r'"\s*"', "", match[0]).strip().strip("\"'")
        if match[0][0] in "\"'" and len(re.findall(r"(?<![\w.])[A-Za-z']+(?![\w.(])", words)) >= 5:
            yield text[: match.start()].count("\n") + 1, words


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folders", nargs="*", default=["."])
    parser.add_argument("--most", type=int, default=10, help="sentences to print")
    options = parser.parse_args()
    everything: list[Sentence] = []
    for folder in options.folders:
        found = list(sentences(files_of(folder)))
        print(f"{folder}: {rate(found):.0f} per 10,000 words")
        everything += found
    for sentence in sorted(everything, key=lambda sentence: -sentence.marks / max(sentence.words, 6))[
        : options.most
    ]:
        print(f"  {sentence.place}: {sentence.text[:200]}")


if __name__ == "__main__":
    main()
