"""What `python -m perf.elastic` counts."""

from __future__ import annotations

import gc
import threading

import torch
import torch.distributed as dist

from perf import elastic
from tests.ranks import run_ranks_once

ELEMENTS = 4000


def measure(rank: int, size: int) -> tuple[list[elastic.Change], int]:
    two, source = dist.new_group([0, 1]), torch.Generator().manual_seed(rank)
    gc.disable()  # which would end a giver with its optimizer
    found = elastic.changes(ELEMENTS, two, 2, source, 0.0)
    givers = [thread for thread in threading.enumerate() if thread.name == "onebit giver"]
    for thread in givers:
        thread.join(10)
    assert not any(thread.is_alive() for thread in givers)
    seconds = elastic.medians(ELEMENTS, two, 2, source)
    dist.barrier()
    return found, len([each for each in seconds.values() if each > 0])


def test_those_who_stay_send_no_parameters_and_one_rank_gives_them() -> None:
    found = run_ranks_once(3, measure)
    fewer, more = ([own[move].sent for own, _ in found] for move in (0, 1))
    assert 0 < fewer[0] == fewer[1] < ELEMENTS and fewer[2] == 0
    assert 12 * ELEMENTS < more[0] < 14 * ELEMENTS and 0 < more[1] == more[2] < ELEMENTS
    followed = [own[3].sent for own, _ in found]
    assert all(0 < sent < ELEMENTS for sent in followed)
    assert [kinds for _, kinds in found] == [4, 4, 0]


def test_other_numbers_of_ranks_are_an_error(capsys) -> None:
    assert elastic.main([]) == 2
    assert "torchrun --nproc-per-node 3" in capsys.readouterr().err
