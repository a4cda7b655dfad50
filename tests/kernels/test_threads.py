"""The CPU's threads, each with a run of blocks of one pass."""

import signal
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from onebit.kernels.cpu import threads, tiles
from onebit.kernels.data.layout import Layout


class Slow:
    """A loop that the first run of blocks leaves at once, and the others after a while."""

    def __init__(self, seconds, first):
        self.parameters = {"run": tiles.Run}
        self.seconds, self.first, self.ended, self.kept = seconds, first, [], lambda: None

    def __call__(self, run):
        if run.first == 0:
            return self.first()
        time.sleep(self.seconds)
        self.ended.append(self.kept() is not None)


@pytest.fixture
def span(monkeypatch):
    monkeypatch.setattr(threads, "LEAST", 32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    return Layout([96], block_size=32).all()


def interrupt():
    raise KeyboardInterrupt


def test_a_pass_that_is_interrupted_ends_when_all_its_threads_have(span):
    """Ctrl-C in a notebook, or a handler of a signal that raises: the memory of a pass may be freed afterwards."""
    slow = Slow(0.2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        threads.over_blocks(slow, span, span.arguments(torch.device("cpu")))
    assert len(slow.ended) == 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")
def test_so_does_one_that_waits_for_them_when_the_signal_comes(span):
    slow = Slow(0.3, lambda: None)
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            threads.over_blocks(slow, span, span.arguments(torch.device("cpu")))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(slow.ended) == 2


def test_a_thread_holds_the_memory_of_its_pass(span, monkeypatch):
    """It holds it even if the wait for it is interrupted."""
    slow, state = Slow(0.2, interrupt), torch.zeros(1)
    slow.kept = weakref.ref(state)
    monkeypatch.setattr(threads, "wait", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        threads.over_blocks(slow, span, span.arguments(torch.device("cpu")) | {"state": state})
    del state
    end = time.monotonic() + 10
    while len(slow.ended) < 2 and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert slow.ended == [True, True]


def test_where_no_thread_can_start_every_block_is_worked_on_once(span, monkeypatch):
    """A limit of processes, say. What the pool has in its queue is not done later, over memory that others have."""
    done, start, limit = [], threading.Thread.start, [0]
    slow = Slow(0.0, lambda: done.append(0))

    def refuse(thread):
        if limit[0] == 0:
            raise RuntimeError("can't start new thread")
        limit[0] -= 1
        start(thread)

    monkeypatch.setattr(threads, "_pool", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for limit[0] in (0, 1, 2):
        before = len(done), len(slow.ended)
        threads.over_blocks(slow, span, span.arguments(torch.device("cpu")))
        time.sleep(0.1)
        assert (len(done) - before[0], len(slow.ended) - before[1]) == (1, 2)


def test_a_thread_that_takes_work_as_it_is_cancelled_leaves_it(span, monkeypatch):
    slow, queued, cancel = Slow(0.0, lambda: None), [], Future.cancel

    def refuse(pool, *work):
        queued.append(work)
        raise RuntimeError("can't start new thread")

    def cancelled(future):
        found = cancel(future)
        take, *work = queued.pop()
        take(*work)
        return found

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    monkeypatch.setattr(Future, "cancel", cancelled)
    threads.over_blocks(slow, span, span.arguments(torch.device("cpu")))
    assert len(slow.ended) == 2


def test_a_pass_that_is_interrupted_while_its_threads_get_their_work_waits_for_them_too(span, monkeypatch):
    slow, submit, calls = Slow(0.2, lambda: None), ThreadPoolExecutor.submit, []

    def interrupted(*args):
        calls.append(args)
        return submit(*args) if len(calls) == 1 else interrupt()

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.over_blocks(slow, span, span.arguments(torch.device("cpu")))
    assert len(slow.ended) == 1
