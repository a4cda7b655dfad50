"""What a warp does for a whole block, read from a kernel's machine code (the listing of cuobjdump -sass).

The path of a whole, aligned block is the way through the code that has the most wide accesses, and of those the
shortest: what is left out is for the last, partial block of a parameter, for the last program to finish, and for
divisions of numbers too small or too large. So is a loop over more messages than eight.

`cycles` runs one warp over this path alone: instructions start in order, one a cycle, when what they read is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WIDE = 16  # bytes
# Cycles until a result can be used. Global memory: of tiles and packed bits, which nobody read before, on a device that
# works; and of what other programs read too, from L2.
MEMORY, CACHE, SHARED, SPECIAL, ARITHMETIC, BARRIER = 1100, 300, 30, 20, 5, 40
_CODE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.M)
_REGISTER = re.compile(r"\b(U?[RP])(\d+)\b(\.64)?")
_SLOWER = ("MUFU", "I2F", "F2I", "S2R", "S2UR", "R2UR", "POPC", "LDC", "ULDC", "CS2R")


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # the predicate under which it runs, or ""
    name: str
    operands: str

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch goes to."""
        found = re.search(r"0x([0-9a-f]+)$", self.operands) if self.kind == "BRA" else None
        return int(found[1], 16) if found else None

    @property
    def bytes(self) -> int:
        """The bytes of a thread's access to global memory, else 0."""
        if self.kind not in ("LDG", "STG"):
            return 0
        found = re.search(r"\.([SU]?)(8|16|64|128)(?:\.|$)", self.name)
        return int(found[2]) // 8 if found else 4

    def written(self) -> set[str]:
        """The registers of its result."""
        if self.kind in ("STG", "STS", "BAR", "BRA", "EXIT", "RED", "BSSY", "BSYNC", "NOP"):
            return set()
        found: set[str] = set()
        for index, operand in enumerate(self.operands.split(", ")):
            register = _REGISTER.fullmatch(operand.partition(".")[0])
            if index > 0 and not (register and register[1].endswith("P")):
                break
            if register:
                found |= {f"{register[1]}{int(register[2]) + i}" for i in range(self._width() if index == 0 else 1)}
        return found

    def read(self) -> set[str]:
        """The registers that it waits for."""
        sources = self.operands if not self.written() else self.operands.partition(", ")[2]
        found = {f"{kind}{int(n) + i}" for kind, n, wide in _REGISTER.findall(sources) for i in range(2 if wide else 1)}
        if self.kind == "STG" and (data := _REGISTER.search(self.operands.rpartition(", ")[2])):
            found |= {f"R{int(data[2]) + i}" for i in range(max(1, self.bytes // 4))}
        return found | ({self.guard.lstrip("!")} if self.guard else set())

    def _width(self) -> int:
        if self.kind in ("LDG", "LDS", "LDC", "ULDC", "CS2R"):
            found = re.search(r"\.(64|128)\b", self.name)
            return int(found[1]) // 32 if found else 2 if self.name == "CS2R" else 1
        return 2 if ".WIDE" in self.name else 1


def instructions(listing: str) -> list[Instruction]:
    found = [Instruction(int(at, 16), guard, name, rest) for at, guard, name, rest in _CODE.findall(listing)]
    return [each for each in found if each.name != "NOP"]


def whole_block_path(code: Sequence[Instruction]) -> list[Instruction]:
    """What a warp runs for a whole block."""
    index = {each.address: i for i, each in enumerate(code)}
    best: dict[int, tuple[tuple[int, int], int | None]] = {}  # of each instruction: what is still to come, and the next
    for i in reversed(range(len(code))):
        each = code[i]
        ways: list[int | None] = []
        if each.kind == "EXIT":
            ways.append(None)
        if each.target is not None and (goes := index.get(each.target, -1)) > i:
            ways.append(goes)
        if each.guard or each.kind not in ("EXIT", "BRA", "RET"):
            ways.append(i + 1)
        reached = [(best[way][0] if way is not None else (0, 0), way) for way in ways if way is None or way in best]
        if reached:
            (wide, length), way = max(reached, key=lambda found: found[0])
            best[i] = (wide + (each.bytes >= 8), length - 1), way
    path, at = [], 0 if code else None
    while at is not None:
        path.append(code[at])
        at = best[at][1]
    return path


def loads_of_tiles(path: Sequence[Instruction]) -> set[int]:
    """Which instructions of the path load a tile or packed bits: widely, and each thread from its own address."""
    own: set[str] = set()
    found = set()
    for number, each in enumerate(path):
        differs = "SR_TID" in each.operands or bool(own & each.read())
        if each.kind == "LDG" and differs and each.bytes in (1, 2, 8, WIDE):
            found.add(number)
        own = own | each.written() if differs and each.kind != "R2UR" else own - each.written()
    return found


def loads_in_a_row(path: Sequence[Instruction]) -> int:
    """The longest chain of loads, each of which needs the one before: the last is of a tile or of packed bits."""
    depth: dict[str, int] = {}
    reached = longest = 0  # reached: by what has been branched on
    tiles = loads_of_tiles(path)
    for number, each in enumerate(path):
        deep = max((depth.get(register, 0) for register in each.read()), default=0)
        if each.kind == "LDG":
            deep = max(deep, reached) + 1
            longest = max(longest, deep if number in tiles else 0)
        elif each.kind in ("BRA", "EXIT"):
            reached = max(reached, deep)
        for register in each.written():
            depth[register] = deep if not each.guard else max(deep, depth.get(register, 0))
    return longest


def cycles(path: Sequence[Instruction]) -> int:
    """Cycles from a warp's first instruction to its last, alone."""
    now, ready = 0, dict[str, int]()
    tiles = loads_of_tiles(path)
    for number, each in enumerate(path):
        now = max([now + 1, *(ready[register] for register in each.read() if register in ready)])
        if each.kind == "BAR":
            now += BARRIER
        ready |= dict.fromkeys(each.written(), now + (MEMORY if number in tiles else _latency(each)))
    return now


def _latency(each: Instruction) -> int:
    if each.kind in ("LDG", "ATOMG", "ATOM"):
        return CACHE
    if each.kind in ("LDS", "SHFL", "REDUX"):
        return SHARED
    return SPECIAL if each.kind in _SLOWER else ARITHMETIC
