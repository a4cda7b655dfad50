"""The static account of the Triton kernels: what is counted in PTX and machine code."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from onebit.kernels.tuning import tuner
from perf.kernels import machine_code, static_account
from perf.kernels.machine_code import BARRIER, CACHE, MEMORY, Instruction, cycles, instructions, whole_block_path
from perf.kernels.static_account import Row, accesses, occupancy, worse

ROOT = Path(__file__).parents[2]
ROW = Row(
    "scan", "scan_kernel", "fp32", 8, 29, 0, 32, {"16": 2, "4": 3}, {"16": 1, "8": 1, "4": 1}, 30.0, 5, 3, 2000, 1.0
)  # fmt: skip
PTX = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.v2.b64 { %rd8, %rd9 }, [ %rd1 + 0 ];
    ld.global.b64 { %rd3 }, [ %rd2 + 0 ];
    ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
    st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };
    st.global.b8 [ %rd1 + 0 ], { %rs1 };
    st.global.b8 [ %rd1 + 1 ], { %rs1 };
"""


def test_accesses_by_width_and_occupancy_are_counted():
    assert accesses(PTX, "ld") == {"16": 2, "8": 1}
    assert accesses(PTX, "st") == {"8": 1, "1": 2}
    for registers, warps, shared, expected in (
        (32, 8, 0, 1.0),
        (33, 8, 0, 0.75),  # 33 * 32 is rounded up to 1280: 6 programs
        (80, 8, 0, 0.375),
        (255, 8, 0, 0.125),
        (16, 1, 0, 0.5),  # 32 programs at most
        (16, 8, 75 * 1024 - 512, 0.25),  # 76 KiB each: 2 programs
    ):
        assert occupancy(registers, warps, shared) == expected


def test_each_figure_that_gets_worse_is_said():
    """Only spills and wide accesses count with another compiler."""
    for change, said, always in (
        ({"registers": 30}, "registers 30, 29 before", None),
        ({"spilled": 8}, "spilled 8, 0 before", "8 bytes spilled"),
        ({"instructions_per_element": 31.5}, "instructions_per_element 31.5, 30 before", None),
        ({"barriers": 6}, "barriers 6, 5 before", None),
        ({"loads_in_a_row": 4}, "loads_in_a_row 4, 3 before", None),
        ({"cycles": 2001}, "cycles 2001, 2000 before", None),
        ({"loads": {"16": 1, "4": 3}}, "1 loads of 16 bytes, 2 before", "1 loads of 16 bytes, 2 before"),
        ({"stores": {"16": 1, "8": 2, "4": 1}}, "3 narrower stores, 2 before", None),
    ):
        other = replace(ROW, **change)
        assert worse(other, ROW, same_compiler=True) == [said]
        assert worse(other, ROW, same_compiler=False) == ([always] if always else [])
        assert worse(ROW, other, same_compiler=True) == []


def test_the_command_writes_a_record_and_compares_with_it(monkeypatch, tmp_path, capsys):
    rows = [ROW, replace(ROW, name="decode", kernel="decode_kernel")]
    monkeypatch.setattr(static_account, "account", lambda progress: rows)
    out = ["--out", str(tmp_path)]
    assert static_account.main(out) == 0
    record = json.loads((tmp_path / "static-sm_90.json").read_text())
    assert record["rows"] == [asdict(row) for row in rows]
    assert record["versions"]["triton"] == static_account.triton_version()
    assert static_account.main([*out, "--check"]) == 0
    rows[1] = replace(rows[1], registers=64)
    assert static_account.main([*out, "--check"]) == 1
    assert "decode_kernel (decode; fp32): registers 64, 29 before" in capsys.readouterr().out
    rows[1] = replace(rows[1], variant="fp8", registers=29)
    assert static_account.main([*out, "--check"]) == 1
    assert "decode_kernel (decode; fp8): not in the record" in capsys.readouterr().out
    monkeypatch.setattr(static_account, "triton_version", lambda: "another")
    rows[1] = replace(rows[0], registers=64)
    assert static_account.main([*out, "--check"]) == 0


