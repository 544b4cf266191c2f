"""Check that the benchmark registry is complete and runs.

``python -m benchmarks.run`` takes the timings.
"""

import csv
import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import uefl_kernels.ops
from benchmarks import gpu_model, measure, results, roofline, run, sass
from benchmarks.cases import case_of
from benchmarks.held import HELD
from benchmarks.ops import REGISTRY
from benchmarks.ops.vq import nearest, wrong_rate
from uefl_kernels import backend, vq_assign


def test_every_op_is_measured():
    measured = set(REGISTRY).union(*(op.covers for op in REGISTRY.values()))
    assert {module.name for module in pkgutil.iter_modules(uefl_kernels.ops.__path__)} <= measured


@pytest.mark.parametrize("name", REGISTRY)
def test_row(name):
    op = REGISTRY[name]
    assert name == "limits" or next(iter(op.providers)) == "uefl"
    assert set(op.loose) | set(op.gate.own or ()) <= set(op.providers)
    assert len({case.name for case in op.cases}) == len(op.cases)
    for case in (op.smoke, *op.cases):
        assert op.bytes(case) > 0
        assert op.flops(case) > 0 or case.name in ("copy", "read")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.endswith("compiled") else [])
        for name, op in REGISTRY.items()
        if "uefl" in op.providers
    ],
)
def test_benchmark(name, benchmark):
    op = REGISTRY[name]
    inputs = op.inputs(op.smoke, "cpu")
    call = op.providers["uefl"](inputs)
    assert op.gate.against(inputs)(call()) <= op.gate.limit
    for provider, against in (op.gate.own or {}).items():
        answer = op.providers[provider](inputs)()
        assert against(inputs)(answer) <= op.gate.limit < op.gate.against(inputs)(answer), (
            "the truth of its own is none"
        )
    benchmark.pedantic(call, rounds=3)


def test_the_name_of_a_case_has_its_changed_options():
    assert {"1000000x16x256", "4096x128x128x4"} <= {case.name for case in REGISTRY["vq_assign"].cases}


def test_a_smoke_run_saves_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert run.main(["--smoke", "--op", "vq_assign,vq", "--peers", "cdist+argmin,eager", "--save"]) == 0
    (saved,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(saved.open()))
    assert {(row["op"], row["provider"]) for row in rows} >= {
        ("vq_assign", "uefl"),
        ("vq_assign", "cdist+argmin"),
        ("vq", "eager"),
    }
    assert {row["error"] for row in rows if row["provider"] == "uefl" and row["gate"] == "wrong indices"} == {
        "0"
    }
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert "cdist+argmin" in capsys.readouterr().out


def test_saved_rows_replace_older_ones_of_the_same_key(tmp_path):
    row = {
        "op": "a",
        "shape": "1",
        "provider": "uefl",
        "variant": "amx",
        "median_ms": 2.0,
        "peak_mb": None,
        "threads": 1,
        "machine": "My CPU",
    }
    path = results.save([row, row | {"variant": "avx512"}, row | {"threads": 2}], tmp_path / "new")
    assert path.name == "my-cpu.csv"
    results.save([row | {"median_ms": 1.0}, row | {"op": "b"}], tmp_path / "new")
    found = [(r["op"], r["variant"], r["threads"], r["median_ms"]) for r in results.load(path)]
    assert found == [
        ("a", "amx", "1", "1"),
        ("a", "avx512", "1", "2"),
        ("a", "amx", "2", "2"),
        ("b", "amx", "1", "2"),
    ]
    assert results.load(path)[0]["peak_mb"] == ""


@pytest.mark.slow
def test_variants_match_the_kernels(capsys):
    *others, last = measure.VARIANTS
    names = f"{', '.join(others)}.* {last}"
    with pytest.raises(RuntimeError, match=f"UEFL_CPU=sse9 .*{names}"), measure.elsewhere("sse9"):
        pass
    with pytest.raises(SystemExit):
        run.main(["--smoke", "--variants", "portable,sse9"])
    assert re.search(f"'sse9'.*{names}", capsys.readouterr().err)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of the resident memory is reset through /proc")
def test_memory_that_a_call_frees_is_measured():
    size = 64 << 20

    def call():
        torch.ones(size, dtype=torch.uint8)
        return "answer"

    for _ in range(2):  # the second time, malloc could reuse the memory of the first
        answer, peak = measure.weigh(call, "cpu")
        assert answer == "answer"
        assert size - (4 << 20) < peak < size + (16 << 20)


