"""The command line.

An error of the user is one line and exit code 2. A run that stopped early, or that rejected replies, has exit
code 1.

The commands import torch themselves, so that help and errors appear at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from . import config
from .errors import RunError, UserError, listed, one_line
from .paths import check_name, command, expanded, has_file, resolved
from .terminal import (
    OUTPUT,
    closed_streams,
    open_closed_streams,
    replace_streams,
    say,
    write_nearest_characters,
)

if TYPE_CHECKING:
    from .models.saved import SavedModel
    from .report.run_folder import RunFolder
    from .run import ClientPool
    from .text_table import Table

_GROUPS = {
    "start": "to start with",
    "codebooks": "the published tables of UEFL",
    "sets": "the published tables of FedUL",
    "own": "your own data",
}
_OUTPUT_CLOSED = 128 + signal.SIGPIPE
_UsageError: Any = typer.BadParameter.__base__  # newer versions of typer contain click


@contextmanager
def _in_a_line() -> Iterator[None]:
    """Print an error that a user can correct in one line, and set the exit code."""
    try:
        yield
    except _UsageError as error:
        where = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        _error(f"{' '.join(error.format_message().split()).rstrip('.')}{where}")
        raise typer.Exit(2) from None
    except (UserError, RunError) as error:
        _error(str(error))
        raise typer.Exit(2 if isinstance(error, UserError) else 1) from None
    except typer.Exit:
        raise
    except KeyboardInterrupt as end:
        raise _interrupted(_exit_code(end)) from None
    except BrokenPipeError:  # `uefl presets | head`
        _silence_stdout()
        raise typer.Exit(_OUTPUT_CLOSED) from None
    except MemoryError:
        _error("not enough memory for this process; use fewer or smaller inputs")
        raise typer.Exit(1) from None
    except OSError as error:  # a folder that cannot be written, a full disk, no network for a download
        where = f"{error.filename}: " if error.filename else ""
        if where and error.filename == str(OUTPUT):
            _silence_stdout()
        _error(f"{where}{error.strerror or error}")
        raise typer.Exit(2) from None
    except Exception:
        if not _signals:
            raise
        raise _interrupted(128 + _signals[-1]) from None


def _interrupted(code: int) -> typer.Exit:
    say("interrupted", error=True)
    return typer.Exit(code)


def _error(problem: str) -> None:
    say(f"error: {one_line(problem)}", error=True)


class _Commands(TyperGroup):
    """Print an error in one line in every command, and the help without a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_a_line():
            return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: Any) -> Any:
        with _in_a_line():
            done = super().invoke(ctx)
            sys.stdout.flush()  # the flush at the end of Python would print a traceback
            return done


