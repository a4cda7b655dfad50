"""Each opcode on the 32 lanes of a warp, one of which takes no part, against NumPy and Python's integers."""

import numpy as np
import pytest
import torch

from tests.ptx import forms
from tests.ptx.machine import Machine
from tests.ptx.memory import Memory, Region
from tests.ptx.opcodes import TABLE, Unknown
from tests.ptx.parse import parse

EDGES = {
    "f": [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1.0, -1.0, 1e38, 65520.0, 2.0**-24, 1 + 2.0**-8],
    "u": [0, 1, 2, 31, 32, 63, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1],
}
CANONICAL = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0xFFF8 << 48}


def lanes(dtype, seed):
    """Edges and random values, in an order of its own."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = np.concatenate([EDGES["f"], rng.normal(size=32 - len(EDGES["f"])) * 100]).astype(dtype)
    elif dtype.kind == "b":
        values = rng.random(32) < 0.5
    else:
        wide = [*EDGES["u"], *rng.integers(0, 2**63, 32 - len(EDGES["u"]), dtype=np.uint64).tolist()]
        values = np.array(wide, np.uint64).astype(dtype)
    return rng.permutation(values)


def run(body, inputs, result):
    """What a kernel of one warp leaves in %out, whose lane 7 an instruction under @%on does not reach."""
    store, width = f"b{max(8 * result.itemsize, 16)}", max(8 * result.itemsize, 16)
    buffers = [np.ascontiguousarray(each.astype(np.uint16) if each.itemsize == 1 else each) for each in inputs]
    out = np.zeros(32, f"u{width // 8}")
    everything = [*buffers, out]
    text = [f".reg .b64 %a<{len(everything)}>;", ".reg .b32 %t, %lane, %word;", ".reg .pred %on, %p<4>;"]
    text += [f".reg .b{width} %out;", "mov.u32 %lane, %tid.x;", f"mov.b{width} %out, 77;"]
    text += ["setp.ne.s32 %on, %lane, 7;"]
    for i, each in enumerate(everything):
        text += [f"ld.param.b64 %a{i}, [p{i}];", f"mad.wide.u32 %a{i}, %lane, {each.itemsize}, %a{i};"]
    for i, (each, of) in enumerate(zip(buffers, inputs, strict=True)):
        bits = 8 * each.itemsize
        text += [f".reg .b{bits} %v{i};", f"ld.global.b{bits} %v{i}, [%a{i}];"]
        if of.dtype == bool:
            text += [f"setp.ne.b16 %p{i}, %v{i}, 0;"]
    text += [body, f"st.global.{store} [%a{len(buffers)}], %out;", "ret;"]
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(everything)))
    kernel = parse(f".visible .entry kernel({parameters}) {{\n" + "\n".join(text) + "\n}")
    memory = Memory(Region(f"buffer {i}", each.ctypes.data, each.nbytes) for i, each in enumerate(everything))
    Machine(kernel, [each.ctypes.data for each in everything], memory, programs=1, warps=1).run()
    assert out[7] == 77
    return out


def bits(values):
    """Turn values into unsigned integers of 16 bits at least; NaN as the GPU makes it."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        raw = values.view(f"u{values.itemsize}")
        return np.where(np.isnan(values), CANONICAL[values.itemsize], raw).astype(raw.dtype)
    if values.dtype == bool:
        return values.astype(np.uint16)
    return values.view(f"u{values.itemsize}") if values.itemsize > 1 else values.astype(np.uint16)


def ints(nbytes, function):
    """Lane by lane in Python's integers, cut to so many bytes."""

    def compute(*values):
        return np.array(
            [function(*map(int, each)) % 2 ** (8 * nbytes) for each in zip(*values, strict=True)], f"u{nbytes}"
        )

    return compute


def bf16(values):
    return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def of_bf16(raw):
    return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16).float().numpy()


def f16x2(upper, lower):
    return bits(lower.astype("f2")) | bits(upper.astype("f2")).astype("u4") << 16


def small(a):
    """An amount to shift by: 0 to 70."""
    return (a % 71).astype(np.uint32)


def permuted(a, b, selector):
    source, found = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], []
    for i in range(4):
        place = selector >> 4 * i & 15
        byte = source[place & 7]
        found.append((255 if byte & 128 else 0) if place & 8 else byte)
    return int.from_bytes(bytes(found), "little")