def test_every_library_gets_the_number_of_threads(capsys):
    before = torch.get_num_threads()
    try:
        assert run.main(["--smoke", "--op", "vq_assign", "--threads", "1", "--peers", "scikit-learn"]) == 0
    finally:
        measure.use_threads(before)
    assert "THREADS" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["--threads", "0"])
    assert "0 threads" in capsys.readouterr().err


def test_slow_providers_run_fewer_times():
    class Clock:
        def time(self, provider, number):
            return float(provider) * number, 0.0

    (fast, _), (slow, _) = measure.race([(Clock(), "0.01"), (Clock(), "5")], 1.0)
    assert (len(fast), len(slow)) == (measure.TURNS, 3)


def test_wrong_answer_of_ours_fails_the_run(monkeypatch, capsys):
    op = REGISTRY["vq_assign"]
    monkeypatch.setitem(
        op.providers,
        "uefl",
        lambda inputs: lambda: torch.zeros(len(inputs[0]), op.smoke.segments, dtype=torch.int64),
    )
    assert run.main(["--smoke", "--op", "vq_assign"]) == 1
    assert "WRONG: vq_assign" in capsys.readouterr().out


def test_peer_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert run.main(["--smoke", "--op", "vq_assign", "--peers", "faiss-cpu"]) == 0
    assert re.search(r"^skipped: faiss-cpu \(.*faiss.*\)$", capsys.readouterr().out, re.M)


def test_left_out_provider_does_not_run(capsys):
    assert (
        run.main(
            [
                "--smoke",
                "--op",
                "vq_assign",
                "--peers",
                "matmul,cdist+argmin",
                "--without",
                "uefl-fast,cdist+argmin",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "uefl-fast" not in printed
    assert "cdist" not in printed
    assert " matmul " in printed


def test_unknown_peer_is_an_error(capsys):
    with pytest.raises(SystemExit):
        run.main(["--smoke", "--peers", "eager,fais"])
    error = capsys.readouterr().err
    assert re.search("'fais'.* uefl, .*faiss", error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--smoke", "--shape", "9216x512x64"], "--smoke or --shape"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--seconds", "-1"], "--seconds -1"),
    ],
)
def test_invalid_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run.main(["--op", "vq_assign", *arguments])
    assert message in capsys.readouterr().err


def test_unknown_shape_is_an_error(capsys):
    with pytest.raises(SystemExit):
        run.main(["--shape", "1x2x3"])
    assert "9216x512x64" in capsys.readouterr().err


