"""Paths that users give may be of any kind.

The tests have other capitals, names that are not text, special files, disks that are full or read-only, and
locales.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

import uefl
from tests import fresh
from uefl import checkpoint, config, data, privacy
from uefl.data import SOURCES
from uefl.deploy import choices
from uefl.deploy.privacy_floor import PrivacyFloor
from uefl.deploy.silo_folder import SiloFolder
from uefl.engines.processes import temporary
from uefl.errors import UnusableFile, UserError, listed
from uefl.folder import read_silos
from uefl.models import pretrained, saved
from uefl.paths import opened, read_bytes, read_text
from uefl.report.plots import save
from uefl.report.style import Picture

from .command_line import accepted, cli, refused
from .data.common import labeled
from .whole_run import KEYS, go_on, interrupted, outcome, start

SETS = [item for key in KEYS for item in ("--set", key)]


def images(folder, count=6, suffix=".png"):
    for label in ("cat", "dog"):
        (folder / "a" / label).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(np.full((8, 6), 20 * i, np.uint8)).save(
                folder / "a" / label / f"{i}{suffix}", "PNG"
            )
    return folder


@pytest.mark.parametrize("litter", ["__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini", ".DS_Store", "Icon\r"])
def test_files_of_operating_systems_are_skipped(tmp_path, litter):
    root = images(tmp_path / "silos")
    if litter in ("__MACOSX", "@eaDir"):
        (root / litter / "a").mkdir(parents=True)
        (root / "a" / litter).mkdir()
    else:
        (root / "a" / "cat" / litter).write_text("x")
    assert labeled(root).classes == ("cat", "dog")


def test_suffixes_in_capitals(tmp_path):
    np.savez(
        tmp_path / "x.npz",
        images=np.zeros((12, 4, 4), np.uint8),
        labels=np.arange(12) % 2,
        silo=np.zeros(12, int),
    )
    (tmp_path / "x.npz").rename(tmp_path / "data.NPZ")
    assert labeled(tmp_path / "data.NPZ").shape == (1, 4, 4)
    (tmp_path / "X.TOML").write_text('base = "demo"\n[run]\nseed = 7\n')
    assert config.load(str(tmp_path / "X.TOML")).run.seed == 7
    assert labeled(images(tmp_path / "silos", suffix=".PNG")).classes == ("cat", "dog")


def test_splits_in_capitals_are_named(tmp_path):
    for split in ("Train", "TEST"):
        images(tmp_path / "silos" / split)
        (tmp_path / "silos/client").mkdir(exist_ok=True)
        (tmp_path / "silos" / split / "a").rename(tmp_path / "silos/client" / split)
        (tmp_path / "silos" / split).rmdir()
    with pytest.raises(UserError, match=r"\bTEST, Train\b.*\btrain\b"):
        labeled(tmp_path / "silos")


def test_other_capitals_are_named(tmp_path):
    (tmp_path / "Mine.toml").write_text('base = "demo"\n')
    assert "(but Mine.toml" in refused("train", tmp_path / "mine.toml", "--out", tmp_path / "run")
    images(tmp_path / "Silos")
    with pytest.raises(UserError, match=r"\(but Silos"):
        labeled(tmp_path / "silos")
    np.savez(tmp_path / "Data.npz", images=np.zeros((12, 4, 4), np.uint8))
    with pytest.raises(UserError, match=r"\(but Data.npz"):
        labeled(tmp_path / "data.npz")
    with pytest.raises(UserError, match=r"\(but Data.npz"):
        saved.load(tmp_path / "DATA.npz")
    assert "(but Silos" in refused("report", tmp_path / "SILOS")
    assert "(but Silos" in refused("train", "--resume", tmp_path / "SILOS")
    with pytest.raises(UserError, match=r"\(but Data.npz"):
        pretrained.file_of(str(tmp_path / "DATA.NPZ"), None)
    with pytest.raises(UserError, match=r"\(but Silos"):
        SOURCES["mnist"](tmp_path / "silos")


@pytest.mark.parametrize("name", ["clients", "priors.csv", "priors.json"])
def test_other_capitals_in_a_folder_of_sets_are_named(tmp_path, name):
    images(tmp_path / "clients")
    place = tmp_path / name.capitalize()
    (tmp_path / "clients").rename(place) if name == "clients" else place.touch()
    with pytest.raises(UserError, match=rf"\(but {place.name}"):
        data.build(data.Data(source=str(tmp_path)), kind="sets", seed=0)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_other_capitals_in_a_run_folder_are_named(finished, tmp_path, name):
    out = Path(shutil.copytree(finished[0], tmp_path / "run"))
    (out / name).rename(out / name.upper())
    assert f"(but {name.upper()}" in refused("report", out)


BYTES = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    "arguments", [("report", "--out"), ("suite", "--out"), ("export",), ("predict", "--csv")]
)
def test_results_in_places_that_are_not_utf8(finished, tmp_path, arguments):
    command, *option = arguments
    more = Path(shutil.copytree(finished[0], tmp_path / "more"))
    (tmp_path / "mine.toml").write_text("")
    given = {"report": (finished[0], more), "suite": (tmp_path / "mine.toml",), "export": (finished[0],)}
    given["predict"] = (finished[0], tmp_path / "a.png", "--arm", "fedavg")
    images(tmp_path)
    (tmp_path / "a/cat/0.png").rename(tmp_path / "a.png")
    before = {*tmp_path.iterdir()}
    arm = ("--arm", "fedavg") if command == "export" else ()
    message = refused(command, *given[command], *option, tmp_path / f"{BYTES}.pt2", *arm)
    assert "not UTF-8" in message
    assert {*tmp_path.iterdir()} == before


def test_names_that_are_not_utf8(tmp_path):
    """No file of a run can contain such a name, so the command writes nothing."""
    for arguments in (
        ("train", "demo", "--out", tmp_path / BYTES),
        ("train", "--resume", tmp_path / BYTES),
        ("report", tmp_path / BYTES),
        ("train", tmp_path / f"{BYTES}.toml", "--out", tmp_path / "run"),
    ):
        assert "not UTF-8" in refused(*arguments)
    assert not list(tmp_path.iterdir())
    source = f"data.source={tmp_path / BYTES}"
    message = refused("train", "own-silos", "--set", source, "--out", tmp_path / "run")
    assert "'data.source'" in message
    assert "not UTF-8" in message
    with pytest.raises(UserError, match="UTF-8"):
        uefl.train("demo", out=tmp_path / BYTES)
    images(tmp_path / "silos")
    (tmp_path / "silos" / "a" / BYTES).mkdir()
    with pytest.raises(UserError, match="UTF-8"):
        labeled(tmp_path / "silos")


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    "place",
    [
        "a.toml",
        "data.npz",
        "silos/a/cat/7.png",
        "silos/a/more",
        "silos/more",
        "model.safetensors",
        "run",
        "folder/config.toml",
    ],
)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, pipe, place):
    path = tmp_path / place
    if place.startswith("silos"):
        images(tmp_path / "silos")
    path.parent.mkdir(parents=True, exist_ok=True)
    pipe.rename(path)
    if path.suffix == ".toml" and path.name != "config.toml":
        assert "pipe;" in refused("train", path, "--out", tmp_path / "new")
    elif path.suffix == ".safetensors":
        with pytest.raises(UserError, match=r"\bpipe;"):
            saved.load(path)
    elif place == "run":
        for arguments in (
            ("train", "demo", "--out", path),
            ("train", "--resume", path),
            ("report", path),
            ("predict", path, tmp_path / "a.png"),
        ):
            assert re.search(rf"{path} .*\bpipe;", refused(*arguments))
        with pytest.raises(UserError, match=r"\bpipe;"):
            labeled(path)
    elif path.name == "config.toml":
        refused("report", path.parent)
    else:
        with pytest.raises(UserError, match=r"\bpipe;"):
            labeled(path if path.suffix == ".npz" else tmp_path / "silos")


def test_sockets_and_devices(tmp_path):
    images(tmp_path / "silos")
    with socket.socket(socket.AF_UNIX) as server:
        place = Path(os.path.relpath(tmp_path / "silos" / "a" / "cat" / "s.png"))
        server.bind(str(place))
        with pytest.raises(UserError, match=r"\bsocket;"):
            labeled(tmp_path / "silos")
    (tmp_path / "silos" / "a" / "cat" / "s.png").unlink()
    (tmp_path / "silos" / "a" / "cat" / "null.png").symlink_to("/dev/null")
    with pytest.raises(UserError, match=r"\bdevice;"):
        labeled(tmp_path / "silos")
    with pytest.raises(UserError, match=r"\bdevice;"):
        saved.load("/dev/null")


def put(kind, path):
    """Create a pipe, a folder, a socket, a link to a device or a loop of links at the path of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path}[kind])


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "loop"])
@pytest.mark.parametrize("read", [opened, read_bytes, read_text])
def test_only_regular_files_are_read(tmp_path, kind, read):
    put(kind, tmp_path / "x")
    with pytest.raises(UnusableFile, match=re.escape(str(tmp_path / "x"))) as error:
        read(tmp_path / "x")
    assert isinstance(error.value, UserError)
    assert isinstance(error.value, OSError)


