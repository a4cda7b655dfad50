"""The benchmark of the training step: its parts, the link for a share, what is kept, no figure from a wrong result."""

import contextlib
import io
import json
import time
from dataclasses import replace

import pytest
import torch

from onebit.collectives.transport.torch import TorchWork
from onebit.parallel.ddp_hook import local
from perf.all_reduce.ranks import Ranks, WrongResult
from perf.lab.network import LabUnavailable, NetworkLab, RankFailed
from perf.train_step import benchmark as train_step
from perf.train_step import ranks as train_step_ranks
from perf.train_step import report as train_step_report
from perf.train_step.plots import draw
from perf.train_step.ranks import Bench, Row, Run
from perf.train_step.report import Record
from perf.train_step.variants import OURS, TRAINED, VARIANTS, Shape, Watched
from tests.ranks import run_ranks_once

CPU = torch.device("cpu")
SMALL = ["--width=32", "--layers=1", "--batch=1", "--repeats=1"]
ABOUT = {"device": "Some CPU", "cpu_count": 2, "ranks": 4, "backend": "gloo", "elements": 9, "load_before": 0.5}


def silent(text):
    pass


def row(variant, seconds, rate="25mbit", share=0.93, nbytes=19e6, **other):
    local = (1 - share) * seconds
    parts = {"forward": 0.2 * local, "backward": 0.5 * local, "step": 0.3 * local, "all_reduce": share * seconds}
    return Row(rate, variant, seconds, (seconds,), bytes=nbytes, **{**parts, **other})


def run(variant, losses, seed=0, steps=100, freeze=20):
    curve = tuple((round(i * steps / (len(losses) - 1)), loss) for i, loss in enumerate(losses))
    return Run(variant, seed, steps, freeze, 1e-3, curve, losses[-1])


ROWS = [row("fp32", 8.0, nbytes=38e6), row("fp16", 4.0), row("powersgd-1", 0.6, share=0.5), row(OURS, 0.7, share=0.5)]
ROWS += [row("adam-1", 9.0)]
RUNS = [run("fp32", [4.5, 3.0, 2.0]), run("powersgd-1", [4.5, 3.2, 2.5]), run(OURS, [4.5, 3.0, 2.5, 2.2, 2.0])]


def main_on_a_group(rank, size, arguments):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = train_step.main(arguments)
    return status, text.getvalue()


@pytest.mark.slow
def test_it_times_and_trains_on_the_group_it_finds(tmp_path):
    arguments = ["--device=cpu", *SMALL, f"--out={tmp_path}"]
    (status, text), (_, silence) = run_ranks_once(2, main_on_a_group, (arguments,), timeout=120)
    assert status == 0 and silence == ""
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [r["variant"] for r in record["rows"]] == list(VARIANTS)
    assert record["ranks"] == 2 and record["backend"] == "gloo" and not record["lab"]
    for r in record["rows"]:
        parts = [r[name] for name in ("forward", "backward", "step", "all_reduce")]
        assert min(parts[:3]) > 0 and parts[3] >= 0
        assert sum(parts) == pytest.approx(r["seconds"]) or (parts[3] == 0 and sum(parts) > r["seconds"])
        assert r["bytes"] is None and r["rate"] is None  # no interface of their own
    assert all(VARIANTS[name].title in text for name in VARIANTS)

    train = [*arguments, "--train", "--steps=8", "--freeze=4"]
    (status, text), _ = run_ranks_once(2, main_on_a_group, (train,), timeout=120)
    assert status == 0
    trained = json.loads(path.read_text())
    assert trained["rows"] == record["rows"] and [r["variant"] for r in trained["runs"]] == list(TRAINED)
    for r in trained["runs"]:
        assert [step for step, _ in r["curve"]] == list(range(9))
        assert r["curve"][-1][1] < r["curve"][0][1] - 0.1  # it learns
    first = [r["curve"][4][1] for r in trained["runs"]]
    assert first == pytest.approx(first[:1] * len(TRAINED), rel=1e-3)  # one model, schedule and data up to the freeze
    assert len({r["curve"][8][1] for r in trained["runs"]}) == len(TRAINED)  # and then each its own way


def measured(rank, size, how):
    """What is said of a variant that is broken in a way."""
    bench, name, change = Bench(Ranks(CPU, silent), Shape(32, 1, 1)), OURS, {}
    if how == "averages nothing":
        name, change = "fp16", {"hook": lambda state, bucket: local(bucket)}
    if how == "never compresses":
        change = {"options": {"freeze_step": 100}}
    train_step_ranks.VARIANTS = {name: replace(VARIANTS[name], **change)}
    if how == "is not a number":
        Shape.model = lambda *args, build=Shape.model: spoiled(build(*args))
    try:
        bench.measure(name, 1)
    except WrongResult as error:
        return str(error)
    finally:
        del bench
    return ""


