"""Check that the comparisons of federated rounds run, and that the published UEFL loop equals ours."""

import copy
import os
import re

import pytest
import torch

from benchmarks import fedul_round, results, round_times, simulation, two_runs, uefl_round
from uefl import config
from uefl.data import build

TINY = [
    "source=digits",
    "clients=3",
    "angles=[0,-50,120]",
    "train_per_client=40",
    "test_per_client=20",
    "width=4",
    "hidden=16",
    "codewords=8",
    "segments=2",
    "local_epochs=2",
]


def options(*keys):
    return [piece for key in keys for piece in ("--set", key)]


@pytest.mark.slow
def test_a_round_of_uefl_is_timed_with_the_published_loop(capsys, tmp_path):
    """Check that the page of measurements shows saved rows."""
    uefl_round.main(
        ["--turns", "1", "--bf16", "--processes", "2", "--save", str(tmp_path / "rounds"), *options(*TINY)]
    )
    printed = capsys.readouterr().out
    page = results.page(tmp_path)
    assert "## Federated rounds" in page
    for loop in (
        "uefl-published",
        "uefl-published, 2 processes",
        "published",
        "published, once",
        "published, bfloat16",
        "published, once, bfloat16",
    ):
        assert f"│ {loop} " in printed
        assert f"| mnist-9-published {' '.join(TINY)} | 1 | {loop} | " in page
    assert "3 clients, 240 images, width 4" in printed


def test_many_small_clients_are_timed_with_a_plain_loop(capsys, tmp_path):
    sizes = ("--clients", "4", "--images", "4", "--cohort", "2", "--batch", "2")
    simulation.main(["--turns", "1", *sizes, "--save", str(tmp_path / "rounds")])
    assert "│ plain loop " in capsys.readouterr().out
    page = results.page(tmp_path)
    assert "| fedavg 4x4 cohort 2 batch 2 | 1 | uefl | " in page


def test_the_plain_loop_trains_the_model_of_fedavg():
    """Check that both loops do the same work.

    With every client in the round, one batch each and no dropout, the models are equal.
    """
    splits = list(simulation.images_of(3, 8))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    plain = simulation.PlainLoop(simulation.normalized(splits), 3, 8, lambda: net)
    ours = simulation.ours(splits, 3, 8, lambda: copy.deepcopy(net))
    for _ in range(2):
        plain.train()
        ours.train()
    model = torch.cat([piece.flatten() for piece in plain.model])
    torch.testing.assert_close(ours.arm.members[0].state.tensors["values"], model, rtol=1e-5, atol=1e-6)


def test_a_missing_gpu_gives_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        uefl_round.main(["demo", "--device", "cuda"])
    assert ended.value.code == 2
    assert re.search("error: .*--device.*GPU", capsys.readouterr().err.splitlines()[-1])


def test_rounds_are_compared_turn_by_turn():
    """The comparison has medians, and ratios to the first loop in the same turn."""
    ours = [(1.0, 1.0, 2.0, 2.0), (3.0, 1.0, 4.0, 4.0), (2.0, 1.0, 3.0, 3.0)]
    theirs = [(2.0, 2.0, 4.0, 2.0), (8.0, 8.0, 16.0, 8.0), (7.0, 2.0, 9.0, 9.0)]
    first, second = round_times.medians({"uefl": ours, "published": theirs})
    assert (first["train_s"], first["wall_s"], first["wall_ratio"], first["turns"]) == (2.0, 3.0, 1.0, 3)
    assert (second["train_s"], second["measure_s"], second["wall_s"], second["cpu_s"]) == (7.0, 2.0, 9.0, 8.0)
    assert (second["wall_ratio"], second["cpu_ratio"], second["cpu_least"], second["cpu_most"]) == (
        3.0,
        2.0,
        1.0,
        3.0,
    )


@pytest.mark.slow
def test_a_round_of_fedul_is_timed_with_the_published_loop(capsys):
    small = options(
        "source=digits", "clients=2", "train_per_client=64", "test_per_client=20", "batch_size=64", "sets=4"
    )
    fedul_round.main(["--turns", "1", "--workers", "1", *small])
    assert "fedul-mnist: 2 clients, 2 steps" in capsys.readouterr().out


