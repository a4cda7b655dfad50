"""The benchmark of a whole step: every optimizer is timed in its stage, and targets are ratios of one run's times."""

import json

import pytest

from onebit import OneBitAdam, OneBitLamb
from perf.optimizer_step import benchmark
from perf.optimizer_step.benchmark import FOREACH, FUSED, LOCAL, STAGE_1, STAGE_2, Row

SMALL = {"large": ("a few elements", [3000, 5]), "many": ("some tensors", [20] * 10)}


def test_a_run_writes_a_table_a_record_and_a_plot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(benchmark, "MODELS", SMALL)
    assert benchmark.main(["--rounds", "2", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    record, text = json.loads(path.read_text()), capsys.readouterr().out
    assert path.with_suffix(".png").exists() and "a few elements" in text and "some tensors" in text
    names = [FUSED, FOREACH, *(f"1-bit {o}, {s}" for o in ("Adam", "LAMB") for s in (STAGE_1, STAGE_2, LOCAL))]
    assert [(r["model"], r["step"]) for r in record["rows"]] == [(m, n) for m in SMALL for n in names]
    assert all(row["seconds"] > 0 for row in record["rows"]) and len(record["targets"]) == 4


def test_each_step_is_of_the_stage_that_it_is_named_after():
    steps = benchmark.steps([300, 7])
    for name, kind in {"1-bit Adam": OneBitAdam, "1-bit LAMB": OneBitLamb}.items():
        for stage, compressing in ((STAGE_1, False), (STAGE_2, True)):
            optimizer = steps[f"{name}, {stage}"].__self__
            optimizer.step()
            assert type(optimizer) is kind and optimizer.compressing is compressing


def test_targets_are_ratios_of_times():
    seconds = {FUSED: 1.0, f"1-bit Adam, {STAGE_1}": 1.2, f"1-bit Adam, {LOCAL}": 1.8}
    rows = [Row("large", step, time) for step, time in seconds.items()]
    first, second = benchmark.targets(rows)
    assert first.met and first.reached == pytest.approx(1 / 1.2)
    assert not second.met and second.needed == pytest.approx(1 / 1.7)
