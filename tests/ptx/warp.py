"""A warp: the registers of its 32 lanes, where they are in the kernel, and what they can reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.ptx.memory import SHARED, Memory, Region
from tests.ptx.opcodes import LANE, Lanes
from tests.ptx.parse import Kernel
from tests.ptx.races import Recorder

ALL = np.ones(32, bool)
GARBAGE = 0xFFA5A5A5A5A5A5A5  # a register that nothing has been written to: NaN, from the upper bits on
KINDS = {1: "?", 16: "ufi", 32: "ufi", 64: "ufi"}  # how registers of each width are read, as letters of NumPy's dtypes


@dataclass(frozen=True)
class Launched:
    """What all warps of a launch share."""

    kernel: Kernel
    arguments: Mapping[str, int]  # by parameter
    memory: Memory
    recorder: Recorder
    warps: int  # of a program
    shared_bytes: int
    first_program: int = 0


class Program:
    """Its warps, and the memory that they share."""

    def __init__(self, launched: Launched, number: int) -> None:
        self.shared = Memory([Region.shared(SHARED, max(launched.shared_bytes, 16))])
        self.warps = [Warp(launched, number, self.shared, i) for i in range(launched.warps)]


class Warp:
    """`paths`: the lanes that have reached each instruction where some are."""

    def __init__(self, launched: Launched, program: int, shared: Memory, number: int) -> None:
        self.program, self.number = program, number
        self.index = program * launched.warps + number  # among the warps of all programs
        self.memory, self.shared = launched.memory, shared
        self.arguments, self.recorder = launched.arguments, launched.recorder
        self.specials = {
            "%tid.x": (LANE + 32 * number).astype(np.uint32),
            "%ctaid.x": np.full(32, launched.first_program + program, np.uint32),
        }
        self.files: dict[str, Lanes] = {}  # [registers, lanes] by dtype, several of the same memory
        for bits, count in launched.kernel.registers.items():
            raw = np.full((count, 32), 1 if bits == 1 else GARBAGE >> 64 - bits, f"u{max(bits // 8, 1)}")
            for kind in KINDS[bits]:
                dtype = np.dtype(kind if bits == 1 else f"{kind}{bits // 8}")
                self.files[dtype.str] = raw.view(dtype)
        self.paths: dict[int, Lanes] = {0: ALL}
        self.waits, self.executed = False, 0

    @property
    def done(self) -> bool:
        return not self.paths

    def goes_to(self, place: int, lanes: Lanes) -> None:
        if lanes.any():
            lanes = lanes | self.paths.get(place, False)
            self.paths[place] = ALL if lanes.all() else lanes
