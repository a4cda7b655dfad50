"""The benchmark of the training step: the parts of a step, what is kept, no figure from a wrong result."""

import contextlib
import io
import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from onebit import OneBitAdam
from onebit.collectives.transport.torch import PairsWork, TorchWork
from onebit.parallel.ddp_hook import local
from perf.command import WrongResult
from perf.lab.processes import RankFailed
from perf.ranks import Ranks
from perf.train_step import benchmark, measure, variants
from perf.train_step.diloco import DiLoCo
from perf.train_step.measure import Bench, Clock
from perf.train_step.report import link_for
from perf.train_step.variants import OURS, TRAINED, VARIANTS, Shape, TimedTransport, Trainee, Variant, timed_variants
from tests.limits import HUNG
from tests.perf.train_step_rows import ABOUT, ROWS, row
from tests.ranks import run_ranks_once

CPU = torch.device("cpu")
SMALL = ["--width=32", "--layers=1", "--batch=1", "--repeats=1"]


def silent(text):
    pass


def main_on_a_group(rank, size, arguments):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = benchmark.main(arguments)
    return status, text.getvalue()


@pytest.mark.slow
def test_it_times_and_trains_on_the_group_it_finds(tmp_path):
    arguments = ["--device=cpu", *SMALL, f"--out={tmp_path}"]
    (status, text), (_, silence) = run_ranks_once(2, main_on_a_group, (arguments,), timeout=HUNG)
    assert status == 0 and silence == ""
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [r["variant"] for r in record["rows"]] == timed_variants(list(VARIANTS))
    assert record["ranks"] == 2 and record["backend"] == "gloo" and not record["lab"]
    for r in record["rows"]:
        assert r["error"] == VARIANTS[r["variant"]].impossible
        if r["error"]:
            continue
        parts = [r[name] for name in ("forward", "backward", "step", "all_reduce")]
        assert min(parts[:3]) > 0 and parts[3] >= 0
        assert sum(parts) == pytest.approx(r["seconds"]) or (parts[3] == 0 and sum(parts) > r["seconds"])
        assert r["bytes"] is None and r["rate"] is None  # no interface of their own
    assert all(VARIANTS[name].title in text for name in timed_variants(list(VARIANTS)))

    train = [*arguments, "--train", "--steps=8", "--freeze=4"]
    (status, text), _ = run_ranks_once(2, main_on_a_group, (train,), timeout=HUNG)
    assert status == 0
    trained = json.loads(path.read_text())
    assert trained["rows"] == record["rows"] and [r["variant"] for r in trained["runs"]] == list(TRAINED)
    for r in trained["runs"]:
        assert [step for step, _ in r["curve"]] == list(range(9))
        least = 0.005 if r["variant"] == "lamb-2" else 0.1  # a tenth of Adam's steps, and less
        assert r["curve"][-1][1] < r["curve"][0][1] - least  # it learns
    adams = [r for r in trained["runs"] if r["variant"] != "lamb-2"]
    first = [r["curve"][4][1] for r in adams if not VARIANTS[r["variant"]].parts]
    assert first == pytest.approx(first[:1] * len(first), rel=1e-3)  # one model, schedule and data up to the freeze
    own = [r for r in trained["runs"] if VARIANTS[r["variant"]].rank < 16]  # which compresses nothing of this model
    assert len({r["curve"][8][1] for r in own}) == len(own)  # and then each its own way


def kinds_timed(rank, size, name):
    """The kinds of the steps that are timed, and whether ranks are in step afterwards."""
    seen, bench, parts = [], Bench(Ranks(CPU, silent), Shape(32, 1, 1)), Bench.parts

    def watched(self, trainee, transport, clip):
        kind = trainee.kind
        found = parts(self, trainee, transport, clip)
        seen.append((kind, found[0]))
        return found

    Bench.parts = watched
    row = bench.measure(name, 3)
    del bench
    slowest = Ranks(CPU, silent).slowest([seconds for _, seconds in seen])
    return [kind for (kind, _), seconds in zip(seen, slowest, strict=True) if seconds in row.calls]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("zero-one-full", "full"), ("zero-one-bit", "1 bit"), ("zero-one-alone", "local"), ("zero-one-sync", "sync"),
     ("diloco-alone", "local"), ("diloco-sync", "sync")],
)  # fmt: skip
def test_steps_of_one_kind_are_timed(name, kind):
    assert run_ranks_once(2, kinds_timed, (name,)) == [[kind] * 3] * 2


