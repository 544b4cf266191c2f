"""A trained model predicts.

The tests cover uncertainty, unseen clients, files, and the commands predict and export.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors import safe_open

import uefl
from tests.federated.command_line import accepted, cli
from tests.federated.tiny import in_threads, settings
from uefl.data import pixels
from uefl.errors import UserError
from uefl.models import saved
from uefl.predict import Predictor, table
from uefl.progress import bar

from .test_saved import IMAGES, write


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return, for each algorithm, a model after one round, and its file."""
    out, found = tmp_path_factory.mktemp("models"), {}
    for name in ("fedavg", "uefl", "fedper", "local", "fedsr", "ensemble"):
        ensemble = {"uncertainty": "ensemble", "members": 2}
        cfg = settings("uefl", **ensemble) if name == "ensemble" else settings(name, passes=4)
        path = out / f"model-{name}.safetensors"
        write(path, cfg)
        found[name] = saved.load(path), path
    # one round leaves all clients the same codebook
    for i, own in enumerate(found["uefl"][0].members[0].clients.values()):
        own["codebook"] += 0.1 * i
    return found


def entropy(probs):
    return torch.special.entr(probs.double()).sum(-1)


@pytest.mark.slow
def test_uncertainty_of_dropout_uses_drawn_masks(models):
    """Compare with whole passes of the network in plain PyTorch, each with its own masks, in float64."""
    model = saved.load(models["fedavg"][1])
    net, x = model.members[0].net, (IMAGES - model.mean) / model.std
    net.head.fc2.weight.data *= 20  # after one round the passes hardly differ
    torch.manual_seed(0)
    net.head.train()
    with torch.no_grad():
        drawn = torch.stack([net(x).double().softmax(-1) for _ in range(4000)])
    net.head.eval()
    said = model.predict(IMAGES, uncertainty=True, passes=4000)
    torch.testing.assert_close(said.probs.double(), drawn.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(said.entropy.double(), entropy(drawn.mean(0)), atol=0.02, rtol=0)
    torch.testing.assert_close(
        said.mutual_info.double(), entropy(drawn.mean(0)) - entropy(drawn).mean(0), atol=0.01, rtol=0
    )
    assert float(said.mutual_info.mean()) > 0.001


def test_draws_repeat_and_use_the_passes_of_the_run(models):
    model, _ = models["fedavg"]
    before = torch.get_rng_state()
    a, b = model.predict(IMAGES, uncertainty=True), model.predict(IMAGES, uncertainty=True, passes=4, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, a[:4], b[:4]))
    assert not torch.equal(a.probs, model.predict(IMAGES, uncertainty=True, seed=1).probs)
    assert not any(module.training for module in model.members[0].net.modules())
    plain = model.predict(IMAGES)
    torch.testing.assert_close(a.entropy_deterministic.double(), entropy(plain), atol=1e-5, rtol=0)


def test_samples_of_the_algorithm_are_its_uncertainty(models):
    """FedSR draws features from a Gaussian."""
    model, _ = models["fedsr"]
    assert float(model.predict(IMAGES, uncertainty=True, passes=50).mutual_info.mean()) > 0