class _Command(TyperCommand):
    """Take ~ for the home folder in every path, as in ``--out=~/runs``, and refuse an empty path."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(not arg or (arg.startswith("--") and arg.find("=") == len(arg) - 1) for arg in args):
            raise UserError("an argument is empty; look for a variable of the shell that is not set")
        try:
            rest = super().parse_args(ctx, args)
        except _UsageError as error:
            if "extra argument" in error.message and any(p.name == "settings" for p in self.params):
                error.message += "; set keys with --set, as in --set data.source=FOLDER"
            raise
        for name, value in ctx.params.items():
            if isinstance(value, Path):
                ctx.params[name] = expanded(value)
            elif isinstance(value, list):
                ctx.params[name] = [expanded(item) if isinstance(item, Path) else item for item in value]
        return rest


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train and compare algorithms of federated learning: UEFL (extensible codebooks), FedUL (learning"
    " from unlabeled sets), FedAvg and others.",
)


class _Engine(StrEnum):
    local = "local"
    distributed = "distributed"
    flower = "flower"


class _Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


_OnDevice = Annotated[_Device, typer.Option(help="auto: a CUDA device if there is one.")]
_DataRoot = Annotated[
    Path | None, typer.Option(help="Folder of torchvision's data sets; default: $UEFL_DATA.")
]
_RootCertificates = Annotated[
    Path | None,
    typer.Option(
        help="Flower: PEM file of the authorities that sign the SuperLink's certificate; default: the"
        " authorities of the system."
    ),
]
_Insecure = Annotated[bool, typer.Option("--insecure", help="Flower: do not use TLS, even between machines.")]
_Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Flower: refuse keys and secrets that other users of this machine may read."
    ),
]
_Wait = Annotated[
    float, typer.Option(min=0, help="Flower: seconds to wait for the SuperLink, and for the silos.")
]
_SiloImages = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="This silo's data: a folder with CLASS/*, train|test/CLASS/* or clients/NAME/SET/*, or a table.",
    ),
]
_SiloAlgorithms = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Accept only runs of these algorithms.",
        show_default="all that are installed",
    ),
]


def main() -> None:
    """Run the command ``uefl``."""
    open_closed_streams()
    replace_streams()
    write_nearest_characters()
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries that torch loads end a process without a current folder
        say("error: the current folder was removed; change to another one", error=True)
        sys.exit(2)
    os.environ.pop("MPLBACKEND", None)  # pictures need no backend, and matplotlib raises for an unknown name
    _end_as_by_ctrl_c()
    try:
        app()
    finally:
        _end_at_once()


class _Pipe(Console):
    """A console that raises BrokenPipeError if its output is closed."""

    def on_broken_pipe(self) -> None:
        """Raise the error, because rich would end the process silently."""
        raise BrokenPipeError


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        say(f"uefl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_Source = Annotated[
    str | None,
    typer.Argument(
        metavar="PRESET|CONFIG.toml",
        help="A preset (`uefl presets` lists them) or your own file.",
        show_default=False,
    ),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set SECTION.key, arms.NAME.key, or a key without its section. Give the option several times"
        " for several keys.",
    ),
]
_MoreRounds = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="With --resume: train a finished run for N further rounds.",
        show_default=False,
    ),
]
_OnEngine = Annotated[
    _Engine,
    typer.Option(
        help="local: all clients in this process; distributed: over several worker "
        "processes; flower: each client in its own process, over Flower."
    ),
]
_Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Distributed: number of processes; default: one per GPU, or per core."),
]
_SuperLink = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Flower: SuperLink (message server) of the silos; default: a new one."
    ),
]


@app.command(cls=_Command)
def train(
    source: _Source = None,
    settings: _Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/<preset>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
    more_rounds: _MoreRounds = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set run.seed=N.")] = None,
    device: _OnDevice = _Device.auto,
    data_root: _DataRoot = None,
    engine: _OnEngine = _Engine.local,
    workers: _Workers = None,
    superlink: _SuperLink = None,
    silos: Annotated[int | None, typer.Option(min=1, help="Flower: number of silos that take part.")] = None,
    root_certificates: _RootCertificates = None,
    secret: Annotated[Path | None, typer.Option(help="Flower: file of the SuperLink's secret.")] = None,
    insecure: _Insecure = False,
    strict: _Strict = False,
    wait: _Wait = 600.0,
) -> None:
    """Train every arm of a preset or of a configuration file, and write a report.

    An arm is an algorithm with its settings. If tensorboard is installed, the run folder also has its events.
    """
    options: dict[str, Any] = {"superlink": superlink, "silos": silos, "root_certificates": root_certificates}
    options |= {"secret": secret, "insecure": insecure, "strict": strict}
    _check_engine(engine, options, workers)
    _check_resume(resume, more_rounds, source, settings, seed, out)
    if resume is not None:
        folder = resume
    elif source is None:
        raise UserError(
            "name a preset (see `uefl presets`) or a .toml file, or continue a run with --resume DIR"
        )
    else:
        seeded: dict[str, Any] = {} if seed is None else {"run": {"seed": seed}}
        cfg = config.load(source, settings, **seeded)
        folder = out or Path("runs") / Path(source).stem
    options = options if engine is _Engine.flower else {"workers": workers}
    go_on = _resume_command(folder, data_root, engine, options)
    options |= {"wait": wait} if engine is _Engine.flower else {}

    from .progress import watch
    from .run import resume as resume_run
    from .run import train as train_run

    console = _console()
    keys: dict[str, Any] = {"device": device.value, "data_root": data_root}
    with _resumable(folder, go_on):
        with (
            watch(console) as observer,
            _deployment(engine, options, device.value, observer.notice, go_on) as deployment,
        ):
            keys |= {"observer": observer, "deployment": deployment}
            if resume is not None:
                keys |= {} if more_rounds is None else {"more_rounds": more_rounds}
                resume_run(folder, **keys)
            else:
                train_run(cfg, preset=str(source), out=folder, **keys)
        rejected = _show_results(console, folder)
    if rejected:
        raise RunError(f"{rejected} replies of clients were rejected (see the lines above and report.md)")


def _check_engine(engine: _Engine, for_flower: dict[str, Any], workers: int | None) -> None:
    if engine is not _Engine.flower and any(for_flower.values()):
        raise UserError(
            "--superlink, --silos, --root-certificates, --secret, --insecure and --strict are for --engine"
            " flower"
        )
    if engine is not _Engine.distributed and workers is not None:
        raise UserError("--workers is for --engine distributed")


def _check_resume(resume: Path | None, more_rounds: int | None, *of_new_runs: object) -> None:
    if more_rounds is not None and resume is None:
        raise UserError("--more-rounds needs a finished run: uefl train --resume DIR --more-rounds N")
    if resume is not None and any(value is not None and value != [] for value in of_new_runs):
        raise UserError(
            "--resume continues a run with its own configuration; omit the preset, --set, --seed and --out"
        )


def _resume_command(folder: Path, data_root: Path | None, engine: _Engine, options: dict[str, Any]) -> str:
    """Return the command that continues a run in the same way."""
    again: dict[str, Any] = {"data-root": data_root}
    again |= {"engine": engine.value} if engine is not _Engine.local else {}
    again |= {name.replace("_", "-"): value for name, value in options.items()}
    given = [[f"--{name}", *([] if value is True else [value])] for name, value in again.items() if value]
    return command("train", "--resume", folder, *chain(*given))


@contextmanager
def _resumable(folder: Path, go_on: str) -> Iterator[None]:
    """Print the command that continues the run, if the run is interrupted or the disk is full."""
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError) as end:
        raise _ended(end, folder, go_on) from None
    except UserError:
        raise
    except OSError as error:  # a full disk
        if (folder / "summary.json").is_file() or not (folder / "config.toml").is_file():
            raise
        place = error.filename or folder
        if place == str(OUTPUT):
            _silence_stdout()
        raise RunError(
            f"{error.strerror or error} while {place} was written; continue with: {go_on}"
        ) from None


def _show_results(console: Console, folder: Path) -> int:
    """Print the tables of a run and the places of its report, and count the rejected replies."""
    from .report.run_folder import read_run
    from .report.tables import tables

    run = read_run(folder)
    _show(console, *tables(run))
    say(f"report:   {folder / 'report.html'}\n          {folder / 'report.md'}\npictures: {folder / 'plots'}")
    return sum(arm["rejected"] for arm in run.arms.values())


def _deployment(
    engine: _Engine, options: dict[str, Any], *asked: Any
) -> AbstractContextManager[ClientPool | None]:
    if engine is _Engine.local:
        return nullcontext()
    from .deploy.choices import CHOICES

    return CHOICES[engine.value](**options).deployment(*asked)


_Trained = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run folder, or its file model-ARM.safetensors.", show_default=False),
]
_Arm = Annotated[
    str | None,
    typer.Option(metavar="ARM", help="Arm of the model; needed if the run has several.", show_default=False),
]
_Client = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Use the private tensors of this client; default: a new client. If clients have codebooks,"
        " `uefl export` needs a name.",
        show_default=False,
    ),
]


@app.command(cls=_Command)
def predict(
    run: _Trained,
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGES...", help="Image files, folders of images, or tables.", show_default=False
        ),
    ],
    arm: _Arm = None,
    client: _Client = None,
    passes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of passes with dropout on; default: as in the run.", show_default=False
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", help="Write a CSV file; - writes to standard output.", show_default=False
        ),
    ] = None,
    device: _OnDevice = _Device.auto,
) -> None:
    """Predict classes of images, or of the rows of tables, with their uncertainty.

    Images are resized to the size that the model takes.
    """
    from . import predict as predictions
    from .progress import bar
    from .run import chosen_device

    if "stdout" in closed_streams and (csv is None or str(csv) == "-"):
        raise UserError("the output is closed; give --csv FILE")
    predictor = predictions.Predictor(
        _model(run, arm).to(chosen_device(device.value)), images, client, passes
    )
    with bar(Console(stderr=True), "predicting", predictor.work) as advance:
        rows, kind = predictor.rows(advance), predictor.kind
        if csv is None:
            table = predictions.table(rows, kind)
        elif str(csv) == "-":
            predictions.write(rows, kind, sys.stdout)
        else:
            with predictions.output(csv, images):
                predictions.write_file(rows, kind, csv)
    if csv is None:
        _show(_console(), table)
    elif str(csv) != "-":
        say(f"{predictor.count} predictions: {csv}")
    for note in predictor.notes():
        say(f"note: {note}", error=True)


@app.command(cls=_Command)
def export(
    run: _Trained,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help=".safetensors: state dict; .pt2: torch.export; .onnx: ONNX.",
            show_default=False,
        ),
    ],
    arm: _Arm = None,
    client: _Client = None,
) -> None:
    """Write a trained model as a plain module.

    The module maps images (float32, 0 to 255), columns (float64) or tokens (int64) to probabilities.
    """
    from . import export as exporting

    exporting.write(_model(run, arm), file, client)
    say(f"model:    {file}")


@app.command(cls=_Command)
def fetch(
    names: Annotated[
        list[str],
        typer.Argument(metavar="DATASET...", help="Data sets, such as mnist cifar100.", show_default=False),
    ],
    data_root: _DataRoot = None,
) -> None:
    """Download published data sets through torchvision into the folder of --data-root."""
    from .fetch import fetch as download

    download(names, data_root, say)


def _model(run: Path, arm: str | None) -> SavedModel:
    """Return the model of a file, or of an arm of a run folder."""
    from . import api
    from .models import saved

    if run.is_file():
        if arm is not None:
            raise UserError("--arm is for a run folder; a model file has one arm")
        return saved.load(run)
    return api.load(run).model(arm)


@app.command(cls=_Command)
def silo(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="SuperLink to connect to.", show_default=False)
    ],
    data: _SiloImages = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this silo; default: the name of the folder.")
    ] = None,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="Tables: column with the classes.")] = "label",
    key: Annotated[
        Path | None, typer.Option(help="File of the private key that identifies this silo to the SuperLink.")
    ] = None,
    root_certificates: _RootCertificates = None,
    insecure: _Insecure = False,
    strict: _Strict = False,
    device: _OnDevice = _Device.auto,
    wait: _Wait = 600.0,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Privacy: refuse runs without privacy = 'local', or with less noise than this.",
            show_default=False,
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="Privacy: delta of the epsilon that this silo prints.")] = 1e-5,
    max_epsilon: Annotated[
        float,
        typer.Option(
            help="Privacy: largest epsilon over all runs; the silo sends no update that would exceed it. 0:"
            " no limit."
        ),
    ] = 0.0,
    spent: Annotated[
        Path | None, typer.Option(help="Privacy: file that counts the updates; default: next to the data.")
    ] = None,
    algorithms: _SiloAlgorithms = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of this silo's secret and private state; default: DATA.silo."
        ),
    ] = None,
    simulate: Annotated[str | None, typer.Option(hidden=True)] = None,
    data_root: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take part as one client in the runs at a SuperLink, with data of this machine, until Ctrl-C."""
    options = SimpleNamespace(**{**locals(), "device": device.value})
    from .deploy.command import silo as serve

    try:
        serve(options)
    except KeyboardInterrupt as end:
        raise typer.Exit(_exit_code(end)) from None


