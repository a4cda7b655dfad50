"""Sixteen floats at a time: what the compiled loops calculate with.

`Lanes` is LLVM's <16 x float>, with the arithmetic of numpy. A comparison gives sixteen bits in an int, the first lane
in the lowest place: what is compared is packed already, and `where` takes bits as they lie in a message. Addresses are
ints, as in the table of pointers. Nothing is reordered or fused: a lane rounds as torch does, whatever the machine.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import lower_builtin, models, register_model, type_callable

WIDTH = 16
ZERO = np.float32(0)
ONE = np.float32(1)
intrinsic: Any = extending.intrinsic  # what it decorates is called without its first argument
FLOAT, INT, LONG, PACKED = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(WIDTH)
FLOATS = ir.VectorType(FLOAT, WIDTH)
WORDS = ir.VectorType(INT, WIDTH)
_BITS = ir.VectorType(ir.IntType(1), WIDTH)


class Lanes(types.Type):
    def __init__(self):
        super().__init__(name="Lanes")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, FLOATS)


LANES = Lanes()
_SCALARS = (types.float32, types.float64)
_ARITHMETIC = {operator.add: "fadd", operator.sub: "fsub", operator.mul: "fmul", operator.truediv: "fdiv"}
_COMPARISONS = {operator.ge: ">=", operator.gt: ">", operator.le: "<=", operator.lt: "<"}


def _type_of(result):
    def decorated(context):
        def typer(a, b):
            known = [isinstance(t, (Lanes, types.Float)) for t in (a, b)]
            return result if all(known) and Lanes in (type(a), type(b)) else None

        return typer

    return decorated


def _lanes(builder, kind, value):
    """A number in all lanes."""
    if isinstance(kind, Lanes):
        return value
    if kind == types.float64:
        value = builder.fptrunc(value, FLOAT)
    return _splat(builder, value, FLOATS)


def _splat(builder, value, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(WORDS, [0] * WIDTH))


def _arithmetic(name):
    def lower(context, builder, signature, arguments):
        a, b = (_lanes(builder, *given) for given in zip(signature.args, arguments, strict=True))
        return getattr(builder, name)(a, b)

    return lower


def _comparison(name):
    def lower(context, builder, signature, arguments):
        a, b = (_lanes(builder, *given) for given in zip(signature.args, arguments, strict=True))
        packed = builder.bitcast(builder.fcmp_ordered(name, a, b), PACKED)
        return builder.zext(packed, LONG)

    return lower


for _operator, _name in {**_ARITHMETIC, **_COMPARISONS}.items():
    compares = _operator in _COMPARISONS
    type_callable(_operator)(_type_of(types.int64 if compares else LANES))
    for _kinds in ((LANES, LANES), *((LANES, s) for s in _SCALARS), *((s, LANES) for s in _SCALARS)):
        lower_builtin(_operator, *_kinds)((_comparison if compares else _arithmetic)(_name))


@intrinsic
def splat(typing_context, value):
    """A number in all lanes."""

    def generate(context, builder, signature, arguments):
        return _lanes(builder, signature.args[0], arguments[0])

    return LANES(value), generate


@intrinsic
def where(typing_context, bits, a, b):
    """a where a bit is 1, b elsewhere: lanes or numbers."""

    def generate(context, builder, signature, arguments):
        chosen = (_lanes(builder, *given) for given in zip(signature.args[1:], arguments[1:], strict=True))
        return builder.select(builder.bitcast(builder.trunc(arguments[0], PACKED), _BITS), *chosen)

    return LANES(types.int64, a, b), generate


def built(result, *kinds):
    """An intrinsic of these types, whose code `build(builder, *values)` writes."""

    def decorate(build):
        def typed(typing_context, *given):
            def generate(context, builder, signature, arguments):
                value = build(builder, *arguments)
                return context.get_dummy_value() if result is types.void else value

            return result(*kinds), generate

        typed.__name__, typed.__doc__, typed.__signature__ = build.__name__, build.__doc__, inspect.signature(build)
        return intrinsic(typed)

    return decorate


def _unary(name):
    @built(LANES, LANES)
    def apply(builder, value):
        kind = ir.FunctionType(FLOATS, [FLOATS])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"{name}.v{WIDTH}f32"), [value])

    return apply


@built(types.int64, LANES)
def not_zero(builder, value):
    """The bits of the lanes that are not 0, NaN included."""
    packed = builder.bitcast(builder.fcmp_unordered("!=", value, ir.Constant(FLOATS, None)), PACKED)
    return builder.zext(packed, LONG)


root = _unary("llvm.sqrt")
magnitude = _unary("llvm.fabs")


def _tree(builder, value, combine):
    """One number from all lanes: the halves, then the halves of that, in an order that never changes."""
    width = WIDTH
    while width > 1:
        width //= 2
        index = ir.VectorType(INT, width)
        low, high = (
            builder.shuffle_vector(value, value, ir.Constant(index, list(range(start, start + width))))
            for start in (0, width)
        )
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(INT, 0))


@built(types.float32, LANES)
def total(builder, value):
    """The sum of the lanes."""
    return _tree(builder, value, builder.fadd)


@built(types.float32, LANES)
def largest(builder, value):
    """The largest of the lanes, none of which may be NaN."""

    def larger(a, b):
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return _tree(builder, value, larger)


@built(types.int64, types.int64)
def ones(builder, word):
    """How many bits are 1."""
    return builder.ctpop(word)
