"""Programs of warps that run a kernel. A warp is 32 lanes, which run an instruction at once.

Warps run one at a time, each until it waits at a barrier or ends, in one of the ORDERS; at random also for a few
instructions. Lanes that a branch has parted run the part that is furthest behind first, so that they meet again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ptx import opcodes
from tests.ptx.memory import Fault, Memory, Region
from tests.ptx.opcodes import LANE, Computation, Lanes, Type, Unknown, computation, type_of
from tests.ptx.parse import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Malformed,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
)
from tests.ptx.races import Recorder

ALL = np.ones(32, bool)
ORDERS = ("forward", "backward", "odd", "random")
FEW = 40  # instructions that a warp runs at most before another one does, in random order
TOO_MANY = 500_000  # instructions of one warp: it does not end
GARBAGE = 0xA5  # every byte of a register that nothing has been written to
KINDS = {1: "?", 16: "ufi", 32: "ufi", 64: "ufi"}  # how registers of each width are read, as letters of NumPy's dtypes
U64 = type_of("u64")
Read = Callable[["Warp"], Lanes]
Write = Callable[["Warp", Lanes, Lanes], None]
Run = Callable[["Warp", Lanes], None]


class Warp:
    """Its registers, and where its lanes are: a set of lanes for each instruction that some have reached."""

    def __init__(self, machine: Machine, program: int, number: int) -> None:
        self.program, self.number = program, number
        self.index = program * machine.warps + number  # among the warps of all programs
        self.shared = machine.shared[program]
        self.specials = {
            "%tid.x": (LANE + 32 * number).astype(np.uint32),
            "%ctaid.x": np.full(32, machine.first_program + program, np.uint32),
            "%laneid": LANE.astype(np.uint32),
        }
        self.files: dict[str, Lanes] = {}
        for bits, count in machine.kernel.registers.items():
            raw = np.full((count, 4 * max(bits, 8)), 1 if bits == 1 else GARBAGE, np.uint8)
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


@dataclass(frozen=True)
class Step:
    """An instruction, ready to run: what it does, or that it branches, waits or ends."""

    instruction: Instruction
    run: Run | None
    guard: Read | None
    control: str = ""
    target: int = 0


class Machine:
    """One launch. `programs`: how many run, from `first_program` on."""

    def __init__(
        self,
        kernel: Kernel,
        arguments: Sequence[int],
        memory: Memory,
        *,
        programs: int,
        warps: int,
        shared_bytes: int = 0,
        first_program: int = 0,
        order: str = "forward",
        seed: int = 0,
        find_races: bool = True,
    ) -> None:
        self.kernel, self.memory, self.warps, self.first_program = kernel, memory, warps, first_program
        self.arguments = dict(zip(kernel.parameters, [*arguments, *[0] * len(kernel.parameters)], strict=False))
        self.order, self.random = order, random.Random(seed)
        self.shared = [Memory([Region.shared("shared memory", max(shared_bytes, 16))]) for _ in range(programs)]
        self.programs = [[Warp(self, program, number) for number in range(warps)] for program in range(programs)]
        self.recorder = Recorder(programs, warps) if find_races else None
        self.steps = [self._step(i, each) for i, each in enumerate(kernel.instructions)]

    @property
    def executed(self) -> int:
        """Instructions of warps, all together."""
        return sum(warp.executed for program in self.programs for warp in program)

    # Scheduling

    def run(self) -> None:
        """All programs, to the end; a Fault names the instruction."""
        with np.errstate(all="ignore"):
            while any(not warp.done for program in self.programs for warp in program):
                ready = [w for program in self.programs for w in program if not w.done and not w.waits]
                if not ready:
                    raise Fault("every warp waits, and none is left to come")
                warp, most = self._next(ready)
                self._advance(warp, most)
                self._open_barrier(self.programs[warp.program])

    def _next(self, ready: list[Warp]) -> tuple[Warp, int]:
        """The warp to run, and for how many instructions at most."""
        match self.order:
            case "forward":
                return ready[0], TOO_MANY
            case "backward":
                return ready[-1], TOO_MANY
            case "odd":
                return min(ready, key=lambda w: (w.program % 2 == 0, w.number % 2 == 0, w.index)), TOO_MANY
            case "random":
                return self.random.choice(ready), self.random.randint(1, FEW)
        raise ValueError(f"no order is called {self.order!r}: there are {', '.join(ORDERS)}")

    def _open_barrier(self, program: list[Warp]) -> None:
        """Where all warps of a program have come, they go on."""
        if not all(warp.waits or warp.done for warp in program) or not any(warp.waits for warp in program):
            return
        if any(warp.done for warp in program):
            raise Fault("a warp has ended without the barrier that others of its program wait at")
        for warp in program:
            warp.waits = False
        if self.recorder:
            self.recorder.barrier([warp.index for warp in program])

    def _advance(self, warp: Warp, most: int) -> None:
        """Run a warp until it waits, ends, or has run `most` instructions."""
        stop = warp.executed + most
        while warp.paths and not warp.waits and warp.executed < stop:
            place = min(warp.paths)
            lanes = warp.paths.pop(place)
            meets = min(warp.paths, default=len(self.steps))
            self._straight(warp, place, lanes, meets, stop)
        if warp.executed >= TOO_MANY:
            raise Fault(f"a warp does not end: it has run {warp.executed} instructions")

    def _straight(self, warp: Warp, place: int, lanes: Lanes, meets: int, stop: int) -> None:
        """From one instruction to the next branch, barrier, end, or place where other lanes are."""
        while place < meets and warp.executed < stop:
            step = self.steps[place]
            active = lanes
            warp.executed += 1
            if step.guard is not None:
                active = step.guard(warp)
                if lanes is not ALL:
                    active = active & lanes
                elif active.all():
                    active = ALL
            place += 1
            if step.run is not None:
                if active is ALL or active.any():
                    self._execute(step, warp, active)
            elif step.control == "branch":
                warp.goes_to(step.target, active)
                lanes = lanes & ~active
                warp.goes_to(place, lanes)
                return
            elif step.control == "end":
                warp.goes_to(place, lanes & ~active)
                return
            else:
                self._wait(step, warp, place, active)
                return
        if place < len(self.steps):
            warp.goes_to(place, lanes)

    def _execute(self, step: Step, warp: Warp, active: Lanes) -> None:
        try:
            step.run(warp, active)
        except Fault as fault:
            raise Fault(f"{fault}: {step.instruction.text}, program {warp.program}, warp {warp.number}") from None

    def _wait(self, step: Step, warp: Warp, place: int, active: Lanes) -> None:
        if warp.paths or not active.all():
            raise Fault(f"a barrier that a part of a warp has reached: {step.instruction.text}, warp {warp.number}")
        warp.paths, warp.waits = {place: ALL}, True

    # Instructions

    def _step(self, number: int, of: Instruction) -> Step:
        guard = None if of.guard is None else self._guard(of)
        match of.parts[0]:
            case "bra":
                return Step(of, None, guard, "branch", self.kernel.labels[of.operands[0].name])
            case "ret" | "exit":
                return Step(of, None, guard, "end")
            case "bar" if of.parts[1] == "warp":
                return Step(of, self._whole_warp(of), guard)
            case "bar" | "barrier":
                if of.parts[1] != "sync" or of.operands != (Immediate(0),):
                    raise Unknown(of.text)
                return Step(of, None, guard, "wait")
        special = {
            "ld": self._load, "st": self._store, "atom": self._atomic, "ldmatrix": self._load_matrix,
            "stmatrix": self._store_matrix,
        }  # fmt: skip
        if of.parts[:2] == ("ld", "param"):
            return Step(of, self._parameter(of), guard)
        if of.parts[0] in special:
            return Step(of, special[of.parts[0]](number, of), guard)
        if of.parts[0] == "mov" and any(isinstance(each, Vector) for each in of.operands):
            return Step(of, self._pack(of), guard)
        return Step(of, self._compute(of), guard)

    def _whole_warp(self, of: Instruction) -> Run:
        """bar.warp.sync: lanes run at once, so that it only has to find all of them."""
        if of.operands != (Immediate(2**64 - 1),):
            raise Unknown(of.text)

        def meet(warp: Warp, lanes: Lanes) -> None:
            if lanes is not ALL:
                raise Fault("a barrier that a part of a warp has reached")

        return meet

    def _guard(self, of: Instruction) -> Read:
        place = of.guard.index
        if of.negated:
            return lambda warp: ~warp.files["|b1"][place]
        return lambda warp: warp.files["|b1"][place]

    def _compute(self, of: Instruction) -> Run:
        what: Computation = computation(of.parts)
        result, *operands = of.operands
        if len(operands) != len(what.sources):
            raise Malformed(f"{of.text} has {len(operands)} operands, not {len(what.sources)}")
        reads = [self._read(each, kind) for each, kind in zip(operands, what.sources, strict=True)]
        write, function, whole = self._write(result, what.result), what.function, of.parts[0] in opcodes.WHOLE_WARP

        def run(warp: Warp, lanes: Lanes) -> None:
            if whole and lanes is not ALL:
                raise Fault("a part of a warp shuffles")
            write(warp, lanes, function(*[read(warp) for read in reads]))

        return run

    def _read(self, operand: Operand, kind: Type) -> Read:
        """How the values of an operand are found."""
        dtype = kind.dtype
        match operand:
            case Register(bits, index) if bits == kind.bits:
                name = dtype.str
                return lambda warp: warp.files[name][index]
            case Register(bits, index) if bits > kind.bits:
                name, raw = f"<u{bits // 8}", np.dtype(f"u{kind.bits // 8}")
                return lambda warp: warp.files[name][index].astype(raw).view(dtype)
            case Immediate(value):
                bits = value & ((1 << kind.bits) - 1)
                lanes = np.full(32, bits, dtype if kind.bits == 1 else f"u{kind.bits // 8}").view(dtype)
                return lambda warp: lanes
            case Symbol("global_smem"):
                lanes = np.zeros(32, dtype)
                return lambda warp: lanes
            case Special(name):
                return lambda warp: warp.specials[name].astype(dtype)
        raise Malformed(f"{operand} is no operand of {kind.bits} bits")

    def _write(self, operand: Operand, kind: Type) -> Write:
        """How the active lanes of a register get their values; a wider one is filled up, by the sign of a number."""
        if operand is None:
            return lambda warp, lanes, values: None
        if not isinstance(operand, Register) or operand.bits < kind.bits:
            raise Malformed(f"{operand} takes no {kind.bits} bits")
        index, name = operand.index, kind.dtype.str
        if operand.bits > kind.bits:
            name = f"<{'i' if kind.kind == 's' else 'u'}{operand.bits // 8}"

        def write(warp: Warp, lanes: Lanes, values: Lanes) -> None:
            if lanes is ALL:
                warp.files[name][index] = values
            else:
                np.copyto(warp.files[name][index], values, where=lanes, casting="unsafe")

        return write

    def _pack(self, of: Instruction) -> Run:
        """`mov` from or to the parts of a register."""
        kind = type_of(of.parts[-1])
        result, source = of.operands
        vector = source if isinstance(source, Vector) else result
        part = Type("b", kind.bits // len(vector.parts))
        shifts = [kind.dtype.type(part.bits * i) for i in range(len(vector.parts))]
        if vector is source:
            reads, write = [self._read(each, part) for each in vector.parts], self._write(result, kind)

            def pack(warp: Warp, lanes: Lanes) -> None:
                parts = [read(warp).astype(kind.dtype) << by for read, by in zip(reads, shifts, strict=True)]
                write(warp, lanes, np.bitwise_or.reduce(parts))

            return pack
        read, writes = self._read(source, kind), [self._write(each, part) for each in vector.parts]

        def unpack(warp: Warp, lanes: Lanes) -> None:
            values = read(warp)
            for write, by in zip(writes, shifts, strict=True):
                write(warp, lanes, (values >> by).astype(part.dtype))

        return unpack

    def _parameter(self, of: Instruction) -> Run:
        kind = type_of(of.parts[-1])
        write = self._write(of.operands[0], Type("b", kind.bits))
        name = of.operands[1].base.name
        value = np.full(32, self.arguments[name] & ((1 << kind.bits) - 1), f"u{kind.bits // 8}")
        return lambda warp, lanes: write(warp, lanes, value)

    # Memory

    def _address(self, operand: Operand) -> Read:
        if not isinstance(operand, Address):
            raise Malformed(f"{operand} is no address")
        wide = isinstance(operand.base, Register) and operand.base.bits == 64
        read = self._read(operand.base, U64 if wide else type_of("u32"))
        offset = np.uint64(operand.offset & (2**64 - 1))
        return lambda warp: read(warp).astype(np.uint64) + offset

    def _space(self, of: Instruction) -> Callable[[Warp], Memory]:
        if any(each.startswith("shared") for each in of.parts):
            return lambda warp: warp.shared
        if "global" in of.parts:
            return lambda warp: self.memory
        raise Unknown(of.text)

    def _vector(self, of: Instruction, operand: Operand) -> tuple[tuple[Operand, ...], Type]:
        """The registers of an access, and the type of each."""
        return operand.parts if isinstance(operand, Vector) else (operand,), type_of(of.parts[-1])

    def _load(self, number: int, of: Instruction) -> Run:
        registers, kind = self._vector(of, of.operands[0])
        writes = [self._write(each, kind) for each in registers]
        address, space, width, count = self._address(of.operands[1]), self._space(of), kind.bits // 8, len(registers)

        def load(warp: Warp, lanes: Lanes) -> None:
            values = np.zeros((32, count), f"u{width}")
            for part in space(warp).parts(address(warp), width * count, np.flatnonzero(lanes)):
                if self.recorder:
                    self.recorder.access(warp.index, number, part, width * count, writes=False)
                values[part.lanes] = part.region.load(part.offsets, width, count)
            for i, write in enumerate(writes):
                write(warp, lanes, values[:, i].view(kind.dtype))

        return load

    def _store(self, number: int, of: Instruction) -> Run:
        registers, kind = self._vector(of, of.operands[1])
        reads = [self._read(each, Type("b", kind.bits)) for each in registers]
        address, space, width, count = self._address(of.operands[0]), self._space(of), kind.bits // 8, len(registers)

        def store(warp: Warp, lanes: Lanes) -> None:
            values = np.stack([read(warp) for read in reads], axis=1)
            for part in space(warp).parts(address(warp), width * count, np.flatnonzero(lanes)):
                if self.recorder:
                    self.recorder.access(warp.index, number, part, width * count, writes=True)
                part.region.store(part.offsets, values[part.lanes])

        return store

    def _atomic(self, number: int, of: Instruction) -> Run:
        """atom.global.gpu.ORDER.add: lane after lane."""
        if of.parts[1:3] != ("global", "gpu") or of.parts[4] != "add":
            raise Unknown(of.text)
        kind, order = type_of(of.parts[-1]), of.parts[3]
        acquires, releases = order in ("acquire", "acq_rel"), order in ("release", "acq_rel")
        address, read, write = self._address(of.operands[1]), self._read(of.operands[2], kind), None
        write = self._write(of.operands[0], kind)

        def add(warp: Warp, lanes: Lanes) -> None:
            old, terms, addresses = np.zeros(32, kind.dtype), read(warp), address(warp)
            for lane in np.flatnonzero(lanes):
                (part,) = self.memory.parts(addresses, kind.bits // 8, np.array([lane]))
                if self.recorder:
                    self.recorder.access(warp.index, number, part, kind.bits // 8, writes=True, atomic=True)
                    self.recorder.synchronize(warp.index, int(addresses[lane]), acquires=acquires, releases=releases)
                found = part.region.load(part.offsets, kind.bits // 8, 1)
                old[lane] = found[0, 0]
                part.region.store(part.offsets, found + terms[lane])
            write(warp, lanes, old)

        return add

    def _rows(self, of: Instruction, operand: Operand) -> tuple[Vector, Read, Lanes]:
        """The registers of a matrix access, one a matrix of eight rows of 16 bytes; whose lanes have the addresses."""
        if "trans" in of.parts or of.parts[-1] != "b16":
            raise Unknown(of.text)
        count = int(next(each for each in of.parts if each in ("x1", "x2", "x4"))[1:])
        registers, _ = self._vector(of, operand)
        return registers, LANE[: 8 * count], count

    def _load_matrix(self, number: int, of: Instruction) -> Run:
        registers, rows, count = self._rows(of, of.operands[0])
        writes, address = [self._write(each, type_of("b32")) for each in registers], self._address(of.operands[1])

        def load(warp: Warp, lanes: Lanes) -> None:
            if lanes is not ALL:
                raise Fault("a part of a warp loads matrices")
            words = np.zeros((8 * count, 4), np.uint32)
            for part in warp.shared.parts(address(warp), 16, rows):
                if self.recorder:
                    self.recorder.access(warp.index, number, part, 16, writes=False)
                words[part.lanes] = part.region.load(part.offsets, 4, 4)
            for write, matrix in zip(writes, words.reshape(count, 32), strict=True):
                write(warp, lanes, matrix)

        return load

    def _store_matrix(self, number: int, of: Instruction) -> Run:
        registers, rows, count = self._rows(of, of.operands[1])
        reads, address = [self._read(each, type_of("b32")) for each in registers], self._address(of.operands[0])

        def store(warp: Warp, lanes: Lanes) -> None:
            if lanes is not ALL:
                raise Fault("a part of a warp stores matrices")
            words = np.concatenate([read(warp) for read in reads]).reshape(8 * count, 4)
            for part in warp.shared.parts(address(warp), 16, rows):
                if self.recorder:
                    self.recorder.access(warp.index, number, part, 16, writes=True)
                part.region.store(part.offsets, words[part.lanes])

        return store