@pytest.mark.parametrize("kind", [None, "full", "local", "sync"])
def test_the_report_is_asked_for_steps_of_the_same_kind(kind):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = OneBitAdam([weight], freeze_step=5)
    trainee = Trainee(None, optimizer, lambda: optimizer.compressing)
    for _ in range(5):
        weight.grad = torch.ones(4)
        optimizer.step()
    assert trainee.reported_seconds(None) == optimizer.report().uncompressed.seconds
    for _ in range(5):
        optimizer.step()
    found = optimizer.report()
    assert found.compressed.seconds != found.uncompressed.seconds
    expected = {None: found.compressed, "full": found.uncompressed, "local": found.local}
    assert trainee.reported_seconds(kind) == (None if kind == "sync" else expected[kind].seconds)
    assert trainee.verdict() == found.verdict
    adamw = torch.optim.AdamW([weight])
    assert Trainee(None, adamw, lambda: False).reported_seconds(kind) is None
    assert Trainee(None, adamw, lambda: False).verdict() is None
    young = OneBitAdam([torch.nn.Parameter(torch.ones(4))], freeze_step=5)
    assert Trainee(None, young, lambda: young.compressing).verdict() is None


def test_gradients_are_clipped_as_each_optimizer_has_it():
    for build in (OneBitAdam, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros(4))
        weight.grad = torch.full((4,), 5.0)  # a norm of 10
        optimizer = build([weight], lr=1.0, betas=(0.0, 0.0), eps=1.0)
        Trainee(torch.nn.ParameterList([weight]), optimizer, lambda: False).clip(1.0)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5 / 1.5))


@pytest.mark.parametrize("clip", ["-1", "nan", "inf", "much"])
def test_a_norm_that_is_none_is_refused(clip, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--lab", "--train", f"--clip={clip}"])
    assert "--clip" in capsys.readouterr().err


class Means:
    """Of two ranks, of which this is one: the other has not moved."""

    rank, size, name = 0, 2, "means"

    def all_sum(self, values, phase):
        return self

    def wait(self):
        return None


def test_an_outer_step_is_nesterovs():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = DiLoCo([weight], Means(), every=2, lr=0.1, weight_decay=0.0)
    start, velocity = weight.detach().double().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(1, 7):
        weight.grad = torch.tensor([1.0, -0.5 * step])
        assert optimizer.kind == ("sync" if step % 2 == 0 else "local")
        before, plain = weight.detach().clone(), torch.nn.Parameter(weight.detach().clone())
        inner = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.0)
        inner.load_state_dict(deepcopy(torch.optim.AdamW.state_dict(optimizer)))
        plain.grad = weight.grad.clone()
        inner.step()
        optimizer.step()
        if step % 2:
            torch.testing.assert_close(weight, plain)
            with optimizer.at_last_sync():
                torch.testing.assert_close(weight.double(), start)
            torch.testing.assert_close(weight, plain)
        else:
            moved = (start - plain.detach().double()) / 2  # the mean with 0
            velocity = 0.9 * velocity + moved
            start = start - 0.7 * (moved + 0.9 * velocity)
            torch.testing.assert_close(weight.double(), start)
            outer = weight.detach().clone()
            optimizer.synchronize()
            assert torch.equal(weight, outer)  # nobody has moved since
        assert not torch.equal(before, weight)


def measured(rank, size, how):
    """What is said of a variant that is broken in a way."""
    bench, name, change = Bench(Ranks(CPU, silent), Shape(32, 1, 1)), OURS, {}
    if how == "averages nothing":
        name, change = "fp16", {"hook": lambda state, bucket: local(bucket)}
    if how == "never compresses":
        change = {"options": {"freeze_step": 100}}
    measure.VARIANTS = {name: replace(VARIANTS[name], **change)}
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


class ManualClock(Clock):
    """Stands still until it is advanced."""

    def __init__(self):
        self.time = 0.0

    def advance(self, seconds):
        self.time += seconds

    def now(self):
        return self.time

    mark = now

    def seconds(self, start, end):
        return end - start


FORWARD, BACKWARD, STEP, MESSAGE = 0.25, 0.125, 0.0625, 1.0


def timed(rank, size, name):
    """A variant's row where each part of a step, and each wait for a message, takes a time of its own."""
    clock, forward, build = ManualClock(), measure.loss_of, Variant.build
    hook = VARIANTS["fp16"].hook

    def slow_forward(model, windows):
        clock.advance(FORWARD)
        loss = forward(model, windows)
        if loss.requires_grad:
            loss.register_hook(lambda grad: clock.advance(BACKWARD))
        return loss

    def slow_build(*arguments):
        trainee = build(*arguments)
        trainee.optimizer.register_step_pre_hook(lambda *_: clock.advance(STEP))
        return trainee

    def slow_wait(wait):
        return lambda work: (clock.advance(MESSAGE), wait(work))[1]

    measure.loss_of, Variant.build = slow_forward, slow_build
    for kind in (TorchWork, PairsWork):
        kind.wait = slow_wait(kind.wait)
    slow = replace(VARIANTS["fp16"], hook=lambda state, bucket: (clock.advance(MESSAGE), hook(state, bucket))[1])
    measure.VARIANTS = {**VARIANTS, "fp16": slow}
    bench = Bench(Ranks(CPU, silent), Shape(32, 1, 1), clock)
    row = bench.measure(name, 2)
    del bench
    return row


