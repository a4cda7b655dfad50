"""The benchmark of the training step: the parts of a step, what is kept, no figure from a wrong result."""

import contextlib
import io
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from onebit import OneBitAdam
from onebit.collectives.transport import torch as transport
from onebit.collectives.waits import waiting
from onebit.parallel.hooks import leave_as_is
from perf import plots
from perf.command import WrongResult
from perf.lab import processes
from perf.lab.processes import RankFailed
from perf.ranks import Ranks
from perf.train_step import benchmark, measure, variants
from perf.train_step.diloco import DiLoCo
from perf.train_step.measure import Bench
from perf.train_step.report import link_for
from perf.train_step.variants import OURS, VARIANTS, Shape, Trainee, Variant, timed_variants
from tests import forked
from tests.limits import HUNG
from tests.perf.train_step_rows import ABOUT, ROWS
from tests.ranks import run_ranks_once

CPU = torch.device("cpu")
TINY = Shape(32, 1, 1)
TRAINS = ["fp32", "fp16", "powersgd-1", "adam-2", "adam-2-bf16", "lamb-2", "zero-one-local", "diloco"]
KINDS = {
    "zero-one-full": "full", "zero-one-bit": "1 bit", "zero-one-alone": "local", "zero-one-sync": "sync",
    "diloco-alone": "local", "diloco-sync": "sync",
}  # fmt: skip


def bench():
    return Bench(Ranks(CPU, lambda text: None), TINY)


def main_on_a_group(rank, size, *commands):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        return [benchmark.main(arguments) for arguments in commands], text.getvalue()


def test_it_times_and_trains_on_the_group_it_finds(tmp_path):
    small = ["--device=cpu", "--width=32", "--layers=1", "--batch=4", "--repeats=1", f"--out={tmp_path}", "--name=it"]
    train = [*small, "--train", "--steps=8", "--freeze=4", f"--variants={','.join(TRAINS)}"]
    (status, text), (_, silence) = run_ranks_once(2, main_on_a_group, (small, train), timeout=HUNG)
    assert status == [0, 0] and silence == ""
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [r["variant"] for r in record["rows"]] == timed_variants(list(VARIANTS))
    assert record["ranks"] == 2 and record["backend"] == "gloo" and not record["lab"]
    for r in record["rows"]:
        assert r["error"] == VARIANTS[r["variant"]].impossible and VARIANTS[r["variant"]].title in text
        assert r["bytes"] is None and r["rate"] is None  # no interface of their own
        if not r["error"]:
            *others, all_reduce = parts = [r[name] for name in ("forward", "backward", "step", "all_reduce")]
            assert min(others) > 0 and all_reduce >= 0
            assert sum(parts) == pytest.approx(r["seconds"]) or (all_reduce == 0 and sum(parts) > r["seconds"])
    runs = {r["variant"]: r["curve"] for r in record["runs"]}
    assert list(runs) == TRAINS
    for name, curve in runs.items():
        assert [step for step, _ in curve] == list(range(9))
        least = 0.005 if name == "lamb-2" else 0.1  # a tenth of Adam's steps, and less
        assert curve[-1][1] < curve[0][1] - least  # it learns
    adams = [curve for name, curve in runs.items() if name != "lamb-2" and not VARIANTS[name].parts]
    first = [curve[4][1] for curve in adams]
    assert first == pytest.approx(first[:1] * len(first), rel=1e-3)  # one model, schedule and data up to the freeze
    assert len({curve[8][1] for curve in runs.values()}) == len(runs)  # and then each its own way


class ManualClock:
    """Stands still until it is advanced."""

    time = 0.0

    def advance(self, seconds):
        self.time += seconds

    def __call__(self):
        return self.time


FORWARD, BACKWARD, STEP, MESSAGE = 0.25, 0.125, 0.0625, 1.0


def timed(name, patch):
    """A variant's row where each part of a step, and each wait for a message, takes a time of its own."""
    clock, forward, build = ManualClock(), variants.loss_of, Variant.build
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

    @contextlib.contextmanager
    def slow_wait(device):
        with waiting(device):
            clock.advance(MESSAGE)
            yield

    patch.setattr(time, "perf_counter", clock)
    patch.setattr(variants, "loss_of", slow_forward)
    patch.setattr(Variant, "build", slow_build)
    patch.setattr(transport, "waiting", slow_wait)
    slow = replace(VARIANTS["fp16"], hook=lambda state, bucket: (clock.advance(MESSAGE), hook(state, bucket))[1])
    patch.setattr(measure, "VARIANTS", {**VARIANTS, "fp16": slow})
    return bench().measure(name, 2)


def said_of(how, patch):
    """What is said of a variant that is broken in a way."""
    name, change, model = OURS, {}, Shape.model

    def spoiled(*args):
        made = model(*args)
        with torch.no_grad():
            next(made.parameters()).fill_(torch.nan)
        return made

    if how == "averages nothing":
        name, change = "fp16", {"hook": lambda state, bucket: leave_as_is(bucket)}
    if how == "never compresses":
        change = {"options": {"freeze_step": 100}}
    patch.setattr(measure, "VARIANTS", {name: replace(VARIANTS[name], **change)})
    if how == "is not a number":
        patch.setattr(Shape, "model", spoiled)
    try:
        bench().measure(name, 1)
    except WrongResult as error:
        return str(error)
    return ""