def test_the_members_of_an_ensemble_are_its_uncertainty(models):
    model, _ = models["ensemble"]
    client = model.clients[0]
    said = model.predict(IMAGES, client, uncertainty=True)
    alone = [saved.replace(model, members=(member,)).predict(IMAGES, client) for member in model.members]
    torch.testing.assert_close(said.probs, torch.stack(alone).mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(said.probs, model.predict(IMAGES, client), atol=1e-6, rtol=0)
    expected = entropy(torch.stack(alone).mean(0)) - entropy(torch.stack(alone)).mean(0)
    torch.testing.assert_close(said.mutual_info.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("uncertainty", "passes"), [(True, 0), (True, -1), (True, 1.5), (True, True), (True, 10**20), (False, 3)]
)
def test_a_prediction_has_one_pass_or_more(models, uncertainty, passes):
    with pytest.raises(UserError, match="passes"):
        models["fedavg"][0].predict(IMAGES, uncertainty=uncertainty, passes=passes)


def test_another_site_has_the_codebook_that_fits_best(models):
    model, _ = models["uefl"]
    net, x = model.members[0].net, (IMAGES - model.mean) / model.std
    errors = {}
    with torch.no_grad():
        tokens = net.tokens(x)
        for client in model.clients:
            codebook = model.members[0].clients[client]["codebook"]
            rows = tokens.reshape(-1, codebook.shape[-1])
            nearest = codebook[torch.cdist(rows.double(), codebook.double()).argmin(1)]
            errors[client] = float((rows - nearest).double().square().mean())
    best = min(errors, key=errors.get)
    assert len(set(errors.values())) > 1
    assert model.fitting(IMAGES) == best
    assert torch.equal(model.predict(IMAGES), model.predict(IMAGES, best))
    assert torch.equal(
        model.predict(IMAGES, uncertainty=True).probs, model.predict(IMAGES, best, uncertainty=True).probs
    )


def test_another_site_has_the_mean_of_private_layers(models):
    model, _ = models["fedper"]
    assert model.fitting(IMAGES) is None
    net = model.members[0].net
    with torch.no_grad():
        expected = net((IMAGES - model.mean) / model.std).softmax(-1)
    torch.testing.assert_close(model.predict(IMAGES), expected)
    weights = [model.members[0].clients[client]["head.fc2.weight"] for client in model.clients]
    torch.testing.assert_close(net.head.fc2.weight.detach(), torch.stack(weights).mean(0), atol=1e-6, rtol=0)


def test_training_apart_leaves_no_model_for_another_site(models):
    model, _ = models["local"]
    with pytest.raises(UserError, match=r"client None .*silo-0"):
        model.predict(IMAGES)


@pytest.fixture
def files(tmp_path):
    """Write the images as files: gray, in color, with 16 bits, and of another size."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for i, image in enumerate(IMAGES.numpy()[:4, 0]):
        Image.fromarray(image).save(folder / f"{i}.png")
    Image.fromarray(np.dstack([IMAGES[4, 0].numpy()] * 3)).save(folder / "4.png")
    Image.fromarray(IMAGES[5, 0].numpy().astype(np.uint16) * 257).save(folder / "more" / "5.png")
    Image.fromarray(np.kron(IMAGES[6, 0].numpy(), np.ones((2, 2), np.uint8))).save(folder / "more" / "6.PNG")
    (folder / "more" / "notes.txt").write_text("x")
    return folder


def test_files_are_read_in_the_format_of_the_model(models, files):
    model, _ = models["fedavg"]
    paths = [files / f"{i}.png" for i in range(5)] + [files / "more" / "5.png", files / "more" / "6.PNG"]
    read = model.read(paths)
    assert torch.equal(read[:6], IMAGES[:6])
    # the filter is wider than a pixel
    torch.testing.assert_close(read[6].float(), IMAGES[6].float(), atol=40, rtol=0)
    assert torch.equal(model.predict([str(path) for path in paths[:5]]), model.predict(IMAGES[:5]))
    with pytest.raises(UserError, match=r"absent.png"):
        model.predict([files / "absent.png"])


def test_files_of_a_folder_that_are_no_images_are_noted(models, files):
    Image.fromarray(IMAGES[7, 0].numpy()).save(files / "7.gif")
    predictor = Predictor(models["fedavg"][0], [files])
    names = [Path(row.name).name for row in predictor.rows()]
    assert names == ["0.png", "1.png", "2.png", "3.png", "4.png", "7.gif", "5.png", "6.PNG"]
    (note,) = [line for line in predictor.notes() if "notes.txt" in line]
    assert "more" not in note.replace("more/notes.txt", "")


def test_names_of_files_with_control_characters(models, files):
    (files / "more" / "notes.txt").rename(files / "a\n\x1b[31m.txt")
    (files / "0.png").rename(files / "b\x1b\n.png")
    predictor = Predictor(models["fedavg"][0], [files])
    rows = [*predictor.rows()]
    assert any(row.name.endswith("b\x1b\n.png") for row in rows)
    shown = [str(cell) for row in table(rows, "image").rows for cell in row]
    assert any(name.endswith("b??.png") for name in shown)
    assert all(text.isprintable() for text in (*shown, *predictor.notes()))


def test_a_link_to_a_folder_around_it_is_refused(models, files):
    (files / "more" / "again").symlink_to(files)
    with pytest.raises(UserError, match="again"):
        Predictor(models["fedavg"][0], [files])


def test_color_becomes_gray_as_pillow_makes_it():
    color = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(color).convert("L"))
    assert torch.equal(
        pixels.gray(torch.from_numpy(color).movedim(2, 0)[None])[0, 0], torch.from_numpy(expected)
    )


def test_predict_writes_csv(models, files, tmp_path):
    path = models["uefl"][1]
    model = saved.load(path)
    output = accepted("predict", path, files, "--csv", tmp_path / "out.csv", "--device", "cpu")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    order = [files / f"{i}.png" for i in range(5)] + [files / "more" / "5.png", files / "more" / "6.PNG"]
    assert [row["image"] for row in rows] == list(map(str, order))
    said = model.predict(order, uncertainty=True)
    best = model.fitting(order)
    assert [row["class"] for row in rows] == [model.classes[k] for k in said.probs.argmax(1).tolist()]
    for column, values in (
        ("probability", said.probs.amax(1)),
        ("entropy", said.entropy),
        ("mutual_information", said.mutual_info),
    ):
        assert [float(row[column]) for row in rows] == pytest.approx(values.tolist(), abs=2e-6)
    assert re.search(f"codebook .*client {best!r}, .*of 3", output)
    for note in ("1 of 7 images .*8x8", "1 of 7 images .*16 bits", "gray"):
        assert re.search(note, output)
    again = cli("predict", path, files, "--csv", "-", "--device", "cpu")
    assert again.stdout == (tmp_path / "out.csv").read_text()
    named = cli("predict", path, files, "--client", "silo-1", "--csv", "-", "--device", "cpu")
    assert "codebook" not in named.output


@pytest.mark.parametrize("suffix", [".csv", ".pt2", ".safetensors"])
def test_an_output_may_have_the_longest_name(models, files, tmp_path, suffix):
    out = tmp_path / f"{'é' * 10}{'a' * (255 - 20 - len(suffix))}{suffix}"
    model = models["fedavg"][1]
    command = ("predict", model, files, "--csv", out) if suffix == ".csv" else ("export", model, out)
    accepted(*command)
    assert {*tmp_path.iterdir()} == {out, files}


@pytest.mark.parametrize("suffix", [".csv", ".pt2", ".safetensors"])
def test_the_folder_of_an_output_must_exist(models, files, tmp_path, suffix):
    out = tmp_path / "absent" / f"out{suffix}"
    model = models["fedavg"][1]
    command = ("predict", model, files, "--csv", out) if suffix == ".csv" else ("export", model, out)
    result = cli(*command)
    assert result.exit_code != 0
    assert f"there is no folder {out.parent}" in " ".join(result.output.split())


@pytest.mark.parametrize("name", ["uefl", "fedavg"])
def test_progress_counts_every_image_read(models, files, name):
    """A model with codebooks reads the images once more, to choose one."""
    predictor, steps = Predictor(models[name][0], [files]), []
    assert len(list(predictor.rows(steps.append))) == predictor.count
    assert sum(steps) == predictor.work == predictor.count * (2 if name == "uefl" else 1)


def test_all_batches_choose_the_codebook(models, files, monkeypatch):
    misfits = iter([{"silo-0": 9.0, "silo-1": 1.0}, {"silo-0": 1.0, "silo-1": 2.0}])
    monkeypatch.setattr("uefl.predict._BATCH", 4)
    monkeypatch.setattr(saved.SavedModel, "misfits", lambda self, images: next(misfits))
    predictor = Predictor(models["uefl"][0], [files])
    assert len(list(predictor.rows())) == 7
    assert any("client 'silo-1'" in note for note in predictor.notes())


def test_every_batch_has_draws_of_its_own(models, files, monkeypatch):
    monkeypatch.setattr("uefl.predict._BATCH", 1)
    (files / "copy.png").write_bytes((files / "0.png").read_bytes())
    one, other = Predictor(models["fedavg"][0], [files / "0.png", files / "copy.png"]).rows()
    assert one.entropy != other.entropy


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_gets_a_bar(terminal, capsys):
    errors = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with bar(errors, "predicting", 7) as advance:
        advance(3)
        print("1,2")  # the output does not go to the bar's stream
    assert ("3/7" in errors.file.getvalue()) == terminal
    assert capsys.readouterr().out == "1,2\n"


def test_csv_into_a_pipe_and_through_a_link(models, files, tmp_path):
    """The command does not replace the pipe or the link by a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file.csv")
    read = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("pipe", "link"):
        accepted("predict", models["uefl"][1], files / "0.png", "--csv", tmp_path / name)
    assert os.read(read, 10_000).decode() == (tmp_path / "file.csv").read_text()
    os.close(read)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_csv_into_a_full_device(models, files, tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    result = cli("predict", models["uefl"][1], files / "0.png", "--csv", tmp_path / "full")
    assert result.exit_code == 2
    assert "full" in result.stderr
    assert (tmp_path / "full").is_char_device()


@pytest.mark.slow
def test_predictions_into_a_closed_output(models, files):
    command = f"{sys.executable} -m uefl predict {models['fedavg'][1]} {files / '0.png'} >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, check=False, text=True)
    assert done.returncode == 2
    assert "--csv" in done.stderr


@pytest.mark.slow
def test_csv_into_a_closed_pipe(models, files):
    """The output is small, so that Python holds it back until the end."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "uefl", "predict", models["fedavg"][1], files / "0.png", "--csv", "-"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr.decode()


def test_an_output_takes_the_place_of_no_input(models, files):
    model, kept = models["uefl"][1], (files / "0.png").read_bytes()
    for path in (files / "0.png", files, files / "absent" / "a.csv"):
        result = cli("predict", model, files / "0.png", "--csv", path)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert str(path) in result.stderr
    assert (files / "0.png").read_bytes() == kept
    kept = model.read_bytes()
    (files / "link.safetensors").symlink_to(model)
    for path in (model, files / "link.safetensors"):
        result = cli("export", model, path, "--client", "silo-0")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert model.read_bytes() == kept


def test_an_output_is_no_file_of_a_run(models, files, tmp_path):
    for name in ("config.toml", "metrics.jsonl", "report.md", "samples.safetensors"):
        (tmp_path / name).write_text("kept")
    path = models["fedavg"][1]
    for name in ("samples.safetensors", "checkpoint-1.safetensors"):
        assert cli("export", path, tmp_path / name).exit_code == 2
    for name in ("report.md", "metrics.jsonl", "plots.txt"):
        result = cli("predict", path, files / "0.png", "--csv", tmp_path / name)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert {entry.read_text() for entry in tmp_path.iterdir() if entry.is_file()} == {"kept"}
    accepted("predict", path, files / "0.png", "--csv", tmp_path / "new.csv")


def test_predictions_leave_other_files_alone(models, files, tmp_path):
    """One of the other files has the name of a temporary file."""
    (tmp_path / "a.tmp").write_text("mine")
    accepted("predict", models["uefl"][1], files / "0.png", "--csv", tmp_path / "a.csv")
    assert (tmp_path / "a.tmp").read_text() == "mine"


def test_predict_shows_a_table(models, files):
    result = cli("predict", models["fedper"][1], files / "0.png", files / "0.png", "--passes", "3")
    assert result.exit_code == 0, result.output
    assert "mutual information" in result.stdout
    # the header of a table wider than the terminal
    pieces = sum(line.split()[:1] == ["image"] for line in result.stdout.splitlines())
    assert result.stdout.count("0.png") == pieces >= 1
    assert re.search(r"\bmean\b.*\blayers\b", result.output)


def test_predict_of_a_run_folder(finished, files):
    out, *_ = finished
    accepted("predict", out, files, "--arm", "uefl")
    assert "several" in cli("predict", out, files).output
    result = cli("predict", out, out, files, "--arm", "uefl")  # the plots of a run folder are not inputs
    assert (result.exit_code, result.stderr.count("\n"), str(out) in result.stderr) == (2, 1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("predict {model} {files}/absent.png", "absent.png"),
        ("predict {model} {empty}", "image"),
        ("predict {model} {files}/more/notes.txt", "notes.txt"),
        ("predict {model} {files} --client berlin", "client 'berlin'"),
        ("predict {model} {files} --arm uefl", "--arm"),
        ("predict {model} {files} --passes 0", "--passes"),
        ("predict {empty} {files}", "config.toml"),
        ("predict {model} {files} --csv {empty}/absent/x.csv", "absent/x.csv"),
        ("export {model} {empty}/x.txt --client silo-0", ".safetensors, .pt2, .onnx"),
        ("export {model} {empty}/x.pt2", "silo-0, silo-1, silo-2"),
        ("export {model} {empty}/x.pt2 --client berlin", "client 'berlin'"),
        ("export {model} {empty}/absent/x.pt2 --client silo-0", "absent/x.pt2"),
        ("export {model} {empty}/x.pt2 --client silo-0 --arm uefl", "--arm"),
    ],
)
def test_mistakes_in_predict_and_export_are_a_line(models, files, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    places = {"model": models["uefl"][1], "files": files, "empty": tmp_path / "empty"}
    result = cli(*(argument.format(**places) for argument in arguments.split()))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "empty").iterdir())


def test_uncertainty_in_several_threads(models):
    model, _ = models["uefl"]
    alone = {client: model.predict(IMAGES, client, uncertainty=True) for client in model.clients}
    wrong = []

    def work(client):
        for _ in range(5):
            said = model.predict(IMAGES, client, uncertainty=True)
            wrong.extend([client] * (not all(map(torch.equal, said[:4], alone[client][:4]))))

    in_threads(work, model.clients)
    assert not wrong


# --- export -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "client"),
    [("fedavg", None), ("uefl", "silo-1"), ("fedper", "silo-1"), ("fedper", None), ("ensemble", "silo-0")],
)
def test_the_module_predicts_as_the_model(models, name, client):
    model, _ = models[name]
    module = model.module(client)
    torch.testing.assert_close(module(IMAGES.float()), model.predict(IMAGES, client), atol=1e-6, rtol=0)
    assert model.clients == models[name][0].clients


@pytest.mark.parametrize(
    ("name", "client"),
    [("uefl", "silo-1"), *(pytest.param(n, None, marks=pytest.mark.slow) for n in ("fedavg", "fedper"))],
)
def test_export_as_a_program(models, tmp_path, recwarn, name, client):
    path = models[name][1]
    model = saved.load(path)
    out = tmp_path / "model.pt2"
    accepted("export", path, out, *(["--client", client] if client else []))
    assert [str(warning.message) for warning in recwarn] == []
    extra = {"uefl.json": ""}
    program = torch.export.load(str(out), extra_files=extra)
    ops = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [op for op in ops if not op.startswith(("aten.", "<built-in"))] == []  # no op of ours
    for count in (1, 7, 12):
        torch.testing.assert_close(
            program.module()(IMAGES[:count].float()), model.predict(IMAGES[:count], client), atol=1e-6, rtol=0
        )
    assert json.loads(extra["uefl.json"])["classes"] == list(model.classes)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt2"]


def test_export_as_a_state_dict(models, tmp_path):
    path = models["uefl"][1]
    model = saved.load(path)
    accepted("export", path, tmp_path / "m.SafeTensors", "--client", "silo-2")
    with safe_open(tmp_path / "m.SafeTensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()["uefl-export"])
    expected = model.module("silo-2").state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert about["shape"] == [1, 8, 8]


def test_export_as_onnx(models, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, path = models["fedper"]
    accepted("export", path, tmp_path / "m.onnx", "--client", "silo-1")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for count in (2, 5):
        (probs,) = session.run(None, {"images": IMAGES[:count].float().numpy()})
        torch.testing.assert_close(
            torch.from_numpy(probs), model.predict(IMAGES[:count], "silo-1"), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("suffix", [".pt2", ".safetensors"])
def test_export_to_a_full_disk_is_a_line(models, tmp_path, suffix):
    """A limit on the size of files replaces a full disk, at which torch would end the process."""
    from tests import fresh  # not above: the import starts a process, which few tests need

    arguments = ["uefl", "export", str(models["fedavg"][1]), f"{tmp_path / 'a'}{suffix}"]
    code = f"""
import resource, sys
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
sys.argv = {arguments}
from uefl.cli import main
main()
"""
    result = fresh.python(code)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_export_does_not_replace_a_pipe(models, tmp_path):
    os.mkfifo(tmp_path / "x.pt2")
    result = cli("export", models["uefl"][1], tmp_path / "x.pt2", "--client", "silo-0")
    assert result.exit_code == 2
    assert "pipe" in result.stderr
    assert (tmp_path / "x.pt2").is_fifo()


def test_misfit_is_none_by_default():
    assert uefl.Algorithm.misfit(None, None, None, {}) is None
