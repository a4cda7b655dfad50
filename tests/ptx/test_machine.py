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
WORDS = "{%r5, %r6, %r7, %r8}"
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


def test_warps_exchange_values_through_shared_memory_at_a_barrier(order):
    data, races = run(EXCHANGE.format(barrier="bar.sync 0;"), order=order)
    assert data.tolist() == [*range(32, 64), *range(32)]
    assert not races


def test_without_the_barrier_there_is_a_race_whatever_the_order(order):
    _, races = run(EXCHANGE.format(barrier=""), order=order)
    assert {race[:2] for race in races} == {("shared memory", "warps")}
    assert all("st.shared" in told for *_, told in races)


def test_an_atomic_that_acquires_sees_what_others_released_one_after_another(order):
    atomic = "@%p1 atom.global.gpu.{order}.add.u32 %r7, [%rd2], 1;"
    body = LAST.replace(atomic, atomic.format(order="release") + atomic.format(order="acquire"))
    body = body.format(before="").replace("%p3, %r7, 1;", "%p3, %r7, 3;")
    data, races = run(body, order=order, programs=2)
    assert data[2] == 5 + 6 and not races


def test_lanes_of_a_warp_exchange_values_where_they_meet(order):
    exchange = EXCHANGE.replace("128", "4")
    data, races = run(exchange.format(barrier="bar.warp.sync -1;"), order=order)
    assert data.tolist() == [i ^ 1 for i in range(64)] and not races
    assert {race[:2] for race in run(exchange.format(barrier=""), order=order)[1]} == {("shared memory", "lanes")}


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("st.shared.v4.b32", "ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", "ld.shared.v4.b32"),
    ],
)
def test_words_of_a_matrix_go_to_other_lanes_than_have_its_address(store, load, order):
    """Every lane stores 16 bytes, and has the address of those alone."""
    for barrier in ("bar.warp.sync -1;", ""):
        body = f"shl.b32 %r4, %r1, 4; {store} [%r4], {WORDS}; {barrier} {load} {WORDS}, [%r4];"
        assert {race[1] for race in run(body, order=order, shared_bytes=1024)[1]} == (set() if barrier else {"lanes"})


@pytest.mark.parametrize(
    "second, racing", [("st.global.b32 [%rd1], 5;", True), ("@%p1 st.global.b32 [%rd1], 5;", False)]
)
def test_two_warps_that_store_one_place_race_also_with_the_same_value(second, racing, order):
    assert bool(run(second, order=order)[1]) == racing


@pytest.mark.parametrize(
    ("stores", "racing"),
    [
        ("st.shared.b32 [%r4], %r4;", False),  # each warp has a copy of 32 values
        ("st.shared.b32 [%r4], %r1;", True),
        ("@%p2 st.shared.b32 [%r4], 0; bar.sync 0; shr.u32 %r5, %r1, 5; st.shared.b32 [%r4], %r5;", True),
        ("@%p2 st.shared.b32 [%r4], 5; @!%p2 st.shared.b32 [%r4], 5;", True),
        ("st.shared.b32 [%r4], %r4; ld.shared.b32 %r5, [%r4+0];", True),
    ],
)
def test_copies_of_a_value_may_be_stored_to_shared_memory_by_one_instruction_alone(stores, racing, order):
    assert bool(run("and.b32 %r4, %r3, 127; " + stores, order=order)[1]) == racing


def test_the_last_program_to_add_sees_what_the_others_have_stored(order):
    body = LAST.format(before="bar.sync 0;", order="acq_rel")
    data, races = run(body, order=order, programs=2)
    assert data[2] == 5 + 6
    assert not races


def test_an_atomic_orders_what_one_lane_does_and_the_others_where_they_meet_it(order):
    meet = "bar.warp.sync -1;"
    for before, after in ((meet, meet), ("", meet), (meet, "")):
        races = run(EVERY_LANE.format(before=before, after=after), order=order, programs=2, warps=1)[1]
        assert {race[:2] for race in races} == (set() if before and after else {("data", "programs")})


@pytest.mark.parametrize("ordering", ["relaxed", "release", "acquire"])
def test_an_atomic_that_does_not_release_and_acquire_orders_nothing(ordering, order):
    _, races = run(LAST.format(before="", order=ordering), order=order, programs=2)
    assert {race[:2] for race in races} == {("data", "programs")}


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


