"""End-to-end volume: the formula, what is made of counters, and a run in the lab."""

import json

import pytest
import torch

from perf.train_step import volume

RECORD = {
    "steps": 10, "freeze_step": 2,
    "sent": {"uncompressed 32": 3200, "onebit_adam 32": 720, "uncompressed 16": 1600, "onebit_adam 16": 500},
}  # fmt: skip


def test_what_is_made_of_counters() -> None:
    assert volume.formula(1.0, 32) == 1 and volume.formula(0.0, 16) == 16
    assert volume.formula(0.2, 32) == pytest.approx(1 / 0.225)
    expected = [("fp32", pytest.approx(4.444, abs=1e-3), 3200 / 720), ("fp16", pytest.approx(4), 3.2)]
    assert volume.rows(RECORD) == expected
    both = {**RECORD, "sent": {**RECORD["sent"], "onebit_adam, reply=1 32": 800}}
    assert volume.rows(both) == [expected[0], ("fp32, reply=1", expected[0][1], 4), expected[1]]
    assert "| fp32 | 4.44 x | 4.44 x | +0.0% | yes |" in volume.table(RECORD)
    assert "| fp16 | 4.00 x | 3.20 x | -20.0% | no |" in volume.table(RECORD)


@pytest.mark.netlab
@pytest.mark.timeout(1200)  # its hosts share the cores with other tests
def test_a_run_in_the_lab_sends_what_the_formula_says(lab_available, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(volume, "DTYPES", {32: torch.float32})
    out = tmp_path / "volume.json"
    assert volume.main(["--elements=600_000", "--steps=10", f"--out={out}"]) == 0, capsys.readouterr()
    sent = json.loads(out.read_text())["sent"]
    assert sent["uncompressed 32"] > 2 * 600_000 * 4 * 10  # two hosts, 2 (N - 1) / N of the gradient each
