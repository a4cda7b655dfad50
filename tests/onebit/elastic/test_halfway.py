"""A rank dies within a step: the others come to one step, bit for bit as a run that was reformed between two steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

import onebit
from onebit.collectives import CollectiveError
from onebit.collectives.topology import Topology
from tests.faults.striking import AVERAGE, EXCHANGE, FINITE, GATHER, SCATTER, SPREAD
from tests.onebit.elastic.failing import Failing, Failure
from tests.onebit.runs import Case, bits, same, snapshot
from tests.ranks import group, run_ranks, run_ranks_once

A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
SHAPES = ((7, 9), (33,), (130,), (400,))
LOCAL = {"var_update_scaler": 3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
FROZEN, CHUNKS = {"freeze_step": 3}, {"freeze_step": 3, "chunks": 2, "elastic": True}
ONE = {"freeze_step": 3, "elastic": True}
FULL = {"var_update_scaler": 2}
RANKS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Death:
    """Rank 2 of three is lost, or of two nodes of two the second one. failures: by rank. taken: the step that ranks 0
    and 1 have taken in the end."""

    kind: str
    options: dict[str, Any]
    failures: dict[int, Failure]
    taken: int
    clip: float = 0.0
    each: int = 1  # ranks a node
    dtype: str = "float32"
    last_dtype: str = ""
    bad: tuple[tuple[int, int, float], ...] = field(default=())

    @property
    def has_frozen(self) -> bool:
        """Whether some rank has begun stage 2, of which no step is taken in the end."""
        first = self.options.get("freeze_step", 0) + 1
        return self.taken == first - 1 and any(each.step == first for each in self.failures.values())

    @property
    def case(self) -> Case:
        return Case(
            self.kind,
            SHAPES,
            options=self.options,
            groups=({}, {"lr": 3e-3}),
            dtype=self.dtype,
            last_dtype=self.last_dtype,
            bad=self.bad,
            each=self.each,
        )


def everywhere(step: int, phase: str) -> dict[int, Failure]:
    return dict.fromkeys(RANKS, Failure(step, phase))


LAST = f"{SCATTER} 1"
DEATHS = {
    "all fail in the average of stage 1": Death(A, FROZEN, everywhere(2, AVERAGE), 1),
    "all fail when they ask for flags": Death(L, CHUNKS, everywhere(6, FINITE), 5),
    "all fail in the gather phase": Death(A, FROZEN, everywhere(6, GATHER), 5),
    "all fail in the scatter phase": Death(L, FROZEN, everywhere(6, SCATTER), 5),
    "all fail in the scatter phase, tensor scale": Death(A, {**FROZEN, "scale": "tensor"}, everywhere(6, SCATTER), 5),
    "all fail in the first exchange of two": Death(A, ONE, everywhere(6, GATHER), 5, last_dtype="bfloat16"),
    "all fail in the second exchange of two": Death(
        A, ONE, dict.fromkeys(RANKS, Failure(6, SCATTER, skip=1)), 5, last_dtype="bfloat16"
    ),
    "all fail in the last scatter phase": Death(A, CHUNKS, everywhere(6, LAST), 5),
    "all fail in a direct exchange": Death(L, {**FROZEN, "reply": "direct"}, everywhere(6, EXCHANGE), 5),
    "all fail in the first compressed step": Death(L, CHUNKS, everywhere(4, LAST), 3),
    "rank 0 has taken a full step": Death(A, FROZEN, {1: Failure(2, FINITE)}, 2),
    "rank 0 has taken a full step, clipped": Death(L, FROZEN, {1: Failure(2, FINITE)}, 2, clip=0.5),
    "rank 0 has skipped a full step": Death(A, FROZEN, {1: Failure(2, FINITE)}, 2, bad=((2, 1, float("inf")),)),
    "rank 1 has taken the last full step": Death(L, CHUNKS, {0: Failure(3, FINITE)}, 3),
    "rank 0 has frozen": Death(A, CHUNKS, {1: Failure(3, FINITE), 0: Failure(4, FINITE, "before")}, 3),
    "rank 0 has taken a compressed step": Death(L, CHUNKS, {1: Failure(6, LAST)}, 6),
    "rank 0 has taken a compressed step, clipped": Death(A, CHUNKS, {1: Failure(6, LAST)}, 6, clip=0.5),
    "rank 0 has taken a step whose flags travel": Death(A, FROZEN, {1: Failure(6, SCATTER)}, 6),
    "rank 0 has skipped a step whose flags travel": Death(
        L, FROZEN, {1: Failure(6, SCATTER)}, 6, bad=((6, 0, float("nan")),)
    ),
    "rank 0 has begun the next": Death(
        A, FROZEN, {1: Failure(6, SCATTER), 0: Failure(7, GATHER, "before")}, 6, dtype="bfloat16"
    ),
    "rank 0 has begun the next, direct": Death(
        Z, {**FROZEN, "reply": "direct"}, {1: Failure(6, EXCHANGE), 0: Failure(7, EXCHANGE, "before")}, 6
    ),
    "rank 0 has begun the next, direct, without elastic": Death(
        A,
        {**FROZEN, "reply": "direct", "chunks": 2},
        {1: Failure(6, f"{EXCHANGE} 1"), 0: Failure(7, FINITE, "before")},
        6,
    ),
    "rank 0 has taken a full step of 0/1 Adam": Death(Z, FULL, {1: Failure(5, FINITE)}, 5),
    "all fail in the scatter phase of nodes": Death(A, CHUNKS, everywhere(6, LAST), 5, each=2),
    "rank 0 has its node's replies": Death(L, CHUNKS, {1: Failure(6, f"{SPREAD} 1")}, 6, each=2),
    "rank 1 has its node's replies, direct": Death(
        A, {**CHUNKS, "reply": "direct"}, {0: Failure(6, f"{SPREAD} 1")}, 6, each=2
    ),
    "rank 0 has synchronised": Death(Z, LOCAL, {1: Failure(11, SCATTER)}, 11),
}


@pytest.mark.parametrize("name", DEATHS)
def test_what_is_left_is_as_after_a_reform_between_two_steps(name: str) -> None:
    death = DEATHS[name]
    # On nodes a thread of Gloo is busy with messages that nobody reads, until the process ends.
    found = run_ranks(3, die, death) if death.each == 1 else run_ranks_once(4, die, (death,))
    for got, wanted in found[:2]:
        assert got["steps"] == wanted["steps"] == death.taken
        assert same(got, wanted)


def die(rank: int, size: int, death: Death) -> list[Any]:
    """The state after the reform and three more steps: of the run with the death, and of the one without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return [run(rank, death, death.failures.get(rank)), run(rank, death, None)]


