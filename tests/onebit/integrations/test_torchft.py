"""torchft decides who is there: replicas are processes, and its lighthouse is in the test's process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import onebit
from onebit.collectives.transport import transport_for
from tests.faults.torchft import lighthouse, manager_of, wrapped
from tests.onebit.runs import Case, bits, take
from tests.ranks import group, run_ranks, run_ranks_once

STRUCK, MORE = 7, 3  # the step in which a replica is lost, and how many follow after it came back
VICTIM, NEWCOMER = 1, 3
SILENT = 2.0
Changes = list[tuple[int, int]]  # steps taken, and the number of ranks from then on
LOST = [("OneBitAdam", "kill"), ("OneBitLamb", "kill"), ("ZeroOneAdam", "kill"), ("OneBitAdam", "stop")]

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft")


def case_of(kind: str) -> Case:
    shapes = ((7, 9), (33,), (130,), (400,))
    return Case(kind, shapes, options={"freeze_step": 4, "elastic": True}, groups=({}, {"lr": 2e-3}))


@needs_torchft
@pytest.mark.parametrize(("kind", "how"), LOST)
def test_a_replica_is_lost_and_comes_back_as_by_reform(kind: str, how: str, tmp_path: Path) -> None:
    """Killed, a new process comes; stopped, the same one wakes. Bit for bit what `reform` gives between steps."""
    with lighthouse(join_timeout_ms=60_000, heartbeat_timeout_ms=int(1000 * SILENT)) as address:
        dead = (VICTIM,) if how == "kill" else ()
        ends = run_ranks_once(4, train, (kind, how, address, tmp_path), expect_dead=dead)
    found = [each for each in ends if each is not None]
    changes, *_ = found[0]
    assert [ranks for _, ranks in changes] == [3, 2, 3] and changes[1][0] in (STRUCK - 1, STRUCK)
    assert len(found) == 3 and all(each[1:] == found[0][1:] for each in found)
    wanted = [each for each in run_ranks(4, by_reform, kind, how, changes) if each is not None]
    assert [each[1] for each in found] == wanted


def train(rank: int, size: int, kind: str, how: str, address: str, folder: Path) -> tuple[Changes, bytes, int] | None:
    warnings.simplefilter("ignore", UserWarning)
    case, back, changes = case_of(kind), folder / "back", Changes()
    if rank == NEWCOMER and how == "stop":
        return None
    while rank == NEWCOMER and not back.exists():
        time.sleep(0.01)
    params, inner = case.made()
    optimizer = wrapped(rank, address, inner, SILENT)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    while rank != NEWCOMER and len(list(folder.glob("pid-*"))) < 3:
        time.sleep(0.01)
    struck = False
    while True:
        optimizer.zero_grad()
        if not changes or dist.get_world_size() != changes[-1][1]:
            changes.append((inner.steps, dist.get_world_size()))
        if dist.get_world_size() == 2 and inner.steps > STRUCK and not back.exists():
            back.touch()
            if how == "stop":
                os.kill(int((folder / f"pid-{VICTIM}").read_text()), signal.SIGCONT)
        if back.exists() and changes[-1][1] == 3 and inner.steps == changes[-1][0] + MORE:
            break
        if rank == VICTIM and inner.steps + 1 == STRUCK and not struck:
            struck = True
            changes.clear()
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        assert optimizer.manager.current_step() == inner.steps
        take(case, rank, optimizer, params, inner.steps + 1)
    optimizer.manager.shutdown()
    return changes, bits(params), inner.steps


def by_reform(rank: int, size: int, kind: str, how: str, changes: Changes) -> bytes | None:
    """Run without torchft, in one group."""
    warnings.simplefilter("ignore", UserWarning)
    case, (_, (lost, _), (back, _)) = case_of(kind), changes
    newcomer = NEWCOMER if how == "kill" else VICTIM
    started, stay, three = [
        transport_for(group()).split(rank in some) for some in ((0, 1, 2), (0, 2), (0, 2, newcomer))
    ]
    params, optimizer = case.made(started)
    for step in range(1, back + MORE + 1):
        there = (0, 1, 2) if step <= lost else (0, 2) if step <= back else (0, 2, newcomer)
        if step == lost + 1 and rank in there:
            onebit.reform(optimizer, stay)
        if step == back + 1:
            if rank == newcomer:
                params, optimizer = case.made(three)
            if rank in there:
                onebit.reform(optimizer, three)
        if rank in there:
            take(case, rank, optimizer, params, step)
    return bits(params) if rank in (0, 2, newcomer) else None


@needs_torchft
def test_no_step_with_fewer_than_min_replica_size(tmp_path: Path) -> None:
    """More than the lighthouse asks for."""
    with lighthouse(join_timeout_ms=2_000) as address:
        run_ranks_once(2, too_few, (address, tmp_path))


def too_few(rank: int, size: int, address: str, folder: Path) -> None:
    """The one that is behind fetches slowly: the other gives its state until it has come."""
    from torchft.checkpointing import HTTPTransport

    def fetch(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return fetch_at_once(*args, **options)

    fetch_at_once = HTTPTransport.recv_checkpoint
    case = case_of("OneBitAdam")
    inner = case.build(case.parameters())
    patience = {"max_retries": 2, "quorum_timeout": timedelta(seconds=4), "timeout": timedelta(seconds=4)}
    optimizer = wrapped(rank, address, inner, min_replica_size=3, **patience)
    dist.barrier()
    gave_up = pytest.raises(RuntimeError, match="exceeding max_retries")
    with mock.patch.object(HTTPTransport, "recv_checkpoint", fetch), gave_up:
        optimizer.zero_grad()
    assert inner.steps == 0
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < size:  # the other may need this one's store
        time.sleep(0.01)


@needs_torchft
def test_a_peers_state_is_refused() -> None:
    from onebit.integrations.torchft import OptimizerWrapper, QuorumGroup

    case = case_of("OneBitAdam")
    optimizer = case.build(case.parameters())
    facts = {"_min_replica_size": 1, "_use_async_quorum": False, "_group_world_size": 1}
    manager = mock.Mock(_pg=QuorumGroup(), **facts)
    manager.start_quorum.side_effect = lambda: optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="leave it out, and the parameters too"):
        OptimizerWrapper(manager, optimizer).zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())  # at other times a checkpoint is loaded


@needs_torchft
def test_what_does_not_fit_is_an_error() -> None:
    from onebit.integrations.torchft import OptimizerWrapper, QuorumGroup

    optimizer = case_of("OneBitAdam").build(case_of("OneBitAdam").parameters())
    with lighthouse() as address:
        for pg, options, error, says in [
            (object(), {}, TypeError, "needs a Manager of a QuorumGroup"),
            (QuorumGroup(), {"use_async_quorum": True}, ValueError, "asynchronous quorum"),
            (QuorumGroup(), {"world_size": 2}, ValueError, "several processes"),
        ]:
            manager = manager_of(0, address, pg, **options)
            with pytest.raises(error, match=says):
                OptimizerWrapper(manager, optimizer)
            manager.shutdown()


def test_without_torchft_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "onebit.integrations.torchft", raising=False)
    for name in [name for name in sys.modules if name.startswith("torchft.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"pip install 'torchft==0.2.0'"):
        importlib.import_module("onebit.integrations.torchft")