def spoiled(model):
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    return model


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (None, ""),
        ("averages nothing", "differ after steps with fp16"),
        ("never compresses", "1-bit Adam, stage 2 has not begun to compress"),
        ("is not a number", "are not finite"),
    ],
)
def test_a_wrong_result_is_found_on_every_rank(how, says):
    found = run_ranks_once(2, measured, (how,))
    assert found[0] == found[1]
    assert says in found[0] and bool(says) == bool(found[0])


def slowed(rank, size, name):
    """Where a variant's time goes when messages take half a second more."""
    bench, wait, hook = Bench(Ranks(CPU, silent), Shape(32, 1, 1)), TorchWork.wait, VARIANTS["fp16"].hook
    TorchWork.wait = lambda work: (time.sleep(0.5), wait(work))[1]
    slow = replace(VARIANTS["fp16"], hook=lambda state, bucket: (time.sleep(0.5), hook(state, bucket))[1])
    train_step_ranks.VARIANTS = {**VARIANTS, "fp16": slow}
    row = bench.measure(name, 1)
    del bench
    return row.all_reduce, row.forward + row.backward + row.step


@pytest.mark.parametrize("name", ["fp16", OURS])
def test_messages_are_told_apart_from_work(name):
    for all_reduce, rest in run_ranks_once(2, slowed, (name,)):
        assert all_reduce > 0.5 > rest


def watched(rank, size):
    """Seconds that rank 1 waits for rank 0, which comes late."""
    transport = Watched(time.perf_counter)
    if rank == 0:
        time.sleep(0.5)
    transport.all_max(torch.zeros(1), "test")
    work = transport.all_sum(torch.zeros(1), "test")
    work.wait()
    return [end - start for start, end in transport.waits]


def test_waiting_is_told_apart():
    (late, _), (patient, _) = run_ranks_once(2, watched)
    assert patient > 0.4 > late


def test_a_link_is_chosen_by_the_share_that_it_makes():
    unshaped = row("fp16", 1.0, "unshaped", share=0.4, nbytes=19e6)
    rate = train_step_report.link_for(0.93, unshaped)
    took = 8 * 19e6 / (0.956 * float(rate.removesuffix("mbit")) * 1e6)
    assert took / (0.6 + took) == pytest.approx(0.93, abs=1e-3)
    tried = replace(row("fp16", 1.0, "10mbit", share=0.95), bytes=1.0)  # 0.95 s of all-reduce, 0.05 s of work
    corrected = float(train_step_report.link_for(0.90, tried).removesuffix("mbit"))
    assert corrected == pytest.approx(10 * 0.95 / 0.45, rel=1e-2)
    with pytest.raises(ValueError, match="measure in the lab"):
        train_step_report.link_for(0.93, replace(unshaped, bytes=None))


def test_the_share_and_the_speed_that_it_asks_for():
    assert row("fp16", 4.0, share=0.93).share == pytest.approx(0.93)
    (met,) = train_step_report.speed_targets(ROWS)
    assert (met.reached, met.needed, met.met) == (pytest.approx(4 / 0.7), 5.5, True)
    assert "25mbit, where all-reduce takes 93.0% of fp16's" in str(met)
    (missed,) = train_step_report.speed_targets([*ROWS[:3], row(OURS, 0.8)])
    assert not missed.met
    for share in (0.90, 0.95):
        assert train_step_report.speed_targets([row("fp16", 4.0, share=share), ROWS[3]]) == []
    assert train_step_report.speed_targets([ROWS[1], replace(ROWS[3], rate="1gbit")]) == []


def test_time_is_that_of_both_stages():
    group = {r.variant: r for r in ROWS}
    assert train_step_report.seconds_after(group, OURS, 20, 10) == 10 * 9.0
    assert train_step_report.seconds_after(group, OURS, 20, 100) == pytest.approx(20 * 9.0 + 80 * 0.7)
    assert train_step_report.seconds_after(group, "powersgd-1", 20, 100) == pytest.approx(20 * 8.0 + 80 * 0.6)
    assert train_step_report.seconds_after(group, "fp32", 20, 100) == 100 * 8.0
    halves = {**group, "adam-1-bf16": row("adam-1-bf16", 4.5), "adam-2-bf16": row("adam-2-bf16", 0.7)}
    assert train_step_report.seconds_after(halves, "adam-2-bf16", 20, 100) == pytest.approx(20 * 4.5 + 80 * 0.7)
    lucky = {**group, "adam-1": row("adam-1", 7.0)}
    assert train_step_report.seconds_after(lucky, OURS, 20, 10) == 10 * 8.0


