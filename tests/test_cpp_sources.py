"""Names and lengths in the C++ and CUDA sources."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("csrc", "tests/cpp", "benchmarks")
KNOWN = (*FOLDERS, "uefl_kernels")
NAMED = re.compile(
    r"((?:(?:\w+\(\)(?: and |, )?)+|[A-Z]\w+)(?: in | of | \())?"
    r"(?<![\w.*/-])((?:\w+/)*[a-z]\w*(?:\.\w+)?\.(?:py|h|cpp|cu))\b"
)
CLASS = re.compile(
    r"^\s*(?:template <[^;{]*>\s*)?(?:struct|class|union|enum class|enum)\s+(?:alignas\(.*\)\s+)?"
    r"(\w+)\s*(?:final\s*)?(?::[^:{]*)?\{",
    re.MULTILINE,
)


def sources() -> list[Path]:
    """Return the C++ and CUDA files of the repository."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in files if path.suffix in (".h", ".cpp", ".cu")]


def code(path: Path) -> str:
    """Return the text of a file without comments, strings and characters."""
    return re.sub(r"""//.*|"(\\.|[^"\\\n])*"|'\\?.'""", "", path.read_text(encoding="utf-8"))


def class_names(text: str) -> list[str]:
    """Return the names of the classes that a text defines, without forward declarations."""
    return CLASS.findall(text)


def parameters_and_aliases(text: str) -> list[str]:
    """Return the names of types that are parameters of templates, or aliases."""
    return re.findall(r"\b(?:(?:class|typename)(?:\.\.\.)?|using) (\w+)(?=[,>]| =)", text)


def long_blocks(text: str) -> list[int]:
    """Return the first lines of blocks of code with more than 60 lines, which are bodies of functions."""
    found, begins = [], []
    for number, line in enumerate(text.splitlines(), 1):
        for sign in re.findall(r"[{}]", line):
            if sign == "{":
                begins.append((number, bool(re.search(r"\)[^();]*\{\s*$", line))))
            else:
                begin, is_code = begins.pop()
                found += [begin] if is_code and number - begin >= 60 else []
    return found


def test_classes_and_long_functions_are_found():
    text = "struct A;\nclass B {\n};\ntemplate <class C>\nstruct alignas(16) D : E<C> {\n};\n"
    assert class_names(text + "enum class F : int { g };\nA f(A a) {\n") == ["B", "D", "F"]
    assert parameters_and_aliases(text + "template <int d, class... G>\nusing H = D<G>;\n") == ["C", "G", "H"]
    assert long_blocks("int f(int a) {\n" + "f(1);\n" * 59 + "}\n") == [1]
    assert long_blocks("int f(int a) {  \n" + "f(1);\n" * 58 + "}\nstruct A {\n" + "\n" * 99 + "};\n") == []


def test_a_cpp_class_name_occurs_once():
    texts = [code(path) for path in sources()]
    found = Counter(name for text in texts for name in class_names(text))
    assert len(found) > 200
    assert [name for name, count in found.items() if count > 1] == []
    assert found.keys() & {name for text in texts for name in parameters_and_aliases(text)} == set()


def test_lines_of_cpp_have_at_most_110_columns():
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 110
    ] == []


def test_comments_name_files_and_functions_that_exist():
    """Such as ``f() and g() in vq.py``, ``A in vq.h`` or ``f() (vq.h)``."""
    known = {path: path.as_posix() for folder in KNOWN for path in (ROOT / folder).rglob("*.*")}
    found = [
        (path, names, named)
        for path in sources()
        for names, named in NAMED.findall(" ".join(re.findall("//(.*)", path.read_text(encoding="utf-8"))))
    ]
    assert len(found) > 80
    texts = {
        named: [
            path.read_text(encoding="utf-8") for path, place in known.items() if place.endswith(f"/{named}")
        ]
        for _, _, named in found
    }
    assert [
        f"{path.relative_to(ROOT)}: {names}{named}"
        for path, names, named in found
        if not any(
            all(name in text for name in re.findall(r"\w{3,}(?=\(\))|[A-Z]\w+", names))
            for text in texts[named]
        )
    ] == []


def test_functions_of_cpp_fit_a_screen():
    files = sources()
    assert len(files) > 150
    assert [f"{path.relative_to(ROOT)}:{line}" for path in files for line in long_blocks(code(path))] == []