def test_files_are_read_by_these_functions():
    """Exceptions are files of the system, of the package, and of processes that the package has started."""
    found = set()
    for path in Path(uefl.__file__).parent.rglob("*.py"):
        if re.search(r"""\.read_(text|bytes)\(|open\(.*"r?b?"|\bload_file\(""", path.read_text()):
            found.add(path.name)
    # checkpoint.py loads a file that it has read for its digest
    assert found <= {"paths.py", "checkpoint.py", "threads.py", "load.py", "docs.py", "suite.py"} | {
        "processes.py",
        "messenger.py",
        "node.py",
        "link.py",
    }


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder", "loop"])
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json"])
def test_a_special_file_of_a_run_is_not_an_absent_one(finished, tmp_path, kind, name):
    out = Path(shutil.copytree(finished[0], tmp_path / "run"))
    put(kind, out / name)
    for arguments in (
        ("report", out),
        ("train", "--resume", out, "--more-rounds", 1),
        ("predict", out, tmp_path / "a.png"),
        ("export", out, tmp_path / "a.pt2"),
    ):
        assert str(out / name) in refused(*arguments)
    for call in (uefl.resume, uefl.load):
        with pytest.raises(UnusableFile, match=name):
            call(out)


def test_a_loop_of_links_is_no_folder(finished, tmp_path):
    loop = tmp_path / "loop"
    put("loop", loop)
    for arguments in (
        ("report", loop),
        ("report", finished[0], loop),
        ("train", "demo", "--out", loop),
        ("train", "--resume", loop),
        ("predict", loop, loop),
        ("export", loop, tmp_path / "a.pt2"),
        ("export", finished[0], loop / "a.pt2", "--arm", "fedavg"),
        ("predict", finished[0], loop, "--arm", "fedavg"),
        ("predict", finished[0], tmp_path / "a.png", "--arm", "fedavg", "--csv", loop / "a.csv"),
    ):
        assert refused(*arguments)
    assert [*tmp_path.iterdir()] == [loop]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize(("name", "code"), [("manifest.json", 2), ("made.json", 0), ("report.md", 0)])