def test_the_record_holds_every_kernel_and_no_spill():
    record = json.loads((ROOT / "perf/results/static-sm_90.json").read_text())
    rows = [Row(**each) for each in record["rows"]]
    assert {row.kernel for row in rows} == set(tuner.PASS_OF)
    assert not any(row.spilled for row in rows)
    assert {row.variant for row in rows} >= {"fp32", "bf16"}


def listing(text):
    """Write instructions as cuobjdump prints them: an address, the instruction, its encoding."""
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


def test_instructions_are_read_with_their_guards_targets_and_registers():
    code = instructions(BRANCH)
    assert "NOP" not in names(code)
    assert code[4] == Instruction(0x40, "!P0", "BRA", "0x80")
    assert code[4].target == 0x80 and code[5].target is None
    assert code[6].bytes == 16 and code[8].bytes == 4 and code[10].bytes == 0
    for text, written, read in (
        ("LDG.E.128 R12, desc[UR4][R6.64+0x10]", {"R12", "R13", "R14", "R15"}, {"R6", "R7", "UR4"}),
        ("STG.E.64 desc[UR4][R6.64], R20", set(), {"R6", "R7", "UR4", "R20", "R21"}),
        ("IADD3 R2, P1, P2, R4, UR6, R5", {"R2", "P1", "P2"}, {"R4", "UR6", "R5"}),
        ("@!P3 IMAD.WIDE R6, R0.reuse, 0x10, R4", {"R6", "R7"}, {"P3", "R0", "R4"}),
        ("ISETP.NE.U32.AND P0, PT, R2, RZ, PT", {"P0"}, {"R2"}),
        ("@P0 EXIT", set(), {"P0"}),
    ):
        (each,) = instructions(listing(text))
        assert each.written() == written
        assert read - written <= each.read() - written and each.read() <= read | written


def test_the_path_of_a_whole_block_takes_the_wide_access_and_no_detour():
    path = whole_block_path(instructions(BRANCH))
    assert [each.address for each in path] == [0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xA0, 0xB0]
    assert machine_code.loads_of_tiles(path) == {6}  # the others have the same address for all threads
    assert machine_code.loads_in_a_row(path) == 3  # those that need one another
    waits = 2 * CACHE + MEMORY
    assert waits < cycles(path) < waits + 50


def test_loads_of_tiles_are_wide_or_of_packed_bits():
    for name, of_a_tile in (("U8", True), ("U16", True), ("64", True), ("128", True), ("32", False)):
        path = instructions(listing(f"S2R R0, SR_TID.X\nLDG.E.{name} R4, desc[UR4][R0.64]\nEXIT"))
        assert machine_code.loads_of_tiles(path) == ({1} if of_a_tile else set()), name


def test_a_loop_over_more_messages_than_there_are_is_passed_by():
    assert names(whole_block_path(instructions(LOOP))) == ["S2R", "BRA", "STG.E.128", "EXIT"]


def test_cycles_are_of_what_waits_for_what():
    start, load, other = "S2R R0, SR_TID.X", "LDG.E.128 R4, desc[UR4][R0.64]", "LDG.E.128 R8, desc[UR4][R0.64]"
    together = "\n".join([start, load, other, "FADD R1, R4, R8", "EXIT"])
    apart = "\n".join([start, load, "FADD R1, R4, R4", other, "FADD R1, R8, R8", "EXIT"])
    first, second = (whole_block_path(instructions(listing(text))) for text in (together, apart))
    assert cycles(second) - cycles(first) == pytest.approx(MEMORY, abs=10)
    without, with_it = ("S2R R0, SR_TID.X\nEXIT", "S2R R0, SR_TID.X\nBAR.SYNC.DEFER_BLOCKING 0x0\nEXIT")
    assert cycles(instructions(listing(with_it))) == cycles(instructions(listing(without))) + 1 + BARRIER