def test_a_store_and_an_atomic_race():
    body = "@%p1 atom.global.gpu.acq_rel.add.u32 %r7, [%rd2], 1; @%p1 st.global.b32 [%rd2], 0;"
    assert {region for region, *_ in run(body, programs=2)[1]} == {"counter"}
    assert run("@%p1 atom.global.gpu.relaxed.add.u32 %r7, [%rd2], 1;", programs=2)[1] == set()
    exchanged, races = run("@%p1 atom.global.gpu.relaxed.exch.b32 %r7, [%rd1+4], 9; @%p1 st.global.b32 [%rd1], %r7;")
    assert exchanged[:2].tolist() == [0, 9] and not races


def test_accesses_of_different_widths_race_for_the_bytes_that_they_share():
    narrow = "@%p2 bra $L__A; st.global.b8 [%rd1+6], %r1; $L__A:"
    wide = "setp.ne.s32 %p3, %r1, 0; @%p3 bra $L__B; ld.global.v2.b32 {%r4, %r5}, [%rd1]; $L__B:"
    elsewhere = wide.replace("[%rd1]", "[%rd1+8]")
    assert len(run(narrow.replace("%r1;", "5;") + wide)[1]) == 1
    assert run(narrow.replace("%r1;", "5;") + elsewhere)[1] == set()


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


def test_lanes_that_a_branch_parts_meet_again(order):
    assert run(GUARDED, order=order)[0].tolist() == 32 * [1] + 32 * [2]
    parted = (
        ODD_LANES + "@%p3 bra $L__A; mov.b32 %r5, 1; bra.uni $L__B; $L__A: mov.b32 %r5, 2; $L__B: bar.warp.sync -1;"
    )
    assert run(parted + "st.global.b32 [%rd3], %r5;", order=order)[0].tolist() == 32 * [1, 2]
    ended = ODD_LANES + "@%p3 ret; st.global.b32 [%rd3], %r5;"
    assert run(ended, order=order)[0].tolist() == 32 * [7, 0]


def test_a_loop_runs_until_each_lane_is_through():
    loop = "mov.b32 %r4, 0; $L__A: add.s32 %r4, %r4, 1; setp.lt.s32 %p3, %r4, %r1; @%p3 bra $L__A;"
    assert run(loop + "st.global.b32 [%rd3], %r4;")[0].tolist() == [1, *range(1, 64)]


def test_an_argument_may_be_below_zero_and_what_nothing_was_written_to_is_nan():
    text = HEAD.replace("counter //", "counter, .param .u32 low //")
    body = (
        "ld.param.s32 %rd5, [low]; shr.s64 %rd5, %rd5, 32; cvt.u32.u64 %r5, %rd5; st.global.v2.b32 [%rd1], {%r5, %r8};"
    )
    data, kernel = np.zeros(64, np.uint32), parse(text + body + "ret; }")
    memory = Memory([Region("data", data.ctypes.data, data.nbytes)])
    Machine(kernel, [data.ctypes.data, 0, 2**32 - 9], memory, programs=1, warps=1).run()
    assert data[0] == 2**32 - 1 and np.isnan(data[1:2].view(np.float32))


def test_wide_accesses_and_narrow_ones():
    body = "@%p1 st.global.v4.b32 [%rd1+16], {%r5, %r1, %r5, %r5}; @%p1 st.global.b8 [%rd1+1], %r5; "
    before = "st.shared.b32 [%r3], %r1; bar.warp.sync -1; @!%p1 ld.shared.b32 %r5, [%r3+-4]; st.global.b32 [%rd3], %r5;"
    assert run(before, warps=1)[0][:32].tolist() == [7, *range(31)]
    data, races = run(
        body + "ld.shared.b32 %r6, [global_smem]; setp.eq.s32 %p3, %r1, 5; @%p3 st.global.b32 [%rd1+40], %r6;"
    )
    assert data[4:8].tolist() == [7, 0, 7, 7] and data[0] == 7 << 8
    assert data[10] == 0xFFFFFFFF  # what nobody has written is NaN
    signed = (
        "mov.b32 %r4, 200; @%p1 st.shared.b8 [%r3], %r4; @%p1 ld.shared.s8 %r6, [%r3]; @%p1 st.global.b32 [%rd1], %r6;"
    )
    assert run(signed)[0][0] == 2**32 - 56
    assert not races