def smallest(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def largest(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def flush(values):
    return np.where(np.abs(values) < 2.0**-126, np.copysign(np.float32(0), values), values)


# What is written, dtypes of the operands, what NumPy says.
ROWS = [
    ("add.rn.f32 %out, %v0, %v1", "f4 f4", lambda a, b: a + b),
    ("sub.rn.f32 %out, %v0, %v1", "f4 f4", lambda a, b: a - b),
    ("mul.rn.f32 %out, %v0, %v1", "f4 f4", lambda a, b: a * b),
    ("div.rn.f32 %out, %v0, %v1", "f4 f4", lambda a, b: a / b),
    ("mul.rn.ftz.f32 %out, %v0, %v1", "f4 f4", lambda a, b: flush(flush(a) * flush(b))),
    ("sqrt.rn.f32 %out, %v0", "f4", np.sqrt),
    ("sqrt.rn.ftz.f32 %out, %v0", "f4", lambda a: np.sqrt(flush(a))),
    ("add.rn.f64 %out, %v0, %v1", "f8 f8", lambda a, b: a + b),
    ("mul.rn.f64 %out, %v0, %v1", "f8 f8", lambda a, b: a * b),
    ("div.rn.f64 %out, %v0, %v1", "f8 f8", lambda a, b: a / b),
    ("sqrt.rn.f64 %out, %v0", "f8", np.sqrt),
    ("abs.f32 %out, %v0", "f4", np.abs),
    ("neg.f32 %out, %v0", "f4", np.negative),
    ("min.f32 %out, %v0, %v1", "f4 f4", smallest),
    ("max.f32 %out, %v0, %v1", "f4 f4", largest),
    ("min.NaN.f32 %out, %v0, %v0", "f4", lambda a: a),
    ("add.s16 %out, %v0, %v1", "u2 u2", lambda a, b: a + b),
    ("add.s16x2 %out, %v0, %v1", "u4 u4", lambda a, b: (a.view("u2") + b.view("u2")).view("u4")),
    ("add.s32 %out, %v0, %v1", "u4 u4", ints(4, lambda x, y: x + y)),
    ("add.s64 %out, %v0, -8", "u8", ints(8, lambda x: x - 8)),
    ("sub.s32 %out, %v0, %v1", "u4 u4", ints(4, lambda x, y: x - y)),
    ("sub.s64 %out, %v0, %v1", "u8 u8", ints(8, lambda x, y: x - y)),
    ("neg.s64 %out, %v0", "u8", ints(8, lambda x: -x)),
    ("mul.lo.s32 %out, %v0, %v1", "i4 i4", ints(4, lambda x, y: x * y)),
    ("mul.lo.s64 %out, %v0, %v1", "i8 i8", ints(8, lambda x, y: x * y)),
    ("mul.hi.u32 %out, %v0, %v1", "u4 u4", ints(4, lambda x, y: x * y >> 32)),
    ("mul.hi.s32 %out, %v0, %v1", "i4 i4", ints(4, lambda x, y: x * y >> 32)),
    ("mul.hi.s64 %out, %v0, %v1", "i8 i8", ints(8, lambda x, y: x * y >> 64)),
    ("mul.wide.s32 %out, %v0, %v1", "i4 i4", ints(8, lambda x, y: x * y)),
    ("mul.wide.u32 %out, %v0, %v1", "u4 u4", ints(8, lambda x, y: x * y)),
    ("mad.wide.s32 %out, %v0, %v1, %v2", "i4 i4 i8", ints(8, lambda x, y, z: x * y + z)),
    ("mad.wide.u32 %out, %v0, 40, %v1", "u4 u8", ints(8, lambda x, z: x * 40 + z)),
    ("mad.lo.s64 %out, %v0, 40, %v1", "i8 i8", ints(8, lambda x, z: x * 40 + z)),
    ("min.s32 %out, %v0, %v1", "i4 i4", np.minimum),
    ("max.s64 %out, %v0, %v1", "i8 i8", np.maximum),
    ("max.u32 %out, %v0, %v1", "u4 u4", np.maximum),
    ("and.b32 %out, %v0, %v1", "u4 u4", lambda a, b: a & b),
    ("or.b64 %out, %v0, %v1", "u8 u8", lambda a, b: a | b),
    ("xor.b32 %out, %v0, 0x80000000", "u4", lambda a: a ^ np.uint32(1 << 31)),
    ("not.b32 %out, %v0", "u4", np.invert),
    ("shl.b32 %out, %v0, %v1", "u4 small", ints(4, lambda x, y: x << y)),
    ("shl.b16 %out, %v0, %v1", "u2 small", ints(2, lambda x, y: x << y)),
    ("shl.b64 %out, %v0, %v1", "u8 small", ints(8, lambda x, y: x << y)),
    ("shr.u32 %out, %v0, %v1", "u4 small", ints(4, lambda x, y: x >> y)),
    ("shr.u64 %out, %v0, %v1", "u8 small", ints(8, lambda x, y: x >> y)),
    ("shr.s32 %out, %v0, %v1", "i4 small", ints(4, lambda x, y: x >> y)),
    ("shr.s64 %out, %v0, %v1", "i8 small", ints(8, lambda x, y: x >> y)),
    ("bfe.u32 %out, %v0, 7, 3", "u4", lambda a: a >> 7 & 7),
    ("bfe.u32 %out, %v0, 0, 32", "u4", lambda a: a),
    ("bfe.u32 %out, %v0, 28, 8", "u4", lambda a: a >> 28),
    ("bfe.s32 %out, %v0, 7, 5", "i4", lambda a: (a << 20) >> 27),
    ("bfe.s32 %out, %v0, 40, 5", "i4", lambda a: a >> 31),
    ("bfe.s32 %out, %v0, 24, 40", "i4", lambda a: a >> 24),
    ("bfe.s32 %out, %v0, 7, 0", "i4", lambda a: 0 * a),
    ("prmt.b32 %out, %v0, %v1, 0x5410U", "u4 u4", ints(4, lambda x, y: permuted(x, y, 0x5410))),
    ("prmt.b32 %out, %v0, %v1, 0xbf3aU", "u4 u4", ints(4, lambda x, y: permuted(x, y, 0xBF3A))),
    ("popc.b32 %out, %v0", "u4", ints(4, lambda x: x.bit_count())),
    ("selp.f32 %out, %v0, %v1, %p2", "f4 f4 b1", lambda a, b, p: np.where(p, a.view("u4"), b.view("u4"))),
    ("selp.b16 %out, %v0, 5, %p1", "u2 b1", lambda a, p: np.where(p, a, 5).astype("u2")),
    ("mov.b32 %out, %v0", "f4", lambda a: a.view("u4")),
    ("mov.b32 %out, 0f3F800000", "", lambda: np.full(32, 1, "f4")),
    ("mov.u32 %out, %tid.x", "", lambda: np.arange(32, dtype="u4")),
    ("mov.u32 %out, %ctaid.x", "", lambda: np.zeros(32, "u4")),
    ("mov.b32 %out, {%v0, %v1}", "u2 u2", lambda a, b: a | b.astype("u4") << 16),
    ("mov.b32 {_, %out}, %v0", "u4", lambda a: (a >> 16).astype("u2")),
    ("mov.b64 {%out, _}, %v0", "u8", lambda a: a.astype("u4")),
    ("cvt.s64.s32 %out, %v0", "i4", lambda a: a.astype("i8")),
    ("cvt.u64.u32 %out, %v0", "u4", lambda a: a.astype("u8")),
    ("cvt.u32.u64 %out, %v0", "u8", lambda a: a.astype("u4")),
    ("cvt.u16.u32 %out, %v0", "u4", lambda a: a.astype("u2")),
    ("cvt.u32.u16 %out, %v0", "u2", lambda a: a.astype("u4")),
    ("cvt.s32.s8 %out, %v0", "u2", lambda a: a.astype("i1").astype("i4")),
    ("cvt.rn.f32.s32 %out, %v0", "i4", lambda a: a.astype("f4")),
    ("cvt.rn.f32.u32 %out, %v0", "u4", lambda a: a.astype("f4")),
    ("cvt.rn.f32.u64 %out, %v0", "u8", lambda a: a.astype("f4")),
    ("cvt.rn.f64.s64 %out, %v0", "i8", lambda a: a.astype("f8")),
    ("cvt.f64.f32 %out, %v0", "f4", lambda a: a.astype("f8")),
    ("cvt.rn.f32.f64 %out, %v0", "f8", lambda a: a.astype("f4")),
    ("cvt.f32.f16 %out, %v0", "f2", lambda a: a.astype("f4")),
    ("cvt.f32.bf16 %out, %v0", "u2", of_bf16),
    ("cvt.rn.f16.f32 %out, %v0", "f4", lambda a: a.astype("f2")),
    ("cvt.rn.bf16.f32 %out, %v0", "f4", lambda a: np.where(np.isnan(a), 0x7FFF, bf16(a)).astype("u2")),
    ("cvt.rn.f16x2.f32 %out, %v0, %v1", "f4 f4", f16x2),
    ("cvt.rn.bf16x2.f32 %out, %v0, %v0", "f4", lambda a: np.where(np.isnan(a), 0x7FFF, bf16(a)).astype("u4") * 0x10001),
    ("and.pred %p3, %p0, %p1", "b1 b1", lambda p, q: p & q),
    ("or.pred %p3, %p0, %p1", "b1 b1", lambda p, q: p | q),
    ("xor.pred %p3, %p0, %p1", "b1 b1", lambda p, q: p ^ q),
    ("not.pred %p3, %p0", "b1", lambda p: ~p),
    ("mov.pred %p3, %p0", "b1", lambda p: p),
    ("mov.pred %p3, -1", "", lambda: np.ones(32, bool)),
    ("shfl.sync.bfly.b32 %word, %v0, 4, 31, -1", "u4", lambda a: a[np.arange(32) ^ 4]),
    ("shfl.sync.idx.b32 %word, %v0, 3, 31, -1", "u4", lambda a: np.full(32, a[3])),
    ("redux.sync.add.s32 %word, %v0, -1", "u4", lambda a: np.full(32, a.sum(dtype="u4"))),
    ("redux.sync.max.s32 %word, %v0, -1", "i4", lambda a: np.full(32, a.max())),
    ("redux.sync.min.u32 %word, %v0, -1", "u4", lambda a: np.full(32, a.min())),
    ("setp.eq.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: a == b),
    ("setp.neu.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: a != b),
    ("setp.ne.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: (a < b) | (a > b)),
    ("setp.lt.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: a < b),
    ("setp.gt.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: a > b),
    ("setp.ge.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: a >= b),
    ("setp.geu.f32 %p3, %v0, %v1", "f4 f4", lambda a, b: ~(a < b)),
    ("setp.eq.b32 %p3, %v0, %v1", "u4 u4", lambda a, b: a == b),
    ("setp.ne.b64 %p3, %v0, %v1", "u8 u8", lambda a, b: a != b),
    ("setp.lt.s32 %p3, %v0, %v1", "i4 i4", lambda a, b: a < b),
    ("setp.lt.u32 %p3, %v0, %v1", "u4 u4", lambda a, b: a < b),
    ("setp.gt.s64 %p3, %v0, %v1", "i8 i8", lambda a, b: a > b),
    ("setp.gt.u64 %p3, %v0, %v1", "u8 u8", lambda a, b: a > b),
    ("setp.ge.s32 %p3, %v0, %v1", "i4 i4", lambda a, b: a >= b),
]  # fmt: skip
OUT = {"%p3": "selp.b16 %out, 1, 0, %p3", "%word": "mov.b32 %out, %word"}  # how a result elsewhere comes into %out


def operands(dtypes):
    """Some lanes of two operands are equal, and zeros meet zeros of the other sign."""
    found = [lanes("u4" if each == "small" else each, i) for i, each in enumerate(dtypes.split())]
    if len(found) > 1 and found[0].dtype == found[1].dtype:
        found[1][::3] = found[0][::3]
    if dtypes.startswith("f4 f4"):
        found[1] = np.where(found[0] == 0, -found[0], found[1])
    return [small(each) if kind == "small" else each for each, kind in zip(found, dtypes.split(), strict=True)]


@pytest.mark.parametrize("text, dtypes, expected", ROWS, ids=[row[0] for row in ROWS])
def test_an_opcode_computes_what_numpy_does(text, dtypes, expected):
    given = operands(dtypes)
    with np.errstate(all="ignore"):
        wanted = expected(*given)
    into = next((into for where, into in OUT.items() if f" {where}," in text), "")
    found = run(f"{text}; @%on {into};" if into else f"@%on {text};", given, wanted)
    others = np.arange(32) != 7
    assert found[others].tolist() == bits(wanted)[others].tolist()


REFUSED = """
    fence.acq_rel.gpu atom.global.cta.acq_rel.add.u32 atom.global.gpu.acquire.add.u32 atom.global.gpu.acq_rel.add.s32
    atom.global.gpu.acq_rel.add.f32 ld.local.b32 ld.global.nc.b32 ld.shared::cluster.b32 add.f32 add.rz.f32 add.sat.s32
    add.rn.bf16x2 mul.rn.sat.f32 sqrt.approx.f32 max.bf16x2 min.xorsign.abs.f32 cvt.rz.bf16x2.f32 cvt.rn.relu.f16x2.f32
    cvt.sat.s8.s32 ex2.approx.f32 div.full.f32 div.s32 cvt.rzi.s32.f32 cvt.f16.f32 add.f128 setp.foo.f32 setp.lt.and.s32
"""


def test_every_opcode_is_in_a_test_and_one_without_a_meaning_is_refused():
    assert set(TABLE) == {row[0].split(".")[0] for row in ROWS}
    for text in REFUSED.split():
        with pytest.raises(Unknown, match=text):
            forms.check(text)