def test_a_round_of_the_published_loop_is_one_of_ours():
    """Compare averages and codebooks of both loops: same weights, one batch of all images, no dropout."""
    cfg = config.load("mnist-9-published", [*TINY, "batch_size=40", "dropout=0.0", "lr=1e-3"])
    federation = build(cfg.data, kind="labeled", seed=0)
    ours = round_times.UeflLoop(cfg, "uefl-published", federation)
    theirs = uefl_round.PublishedUEFLLoop(cfg, "uefl-published", federation, once=True, bf16=False)
    with torch.no_grad():
        copy_of(ours, theirs)
    start = [parameter.clone() for parameter in theirs.server.parameters()]
    ours.train(), theirs.train()
    other = uefl_round.PublishedUEFLLoop(cfg, "uefl-published", federation, once=True, bf16=False)
    with torch.no_grad():
        copy_of(ours, other)
    for (name, mine), published, before in zip(
        other.server.named_parameters(), theirs.server.parameters(), start, strict=True
    ):
        if name != "codebook":  # the codebook stays with the silos
            assert (mine - published).norm() < 0.05 * (published - before).norm(), name
    state = ours.arm.members[0].state
    for k, codebook in enumerate(theirs.codebooks):
        torch.testing.assert_close(state.tensors[f"own.silo-{k}"][0], codebook, atol=1e-5, rtol=0)


def copy_of(ours, theirs):
    """Copy our model into theirs: their features are ordered by channel, ours by position."""
    state = ours.arm.members[0].state
    ours.workspace.flat.set(state.tensors["values"], state.tensors["buffers"])
    net = ours.workspace.net
    encoder = list(net.encoder.parameters())
    for mine, published in zip(encoder, theirs.server.encoder.parameters(), strict=True):
        published.copy_(mine)
    first, last = theirs.server.head[0], theirs.server.head[3]
    hidden, inputs = net.head.fc1.weight.shape
    first.weight.copy_(
        net.head.fc1.weight.view(hidden, net.positions, net.dim).transpose(1, 2).reshape(hidden, inputs)
    )
    first.bias.copy_(net.head.fc1.bias)
    last.weight.copy_(net.head.fc2.weight), last.bias.copy_(net.head.fc2.bias)
    theirs.codebooks = [state.tensors["main"][0].clone() for _ in theirs.codebooks]


SMALL = {
    "demo": ["arms=uefl", "rounds=[1]", *TINY],
    "kmeans": ["rows=300", "batches=2"],
    "layer": ["rows=300", "batches=2"],
}


@pytest.mark.parametrize("work", SMALL)
def test_a_run_next_to_others(work, tmp_path):
    (tmp_path / "another").touch()  # the other run is ready
    times = two_runs._run(work, SMALL[work], 1, 2, str(tmp_path))
    assert times.wall > 0
    assert times.cpu > 0
    assert times.threads == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("most", "code"), [("2.2", 0), ("1.9", 1)])
def test_runs_at_once_are_compared_with_one_run(most, code, monkeypatch, capsys, tmp_path):
    seconds = {(0, 1): [1.0], (0, 2): [1.5, 2.0], (1, 1): [1.2], (1, 2): [1.8, 1.5]}

    monkeypatch.setattr("os.environ", {})

    def at_once(work, keys, threads, runs):
        assert os.environ["GOMP_SPINCOUNT"] == "1000"  # set before the processes import torch
        return [two_runs.Times(t, t, threads or 2) for t in seconds[threads, runs]]

    monkeypatch.setattr(two_runs, "at_once", at_once)
    assert two_runs.main(["layer", "--most", most, "--save", str(tmp_path)]) == code
    assert "2.00 times as long" in capsys.readouterr().out
    (saved,) = tmp_path.iterdir()
    rows = {row["loop"]: (row["threads"], float(row["wall_ratio"])) for row in results.load(saved)}
    assert rows == {
        "1 at once": ("2", 1.0),
        "2 at once": ("2", 2.0),
        "1 at once, one thread": ("1", 1.2),
        "2 at once, one thread": ("1", 1.8),
    }


@pytest.mark.slow
def test_two_runs_are_timed_in_processes(capsys):
    assert two_runs.main(["kmeans", "--turns", "1", "--most", "0", *options(*SMALL["kmeans"])]) == 1
    assert "kmeans" in capsys.readouterr().out


def test_the_page_of_a_round_has_the_saved_ratios():
    page = (results.FOLDER.parents[1] / "docs" / "design" / "federated-round.md").read_text(encoding="utf-8")
    saved = {
        (row["round"], row["loop"]): float(row["cpu_ratio"])
        for path in results.ROUNDS.glob("*.csv")
        for row in results.load(path)
    }
    rows = re.findall(r"^\| (\d+) x (\d+), (\d+), (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 2
    for clients, images, cohort, batch, cells in rows:
        name = f"fedavg {clients}x{images} cohort {cohort} batch {batch}"
        loops = ("plain loop", "uefl", "pfl", "fluke", "flower")
        for loop, cell in zip(loops, cells.split(" | "), strict=True):
            digits = len(cell.partition(".")[2])
            assert f"{saved[name, loop] / saved[name, 'plain loop']:.{digits}f}" == cell