def _ended(end: BaseException, folder: Path, resume: str) -> typer.Exit:
    """Print how to continue after an interruption."""
    what = "interrupted"
    if isinstance(end, BrokenPipeError):
        what = "the output was closed"
        _silence_stdout()
    if (folder / "summary.json").is_file():
        advice = f"; the run is finished: {command('report', folder)}"
    else:
        advice = (
            f"; continue with: {resume}" if (folder / "config.toml").is_file() else " before the run began"
        )
    say(f"{what}{advice}", error=True)
    return typer.Exit(_OUTPUT_CLOSED if isinstance(end, BrokenPipeError) else _exit_code(end))


def _silence_stdout() -> None:
    """Discard the output that Python flushes at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command(cls=_Command)
def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Preset to print.", show_default=False)
    ] = None,
) -> None:
    """List the presets, or print one as a template for your own file."""
    if name is not None:
        say(config.preset_text(name).removesuffix("\n"))
        return
    from .text_table import Table

    for group, presets in config.preset_groups().items():
        rows = [[preset, about] for preset, about in presets.items()]
        _console().print(Table(_GROUPS[group], ["name", "what it runs"], rows, numeric=False).rich())


@app.command(cls=_Command)
def keys(
    section: Annotated[
        str,
        typer.Argument(
            metavar="WORD",
            help="Word in the title of sections, such as training, or a key, such as lr.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """List the keys of a configuration.

    With a word, list only the sections with this word in their title, or with this key.
    """
    from .config.docs import sections

    found = [text for title, text in sections() if section.lower() in title.lower()]
    place, _, key = section.lower().rpartition(".")  # also by its full name, as training.lr
    found = found or [text for title, text in sections() if place in title and f"| `{key}` |" in text]
    if not found:
        raise UserError(f"{section!r} is no key, nor in the title of any section; `uefl keys` lists them")
    say("\n".join(found))


class _Scale(StrEnum):
    cpu = "cpu"
    paper = "paper"


@app.command(cls=_Command)
def suite(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|SUITE.toml", help="A suite of the papers or your own file.", show_default=False
        ),
    ] = None,
    scale: Annotated[
        _Scale, typer.Option(help="cpu: small, for two cores; paper: the size of the paper, for a GPU.")
    ] = _Scale.cpu,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each arm, with different seeds.")] = 3,
    jobs: Annotated[
        int, typer.Option(min=0, help="Runs at the same time; 0: one per core for cpu, one for paper.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the suite; default: runs/NAME-SCALE.")] = None,
    device: _OnDevice = _Device.auto,
    data_root: _DataRoot = None,
) -> None:
    """Train every arm of a suite, a table of runs, with several seeds, and write a report.

    Without a name, list the suites of the papers. A second call continues where the first one stopped.
    """
    if name is None:
        from .suites.suite import suites
        from .text_table import Table

        if not suites():
            raise UserError(
                "no suites here: give the path of a .toml file; the suites of the papers are in"
                " reproduction/ of the repository"
            )
        _console().print(
            Table("suites", ["name", "what it runs"], list(map(list, suites().items())), numeric=False).rich()
        )
        return
    from .suites.command import run
    from .suites.suite import called

    name = called(name)
    folder = out or Path("runs") / f"{Path(name).stem}-{scale.value}"
    try:
        run(
            name,
            scale=scale.value,
            seeds=seeds,
            jobs=jobs,
            out=folder,
            device=device.value,
            data_root=data_root,
            console=_console(),
        )
    except KeyboardInterrupt as end:
        say("interrupted; run the same command to continue", error=True)
        raise typer.Exit(_exit_code(end)) from None


@app.command(cls=_Command)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    against: Annotated[
        str | None, typer.Option(metavar="ARM", help="Arm to compare with; default: the first one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Several runs: folder of the page; default: the folder comparison next to the first run.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the reports of runs again, and print their tables.

    For several runs, also write one page that compares them.
    """
    from .report.compare import check_arm, compare, paired_table
    from .report.tables import arm_table, tables
    from .report.write import folder_of_comparison, write_comparison

    files = [path for path in runs if path.is_file()]  # `suite` writes NAME.log next to the run folder NAME
    runs = [path for path in runs if path not in files] or runs
    # a folder that is named twice must not count twice in a mean
    once = list({resolved(folder): folder for folder in runs}.values())
    if len(once) == 1 and out is not None:
        raise UserError("--out is the folder for the page of several runs; name at least two runs")
    if out is not None:
        check_name(out, "the folder of the page")
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is not a folder; expected a folder for the page")
    read = [_written(folder) for folder in once]
    check_arm(read, against)
    console = _console()
    if files:
        say(f"note: ignored files, which are not run folders: {listed(files)}")
    if len(once) < len(runs):
        say("note: a folder is given twice; it counts once")
    for run in read:
        if run.edited:
            say(f"note: {run.path}: {run.edited}", error=True)
        _show(console, arm_table(run))
    if len(read) == 1:
        paired = paired_table(read, against)
        _show(console, *tables(read[0])[1:], *([paired] if paired is not None else []))
        return
    compared = compare(read, against)
    _show(console, *compared.tables)
    for note in compared.notes:
        say(note)
    folder = out or folder_of_comparison(once)
    if has_file(folder / "config.toml"):
        raise UserError(
            f"{folder} is a run folder, and the page would replace its report; choose another --out"
        )
    try:
        write_comparison(compared, folder)
    except OSError as error:
        say(f"note: no page: {error.filename or folder}: {error.strerror}; choose --out", error=True)
    else:
        say(f"page:     {folder / 'report.html'}")