@pytest.mark.slow
def test_a_custom_shape_runs_in_another_variant(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    arguments = [
        "--op",
        "vq_assign",
        "--shape",
        "70x12x5x3xbfloat16",
        "--peers",
        "matmul",
        "--variants",
        "portable",
        "--seconds",
        "0.001",
    ]
    assert run.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^vq_assign +70x12x5x3xbfloat16 +uefl +portable .* 0\.0e\+00 ", printed, re.M)
    assert re.search(r"^vq_assign +70x12x5x3xbfloat16 +matmul ", printed, re.M)
    assert list(tmp_path.iterdir()) == []  # without --save


@pytest.mark.parametrize(
    ("op", "shape", "message"),
    [
        ("vq_assign", "70x12", r"NxDIMxK\[xSEGMENTS\]\[xDTYPE\].* 200000x64x256,"),
        ("vq_assign", "70x12x5x1", r"NxDIMxK\[xSEGMENTS\]\[xDTYPE\]"),
        ("vq_assign", "70x12x5x6x7", "NxDIMxK"),
        ("vq_assign", "70x12x5xint8", "dtype 'int8'.*float32, bfloat16"),
        ("vq_assign", "70x12x5x7", "dim 12 .*7 segments"),
        ("vq_assign", "0x12x5", "n .*got 0"),
        ("layer", "2x3x4x5xgumbel", "estimator 'gumbel'"),
        ("vq,layer", "70x12x5", "own .*--op"),
        ("limits", "float32x64", "copy, read, float32, "),
    ],
)
def test_invalid_shapes_are_refused(op, shape, message, capsys):
    with pytest.raises(SystemExit):
        run.main(["--op", op, "--shape", shape])
    error = capsys.readouterr().err
    assert f"shape {shape!r}" in error
    assert re.search(message, error)


def test_every_shape_is_found_by_its_name():
    for op in REGISTRY.values():
        if "uefl" in op.providers:
            for case in (op.smoke, *op.cases, *(op.cuda_cases or ())):
                assert case_of(type(op.smoke), case.name) == case


def test_shape_at_which_ours_fails_leaves_the_others_saved(tmp_path, monkeypatch, capsys):
    def failing(inputs):
        raise RuntimeError("out of registers")

    monkeypatch.setitem(REGISTRY["vq_assign"].providers, "uefl", failing)
    monkeypatch.setenv("UEFL_COMMIT", "0123abc")
    assert (
        run.main(["--smoke", "--op", "vq_assign,vq", "--peers", "matmul", "--save", str(tmp_path / "new")])
        == 2
    )
    printed = capsys.readouterr().out
    assert "vq_assign 300x16x24x2: RuntimeError: out of registers" in printed
    assert "commit 0123abc, " in printed
    (saved,) = (tmp_path / "new").glob("*.csv")
    assert {(row["op"], row["commit"]) for row in results.load(saved)} == {("vq", "0123abc")}


def test_columns_are_aligned_below_a_long_shape(capsys):
    row = dict.fromkeys(("spread", "error", "peak_mb")) | dict.fromkeys(
        ("median_ms", "gb_s", "gflop_s", "cores"), 1.0
    )
    row |= {"op": "layer", "provider": "uefl", "variant": ""}
    table = results.ResultTable(["2x3", "1024x9x512x64xstraight_through"])
    for shape in ("2x3", "1024x9x512x64xstraight_through"):
        table.add([row | {"shape": shape}], "gradient error")
    header, *lines = [line for line in capsys.readouterr().out.splitlines()[1:] if line]
    assert {line.index("uefl ") for line in lines} == {header.index("provider")}
    assert {len(line) for line in lines} == {len(header)}


def test_a_rejected_case_exits_with_code_2_and_its_message(capsys):
    assert run.main(["--op", "kmeans", "--shape", "5x3x9"]) == 2
    assert "kmeans 5x3x9: ValueError: " in capsys.readouterr().out


def test_list(capsys):
    assert run.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert "vq_assign (error: wrong indices)\n    shapes     200000x64x256 " in printed
    assert "    your own   NxDIMxK[xSEGMENTS][xDTYPE]\n    providers  uefl uefl-fast " in printed


def test_gate_of_the_search_agrees_with_the_definition():
    generator = torch.Generator().manual_seed(0)
    codebook = torch.randint(-2, 3, (40, 3), generator=generator).float()  # duplicates and exact ties
    x = torch.randint(-4, 5, (50, 6), generator=generator) / 2
    with backend("reference"):
        assert torch.equal(nearest(x, codebook), vq_assign(x, codebook).flatten())
    right = wrong_rate((x, codebook))
    assert right(nearest(x, codebook)) == 0
    assert right(nearest(x, codebook).int().index_fill(0, torch.tensor([3]), 41)) == 0.01


def test_peer_that_fails_is_named_and_the_run_goes_on(monkeypatch, capsys):
    def failing(inputs):
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setitem(REGISTRY["vq_assign"].providers, "cdist+argmin", failing)
    assert run.main(["--smoke", "--op", "vq_assign", "--peers", "cdist+argmin,matmul"]) == 0
    printed = capsys.readouterr().out
    assert "skipped: cdist+argmin at vq_assign 300x16x24x2 (RuntimeError: out of memory)\n" in printed
    assert re.search(r"^vq_assign .* matmul ", printed, re.M)


def test_pictures_of_a_part_of_the_results(tmp_path, capsys):
    """Draw rates rounded to 0, without a peer and without limits, and then no rows."""
    columns = (
        "machine",
        "threads",
        "op",
        "shape",
        "provider",
        "variant",
        "median_ms",
        "error",
        "gb_s",
        "gflop_s",
    )
    row = dict.fromkeys(columns, "1") | {"machine": "M", "op": "vq", "provider": "uefl", "variant": ""}
    measured, tiny = row | {"shape": "9x9"}, row | {"shape": "1x1", "gb_s": "0.0", "gflop_s": "0"}
    for name, rows in {
        "measured": [measured, tiny],
        "tiny": [tiny, tiny | {"provider": "eager"}],
        "nothing": [],
    }.items():
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        roofline.main([str(tmp_path / f"{name}.csv")])
    assert {path.name for path in tmp_path.glob("*.png")} == {"measured-roofline.png", "tiny-vq.png"}


@pytest.mark.slow
def test_pictures_and_table_of_saved_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    assert (
        run.main(
            [
                "--smoke",
                "--op",
                "vq,limits",
                "--peers",
                "matmul,eager,torch",
                "--variants",
                "portable",
                "--save",
            ]
        )
        == 0
    )
    (saved,) = tmp_path.glob("*.csv")
    roofline.main([])
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{saved.stem}-roofline.png",
        f"{saved.stem}-vq.png",
    }
    figure = roofline.ratios(roofline.by_op(results.load(saved))["vq"])
    assert sorted(panel.get_title() for panel in figure.axes) == ["eager", "lower bound: matmul"]
    table = results.summary(results.load(saved)).splitlines()
    assert len(table) == 3
    assert re.search(
        r"^\| vq \| 300x16x24x2 \| \d+ \| \S+ \w+ / \S+ portable \| .* \| eager \| .* \| matmul \S+ /"
        r" \S+ \|$",
        table[2],
    )
    with pytest.raises(SystemExit):
        roofline.main([str(tmp_path / "other.csv")])
    assert "other.csv; python -m benchmarks.run --save" in capsys.readouterr().err


