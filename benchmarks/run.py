"""Measure the ops and their peers: ``python -m benchmarks.run --help``.

benchmarks/README.md explains the rows.

The program first compares the answer of every provider with the float64 definition. The exit code is 1 if the
error of one of our answers is larger than the limit of the op (``Gate``), and 2 if our code fails at a shape.
The program does not assert times.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from contextlib import ExitStack
from importlib import metadata
from typing import Any

import torch

from . import results
from .cases import BenchmarkCase, case_of, form, ours
from .held import add_options, restrict
from .measure import VARIANTS, CaseRunner, elsewhere, measure, threads_differ, use_threads
from .ops import REGISTRY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="measure the ops and their peers"
    )
    parser.add_argument(
        "--op", type=_names, default=list(REGISTRY), help="only these ops, separated by commas"
    )
    parser.add_argument(
        "--shape", help="only this shape, named as in the table; with one --op, any sizes of your own"
    )
    parser.add_argument(
        "--list", action="store_true", help="show the ops, their shapes and providers, and measure nothing"
    )
    parser.add_argument(
        "--peers", type=_names, help="only these peers, separated by commas, and all our providers"
    )
    parser.add_argument(
        "--without", type=_names, default=[], help="leave out these providers, separated by commas"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="for every provider (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, help="spent on timing each provider of a shape (default: 1.5, on a GPU 0.3)"
    )
    parser.add_argument(
        "--variants",
        type=_names,
        help="further variants of our CPU kernels (default: avx512vnni, if the best one is amx)",
    )
    add_options(parser, results.FOLDER, "the numbers of each measured shape")
    parser.add_argument(
        "--smoke", action="store_true", help="check one call of one tiny shape, without a measurement"
    )
    return parser


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    _known(parser, "op", options.op, list(REGISTRY))
    chosen = [REGISTRY[name] for name in options.op]
    providers = list(dict.fromkeys(provider for op in chosen for provider in op.providers))
    _known(parser, "peer", options.peers or [], providers)
    _known(
        parser,
        "provider",
        options.without,
        list(dict.fromkeys(provider for op in REGISTRY.values() for provider in op.providers)),
    )
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.smoke and options.shape:
        parser.error("--smoke has a shape of its own; leave out --smoke or --shape")
    if options.seconds is not None and not 0 < options.seconds < math.inf:
        parser.error(f"--seconds {options.seconds:g}; expected a positive number")
    if options.seconds is None:
        options.seconds = 0.3 if options.device == "cuda" else 1.5
    options.cases = [
        (name, case)
        for name, op in zip(options.op, chosen, strict=True)
        for case in ((op.smoke,) if options.smoke else op.cases_on(options.device))
        if options.shape in (None, case.name)
    ]
    if not options.cases:
        options.cases = [_own_case(parser, options)]
    cores = len(os.sched_getaffinity(0))
    if not 1 <= options.threads <= cores:
        parser.error(f"{options.threads} threads on {cores} cores; use 1 to {cores}")
    if options.variants and options.device == "cuda":
        parser.error("--variants are of our CPU kernels; this run is on a GPU")
    _known(parser, "variant", options.variants or [], list(VARIANTS))
    if options.variants is None:
        options.variants = (
            ["avx512vnni"] if CaseRunner(options.device).variant() == "amx" and not options.smoke else []
        )
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _known(parser: argparse.ArgumentParser, what: str, named: list[str], known: list[str]) -> None:
    if unknown := [name for name in named if name not in known]:
        parser.error(f"no {what} {', '.join(map(repr, unknown))}; there are {', '.join(known)}")


def _own_case(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, BenchmarkCase]:
    """Return the op and the case that ``--shape`` describes."""
    shapes = dict.fromkeys(
        case.name for name in options.op for case in REGISTRY[name].cases_on(options.device)
    )
    name, *others = options.op
    if others or "uefl" not in REGISTRY[name].providers:
        parser.error(
            f"no shape {options.shape!r}; there are {', '.join(shapes)}; to measure your own sizes, give --op"
            " the name of one op of ours"
        )
    try:
        return name, case_of(type(REGISTRY[name].smoke), options.shape)
    except ValueError as why:
        parser.error(f"no shape {options.shape!r} of {name}: {why}; there are {', '.join(shapes)}")


def show(ops: list[str], device: str) -> None:
    """Print what can be measured."""
    for name in ops:
        op = REGISTRY[name]
        print(f"{name} (error: {op.gate.figure})")
        print(f"    shapes     {' '.join(case.name for case in op.cases_on(device))}")
        if "uefl" in op.providers:
            print(f"    your own   {form(type(op.smoke))}")
        print(f"    providers  {' '.join(op.providers)}")


def version(provider: str) -> str:
    """Return the version of a peer's package, or of torch for a peer without a package."""
    try:
        return f"{provider} {metadata.version(provider)}"
    except metadata.PackageNotFoundError:
        return f"torch {torch.__version__}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = options_of(arguments)
    if options.list:
        show(options.op, options.device)
        return 0
    restrict(options.held, "benchmarks.run", arguments)
    # torch.compile without a GPU: a warning amid the table
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    use_threads(options.threads)
    about = results.about(options.device, options.threads, options.held)
    print(
        f"{about['machine']}, {about['threads']} thread(s), torch {torch.__version__}, commit"
        f" {about['commit']}, {about['date']}"
    )

    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    failed = False
    with ExitStack() as processes:
        if options.smoke:  # Inductor would compile for minutes; the tests compile our layers
            processes.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            runners = [
                CaseRunner(options.device),
                *(processes.enter_context(elsewhere(variant)) for variant in options.variants),
            ]
        except RuntimeError as error:
            print(error)
            return 2
        table = results.ResultTable([case.name for _, case in options.cases])
        for name, case in options.cases:
            wanted = [
                p for p in REGISTRY[name].providers if ours(p) or options.peers is None or p in options.peers
            ]
            providers = [p for p in wanted if p not in options.without]
            try:
                found = measure(
                    name, case, providers, 0 if options.smoke else options.seconds, runners, skipped
                )
            except Exception as error:  # our code refuses the shape, or has a defect; go on
                print(f"{name} {case.name}: {type(error).__name__}: {error}", flush=True)
                failed = True
                continue
            table.add(found, REGISTRY[name].gate.figure)
            found = [row | {"version": version(row["provider"])} | about for row in found]
            if found and options.save:
                saved = results.save(found, options.save)
            rows += found

    for who in dict.fromkeys(skipped):
        print(f"skipped: {who}")
    for difference in threads_differ(options.threads):
        print(f"THREADS: {difference}, not {options.threads}")
    if options.save and rows:
        print(saved)
    return 1 if _any_wrong(rows) else 2 if failed else 0


def _any_wrong(rows: list[dict[str, Any]]) -> bool:
    """Print the results that are further from float64 than their gate allows."""
    wrong = [row for row in rows if not REGISTRY[row["op"]].passes(row["provider"], row["error"])]
    for row in wrong:
        print(
            f"WRONG: {row['op']} {row['shape']} {row['provider']} {row['variant']}: {row['gate']}"
            f" {row['error']} from float64"
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
