"""Two processes that begin at the same moment.

One of them runs, the other prints an error in one line, and no file is incomplete.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

import uefl
from tests import fresh

from .interrupted import KEYS, Killer
from .test_suites import TINY

BEFORE = """
import json, os, sys, time
from pathlib import Path
import uefl
from typer.testing import CliRunner
from uefl import fetch
from uefl.cli import app
from torchvision import datasets

root, who, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def together(i):
    "Wait for the other process, and return at the same moment."
    (root / f"ready-{i}-{who}").touch()
    while not all((root / f"ready-{i}-{name}").exists() for name in "ab"):
        pass

def cli(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    failed = result.exception is not None and not isinstance(result.exception, SystemExit)
    return [repr(result.exception)] if failed else [result.exit_code, result.stderr]

def call(function, **keys):
    try:
        function(**keys)
    except (uefl.UserError, uefl.RunError) as error:
        return [2, f"error: {error}"]
    return [0, ""]

ended = []
for i in range(times):
    together(i)
    ended.append(race(i))
(root / f"ended-{who}").write_text(json.dumps(ended))
"""


def race(tmp_path, code, times):
    """Run ``race(i)`` in two processes, and return how both ended each time."""
    before, after = BEFORE.split("ended = []")

    def run(who):
        return fresh.python(f"{before}{code}\nended = []{after}", str(tmp_path), who, str(times))

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run, "ab"))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    return list(zip(*(json.loads((tmp_path / f"ended-{who}").read_text()) for who in "ab"), strict=True))


def check(ends, words, *, least=1, most=1):
    """Check that of both processes ``least`` to ``most`` ended well, and the others with one sentence."""
    for end in ends:
        assert all(len(one) == 2 for one in end), end
        assert least <= sum(code == 0 for code, _ in end) <= most, end
        for code, text in end:
            if code != 0:
                assert re.fullmatch(rf"error: [^\n]*\b{words}\b[^\n]*\n?", text), text


TRAIN = f"""
KEYS = {KEYS | {"arms": {"fedavg": {}}, "training": KEYS["training"] | {"rounds": [1]}}!r}
def race(i):
    return call(uefl.train, source=KEYS, out=root / f"run-{{i}}")
"""


@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.large)])
def test_two_runs_in_one_folder(tmp_path, times):
    check(race(tmp_path, TRAIN, times), "(process|finished run|unfinished run)")
    for i in range(times):
        assert uefl.load(tmp_path / f"run-{i}").summary["fedavg"]["rounds"] == 1


RESUME = """
def race(i):
    new, old = ("demo", "--out"), ("--resume",)
    return cli("train", *(old if who == "a" else new), root / f"run-{i}")
"""


@pytest.mark.parametrize("times", [2, pytest.param(30, marks=pytest.mark.large)])
def test_a_start_does_not_stop_a_run_that_continues(tmp_path, times):
    """The start is refused, and looks at the lock for that."""
    for i in range(times):
        with pytest.raises(KeyboardInterrupt):
            uefl.train(KEYS | {"arms": {"fedavg": {}}}, out=tmp_path / f"run-{i}", observer=Killer(3))
    ends = race(tmp_path, RESUME, times)
    check(ends, "(process|finished run|unfinished run)")
    assert all(resumed[0] == 0 for resumed, _ in ends)


OUTPUTS = """
run = root / "run"
def race(i):
    if kind == "csv":
        return cli("predict", run, root / "images", "--csv", root / f"{i}.csv")
    if kind == "report":
        return cli("report", run)
    return cli("export", run, root / f"{i}{kind}")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    uefl.train(
        KEYS | {"arms": {"fedavg": {}}, "training": KEYS["training"] | {"rounds": [1]}}, out=root / "run"
    )
    (root / "images").mkdir()
    for i in range(3):
        Image.new("L", (28, 28), 60 * i).save(root / "images" / f"{i}.png")
    return root


@pytest.mark.parametrize(
    "kind", ["csv", ".safetensors", ".pt2", pytest.param("report", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("times", [3, pytest.param(30, marks=pytest.mark.large)])
def test_one_file_of_two_processes(trained, tmp_path, kind, times):
    """Both may end well if one begins after the other has ended."""
    for name in ("run", "images"):
        (tmp_path / name).symlink_to(trained / name)
    ends = race(tmp_path, f"kind = {kind!r}\n{OUTPUTS}", times)
    check(ends, "process", least=2 if kind == "report" else 1, most=2)
    for i in range(times):
        if kind == "csv":
            rows = (tmp_path / f"{i}.csv").read_text().splitlines()
            assert len(rows) == 4
            assert {row.count(",") for row in rows} == {4}
    left = {path.name for path in (*tmp_path.iterdir(), *(trained / "run").iterdir())}
    assert not [name for name in left if name.endswith((".lock", ".tmp")) and name != "run.lock"]


FETCH = """
class Slow:
    def __init__(self, folder, download, train):
        file = Path(folder) / f"part-{turn}-{train}"
        with file.open("x") as target:
            target.write("half")
            time.sleep(0.6)
            target.write("whole")

datasets.MNIST = Slow
def race(i):
    global turn
    turn = i
    return cli("fetch", "mnist", "--data-root", root / "data")
"""


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.large)])
def test_two_downloads_into_one_folder(tmp_path, times):
    check(race(tmp_path, FETCH, times), "process")
    assert {path.read_text() for path in (tmp_path / "data").iterdir()} == {"halfwhole"}


SUITE = """
def race(i):
    return cli("suite", root / "tiny.toml", "--seeds", 1, "--jobs", 1, "--out", root / f"suite-{i}")
"""


@pytest.mark.slow
def test_two_suites_in_one_folder(tmp_path):
    here, _, _ = TINY.partition("[cases.absent]")
    (tmp_path / "tiny.toml").write_text(here)
    check(race(tmp_path, SUITE, 3), "process", most=2)
    for i in range(3):
        assert json.loads((tmp_path / f"suite-{i}" / "results.json").read_text())["suite"] == "tiny"
