"""optimizer.report(): steps of each kind, their times, bytes, and what they come to."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onebit.collectives.waits import Waits, counted, waiting
from onebit.report.pay_off import KEPT, REPORTED_AFTER, PayOff, Report, Steps
from tests.checkpoints import Run
from tests.collectives.work import logged
from tests.onebit.runs import Case, kinds, on_ranks
from tests.ranks import group

CPU = torch.device("cpu")


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def timed(*steps: tuple[str, float, float], pause: float | None = None) -> PayOff:
    """Steps of a kind that take so long, and wait for so much of it; each after a pause that ends with a restart."""
    clock = Clock()
    pay_off = PayOff(CPU, clock)
    for kind, seconds, waits in steps:
        if pause is not None:
            clock.time += pause
            pay_off.restart()
        clock.time += seconds
        pay_off.waits.seconds += waits
        pay_off.step_ended(kind)  # type: ignore[arg-type]
    return pay_off


def test_a_step_is_timed_from_the_end_of_the_one_before() -> None:
    """The first has none; a pause (validation, a checkpoint) does not change a median."""
    steps = [("uncompressed", 100.0, 0.0), *[("uncompressed", 2.0, 1.5)] * 4, ("uncompressed", 60.0, 0.0)]
    pay_off = timed(*steps, *[("1 bit", 0.5, 0.1)] * 3)
    assert pay_off.steps("uncompressed", waits_here=True) == Steps(6, 2.0, 0.75)
    assert pay_off.steps("uncompressed", waits_here=False).waiting is None
    found = pay_off.steps("1 bit", waits_here=True)
    assert (found.taken, found.seconds, found.waiting) == pytest.approx((3, 0.5, 0.2))


def test_too_few_steps_old_ones_and_what_comes_before_a_restart_are_not_timed() -> None:
    pay_off = timed(*[("uncompressed", 1.0, 0.0)] * 3, *[("1 bit", 9.0, 0.0)] * 100, *[("1 bit", 1.0, 0.0)] * KEPT)
    assert pay_off.steps("uncompressed", waits_here=True) == Steps(3, None, None)
    assert pay_off.steps("local", waits_here=True) == Steps(0, None, None)
    assert pay_off.steps("1 bit", waits_here=True) == Steps(100 + KEPT, 1.0, 0.0)
    paused = timed(*[("1 bit", 2.0, 0.0)] * 4, pause=50.0)
    assert paused.steps("1 bit", waits_here=True) == Steps(4, 2.0, 0.0)


def test_it_is_time_for_a_report_once() -> None:
    pay_off = PayOff(CPU, Clock())
    due = [pay_off.step_ended("1 bit") for _ in range(2 * REPORTED_AFTER)]
    assert [i + 1 for i, each in enumerate(due) if each] == [REPORTED_AFTER]


@pytest.mark.parametrize("late", [0.0, 100.0])
def test_events_are_read_when_they_have_passed(monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    """Events pass when the test says so, as on a GPU; those of waits so much later than a step's end."""
    now, over = Clock(), Clock()

    def event() -> Any:
        made = SimpleNamespace(at=now.time)
        made.query = lambda: made.at <= over.time
        made.elapsed_time = lambda other: 1e3 * (other.at - made.at)
        return made

    pay_off = PayOff(torch.device("cuda"))
    monkeypatch.setattr(pay_off, "_mark", event)
    monkeypatch.setattr("onebit.report.pay_off.capturing", lambda device: False)
    for _ in range(5):
        now.time += 2.0
        start = event()
        now.time += 1.0
        pay_off.waits.events.append((start, event()))
        pay_off.waits.events[-1][1].at += late
        pay_off.step_ended("1 bit")
    assert pay_off.steps("1 bit", waits_here=True).seconds is None
    over.time = now.time
    pay_off.step_ended("1 bit")
    found = pay_off.steps("1 bit", waits_here=True)
    assert (found.seconds, found.waiting) == ((None, None) if late else pytest.approx((3.0, 1 / 3)))


def test_waits_are_those_of_this_thread_where_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits, inner = Clock(), Waits(), Waits()
    monkeypatch.setattr(time, "perf_counter", clock)

    def wait(seconds: float) -> None:
        with waiting(CPU):
            clock.time += seconds

    wait(1.0)
    with counted(waits):
        wait(2.0)
        clock.time += 4.0
        with counted(inner):
            wait(8.0)
        wait(16.0)
        thread = threading.Thread(target=wait, args=(32.0,))
        thread.start()
        thread.join()
    wait(64.0)
    assert waits.total() == 18.0 and inner.total() == 8.0 and waits.passed


