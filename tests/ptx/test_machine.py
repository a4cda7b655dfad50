"""Each checker of the emulator finds the fault of a small kernel in every order; the right kernel has none."""

import numpy as np
import pytest

from tests.ptx.machine import ORDERS, Machine
from tests.ptx.memory import Fault, Memory, Region
from tests.ptx.opcodes import Unknown
from tests.ptx.parse import Immediate, Malformed, Register, parse
from tests.ptx.run import uses_none

HEAD = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 data,
    .param .u64 .ptr .global .align 1 counter // a comment; with { signs
)
.reqntid 64
{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .loc 1 2 3
    ld.param.b64 %rd1, [data];
    ld.param.b64 %rd2, [counter];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    shl.b32 %r3, %r1, 2;
    mad.wide.u32 %rd3, %r1, 4, %rd1;
    setp.eq.s32 %p1, %r1, 0;
    setp.lt.s32 %p2, %r1, 32;
    mov.b32 %r5, 7;
"""
# A warp writes what the other reads.
EXCHANGE = (
    "st.shared.b32 [%r3], %r1; {barrier} xor.b32 %r4, %r3, 128; ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd3], %r5;"
)
# The program that comes last reads what the first has stored before it added to the counter.
LAST = """
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd4, %rd4, %rd1;
    add.s32 %r6, %r2, 5;
    @%p1 st.global.b32 [%rd4], %r6;
    {before}
    @%p1 atom.global.gpu.{order}.add.u32 %r7, [%rd2], 1;
    setp.eq.s32 %p3, %r7, 1;
    and.pred %p3, %p3, %p1;
    @%p3 ld.global.b32 %r8, [%rd1];
    @%p3 ld.global.b32 %r5, [%rd1+4];
    @%p3 add.s32 %r8, %r8, %r5;
    @%p3 st.global.b32 [%rd1+8], %r8;
"""
# Every lane stores; the first adds to the counter; every lane of the program that comes last reads.
EVERY_LANE = """
    mad.lo.s32 %r4, %r2, 32, %r1;
    mul.wide.u32 %rd4, %r4, 4;
    add.s64 %rd4, %rd4, %rd1;
    st.global.b32 [%rd4], %r4;
    {before}
    @%p1 atom.global.gpu.acq_rel.add.u32 %r7, [%rd2], 1;
    shfl.sync.idx.b32 %r7, %r7, 0, 31, -1;
    {after}
    setp.eq.s32 %p3, %r7, 1;
    xor.b32 %r4, %r4, 32;
    mul.wide.u32 %rd4, %r4, 4;
    add.s64 %rd4, %rd4, %rd1;
    @%p3 ld.global.b32 %r8, [%rd4];
"""
UNUSED = "ld.global.b32 %r5, [%rd1]; @%p1 st.global.b32 [%rd1], 9;"
GUARDED = "mov.b32 %r5, 1; @%p2 bra $L__A; mov.b32 %r5, 2; $L__A: st.global.b32 [%rd3], %r5;"
WORDS, MATRICES = "{%r5, %r6, %r7, %r8}", ".sync.aligned.m8n8.x4.shared.b16"
ODD_LANES = "and.b32 %r4, %r1, 1; setp.eq.s32 %p3, %r4, 1;"


def prepared(body, **options):
    """64 words, the memory that they and a counter are, and how a machine for a kernel on them is made."""
    named = {"data": np.zeros(64, np.uint32), "counter": np.zeros(1, np.uint32)}
    memory = Memory(Region(name, each.ctypes.data, each.nbytes) for name, each in named.items())
    kernel = parse(HEAD + body + "\n    ret;\n}\n.section .debug_abbrev { .b8 1 }")
    arguments = [each.ctypes.data for each in named.values()]
    shape = {"programs": 1, "warps": 2, "shared_bytes": 256, **options}
    return named, memory, kernel, lambda doubted=None: Machine(kernel, arguments, memory, **shape, doubted=doubted)


def run(body, **options):
    """What a kernel leaves in 64 words, and its conflicts."""
    named, _, kernel, made = prepared(body, **options)
    machine, data = made(), named["data"]
    machine.run()
    texts = [each.text for each in kernel.instructions]
    return data, {(each.region, each.between, each.told(texts)) for each in machine.recorder.conflicts()}


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


def test_a_kernel_is_parsed():
    kernel = parse(HEAD + "$L__A: @!%p1 bra $L__A; mov.b32 %r5, -1;}")
    assert kernel.name == "kernel" and list(kernel.parameters) == ["data", "counter"]
    assert kernel.registers == {1: 4, 32: 9, 64: 9}
    *_, branch, move = kernel.instructions
    assert (branch.guard, branch.negated) == (Register(1, 1), True)
    assert kernel.labels["$L__A"] == len(kernel.instructions) - 2
    assert move.operands == (Register(32, 5), Immediate(2**64 - 1))
    for text, message in (("", "no .entry"), (HEAD, "last brace"), (HEAD + "mov.b32 %r9, 1; @%q bra $L;}", "%q")):
        with pytest.raises(Malformed, match=message):
            parse(text)


TO_OTHER_LANES = EXCHANGE.replace("128", "4")
MEET = "bar.warp.sync -1;"
# Every lane stores 16 bytes, and has the address of those alone; the words of a matrix are other lanes'.
LOADED = f"shl.b32 %r4, %r1, 4; st.shared.v4.b32 [%r4], {WORDS}; %s ldmatrix{MATRICES} {WORDS}, [%r4];"
STORED = f"shl.b32 %r4, %r1, 4; stmatrix{MATRICES} [%r4], {WORDS}; %s ld.shared.v4.b32 {WORDS}, [%r4];"
COPIES = "and.b32 %r4, %r3, 127; "  # each warp has a copy of 32 values
AS_THE_SAME = "@%p2 st.shared.b32 [%r4], 5; @!%p2 st.shared.b32 [%r4], 5;"
BY_TWO_WARPS = "@%p2 st.shared.b32 [%r4], 0; bar.sync 0; shr.u32 %r5, %r1, 5; st.shared.b32 [%r4], %r5;"
NARROW = "@%p2 bra $L__A; st.global.b8 [%rd1+6], 5; $L__A:"
WIDE = "setp.ne.s32 %p3, %r1, 0; @%p3 bra $L__B; ld.global.v2.b32 {{%r4, %r5}}, [%rd1{more}]; $L__B:"
ADDS = "@%p1 atom.global.gpu.{order}.{does} %r7, {where};"
SHARED, TWO, MANY = "shared memory", {"programs": 2}, {"shared_bytes": 1024}
ONE = {"programs": 2, "warps": 1}
# What races: a region, and between whom. None: nothing. Then how the machine differs from the usual one.
RACES = {
    "a barrier": (EXCHANGE.format(barrier="bar.sync 0;"), None, {}),
    "no barrier": (EXCHANGE.format(barrier=""), (SHARED, "warps"), {}),
    "a barrier of lanes": (TO_OTHER_LANES.format(barrier=MEET), None, {}),
    "no barrier of lanes": (TO_OTHER_LANES.format(barrier=""), (SHARED, "lanes"), {}),
    "a matrix loaded": (LOADED.replace("%s", MEET), None, MANY),
    "a matrix loaded, no barrier": (LOADED.replace("%s", ""), (SHARED, "lanes"), MANY),
    "a matrix stored": (STORED.replace("%s", MEET), None, MANY),
    "a matrix stored, no barrier": (STORED.replace("%s", ""), (SHARED, "lanes"), MANY),
    "two warps store one value": ("st.global.b32 [%rd1], 5;", ("data", "warps"), {}),
    "one warp stores": ("@%p1 st.global.b32 [%rd1], 5;", None, {}),
    "copies": (COPIES + "st.shared.b32 [%r4], %r4;", None, {}),
    "no copies": (COPIES + "st.shared.b32 [%r4], %r1;", (SHARED, "warps"), {}),
    "copies after others": (COPIES + BY_TWO_WARPS, (SHARED, "warps"), {}),
    "copies by two instructions": (COPIES + AS_THE_SAME, (SHARED, "warps"), {}),
    "copies that are read": (COPIES + "st.shared.b32 [%r4], %r4; ld.shared.b32 %r5, [%r4];", (SHARED, "warps"), {}),
    "the last program": (LAST.format(before="bar.sync 0;", order="acq_rel"), None, TWO),
    "relaxed": (LAST.format(before="", order="relaxed"), ("data", "programs"), TWO),
    "lanes meet before and after": (EVERY_LANE.format(before=MEET, after=MEET), None, ONE),
    "lanes meet after": (EVERY_LANE.format(before="", after=MEET), ("data", "programs"), ONE),
    "lanes meet before": (EVERY_LANE.format(before=MEET, after=""), ("data", "programs"), ONE),
    "an atomic and a store": (
        ADDS.format(order="acq_rel", does="add.u32", where="[%rd2], 1") + "@%p1 st.global.b32 [%rd2], 0;",
        ("counter", "programs"),
        TWO,
    ),
    "atomics": (ADDS.format(order="relaxed", does="add.u32", where="[%rd2], 1"), None, TWO),
    "widths that meet": (NARROW + WIDE.format(more=""), ("data", "warps"), {}),
    "widths that do not meet": (NARROW + WIDE.format(more="+8"), None, {}),
}


@pytest.mark.parametrize("name", RACES)
def test_what_nothing_orders_is_a_race_whatever_the_order_of_this_run(name, order):
    body, racing, options = RACES[name]
    races = run(body, order=order, **options)[1]
    assert {race[:2] for race in races} == ({racing} if racing else set())
    assert all("st" in told for *_, told in races)


LOOP = "mov.b32 %r4, 0; $L__A: add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, %r1; @%p3 bra $L__A;"
PARTED = ODD_LANES + "@%p3 bra $L__A; mov.b32 %r5, 1; bra.uni $L__B; $L__A: mov.b32 %r5, 2; $L__B: bar.warp.sync -1;"
STORE = "st.global.b32 [%rd3], %r5;"
FIRST = "@%p1 st.global.b32 [%rd1], %r6;"
NEIGHBOUR = "st.shared.b32 [%r3], %r1; bar.warp.sync -1; @!%p1 ld.shared.b32 %r5, [%r3+-4];"
SIGNED = "mov.b32 %r4, 200; @%p1 st.shared.b8 [%r3], %r4; @%p1 ld.shared.s8 %r6, [%r3];"
VECTOR = "@%p1 st.global.v4.b32 [%rd1+16], {%r5, %r1, %r5, %r5}; @%p1 st.global.b8 [%rd1+1], %r5;"
# Lane i has the address of row i, 16 bytes, and word i % 4 of row i / 4 of each matrix; transposed, the elements
# 2 (i % 4) and the next of column i / 4, of rows that have their number and 0 in turn.
FILLED = "shl.b32 %r4, %r1, 4; st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; "
MATRIX = f"ldmatrix{MATRICES} {WORDS}, [%r4]; @%p2 st.global.b32 [%rd3], %r6;"
PAIRS = [(8 + 2 * (i % 4) + (9 + 2 * (i % 4) << 16)) * (i // 4 % 2 == 0) for i in range(32)]
INTO_ROWS = """and.b32 %r1, %r1, 31; shl.b32 %r4, %r1, 4; shl.b32 %r3, %r1, 2; add.s32 %r5, %r1, 64;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4], {%r1, %r5, %r1, %r1}; ld.shared.b32 %r6, [%r3+128];
    @%p2 st.global.b32 [%rd3], %r6;"""
EXCHANGED = ADDS.format(order="relaxed", does="exch.b32", where="[%rd1+4], 9") + "@%p1 st.global.b32 [%rd1], %r7;"
# What the first of the 64 words are afterwards.
RESULTS = {
    "words of the other warp": (EXCHANGE.format(barrier="bar.sync 0;"), [*range(32, 64), *range(32)], {}),
    "words of another lane": (TO_OTHER_LANES.format(barrier=MEET), [i ^ 1 for i in range(64)], {}),
    "a sum by the last program": (LAST.format(before="bar.sync 0;", order="acq_rel"), [5, 6, 11], TWO),
    "an exchange": (EXCHANGED, [0, 9], {}),
    "a branch of one warp": (GUARDED, 32 * [1] + 32 * [2], {}),
    "a branch parts lanes, which meet again": (PARTED + STORE, 32 * [1, 2], {}),
    "lanes that have ended": (ODD_LANES + "@%p3 ret; " + STORE, 32 * [7, 0], {}),
    "a loop runs until each lane is through": (LOOP + "st.global.b32 [%rd3], %r4;", [1, *range(1, 64)], {}),
    "an address before": (NEIGHBOUR + STORE, [7, *range(31)], {"warps": 1}),
    "wide and narrow": (VECTOR, [7 << 8, 0, 0, 0, 7, 0, 7, 7], {}),
    "shared memory is NaN": ("ld.shared.b32 %r6, [global_smem];" + FIRST, [0xFFFFFFFF], {}),
    "a byte has a sign": (SIGNED + FIRST, [2**32 - 56], {}),
    "a matrix": (FILLED + MATRIX, [8 + i // 4 for i in range(32)], MANY),
    "transposed": (FILLED + MATRIX.replace(".x4", ".x4.trans"), PAIRS, MANY),
    "a matrix is stored": (INTO_ROWS, [*range(64, 96)], {"warps": 1, **MANY}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_kernel_leaves_does_not_depend_on_the_order(name, order):
    body, wanted, options = RESULTS[name]
    assert run(body, order=order, **options)[0][: len(wanted)].tolist() == wanted


@pytest.mark.parametrize(
    "body, harmless",
    [
        (UNUSED, True),
        (UNUSED + "@%p2 bra $L__A; st.global.b32 [%rd3], %r5; $L__A:", False),
        ("ld.global.b32 %r5, [%rd1]; st.global.b32 [%rd1], 9;", False),
        (UNUSED + "setp.gt.u32 %p3, %r5, 100; @%p3 st.global.b32 [%rd1+8], 3;", False),
        (UNUSED + "shl.b32 %r5, %r5, 2; ld.shared.b32 %r4, [%r5];", False),
    ],
    ids=["unused", "stored", "two stores", "whether to store", "an address"],
)
def test_a_race_is_harmless_if_a_load_may_give_anything(body, harmless, order):
    named, memory, _, made = prepared(body, order=order)
    machine = made()
    machine.run()
    after = named["data"].copy()
    assert uses_none(machine.recorder.conflicts(), memory, made) == harmless
    assert named["data"].tolist() == after.tolist()


def test_all_stores_are_undone_in_the_reverse_order():
    data = np.arange(4, dtype=np.uint32)
    memory = Memory([Region("data", data.ctypes.data, data.nbytes)])
    for value in (7, 8):
        memory.regions[0].store(np.array([4]), np.array([[value]], np.uint32))
    assert data.tolist() == [0, 8, 2, 3] and all(each.holds() for each in memory.written()[1:])
    memory.undo()
    assert data.tolist() == [0, 1, 2, 3] and memory.written() == []


@pytest.mark.parametrize(
    "body, message",
    [
        ("ld.global.b32 %r5, [%rd3+4];", "out of bounds: 4 bytes at .* 256 bytes from the start of data"),
        ("ld.global.b32 %r5, [%rd1+-4];", "out of bounds"),
        ("st.shared.b32 [%r3+4], %r5;", "out of bounds: .* of shared memory"),
        ("ld.global.v2.b32 {%r4, %r5}, [%rd1+4];", "misaligned: 8 bytes"),
        ("ld.global.b16 %r5, [%rd1+1];", "misaligned: 2 bytes"),
        ("st.global.b32 [%rd1], %r1;", "lanes of one warp store different values to one place of data"),
        (ODD_LANES + "@%p3 bar.sync 0;", "a barrier that a part of a warp has reached"),
        (ODD_LANES + "@%p3 bar.warp.sync -1;", "a barrier that a part of a warp has reached"),
        (ODD_LANES + "@%p3 shfl.sync.bfly.b32 %r5, %r5, 1, 31, -1;", "a part of a warp shuffles"),
        (ODD_LANES + "@%p3 redux.sync.max.s32 %r5, %r5, -1;", "a part of a warp shuffles"),
        (ODD_LANES + "@%p3 bra $L__A; bar.sync 0; $L__A:", "a barrier that a part of a warp has reached"),
        ("@%p2 bra $L__A; bar.sync 0; $L__A:", "ended without the barrier"),
        ("$L__A: bra $L__A;", "does not end"),
    ],
)  # fmt: skip
def test_a_fault_stops_the_machine(body, message, order, monkeypatch):
    monkeypatch.setattr("tests.ptx.machine.TOO_MANY", 1000)
    with pytest.raises(Fault, match=message):
        run(body, order=order)


def test_an_argument_may_be_below_zero_and_what_nothing_was_written_to_is_nan():
    text = HEAD.replace("counter //", "counter, .param .u32 low //")
    body = (
        "ld.param.s32 %rd5, [low]; shr.s64 %rd5, %rd5, 32; cvt.u32.u64 %r5, %rd5; st.global.v2.b32 [%rd1], {%r5, %r8};"
    )
    data, kernel = np.zeros(64, np.uint32), parse(text + body + "ret; }")
    memory = Memory([Region("data", data.ctypes.data, data.nbytes)])
    Machine(kernel, [data.ctypes.data, 0, 2**32 - 9], memory, programs=1, warps=1).run()
    assert data[0] == 2**32 - 1 and np.isnan(data[1:2].view(np.float32))


def test_orders_differ_and_a_random_one_is_the_same_each_time():
    """Which program adds first is which gets 0."""
    body = "@%p1 atom.global.gpu.acq_rel.add.u32 %r7, [%rd2], 1; mul.wide.u32 %rd4, %r2, 4; add.s64 %rd4, %rd4, %rd1;"
    body += "@%p1 st.global.b32 [%rd4], %r7;"
    found = {name: run(body, order=name, programs=4)[0][:4].tolist() for name in ORDERS}
    assert found["forward"] == [0, 1, 2, 3] and found["backward"] == [3, 2, 1, 0] and found["odd"] == [2, 0, 3, 1]
    assert found["random"] == run(body, order="random", programs=4)[0][:4].tolist()
    assert found["random"] not in (found["forward"], found["backward"], found["odd"])


def test_operands_without_a_meaning_are_refused():
    for body in (
        "bar.sync 1;",
        "bar.sync 0, 32;",
        "bar.warp.sync 1;",
        "ld.param.b32 %r5, [data+4];",
        "shfl.sync.bfly.b32 %r5, %r6, 1, 15, -1;",
        "shfl.sync.bfly.b32 %r5, %r6, 1, 31, 1;",
        "fence.acq_rel.gpu;",
    ):
        with pytest.raises(Unknown):
            run(body)
    for body in ("ld.global.v4.b32 {%r5, %r6}, [%rd1];", "st.global.b32 [%rd1], {%r5, %r6};"):
        with pytest.raises(Malformed, match="2 registers"):
            run(body)
    with pytest.raises(ValueError, match="overlap"):
        Memory([Region("one", 0, 8), Region("other", 4, 8)])
