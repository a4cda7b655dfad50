"""How an instruction reads its operands from a warp, and writes its result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ptx.opcodes import Lanes, Type, type_of
from tests.ptx.parse import Address, Immediate, Malformed, Operand, Register, Special, Symbol
from tests.ptx.warp import ALL, Warp

Read = Callable[[Warp], Lanes]
Write = Callable[[Warp, Lanes, Lanes], None]


def read(operand: Operand, kind: Type) -> Read:
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


def write(operand: Operand, kind: Type) -> Write:
    """How the active lanes of a register get their values; a wider one is filled up, by the sign of a number."""
    if operand is None:
        return lambda warp, lanes, values: None
    if not isinstance(operand, Register) or operand.bits < kind.bits:
        raise Malformed(f"{operand} takes no {kind.bits} bits")
    index, name = operand.index, kind.dtype.str if operand.bits == kind.bits else f"<u{operand.bits // 8}"

    def put(warp: Warp, lanes: Lanes, values: Lanes) -> None:
        if lanes is ALL:
            warp.files[name][index] = values
        else:
            np.copyto(warp.files[name][index], values, where=lanes, casting="unsafe")

    return put


def address(operand: Operand) -> Read:
    """uint64; shared memory begins at 0."""
    if not isinstance(operand, Address):
        raise Malformed(f"{operand} is no address")
    wide = isinstance(operand.base, Register) and operand.base.bits == 64
    base = read(operand.base, type_of("u64" if wide else "u32"))
    offset = np.uint64(operand.offset & (2**64 - 1))
    return lambda warp: base(warp).astype(np.uint64) + offset