def test_a_report_of_a_folder_with_special_files(finished, tmp_path, kind, name, code):
    """A report names the file, writes a new one in its place, or does without made.json."""
    out = Path(shutil.copytree(finished[0], tmp_path / "run"))
    put(kind, out / name)
    result = cli("report", out)
    assert result.exit_code == code, result.output
    assert name in result.output or name == "made.json" or (out / name).is_file()


def test_a_picture_is_written_in_the_place_of_a_pipe(tmp_path):
    (tmp_path / "plots").mkdir()
    os.mkfifo(tmp_path / "plots" / "x.png")
    save([(Picture("x.png", "", ""), Figure())], tmp_path)
    assert (tmp_path / "plots" / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """Return an unfinished run with private states, and the outcome of the run when it is continued."""
    out = interrupted(tmp_path_factory.mktemp("half") / "run", 'arms=["fedper"]', "rounds=[3]", after=7)
    whole = Path(shutil.copytree(out, out.parent / "whole"))
    go_on(whole)
    return out, outcome(whole)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "checkpoint.json", "run.lock", "private/*", "checkpoint-*"]
)
def test_a_run_with_special_files_is_not_continued(half, tmp_path, kind, name):
    out = Path(shutil.copytree(half[0], tmp_path / "run"))
    path = next(out.glob(name))
    before = path.read_bytes()
    put(kind, path)
    result = cli("train", "--resume", out)
    assert result.exit_code == 2, result.output
    assert path.name in result.output.splitlines()[-1]
    path.rmdir() if kind == "folder" else path.unlink()
    path.write_bytes(before)
    go_on(out)
    assert outcome(out) == half[1]