def test_matrices_are_loaded_and_stored_row_by_row(order):
    """Lane i has the address of row i, 16 bytes, and word i % 4 of row i / 4 of each matrix; transposed, the elements
    2 (i % 4) and the next of column i / 4."""
    rows = "shl.b32 %r4, %r1, 4; st.shared.v4.b32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0; "
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r4]; @%p2 st.global.b32 [%rd3], %r6;"
    data, races = run(rows + load, order=order, shared_bytes=1024)
    assert data[:32].tolist() == [8 + i // 4 for i in range(32)] and not races
    data, _ = run(rows + load.replace(".x4", ".x4.trans"), order=order, shared_bytes=1024)
    pairs = [
        8 + 2 * (i % 4) + (9 + 2 * (i % 4) << 16) for i in range(32)
    ]  # of rows; a row has its number and 0 in turn
    assert data[:32].tolist() == [pair if i // 4 % 2 == 0 else 0 for i, pair in enumerate(pairs)]
    store = "add.s32 %r5, %r1, 64; stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r4], {%r1, %r5};"
    store += "ld.shared.b32 %r6, [%r3+128];"
    found = run(
        "and.b32 %r1, %r1, 31; shl.b32 %r4, %r1, 4; shl.b32 %r3, %r1, 2;" + store + "@%p2 st.global.b32 [%rd3], %r6;",
        warps=1,
    )[0]
    assert found[:32].tolist() == list(range(64, 96))


def test_orders_differ_and_a_seed_repeats_one():
    """Which program adds first is which gets 0."""
    body = "@%p1 atom.global.gpu.acq_rel.add.u32 %r7, [%rd2], 1; mul.wide.u32 %rd4, %r2, 4; add.s64 %rd4, %rd4, %rd1;"
    body += "@%p1 st.global.b32 [%rd4], %r7;"
    found = {name: run(body, order=name, programs=4)[0][:4].tolist() for name in ORDERS}
    assert found["forward"] == [0, 1, 2, 3] and found["backward"] == [3, 2, 1, 0] and found["odd"] == [2, 0, 3, 1]
    seeds = {tuple(run(body, order="random", programs=4, seed=seed)[0][:4].tolist()) for seed in range(8)}
    assert len(seeds) > 2
    assert (
        run(body, order="random", programs=4, seed=3)[0].tolist()
        == run(body, order="random", programs=4, seed=3)[0].tolist()
    )


def test_what_the_emulator_does_not_know_it_refuses():
    for body in (
        "bar.sync 1;",
        "bar.sync 0, 32;",
        "bar.warp.sync 1;",
        "fence.acq_rel.gpu;",
        "atom.global.cta.acq_rel.add.u32 %r7, [%rd2], 1;",
        "atom.global.gpu.acq_rel.add.s32 %r7, [%rd2], 1;",
        "atom.global.gpu.acq_rel.add.f32 %r7, [%rd2], %r7;",
        "ld.local.b32 %r5, [%r3];",
        "ld.global.nc.b32 %r5, [%rd1];",
        "ld.shared::cluster.b32 %r5, [%r3];",
        "ld.param.b32 %r5, [data+4];",
        "add.f32 %r5, %r5, %r6;",
        "add.rz.f32 %r5, %r5, %r6;",
        "add.sat.s32 %r5, %r5, %r6;",
        "add.rn.bf16x2 %r5, %r5, %r6;",
        "mul.rn.sat.f32 %r5, %r5, %r6;",
        "sqrt.approx.f32 %r5, %r6;",
        "max.bf16x2 %r5, %r5, %r6;",
        "min.xorsign.abs.f32 %r5, %r5, %r6;",
        "cvt.rz.bf16x2.f32 %r5, %r5, %r6;",
        "cvt.rn.relu.f16x2.f32 %r5, %r5, %r6;",
        "cvt.sat.s8.s32 %r5, %r6;",
        "shfl.sync.bfly.b32 %r5, %r6, 1, 15, -1;",
        "shfl.sync.bfly.b32 %r5, %r6, 1, 31, 1;",
    ):
        with pytest.raises(Unknown):
            run(body)
    for body in ("ld.global.v4.b32 {%r5, %r6}, [%rd1];", "st.global.b32 [%rd1], {%r5, %r6};"):
        with pytest.raises(Malformed, match="2 registers"):
            run(body)
    with pytest.raises(ValueError, match="overlap"):
        Memory([Region("one", 0, 8), Region("other", 4, 8)])