def test_sooner_at_the_loss_that_powersgd_ends_with():
    (target,) = train_step_report.loss_targets(ROWS, RUNS)
    assert target.reached == pytest.approx((20 * 8 + 80 * 0.6) / (20 * 9 + 30 * 0.7)) and target.met  # at step 50
    sooner = row("adam-2-overlap", 0.6)  # trains as OURS does, bit for bit, and has no run of its own
    _, target = train_step_report.loss_targets([*ROWS, sooner], RUNS)
    assert target.reached == pytest.approx((20 * 8 + 80 * 0.6) / (20 * 9 + 30 * 0.6)) and "overlap" in target.what
    assert "overlap" in train_step_report.loss_table([*ROWS, sooner], RUNS)
    assert "overlap" not in train_step_report.loss_table(ROWS, RUNS)
    never = [*RUNS[:2], run(OURS, [4.5, 3.0, 2.8, 2.7, 2.6])]
    assert [t.reached for t in train_step_report.loss_targets(ROWS, never)] == [0]
    slow = [*ROWS[:3], row(OURS, 3.0), ROWS[4]]
    assert [t.met for t in train_step_report.loss_targets(slow, RUNS)] == [False]
    for rows, runs in ((ROWS[1:], RUNS), (ROWS[:4], RUNS), (ROWS, RUNS[:2]), ([], RUNS), (ROWS, [])):
        assert train_step_report.loss_targets(rows, runs) == []


def test_curves_are_means_over_seeds():
    runs = [run(OURS, [4.0, 2.0]), run(OURS, [5.0, 3.0], seed=1), run("fp32", [4.0, 1.0])]
    assert train_step_report.mean_curves(runs) == {OURS: [(0, 4.5), (100, 2.5)], "fp32": [(0, 4.0), (100, 1.0)]}
    text = train_step_report.loss_table(ROWS, runs)
    assert "2.5000   2.0000   3.0000" in text and text.splitlines()[-1].split()[-1] == "800"


def test_a_record_keeps_every_addition_and_the_runs_of_before(tmp_path):
    path = tmp_path / "record.json"
    record = Record(path, ABOUT)
    for i, thing in enumerate([*ROWS[:2], *RUNS], 1):
        record.add(thing)
        there = Record(path, ABOUT)
        assert len(there.rows) + len(there.runs) == i
    assert (there.rows, there.runs) == (ROWS[:2], RUNS)
    there = Record(path, {**ABOUT, "load_before": 9})
    there.add(RUNS[0])
    assert Record(path, {}).about["load_before"] == 0.5  # of the rows
    there.runs.pop()
    there.add(ROWS[3])  # of a new command: rows are measured together
    assert Record(path, {}).about["load_before"] == 9
    assert (Record(path, {}).rows, Record(path, {}).runs) == ([ROWS[3]], RUNS)
    assert Record(path, {}).about["device"] == "Some CPU"


def test_runs_that_are_there_are_not_repeated(tmp_path):
    arguments = train_step._arguments(["--lab", "--train", "--steps=100", "--freeze=20", "--lr=1e-3", "--seeds=2"])
    record = Record(tmp_path / "record.json", ABOUT)
    record.runs = list(RUNS)
    lacking = [("powersgd-4", 0), ("adam-2-bf16", 0)]
    assert train_step_report.missing(arguments, record) == [*lacking, *((name, 1) for name in TRAINED)]
    assert record.runs == RUNS
    arguments.steps = 50
    assert len(train_step_report.missing(arguments, record)) == 2 * len(TRAINED) and record.runs == []


