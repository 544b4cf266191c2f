"""The variants of the search and the micro-measurements of a Hopper GPU, rehearsed without one."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter

import pytest
import torch

from benchmarks import gpu_micro, gpu_variants, sass
from benchmarks.gpu_driver import MOST_SHARED, DryRunDriver
from benchmarks.gpu_layout import FOLDER, SearchVariant, columns, tiles, variants
from tests.test_gpu_check import SCRIPT

STREAMS = (*gpu_micro.ALONE, *gpu_micro.UNKNOWN, "hmma")


def kernels() -> list[str]:
    """Return the names of all kernels in the sources."""
    micro = (FOLDER / "micro.cu").read_text()
    named = re.findall(
        r"__global__ void[^;{]*?\b(\w+)\((?:long long|const)",
        micro.replace("stream_##name", "").replace("beside_##name", ""),
    )
    streams = [
        f"{kind}_{name}"
        for name in re.findall(r"STREAM\((\w+)\)", micro)
        if name != "name"
        for kind in ("stream", "beside")
    ]
    return [variant.name for variant in variants()] + named + streams


@pytest.fixture
def cubins(tmp_path):
    """Write files with the names of the kernels and no machine code."""
    for source in gpu_variants.SOURCES:
        (tmp_path / f"{source}.cubin").write_bytes(b"".join(f".text.{name}\0".encode() for name in kernels()))
    return tmp_path


def test_names_describe_the_kernels():
    for line in (FOLDER / "table.h").read_text().splitlines():
        if not line.startswith("VARIANT"):
            continue
        name, way, rest = re.fullmatch(r"VARIANT\((\w+), ([\w<>]+), (.*)\)", line).groups()
        variant, (groups, chunks, *switches) = SearchVariant(name), rest.split(", ")
        first, marked = (*switches, *("false", "false")[len(switches) :])
        assert (variant.warpgroups, variant.chunks) == (int(groups), int(chunks)), name
        assert way.lower().replace("roups<", "").rstrip(">") == name.partition("_")[0], name
        said = {"first": first, "marked": marked}
        assert {option for option, value in said.items() if value == "true"} == variant.options, name


def test_every_variant_has_a_place_at_every_shape():
    for shape in gpu_variants.SHAPES:
        fitting = [variant for variant in variants() if variant.chunks * 64 == shape[1]]
        assert {variant.group for variant in fitting} >= {1, 4}
        for variant in fitting:
            rings = variant.rings(shape[2])
            assert rings, f"{variant.name} {shape}"
            assert all(variant.shared(places) <= MOST_SHARED for places in rings)
            assert rings == [shape[2] // 128 * variant.chunks] or min(rings) >= 3


def test_the_whole_plan_is_launched_and_written(cubins, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--cubins", str(cubins), "--out", str(out), "--dry"]
    assert gpu_variants.main(["search", *options]) == 0
    rows = json.loads((out / "variants.json").read_text())["rows"]
    assert {row["variant"] for row in rows} == {
        variant.name for variant in variants() if "marked" not in variant.options
    }
    assert {row["shape"] for row in rows} == {"x".join(map(str, shape)) for shape in gpu_variants.SHAPES}
    assert gpu_variants.main(["micro", *options, "--only", "M[1-4]"]) == 0
    assert gpu_variants.main(["micro", *options, "--only", "M[4-9]"]) == 0
    found = json.loads((out / "micro.json").read_text())["rows"]
    assert [title[:2] for title in dict.fromkeys(row["measurement"] for row in found)] == [
        f"M{number}" for number in range(1, 10)
    ]
    assert (
        Counter(row["name"] for row in found if row["measurement"].startswith("M4")).most_common(1)[0][1] == 1
    ), "in place of the older one"
    assert "0 wrong or failed" in capsys.readouterr().out


def test_every_kernel_is_measured(cubins):
    driver = DryRunDriver()
    gpu_micro.measure(driver, cubins, "", lambda rows: None)
    gpu_variants.search(driver, cubins, cubins, "", 60)
    assert {name for name, *_ in driver.launched} == set(kernels()) - {"stream_none"}


def test_launches_stop_at_the_time_limit(cubins, capsys):
    assert (
        gpu_variants.main(
            ["search", "--cubins", str(cubins), "--out", str(cubins), "--dry", "--seconds", "-1"]
        )
        == 0
    )
    assert re.search(r"^0 timed, \d\d+ left out", capsys.readouterr().out, re.M)


def test_launches_that_a_gpu_refuses_are_refused(cubins):
    driver, path = DryRunDriver(), cubins / "search.cubin"
    with pytest.raises(ValueError, match="kernel g5_3_1"):
        driver.launch(path, "g5_3_1", 132, 512, 0, [])
    with pytest.raises(ValueError, match=f"{MOST_SHARED + 1} bytes"):
        driver.launch(path, "g4_3_1", 132, 512, MOST_SHARED + 1, [])
    assert driver.launched == []


def test_machine_code_that_is_not_there_is_named(tmp_path, capsys):
    assert gpu_variants.main(["search", "--cubins", str(tmp_path), "--dry"]) == 2
    assert "search.cubin; run python -m benchmarks.gpu_variants compile" in capsys.readouterr().out


def test_tiles_are_swizzled():
    values = torch.arange(128 * 128).view(128, 128)
    packed = tiles(values, 64).view(2, 2, 64, 8, 8)
    for row, j in ((0, 0), (3, 70), (77, 127), (127, 64)):
        assert packed[row // 64, j // 64, row % 64, j % 64 // 8 ^ row % 8, j % 8] == values[row, j]


@pytest.mark.parametrize("name", ["cross_3_1", "g4_3_1_first", "g8_3_1"])
def test_indices_are_read_as_the_kernel_writes_them(monkeypatch, name):
    """The scores that four lanes keep lead to the nearest codeword, and other scores do not."""
    monkeypatch.setattr(gpu_variants, "CHECKED", 128)
    variant, data = SearchVariant(name), gpu_variants.SearchData(256, 64, 384, "cpu")
    starts = data.starts(variant)
    first = "first" in variant.options
    of_lane = columns(False)
    where = (torch.arange(32) // 2 * 4 + torch.arange(32) % 2) if first else torch.arange(32)
    scores = -data.x.float() @ data.codebook.float().T
    for tile in range(3):
        for lane in range(4):
            exact = scores[:, tile * 128 + of_lane[lane]] + starts[tile, lane, where]
            assert len({int(bits) for bits in exact.view(torch.int32).flatten() >> 23}) == 1, "one exponent"
            least = exact.view(torch.int32).view(256, -1, variant.group).amin(2).long()
            numbered = (least * variant.shift + torch.arange(least.shape[1])).int()
            best = numbered.amin(1)
            kept = data.found[:, lane]
            better = best < kept[:, 0] if tile else torch.ones(256, dtype=torch.bool)
            kept[:, 0], kept[:, 2] = (
                torch.where(better, best, kept[:, 0]),
                torch.where(better, tile, kept[:, 2]),
            )
    assert data.wrong(variant) == 0
    data.found[:, :, 2] = (data.found[:, :, 2] + 1) % 3
    assert data.wrong(variant) > 0.9


def test_time_that_two_warpgroups_share():
    begin = torch.tensor([[0, 100, 200], [100, 200, 300]])[None, :, None]  # two warpgroups in alternation
    assert gpu_micro.shared_time(begin.repeat(1, 1, 1, 1)) == 0.5, "the last comparison has nothing beside it"
    together = torch.tensor([0, 100, 200]).expand(1, 2, 1, 3)
    assert gpu_micro.shared_time(together) == 0


def test_terms_of_the_accumulator_are_exact():
    a, b, start, exact = gpu_micro.experiments()
    for values in (a, b):
        assert torch.equal(values.half().double(), values)
    assert torch.equal(start.float().double(), start)
    assert exact[0, 0] == 1 + 2.0**-gpu_micro.HIGHEST
    assert exact[7, gpu_micro.LOWEST - gpu_micro.HIGHEST] == 1 + 15 * 2.0**-gpu_micro.LOWEST
    lost = {name: value for name, value, _ in gpu_micro._kept("float32", exact.float(), exact)}
    assert lost["float32: smallest term that a product of 1 keeps"] == 23


def test_calls_end_within_their_minutes():
    text = SCRIPT.read_text()
    for number, minutes in re.findall(r"^#   call(\d)   (\d) minutes", text, re.M):
        (body,) = re.findall(rf"^call{number}\(\) \{{(.*?)\}}$", text, re.M | re.S)
        steps = "small|variants|counters|chosen|measure|federated|step"
        seconds = [int(found) for found in re.findall(rf"\b(?:{steps}) [\w-]+ (\d+)", body)]
        assert seconds, number
        compiled = 60 if number == "1" else 0  # seconds of compilation, in the first call only
        assert sum(seconds) - compiled <= 60 * int(minutes), f"call{number}: {sum(seconds)} s"


@pytest.mark.slow
@pytest.mark.all_cores
@pytest.mark.skipif(
    sass.NVCC is None or sass.disassembler() is None, reason="nvcc or nvdisasm is not installed"
)
def test_the_listings_have_all_measured_kernels(tmp_path):
    gpu_variants.compile_all(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8e6, "it travels"
    found = {}
    for source in gpu_variants.SOURCES:
        text = subprocess.run(
            [sass.disassembler(), "-c", tmp_path / f"{source}.cubin"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found |= sass.listed(text)
    assert set(found) == set(kernels())
    machine = {
        "vimnmx": "VIMNMX",
        "imad_wide": "IMAD.WIDE.U32",
        "lop3": "LOP3.LUT",
        "f2fp": "F2FP.F16.F32.PACK_AB",
    }
    for kind in STREAMS:
        for name in (f"stream_{kind}", f"beside_{kind}"):
            operations = sass.operations(found[name])
            pattern = re.escape(machine.get(kind, kind.upper()))
            wanted = 64 * gpu_micro.WIDTH.get(kind, 1)
            assert (
                wanted
                <= sum(re.match(rf"{pattern}(\.|$)", one) is not None for one in operations)
                <= wanted + 70
            ), name
            assert sum(one.startswith("HGMMA.64x128x16.F32") for one in operations) == (
                4 if name.startswith("beside") else 0
            ), name
    for variant in variants():
        operations = sass.operations(found[variant.name])
        assert sum(one.startswith("HGMMA.64x128x16.F32") for one in operations) == 4 * variant.chunks, (
            variant.name
        )
        assert not [one for one in operations if re.match("STL|LDL", one)], variant.name
    for name, most in {
        "g4_3_1": 3.5,
        "g4_3_1_first": 2.7,
        "g8_3_1": 3.1,
        "cross_3_1": 5.0,
        "cross_3_1_first": 4.2,
    }.items():
        assert len(sass.operations(sass.innermost_loop(found[name], "HGMMA"))) / 64 <= most, name