def kinds_timed(name, patch):
    """The kinds of the steps that are timed."""
    seen, parts = [], Bench.parts

    def watched(self, trainee, clip):
        kind = trainee.kind
        found = parts(self, trainee, clip)
        seen.append((kind, found[0]))
        return found

    patch.setattr(Bench, "parts", watched)
    row = bench().measure(name, 3)
    slowest = Ranks(CPU, lambda text: None).slowest([seconds for _, seconds in seen])
    return [kind for (kind, _), seconds in zip(seen, slowest, strict=True) if seconds in row.calls]


def on_two_ranks(rank, size):
    """All that the tests below look at, by what it is of."""
    found = {}
    wrong = (None, "averages nothing", "never compresses", "is not a number")
    for of, names in ((timed, ("fp16", OURS, "adam-2-reply-1")), (said_of, wrong), (kinds_timed, KINDS)):
        for name in names:
            with pytest.MonkeyPatch.context() as patch:
                found[name if of is not timed else f"timed {name}"] = of(name, patch)
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks_once(2, on_two_ranks, timeout=HUNG)


def test_steps_of_one_kind_are_timed(two_ranks):
    for found in two_ranks:
        assert {name: found[name] for name in KINDS} == {name: [kind] * 3 for name, kind in KINDS.items()}


def test_a_wrong_result_is_found_on_every_rank(two_ranks):
    first, second = two_ranks
    for how, says in (
        ("averages nothing", "differ after steps with fp16"),
        ("never compresses", "1-bit Adam, stage 2 has not begun to compress"),
        ("is not a number", "are not finite"),
    ):
        assert says in first[how] and first[how] == second[how]
    assert first[None] == second[None] == ""


def test_a_step_is_divided_into_its_parts(two_ranks):
    """Messages of 1-bit Adam: those of one chunk or two, once between two ranks, and twice with reply=1."""
    for ranks in two_ranks:
        for name, expected in (("fp16", (1,)), (OURS, (1, 2)), ("adam-2-reply-1", (2, 3, 4))):
            found = ranks[f"timed {name}"]
            assert (found.forward, found.backward, found.step) == (FORWARD, BACKWARD, STEP)
            assert found.all_reduce / MESSAGE in expected
            assert found.seconds == FORWARD + BACKWARD + STEP + found.all_reduce
            assert found.calls == (found.seconds,) * 2


def test_gradients_are_clipped_as_each_optimizer_has_it():
    for build in (OneBitAdam, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros(4))
        weight.grad = torch.full((4,), 5.0)  # a norm of 10
        optimizer = build([weight], lr=1.0, betas=(0.0, 0.0), eps=1.0)
        Trainee(torch.nn.ParameterList([weight]), optimizer, lambda: False).clip(1.0)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5 / 1.5))


def test_an_outer_step_is_nesterovs():
    """The step is of one of two ranks, of which the other has not moved."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    done = SimpleNamespace(wait=lambda: None)
    means = SimpleNamespace(rank=0, size=2, name="means", all_sum=lambda values, phase: done)
    optimizer = DiLoCo([weight], means, every=2, lr=0.1, weight_decay=0.0)
    plain = torch.nn.Parameter(weight.detach().clone())
    inner = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.0)
    start, velocity = weight.detach().double().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(1, 7):
        weight.grad, plain.grad = (torch.tensor([1.0, -0.5 * step]) for _ in range(2))
        assert optimizer.kind == ("sync" if step % 2 == 0 else "local")
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
            plain.data.copy_(outer)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A function that runs the command, whose lab finds these rows and then raises."""
    monkeypatch.setattr(plots, "draw_if_possible", lambda draw: None)

    def main(rows, *options, error=None):
        def run_lab(arguments, record, progress):
            for thing in (ABOUT, *rows):
                record.add(thing)
            if error:
                raise error

        monkeypatch.setattr(benchmark, "run_lab", run_lab)
        return benchmark.main(["--lab", f"--out={tmp_path}", *options])

    return main


def test_what_was_found_before_the_end_is_kept_and_shown(lab, tmp_path, capsys):
    for error, status in ((KeyboardInterrupt(), 130), (RankFailed("rank 1 failed"), 1), (WrongResult("differ"), 1)):
        assert lab(ROWS, error=error) == status
        captured = capsys.readouterr()
        assert "5.7 times as fast a step as fp16's" in captured.out and str(error) in captured.err
        (path,) = tmp_path.glob("train_step-*.json")
        assert len(json.loads(path.read_text())["rows"]) == 5
        path.unlink()


@pytest.mark.netlab
def test_in_the_lab_bytes_are_the_interfaces_and_a_link_gives_the_share(lab_available, tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(processes, "subprocess", forked)
    monkeypatch.setattr(benchmark, "link_for", lambda *of: tried.append((of[1], link_for(*of))) or tried[-1][1])
    arguments = ["--lab", "--hosts=2", "--rates=unshaped", "--share=0.6", "--variants=fp32,fp16,adam-2"]
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
