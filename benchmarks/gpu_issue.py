"""Simulate how a quarter of a multiprocessor of sm_90 issues the instructions of a loop.

A quarter has one scheduler. It issues at most one instruction per cycle, and each warp runs in program order.
An instruction keeps its unit busy for some cycles, and its result can be read after its latency. The model is
not exact: it gives 1690 to 1890 cycles for a round of three warps in a loop of ``search_wgmma``, and the H100
took 1964.

The priority of the warps is an assumption: the warp that is behind goes first, because the ring of codewords
keeps the warps together. With ``ordered``, the warps start their products in a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

LATENCY, LOAD_LATENCY, OTHER_LATENCY = 5, 30, 12  # cycles until a result can be read
WAIT = 20  # cycles from the end of the last product to the end of a wait for it
QUEUE = 2  # products that can be in flight in a quarter
AFTER_BRANCH, AFTER_PRODUCT = 10, 8  # cycles after it in which the warp issues nothing
SKIPPED = ("ST", "RED", "SYNCS", "BAR")  # beginnings of instructions that write no register
PIPES = (
    ("load", r"LDS|LDSM|LDG"),
    ("fma", r"F(FMA|ADD|MUL)|HFMA2|HADD2|HMUL2"),
    ("imad", r"IMAD"),
    (
        "other",
        r"U[A-Z]|R2UR|S2|BRA|LDC|WARPSYNC|BSSY|BSYNC|YIELD|NOP|WARPGROUP|SYNCS|CS2R|HMMA|SHFL|MUFU|F2FP",
    ),
)
BUSY = {"alu": 2, "fma": 2, "imad": 2, "load": 4}  # cycles that a unit needs for the 32 lanes of a warp


@dataclass(frozen=True)
class Instruction:
    """An instruction of the model: its unit, and the registers that it writes and reads."""

    pipe: str  # alu, fma, imad, load, other, product, or wait, for the end of the products of the warp
    writes: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    cycles: int = 0  # cycles of the tensor core for a product


def _register(operand: str) -> int | None:
    found = re.match(r"-?\|?~?!?R(\d+)", re.sub(r"[\[\]]|\.reuse", "", operand.strip()))
    return int(found[1]) if found else None


def parse(line: str) -> Instruction:
    """Parse a line of a listing, such as ``@P0 FADD R3, R4, R5``."""
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    registers = [_register(operand) for operand in operands]
    if name.startswith("HGMMA"):
        columns, first = int(re.findall(r"x(\d+)x16", name)[0]), registers[0] or 0
        return Instruction("product", frozenset(range(first, first + columns // 2)), cycles=columns // 2)
    if name.startswith("WARPGROUP.DEPBAR") and operands[-1] == "0x0":
        return Instruction("wait")  # a wait for earlier products has no effect in the model
    pipe = next((pipe for pipe, pattern in PIPES if re.match(pattern, name)), "alu")
    target = 0  # position of the first operand that is not a predicate
    while target < len(operands) and re.match(r"U?P(T|\d)", operands[target]):
        target += 1
    if target < len(operands) and not name.startswith(SKIPPED) and registers[target] is not None:
        first, width = (
            registers[target] or 0,
            4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1,
        )
        writes, sources = frozenset(range(first, first + width)), registers[target + 1 :]
    else:
        writes, sources = frozenset(), registers[target:]
    return Instruction(pipe, writes, frozenset(register for register in sources if register is not None))


@dataclass
class _Warp:
    next: int = 0  # index of the next instruction of the loop
    rounds: int = 0  # finished passes through the loop
    stalled: int = 0  # the warp issues nothing before this cycle
    products_end: int = 0  # cycle in which the last product ends
    ready: dict[int, int] = field(default_factory=dict)  # by register, the cycle from which it can be read


class _Quarter:
    def __init__(self, loop: Sequence[Instruction], warps: int, ordered: bool) -> None:
        self.loop, self.ordered = loop, ordered
        self.products_at = [i for i, instruction in enumerate(loop) if instruction.pipe == "product"]
        self.warps = [_Warp() for _ in range(warps)]
        self.cycle, self.last, self.turn = 0, 0, 0
        # by unit, the cycle from which it is free; fma: the half that does not multiply integers
        self.free = {"alu": 0, "imad": 0, "fma": 0, "load": 0, "tensor": 0}
        self.products: list[int] = []  # cycles in which the products in flight end
        self.ends: list[int] = []  # cycles in which a round of any warp ended

    def step(self) -> None:
        """Issue at most one instruction and go to the next cycle."""
        count = len(self.warps)
        order = sorted(
            range(count),
            key=lambda w: (self.warps[w].rounds, self.warps[w].next != 0, (w - self.last - 1) % count),
        )
        for number in order:
            if self._issue(number):
                self.last = number
                break
        self.cycle += 1

    def _unit(self, pipe: str) -> str | None:
        """Return a free unit for an instruction, or None.

        Float additions and multiplications run on both halves.
        """
        units = ("fma", "imad") if pipe == "fma" else (pipe,)
        return next((unit for unit in units if self.free[unit] <= self.cycle), None)

    def _issue(self, number: int) -> bool:
        """Issue the next instruction of a warp if it can run now.

        Return whether it was issued.
        """
        warp = self.warps[number]
        instruction = self.loop[warp.next]
        used = instruction.reads | instruction.writes
        if warp.stalled > self.cycle or any(warp.ready.get(register, 0) > self.cycle for register in used):
            return False
        if instruction.pipe == "product":
            if not self._multiply(number, instruction):
                return False
        elif instruction.pipe == "wait":
            if warp.products_end + WAIT > self.cycle:
                return False
            warp.ready = {register: min(cycle, self.cycle) for register, cycle in warp.ready.items()}
        else:
            if instruction.pipe in BUSY:
                unit = self._unit(instruction.pipe)
                if unit is None:
                    return False
                self.free[unit] = self.cycle + BUSY[instruction.pipe]
            latency = {"load": LOAD_LATENCY, "other": OTHER_LATENCY}.get(instruction.pipe, LATENCY)
            warp.ready |= dict.fromkeys(instruction.writes, self.cycle + latency)
        warp.next += 1
        if warp.next == len(self.loop):
            warp.next, warp.rounds, warp.stalled = (
                0,
                warp.rounds + 1,
                max(warp.stalled, self.cycle + AFTER_BRANCH),
            )
            self.ends.append(self.cycle)
        return True

    def _multiply(self, number: int, instruction: Instruction) -> bool:
        """Start a product if the tensor core accepts it.

        Return whether it was started.
        """
        warp = self.warps[number]
        begins, ends = warp.next == self.products_at[0], warp.next == self.products_at[-1]
        self.products = [end for end in self.products if end > self.cycle]
        if len(self.products) >= QUEUE or (self.ordered and self.turn != number and begins):
            return False
        end = max(self.free["tensor"], self.cycle) + instruction.cycles
        self.free["tensor"] = warp.products_end = end
        self.products.append(end)
        warp.ready |= dict.fromkeys(instruction.writes, end)
        warp.stalled = self.cycle + AFTER_PRODUCT
        if ends:
            self.turn = (self.turn + 1) % len(self.warps)
        return True


def cycles(lines: Sequence[str], warps: int = 3, *, ordered: bool = False, rounds: int = 40) -> float:
    """Return the cycles of one pass of all warps through the loop.

    Args:
        lines: a loop of a listing of ``benchmarks.sass``, with its labels.
        warps: number of warps of the quarter, one of each warpgroup.
        ordered: whether the warps start their products in a fixed order.
        rounds: number of simulated rounds; the middle half is measured.

    Raises:
        RuntimeError: the rounds take more than 100,000 cycles each.
    """
    quarter = _Quarter([parse(line) for line in lines if not line.startswith(".L_")], warps, ordered)
    while min(warp.rounds for warp in quarter.warps) < rounds:
        quarter.step()
        if quarter.cycle > 100_000 * rounds:
            raise RuntimeError(
                f"the loop does not end: {rounds} rounds took more than {quarter.cycle} cycles"
            )
    first, last = len(quarter.ends) // 4, len(quarter.ends) * 3 // 4
    return warps * (quarter.ends[last] - quarter.ends[first]) / (last - first)
