"""Profile the ops on a GPU: ``python -m benchmarks.gpu_profile --help``.

The profile of a target has three median times: of a call, measured by CUDA events, of the replay of the call
as a CUDA graph, and of the host's part. It also has the least times in which this machine moves the bytes
and multiplies, which are measured here, and each kernel that ran, with its mean time. The numbers are in
``--out``/profile.json when the target is done. Run ``benchmarks.gpu_smoke`` first: the time of a wrong answer
means nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .cases import case_of
from .ops import REGISTRY

CALLS = 5  # under the profiler


@dataclass(frozen=True)
class Target:
    """Our provider of an op at one shape.

    A call repeats its work ``parts`` times; times are per part.
    """

    op: str
    shape: str
    parts: int = 1

    @property
    def name(self) -> str:
        """Return the name that ``--only`` searches."""
        return f"{self.op} {self.shape}"


TARGETS = (
    *(Target("vq", f"1000000x64x{k}") for k in (256, 1024, 8192)),
    *(Target("vq_assign", f"1000000x64x{k}") for k in (256, 1024, 8192)),
    Target("vq_assign", "1000000x64x256xfloat16"),
    Target("vq_assign", "1000000x128x1024xfloat16"),
    Target("kmeans_step", "1048576x64x256"),
    # iterations; the search that follows them for the labels is shared out
    Target("kmeans_lloyd", "1048576x64x256", parts=10),
    Target("mc_dropout_mlp", "10000x512x512x10x100"),
)


def prepared(target: Target, device: str) -> tuple[Callable[[], Any], Any]:
    """Return the call of a target and its case.

    On the CPU it is the case of the smoke test, as a rehearsal.
    """
    op = REGISTRY[target.op]
    case = case_of(type(op.smoke), target.shape) if device == "cuda" else op.smoke
    return op.providers["uefl"](op.inputs(case, device)), case


def median_us(call: Callable[[], Any], device: str, seconds: float = 0.2) -> tuple[float, float]:
    """Return the microseconds of a call on the device, and of the host, which does not wait for it.

    The time on the device is taken between two events.
    """
    call()
    begun = time.perf_counter()
    call()
    synchronize(device)
    number = max(5, min(200, round(seconds / (time.perf_counter() - begun))))
    marks, host = [], []
    for _ in range(number):
        before, after = (Event(device) for _ in range(2))
        before.record()
        begun = time.perf_counter()
        call()
        host.append(time.perf_counter() - begun)
        after.record()
        marks.append((before, after))
    synchronize(device)
    return (
        statistics.median(before.elapsed_us(after) for before, after in marks),
        statistics.median(host) * 1e6,
    )


class Event:
    """A point in the stream of the device, or in time on the CPU."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device == "cuda" else None

    def record(self) -> None:
        """Record the event after the earlier launches."""
        if self._event:
            self._event.record()
        else:
            self._time = time.perf_counter()

    def elapsed_us(self, later: Event) -> float:
        """Return the microseconds from this event to a later one."""
        if self._event:
            return 1e3 * float(self._event.elapsed_time(later._event))
        return 1e6 * (later._time - self._time)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def graph_us(call: Callable[[], Any], device: str) -> float | None:
    """Return the microseconds of a graph replay, which excludes launches by the host.

    None on the CPU, and for calls that cannot be captured.
    """
    if device == "cpu":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"no graph: {str(error).splitlines()[0]}")
        return None
    return median_us(graph.replay, device)[0]