@pytest.mark.parametrize("left", ["pipe", "link"])
def test_what_lies_where_a_file_is_made_is_replaced(half, tmp_path, left):
    """A link is not followed, so that nothing outside of the folder is changed."""
    out = Path(shutil.copytree(half[0], tmp_path / "run"))
    (tmp_path / "mine").write_text("mine")
    names = ["checkpoint.json", "checkpoint.new", "summary.json", "model-fedper.safetensors"]
    for path in (*(out / f"{name}.tmp" for name in names), out / "private" / "new"):
        os.mkfifo(path) if left == "pipe" else path.symlink_to(tmp_path / "mine")
    go_on(out)
    assert outcome(out) == half[1]
    assert (tmp_path / "mine").read_text() == "mine"
    assert not [path for path in out.rglob("*") if path.is_fifo() or path.is_symlink()]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("secret", SiloFolder),
        (
            "spent.json",
            lambda folder: PrivacyFloor(1.0, 1e-5, 0.0, folder / "spent.json").locked().__enter__(),
        ),
        ("key", lambda folder: choices.checked_address("host:1", folder / "key", insecure=False)),
        (privacy.KEY, lambda folder: privacy.key_of(folder, begun=True)),
        ("silos.json", read_silos),
    ],
)
def test_pipes_in_the_folder_of_a_silo_or_a_server(tmp_path, name, use):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} .*\bpipe"):
        use(tmp_path)


def test_a_pipe_that_is_not_read_is_not_waited_for(half, tmp_path, pipe):
    go_on(out := Path(shutil.copytree(half[0], tmp_path / "run")))
    images(tmp_path / "silos")
    message = refused("predict", out, tmp_path / "silos", "--csv", pipe)
    assert str(pipe) in message


@pytest.mark.parametrize(
    "name", ["silos/b", "silos/a/bird", "silos/a/cat/7.png", "sets/test.npz", "sets/priors.csv"]
)
def test_a_broken_link_among_the_data_is_not_passed_over(tmp_path, name):
    images(tmp_path / "silos")
    images(tmp_path / "sets" / "clients")
    (tmp_path / name).symlink_to(tmp_path / "absent")
    kind = "sets" if name.startswith("sets") else "labeled"
    with pytest.raises(UserError, match=name):
        data.build(data.Data(source=str(tmp_path / name.split("/")[0])), kind=kind, seed=0)


def test_a_full_disk_before_the_run_begins(tmp_path, monkeypatch):
    """The message names the file, and remaining files do not block the next start in the folder."""
    for file in ("manifest.json", "config.toml"):
        with monkeypatch.context() as patch:
            write = Path.write_bytes

            def full(path, data, file=file, write=write):
                if path.name == f"{file}.tmp":
                    raise OSError(28, "full")
                return write(path, data)

            patch.setattr(Path, "write_bytes", full)
            message = refused("train", "demo", *SETS, "--out", tmp_path / "run")
        assert str(tmp_path / "run" / file) in message
        assert "full" in message
    (tmp_path / "run" / "config.toml.tmp").write_text("half")
    start(tmp_path / "run", "arms=fedavg", "rounds=[1]")


