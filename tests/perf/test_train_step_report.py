"""The training-step benchmark's report (a link for a share, targets, tables, plots, record), and end-to-end volume."""

import json
from dataclasses import replace

import pytest
import torch

from perf.lab import processes
from perf.train_step import report, volume
from perf.train_step.benchmark import parse_arguments
from perf.train_step.measure import Row
from perf.train_step.plots import draw
from perf.train_step.record import StepRecord
from perf.train_step.variants import OURS, TRAINED
from tests import forked
from tests.perf.train_step_rows import ABOUT, ROWS, RUNS, row, run


def test_a_link_is_chosen_by_the_share_that_it_makes():
    unshaped = row("fp16", 1.0, "unshaped", share=0.4, nbytes=19e6)
    rate = report.link_for(0.93, unshaped)
    took = 8 * 19e6 / (0.956 * float(rate.removesuffix("mbit")) * 1e6)
    assert took / (0.6 + took) == pytest.approx(0.93, abs=1e-3)
    tried = replace(row("fp16", 1.0, "10mbit", share=0.95), bytes=1.0)  # 0.95 s of all-reduce, 0.05 s of work
    corrected = float(report.link_for(0.90, tried).removesuffix("mbit"))
    assert corrected == pytest.approx(10 * 0.95 / 0.45, rel=1e-2)
    with pytest.raises(ValueError, match="measure in the lab"):
        report.link_for(0.93, replace(unshaped, bytes=None))


def test_curves_are_means_over_seeds():
    runs = [run(OURS, [4.0, 2.0]), run(OURS, [5.0, 3.0], seed=1), run("fp32", [4.0, 1.0])]
    assert report.mean_curves(runs) == {OURS: [(0, 4.5), (100, 2.5)], "fp32": [(0, 4.0), (100, 1.0)]}
    text = report.loss_table(ROWS, runs)
    assert "2.5000   2.0000   3.0000" in text and text.splitlines()[-1].split()[-1] == "800"


def test_a_record_keeps_every_addition_and_the_runs_of_before(tmp_path):
    path = tmp_path / "record.json"
    record = StepRecord(path, ABOUT)
    for i, thing in enumerate([*ROWS[:2], *RUNS], 1):
        record.add(thing)
        there = StepRecord(path, ABOUT)
        assert len(there.rows) + len(there.runs) == i
    assert (there.rows, there.runs) == (ROWS[:2], RUNS)
    there = StepRecord(path, {**ABOUT, "load_before": 9})
    there.add(RUNS[0])
    assert StepRecord(path, {}).about["load_before"] == 0.5  # of the rows
    there.runs.pop()
    there.add(ROWS[3])  # of a new command: rows are measured together
    assert StepRecord(path, {}).about["load_before"] == 9
    assert (StepRecord(path, {}).rows, StepRecord(path, {}).runs) == ([ROWS[3]], RUNS)
    assert StepRecord(path, {}).about["device"] == "Some CPU"


def test_runs_that_are_there_are_not_repeated():
    arguments = parse_arguments(["--lab", "--train", "--steps=100", "--freeze=20", "--lr=1e-3", "--seeds=2"])
    lacking = [(name, 0) for name in TRAINED if name not in {run.variant for run in RUNS}]
    assert ("powersgd-4", 0) in lacking and ("zero-one", 0) in lacking
    assert report.missing(arguments, RUNS) == [*lacking, *((name, 1) for name in TRAINED)]
    others = [replace(RUNS[0], **other) for other in ({"steps": 50}, {"freeze": 9}, {"lr": 1.0}, {"clip": 1.0})]
    assert report.with_settings(arguments, [*RUNS, *others]) == RUNS


def test_a_record_is_named_after_the_machine_and_its_options(monkeypatch):
    monkeypatch.setattr(report, "device_name", lambda device: "Some CPU")
    monkeypatch.setattr(report, "cpu_name", lambda: "Some CPU")
    for options, name in (
        ("--lab --hosts=2", "-hosts-2"),
        ("--lab --share=0.9 --rates=1gbit", "-rates-1gbit-share-0-9"),
        ("--lab", ""),
        ("", "-group"),
        ("--lab --hosts=2 --name=twice", "-twice"),
    ):
        assert report.record_name(parse_arguments(options.split())) == f"train_step-some-cpu{name}"


def test_every_panel_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    record = StepRecord(tmp_path / "record.json", ABOUT)
    record.rows, record.runs = [*ROWS, Row("25mbit", "bf16", error="no bf16")], RUNS
    assert "was not measured: no bf16" in report.table(record.rows)
    made = draw(record, "title")
    assert [path.name for path in made] == ["record.png", "record-loss.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    record.rows, record.runs = [replace(r, rate=None, bytes=None) for r in ROWS], []
    assert [path.name for path in draw(record, "of a group")] == ["record.png"]


@pytest.mark.netlab
@pytest.mark.timeout(1200)  # its hosts share the cores with other tests
def test_a_run_in_the_lab_sends_what_the_formula_says(lab_available, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(processes, "subprocess", forked)
    for name, value in {"DTYPES": {32: torch.float32}, "ELEMENTS": 600_000, "STEPS": 10, "FREEZE_STEP": 2}.items():
        monkeypatch.setattr(volume, name, value)
    assert volume.main([f"--out={tmp_path}"]) == 0, capsys.readouterr()
    sent = json.loads((tmp_path / "volume.json").read_text())["sent"]
    assert sent["uncompressed 32"] > 2 * 600_000 * 4 * 10  # two hosts, 2 (N - 1) / N of the gradient each
