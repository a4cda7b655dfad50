"""What counts as a fault in a kernel's text, one of each kind."""

from tests.ptx.mutants import SOME, mutants_of

TEXT = """
    bar.sync 	0;
    bar.warp.sync 	-1;
    @%p3 atom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;
    @!%p4 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
    @%p5 st.shared.b32 [ %r1 + 0 ], %r2;
    min.s64 	%rd2, %rd36, %rd37;
    redux.sync.max.s32 %r3, %r4, %r5;
"""


def test_each_kind_of_fault_is_put_in_and_changes_nothing_else():
    mutants = list(mutants_of(TEXT))
    lines, changed = TEXT.splitlines(), [mutant.applied(TEXT).splitlines() for mutant in mutants]
    found = [
        (m.kind, *(new.split() for old, new in zip(lines, each, strict=True) if new != old))
        for m, each in zip(mutants, changed, strict=True)
    ]
    assert found == [
        ("barrier", []),
        ("barrier", []),
        ("order", ["@%p3", "atom.global.gpu.relaxed.add.u32", "%r1,", "[", "%rd1", "+", "0", "],", "%r2;"]),
        ("mask", ["ld.global.v2.b32", "{", "%r1,", "%r2", "},", "[", "%rd1", "+", "0", "];"]),
        ("clamp", ["mov.b64", "%rd2,", "%rd36;"]),
    ]
    assert mutants[4].line(TEXT) == "min.s64 %rd2, %rd36, %rd37;"
    assert [m.kind for m in mutants_of(20 * TEXT)].count("barrier") == 40
    assert [m.kind for m in mutants_of(20 * TEXT)].count("mask") == SOME