def test_a_record_is_named_after_the_machine_and_its_options(monkeypatch):
    monkeypatch.setattr(train_step_report, "device_name", lambda device: "Some CPU")
    for options, name in ((["--hosts=2"], "hosts-2"), (["--share=0.9", "--rates=1gbit"], "rates-1gbit-share-0-9")):
        assert train_step_report.slug(train_step._arguments(["--lab", *options])) == f"train_step-some-cpu-{name}"
    assert train_step_report.slug(train_step._arguments(["--lab"])) == "train_step-some-cpu"
    assert train_step_report.slug(train_step._arguments([])) == "train_step-some-cpu-group"
    named = train_step._arguments(["--lab", "--hosts=2", "--name=Two hosts"])
    assert train_step_report.slug(named) == "train_step-some-cpu-two-hosts"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (RankFailed("rank 1 failed"), 1), (WrongResult("differ"), 1)]
)
def test_what_was_found_before_the_end_is_kept_and_shown(tmp_path, monkeypatch, capsys, error, status):
    def run_lab(arguments, record, progress):
        for thing in (ABOUT, *ROWS):
            record.add(thing)
        raise error

    monkeypatch.setattr(train_step, "run_lab", run_lab)
    assert train_step.main(["--lab", f"--out={tmp_path}"]) == status
    captured = capsys.readouterr()
    assert "5.7 times as fast a step as fp16's" in captured.out and str(error) in captured.err
    (path,) = tmp_path.glob("train_step-*.json")
    assert len(json.loads(path.read_text())["rows"]) == 5


def test_a_missed_target_is_an_error_only_with_check(tmp_path, monkeypatch, capsys):
    slow = [*ROWS[:3], row(OURS, 3.0)]
    for rows, status, says in ((ROWS, 0, "met"), (slow, 1, "missed"), (ROWS[:2], 1, "no target speaks")):
        monkeypatch.setattr(
            train_step, "run_lab", lambda _, record, __, rows=rows: [record.add(x) for x in (ABOUT, *rows)]
        )
        assert train_step.main(["--lab", f"--out={tmp_path}"]) == 0
        assert train_step.main(["--lab", f"--out={tmp_path}", "--check"]) == status
        captured = capsys.readouterr()
        assert says in captured.out + captured.err


def test_every_panel_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    record = Record(tmp_path / "record.json", ABOUT)
    refused = Row("25mbit", "bf16", error="no bf16")
    record.rows = [*ROWS, refused, *(replace(r, rate="1gbit") for r in ROWS)]
    assert f"{'bf16':28} | was not measured: no bf16" in train_step_report.table(record.rows)
    assert [path.name for path in draw(record, "title")] == ["record.png"]
    record.runs = RUNS
    made = draw(record, "title")
    assert [path.name for path in made] == ["record.png", "record-loss.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    record.rows = [replace(r, rate=None, bytes=None) for r in ROWS]
    assert len(draw(record, "of a group")) == 2
    assert all(len(line) <= 140 for line in train_step_report.table(record.rows).splitlines())


@pytest.mark.netlab
@pytest.mark.slow
def test_in_the_lab_bytes_are_the_interfaces_and_a_link_gives_the_share(tmp_path):
    try:
        with NetworkLab(2):
            pass
    except LabUnavailable as why:
        pytest.skip(str(why))
    arguments = ["--lab", "--hosts=2", "--rates=unshaped", "--share=0.9", "--variants=fp32,fp16,adam-2"]
    small = ["--width=128", "--layers=2", "--batch=2", "--repeats=1", f"--out={tmp_path}"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert train_step.main([*arguments, *small]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert path.name in text.getvalue()
    rows = {(r["rate"], r["variant"]): r for r in record["rows"]}
    assert len(rows) == 6 and next(iter(rows))[0] == record["share_rate"]
    for rate in (record["share_rate"], "unshaped"):
        fp32, fp16, ours = (rows[rate, name]["bytes"] for name in ("fp32", "fp16", "adam-2"))
        assert fp32 == pytest.approx(4 * record["elements"], rel=0.15)  # 2 (N - 1) / N of the model, and headers
        assert fp16 == pytest.approx(fp32 / 2, rel=0.15) and ours < fp32 / 20
    slow, fast = (Row(**rows[rate, "fp16"]).share for rate in (record["share_rate"], "unshaped"))
    assert slow > 0.8 and slow > fast


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lab", "--hosts=1"], "not a number of hosts: give 2 to 64"),
        (["--lab", "--rates=1gbyte"], "no rate from 1mbit to 100gbit"),
        (["--lab", "--share=1"], "'1' is no share: give a number below 1"),
        (["--lab", "--share=most"], "is no share"),
        (["--variants=fp8"], "'fp8' is no variant: choose among fp32, fp16"),
        (["--steps=0"], "'0' is not a positive number"),
        (["--rates=1gbit", "--share=0.9"], "--rates and --share: only with --lab"),
        (["--lab", "--backend=gloo"], "--backend: only without --lab"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        train_step.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_without_a_group_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert train_step.main(["--device=cpu", f"--out={tmp_path}"]) == 2
    assert "start it with torchrun, or give it --lab" in capsys.readouterr().err