def test_a_full_disk_names_the_file_and_the_run_can_resume(tmp_path, monkeypatch):
    def full(directory, tensors, plain):
        raise OSError(28, "full", str(directory / "checkpoint.new"))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        result = cli(
            "train", "demo", *SETS, "--set", "arms=fedavg", "--set", "rounds=[1]", "--out", tmp_path / "run"
        )
    assert result.exit_code == 1
    assert re.search(rf"{tmp_path / 'run' / 'checkpoint.new'} .*: uefl train --resume", result.output)
    accepted("train", "--resume", tmp_path / "run")


def test_texts_are_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    checkpoint.write_json(path, 1)
    monkeypatch.setattr(checkpoint.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match=r"\[Errno 28\]") as error:
        checkpoint.write_json(path, 2)
    assert error.value.filename == str(path)
    assert (path.read_text(), [p.name for p in tmp_path.iterdir()]) == ("1\n", ["x.json"])


def test_the_report_of_a_folder_that_cannot_be_written(finished, monkeypatch):
    out, *_ = finished

    def read_only(run):
        raise OSError(30, "read-only", str(out / "plots" / "arms.png"))

    monkeypatch.setattr("uefl.report.write.write_plots", read_only)
    output = accepted("report", out)
    assert "read-only" in output
    assert "fedavg" in output


@pytest.mark.parametrize("page", ["report.md", "report.html"])
def test_the_report_when_a_page_cannot_be_written(finished, tmp_path, page):
    out = Path(shutil.copytree(finished[0], tmp_path / "run"))
    (out / page).unlink(missing_ok=True)
    (out / page / "x").mkdir(parents=True)  # a file with this name cannot be written
    output = accepted("report", out)
    (note,) = (line for line in output.splitlines() if line.startswith("note: "))
    assert str(out / page) in note
    assert "fedavg" in output


def test_a_comparison_whose_page_cannot_be_written(finished, tmp_path):
    other, page = shutil.copytree(finished[0], tmp_path / "run"), tmp_path / "page"
    (page / "report.html" / "x").mkdir(parents=True)
    output = accepted("report", finished[0], other, "--out", page)
    assert f"note: no page: {page}" in output
    assert "fedavg" in output


@pytest.mark.slow
def test_a_locale_that_is_not_utf8(tmp_path):
    """Files of a run are UTF-8 in every locale."""
    script = f"""
import locale, pathlib, numpy, uefl
from uefl.data.folder_listing import visible
clients = {{"s\u00fcd": ((numpy.zeros((24, 8, 8), numpy.uint8), numpy.arange(24) % 2), None)}}
keys = dict(clients=clients, arms=["fedavg"], rounds=[1], model=dict(width=4, hidden=8), batch_size=4)
keys |= dict(precision="fp32", threads=1)
run = uefl.train("demo", out={str(tmp_path / "run")!r}, **keys)
uefl.resume({str(tmp_path / "run")!r}, clients=clients)
try:
    visible(pathlib.Path({str(tmp_path / "silos")!r}))
except uefl.UserError as error:
    assert "PYTHONUTF8=1" in str(error), error
print(locale.getpreferredencoding(False), list(run.metrics["client"]) == ["s\u00fcd"])
"""
    (tmp_path / "silos" / "süd").mkdir(parents=True)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("True")
    assert "utf" not in done.stdout.lower()