@pytest.mark.parametrize(("name", "expected"), [("fp16", (1,)), (OURS, (1, 2)), ("adam-2-reply-1", (2, 3, 4))])
def test_a_step_is_divided_into_its_parts(name, expected):
    """Messages of 1-bit Adam: those of one chunk or two, once between two ranks, and twice with reply=1."""
    for found in run_ranks_once(2, timed, (name,)):
        assert (found.forward, found.backward, found.step) == (FORWARD, BACKWARD, STEP)
        assert found.all_reduce / MESSAGE in expected
        assert found.seconds == FORWARD + BACKWARD + STEP + found.all_reduce
        assert found.calls == (found.seconds,) * 2


class SlowTransport:
    """One rank whose messages take a second each."""

    rank, size, name = 0, 1, "slow"

    def __init__(self, clock):
        self.clock = clock

    def all_max(self, values, phase):
        self.clock.advance(1.0)

    def all_sum(self, values, phase):
        return self

    def wait(self):
        self.clock.advance(2.0)


def test_each_wait_is_timed(monkeypatch):
    clock = ManualClock()
    monkeypatch.setattr(variants, "transport_for", lambda inner: inner)
    transport = TimedTransport(clock.mark, SlowTransport(clock))
    transport.all_max(torch.zeros(1), "test")
    work = transport.all_sum(torch.zeros(1), "test")
    clock.advance(5.0)  # work of ours, which no wait counts
    work.wait()
    assert transport.waits == [(0.0, 1.0), (6.0, 8.0)]


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (RankFailed("rank 1 failed"), 1), (WrongResult("differ"), 1)]
)
def test_what_was_found_before_the_end_is_kept_and_shown(tmp_path, monkeypatch, capsys, error, status):
    def run_lab(arguments, record, progress):
        for thing in (ABOUT, *ROWS):
            record.add(thing)
        raise error

    monkeypatch.setattr(benchmark, "run_lab", run_lab)
    assert benchmark.main(["--lab", f"--out={tmp_path}"]) == status
    captured = capsys.readouterr()
    assert "5.7 times as fast a step as fp16's" in captured.out and str(error) in captured.err
    (path,) = tmp_path.glob("train_step-*.json")
    assert len(json.loads(path.read_text())["rows"]) == 5


def test_a_missed_target_is_an_error_only_with_check(tmp_path, monkeypatch, capsys):
    slow = [*ROWS[:3], row(OURS, 3.0)]
    for rows, status, says in ((ROWS, 0, "met"), (slow, 1, "missed"), (ROWS[:2], 1, "no target speaks")):
        monkeypatch.setattr(
            benchmark, "run_lab", lambda _, record, __, rows=rows: [record.add(x) for x in (ABOUT, *rows)]
        )
        assert benchmark.main(["--lab", f"--out={tmp_path}"]) == 0
        assert benchmark.main(["--lab", f"--out={tmp_path}", "--check"]) == status
        captured = capsys.readouterr()
        assert says in captured.out + captured.err


@pytest.mark.netlab
@pytest.mark.slow
def test_in_the_lab_bytes_are_the_interfaces_and_a_link_gives_the_share(lab_available, tmp_path, monkeypatch):
    tried = []

    def chosen(share, row):
        tried.append((row, link_for(share, row)))
        return tried[-1][1]

    monkeypatch.setattr(benchmark, "link_for", chosen)
    arguments = ["--lab", "--hosts=2", "--rates=unshaped", "--share=0.9", "--variants=fp32,fp16,adam-2"]
    small = ["--width=128", "--layers=2", "--batch=2", "--repeats=1", f"--out={tmp_path}"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert benchmark.main([*arguments, *small]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert path.name in text.getvalue()
    rows = {(r["rate"], r["variant"]): r for r in record["rows"]}
    assert len(rows) == 6 and next(iter(rows))[0] == record["share_rate"]
    for rate in (record["share_rate"], "unshaped"):
        fp32, fp16, ours = (rows[rate, name]["bytes"] for name in ("fp32", "fp16", "adam-2"))
        assert fp32 == pytest.approx(4 * record["elements"], rel=0.15)  # 2 (N - 1) / N of the model, and headers
        assert fp16 == pytest.approx(fp32 / 2, rel=0.15) and ours < fp32 / 20
    (unshaped, first), (shaped, second) = tried  # the first link is chosen from bytes, the second corrects it
    assert (unshaped.rate, shaped.rate, record["share_rate"]) == ("unshaped", first, second)
    assert unshaped.variant == shaped.variant == "fp16"


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
        benchmark.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_without_a_group_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert benchmark.main(["--device=cpu", f"--out={tmp_path}"]) == 2
    assert "start it with torchrun, or give it --lab" in capsys.readouterr().err