def run(rank: int, death: Death, failure: Failure | None) -> Any:
    case, transport = death.case, Failing(group(), failure)
    params = case.parameters()
    optimizer = case.build(params, transport)
    last = death.taken if failure is None else failure.step
    step = 1
    try:
        while step <= last:
            transport.step = step
            take(case, rank, optimizer, params, step, death.clip)
            step += 1
    except CollectiveError:
        assert failure is not None and step == failure.step
    else:
        assert failure is None
    if rank >= 2:
        return None
    if failure is None and death.has_frozen:
        optimizer.begin_step()
    if death.each == 1:
        onebit.reform(optimizer, group(2))
    else:
        onebit.reform(optimizer, Topology.of(dist.new_group([0, 1], use_local_synchronization=True)))
    attempts = int(optimizer.current.stages.counts.sum())
    after = state_of(optimizer, params)
    for step in range(attempts + 1, attempts + 4):
        take(case, rank, optimizer, params, step, death.clip)
    return {"steps": attempts, "after": after, "later": state_of(optimizer, params)}


def take(case: Case, rank: int, optimizer: Any, params: Any, step: int, clip: float) -> None:
    for p, g in zip(params, case.gradients(rank, step), strict=True):
        p.grad = g
    if clip:
        optimizer.clip_grad_norm_(clip)
    optimizer.step()


def state_of(optimizer: Any, params: Any) -> Any:
    saved = snapshot(optimizer.state_dict()) if optimizer.synchronized else optimizer.synchronized
    if isinstance(saved, dict):
        del saved["param_groups"][0]["onebit"]["wire_bytes"]
    return [bits(params), saved]