MINE = """
[data]
source = "~/silos"
image_size = 8
[model]
width = 4
hidden = 8
[training]
rounds = [1]
local_epochs = 1
batch_size = 4
[run]
threads = 1
passes = 2
[arms.fedavg]
"""


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    """A tilde works in Python, and where a shell leaves it: ``--out=~/run``."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    images(tmp_path / "home" / "silos")
    (tmp_path / "home" / "mine.toml").write_text(MINE)
    accepted("train", "~/mine.toml", "--out=~/run")
    for arguments in (("report", "~/run"), ("predict", "~/run", "~/silos/a", "--csv=~/a.csv")):
        accepted(*arguments)
    assert uefl.load("~/run").model().read(["~/silos/a/cat/0.png"]).shape == (1, 1, 8, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert (tmp_path / "home" / "a.csv").is_file()


@pytest.mark.parametrize("path", ["", None, b"runs", 3])
def test_no_path(path):
    for call in (lambda: uefl.train("demo", out=path), lambda: uefl.load(path), lambda: saved.load(path)):
        with pytest.raises(UserError, match=re.escape(repr(path))):
            call()


def test_a_user_without_a_name():
    """Torch calls the folder of its cache after the user, who may have no entry in a container."""
    code = """
import os, pwd
for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
import uefl
from torch._inductor.runtime import cache_dir_utils
print(cache_dir_utils.default_cache_dir())
"""
    assert str(os.getuid()) in fresh.python(code).stdout


def test_an_unknown_home_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "~nobody-here/run" in refused("report", "~nobody-here/run")
    assert "~nobody-here" in refused(
        "train", "demo", "--set", "data.source=~nobody-here/silos", "--out", "run"
    )


@pytest.mark.parametrize(
    "name", ["a" * 256, "é" * 128, "a\0b", "a/" * 2050 + "a"], ids=["long", "long-in-bytes", "null", "deep"]
)
def test_names_that_no_file_can_have(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: uefl.train("demo", out=name),
        lambda: uefl.resume(name),
        lambda: uefl.load(name),
        lambda: saved.load(name),
        lambda: uefl.train("demo", out="run", data={"source": name}),
        lambda: data.build(data.Data(source=name), kind="labeled", seed=0),
        lambda: uefl.train(f"{name}.toml", out="run"),
    ):
        with pytest.raises(UserError):
            call()
    assert not list(tmp_path.iterdir())


def test_names_with_line_ends_and_control_characters(tmp_path):
    """An error stays one line, and the first line of config.toml is still a comment."""
    name = "a\n\x1b[31m\u2028"
    assert "\x1b" not in refused("report", tmp_path / name)
    (tmp_path / f"{name}.toml").write_text('base = "demo"')
    arguments = (*SETS, "--set", "arms=fedavg", "--set", "rounds=[1]", "--out", tmp_path / name)
    for command in (("train", tmp_path / f"{name}.toml", *arguments), ("report", tmp_path / name)):
        accepted(*command)


def test_a_suite_is_a_file_in_any_capitals(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    for path, said in ((tmp_path / "pipe.toml", "pipe"), (tmp_path / "absent.toml", "absent.toml")):
        assert said in refused("suite", path)
    (tmp_path / "dev.toml").symlink_to("/dev/zero")  # endless
    assert "device" in refused("suite", tmp_path / "dev.toml")
    (tmp_path / "X.TOML").write_text("\ufeffseeds = []")
    assert "X.against" in refused("suite", tmp_path / "X.TOML")


def test_folders_that_killed_processes_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("dead", "new", "other")
    dead, new, other = (tmp_path / f"{'x' if name == 'other' else 'uefl-silo'}-{name}" for name in names)
    for folder in (dead, new, other):
        (folder / "inside").mkdir(parents=True)
    (tmp_path / "uefl-silo-link").symlink_to(other)
    with temporary("uefl-silo-") as used:
        for folder in (dead, other, used):
            os.utime(folder, (0, 0))
        with temporary("uefl-silo-") as mine:
            left = {*tmp_path.iterdir()}
    assert left == {new, other, tmp_path / "uefl-silo-link", used, mine}
    assert {*tmp_path.iterdir()} == {new, other, tmp_path / "uefl-silo-link"}


@pytest.mark.parametrize(("words", "shown"), [("abc", "a, b, c"), ("abcd", "a, b, c, and 1 more")])
def test_a_long_list_has_its_first_words(words, shown):
    assert listed(words, most=3) == shown