def test_the_page_of_measurements_matches_the_results():
    page = Path(__file__).parents[1] / "docs" / "measured.md"
    assert page.read_text() == results.page(results.FOLDER) + "\n", (
        "python -m benchmarks.results > docs/measured.md"
    )


def test_the_page_has_every_target_for_every_gpu():
    rows = [line.split(" | ") for line in gpu_model.summary().splitlines()[2:]]
    assert [(gpu, work.partition(",")[0]) for gpu, work in (row[0:2] for row in rows)] == [
        (f"| {machine.name}", f"{op} {shape}")
        for machine in gpu_model.MACHINES
        for op, shape in gpu_model.TARGETS
    ]
    seen = {(row[0][2:], row[1]): row[6].removesuffix(" |") for row in rows}
    assert seen["H100", "vq 1000000x64x256"] == "479"
    assert seen["H100", "kmeans_lloyd 1048576x64x256, an iteration"] == "544", "of ten"
    assert {clock for (gpu, _), clock in seen.items() if gpu in ("A100", "B200", "L4")} == {"not yet"}
    assert all(int(expected) <= int(apart) for _, _, expected, _, apart, *_ in rows)


def test_every_instruction_set_can_be_fixed():
    assert set(HELD) < set(measure.VARIANTS)
    for variant, variables in HELD.items():
        assert variables["UEFL_CPU"] == variant
        assert variables.keys() >= HELD["avx2"].keys(), "a library that is held to one is held to all"


