"""The pages of a report show every kind of content.

The tests cover HTML, names of clients, several runs, and terminals that lack characters.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from uefl.data.federation import LabeledData, Split
from uefl.errors import UserError
from uefl.report import quality, samples
from uefl.report.compare import by_data, compare, configurations, paired_table
from uefl.report.run_folder import read_run
from uefl.report.tables import arm_table, client_tables
from uefl.report.words import count, label, labels
from uefl.report.write import write_report
from uefl.text_table import Table
from uefl.uncertainty import Prediction

from . import sample_runs
from .command_line import accepted, cli


class Page(HTMLParser):
    """Tags with their attributes, all of which must be closed, and the text between them."""

    EMPTY = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def with_samples(path):
    rng = np.random.default_rng(0)
    data = {
        f"silo-{i}": LabeledData(
            *[
                Split(
                    torch.from_numpy(rng.integers(0, 256, (20, 1, 6, 8), dtype=np.uint8)),
                    torch.arange(20) % 4,
                )
            ]
            * 3
        )
        for i in range(3)
    }
    samples.write(path, list(data), data.__getitem__)
    return data


# --- the page ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("drawn")
def test_the_page_is_self_contained_and_matches_the_markdown(tmp_path):
    with_samples(sample_runs.write(tmp_path))
    write_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(sources) == 9  # with the losses
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)
    assert all(attributes["alt"] for tag, attributes in page.tags if tag == "img")
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    anchors = ["#" + attributes["id"] for tag, attributes in page.tags if tag == "h2"]
    assert (
        links == anchors == ["#clients-over-the-rounds", "#extensions", "#predictions", "#images", "#clients"]
    )
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "http" not in (tmp_path / "report.html").read_text()
    markdown = (tmp_path / "report.md").read_text()
    assert len(re.findall(r"!\[", markdown)) == len(sources)
    for text in ("0.460 ± 0.129", "silo-2", "Test images of each class", "config.toml"):
        assert text in page.text
        assert text in markdown


def test_names_cannot_break_the_page(tmp_path):
    name = '<script>alert("x")</script> & `code` |'
    lines = [line | {"client": name} for line in sample_runs.records(clients=1)]
    write_report(sample_runs.write(tmp_path, lines, classes=["<b>", "b", "c", "d"]))
    page = Page((tmp_path / "report.html").read_text())
    assert "script" not in {tag for tag, _ in page.tags}
    assert label(name) in page.text
    assert "<script>" not in (tmp_path / "report.md").read_text().replace("\\<", "")


def test_a_run_without_predictions_or_manifest_has_a_page(tmp_path):
    lines = [
        {key: value for key, value in line.items() if key not in ("confusion", "reliability", "confidence")}
        for line in sample_runs.records()
    ]
    sample_runs.write(tmp_path, lines)
    (tmp_path / "manifest.json").unlink()
    write_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "Predictions" not in page.text
    assert "Images" not in page.text


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("file", "message"),
    [("manifest.json", "manifest"), ("samples.safetensors", "read")],
    ids=["manifest", "samples"],
)
def test_damaged_files_are_named(tmp_path, file, message):
    sample_runs.write(tmp_path)
    (tmp_path / file).write_text("{")
    with pytest.raises(UserError, match=f"{file} .*{message}"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [
        {"classes": 3},
        {"classes": [1, 2]},
        {"silos": {"a": 1}},
        {"silos": {"a": {"train": 1}}},
        {"silos": {"a": {"train": {"images_of_class": "x"}}}},
        {"silos": {"a": {"test": {"images_of_class": [0.5]}}}},
    ],
)
def test_a_manifest_of_other_types_is_named(tmp_path, manifest):
    (sample_runs.write(tmp_path) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json .*delete"):
        read_run(tmp_path)


PIXELS = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("file", "tensors"),
    [
        ("samples", {"weight": torch.zeros(2)}),
        ("samples", {"a.images": PIXELS}),
        ("samples", {"0.images": torch.zeros(3)}),
        ("samples", {"0.images": PIXELS, "0.labels": torch.tensor([0, 99])}),
        ("samples", {"99.images": PIXELS}),
        ("uncertain-uefl", {"0.images": PIXELS}),
    ],
)
def test_images_of_another_file_are_named(tmp_path, file, tensors):
    """An exported model is such a file."""
    path = sample_runs.write(tmp_path) / f"{file}.safetensors"
    save_file(tensors, path)
    with pytest.raises(UserError, match=rf"{path} .*delete"):
        list(samples.draw(read_run(tmp_path)))


def test_samples_are_spread_over_the_classes_and_kept_once(tmp_path):
    data = with_samples(tmp_path)
    before = (tmp_path / "samples.safetensors").read_bytes()
    tensors = load_file(tmp_path / "samples.safetensors")
    assert tensors["1.labels"].tolist() == sorted(tensors["1.labels"].tolist())
    assert set(tensors["1.labels"].tolist()) == {0, 1, 2, 3}
    images = {image.numpy().tobytes() for image in data["silo-1"].train.images}
    assert all(image.numpy().tobytes() in images for image in tensors["1.images"])
    samples.write(tmp_path, ["silo-0"], None)  # the file exists, so this call loads no data
    assert (tmp_path / "samples.safetensors").read_bytes() == before


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_samples_of_unlabeled_sets_and_of_colors_are_shown(tmp_path):
    save_file(
        {"0.images": torch.zeros(4, 3, 9, 5, dtype=torch.uint8)},
        sample_runs.write(tmp_path) / "samples.safetensors",
    )
    write_report(tmp_path)
    assert "1 of 3 clients" in (tmp_path / "report.md").read_text()


def test_samples_are_labeled_with_their_measured_clients(tmp_path):
    """With ``evaluation`` below 1, the measured client need not be the first of the federation."""
    with_samples(
        sample_runs.write(tmp_path, [line for line in sample_runs.records() if line["client"] == "silo-2"])
    )
    (tmp_path / "manifest.json").write_text(json.dumps({"silos": {f"silo-{i}": {} for i in range(3)}}))
    ((picture, figure),) = samples.draw(read_run(tmp_path))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["silo-0", "silo-1", "silo-2"]
    assert picture.caption.startswith("Training images")


def test_counts_of_the_clients_are_added_up(tmp_path):
    run = read_run(sample_runs.write(tmp_path))
    assert run.counts("uefl", "confusion").tolist() == [183 if i % 5 == 0 else 39 for i in range(16)]
    assert run.counts("uefl", "confidence").tolist() == pytest.approx([0, 165, 720])
    assert run.counts("uefl", "absent") is None


def test_a_class_is_a_row_of_the_confusion(tmp_path):
    """Two of three images of class 0 are predicted correctly, and all of class 1."""
    (line,) = [line for line in sample_runs.records(("fedavg",), clients=1) if "confusion" in line]
    run = read_run(sample_runs.write(tmp_path, [line | {"confusion": [2, 1, 0, 1]}], classes=("a", "b")))
    figures = {picture.name: figure for picture, figure in quality.draw(run)}
    assert figures["classes.png"].axes[0].lines[0].get_xdata() == pytest.approx([200 / 3, 100])
    shares = figures["confusion.png"].axes[0].images[0].get_array()
    assert shares.ravel().tolist() == pytest.approx([200 / 3, 100 / 3, 0, 100])


# --- names ------------------------------------------------------------------------------------------------


def test_labels_are_short_lines_and_differ():
    assert label("north\nsouth\t\x1b[31m") == "north south [31m"
    assert label("x" * 120) == "x" * 21 + "…" + "x" * 10
    assert label("\n") == repr("\n")
    assert list(labels(["a" * 60 + "1" + "b" * 60, "a" * 60 + "2" + "b" * 60]).values()) == [
        label("a" * 60 + "b" * 60),
        f"{label('a' * 99 + 'b' * 60)} (2)",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("clients", [3, 13])
def test_clients_of_any_name_are_drawn(tmp_path, clients):
    names = ["line\nbreak", "y" * 120, "東京病院", "клиника", "a\u202eb"] + [
        f"silo-{i}" for i in range(clients)
    ]
    lines = [
        line | {"client": names[int(line["client"].split("-")[1])]}
        for line in sample_runs.records(clients=clients)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of letters that it lacks
        run = write_report(sample_runs.write(tmp_path, lines))
    shown = [row[0] for row in client_tables(run)[0].rows]
    assert shown[:3] == ["line break", "y" * 21 + "…" + "y" * 10, "東京病院"]
    text = (tmp_path / "report.md").read_text()
    assert ("client 3: 東京病院." in text) == (clients == 3)  # where pictures name each client
    assert all(len(line) < 1000 for line in text.splitlines())


@pytest.mark.usefixtures("drawn")
def test_classes_of_any_name_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # LaTeX is not for these names
    with_samples(sample_runs.write(tmp_path, classes=[r"$\frac$", "肺炎", "c", "d"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of letters that it lacks
        write_report(tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert page.text.count("class 2: 肺炎.") == 2  # below accuracy by class, and below the confusion


def test_singular_of_one():
    assert (count(1, "round"), count(2, "round"), count(0, "round")) == ("1 round", "2 rounds", "0 rounds")


@pytest.mark.parametrize("width", [50, 80, 120])
def test_tables_in_a_terminal_break_no_number(tmp_path, width):
    arms = ("fedavg", "uefl", *(f"an-arm-with-a-name-{i}" for i in range(4)))
    run = read_run(sample_runs.write(tmp_path, sample_runs.records(arms)))
    for table in (arm_table(run), *client_tables(run)):
        pieces = table.split(width)
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(*(piece.rich() for piece in pieces))
        text = console.export_text()
        assert [name for piece in pieces for name in piece.header[1:]] == table.header[1:]
        for row in table.rows:
            lines = iter([line for line in text.splitlines() if line.strip().startswith(row[0])])
            for piece in pieces:
                cells = piece.rows[table.rows.index(row)]
                assert next(line.split() for line in lines if line.split() == " ".join(cells).split())
    assert len(arm_table(run).split(500)) == 1


def test_names_with_square_brackets_are_shown_as_they_are():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Table("runs [/x]/t", ["arm", "accuracy"], [["[b]", "0.5"]], note="of [ours]").rich())
    text = console.export_text()
    assert all(piece in text for piece in ("runs [/x]/t", "[b]", "of [ours]"))


# --- several runs -----------------------------------------------------------------------------------------


def shifted(by, arm="uefl"):
    return [
        line | {"accuracy": line["accuracy"] + by * (line["arm"] == arm)} for line in sample_runs.records()
    ]


def test_differences_are_taken_run_by_run(tmp_path):
    runs = [
        read_run(sample_runs.write(tmp_path / str(i), shifted(by), seed=i))
        for i, by in enumerate((0.0, 0.1, -0.3))
    ]
    table = paired_table(runs)
    sd = np.std([0.2, 0.3, -0.1], ddof=1)
    half = 4.302653 * sd / 3**0.5  # Student's t, two degrees of freedom, 97.5 %
    low, high = 0.4 / 3 - half, 0.4 / 3 + half
    assert table.header == ["arm", "accuracy minus fedavg, last 4 rounds, 95 %", "sd over runs", "higher in"]
    assert table.rows == [["uefl", f"+0.133 [{low:+.3f}, {high:+.3f}]", f"{sd:.3f}", "2 of 3"]]
    assert paired_table(runs, "uefl").rows == [
        ["fedavg", f"-0.133 [{-high:+.3f}, {-low:+.3f}]", f"{sd:.3f}", "1 of 3"]
    ]
    assert paired_table(runs[:1]) is None
    assert paired_table(runs[:1], "fedavg").rows == [["uefl", "+0.200", "-", "1 of 1"]]


def test_runs_on_other_data_are_kept_apart(tmp_path):
    where = {
        "a": {"seed": 0},
        "b": {"seed": 1},
        "c": {"seed": 0, "data.source": "mnist"},
        "d": {"seed": 1, "data.source": "mnist"},
    }
    runs = [read_run(sample_runs.write(tmp_path / name, **keys)) for name, keys in where.items()]
    assert [[run.path.name for run in group] for group in by_data(runs)] == [["a", "b"], ["c", "d"]]
    output = accepted("report", *(str(run.path) for run in runs))
    assert re.findall(r"\b(\d) runs .*\b(digits|mnist)\b", output) == [("2", "digits"), ("2", "mnist")]
    assert "different data" in output
    assert output.count("differences to fedavg") == 2


def test_given_clients_with_other_images_are_other_data(tmp_path):
    counts = {"a": [3, 4], "b": [3, 4], "c": [4, 3]}
    runs = []
    for i, (name, of_class) in enumerate(counts.items()):
        path = sample_runs.write(tmp_path / name, seed=i, **{"data.source": "arrays"})
        parts = {"train": {"images_of_class": of_class}, "test": {"images_of_class": [1, 1]}}
        manifest = {"classes": ["0", "1", "2", "3"], "silos": {"clinic": {"angle": 3.0, **parts}}}
        (path / "manifest.json").write_text(json.dumps(manifest))
        runs.append(read_run(path))
    assert [[run.path.name for run in group] for group in by_data(runs)] == [["a", "b"], ["c"]]


def test_a_suite_folder_names_its_runs_and_skips_logs(tmp_path):
    runs = [sample_runs.write(tmp_path / "few" / "uefl" / f"seed-{seed}", seed=seed) for seed in (0, 1)]
    (log := runs[0].with_suffix(".log")).write_text("round 1\n")
    for folder, hint in (
        (tmp_path, "CASE/ARM/seed-N: name runs in it, as {}/*/*/seed-*"),
        (tmp_path / "few", "ARM/seed-N: name runs in it, as {}/*/seed-*"),
    ):
        result = cli("report", folder)
        assert result.exit_code == 2
        assert result.stderr.endswith(f"{hint.format(folder)}\n")
    result = cli("report", *sorted(tmp_path.glob("few/*/seed-*")))
    assert result.exit_code == 0, result.output
    assert f": {log}\n" in result.output
    assert re.findall(r"\b\d runs\b", result.output) == ["2 runs"]
    assert re.search(r"seed-0\.log .*config\.toml", cli("report", log).stderr)


def test_the_arm_to_compare_with_must_exist(tmp_path):
    paths = [str(sample_runs.write(tmp_path / str(seed), seed=seed)) for seed in (0, 1)]
    result = cli("report", *paths, "--against", "fedag")
    assert result.exit_code == 2
    assert re.fullmatch("error: --against 'fedag': .*fedavg, uefl\n", result.stderr)
    assert "differences to uefl" in cli("report", *paths, "--against", "uefl").output
    alone = cli("report", paths[0], "--against", "fedag")
    assert (alone.exit_code, alone.stderr) == (result.exit_code, result.stderr)


# --- the process ------------------------------------------------------------------------------------------


def uefl(*arguments, **keys):
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"} | keys.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-m", "uefl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=keys.pop("cwd", None),
    )


@pytest.mark.slow
def test_a_report_needs_no_backend_of_the_user(tmp_path):
    sample_runs.write(tmp_path, sample_runs.records(clients=1))
    process = uefl("report", str(tmp_path), env={"MPLBACKEND": "nonsense"})
    assert (process.communicate()[1], process.returncode) == (b"", 0)


@pytest.mark.slow
def test_a_terminal_of_ascii_shows_the_report(tmp_path):
    lines = [line | {"client": "клиника"} for line in sample_runs.records(clients=1)]
    sample_runs.write(tmp_path, lines)
    process = uefl("report", str(tmp_path), env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, b"")
    assert b"0.450 +- 0.129" in out
    table = [
        line
        for line in out.decode("ascii").partition("clients, time and traffic")[0].splitlines()
        if line.startswith(("+", "|"))
    ]
    assert len(table) == 6
    assert len({len(line) for line in table}) == 1
    assert b"???????" in out


# without turned images, because a process imports torchvision to turn them
SMALL = ("clients=2", "angles=[]", "model.width=2", "train_per_client=20", "local_epochs=1")
LONG = ["demo"]
for key in ("rounds=[400]", "threads=1", "arms=fedavg", *SMALL):
    LONG += ["--set", key]


def begun(process, out: Path):
    """Wait until a round is in the metrics."""
    for _ in range(600):
        if (out / "checkpoint.json").exists():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    raise AssertionError("no round within two minutes")


@pytest.mark.slow
def test_terminated_run_names_the_resume_command(tmp_path):
    process = uefl(
        "train", *LONG, "--out", "run", cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    begun(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert re.fullmatch("interrupted.*: uefl train --resume run\n", error.decode())


@pytest.mark.slow
def test_closed_output_names_the_resume_command(tmp_path):
    process = uefl(
        "train", *LONG, "--out", "run", cwd=tmp_path, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    begun(process, tmp_path / "run")
    process.stdout.close()
    error = process.stderr.read()
    process.wait(timeout=60)
    assert process.returncode == 141
    assert re.fullmatch(".*output.*: uefl train --resume run\n", error.decode())


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_several_runs_have_a_page_in_common(tmp_path):
    paths = [str(sample_runs.write(tmp_path / str(seed), shifted(0.1 * seed), seed=seed)) for seed in (0, 1)]
    paths.append(str(sample_runs.write(tmp_path / "other", lr=0.5, seed=2)))
    accepted("report", *paths)
    page = Page((tmp_path / "comparison" / "report.html").read_text())
    assert [tag for tag, _ in page.tags].count("img") == 2  # accuracy and entropy; losses
    assert "training.lr" in page.text
    compared = compare([read_run(Path(path)) for path in paths])
    assert compared.tables[1].rows[0][1] in page.text
    assert [row[3] for row in configurations(compared.runs).rows] == ["0.0001", "0.0001", "0.5"]
    curve = compared.groups[0].series("uefl", "accuracy")
    np.testing.assert_allclose(curve[0], [0.31, 0.41, 0.31])
    out = tmp_path / "elsewhere"
    accepted("report", *paths, "--out", out)
    assert (out / "report.md").is_file()


class Guess:
    """A model that is less certain about darker images."""

    clients = ()

    def predict(self, images, client, *, uncertainty):
        spread = 1 - images.float().mean((1, 2, 3)) / 255
        chances = torch.stack([1 - spread / 2, spread / 2], 1)
        return Prediction(chances, spread, spread, spread)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_the_most_uncertain_test_images_are_kept_and_shown(tmp_path):
    data = with_samples(sample_runs.write(tmp_path))
    samples.write_uncertain(tmp_path, "uefl", Guess(), list(data), data.__getitem__)
    kept = load_file(tmp_path / "uncertain-uefl.safetensors")
    brightness = data["silo-1"].test.images.float().mean((1, 2, 3))
    np.testing.assert_allclose(kept["1.entropy"], 1 - brightness.sort().values[:10] / 255, atol=1e-6)
    write_report(tmp_path)
    assert (tmp_path / "plots" / "uncertain-uefl.png").is_file()
    assert "uncertain-uefl.png" in (tmp_path / "report.md").read_text()