def kernels(call: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """Return name, launches per call and mean microseconds of every kernel, copy and fill, slowest first."""
    activity, kind = (
        (ProfilerActivity.CUDA, DeviceType.CUDA)
        if device == "cuda"
        else (ProfilerActivity.CPU, DeviceType.CPU)
    )
    with profile(activities=[activity], acc_events=True) as found:
        for _ in range(CALLS):
            call()
        synchronize(device)
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = [
        {"kernel": event.key, "launches": event.count / CALLS, "us": getattr(event, field) / event.count}
        for event in found.key_averages()
        if event.device_type == kind and getattr(event, field) > 0
    ]
    return sorted(rows, key=lambda row: -row["launches"] * row["us"])


def short(kernel: str) -> str:
    """Return the name without result, namespaces and arguments.

    Template arguments stay, to tell instances apart.
    """
    name = re.sub(r"\(anonymous namespace\)::|\b(?:\w+::)+", "", kernel.removeprefix("void "))
    return re.sub(r"\((?!\w+\)\d).*", "", name)[:64].strip()


def limits(device: str) -> dict[str, float]:
    """Measure the bytes per second of a copy, and the operations per second of a bfloat16 product.

    Both are operations of torch. The copy counts reads and writes.

    The rehearsal on a CPU multiplies float32, since bfloat16 takes minutes on many of them.
    """
    op, found = REGISTRY["limits"], {}
    for what, count in (("copy", op.bytes), ("bfloat16", op.flops)):
        if device == "cuda":
            case = next(case for case in op.cases_on(device) if case.name == what)
        else:
            case = type(op.smoke)(what.replace("bfloat16", "float32"), 256)
        found[what] = count(case) / median_us(op.providers["torch"](op.inputs(case, device)), device)[0] * 1e6
    return found


def measured(target: Target, device: str, machine: dict[str, float]) -> dict[str, Any]:
    call, case = prepared(target, device)
    op, parts = REGISTRY[target.op], target.parts
    events, host = median_us(call, device)
    replay = graph_us(call, device)
    floors = {
        "bytes_us": op.bytes(case) / machine["copy"] * 1e6,
        "flops_us": op.flops(case) / machine["bfloat16"] * 1e6,
    }
    row = {"target": target.name, "events_us": events, "graph_us": replay, "host_us": host} | floors
    row = {name: value / parts if isinstance(value, float) else value for name, value in row.items()}
    return row | {
        "kernels": [kernel | {"launches": kernel["launches"] / parts} for kernel in kernels(call, device)]
    }


def show(row: dict[str, Any]) -> None:
    replay = "-" if row["graph_us"] is None else f"{row['graph_us']:.1f}"
    print(
        f"{row['target']:<36} {row['events_us']:9.1f} {replay:>9} {row['host_us']:8.1f}"
        f" {row['bytes_us']:9.1f} {row['flops_us']:9.1f}"
    )
    for kernel in row["kernels"][:14]:
        print(
            f"    {kernel['launches'] * kernel['us']:9.1f} = {kernel['launches']:5.1f} x {kernel['us']:8.1f} "
            f" {short(kernel['kernel'])}"
        )
    sys.stdout.flush()


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_profile", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the shapes of the smoke test, to rehearse",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help=f"only these of: {', '.join(target.name for target in TARGETS)}",
    )
    parser.add_argument("--out", type=Path, help="folder for profile.json")
    parser.add_argument(
        "--once",
        action="store_true",
        help="call each target once and measure nothing: for another profiler to look at",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit code: 1 if a target failed.

    The other targets are measured all the same.
    """
    options = options_of(arguments)
    device, failed = options.device, False
    targets = [target for target in TARGETS if re.search(options.only, target.name)]
    if options.once:
        for target in targets:
            prepared(target, device)[0]()
            synchronize(device)
        return 0
    machine = limits(device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, smoke shapes"
    copy, product = f"{machine['copy'] / 1e9:.0f} GB/s", f"{machine['bfloat16'] / 1e12:.1f} TFLOP/s"
    print(f"{name}, torch {torch.__version__}: copy {copy}, bfloat16 product {product}")
    print(
        "microseconds: of a call by events, of a replayed graph, of the host; the least for its bytes, for"
        " its products in bfloat16"
    )
    print(f"{'target':<36} {'events':>9} {'graph':>9} {'host':>8} {'bytes':>9} {'products':>9}", flush=True)
    rows: list[dict[str, Any]] = []
    for target in targets:
        try:
            rows.append(measured(target, device, machine))
        except Exception as error:
            print(f"{target.name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            failed = True
            continue
        show(rows[-1])
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "profile.json").write_text(
                json.dumps({"machine": name, "limits": machine, "targets": rows}, indent=1)
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
