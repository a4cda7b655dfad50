"""What each PTX instruction computes from the values of a warp's 32 lanes (PTX ISA 8.7, section 9.7).

TABLE has one entry an opcode: from its modifiers and types a `Computation`. What reads or writes memory, branches or
waits is in `machine`. A NaN that arithmetic makes has the bits that NVIDIA's units give it, 0x7fffffff; those of f64
give it 0xfff8000000000000.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Lanes = np.ndarray
LANE = np.arange(32)
SMALLEST_NORMAL = np.float32(2.0**-126)
NAN = {
    np.dtype(np.float16): np.uint16(0x7FFF).view(np.float16),
    np.dtype(np.float32): np.uint32(0x7FFFFFFF).view(np.float32),
    np.dtype(np.float64): np.uint64(0xFFF8 << 48).view(np.float64),
}
COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
LETTERS = {"b": "u", "u": "u", "s": "i", "f": "f"}  # of NumPy's dtypes, by kind


class Unknown(NotImplementedError):
    """An instruction that this emulator has not met."""


@dataclass(frozen=True)
class Type:
    """b32, s64, f16, pred, ... How an instruction reads the bits of a register."""

    kind: str
    bits: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(bool if self.kind == "pred" else f"{LETTERS[self.kind]}{self.bits // 8}")


@dataclass(frozen=True)
class Computation:
    """result = function(*sources), each source read as its type."""

    result: Type
    sources: tuple[Type, ...]
    function: Callable[..., Lanes]


def type_of(name: str) -> Type:
    if name == "pred":
        return Type("pred", 1)
    if name == "bf16":  # whose values NumPy has no type for: its bits
        return Type("b", 16)
    if name in ("bf16x2", "f16x2"):
        return Type("b", 32)
    return Type(name[0], int(name[1:]))


U32 = Type("u", 32)
Parts = tuple[str, ...]
TABLE: dict[str, Callable[[Parts], Computation]] = {}


def computation(parts: Parts) -> Computation:
    """Find the computation of an opcode that `forms` has, cut at its points."""
    found = TABLE[parts[0]](parts)
    return _flushing(found) if "ftz" in parts else found


def opcode(*names: str) -> Callable[[Callable[[Parts], Computation]], Callable[[Parts], Computation]]:
    def enter(make: Callable[[Parts], Computation]) -> Callable[[Parts], Computation]:
        TABLE.update(dict.fromkeys(names, make))
        return make

    return enter


def canonical(values: Lanes) -> Lanes:
    """The same, each NaN as the GPU makes it."""
    missing = values != values
    return np.where(missing, NAN[values.dtype], values) if missing.any() else values


def flushed(values: Lanes) -> Lanes:
    """Subnormal numbers as zeros of their sign."""
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def _flushing(plain: Computation) -> Computation:
    """.ftz: operands and results are flushed."""

    def function(*values: Lanes) -> Lanes:
        result = plain.function(*(flushed(each) if each.dtype == np.float32 else each for each in values))
        return flushed(result) if result.dtype == np.float32 else result

    return replace(plain, function=function)


def _of_one_type(function: Callable[..., Lanes], count: int) -> Callable[[Parts], Computation]:
    """Operands and result have the type that an opcode ends with."""

    def make(parts: Parts) -> Computation:
        if parts[-1] in ("s16x2", "u16x2"):
            word, half = type_of("b32"), f"{LETTERS[parts[-1][0]]}2"
            return Computation(word, (word,) * count, lambda *v: function(*(a.view(half) for a in v)).view(word.dtype))
        kind = type_of(parts[-1])
        if kind.kind != "f":
            return Computation(kind, (kind,) * count, function)
        return Computation(kind, (kind,) * count, lambda *values: canonical(function(*values)))

    return make


TABLE |= {
    "add": _of_one_type(operator.add, 2),
    "sub": _of_one_type(operator.sub, 2),
    "neg": _of_one_type(operator.neg, 1),
    "abs": _of_one_type(np.abs, 1),
    "div": _of_one_type(operator.truediv, 2),
    "sqrt": _of_one_type(np.sqrt, 1),
    "and": _of_one_type(operator.and_, 2),
    "or": _of_one_type(operator.or_, 2),
    "xor": _of_one_type(operator.xor, 2),
    "not": _of_one_type(operator.invert, 1),
}


@opcode("mov")
def _move(parts: Parts) -> Computation:
    """Bits as they are, NaN too."""
    kind = type_of(parts[-1])
    bits = kind if kind.kind == "pred" else Type("b", kind.bits)
    return Computation(bits, (bits,), lambda a: a)


@opcode("mul", "mad")
def _multiply(parts: Parts) -> Computation:
    """.lo, .wide: a product of twice the bits, .hi: the upper half of that; mad adds a third operand."""
    kind = type_of(parts[-1])
    if kind.kind == "f":
        return _of_one_type(operator.mul, 2)(parts)
    result = Type(kind.kind, 2 * kind.bits) if "wide" in parts else kind

    def product(a: Lanes, b: Lanes) -> Lanes:
        if "hi" in parts:
            upper = [int(x) * int(y) >> kind.bits for x, y in zip(a, b, strict=True)]
            return np.array(upper, object).astype(kind.dtype)
        return a.astype(result.dtype) * b.astype(result.dtype)

    if parts[0] == "mul":
        return Computation(result, (kind, kind), product)
    return Computation(result, (kind, kind, result), lambda a, b, c: product(a, b) + c)


@opcode("min", "max")
def _extreme(parts: Parts) -> Computation:
    """Take the one of two floats that is a number, with .NaN neither if one is not; -0 is below 0."""
    kind, least = type_of(parts[-1]), parts[0] == "min"
    if kind.kind != "f":
        return Computation(kind, (kind, kind), np.minimum if least else np.maximum)
    usual, strict = (np.fmin, np.minimum) if least else (np.fmax, np.maximum)
    choose, bits = strict if "NaN" in parts else usual, Type("u", kind.bits).dtype
    join = operator.or_ if least else operator.and_

    def function(a: Lanes, b: Lanes) -> Lanes:
        equal = join(a.view(bits), b.view(bits)).view(kind.dtype)
        return canonical(np.where(a == b, equal, choose(a, b)))

    return Computation(kind, (kind, kind), function)


@opcode("shl", "shr")
def _shift(parts: Parts) -> Computation:
    """Shift by any amount: all that is shifted out is gone."""
    kind, left = type_of(parts[-1]), parts[0] == "shl"
    last = kind.bits - 1

    def function(a: Lanes, amount: Lanes) -> Lanes:
        by = np.minimum(amount, last).astype(a.dtype)
        moved = a << by if left else a >> by
        return moved if kind.kind == "s" else np.where(amount > last, a.dtype.type(0), moved)

    return Computation(kind, (kind, U32), function)


@opcode("setp")
def _compare(parts: Parts) -> Computation:
    """.eq to .ge are false of a NaN, .equ to .geu true."""
    kind, name = type_of(parts[-1]), parts[1]
    plain, of_nan = (name[:-1], True) if kind.kind == "f" and name.endswith("u") else (name, False)

    def compare(a: Lanes, b: Lanes) -> Lanes:
        found = COMPARE[plain](a, b)
        return np.where((a != a) | (b != b), of_nan, found) if kind.kind == "f" else found

    return Computation(type_of("pred"), (kind, kind), compare)


@opcode("selp")
def _select(parts: Parts) -> Computation:
    bits = Type("b", type_of(parts[-1]).bits)
    return Computation(bits, (bits, bits, type_of("pred")), lambda a, b, p: np.where(p, a, b))


@opcode("bfe")
def _extract(parts: Parts) -> Computation:
    """`length` bits from `first` on; of a signed number with their last one before them.

    Past the end of a signed number is its sign, as of one in Python."""
    kind = type_of(parts[-1])

    def each(a: int, first: int, length: int) -> int:
        field = a >> first & ((1 << length) - 1)
        negative = kind.kind == "s" and length > 0 and field >> (length - 1)
        return field - (1 << length) if negative else field

    def function(a: Lanes, first: Lanes, length: Lanes) -> Lanes:
        found = [each(*map(int, values)) for values in zip(a, first & 255, length & 255, strict=True)]
        return np.array(found, kind.dtype)

    return Computation(kind, (kind, U32, U32), function)


@opcode("prmt")
def _permute(parts: Parts) -> Computation:
    """Four bytes out of the eight of two words, or their sign bits all over a byte."""

    def function(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        both = np.stack([a, b], axis=1).view(np.uint8)  # [lanes, 8]
        choice = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        found = np.take_along_axis(both, (choice & 7).astype(np.intp), axis=1)
        signs = np.where(found & 128, 255, 0).astype(np.uint8)
        return np.where(choice & 8, signs, found).view(np.uint32)[:, 0]

    return Computation(type_of("b32"), (type_of("b32"),) * 3, function)


@opcode("popc")
def _count_bits(parts: Parts) -> Computation:
    return Computation(U32, (type_of(parts[-1]),), lambda a: np.bitwise_count(a).astype(np.uint32))


@opcode("cvt")
def _convert(parts: Parts) -> Computation:
    to, of = parts[-2:]
    if to in ("bf16x2", "f16x2"):  # the first operand is the upper half
        narrow = to_bf16 if to == "bf16x2" else to_f16
        return Computation(type_of(to), (type_of(of),) * 2, lambda a, b: _halves(narrow(a), narrow(b)))
    result, source = type_of(to), type_of(of)
    if to == "bf16":
        return Computation(result, (source,), to_bf16)
    if of == "bf16":
        return Computation(result, (source,), from_bf16)
    if result.kind == "f":
        return Computation(result, (source,), lambda a: canonical(a.astype(result.dtype)))
    return Computation(result, (source,), lambda a: a.astype(result.dtype))


def to_bf16(values: Lanes) -> Lanes:
    """float32 rounded to nearest, ties to even, as the bits of bf16."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(values != values, np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_f16(values: Lanes) -> Lanes:
    return canonical(values.astype(np.float16)).view(np.uint16)


