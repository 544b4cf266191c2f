import io
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from tests import fresh
from uefl import config, progress
from uefl.cli import _Terminated
from uefl.errors import RunError, UserError
from uefl.folder import check_free

from . import sample_runs
from .command_line import accepted, cli, refused

LOCALES = ({}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """Replace ``uefl.run`` by a module that writes a folder by hand, or raises its ``fails``."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # with either, rich takes anything for a terminal
        monkeypatch.delenv(name, raising=False)
    calls = []

    def go(name, out, observer, **asked):
        calls.append((name, out, asked))
        if module.fails:
            raise module.fails
        lines = sample_runs.records()
        observer.start(["fedavg", "uefl"], 4, 3)
        for arm in ("fedavg", "uefl"):
            observer.arm(arm, 0)
            for round in range(4):
                chunk = [line for line in lines if line["arm"] == arm and line["round"] == round]
                for line in chunk:
                    observer.client(arm, round, line["client"])
                observer.round(arm, round, chunk)
        observer.notice("extended silo-[2]")
        sample_runs.write(out)

    def train(cfg, *, out, observer, **asked):
        go("train", out, observer, cfg=cfg, **asked)

    def resume(out, *, observer, **asked):
        go("resume", out, observer, **asked)

    module = types.SimpleNamespace(train=train, resume=resume, fails=None, calls=calls)
    monkeypatch.setitem(sys.modules, "uefl.run", module)
    return module


def test_train_passes_options_on_and_prints_tables_and_paths(fake_run):
    output = accepted(
        "train",
        "demo",
        "--set",
        "gamma=0.5",
        "--set",
        "arms=uefl",
        "--seed",
        "7",
        "--device",
        "cpu",
        "--data-root",
        "d",
    )
    ((name, out, asked),) = fake_run.calls
    assert (name, out) == ("train", Path("runs/demo"))
    assert (asked["preset"], asked["device"], asked["data_root"]) == ("demo", "cpu", Path("d"))
    cfg = asked["cfg"]
    assert (cfg.arms["uefl"].parameters.gamma, list(cfg.arms), cfg.run.seed) == (0.5, ["uefl"], 7)
    for text in ("0.460 ± 0.129", "silo-2", "runs/demo/report.md", "runs/demo/plots"):
        assert text in output


def test_train_prints_a_line_per_round_without_a_terminal(fake_run):
    lines = cli("train", "demo").output.splitlines()
    rounds = [line for line in lines if " round " in line and "accuracy" in line]
    assert len(rounds) == 8
    assert rounds[5] == "uefl round 2/4  accuracy 0.410  entropy 0.900"
    assert "extended silo-[2]" in lines


def test_a_configuration_file_names_the_default_folder(fake_run, tmp_path):
    (tmp_path / "mine.toml").write_text('base = "demo"\n')
    accepted("train", "mine.toml")
    assert fake_run.calls[0][1] == Path("runs/mine")


def test_out_wins_over_the_default_folder(fake_run):
    accepted("train", "demo", "--out", "there")
    assert fake_run.calls[0][1] == Path("there")


def test_resume_continues_in_the_folder(fake_run):
    accepted("train", "--resume", "there", "--device", "cpu")
    assert fake_run.calls == [
        ("resume", Path("there"), {"device": "cpu", "data_root": None, "deployment": None})
    ]


@pytest.mark.parametrize(
    "extra", [["demo"], ["--set", "gamma=1"], ["--seed", "0"], ["--out", "o"]], ids=lambda extra: extra[0]
)
def test_resume_refuses_another_configuration(fake_run, extra):
    result = cli("train", "--resume", "there", *extra)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --resume ")
    assert fake_run.calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "preset"),
        (["train", "demoo"], "'demoo' .*'demo'"),
        (["train", "demo", "--set", "gama=1"], "key 'gama'"),
        (["train", "absent.toml"], r"absent\.toml"),
        (["report", "absent"], r"absent .*config\.toml"),
        (["report"], r"'RUN\.\.\.'"),
        (["train", "demo", "--sed", "1"], "--sed"),
        (["train", "demo", "--device", "gpu"], "'--device'"),
        (["trian"], "'trian'.*'train'"),
        (["--train"], "--train"),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_exit_code_2(fake_run, arguments, message):
    result = cli(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(f"^error: .*{message}", result.stderr, re.MULTILINE)
    assert result.stderr.count("\n") == 1
    assert fake_run.calls == []


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("folder"), 2), (RunError("quorum"), 1)], ids=["user", "run"]
)
def test_errors_of_a_run_have_their_exit_code_and_no_traceback(fake_run, error, code):
    fake_run.fails = error
    result = cli("train", "demo")
    assert (result.exit_code, result.stderr) == (code, f"error: {error}\n")


def test_full_disk_error_names_the_resume_command(fake_run, tmp_path):
    fake_run.fails = OSError(28, "full")
    result = cli("train", "demo")
    assert (result.exit_code, result.stderr) == (2, "error: full\n")
    sample_runs.write(tmp_path / "runs/demo", finished=False)
    result = cli("train", "demo")
    assert result.exit_code == 1
    assert re.fullmatch("error: full .*runs/demo .*: uefl train --resume runs/demo\n", result.stderr)


@pytest.mark.slow
def test_closed_pipe_of_a_list_prints_no_error():
    command = f"{sys.executable} -m uefl presets | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (result.stderr, result.stdout.count("\n")) == ("", 1)
    assert result.returncode in (0, 141)  # 0 where the pipe took all of it at once


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed):
    result = subprocess.run(["bash", "-c", f"{sys.executable} -m uefl presets {closed}"], capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("locale", LOCALES, ids=["utf8", "ascii"])
@pytest.mark.parametrize("command", [["presets"], ["--version"], []], ids=" ".join)
def test_a_full_disk_of_the_output_is_not_that_of_a_run(command, locale):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "uefl", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | locale,
        )
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: the output: ")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.slow
@pytest.mark.parametrize("locale", LOCALES, ids=["utf8", "ascii"])
def test_a_note_that_cannot_be_written_is_no_error(tmp_path, locale):
    for seed in (1, 2):
        sample_runs.write(tmp_path / str(seed), seed=seed)
    (tmp_path / "file").touch()
    report = ["report", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "file" / "page"]
    with open("/dev/full", "w") as full:
        for command, code in ((report, 0), (["presets", "absent"], 2)):
            result = subprocess.run(
                [sys.executable, "-m", "uefl", *command],
                stdout=subprocess.PIPE,
                stderr=full,
                env=os.environ | locale,
            )
            assert (result.returncode, b"fedavg" in result.stdout) == (code, code == 0)


def test_a_current_folder_that_was_removed(tmp_path):
    command = f"rmdir {tmp_path / 'gone'}; {sys.executable} -m uefl presets"
    (tmp_path / "gone").mkdir()
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path / "gone", capture_output=True, text=True)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "folder" in result.stderr


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "before-it-began"])
def test_ctrl_c_names_the_resume_command(fake_run, tmp_path, begun):
    fake_run.fails = KeyboardInterrupt()
    if begun:
        sample_runs.write(tmp_path / "runs/demo", finished=False)
    result = cli("train", "demo")
    assert result.exit_code == 130
    assert ("uefl train --resume runs/demo" in result.stderr) == begun


def test_commands_in_messages_are_for_a_shell(fake_run, tmp_path):
    out, root = tmp_path / "a b'$c", tmp_path / "d e"
    sample_runs.write(out, finished=False)
    fake_run.fails = KeyboardInterrupt()
    for arguments in (["train", "demo", "--out", out, "--data-root", root], ["train", "--resume", out]):
        message = cli(*arguments).stderr
        resume = ["uefl", "train", "--resume", str(out)]
        more = ["--data-root", str(root)] if "demo" in arguments else []
        assert shlex.split(message[message.index("uefl ") :]) == resume + more
    with pytest.raises(UserError) as error:
        check_free(out)
    assert shlex.split(str(error.value).rpartition("it: ")[2]) == ["uefl", "train", "--resume", str(out)]


def test_sigterm_and_closed_pipe_name_the_resume_command(fake_run, tmp_path):
    sample_runs.write(tmp_path / "runs/demo", finished=False)
    for error, code, why in ((_Terminated(), 143, "interrupted"), (BrokenPipeError(), 141, "output")):
        fake_run.fails = error
        result = cli("train", "demo")
        assert result.exit_code == code
        assert re.search(f"{why}.*: uefl train --resume runs/demo\n$", result.stderr)


@pytest.mark.parametrize("lost", [False, True], ids=["", "lost"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_command_in_a_line(number, lost):
    """If a library loses the exception of the signal, its own error is no bug."""
    code = f"""
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, also here
from uefl import cli
def signaled():
    try:
        signal.raise_signal({number:d})
    except KeyboardInterrupt:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL or {number:d} == signal.SIGINT
        if {lost}:
            raise RecursionError from None
        raise
cli.config.preset_groups = signaled
sys.argv = ["uefl", "presets"]
cli.main()
"""
    done = fresh.python(code)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (128 + number, "", 1)


def test_the_command_needs_no_backend_of_matplotlib(tmp_path):
    code = f"""
import sys
from uefl import cli
sys.argv = ["uefl", "report", {str(tmp_path / "run")!r}]
cli.main()
"""
    done = fresh.python(code, MPLBACKEND="nonsense")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "run" in done.stderr


def test_ctrl_c_during_the_imports_prints_nothing():
    code = """
import signal
from uefl_kernels import __main__ as command
command.import_module = lambda name: signal.raise_signal(signal.SIGINT)
command.main()
"""
    done = fresh.python(code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    "arguments",
    [["predict", "run", ""], ["report", ""], ["train", "demo", "--out="], ["export", "", "a.pt2"]],
)
def test_an_empty_argument_is_not_the_current_folder(arguments):
    result = cli(*arguments)
    assert result.exit_code == 2
    assert "empty" in result.stderr
    assert result.stderr.count("\n") == 1


def test_keys_lists_the_section_of_a_key():
    output = accepted("keys", "local_epochs")
    assert "`local_epochs`" in output
    assert "`passes`" not in output
    assert accepted("keys", "training.local_epochs") == output
    assert cli("keys", "epoch").exit_code == cli("keys", "run.local_epochs").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "data"], "uefl train own-silos --set data.source=data"),
        (["train", "own-silos", "data"], "--set data.source=FOLDER"),
        (["train", "run"], "uefl train --resume run"),
        (["train", "suite.toml"], "uefl suite suite.toml"),
        (["suite", "run/config.toml"], "uefl train run/config.toml"),
    ],
)
def test_an_argument_of_another_kind_names_its_command(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "suite.toml").write_text("[cases.a]")
    sample_runs.write(tmp_path / "run")
    assert said in refused(*arguments)


def test_a_name_in_other_capitals_is_suggested():
    assert "'demo'" in cli("presets", "DEMO").stderr


def test_the_page_of_several_runs_needs_a_folder(tmp_path):
    sample_runs.write(tmp_path / "a")
    sample_runs.write(tmp_path / "b")
    (tmp_path / "file").write_text("x")
    result = cli("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "file")
    assert (result.exit_code, str(tmp_path / "file") in result.stderr) == (2, True)


def test_a_value_may_end_with_an_equals_sign():
    result = cli("report", "--against=a=", "absent")
    assert result.exit_code == 2
    assert "absent" in result.stderr


def test_live_progress_counts_every_client_and_keeps_notices(fake_run):
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with progress.watch(console) as observer:
        observer.start(["fedavg", "uefl"], 2, 3)
        observer.arm("fedavg", 0)
        for client in ("a", "b", "c"):
            observer.client("fedavg", 0, client)
        task = observer._progress.tasks[0]
        assert (task.completed, task.total) == (2, 12)
        assert (task.fields["client"], task.fields["round"]) == ("c", "round 1/2")
        observer.round("fedavg", 0, [{"accuracy": 0.5, "entropy": 1.0}, {"accuracy": 0.7, "entropy": 2.0}])
        assert task.fields["measured"] == "accuracy 0.600  entropy 1.500"
        observer.arm("uefl", 1)  # a resumed arm has finished round 1
        assert (task.completed, task.description) == (9, "uefl")
        observer.client("uefl", 1, "a")
        assert task.completed == 9
        observer.client("uefl", 2, "a")  # a turn after the last round only measures
        assert (task.completed, task.fields["round"]) == (12, "round 2/2")
        observer.notice("extended [silo]")
    assert "extended [silo]" in console.export_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_without_a_limit_shows_no_total(terminal):
    """An arm of the published code ends when all clients are certain."""
    console = Console(force_terminal=terminal, width=120, record=True, file=io.StringIO())
    with progress.watch(console) as observer:
        observer.start(["uefl-published"], 0, 3)
        observer.arm("uefl-published", 0)
        observer.client("uefl-published", 52, "a")
        observer.round("uefl-published", 52, [{"accuracy": 0.5}])
        shown = observer._progress.tasks[0].fields["round"] if terminal else console.export_text()
    assert re.search(r"round 53(\s|$)", shown)


def test_report_of_one_run_shows_clients_and_rewrites(tmp_path):
    sample_runs.write(tmp_path / "a")
    output = accepted("report", tmp_path / "a")
    assert "per client" in output
    assert "over runs" not in output
    assert not re.search(r"\bseed\b", output)  # no table with a row for each run
    assert (tmp_path / "a/report.md").is_file()
    assert "differences to fedavg" in cli("report", tmp_path / "a", "--against", "fedavg").output


def test_report_of_several_runs_notes_differences(tmp_path):
    sample_runs.write(tmp_path / "a")
    sample_runs.write(tmp_path / "b", gamma=0.9)
    sample_runs.write(tmp_path / "c", finished=False)
    output = accepted("report", *(str(tmp_path / name) for name in "abc"))
    assert "over runs" in output
    assert f"unfinished: {tmp_path / 'c'}" in output
    assert re.search(r"seed: arms\.uefl\.gamma", output)


def test_report_counts_a_run_named_twice_once(tmp_path):
    sample_runs.write(tmp_path / "a")
    output = accepted("report", tmp_path / "a", tmp_path / "a/../a")
    assert "over runs" not in output
    assert "twice" in output


def test_report_counts_runs_of_one_seed_once(tmp_path):
    for name in "ab":
        sample_runs.write(tmp_path / name)
    result = cli("report", tmp_path / "a", tmp_path / "b")
    assert f": {tmp_path / 'b'}" in result.output
    assert "over runs" not in result.output  # one run is left, so there is no mean


def test_presets_lists_each_with_what_it_runs():
    output = accepted("presets")
    assert "demo" in output
    assert "Nine clients" in output


def test_a_preset_is_printed_to_start_a_file_from(tmp_path):
    result = cli("presets", "demo")
    assert result.exit_code == 0
    (tmp_path / "mine.toml").write_text(result.stdout)
    assert config.load(str(tmp_path / "mine.toml")) == config.load("demo")
    result = cli("presets", "demoo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.match("error: .*'demoo' .*'demo'", result.stderr)


def test_version():
    from uefl_kernels import __version__

    assert cli("--version").output == f"uefl {__version__}\n"


def test_the_command_line_imports_no_torch_or_matplotlib():
    stub = "import sys, types; sys.modules['uefl_kernels'] = types.SimpleNamespace(__version__='0')"
    check = "import uefl.cli; print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", f"{stub}; {check}"], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


MISTAKES = [
    "run.seed=-1",
    "data.clients=many",
    "data.partition.scheme=rows",
    "model.width=0",
    "training.lr=fast",
]


def test_lists_and_mistakes_of_sections_need_no_torch():
    lines = [["train", "demo", "--set", mistake] for mistake in MISTAKES] + [
        ["train", "demo", "--silos", "2"],
        ["presets", "demo"],
        ["presets"],
        ["suite"],
    ]
    code = f"""
import sys
from typer.testing import CliRunner
from uefl.cli import app
codes = [CliRunner().invoke(app, line).exit_code for line in {lines}]
print(codes, sorted({{'torch', 'matplotlib', 'scipy'}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[2, 2, 2, 2, 2, 2, 0, 0, 0] []\n"


def test_an_unknown_key_imports_torch_but_not_torchvision():
    code = """
import sys
from typer.testing import CliRunner
from uefl.cli import app
result = CliRunner().invoke(app, ["train", "demo", "--set", "nosuch=1"])
print(result.exit_code, sorted({"torchvision", "scipy.stats", "pandas", "uefl.run"} & set(sys.modules)))
"""
    assert fresh.python(code).stdout == "2 []\n"


@pytest.fixture(autouse=True)
def _signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