@pytest.mark.slow
def test_all_providers_use_the_fixed_instruction_set(tmp_path):
    host = pytest.importorskip("uefl_kernels._host")
    if not host.cpu_features()["avx2"]:
        pytest.skip("no AVX2 here")
    options = ["--smoke", "--op", "vq_assign", "--peers", "matmul", "--held", "avx2", "--save", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.run", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 0, done.stderr
    (saved,) = tmp_path.glob("*-held-to-avx2.csv")
    rows = results.load(saved)
    assert {row["variant"] for row in rows if row["provider"] == "uefl"} == {"avx2"}


def test_the_model_of_a_gpu_names_the_walls(tmp_path, capsys):
    kernels = [{"kernel": "void search_wgmma<float, 3>(float const*)", "launches": 1.0, "us": 231.6}]
    target = {"target": "vq 1000000x64x256", "events_us": 523.0, "graph_us": 508.7, "kernels": kernels}
    (tmp_path / "profile.json").write_text(
        json.dumps({"machine": "NVIDIA H100 80GB HBM3", "targets": [target]})
    )
    gpu_model.main(["--constants", "--profile", str(tmp_path / "profile.json")])
    found = re.split(r"^(\w+): copy", capsys.readouterr().out, flags=re.M)
    text = dict(zip(found[1::2], found[2::2], strict=True))
    assert list(text) == [machine.name for machine in gpu_model.MACHINES]
    for of_machine in text.values():
        assert all(f"{op} {shape}" in of_machine for op, shape in gpu_model.TARGETS)
        assert re.search(r"^    gather +[\d.]+  bytes ", of_machine, re.M)
    search, call = (
        re.search(pattern, text["H100"], re.M)
        for pattern in (r"^    search_wgmma .* 231\.6 +(.*)$", r"^vq 1.* 508\.7 +(.*)$")
    )
    assert float(search[1]) > 1, "faster than its wall"
    assert float(call[1]) > 1
    assert "231.6" not in text["H200"], "measured elsewhere"
    assert "search_wgmma" not in text["A100"]
    assert re.search(r"^    search_mma +[\d.]+  issue ", text["A100"], re.M)


def test_the_model_follows_the_shape():
    (machine,) = (machine for machine in gpu_model.MACHINES if machine.name == "H100")

    def us(op, shape):
        return gpu_model.expected(machine, op, shape, gpu_model.COUNTS)

    few, many = us("vq", "1000000x64x256"), us("vq", "2000000x64x256")
    assert [row.us * 2 for row in few[1:]] == pytest.approx([row.us for row in many[1:]], rel=1e-6)
    assert [row.wall for row in few[:2]] == ["launch", "bytes"]
    assert few[0].us == many[0].us == gpu_model.LAUNCH
    assert us("vq", "1000000x64x8192")[1].us > 7 * few[1].us
    assert us("vq", "1000000x64x1024")[1].wall == "issue"
    assert us("vq", "1000000x64x8192")[1].wall == "tensor"
    assert us("vq_assign", "1048576x512x256xfloat16")[1].wall == "L2", "long rows stream the codebook"
    assert us("vq_assign", "1048576x512x16384xfloat16")[1].wall == "tensor"
    assert [row.wall for row in us("vq_assign", "1000x64x256xfloat16")] == ["launch", "launch", "issue"]
    assert [row.wall for row in us("kmeans_step", "1048576x64x256")[3:]] == ["bytes", "bytes"]
    assert all(row.apart >= row.us for row in few)
    (other,) = (machine for machine in gpu_model.MACHINES if machine.name == "A100")
    longer = gpu_model.expected(other, "vq_assign", "1000000x128x1024xfloat16", gpu_model.COUNTS)
    shorter = gpu_model.expected(other, "vq_assign", "1000000x64x1024xfloat16", gpu_model.COUNTS)
    assert 1.4 < longer[1].us / shorter[1].us < 2, "by mma.sync the instructions of the products count"


def test_the_model_is_as_close_to_an_h200_as_it_says():
    """The numbers are in its docstring and in benchmarks/README.md."""
    (machine,) = (machine for machine in gpu_model.MACHINES if machine.name == "H200")
    found = {True: [], False: []}  # with a million rows, with fewer
    for row in results.load(results.path_of("NVIDIA H200", results.FOLDER)):
        rows = int(row["shape"].partition("x")[0]) if row["op"] in ("vq", "vq_assign") else 0
        if row["provider"] == "uefl" and rows >= 65536:
            kernels = gpu_model.expected(machine, row["op"], row["shape"], gpu_model.COUNTS)
            sums = (sum(kernel.us for kernel in kernels), sum(kernel.apart for kernel in kernels))
            found[rows >= 1e6].append([1e3 * float(row["median_ms"]) / us for us in sums])
    spans = {
        many: [(round(min(each), 1), round(max(each), 1)) for each in zip(*ratios, strict=True)]
        for many, ratios in found.items()
    }
    assert spans == {True: [(1.4, 2.3), (0.9, 1.6)], False: [(2.0, 7.8), (1.4, 5.2)]}


@pytest.mark.parametrize(
    ("d", "k", "itemsize", "groups"),
    [
        (64, 256, 4, 2),
        (64, 256, 2, 3),
        (64, 1024, 4, 3),
        (256, 1024, 4, 3),
        (384, 1024, 2, 2),
        (64, 128, 2, 2),
    ],
)
def test_the_model_divides_blocks_as_the_kernel_does(d, k, itemsize, groups):
    assert gpu_model.groups_of(d, k, itemsize) == groups


def test_the_model_counts_codewords_scored_again():
    """search_mma scores the best four of a row, where it compares only the least of every four."""

    def search(d, k, of=gpu_model.COUNTS, code="80"):
        return gpu_model.search(1000, d, k, 4, code, of)[1]

    assert search(64, 512).flops_again == search(128, 1024).flops_again == 0
    assert search(64, 1024).flops_again == 1000 * (2 * 4 * 64) * 16, "8 of 16 x 8 results are wanted"
    assert search(128, 2048).flops_again == 2 * search(64, 1024).flops_again
    assert search(64, 1024, code="90a").flops_again == 0, "search_wgmma compares all"
    free = search(64, 1024, gpu_model.COUNTS | {"again": {}})
    more = search(64, 1024).counts["issue"] - free.counts["issue"]
    assert more == pytest.approx(1000 * gpu_model.COUNTS["again"]["issue"])
    machine = gpu_model.MACHINES[0]
    assert machine.walls(search(64, 1024))["tensor"] > machine.walls(replace(free, flops_again=0))["tensor"]


@pytest.mark.slow
@pytest.mark.all_cores
@pytest.mark.skipif(
    sass.NVCC is None or sass.disassembler() is None, reason="nvcc or nvdisasm is not installed"
)
def test_the_model_constants_match_the_machine_code():
    for name, counts in gpu_model.counted().items():
        known = gpu_model.COUNTS[name]
        assert counts["issue"] == pytest.approx(known["issue"], rel=0.1), name
        assert {pipe: counts.get(pipe, 0) for pipe in known} == pytest.approx(known, rel=0.2, abs=0.2), name
