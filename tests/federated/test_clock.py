"""The clock of the machine may be set back, or be wrong, while a run trains."""

import itertools
import json
import time

import pytest
from rich.console import Console

import uefl
from uefl import export
from uefl.progress import watch

from .interrupted import KEYS, Killer, outcome

RUN = KEYS | {"arms": {"uefl": {"codewords": 4}}}
CLOCKS = {
    "back": lambda: (2e9 - 3600 * step for step in itertools.count()),
    "beginning": lambda: itertools.repeat(0.0),
    "jumps": lambda: itertools.cycle((2e9, 1e9, 4e9)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    uefl.train(RUN, out=out)
    return outcome(out)


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_clock_that_is_set_back(tmp_path, monkeypatch, whole, clock):
    ticks, out = CLOCKS[clock](), tmp_path / "run"
    monkeypatch.setattr(time, "time", lambda: next(ticks))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(ticks) * 1e9))
    with pytest.raises(KeyboardInterrupt):
        uefl.train(RUN, out=out, observer=Killer(4))
    with watch(Console(force_terminal=True, width=100)) as observer:
        uefl.resume(out, observer=observer)
    assert outcome(out) == whole
    arm = json.loads((out / "summary.json").read_text())["arms"]["uefl"]
    assert 0 <= arm["seconds"] < 3600
    assert 0 <= arm["cpu_seconds"] < 3600
    assert (out / "report.html").stat().st_size
    with pytest.raises(uefl.UserError, match="--out"):
        uefl.train(RUN, out=out)
    export.write(uefl.load(out).model("uefl"), tmp_path / "model.pt2", "silo-0")
