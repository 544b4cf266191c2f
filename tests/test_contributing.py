"""The code of the recipes in CONTRIBUTING.md is complete and works."""

import re
import subprocess
from pathlib import Path

import pytest

from tests import fresh

ROOT = Path(__file__).parents[1]
OP, DEFINITION, ALGORITHM, SOURCE, PARTITION, NETWORK, METRIC = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
)
RUN = """
import logging, sys, uefl
keys = {"training": {"rounds": [1], "local_epochs": 1, "batch_size": 8}}
keys |= {"model": {"width": 2, "hidden": 4, "encoder": ENCODER}}
keys |= {"run": {"precision": "fp32", "metrics": METRICS}}
run = uefl.train({"data": DATA, "arms": ARMS, **keys}, out=sys.argv[1])
print(sorted(set(run.metrics["arm"])), len(set(run.metrics["client"])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "data", "arms", "said"),
    [
        (
            ALGORITHM,
            {"source": "digits", "clients": 2, "train_per_client": 40, "test_per_client": 20},
            {"fedridge": {}},
            "['fedridge'] 2",
        ),
        (
            SOURCE,
            {"source": "shapes", "clients": 2, "train_per_client": 20, "test_per_client": 10},
            {"fedavg": {}},
            "['fedavg'] 2",
        ),
        (
            PARTITION,
            {
                "source": "digits",
                "clients": 3,
                "train_per_client": 40,
                "test_per_client": 20,
                "partition": {"scheme": "interleaved"},
            },
            {"fedavg": {}},
            "['fedavg'] 3",
        ),
        (
            NETWORK,
            {"source": "digits", "clients": 2, "train_per_client": 40, "test_per_client": 20},
            {"fedavg": {}, "uefl": {"codewords": 4, "segments": 2}},
            "['fedavg', 'uefl'] 2",
        ),
        (
            METRIC,
            {"source": "digits", "clients": 2, "train_per_client": 40, "test_per_client": 20},
            {"fedavg": {}},
            "['fedavg'] 2",
        ),
    ],
    ids=["algorithm", "source", "partition", "network", "metric"],
)
def test_a_recipe_is_complete(recipe, data, arms, said, tmp_path):
    # in a new process, because the recipe registers a name
    words = {
        "DATA": data,
        "ARMS": arms,
        "ENCODER": "strided" if recipe is NETWORK else "cnn",
        "METRICS": ["top2"] if recipe is METRIC else [],
    }
    code = recipe + RUN
    for word, value in words.items():
        code = code.replace(word, repr(value))
    done = fresh.python(code, str(tmp_path / "run"))
    assert done.stdout.splitlines()[-1:] == [said], done.stderr


CALL = """
import sys, torch, uefl_kernels.ops
uefl_kernels.ops.__path__.append(sys.argv[1])
from uefl_kernels.ops.center_rows import center_rows
x = torch.arange(6.0).reshape(2, 3)
print(center_rows(x).tolist(), torch.compile(center_rows, backend="aot_eager", fullgraph=True)(x).tolist())
print(torch.ops.uefl.center_rows.default._schema)
torch.library.opcheck(torch.ops.uefl.center_rows.default, (x, 0.5))
"""


@pytest.mark.slow
def test_the_recipe_of_an_op_is_complete(tmp_path):
    package = tmp_path / "center_rows"
    package.mkdir()
    (package / "__init__.py").write_text(OP)
    (package / "reference.py").write_text(DEFINITION)
    done = fresh.python(CALL, str(tmp_path))
    assert done.stdout.splitlines() == [
        "[[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]] [[-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]]",
        "uefl::center_rows(Tensor x, float weight) -> Tensor centered",
    ], done.stderr
    assert done.returncode == 0, done.stderr


def test_subjects_of_commits_are_imperatives():
    """Only of the last commits, which can still be changed."""
    log = subprocess.run(
        ["git", "log", "-20", "--no-merges", "--format=%s"], cwd=ROOT, capture_output=True, text=True
    )
    if log.returncode != 0:
        pytest.skip("not in a clone")
    verbs = {"Embed", "Feed", "Need", "Seed", "Speed", "Bring", "Pass", "Process", "Compress", "Address"}
    assert [
        subject
        for subject in log.stdout.splitlines()
        if not re.match(r"[A-Z][a-z-]+ .*[^.]$", subject)
        or (subject.split()[0].endswith(("ed", "ing", "s")) and subject.split()[0] not in verbs)
    ] == []


def test_the_row_of_the_checks_names_their_targets():
    checks = re.findall(r"^(?:check )?make ([a-z-]+)\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(r"^\| `bash \.ci/run` \| ([^.]+)\.", text, re.MULTILINE)
    assert re.findall("`(?:make )?([a-z-]+)`", row) == checks
