"""The ranks that other tests use: answers, errors, deaths, and that none outlives the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.limits import HUNG
from tests.ranks import RanksError, group, run_ranks, run_ranks_once

ROOT = Path(__file__).resolve().parent.parent


def facts(rank: int, size: int, offset: int) -> tuple[int, ...]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total, group=group())
    return rank, size, int(total), dist.get_rank(group()), torch.get_num_threads(), os.getpid()


def go_wrong(rank: int, size: int, who: int, how: str) -> Any:
    if rank != who:
        if how == "raise":
            dist.barrier(group=group())
        return rank
    if how == "wait":
        time.sleep(1)
        return rank
    if how == "raise":
        raise KeyError("what a test did wrong")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(600)
    return threading.Lock()  # which can't travel


def exists(pid: int) -> bool:
    """Return whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second, where it ends while its file is read
        return False


def test_every_rank_of_a_group_answers_and_the_same_processes_serve_again() -> None:
    pids = [answer[-1] for answer in run_ranks(8, facts, 0)]
    assert len({*pids, os.getpid()}) == 9
    for size in (1, 3, 8):
        expected = [(r, size, sum(range(size)) + 5 * size, r, 1, pids[r]) for r in range(size)]
        assert run_ranks(size, facts, 5) == expected


def test_a_size_that_the_pool_does_not_have() -> None:
    with pytest.raises(ValueError, match="run_ranks_once"):
        run_ranks(5, facts, 0)
    assert [answer[2] for answer in run_ranks_once(5, facts, (0,))] == [10] * 5


def test_what_goes_wrong_is_named_and_the_next_call_works() -> None:
    for how, text in (
        ("raise", r"(?s)rank 1 of 2 failed.*in go_wrong.*what a test did wrong"),
        ("die", "rank 1 of 2 died"),
        ("sleep", "rank 1 of 2 gave no answer in time"),
        ("return", "pickle"),
    ):
        with pytest.raises(RanksError, match=text):
            run_ranks_once(2, go_wrong, (1, how), timeout=1 if how == "sleep" else HUNG)
    with pytest.raises(RanksError, match="rank 1 of 2 died"):
        run_ranks(2, go_wrong, 1, "die")
    assert [answer[0] for answer in run_ranks(3, facts, 0)] == [0, 1, 2]
    assert run_ranks_once(3, go_wrong, (1, "die"), expect_dead=[1]) == [0, None, 2]
    with pytest.raises(RanksError, match="rank 0 of 2 was to die and answered 0"):
        run_ranks_once(2, go_wrong, (1, "wait"), expect_dead=[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_rank_outlives_its_parent() -> None:
    """The ranks are in the middle of some work."""
    code = (
        "from tests import ranks, test_ranks\n"
        "pair = ranks.Ranks(2, (2,))\n"
        "print(*[a[-1] for a in pair.run(2, test_ranks.facts, (0,), 60)], flush=True)\n"
        "pair.run(2, test_ranks.go_wrong, (1, 'sleep'), 600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(exists(pid) for pid in pids)
        time.sleep(0.3)
        parent.kill()
        parent.wait(HUNG)
        stop = time.monotonic() + HUNG
        while any(exists(pid) for pid in pids) and time.monotonic() < stop:
            time.sleep(0.05)
        assert not any(exists(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