@pytest.mark.parametrize("last_dtype, skip", [("", 0), ("bfloat16", 0), ("bfloat16", 1)])
def test_a_sync_that_no_rank_has_ended_is_ended_by_the_new_group(last_dtype: str, skip: int) -> None:
    """As if the step had been a local one, after which the new group synchronises at once."""
    for got, wanted in run_ranks(3, die_in_a_sync, last_dtype, skip)[:2]:
        assert same(got, wanted)


def die_in_a_sync(rank: int, size: int, last_dtype: str, skip: int) -> Any:
    sync = Case(Z, SHAPES, options={**LOCAL, "elastic": True}, last_dtype=last_dtype)
    local = sync.but(options={**sync.options, "local_step_clipper": 16})
    found = []
    for case, failure in ((sync, Failure(15, SCATTER, skip=skip)), (local, None)):
        transport, params = Failing(group(3), failure), case.parameters()
        optimizer = case.build(params, transport)
        try:
            for step in range(1, 16):
                transport.step = step
                take(case, rank, optimizer, params, step, 0)
        except CollectiveError:
            assert failure is not None and step == 15
        if rank < 2:
            onebit.reform(optimizer, group(2))
            assert optimizer.synchronized == (failure is not None)
            optimizer.synchronize()
            found.append([optimizer.steps, bits(params), snapshot(optimizer.state_dict()["state"])])
    return found


def test_an_exchange_of_synchronize_that_no_rank_has_ended_is_taken_back() -> None:
    for got, wanted in run_ranks(3, die_in_synchronize, 2)[:2]:
        assert same(got, wanted)


def test_an_exchange_of_synchronize_that_some_ranks_have_ended_is_refused() -> None:
    for text in run_ranks(3, die_in_synchronize, 1)[:2]:
        assert "optimizer.synchronize()" in text and "load the last checkpoint" in text


def die_in_synchronize(rank: int, size: int, failing: int) -> Any:
    """failing: of the ranks that stay, how many; the last ones."""
    case, found = Case(Z, SHAPES, options={**LOCAL, "elastic": True}, last_dtype="bfloat16"), []
    for dies in (True, False):
        failure = Failure(14, SCATTER, skip=1) if dies and rank >= 2 - failing else None
        transport, params = Failing(group(3), failure), case.parameters()
        optimizer = case.build(params, transport)
        for step in range(1, 14):
            take(case, rank, optimizer, params, step, 0)
        assert not optimizer.synchronized
        transport.step = 14
        if dies:
            try:
                optimizer.synchronize()
            except CollectiveError:
                assert failure is not None
        if rank < 2:
            try:
                onebit.reform(optimizer, group(2))
            except ValueError as error:
                return str(error)
            optimizer.synchronize()
            found.append([bits(params), snapshot(optimizer.state_dict()["state"])])
        elif failing == 1:
            break
    return found


def test_a_rank_that_is_local_steps_behind_leaves_them_out() -> None:
    """Two local steps: it takes part in the next sync, after which all have the same parameters."""
    one, other = run_ranks(3, be_late)[:2]
    assert one["steps"] == other["steps"] == [10, 14]
    assert one["skipped"] == 0 and other["skipped"] == 2
    assert one["end"] == other["end"] and one["x"] != other["x"]


def be_late(rank: int, size: int) -> Any:
    case = Case(Z, SHAPES, options={**LOCAL})
    params = case.parameters()
    optimizer = case.build(params, group())
    for step in range(1, (11, 9, 9)[rank]):
        take(case, rank, optimizer, params, step, 0)
    if rank == 2:
        return None
    onebit.reform(optimizer, group(2))
    assert not optimizer.synchronized
    steps, x = [optimizer.steps], bits(params)
    for step in range(11, 15):
        take(case, rank, optimizer, params, step, 0)
    optimizer.synchronize()
    return {"steps": [*steps, optimizer.steps], "skipped": optimizer.skipped_steps, "x": x, "end": bits(params)}


def test_a_rank_that_kept_nothing_says_so_and_all_raise() -> None:
    options = {"freeze_step": 3, "chunks": 2}
    death = Death(A, options, everywhere(6, LAST), 5)
    for text in run_ranks(3, die_without_undo, death)[:2]:
        assert "rank 0 has kept nothing" in text and "elastic=True" in text


def die_without_undo(rank: int, size: int, death: Death) -> str:
    try:
        run(rank, death, death.failures[rank])
    except ValueError as error:
        return str(error)
    return ""
