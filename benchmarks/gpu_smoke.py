"""Run one tiny case of every GPU kernel, each in its own process: ``python -m benchmarks.gpu_smoke --help``.

Run this program first on a new GPU, and after a change of the kernels. If a case hangs or leaves the device
in an error, the other cases still run. Every result is compared with the float64 reference on the CPU.
``--device cpu`` runs the same cases without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from uefl_kernels import (
    backend,
    kmeans,
    kmeans_step,
    log_transition_probs,
    mc_dropout_mlp,
    rvq,
    set_proportion_loss,
    transition_double_softmax,
    transition_nll,
    vq,
    vq_assign,
    vq_with_sums,
)
from uefl_kernels.ops.fsq import fsq

PATHS = {  # variables of the environment that select a path
    "wgmma": {"UEFL_BACKEND": "cuda", "UEFL_CUDA_SEARCH": "wgmma"},
    "mma": {"UEFL_BACKEND": "cuda", "UEFL_CUDA_SEARCH": "mma"},
    "streamed": {"UEFL_BACKEND": "cuda", "UEFL_CUDA_SEARCH": "streamed"},
    "cuda": {"UEFL_BACKEND": "cuda"},
    "triton": {"UEFL_BACKEND": "triton"},
    "cpu": {},
}
SEARCHES, OTHERS = ("wgmma", "mma", "streamed", "triton", "cpu"), ("cuda", "triton", "cpu")
EXACT, ROUNDED = (0.0, 0.0), (1e-5, 5e-6)  # relative and absolute tolerance


@dataclass(frozen=True)
class SmokeCheck:
    """A call that must give the same result on the device, on every path, as the reference on the CPU."""

    call: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...] = OTHERS
    tolerance: tuple[float, float] = ROUNDED

    def run(self, device: str) -> None:
        """Raise an error if a result differs."""
        found = [
            leaf.cpu() for leaf in tree_leaves(self.call(*(tensor.to(device) for tensor in self.tensors)))
        ]
        with backend("reference"):
            expected = tree_leaves(self.call(*self.tensors))
        rtol, atol = self.tolerance
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                one, other, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, i=i: f"result {i}: {text}"
            )


def normal(*shape: int, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) + offset


def middle_third(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Search the middle third of every second row, sliced on the device.

    A copy from the CPU would be dense.
    """
    third = x.shape[1] // 3
    return vq_assign(x[::2, third : 2 * third], codebook)


