"""End-to-end volume: the formula, what is made of counters, and a run in the lab."""

import json

import pytest

from perf.train_step import volume

RECORD = {
    "steps": 10, "freeze_step": 2,
    "sent": {"uncompressed 32": 3200, "onebit_adam 32": 720, "uncompressed 16": 1600, "onebit_adam 16": 500},
}  # fmt: skip


def test_the_formula() -> None:
    assert volume.formula(1.0, 32) == 1
    assert volume.formula(0.0, 16) == 16
    assert volume.formula(0.2, 32) == pytest.approx(1 / 0.225)


def test_what_is_made_of_counters() -> None:
    expected = [("fp32", pytest.approx(4.444, abs=1e-3), 3200 / 720), ("fp16", pytest.approx(4), 3.2)]
    assert volume.rows(RECORD) == expected
    both = {**RECORD, "sent": {**RECORD["sent"], "onebit_adam, reply=1 32": 800}}
    assert volume.rows(both) == [expected[0], ("fp32, reply=1", expected[0][1], 4), expected[1]]
    assert "| fp32 | 4.44 x | 4.44 x | +0.0% | yes |" in volume.table(RECORD)
    assert "| fp16 | 4.00 x | 3.20 x | -20.0% | no |" in volume.table(RECORD)


@pytest.mark.parametrize("share", ["0", "1", "-0.5"])
def test_a_share_that_is_none(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        volume.main([f"--share={share}"])
    assert "lies between 0 and 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.timeout(1200)  # its hosts share the cores with other tests
def test_a_run_in_the_lab_sends_what_the_formula_says(lab_available, tmp_path, capsys) -> None:
    out = tmp_path / "volume.json"
    assert volume.main(["--elements=600_000", "--steps=10", f"--out={out}"]) == 0, capsys.readouterr()
    sent = json.loads(out.read_text())["sent"]
    assert sent["uncompressed 32"] > 2 * 600_000 * 4 * 10  # two hosts, 2 (N - 1) / N of the gradient each
