"""The static account of the Triton kernels: how it is counted, and what speed it predicts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from onebit.kernels.tuning import tuner
from perf.kernels import prediction, static_account
from perf.kernels.prediction import DEVICES, Times, predicted
from perf.kernels.static_account import Row, accesses, occupancy, worse

ROOT = Path(__file__).parents[2]
H100 = DEVICES[0]
ROW = Row(
    "scan", "scan_kernel", "fp32", 8, 29, 0, 32, {"16": 2, "4": 3}, {"16": 1, "8": 1, "4": 1}, 30.0, 5, 3, 32, 2000, 1.0
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


def test_accesses_are_counted_by_width():
    assert accesses(PTX, "ld") == {"16": 2, "8": 1}
    assert accesses(PTX, "st") == {"8": 1, "1": 2}


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "expected"),
    [
        (32, 8, 0, 1.0),
        (33, 8, 0, 0.75),  # 33 * 32 is rounded up to 1280: 6 programs
        (80, 8, 0, 0.375),
        (255, 8, 0, 0.125),
        (16, 1, 0, 0.5),  # 32 programs at most
        (16, 8, 75 * 1024 - 512, 0.25),  # 76 KiB each: 2 programs
    ],
)
def test_occupancy(registers, warps, shared, expected):
    assert occupancy(registers, warps, shared) == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"registers": 30}, "registers 30, 29 before"),
        ({"spilled": 8}, "spilled 8, 0 before"),
        ({"instructions_per_element": 31.5}, "instructions_per_element 31.5, 30 before"),
        ({"barriers": 6}, "barriers 6, 5 before"),
        ({"loads_in_a_row": 4}, "loads_in_a_row 4, 3 before"),
        ({"cycles": 2001}, "cycles 2001, 2000 before"),
        ({"loads": {"16": 1, "4": 3}}, "1 loads of 16 bytes, 2 before"),
        ({"stores": {"16": 1, "8": 2, "4": 1}}, "3 narrower stores, 2 before"),
    ],
)
def test_each_figure_that_gets_worse_is_said(change, said):
    assert worse(replace(ROW, **change), ROW, same_compiler=True) == [said]
    assert worse(ROW, replace(ROW, **change), same_compiler=True) == []


def test_with_another_compiler_only_spills_and_wide_accesses_count():
    other = replace(ROW, registers=99, instructions_per_element=99.0, loads={"16": 2, "4": 9})
    assert worse(other, ROW, same_compiler=False) == []
    assert worse(replace(other, spilled=4), ROW, same_compiler=False) == ["4 bytes spilled"]
    assert worse(replace(other, stores={"4": 4}), ROW, same_compiler=False) == ["0 stores of 16 bytes, 1 before"]


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


def test_the_record_holds_every_kernel_and_no_spill_and_the_documentation_what_it_predicts():
    """So that it stays a prediction of the kernels as they are."""
    record = json.loads((ROOT / "perf/results/static-sm_90.json").read_text())
    rows = [Row(**each) for each in record["rows"]]
    assert {row.kernel for row in rows} == set(tuner.PASS_OF)
    assert not any(row.spilled for row in rows)
    assert {row.variant for row in rows} >= set(prediction.VARIANTS)
    assert prediction.table(record) in (ROOT / "docs/performance.md").read_text()


def test_what_takes_no_time_leaves_a_copy_of_the_bytes():
    assert Times(1.0, 0.0, 0.0).percent == 100
    assert Times(1.0, 1.0, 0.0).percent == pytest.approx(100 * 2**-0.25)
    assert Times(1.0, 0.5, 3.0).limit == "waiting"


def test_instructions_waits_and_room_count():
    usual = predicted([ROW], H100)
    assert usual.bytes == pytest.approx(4 / H100.copy)
    assert predicted([replace(ROW, instructions_per_element=60.0)], H100).issue == pytest.approx(2 * usual.issue)
    assert predicted([replace(ROW, occupancy=0.5)], H100).waiting == pytest.approx(2 * usual.waiting)
    assert predicted([ROW, ROW], H100).issue == pytest.approx(2 * usual.issue)  # two launches, one pass
    assert predicted([ROW, ROW], H100).bytes == usual.bytes


def test_the_command_prints_a_row_for_each_pass(tmp_path, capsys):
    rows = [replace(ROW, variant=variant) for variant in ("fp32", "bf16")]
    record = {"versions": {"triton": "3.7.1"}, "rows": [asdict(row) for row in rows]}
    (tmp_path / "static-sm_90.json").write_text(json.dumps(record))
    assert prediction.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Predicted, not measured" in printed and "| scan | " in printed
    assert prediction.main(["--out", str(tmp_path / "none")]) == 2
