"""Run federated learning on a GPU from end to end.

The program checks rounds per minute, peak memory, a killed run that resumes, and that the metrics equal those
on the CPU.

python -m benchmarks.gpu_federated [--device cuda] [--only demo,resume] --out FOLDER

    demo      the preset demo, plain, with CUDA graphs, and with nine clients at once: rounds a minute and
              peak memory
    resume    kill a run with SIGKILL and resume it: its metrics and models must have the same bits as
              without; an error says what differs, and whether a run that is not killed differs, too
    agree     the same round on the CPU, on the GPU, and there with all clients at once and in bfloat16: the
              metrics must agree within a tolerance
    mnist-9   two rounds of the paper's width, with one local epoch each, next to the published loop
    table11   the suite of that name

Each part writes its line into ``federated.json``. A part that fails says why, and the others go on. With
``--device cpu`` the program is rehearsed at a small size.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file

import uefl

Facts = dict[str, Any]

# Without dropout: a GPU draws other masks in training.
_ROUND = {"training": {"rounds": [1], "local_steps": 4}, "model": {"dropout": 0.0}}
_SHORT = ["--set", 'arms=["fedavg","uefl"]', "--set", "rounds=[2,1]", "--set", "local_epochs=2"]
_AT_ONCE = {"clients_at_once": 9, "precision": "fp32"}
_REHEARSAL = {"data": {"train_per_client": 48, "test_per_client": 20}}
_REHEARSED = [word for key, value in _REHEARSAL["data"].items() for word in ("--set", f"{key}={value}")]

# Convolutions in float32 use TF32 on a GPU: 10 bits of each factor. With bfloat16, twice as much.
TOLERANCES = {"train_loss": 0.01, "nll": 0.02, "accuracy": 0.03}


def demo(device: str, folder: Path) -> Facts:
    """Train the preset demo, and measure it."""
    facts = {}
    ways: dict[str, Facts] = {"demo": {}, "CUDA graphs": {"cuda_graphs": True}, "at once": _AT_ONCE}
    if device == "cpu":
        del ways["CUDA graphs"]
    for name, run_keys in ways.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        keys: Facts = {"run": run_keys}
        keys |= {"arms": ["fedavg", "uefl"], "rounds": [1, 1]} if device == "cpu" or name == "at once" else {}
        keys |= _REHEARSAL if device == "cpu" else {}
        begin = time.perf_counter()
        run = uefl.train("demo", out=folder / name.replace(" ", "-"), device=device, **keys)
        seconds = time.perf_counter() - begin
        rounds = len(run.metrics.groupby(["arm", "round"]))
        facts[name] = {
            "rounds_per_minute": round(60 * rounds / seconds, 1),
            "peak_megabytes": torch.cuda.max_memory_allocated() >> 20 if device == "cuda" else None,
            "accuracy": {arm: outcome["accuracy"] for arm, outcome in run.summary.items()},
        }
    return facts


def resume(device: str, folder: Path) -> Facts:
    """Train a short run, and train it again with a SIGKILL in the middle.

    If their bits differ, the run is trained once more without a kill: the error says whether a resumed run is
    different, or every run.
    """
    base = [sys.executable, "-m", "uefl", "train"]
    start = [*base, "demo", *_SHORT, "--device", device, *(_REHEARSED if device == "cpu" else [])]
    whole, killed = folder / "whole", folder / "killed"
    messages = _run([*start, "--out", str(whole)]).stderr
    with open(folder / "killed.log", "w") as log:
        process = subprocess.Popen(
            [*start, "--out", str(killed)], stdout=log, stderr=log, start_new_session=True
        )
        ended_early = not _kill_after(process, killed / "metrics.jsonl", lines=2 * 9)
    if ended_early:
        raise RuntimeError("the run had ended before it was killed")
    _run([*base, "--resume", str(killed), "--device", device])
    names = ["metrics.jsonl", *sorted(path.name for path in whole.glob("model-*"))]
    warned = sorted({line.strip() for line in messages.splitlines() if "deterministic" in line})
    if resumed := _differences(whole, killed, names):
        _run([*start, "--out", str(folder / "again")])
        again = _differences(whole, folder / "again", names)
        found = {
            "a run differs from the same run before it": again,
            "a resumed run differs": resumed,
            "operations without the same bits": warned,
        }
        raise RuntimeError(
            "other bits: " + json.dumps({why: what for why, what in found.items() if what}, indent=1)
        )
    return {"same_bits": names, **({"warnings": warned} if warned else {})}


def agree(device: str, folder: Path) -> Facts:
    """Train a round on the CPU and on the device, and compare."""
    fp32 = {"precision": "fp32"}
    ways: dict[str, tuple[str, Facts, float]] = {
        "alone": (device, fp32, 1),
        "at once": (device, _AT_ONCE, 1),
        "bfloat16": (device, {"precision": "bf16"}, 2),
    }

    def metrics(name: str, where: str, run_keys: Facts) -> pd.DataFrame:
        keys: Facts = {"run": run_keys} | _ROUND | (_REHEARSAL if device == "cpu" else {})
        out = folder / name.replace(" ", "-")
        run = uefl.train("demo", out=out, device=where, arms=["fedavg", "uefl"], **keys)
        return run.metrics.set_index(["arm", "round", "client"])[[*TOLERANCES]]

    on_cpu, found, far = metrics("CPU", "cpu", fp32), {}, []
    for way, (where, run_keys, factor) in ways.items():
        # mean over the clients: a client of 20 test images moves by 0.05 where one image changes its class
        apart = (metrics(way, where, run_keys) - on_cpu).abs().groupby(["arm", "round"]).mean().max()
        found[way] = {name: float(apart[name]) for name in TOLERANCES}
        far += [f"{way}: {name}" for name, bound in TOLERANCES.items() if not apart[name] <= factor * bound]
    if far:
        raise RuntimeError(
            f"{', '.join(far)} differ from the CPU by more than the tolerance: {json.dumps(found)}"
        )
    return {"largest_differences": found}


def mnist_9(device: str, folder: Path) -> Facts:
    """Time our rounds and the published loop at the paper's width, on MNIST from UEFL_DATA or on digits."""
    sets = ["local_epochs=1"] if os.environ.get("UEFL_DATA") else ["local_epochs=1", "source=digits"]
    if not os.environ.get("UEFL_DATA") or device == "cpu":
        sets += ["train_per_client=400", "test_per_client=100"]
    if device == "cpu":
        sets += ["width=4", "clients=3", "angles=[0,-50,120]"]
    command = [sys.executable, "-m", "benchmarks.uefl_round", "--device", device, "--turns", "2"]
    return {"table": _succeed([*command, *(word for key in sets for word in ("--set", key))])}