def channels_first(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    return vq_assign(x.transpose(1, 2), codebook)


def difficult(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[3], x[70, 5], x[100:200] = float("nan"), float("inf"), codebook[7]
    return vq_assign(x, codebook)


def gradients(
    function: Callable[..., torch.Tensor], wanted: int, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the result, and the gradients of its weighted sum with respect to the first tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:wanted]]
    out = function(*leaves, *tensors[wanted:])
    weight = torch.arange(out.numel(), device=out.device).remainder(7).view_as(out) / 7 + 0.1
    return (out.detach(), *torch.autograd.grad((out * weight).sum(), leaves))


def vq_output(x: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    out = vq(x, codebook)
    return out.quantized.float().sum(-1) + out.loss


def head(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Run ``mc_dropout_mlp`` on rows, the weights of its layers, and the biases of these layers."""
    layers = len(tensors) // 2
    options = {"p": 0.3, "passes": 21, "input_dropout": True, "seed": 3} | options
    return tuple(mc_dropout_mlp(tensors[0], tensors[1 : 1 + layers], tensors[1 + layers :], **options))


def mean_probs(*tensors: torch.Tensor) -> torch.Tensor:
    return head(*tensors)[0]


def mlp(*shape: int) -> tuple[torch.Tensor, ...]:
    """Return rows of the first two sizes, and layers between the sizes from the second on."""
    fans = list(itertools.pairwise(shape[1:]))
    return (
        normal(*shape[:2]),
        *(normal(fan_out, fan_in) * fan_in**-0.5 for fan_in, fan_out in fans),
        *(normal(out) for _, out in fans),
    )


def transition(b: int, k: int, m: int) -> tuple[torch.Tensor, ...]:
    return 3 * normal(b, k), normal(m, k).log_softmax(1), torch.arange(b) % m


def without_units(x: torch.Tensor, centers: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(kmeans_step(x, centers, weights=weights[0] if weights else None)[:-1])


def _searches() -> dict[str, SmokeCheck]:
    """Return searches of each dtype, codeword length and layout, because these decide which kernel runs."""
    cases = {
        "float32": (vq_assign, normal(3000, 64), normal(300, 64)),
        "float16": (vq_assign, normal(3000, 64).half(), normal(300, 64).half()),
        "bfloat16": (vq_assign, normal(3000, 64).bfloat16(), normal(300, 64).bfloat16()),
        "float64": (vq_assign, normal(1000, 64).double(), normal(300, 64).double()),
        "one row": (vq_assign, normal(1, 64), normal(5, 64)),
        "odd length": (vq_assign, normal(1000, 37), normal(130, 37)),
        "more tiles than blocks": (vq_assign, normal(40_000, 32), normal(70, 32)),
        "length 128 float16": (vq_assign, normal(700, 128).half(), normal(1000, 128).half()),
        "length 200": (vq_assign, normal(300, 200), normal(130, 200)),
        "length 512": (vq_assign, normal(300, 512), normal(64, 512)),
        "length 1600": (vq_assign, normal(300, 1600), normal(40, 1600)),
        "8192 codewords": (vq_assign, normal(150, 32), normal(8192, 32)),
        "far from zero": (vq_assign, normal(3000, 64, offset=1000.0), normal(300, 64, offset=1000.0)),
        "strided": (middle_third, normal(1000, 192), normal(130, 64)),
        "channels first": (channels_first, normal(3, 64, 500), normal(130, 64)),
        "cosine": (partial(vq_assign, metric="cosine"), normal(1000, 64), normal(130, 64)),
        "a codebook a segment": (vq_assign, normal(1000, 96), normal(3, 70, 32)),
        "ties and no numbers": (difficult, normal(1000, 64), normal(35, 64).repeat(2, 1)),
    }
    return {
        f"vq_assign {name}": SmokeCheck(call, tensors, SEARCHES, EXACT)
        for name, (call, *tensors) in cases.items()
    }  # type: ignore[arg-type]


def _checks() -> dict[str, SmokeCheck]:
    rows, codewords = normal(3000, 64), normal(300, 64)
    b32, b1000 = transition(500, 32, 10), transition(50, 1000, 7)
    sets = torch.tensor([0, 40, 41, 300, 500])
    shares = normal(4, 32).softmax(1)
    return _searches() | {
        "vq float32": SmokeCheck(lambda x, c: tuple(vq(x, c)), (rows, codewords), SEARCHES),
        "vq float16": SmokeCheck(lambda x, c: tuple(vq(x, c)), (rows.half(), codewords.half()), SEARCHES),
        "vq odd length": SmokeCheck(
            lambda x, c: tuple(vq(x, c)), (normal(1000, 37), normal(130, 37)), SEARCHES
        ),
        "vq length 512": SmokeCheck(
            lambda x, c: tuple(vq(x, c)), (normal(1000, 512), normal(64, 512)), SEARCHES
        ),
        "vq_with_sums": SmokeCheck(vq_with_sums, (rows, codewords), SEARCHES),
        "vq_with_sums more tiles than blocks": SmokeCheck(
            vq_with_sums, (normal(40_000, 32), normal(70, 32)), SEARCHES
        ),
        "vq_with_sums a codebook a segment": SmokeCheck(
            vq_with_sums, (normal(1000, 96), normal(3, 70, 32)), SEARCHES
        ),
        "kmeans_step": SmokeCheck(without_units, (normal(3000, 64), codewords), SEARCHES, EXACT),
        "kmeans_step weights": SmokeCheck(
            without_units, (normal(3000, 40), normal(60, 40), normal(3000).abs()), SEARCHES, EXACT
        ),
        "vq gradient": SmokeCheck(partial(gradients, vq_output, 2), (rows, codewords)),
        "kmeans k-means++": SmokeCheck(lambda x: tuple(kmeans(x, 12)), (normal(900, 20),)),
        "kmeans k-means||": SmokeCheck(lambda x: tuple(kmeans(x, 12, init="k-means||")), (normal(900, 20),)),
        "kmeans empty clusters": SmokeCheck(
            lambda x, init, weights: tuple(kmeans(x, len(init), init=init, weights=weights, metric="cosine")),
            (normal(900, 20), torch.cat([normal(300, 20), normal(3, 20).repeat(9, 1)]), normal(900).abs()),
        ),
        "rvq a few rows": SmokeCheck(rvq, (normal(40, 64), normal(4, 130, 64)), tolerance=(1e-6, 0.0)),
        "rvq a few rows float16": SmokeCheck(
            rvq, (normal(40, 96).half(), normal(4, 3, 70, 32)), tolerance=(1e-6, 0.0)
        ),
        "mc_dropout_mlp head": SmokeCheck(head, mlp(300, 512, 10)),
        "mc_dropout_mlp head bfloat16": SmokeCheck(
            head, tuple(tensor.bfloat16() for tensor in mlp(300, 512, 10))
        ),
        "mc_dropout_mlp consistent": SmokeCheck(partial(head, consistent=True), mlp(300, 512, 10)),
        "mc_dropout_mlp two layers": SmokeCheck(partial(head, logit_dropout=True), mlp(70, 512, 100, 10)),
        "mc_dropout_mlp 1000 classes": SmokeCheck(head, mlp(20, 65, 1000)),
        "mc_dropout_mlp gradient": SmokeCheck(
            partial(gradients, mean_probs, 3), mlp(40, 64, 10), tolerance=(1e-4, 1e-4)
        ),
        "transition_nll": SmokeCheck(partial(gradients, lambda z, a, y: transition_nll(z, y, a), 1), b32),
        "transition_nll 1000 classes": SmokeCheck(
            partial(gradients, lambda z, a, y: transition_nll(z, y, a), 1), b1000
        ),
        "log_transition_probs": SmokeCheck(partial(gradients, log_transition_probs, 1), b32[:2]),
        "log_transition_probs 1000 classes": SmokeCheck(
            partial(gradients, log_transition_probs, 1), b1000[:2]
        ),
        "transition_double_softmax": SmokeCheck(
            partial(gradients, lambda z, a, y: transition_double_softmax(z, y, a), 1), b32
        ),
        "set_proportion_loss": SmokeCheck(partial(gradients, set_proportion_loss, 1), (b32[0], sets, shares)),
    }


CHECKS = _checks() | {
    "fsq": SmokeCheck(lambda z: fsq(z, [8, 5, 5], False, False, True), (normal(900, 3),)),
    "fsq gradient": SmokeCheck(
        partial(gradients, lambda z: fsq(z, [8, 5, 5], False, False, False)[0], 1), (normal(900, 3),)
    ),
}


def paths_here(device: str) -> list[str]:
    """Return the paths that run on the device."""
    if device == "cpu":
        return ["cpu"]
    return [
        path
        for path in PATHS
        if path != "cpu" and (path != "wgmma" or torch.cuda.get_device_capability() == (9, 0))
    ]


_running: set[subprocess.Popen[str]] = set()
_ended: set[subprocess.Popen[str]] = set()  # processes that this program has killed


def in_process(name: str, path: str, device: str, limit: float, under: list[str]) -> tuple[str, float, str]:
    """Run one check in a process of its own.

    Return its status ("ok", "FAILED", "timeout", or "stopped" after Ctrl-C), the seconds, and its output.
    """
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*under, sys.executable, "-m", "benchmarks.gpu_smoke", "--device", device, "--check", name],
        env=os.environ | PATHS[path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # end() ends all processes of the session
    )
    _running.add(process)
    try:
        printed, _ = process.communicate(timeout=limit)
        status = "stopped" if process in _ended else "FAILED" if process.returncode else "ok"
    except subprocess.TimeoutExpired:
        end(process)
        try:
            printed, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # a driver may block its end
            printed = ""
        status = "timeout"
    _running.discard(process)
    return status, time.perf_counter() - begun, printed


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all its child processes."""
    _ended.add(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def reason(printed: str) -> str:
    """Return one line: the report of compute-sanitizer on a kernel, or the last Python error."""
    sanitizer = re.search(r"^========= (?:Invalid|Program hit|Race|Error:|Warning:).*", printed, re.M)
    error = re.split(r"^(?=\w*(?:Error|Exception)\b)", printed, flags=re.M)[-1]
    return " ".join((sanitizer[0] if sanitizer else error).split())[:300]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_smoke", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    names = [*PATHS, "compiled"]
    parser.add_argument(
        "--paths",
        type=lambda text: text.split(","),
        help=f"paths: {', '.join(names)} (all but Triton); default: all paths that run here",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only checks with a matching name")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each (default: %(default)s)")
    parser.add_argument(
        "--triton-limit",
        type=float,
        default=60.0,
        help="seconds for each on the path triton, which compiles (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=4, help="processes at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the output of failed checks")
    parser.add_argument(
        "--under",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="run each check under this command, such as compute-sanitizer",
    )
    parser.add_argument(
        "--check",
        choices=list(CHECKS),
        metavar="NAME",
        help="run this check in this process, on the path that the environment selects",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.paths or ()) - set(names):
        parser.error(f"no path {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = options_of(arguments)
    if options.check:
        CHECKS[options.check].run(options.device)
        return 0
    begun = time.perf_counter()
    here = paths_here(options.device)
    paths = options.paths or here
    if "compiled" in paths:
        paths = [path for path in here if path != "triton"]
    # Path by path, Triton last: all faults of a path appear together.
    runs = [
        (name, path)
        for path in paths
        for name, check in CHECKS.items()
        if path in check.paths and re.search(options.only, name)
    ]
    found: list[str] = []

    def one(run: tuple[str, str]) -> None:
        name, path = run
        limit = options.triton_limit if path == "triton" else options.limit
        status, seconds, printed = in_process(name, path, options.device, limit, options.under)
        found.append(status)
        print(
            f"{status:<7} {seconds:5.1f} s  {path:<8}"
            f" {name}{'' if status == 'ok' else '  ' + reason(printed)}",
            flush=True,
        )
        if options.out and status != "ok":
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / (re.sub(r"\W+", "-", f"{path} {name}") + ".log")).write_text(printed)

    # Load torch once before the limits apply: from a cold disk, this takes longer than a kernel.
    subprocess.run(
        [sys.executable, "-c", f"import benchmarks.gpu_smoke as b; b.normal(1).to({options.device!r})"],
        timeout=120,
    )
    pool = ThreadPoolExecutor(options.jobs)
    try:
        list(pool.map(one, runs))
    except KeyboardInterrupt:
        for process in list(_running):
            end(process)
    pool.shutdown(cancel_futures=True)
    counts = ", ".join(f"{found.count(status)} {status}" for status in ("ok", "FAILED", "timeout", "stopped"))
    print(f"of {len(runs)}: {counts}; {time.perf_counter() - begun:.0f} s", flush=True)
    return 0 if found.count("ok") == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