def _written(folder: Path) -> RunFolder:
    """Write the report of a run, or a note if its folder is read-only, and return the run."""
    from .report.run_folder import read_run
    from .report.write import write_report

    try:
        return write_report(folder)
    except OSError as error:
        run, place = read_run(folder), error.filename or folder
        say(f"note: pictures and pages are not written: {place}: {error.strerror}", error=True)
        return run


@app.command(cls=_Command)
def doctor() -> None:
    """Show which kernels are compiled, which backend each op uses on this machine, and why."""
    from uefl_kernels import doctor as kernels

    try:
        found = kernels.collect()
    except ValueError as error:  # UEFL_BACKEND or UEFL_CPU has no valid name
        raise UserError(str(error)) from None
    from .text_table import Table

    choices = [[c["op"], c["device"], c["backend"], c["why"]] for c in found["ops"]]
    facts = list(map(list, kernels.facts(found)))
    _console().print(
        Table("this machine", ["what", "found"], facts, numeric=False).rich(),
        Table("ops", ["op", "device", "backend", "why"], choices, numeric=False).rich(),
    )


_signals: list[int] = []
"""signals that have asked this process to end; an import that a signal interrupts may raise any error"""


class _Terminated(KeyboardInterrupt):
    """A signal that ends a run as Ctrl-C does."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)


def _interrupt(number: int, frame: object) -> None:
    _signals.append(number)
    raise KeyboardInterrupt


def _terminate(number: int, frame: object) -> None:
    _end_at_once()
    _signals.append(number)
    raise _Terminated(number)


def _end_at_once() -> None:
    """End at the next signal without an exception, which would print a traceback at the exit of Python."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) in (_interrupt, _terminate, signal.default_int_handler):
            signal.signal(each, signal.SIG_DFL)


def _end_as_by_ctrl_c() -> None:
    """Handle SIGTERM, and SIGHUP of a closed terminal unless nohup ignores it, in the same way as Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)


def _exit_code(end: BaseException) -> int:
    return 128 + (end.args[0] if isinstance(end, _Terminated) else signal.SIGINT)


def _show(console: Console, *tables: Table) -> None:
    console.print(*(one.rich(console.encoding) for table in tables for one in table.split(console.width)))


def _console() -> Console:
    """Return a console that keeps table columns in a file or a pipe, which have no width."""
    return _Pipe() if sys.stdout.isatty() else _Pipe(width=120)
