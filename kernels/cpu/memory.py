"""What lies at an address: numbers, bits, sixteen floats of each dtype, and runs of bytes.

Addresses are ints, as in the table of pointers. fp32 is read and written as it is; 16-bit values round to the nearest,
ties to even, as torch rounds them.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onebit.kernels.cpu.lanes import FLOAT, FLOATS, INT, LANES, LONG, PACKED, WIDTH, WORDS, intrinsic

_HALVES = ir.VectorType(ir.HalfType(), WIDTH)
_SHORTS = ir.VectorType(ir.IntType(16), WIDTH)
_DOUBLE = ir.DoubleType()
_REAL = {FLOAT: types.float32, _DOUBLE: types.float64, FLOATS: LANES}  # what is no int


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _reader(kind, widen=None, align=1):
    @intrinsic
    def read(typing_context, address):
        """What lies at an address."""

        def generate(context, builder, signature, arguments):
            value = builder.load(_at(builder, arguments[0], kind), align=align)
            return value if widen is None else getattr(builder, widen)(value, LONG)

        return _REAL.get(kind, types.int64)(types.int64), generate

    return read


def _writer(kind, align=1):
    @intrinsic
    def write(typing_context, address, value):
        """*address = value"""

        def generate(context, builder, signature, arguments):
            value = arguments[1] if kind in _REAL else builder.trunc(arguments[1], kind)
            builder.store(value, _at(builder, arguments[0], kind), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, _REAL.get(kind, types.int64)), generate

    return write


float_at, set_float = _reader(FLOAT), _writer(FLOAT)
int_at, set_int = _reader(INT, "sext"), _writer(INT)
bits_at, set_bits = _reader(PACKED, "zext"), _writer(PACKED)
long_at, set_long = _reader(LONG), _writer(LONG)
double_at, set_double = _reader(_DOUBLE), _writer(_DOUBLE)
load, store = _reader(FLOATS, align=4), _writer(FLOATS, align=4)


@intrinsic
def stream(typing_context, address, value):
    """Sixteen fp32 past the caches, to a multiple of 64: what lies there is not fetched first."""

    def generate(context, builder, signature, arguments):
        stored = builder.store(arguments[1], _at(builder, arguments[0], FLOATS), align=4 * WIDTH)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(INT, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, LANES), generate


@intrinsic
def streamed(typing_context):
    """After the last `stream`, before another thread reads."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def load_bf16(typing_context, address):
    """Sixteen bf16, which are the upper halves of fp32."""

    def generate(context, builder, signature, arguments):
        upper = builder.zext(builder.load(_at(builder, arguments[0], _SHORTS), align=2), WORDS)
        return builder.bitcast(builder.shl(upper, ir.Constant(WORDS, [16] * WIDTH)), FLOATS)

    return LANES(types.int64), generate


@intrinsic
def store_bf16(typing_context, address, value):
    """Sixteen bf16, to the nearest, ties to even; NaN stays one."""

    def generate(context, builder, signature, arguments):
        def constant(value):
            return ir.Constant(WORDS, [value] * WIDTH)

        word = builder.bitcast(arguments[1], WORDS)
        odd = builder.and_(builder.lshr(word, constant(16)), constant(1))
        rounded = builder.lshr(builder.add(word, builder.add(odd, constant(0x7FFF))), constant(16))
        nan = builder.fcmp_unordered("uno", arguments[1], arguments[1])
        short = builder.trunc(builder.select(nan, constant(0x7FC0), rounded), _SHORTS)
        builder.store(short, _at(builder, arguments[0], _SHORTS), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, LANES), generate


@intrinsic
def load_fp16(typing_context, address):
    """Sixteen fp16."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.load(_at(builder, arguments[0], _HALVES), align=2), FLOATS)

    return LANES(types.int64), generate


@intrinsic
def store_fp16(typing_context, address, value):
    """Sixteen fp16, to the nearest, ties to even."""

    def generate(context, builder, signature, arguments):
        builder.store(builder.fptrunc(arguments[1], _HALVES), _at(builder, arguments[0], _HALVES), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, LANES), generate


@intrinsic
def copy(typing_context, target, source, nbytes):
    """*target = *source"""

    def generate(context, builder, signature, arguments):
        byte = ir.IntType(8)
        to, from_ = (_at(builder, each, byte) for each in arguments[:2])
        cgutils.raw_memcpy(builder, to, from_, arguments[2], 1, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def fill(typing_context, target, byte, nbytes):
    """Every byte of the target is `byte`."""

    def generate(context, builder, signature, arguments):
        value = builder.trunc(arguments[1], ir.IntType(8))
        cgutils.memset(builder, _at(builder, arguments[0], ir.IntType(8)), arguments[2], value)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
