"""Count instructions in the machine code of the CUDA kernels.

Needs nvcc and no GPU.

The kernels are compiled for sm_90a. The search by mma.sync, the first phase of all other GPUs, is compiled
for each of them.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from benchmarks import sass

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all_cores,
    pytest.mark.skipif(sass.NVCC is None, reason="nvcc is not installed"),
    pytest.mark.skipif(
        sass.disassembler() is None, reason="nvdisasm is not installed, nor Triton, which brings one"
    ),
]

ARCHITECTURE = "90a"
SEARCH, MMA, GATHER, SUMS, STEP, LLOYD, RVQ, HEAD = (
    # at least: three types; short rows, and long ones by two and three warpgroups, compared in two ways
    ("vq_assign", "search_wgmma", 18),
    ("vq_assign", "search_mma", 12),  # these and float64, compared in two ways, and streamed
    ("vq_forward", "gather", 10),
    ("vq_forward", "row_sums", 8),
    ("kmeans", "row_sums", 4),
    ("kmeans", "advance", 4),
    ("rvq", "rvq_few", 3),
    ("mc_dropout_mlp", "head", 4),
)


@pytest.fixture(scope="module")
def kernels():
    """Return the instances of a kernel by template arguments.

    Each source is compiled once in a session.
    """

    def found(stem, kernel, number, architecture=ARCHITECTURE):
        instances = sass.instances(stem, architecture, kernel)
        assert len(instances) >= number, f"{kernel}: {sorted(instances)}"
        return instances

    return found


def count(operations, pattern):
    """Count the instructions with that prefix."""
    return sum(re.match(pattern, operation) is not None for operation in operations)


@pytest.mark.parametrize(
    "kernel", [SEARCH, MMA, GATHER, SUMS, STEP, LLOYD, RVQ], ids=lambda kernel: f"{kernel[1]}-{kernel[0]}"
)
def test_registers_suffice(kernels, kernel):
    for name, lines in kernels(*kernel).items():
        local = count(sass.operations(lines), "STL|LDL")
        # With codewords in float64 the sums keep one number for a whole block of rows in memory.
        assert local <= (2 if (kernel, name) == (SUMS, "fLb1Ed") else 0), (
            f"{name}: {local} accesses of local memory"
        )


def test_the_loop_of_the_head_keeps_to_registers(kernels):
    """Values outside of the loop spill once per pair of passes.

    The loop is 16 blocks of units of a layer of 512.
    """
    for name, lines in kernels(*HEAD).items():
        loop = sass.operations(sass.innermost_loop(lines, r"\bHMMA"))
        assert count(loop, "HMMA") == (48 if name.startswith("Li4") else 24), name
        assert count(loop, "STL|LDL") == 0, name
        assert count(sass.operations(lines), "STL|LDL") <= 45, name
        # A mask of 16 bits for each of 32 units: 311, 219 where the rows share theirs, and 20 to 40 more of
        # both for 32 outputs.
        most = {"Li2ELb0E": 325, "Li2ELb1E": 232, "Li4ELb0E": 365, "Li4ELb1E": 272}[name]
        assert len(loop) <= most, f"{name}: {len(loop)} instructions for 32 masks"


@pytest.mark.parametrize("kernel", [GATHER, SUMS, STEP], ids=lambda kernel: f"{kernel[1]}-{kernel[0]}")
def test_atomic_additions_are_not_waited_for(kernels, kernel):
    """Reductions return nothing.

    The only atomic with a result is the ticket of the last block.
    """
    for name, lines in kernels(*kernel).items():
        found = Counter(
            operation for operation in sass.operations(lines) if re.match(r"(ATOM|RED)(?!S|UX)", operation)
        )
        tickets = sum(number for operation, number in found.items() if operation.startswith("ATOMG"))
        assert tickets == (0 if kernel == STEP else 1), f"{name}: {found}"
        assert not [operation for operation in found if re.match(r"ATOM\.|RED\.", operation)], (
            f"{name}: of a generic address: {found}"
        )
        assert any(operation.startswith("REDG.E.ADD.64") for operation in found), f"{name}: {found}"


def test_rows_change_their_cluster_by_reductions(kernels):
    """The atomics with a result are of the barriers of the grid."""
    for name, lines in kernels(*LLOYD).items():
        found = {operation for operation in sass.operations(lines) if re.match(r"RED(?!UX)", operation)}
        assert found == {"REDG.E.ADD.64.STRONG.GPU", "REDG.E.MAX.S64.STRONG.GPU"}, name


@pytest.mark.parametrize(("kernel", "quantizes"), [(SEARCH, True), (MMA, False)], ids=["wgmma", "mma"])
def test_searches_use_only_the_expected_atomics(kernels, kernel, quantizes):
    """The second phase of a search counts the candidates of a row, in shared memory.

    A search that quantizes adds to the counts of codewords, and takes a ticket at its end.
    """
    for name, lines in kernels(*kernel).items():
        found = Counter(
            operation.partition(".64")[0]
            for operation in sass.operations(lines)
            if re.match(r"ATOM|RED", operation)
        )
        expected = {"ATOMS.ADD", "REDG.E.ADD", "ATOMG.E.ADD"} if quantizes else {"ATOMS.ADD"}
        assert set(found) == expected, f"{name}: {found}"
        assert found["ATOMG.E.ADD"] == int(quantizes), f"{name}: {found}"


def test_a_search_quantizes_whole_pieces(kernels):
    """A lane has two pieces of four elements in flight, for the rows of an item and for open rows."""
    for name, lines in kernels(*SEARCH).items():
        stores = count(sass.operations(lines), rf"STG\.E\.EF\.{128 if name.startswith('f') else 64}$")
        assert stores == count(sass.operations(lines), r"STG\.E\.EF") == 4, f"{name}: {stores}"


def test_gather_moves_16_bytes_at_a_time(kernels):
    """The loop has four pieces of x and of codewords in flight, and two of x for 16-bit types."""
    for name, lines in kernels(*GATHER).items():
        pieces = {"ffLi4E": (4, 8), "6__halffLi8E": (2, 6), "13__nv_bfloat16fLi8E": (2, 6)}.get(name)
        if pieces is None:  # unaligned rows, or float64: by the element
            continue
        loop = sass.operations(sass.innermost_loop(lines, r"STG"))
        stores, loads = pieces
        assert count(loop, r"STG\.E\.EF\.128$") == count(loop, "STG") == stores, name
        assert loads <= count(loop, r"LDG\.E\.128$") == count(loop, "LDG") <= 2 * loads, (
            f"{name}: {count(loop, 'LDG')}"
        )


def test_the_search_multiplies_and_copies_asynchronously(kernels):
    for name, lines in kernels(*SEARCH).items():
        operations = sass.operations(lines)
        assert (
            count(operations, r"HGMMA\.64x128x16\.F32")
            == count(operations, "HGMMA")
            == (8 if re.search(r"Li\dELb1E", name) else 4)
        ), name
        assert count(operations, "UBLKCP") > 0, name
        # two warpgroups of long rows: pairs of blocks share their reads of the codebook
        assert (count(operations, r"UBLKCP\S*MULTICAST") > 0) == ("Li2ELb1E" in name), name
        assert count(operations, "SYNCS") > 0, name
        assert count(operations, r"USETMAXREG") == 3, name


@pytest.mark.parametrize(
    ("comparison", "most"), [("Lb0ELb0E", 3.12), ("Lb0ELb1E", 4.6)], ids=["groups of four", "cross"]
)
def test_a_score_costs_few_instructions(kernels, comparison, most):
    """Count the whole loop of a multiplying warp over 128 codewords, with products, turns and barriers."""
    for name, lines in kernels(*SEARCH).items():
        if not name.endswith(f"Li3E{comparison}"):
            continue
        operations = sass.tile_loop(lines)
        assert count(operations, "HGMMA") == 4, name
        assert count(operations, r"BAR\.(SYNC|ARV)") == 2, f"{name}: one turn to wait for, one to pass on"
        assert count(operations, "FFMA$") == sass.SCORES, name
        # the starts of 32 columns
        assert count(operations, r"LDS\.128") == count(operations, "LDS") == 8, name
        assert count(operations, "STL|LDL") == 0, name
        assert len(operations) / sass.SCORES <= most, f"{name}: {len(operations) / sass.SCORES}"


@pytest.mark.parametrize(
    ("comparison", "most"), [("Lb0ELb0E", 720), ("Lb0ELb1E", 500)], ids=["groups of four", "cross"]
)
def test_rows_cost_a_role_few_instructions(kernels, comparison, most):
    """Rows cost few instructions of their warps.

    The list is for a warp and 16 rows: what prepares them, with copies of both kinds and the scale of another
    codebook, and what finishes them, without settling and quantizing. The inner loops turn two and four
    times.
    """
    for name, lines in kernels(*SEARCH).items():
        if not name.endswith(f"Li3E{comparison}"):
            continue
        prepare = sass.innermost_loop(lines, ("UBLKCP", "F2FP"), "HMMA")
        assert len(sass.operations(prepare)) <= 780, f"{name}: {len(sass.operations(prepare))}"
        convert = sass.operations(sass.innermost_loop(prepare, "F2FP"))
        assert len(convert) <= 192, f"{name}: {len(convert)}"
        finish = sass.operations(
            sass.without(sass.innermost_loop(lines, ("MATCH", "SYNCS"), "UBLKCP"), "DADD")
        )
        assert len(finish) <= most, f"{name}: {len(finish)}"
        assert count(finish, "STL|LDL") == 0, name
        if comparison == "Lb0ELb0E":
            again = sass.operations(sass.innermost_loop(lines, "HMMA", "ATOMS"))
            assert count(again, "HMMA") == 8, "two codewords of each row, of 64 elements"
            assert len(again) <= 125, f"{name}: {len(again)}"


@pytest.mark.parametrize(
    ("comparison", "chunk", "most"),
    [("Lb1ELb0E", 80, 240), ("Lb1ELb1E", 95, 350)],
    ids=["groups of four", "cross"],
)
def test_long_rows_multiply_without_a_wait_per_product(kernels, comparison, chunk, most):
    """The innermost loop takes 64 elements of each codeword, with the products of two chunks in flight.

    The loop around it takes the first 64, and compares.
    """
    for name, lines in kernels(*SEARCH).items():
        if not name.endswith(comparison):
            continue
        operations = sass.tile_loop(lines)
        assert count(operations, "HGMMA") == 4, name
        assert len(operations) <= chunk, f"{name}: {len(operations)}"
        assert count(operations, "LDSM|LDS|STS|MEMBAR") == 0, name
        around = sass.operations(sass.without(sass.innermost_loop(lines, ("HGMMA", "FFMA")), "UBLKCP"))
        assert count(around, "HGMMA") == 4, name
        assert count(around, "FFMA$") == sass.SCORES, name
        assert count(around, r"LDS\.128") == count(around, "LDS") == 8, name
        assert len(around) <= most, f"{name}: {len(around)}"


@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
def test_the_search_by_mma_keeps_its_loop_short(kernels, architecture):
    """128 codewords x 64 elements for 64 rows: a lane has 32 scores, of eight in each of its four rows."""
    for name, lines in kernels(*MMA, architecture).items():
        # of the first phase: the second counts candidates, and to score again lanes shuffle
        loop = sass.operations(sass.innermost_loop(lines, r"\bHMMA", r"\b(ATOMS|SHFL)"))
        assert count(loop, r"HMMA\.16816\.F32") == count(loop, "HMMA") == 32, name
        assert count(loop, r"LDSM\.16\.M88\.4") == count(loop, "LDSM") == 16, name
        assert count(loop, r"LDGSTS.*\.128") == count(loop, "LDGSTS") > 0, name
        assert count(loop, "STL|LDL") == 0, name
        # A pass converts four elements of a row less the center at once, the first one of streamed rows
        # twice. A load has 16 bytes, so float64 takes two, and 16-bit types take shorter loads. The eight
        # starts of a phase take two loads, and codewords that are scored again take four.
        groups, converted = name.endswith("Lb0ELb0E"), 3 if name.endswith("Lb1ELb1E") else 2
        loads = 4 + converted * {"f": 2, "d": 3}.get(name[0], 1) + (4 if groups else 0)
        assert count(sass.operations(lines), r"LDG\.E\.128$") == loads, name
        after = loop[max(i for i, operation in enumerate(loop) if operation.startswith("HMMA")) + 1 :]
        assert count(after, "FFMA$") == 32, name
        # with minima of three on sm_90 and later
        minima, instructions = {("80", True): (44, 165), ("80", False): (80, 235)}.get(
            (architecture, groups), (28, 155) if groups else (44, 195)
        )
        assert count(after, "V?IMNMX3?$") <= minima, name
        assert len(after) <= instructions, f"{name}: {len(after)} instructions for 32 scores"


def test_threads_fit(kernels):
    """Kernels use the registers that the launch bounds leave.

    More would spill, far fewer would waste registers.
    """
    registers = {}
    for stem in ("vq_assign", "vq_forward", "kmeans", "mc_dropout_mlp"):
        _, log = sass.compiled(stem, ARCHITECTURE)
        registers |= dict(re.findall(r"Function properties for (\S+)\n.*\n.*Used (\d+) registers", log))
    for (stem, kernel, _), most in (
        (SEARCH, 128),
        (MMA, 128),
        (GATHER, 80),
        (SUMS, 80),
        (STEP, 80),
        (LLOYD, 64),
        (HEAD, 255),
    ):
        used = [int(number) for name, number in registers.items() if f"{len(kernel)}{kernel}I" in name]
        assert used, f"{stem}: {kernel}"
        assert max(used) <= most, f"{kernel}: {used}"


@pytest.mark.parametrize("stem", [source.stem for source in sass.SOURCES])
def test_the_compiler_gives_no_warnings(stem):
    """The compiler prints no message such as C7510.

    It tells that products are serialized for lack of registers, and -Werror does not catch it.
    """
    _, log = sass.compiled(stem, ARCHITECTURE)
    assert not re.findall(r".*(?:serialized|C75\d\d|warning).*", log)
