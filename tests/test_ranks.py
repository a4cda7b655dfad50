"""The ranks that other tests use: answers, errors, deaths, and that none outlives the process that started it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.limits import HUNG
from tests.ranks import RanksError, group, run_ranks, run_ranks_once

ROOT = Path(__file__).resolve().parent.parent


def facts(rank, size, offset):
    total = torch.tensor([rank + offset])
    dist.all_reduce(total, group=group())
    return rank, size, int(total), dist.get_rank(group()), os.getpid(), torch.get_num_threads()


def fail_on(rank, size, who):
    if rank == who:
        raise KeyError("what a test did wrong")
    dist.barrier(group=group())


def sleep_on(rank, size, who):
    if rank == who:
        time.sleep(600)


def die_on(rank, size, who):
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def wait_a_moment(rank, size):
    time.sleep(rank)
    return rank


def unpicklable(rank, size):
    return threading.Lock()


def exists(pid):
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_rank_of_the_group_answers(size):
    answers = run_ranks(size, facts, 5)
    assert [a[:4] for a in answers] == [(r, size, sum(range(size)) + 5 * size, r) for r in range(size)]
    assert len({a[4] for a in answers} | {os.getpid()}) == size + 1
    assert {a[5] for a in answers} == {1}


def test_the_same_processes_serve_again():
    first, second = run_ranks(3, facts, 0), run_ranks(2, facts, 0)
    assert [a[4] for a in first][:2] == [a[4] for a in second]


def test_an_exception_comes_back_with_its_traceback_and_the_next_call_works():
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"(?s)rank 1 of 3 failed.*in fail_on.*what a test did wrong"):
        run_ranks(3, fail_on, 1)
    assert time.monotonic() - start < HUNG / 2
    assert [a[0] for a in run_ranks(3, facts, 0)] == [0, 1, 2]


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RanksError, match="pickle"):
        run_ranks(1, unpicklable)


def test_a_rank_that_gives_no_answer_is_named_in_time():
    start = time.monotonic()
    with pytest.raises(RanksError, match="rank 2 of 3 gave no answer in time"):
        run_ranks(3, sleep_on, 2, timeout=1)
    assert time.monotonic() - start < HUNG / 2


def test_a_dead_rank_is_named():
    with pytest.raises(RanksError, match="rank 1 of 2 died"):
        run_ranks(2, die_on, 1)


def test_ranks_that_are_to_die():
    assert run_ranks_once(3, die_on, (1,), expect_dead=[1]) == [0, None, 2]
    with pytest.raises(RanksError, match="rank 0 of 2 was to die and answered 0"):
        run_ranks_once(2, wait_a_moment, expect_dead=[0])


def test_a_size_that_the_pool_does_not_have():
    with pytest.raises(ValueError, match="run_ranks_once"):
        run_ranks(5, facts, 0)
    assert [a[2] for a in run_ranks_once(5, facts, (0,))] == [10] * 5


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(blow):
    """Though they are in the middle of some work."""
    code = (
        "import os, time; from tests import ranks, test_ranks\n"
        "pair = ranks.Ranks(2, (2,))\n"
        "print(*[a[4] for a in pair.run(2, test_ranks.facts, (0,), 60)], flush=True)\n"
        "pair.run(2, test_ranks.sleep_on, (1,), 600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(exists(pid) for pid in pids)
        time.sleep(0.3)
        parent.send_signal(blow)
        parent.wait(10)
        stop = time.monotonic() + 10
        while any(exists(pid) for pid in pids) and time.monotonic() < stop:
            time.sleep(0.05)
        assert not any(exists(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
