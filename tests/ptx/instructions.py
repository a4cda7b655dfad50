"""Instructions, ready to run on a warp: what they compute is in `opcodes`; here they reach registers and memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.ptx import forms, opcodes, operands
from tests.ptx.memory import Fault, Memory, Part
from tests.ptx.opcodes import LANE, Computation, Lanes, Type, Unknown, computation, type_of
from tests.ptx.operands import Read
from tests.ptx.parse import Immediate, Instruction, Kernel, Malformed, Operand, Vector
from tests.ptx.warp import ALL, Warp

Run = Callable[[Warp, Lanes], None]


@dataclass(frozen=True)
class Step:
    """An instruction, ready to run: what it does, or that it branches, waits or ends."""

    instruction: Instruction
    run: Run | None
    guard: Read | None
    control: str = ""
    target: int = 0


@functools.lru_cache(maxsize=64)
def steps_of(kernel: Kernel) -> list[Step]:
    return [_step(kernel, number, each) for number, each in enumerate(kernel.instructions)]


def _step(kernel: Kernel, number: int, of: Instruction) -> Step:
    forms.check(of.opcode)
    guard = None if of.guard is None else _guard(of)
    match of.parts[0]:
        case "bra":
            return Step(of, None, guard, "branch", kernel.labels[of.operands[0].name])
        case "ret":
            return Step(of, None, guard, "end")
        case "bar" if of.parts[1] == "warp":
            return Step(of, _whole_warp(of), guard)
        case "bar":
            if of.operands != (Immediate(0),):
                raise Unknown(of.text)
            return Step(of, None, guard, "wait")
    special = {
        "ld": _load, "st": _store, "atom": _atomic, "ldmatrix": _load_matrix,
        "stmatrix": _store_matrix,
    }  # fmt: skip
    if of.parts[:2] == ("ld", "param"):
        return Step(of, _parameter(of), guard)
    if of.parts[0] in special:
        return Step(of, special[of.parts[0]](number, of), guard)
    if of.parts[0] == "mov" and any(isinstance(each, Vector) for each in of.operands):
        return Step(of, _pack(of), guard)
    return Step(of, _compute(of), guard)


def _whole_warp(of: Instruction) -> Run:
    """bar.warp.sync: it orders what the lanes of one warp do."""
    if of.operands != (Immediate(2**64 - 1),):
        raise Unknown(of.text)

    def meet(warp: Warp, lanes: Lanes) -> None:
        if lanes is not ALL:
            raise Fault("a barrier that a part of a warp has reached")
        warp.recorder.barrier([warp.index])

    return meet


def _guard(of: Instruction) -> Read:
    place = of.guard.index
    if of.negated:
        return lambda warp: ~warp.files["|b1"][place]
    return lambda warp: warp.files["|b1"][place]


def _compute(of: Instruction) -> Run:
    what: Computation = computation(of.parts)
    result, *sources = of.operands
    if len(sources) != len(what.sources):
        raise Malformed(f"{of.text} has {len(sources)} operands, not {len(what.sources)}")
    reads = [operands.read(each, kind) for each, kind in zip(sources, what.sources, strict=True)]
    write, function, whole = operands.write(result, what.result), what.function, of.parts[0] in opcodes.WHOLE_WARP

    def run(warp: Warp, lanes: Lanes) -> None:
        if whole and lanes is not ALL:
            raise Fault("a part of a warp shuffles")
        write(warp, lanes, function(*[read(warp) for read in reads]))

    return run


def _pack(of: Instruction) -> Run:
    """`mov` from or to the parts of a register."""
    kind = type_of(of.parts[-1])
    result, source = of.operands
    vector = source if isinstance(source, Vector) else result
    part = Type("b", kind.bits // len(vector.parts))
    shifts = [kind.dtype.type(part.bits * i) for i in range(len(vector.parts))]
    if vector is source:
        reads, write = [operands.read(each, part) for each in vector.parts], operands.write(result, kind)

        def pack(warp: Warp, lanes: Lanes) -> None:
            parts = [read(warp).astype(kind.dtype) << by for read, by in zip(reads, shifts, strict=True)]
            write(warp, lanes, np.bitwise_or.reduce(parts))

        return pack
    read, writes = operands.read(source, kind), [operands.write(each, part) for each in vector.parts]

    def unpack(warp: Warp, lanes: Lanes) -> None:
        values = read(warp)
        for write, by in zip(writes, shifts, strict=True):
            write(warp, lanes, (values >> by).astype(part.dtype))

    return unpack


def _parameter(of: Instruction) -> Run:
    kind, source = type_of(of.parts[-1]), of.operands[1]
    if source.offset:
        raise Unknown(of.text)
    put, name = operands.write(of.operands[0], kind), source.base.name
    mask, dtype = (1 << kind.bits) - 1, f"u{kind.bits // 8}"
    return lambda warp, lanes: put(warp, lanes, np.full(32, warp.arguments[name] & mask, dtype).view(kind.dtype))


def _space(of: Instruction) -> Callable[[Warp], Memory]:
    return (lambda warp: warp.memory) if of.parts[1] == "global" else (lambda warp: warp.shared)


def _vector(of: Instruction, operand: Operand) -> tuple[tuple[Operand, ...], Type]:
    """The registers of an access, and the type of each."""
    registers = operand.parts if isinstance(operand, Vector) else (operand,)
    if len(registers) != next((int(each[1]) for each in of.parts if each in ("v2", "v4", "x4")), 1):
        raise Malformed(f"{of.text} has {len(registers)} registers")
    return registers, type_of(of.parts[-1])


def _load(number: int, of: Instruction) -> Run:
    registers, kind = _vector(of, of.operands[0])
    writes = [operands.write(each, kind) for each in registers]
    address, space, width, count = operands.address(of.operands[1]), _space(of), kind.bits // 8, len(registers)

    def load(warp: Warp, lanes: Lanes) -> None:
        values = np.zeros((32, count), f"u{width}")
        for part in space(warp).parts(address(warp), width * count, np.flatnonzero(lanes)):
            warp.recorder.access(warp.index, number, part, width * count, writes=False)
            found = part.region.load(part.offsets, width, count)
            values[part.lanes] = warp.recorder.loaded(warp.index, number, part, found)
        for i, write in enumerate(writes):
            write(warp, lanes, values[:, i].view(kind.dtype))

    return load


def _store(number: int, of: Instruction) -> Run:
    registers, kind = _vector(of, of.operands[1])
    reads = [operands.read(each, Type("b", kind.bits)) for each in registers]
    address, space, width, count = operands.address(of.operands[0]), _space(of), kind.bits // 8, len(registers)

    def store(warp: Warp, lanes: Lanes) -> None:
        values = np.stack([read(warp) for read in reads], axis=1)
        for part in space(warp).parts(address(warp), width * count, np.flatnonzero(lanes)):
            warp.recorder.store(warp.index, number, part, values[part.lanes])
            part.region.store(part.offsets, values[part.lanes])

    return store


def _atomic(number: int, of: Instruction) -> Run:
    """atom.global.gpu.ORDER.add or .exch: lane after lane."""
    kind, orders, adds = type_of(of.parts[-1]), of.parts[3] == "acq_rel", of.parts[4] == "add"
    address, read = operands.address(of.operands[1]), operands.read(of.operands[2], kind)
    write, width = operands.write(of.operands[0], kind), kind.bits // 8

    def run(warp: Warp, lanes: Lanes) -> None:
        old, given, addresses = np.zeros(32, kind.dtype), read(warp), address(warp)
        for lane in np.flatnonzero(lanes):
            (part,) = warp.memory.parts(addresses, width, np.array([lane]))
            warp.recorder.access(warp.index, number, part, width, writes=True, atomic=True)
            if orders:
                warp.recorder.synchronize(warp.index, int(lane), int(addresses[lane]))
            found = part.region.load(part.offsets, width, 1)
            old[lane] = found[0, 0]
            part.region.store(part.offsets, found + given[lane] if adds else np.full_like(found, given[lane]))
        write(warp, lanes, old)

    return run


def _access_rows(warp: Warp, number: int, part: Part, *, writes: bool) -> None:
    """A row's words are several lanes': the access counts as that of two."""
    for lanes in (part.lanes, part.lanes ^ 1):
        warp.recorder.access(warp.index, number, Part(part.region, lanes, part.offsets), 16, writes=writes)


def _transposed(words: np.ndarray) -> np.ndarray:
    """Exchange rows and columns of each of some matrices of 8 by 8 elements of 16 bits, two in a word."""
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32).reshape(words.shape)


def _load_matrix(number: int, of: Instruction) -> Run:
    """Four matrices, each of eight rows of 16 bytes, whose addresses the lanes have; a register has a matrix."""
    registers, _ = _vector(of, of.operands[0])
    writes, address = [operands.write(each, type_of("b32")) for each in registers], operands.address(of.operands[1])

    def load(warp: Warp, lanes: Lanes) -> None:
        if lanes is not ALL:
            raise Fault("a part of a warp loads matrices")
        words = np.zeros((32, 4), np.uint32)
        for part in warp.shared.parts(address(warp), 16, LANE):
            _access_rows(warp, number, part, writes=False)
            words[part.lanes] = part.region.load(part.offsets, 4, 4)
        matrices = _transposed(words) if "trans" in of.parts else words
        for write, matrix in zip(writes, matrices.reshape(4, 32), strict=True):
            write(warp, lanes, matrix)

    return load


def _store_matrix(number: int, of: Instruction) -> Run:
    registers, _ = _vector(of, of.operands[1])
    reads, address = [operands.read(each, type_of("b32")) for each in registers], operands.address(of.operands[0])

    def store(warp: Warp, lanes: Lanes) -> None:
        if lanes is not ALL:
            raise Fault("a part of a warp stores matrices")
        words = np.concatenate([read(warp) for read in reads]).reshape(32, 4)
        for part in warp.shared.parts(address(warp), 16, LANE):
            _access_rows(warp, number, part, writes=True)
            part.region.store(part.offsets, words[part.lanes])

    return store