def table11(device: str, folder: Path) -> Facts:
    """Run the suite of table 11 with one seed."""
    options = ["--seeds", "1", "--jobs", "1", "--device", device, "--out", str(folder / "suite")]
    return {"table": _succeed([sys.executable, "-m", "uefl", "suite", "table11", *options])}


PARTS: dict[str, Callable[[str, Path], Facts]] = {
    "demo": demo,
    "resume": resume,
    "agree": agree,
    "mnist-9": mnist_9,
    "table11": table11,
}


def _differences(one: Path, other: Path, names: list[str]) -> dict[str, str]:
    """Return what differs in the files of two runs, by name: the first line, or the weights."""
    different = [name for name in names if _bytes(one / name) != _bytes(other / name)]
    return {
        name: (_first_line if name.endswith(".jsonl") else _weights)(one / name, other / name)
        for name in different
    }


def _first_line(one: Path, other: Path) -> str:
    """Return the place and the values of the first line that differs in two files of metrics."""
    lines, others = (_bytes(path).decode().splitlines() for path in (one, other))
    number = next(
        (i for i, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1]),
        min(len(lines), len(others)),
    )
    if number >= min(len(lines), len(others)):
        return f"{len(lines)} and {len(others)} lines, the first {number} of them alike"
    mine, theirs = json.loads(lines[number]), json.loads(others[number])
    place = ", ".join(f"{key} {mine.get(key)}" for key in ("arm", "round", "client"))
    values = [
        f"{key} {mine.get(key)} and {theirs.get(key)}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]
    return f"line {number + 1} ({place}): {'; '.join(values)}"


def _weights(one: Path, other: Path) -> str:
    """Return the largest difference of the weights of two models, and how many tensors differ."""
    if not other.exists():
        return "missing"
    mine, theirs = load_file(one), load_file(other)
    if [(name, t.shape) for name, t in mine.items()] != [(name, t.shape) for name, t in theirs.items()]:
        return "other tensors"
    apart = {
        name: float((t.double() - theirs[name].double()).abs().max())
        for name, t in mine.items()
        if not torch.equal(t, theirs[name])
    }
    if not apart:
        return "the same weights, with another description"
    name = max(apart, key=lambda name: apart[name])
    size = float(mine[name].double().abs().max())
    most = f"{name} by up to {apart[name]:.3g} with elements up to {size:.3g}"
    return f"{len(apart)} of {len(mine)} tensors, {most}"


def _succeed(command: list[str]) -> str:
    return _run(command).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done


def _kill_after(process: subprocess.Popen[bytes], file: Path, *, lines: int) -> bool:
    """Kill a process group when a file has this number of lines.

    Returns False if the process ends before.
    """
    while process.poll() is None:
        if file.exists() and _bytes(file).count(b"\n") >= lines:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.02)
    return False


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, write their facts, and return how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU; rehearse with --device cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Facts] = {}
    for name in args.only.split(","):
        begin = time.perf_counter()
        with TemporaryDirectory() as folder:
            try:
                facts[name] = {"ok": True} | PARTS[name](args.device, Path(folder))
            except Exception as error:  # an error in one part must not lose the results of other parts
                facts[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        facts[name]["seconds"] = round(time.perf_counter() - begin, 1)
        (args.out / "federated.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(name, json.dumps(facts[name], indent=1, ensure_ascii=False).replace("\\n", "\n"), flush=True)
    return sum(not piece["ok"] for piece in facts.values())


if __name__ == "__main__":
    sys.exit(main())
