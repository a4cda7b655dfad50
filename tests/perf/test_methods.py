"""The comparison of methods: what is left to run, learning rates, times to a loss, who is first, the page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from perf.methods import command, plan, report
from perf.methods.plan import ADAM_LR, FREEZE, LAMB_LR, METHODS, STEPS, all_timed
from perf.methods.report import record_path
from perf.train_step.record import Record
from perf.train_step.report import by_rate, seconds_after
from perf.train_step.variants import VARIANTS
from tests.perf.train_step_rows import ABOUT, row, run

FULL = {"fp32", "adam-1", "lamb-1", "diloco-sync"}
HALF = {"fp16", "bf16", "adam-1-bf16", "zero-one-full"}
SLOW, FAST = "55mbit", "1gbit"


def rows(link, slow=8.0, fast=0.5):
    """Every variant timed: those that send all, half of it, or little."""
    seconds = {name: slow if name in FULL else slow / 2 if name in HALF else fast for name in all_timed()}
    return [row(name, s, rate=link, nbytes=1e6 * s) for name, s in seconds.items()]


def runs(losses, seeds=2, lr=ADAM_LR):
    """Runs of methods whose losses fall from 4 to these."""
    return [
        replace(run(name, [4.0, (4.0 + loss) / 2, loss], seed=seed, steps=STEPS, freeze=FREEZE), lr=lr)
        for name, loss in losses.items()
        for seed in range(seeds)
    ]


def test_every_step_of_every_method_is_timed_once():
    names = all_timed()
    assert len(names) == len(set(names)) and set(names) > FULL | HALF
    assert plan.CLIP and not any("overlap" in VARIANTS[name].options for name in METHODS)  # which clipping ends
    for method in METHODS:
        assert set(report.steps_by_row(method, FREEZE, STEPS)) <= set(names), method
    measured = [row(name, 1.0, rate=SLOW) for name in names[:3]]
    failed = replace(row(names[3], 1.0, rate=SLOW), seconds=None)
    assert plan.rows_to_measure([*measured, failed], SLOW) == names[3:]
    assert plan.rows_to_measure(measured, FAST) == names


def test_runs_begin_with_the_usual_rate_then_others_then_all_seeds_of_the_best():
    methods = ["fp32", "lamb-2"]
    done = []

    def left():
        return {t.lr: t.runs for t in plan.to_train(done, methods, 2)}

    assert left() == {ADAM_LR: [("fp32", 0)], LAMB_LR: [("lamb-2", 0)]}
    done += runs({"fp32": 2.5}, 1) + runs({"lamb-2": 2.5}, 1, LAMB_LR)
    others = {ADAM_LR * factor: [("fp32", 0)] for factor in (0.5, 2)}
    assert left() == others | {LAMB_LR * factor: [("lamb-2", 0)] for factor in (0.5, 2)}
    done += runs({"fp32": 2.4}, 1, ADAM_LR / 2) + runs({"fp32": 2.6}, 1, ADAM_LR * 2)
    done += runs({"lamb-2": 2.6}, 1, LAMB_LR / 2) + runs({"lamb-2": 2.7}, 1, LAMB_LR * 2)
    assert left() == {ADAM_LR / 2: [("fp32", 1)], LAMB_LR: [("lamb-2", 1)]}
    done += runs({"lamb-2": 2.5}, 2, LAMB_LR)[1:]
    assert left() == {ADAM_LR / 2: [("fp32", 1)]}
    done += runs({"fp32": 2.45}, 2, ADAM_LR / 2)[1:]
    assert left() == {}
    assert [r.loss for r in plan.chosen_runs(done, "fp32")] == [2.4, 2.45]
    assert plan.mean_loss(done, "fp32") == pytest.approx(2.425) and plan.mean_loss(done, "zero-one") is None


def test_what_takes_the_steps_of_another_is_not_trained_again():
    assert [t.runs for t in plan.to_train([], ["diloco", "torchft"], 1)] == [[("diloco", 0)]]
    found = runs({"fp32": 2.2, "diloco": 2.4}, 3)
    assert plan.chosen_runs(found, "torchft") == plan.chosen_runs(found, "diloco") != []
    finishes = report.finishes({r.variant: r for r in [*rows(SLOW), row("torchft-sync", 100.0, rate=SLOW)]}, found)
    assert finishes["torchft"].run > finishes["diloco"].run
    assert "torchft" not in report.finishes({r.variant: r for r in rows(SLOW) if r.variant != "torchft-sync"}, found)


def test_the_page_has_all_that_is_there_and_is_made_again_from_the_record(tmp_path):
    pytest.importorskip("matplotlib")
    record = Record(record_path(tmp_path, "narrow", 2))
    record.add({**ABOUT, "width": 256, "layers": 8, "cpu": "Some CPU", "versions": {"torch": "2"}, "measured": "today"})
    for each in [*rows(SLOW), *rows(FAST, slow=0.7), *runs(dict.fromkeys(METHODS, 2.2))]:
        record.add(each)
    (tmp_path / report.CONCLUSION).write_text("A person's words.\n")
    status = command.main(["--report", f"--out={tmp_path}"])
    text = (tmp_path / "methods.md").read_text()
    assert status == 0 and "## Narrow model, 2 hosts" in text and "## Wide" not in text
    assert text.startswith("# Which method has trained first\n\nA person's words.\n\nWritten by")
    for method in METHODS:
        tables = 2 if method in plan.TRAINED_AS else 3  # losses, steps, times
        assert text.count(f"| {report.title_of(method)} |") == tables, method
    assert "| 700 / 500 | 8,000 / 500 |" in text and "2.200 ± 0.000" in text
    for name in ("narrow-2-hosts.png", "narrow-2-hosts-loss.png"):
        assert (tmp_path / name).exists() and f"({name})" in text
    again = Record(record.path)
    assert (again.rows, again.runs) == (record.rows, record.runs)
    again.add(replace(again.rows[0], seconds=1.0))
    assert len(again.rows) == len(record.rows) and json.loads(again.path.read_text())["rows"][-1]["seconds"] == 1.0


def test_the_page_is_up_to_date(monkeypatch):
    """docs/methods.md is what the command writes from the records as they are, and its plots are there."""
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert command.PAGE.read_text() == report.page(command.OUT, command.PAGE), "run python -m perf.methods --report"
    for record, _ in report.records(command.OUT):
        assert all(path.exists() for path in report.plot_paths(record.path).values())


def test_the_readmes_table_has_the_records_figures(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    groups = dict(by_rate(Record(record_path(command.OUT, "wide", 2)).rows))
    readme = Path("README.md").read_text(encoding="utf-8")
    for link, start in {"55mbit": "55 M", "100mbit+50ms": "100 M", "300mbit+10ms": "300 M", "1gbit": "1 G"}.items():
        names = ("fp32", "bf16", "powersgd-16-soon", "zero-one")
        seconds = [seconds_after(groups[link], name, FREEZE, STEPS) for name in names]
        cells = " | ".join(f"{each:,.0f} s" for each in seconds)
        (line,) = re.findall(rf"^\| {start}bit/s.*$", readme, re.MULTILINE)
        assert line.endswith(f"| {cells} | {seconds[1] / seconds[3]:.1f} |"), cells


def test_runs_of_other_settings_leave_a_record(tmp_path):
    arguments = command.parse_arguments([f"--out={tmp_path}"])
    (loose,) = runs({"fp32": 2.2}, seeds=1)
    record = Record(record_path(tmp_path, "narrow", 2))
    for each in (loose, replace(loose, clip=plan.CLIP), replace(loose, clip=plan.CLIP, steps=7)):
        record.add(each)
    assert command.Comparison(arguments, "narrow", 2, None).record.runs == [replace(loose, clip=plan.CLIP)]
