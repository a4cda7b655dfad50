"""The speed that the static account predicts."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from perf.kernels import prediction
from perf.kernels.prediction import DEVICES, Times, predicted
from perf.kernels.static_account import Row
from tests.perf.test_static_account import ROW

ROOT = Path(__file__).parents[2]
H100 = DEVICES[0]


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


def test_the_table_of_the_documentation_is_what_the_record_predicts():
    """So that it stays a prediction of the kernels as they are."""
    record = json.loads((ROOT / "perf/results/static-sm_90.json").read_text())
    assert {Row(**each).variant for each in record["rows"]} >= set(prediction.VARIANTS)
    assert prediction.table(record) in (ROOT / "docs/performance.md").read_text()