def _halves(upper: Lanes, lower: Lanes) -> Lanes:
    return upper.astype(np.uint32) << np.uint32(16) | lower


def from_bf16(bits: Lanes) -> Lanes:
    return canonical((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


SHUFFLES: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "bfly": lambda lane, by: lane ^ by,
    "idx": lambda lane, by: by,
}


@opcode("shfl")
def _shuffle(parts: Parts) -> Computation:
    """.sync of a whole warp: each lane gets the value of another."""
    source = SHUFFLES[parts[2]]

    def function(a: Lanes, by: Lanes, clamp: Lanes, members: Lanes) -> Lanes:
        _check_whole(parts, members, clamp == 31)
        return a[source(LANE, by.astype(np.int64) & 31)]

    return Computation(type_of("b32"), (type_of("b32"), U32, U32, U32), function)


@opcode("redux")
def _reduce(parts: Parts) -> Computation:
    """.sync of a whole warp: every lane gets the sum or the extreme of all."""
    kind = type_of(parts[-1])
    reduce = {"add": np.add.reduce, "min": np.min, "max": np.max}[parts[2]]

    def function(a: Lanes, members: Lanes) -> Lanes:
        _check_whole(parts, members)
        return np.full(32, reduce(a), kind.dtype)

    return Computation(kind, (kind, U32), function)


def _check_whole(parts: Parts, members: Lanes, rest: Lanes | bool = True) -> None:
    if not (np.all(members == 0xFFFFFFFF) and np.all(rest)):
        raise Unknown(f"{'.'.join(parts)} among a part of a warp")


WHOLE_WARP = ("shfl", "redux")  # which every lane of a warp has to reach at once
