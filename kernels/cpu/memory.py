"""What lies at an address: numbers, bits, sixteen floats of each dtype, and runs of bytes.

Addresses are ints, as in the table of pointers. fp32 is read and written as it is; 16-bit values round to the nearest,
ties to even, as torch rounds them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onebit.kernels.cpu.lanes import FLOAT, FLOATS, INT, LANES, LONG, PACKED, WIDTH, WORDS, built

_HALVES = ir.VectorType(ir.HalfType(), WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), WIDTH)
_DOUBLE = ir.DoubleType()
_BYTE = ir.IntType(8)
_BYTES, _EIGHT_BYTES = ir.VectorType(_BYTE, WIDTH), ir.VectorType(_BYTE, WIDTH // 2)
_PAIRS = ir.VectorType(LONG, WIDTH // 2)  # of words
_REAL = {FLOAT: types.float32, _DOUBLE: types.float64, FLOATS: LANES}  # what is no int


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _whole(value, kind=WORDS):
    return ir.Constant(kind, [value] * kind.count)


def _reader(kind, widen=None, align=1):
    @built(_REAL.get(kind, types.int64), types.int64)
    def read(builder, address):
        """What lies at an address."""
        value = builder.load(_at(builder, address, kind), align=align)
        return value if widen is None else getattr(builder, widen)(value, LONG)

    return read


def _writer(kind, align=1):
    @built(types.void, types.int64, _REAL.get(kind, types.int64))
    def write(builder, address, value):
        """*address = value"""
        value = value if kind in _REAL else builder.trunc(value, kind)
        builder.store(value, _at(builder, address, kind), align=align)

    return write


float_at, set_float = _reader(FLOAT), _writer(FLOAT)
int_at, set_int = _reader(INT, "sext"), _writer(INT)
bits_at, set_bits = _reader(PACKED, "zext"), _writer(PACKED)
long_at, set_long = _reader(LONG), _writer(LONG)
double_at, set_double = _reader(_DOUBLE), _writer(_DOUBLE)
load, store = _reader(FLOATS, align=4), _writer(FLOATS, align=4)


@built(types.void, types.int64, LANES)
def stream(builder, address, value):
    """Sixteen fp32 past the caches, to a multiple of 64: what lies there is not fetched first."""
    stored = builder.store(value, _at(builder, address, FLOATS), align=4 * WIDTH)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INT, 1)]))


@built(types.void)
def streamed(builder):
    """Wait for every `stream` so far: another thread may read after this."""
    builder.fence("seq_cst")


@built(LANES, types.int64)
def load_bf16(builder, address):
    """Sixteen bf16, which are the upper halves of fp32."""
    upper = builder.zext(builder.load(_at(builder, address, _SHORTS), align=2), WORDS)
    return builder.bitcast(builder.shl(upper, _whole(16)), FLOATS)


@built(types.void, types.int64, LANES)
def store_bf16(builder, address, value):
    """Sixteen bf16, to the nearest, ties to even; NaN stays one."""

    word = builder.bitcast(value, WORDS)
    odd = builder.and_(builder.lshr(word, _whole(16)), _whole(1))
    rounded = builder.lshr(builder.add(word, builder.add(odd, _whole(0x7FFF))), _whole(16))
    nan = builder.fcmp_unordered("uno", value, value)
    short = builder.trunc(builder.select(nan, _whole(0x7FC0), rounded), _SHORTS)
    builder.store(short, _at(builder, address, _SHORTS), align=2)


@built(LANES, types.int64)
def load_fp16(builder, address):
    """Sixteen fp16."""
    return builder.fpext(builder.load(_at(builder, address, _HALVES), align=2), FLOATS)


@built(types.void, types.int64, LANES)
def store_fp16(builder, address, value):
    """Sixteen fp16, to the nearest, ties to even."""
    builder.store(builder.fptrunc(value, _HALVES), _at(builder, address, _HALVES), align=2)


@built(types.void, types.int64, LANES)
def set_bytes(builder, address, value):
    """The lowest byte of each of sixteen words."""
    found = builder.trunc(builder.bitcast(value, WORDS), _BYTES)
    builder.store(found, _at(builder, address, _BYTES), align=1)


@built(LANES, types.int64)
def bytes_at(builder, address):
    """Sixteen whole numbers of 8 bits."""
    return builder.sitofp(builder.sext(builder.load(_at(builder, address, _BYTES), align=1), WORDS), FLOATS)


@built(types.void, types.int64, LANES)
def set_nibbles(builder, address, value):
    """The lowest 4 bits of each of sixteen words, two a byte, the first in the lower half."""
    pairs = builder.bitcast(builder.and_(builder.bitcast(value, WORDS), _whole(15)), _PAIRS)
    both = builder.or_(pairs, builder.lshr(pairs, _whole(28, _PAIRS)))
    builder.store(builder.trunc(both, _EIGHT_BYTES), _at(builder, address, _EIGHT_BYTES), align=1)


@built(LANES, types.int64)
def nibbles_at(builder, address):
    """Sixteen whole numbers of 4 bits."""
    pairs = builder.zext(builder.load(_at(builder, address, _EIGHT_BYTES), align=1), _PAIRS)
    spread = builder.bitcast(builder.or_(pairs, builder.shl(pairs, _whole(28, _PAIRS))), WORDS)
    return builder.sitofp(builder.ashr(builder.shl(spread, _whole(28)), _whole(28)), FLOATS)


@built(types.void, types.int64, types.int64, types.int64)
def copy(builder, target, source, nbytes):
    """*target = *source"""
    to, from_ = (_at(builder, each, _BYTE) for each in (target, source))
    cgutils.raw_memcpy(builder, to, from_, nbytes, 1, align=1)


@built(types.void, types.int64, types.int64, types.int64)
def fill(builder, target, byte, nbytes):
    """Every byte of the target is `byte`."""
    cgutils.memset(builder, _at(builder, target, _BYTE), nbytes, builder.trunc(byte, _BYTE))