def report(slow: float | None, fast: float | None, waits: float | None = 0.5, alone: float | None = None) -> Report:
    compressed, local = Steps(300, fast, 0.25), Steps(*((0, None, None) if alone is None else (10_000, alone, 0.0)))
    return Report(
        Steps(100, slow, waits), compressed, local, 2, sent=2e6, sent_by_fp32=4e7, sent_by_fp16=2e7, processes=2
    )


def test_verdicts() -> None:
    gain = report(0.64, 0.1)
    assert gain.speed_up == pytest.approx(6.4)
    assert gain.run_speed_up == pytest.approx(400 / (100 + 300 / 6.4))
    assert gain.verdict == "1-bit steps are 6.4 times as fast as uncompressed ones; over this run so far 2.7 times"
    local = report(0.64, 0.1, alone=0.064)
    assert local.run_speed_up == pytest.approx(10_400 / (100 + 300 / 6.4 + 10_000 / 10))
    assert "times as fast as uncompressed ones, local steps 10.0 times; over" in local.verdict
    none = report(0.1, 0.11, 0.04).verdict
    assert none.startswith("no gain: the network takes 4% of an uncompressed step; ")
    assert none.endswith("1-bit steps take 1.10 times as long as uncompressed ones")
    assert "the network" not in report(0.1, 0.1, None).verdict and "no gain" in report(0.1, 0.1, None).verdict
    assert "too few compressed" in report(0.1, None).verdict
    assert "too few uncompressed" in report(None, 0.1).verdict


def test_one_process_what_travels_and_numbers() -> None:
    assert replace(report(0.1, 0.01), processes=1).verdict == "one process alone sends nothing, and has nothing to gain"
    narrow = replace(report(0.1, 0.01), wire="bf16")
    assert "10.0 times as fast" in narrow.verdict
    assert "uncompressed      100 steps in bf16, 100.0 ms each" in str(narrow)
    assert not {"onebit/speed_up", "onebit/run_speed_up"} & replace(narrow, ddp_averages=True).numbers().keys()
    assert narrow.numbers()["onebit/speed_up"] == pytest.approx(10) and narrow.numbers()["onebit/skipped_steps"] == 2


def test_the_text() -> None:
    text = str(report(0.64, 0.1))
    assert text.splitlines()[1:] == [
        "uncompressed      100 steps, 640.0 ms each, 50% of it waiting for messages",
        "1 bit             300 steps, 100.0 ms each, 25% of it waiting for messages",
        "skipped             2 of these",
        "sent             2 MB; fp32 and fp16 all-reduces send 20.0 and 10.0 times as much",
    ]
    assert str(report(0.64, 0.1, alone=0.064)).splitlines()[3] == (
        "local           10000 steps, 64.0 ms each, 0% of it waiting for messages"
    )


def reported(rank: int, case: Case) -> tuple[Any, int, list[str]]:
    with logged() as said:
        optimizer = Run(case, case.steps, rank, group()).optimizer
    return optimizer.report(), optimizer.wire_bytes, [text for text in said if "1 bit  " in text]


@kinds
@on_ranks(3)
def test_a_run(rank: int, kind: str) -> None:
    """Bytes are the messages' and, of uncompressed steps, those of rings; 50 steps in, rank 0 logs it."""
    options, bad = {"freeze_step": 5}, ((7, 0, float("nan")),)
    case = Case(kind, shapes=((300, 40), (77,)), steps=5 + REPORTED_AFTER, options=options, bad=bad)
    own, sent, texts = reported(rank, case)
    assert (own.uncompressed.taken, own.compressed.taken, own.skipped) == (5, REPORTED_AFTER, 1)
    ring = 2 * 2 / 3 * (300 * 40 + 77)
    assert own.sent == pytest.approx(sent + 5 * 4 * ring)
    assert own.sent_by_fp32 == 2 * own.sent_by_fp16 == pytest.approx((5 + REPORTED_AFTER) * 4 * ring)
    for steps in (own.uncompressed, own.compressed):
        assert steps.seconds > 0 and 0 < steps.waiting <= 1
    assert ["times as" in text and "skipped             1 of these" in text for text in texts] == [True] * (rank == 0)


@on_ranks(4)
def test_bytes_of_nodes_are_those_between_them(rank: int) -> None:
    report, messages, _ = reported(rank, Case(shapes=((300, 40),), steps=8, options={"freeze_step": 3}, each=2))
    assert report.sent_by_fp32 == pytest.approx(8 * 4 * 300 * 40 / 2)  # 2 nodes: a ring sends all of a slice once
    assert report.sent == pytest.approx(messages + 3 * 4 * 300 * 40 / 2)
