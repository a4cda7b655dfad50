"""The account of machine code: the path of a whole block, and what a warp waits for on it."""

import pytest

from perf.kernels.machine_code import (
    BARRIER,
    CACHE,
    MEMORY,
    Instruction,
    bytes_in_flight,
    cycles,
    instructions,
    loads_in_a_row,
    loads_of_tiles,
    whole_block_path,
)


def listing(text):
    """As cuobjdump prints it: an address, the instruction, its encoding."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(f"        /*{16 * i:04x}*/                   {line} ;   /* 0x0 */" for i, line in enumerate(lines))


# A wide load where P0 holds, else a narrow one; the address depends on a load, and so does P0.
BRANCH = listing("""
    S2R R0, SR_TID.X
    LDG.E R2, desc[UR4][R8.64]
    LDG.E.64 R4, desc[UR4][R2.64]
    ISETP.NE.U32.AND P0, PT, R2, RZ, PT
    @!P0 BRA 0x80
    IMAD.WIDE R6, R0, 0x10, R4
    LDG.E.128 R12, desc[UR4][R6.64]
    BRA 0xa0
    LDG.E R12, desc[UR4][R4.64]
    NOP
    FADD R12, R12, R13
    EXIT
    BRA 0xc0
""")
LOOP = listing("""
    S2R R0, SR_TID.X
    @!P1 BRA 0x70
    LDG.E.U8 R6, desc[UR4][R0.64]
    LDG.E.U8 R7, desc[UR4][R0.64+0x80]
    FADD R4, R4, R6
    FADD R4, R4, R7
    @P0 BRA 0x20
    STG.E.128 desc[UR4][R8.64], R4
    EXIT
""")


def names(path):
    return [each.name for each in path]


def test_instructions_are_read_with_their_guards_and_targets():
    code = instructions(BRANCH)
    assert "NOP" not in names(code)
    assert code[4] == Instruction(0x40, "!P0", "BRA", "0x80")
    assert code[4].target == 0x80 and code[5].target is None
    assert code[6].bytes == 16 and code[8].bytes == 4 and code[10].bytes == 0


@pytest.mark.parametrize(
    ("text", "written", "read"),
    [
        ("LDG.E.128 R12, desc[UR4][R6.64+0x10]", {"R12", "R13", "R14", "R15"}, {"R6", "R7", "UR4"}),
        ("STG.E.64 desc[UR4][R6.64], R20", set(), {"R6", "R7", "UR4", "R20", "R21"}),
        ("IADD3 R2, P1, P2, R4, UR6, R5", {"R2", "P1", "P2"}, {"R4", "UR6", "R5"}),
        ("@!P3 IMAD.WIDE R6, R0.reuse, 0x10, R4", {"R6", "R7"}, {"P3", "R0", "R4"}),
        ("ISETP.NE.U32.AND P0, PT, R2, RZ, PT", {"P0"}, {"R2"}),
        ("@P0 EXIT", set(), {"P0"}),
    ],
)
def test_what_an_instruction_reads_and_writes(text, written, read):
    (each,) = instructions(listing(text))
    assert each.written() == written
    assert each.read() - each.written() >= read - written
    assert each.read() <= read | written


def test_the_path_of_a_whole_block_takes_the_wide_access_and_no_detour():
    path = whole_block_path(instructions(BRANCH))
    assert "LDG.E.128" in names(path)
    assert [each.address for each in path] == [0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xA0, 0xB0]


@pytest.mark.parametrize("messages", [1, 2, 8])
def test_a_loop_over_messages_counts_as_often_as_it_runs(messages):
    path = whole_block_path(instructions(LOOP), messages)
    assert names(path).count("LDG.E.U8") == 2 * messages
    assert names(path)[-2:] == ["STG.E.128", "EXIT"]


def test_loads_that_need_one_another_are_counted_in_a_row():
    path = whole_block_path(instructions(BRANCH))
    assert loads_of_tiles(path) == {6}  # the others have the same address for all threads
    assert loads_in_a_row(path) == 3
    waits = 2 * CACHE + MEMORY
    assert waits < cycles(path) < waits + 50


def test_bytes_are_in_flight_until_something_needs_them():
    start, load, other = "S2R R0, SR_TID.X", "LDG.E.128 R4, desc[UR4][R0.64]", "LDG.E.128 R8, desc[UR4][R0.64]"
    together = "\n".join([start, load, other, "FADD R1, R4, R8", "EXIT"])
    apart = "\n".join([start, load, "FADD R1, R4, R4", other, "FADD R1, R8, R8", "EXIT"])
    first, second = (whole_block_path(instructions(listing(text))) for text in (together, apart))
    assert (bytes_in_flight(first), bytes_in_flight(second)) == (32, 16)
    assert cycles(second) - cycles(first) == pytest.approx(MEMORY, abs=10)


def test_a_barrier_takes_its_time():
    without, with_it = ("S2R R0, SR_TID.X\nEXIT", "S2R R0, SR_TID.X\nBAR.SYNC.DEFER_BLOCKING 0x0\nEXIT")
    assert cycles(instructions(listing(with_it))) == cycles(instructions(listing(without))) + 1 + BARRIER
