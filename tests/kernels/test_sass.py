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
    ("vq_assign", "search_wgmma", 12),  # at least; see test_the_search_has_an_instance_for_each_plan
    ("vq_assign", "search_mma", 12),  # also for float64, with both comparisons, and streamed
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
        # With codewords in float64, one number that a whole block of rows shares is in local memory.
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
        # The masks of 32 units take 311 instructions, or 219 if all rows share a mask. 32 outputs take 20 to
        # 40 more.
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


@pytest.mark.parametrize("kernel", [SEARCH, MMA], ids=["wgmma", "mma"])
def test_searches_use_only_the_expected_atomics(kernels, kernel):
    """The second phase of a search counts the candidates of a row, in shared memory."""
    for name, lines in kernels(*kernel).items():
        found = {
            operation.partition(".64")[0]
            for operation in sass.operations(lines)
            if re.match(r"ATOM|RED(?!UX)", operation)
        }
        assert found == {"ATOMS.ADD"}, f"{name}: {found}"


def test_gather_moves_16_bytes_at_a_time(kernels):
    """The loop has four pieces of x and of codewords in flight, and two of x for 16-bit types."""
    for name, lines in kernels(*GATHER).items():
        pieces = {"ffLi4E": (4, 8), "6__halffLi8E": (2, 6), "13__nv_bfloat16fLi8E": (2, 6)}.get(name)
        if pieces is None:  # unaligned rows and float64 are read one element at a time
            continue
        loop = sass.operations(sass.innermost_loop(lines, r"STG"))
        stores, loads = pieces
        assert count(loop, r"STG\.E\.EF\.128$") == count(loop, "STG") == stores, name
        assert loads <= count(loop, r"LDG\.E\.128$") == count(loop, "LDG") <= 2 * loads, (
            f"{name}: {count(loop, 'LDG')}"
        )


def test_the_search_has_an_instance_for_each_plan(kernels):
    """Three types of rows, two or three multiplying warpgroups, and short or long rows."""
    types = ("f", "6__half", "13__nv_bfloat16")
    assert set(kernels(*SEARCH)) == {
        f"{of}Li{groups}ELb{long}E" for of in types for groups in (2, 3) for long in (0, 1)
    }


def is_long(name):
    return name.endswith("Lb1E")


def test_the_search_multiplies_and_copies_asynchronously(kernels):
    for name, lines in kernels(*SEARCH).items():
        operations = sass.operations(lines)
        assert (
            count(operations, r"HGMMA\.64x128x16\.F32")
            == count(operations, "HGMMA")
            == (8 if is_long(name) else 4)
        ), name
        # A block of the codebook and its starts, before the first row and while this warp waits for rows.
        assert count(operations, "UBLKCP") == 4, name
        assert count(operations, r"UBLKCP\S*MULTICAST") == 0, name
        assert count(operations, "SYNCS") > 0, name
        assert count(operations, r"USETMAXREG") == 3, name


def test_a_score_costs_few_instructions(kernels):
    """Count the whole loop of a multiplying warp over 128 codewords, with products and barriers."""
    for name, lines in kernels(*SEARCH).items():
        if is_long(name):
            continue
        operations = sass.tile_loop(lines)
        assert count(operations, "HGMMA") == 4, name
        assert count(operations, "BAR") == 0, f"{name}: warpgroups do not wait for each other"
        assert count(operations, "FFMA$") == sass.SCORES, name
        # loads where the scores of 32 columns start
        assert count(operations, r"LDS\.128") == count(operations, "LDS") == 8, name
        assert count(operations, "STL|LDL") == 0, name
        assert len(operations) / sass.SCORES <= 4.6, f"{name}: {len(operations) / sass.SCORES}"


def test_preparing_rows_costs_few_instructions(kernels):
    """A preparing warp takes 16 rows and 64 elements in a turn."""
    for name, lines in kernels(*SEARCH).items():
        pieces = 2 if name.startswith("f") else 1  # 16 bytes of x each
        usual = sass.preparing(lines)
        copied = name.startswith("6__half")  # float16 rows are copied without a conversion
        assert count(usual, r"LDGSTS\S*\.128") == count(usual, "LDGSTS") == 4 * pieces, name
        assert count(usual, "F2FP") == (0 if copied else 16), name
        assert count(usual, "STL|LDL") == 0, name
        most = {(False, False): 515, (False, True): 565, (True, False): 310, (True, True): 340}
        assert len(usual) <= most[copied, is_long(name)], f"{name}: {len(usual)}"


def test_finishing_rows_costs_few_instructions(kernels):
    """A finishing warp takes 16 rows in a turn."""
    for name, lines in kernels(*SEARCH).items():
        open_rows = sass.finishing(lines, certain=False)
        assert count(open_rows, "ATOM|RED|DADD|HMMA|STL|LDL") == 0, name
        # each of two lists takes two stores, and the index one
        assert count(open_rows, r"STG\.E\.64") == count(open_rows, "STG") == 5, name
        assert len(open_rows) <= 228, f"{name}: {len(open_rows)}"
        certain = sass.finishing(lines)
        assert count(certain, "STG") == 1, name
        assert len(certain) <= 158, f"{name}: {len(certain)}"


def test_long_rows_multiply_without_a_wait_per_product(kernels):
    """The innermost loop takes 64 elements of each codeword, with the products of two chunks in flight.

    The loop around it takes the first 64, and compares.
    """
    for name, lines in kernels(*SEARCH).items():
        if not is_long(name):
            continue
        operations = sass.tile_loop(lines)
        assert count(operations, "HGMMA") == 4, name
        assert len(operations) <= 96, f"{name}: {len(operations)}"
        assert count(operations, "LDSM|LDS|STS|MEMBAR|STL|LDL") == 0, name
        around = sass.operations(sass.innermost_loop(lines, ("HGMMA", "FFMA")))
        assert count(around, "HGMMA") == 8, name
        assert count(around, "FFMA$") == sass.SCORES, name
        assert count(around, r"LDS\.128") == count(around, "LDS") == 8, name
        assert count(around, "STL|LDL") == 0, name
        assert len(around) - len(operations) <= 346, f"{name}: {len(around) - len(operations)}"


@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
def test_the_search_by_mma_keeps_its_loop_short(kernels, architecture):
    """128 codewords x 64 elements for 64 rows: a lane has 32 scores, of eight in each of its four rows."""
    for name, lines in kernels(*MMA, architecture).items():
        # The loop of the first phase has no atomics, as the second phase, and no shuffles, as GroupScores.
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
        # Lanes compare a row with two and with eight candidates, and two loads of both are under way. For
        # sm_100 the compiler duplicates the loads of the row.
        rows = {"f": 4, "d": 8}.get(name[0], 0)
        loads += 8 + (2 * rows if architecture == "100" else rows)
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
