"""A rank dies within a step: the others come to one step, bit for bit as a run that was reformed between two steps."""

from __future__ import annotations

import gc
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import onebit
from onebit.collectives import CollectiveError
from onebit.collectives.topology import Topology
from onebit.kernels.data.wire import MessageError
from onebit.optim.flat_state import FlatState
from onebit.optim.setup import Setup
from tests import internals
from tests.faults.striking import AVERAGE, EXCHANGE, FINITE, GATHER, SCATTER, SPREAD
from tests.onebit import runs
from tests.onebit.elastic.failing import Failing, Failure
from tests.onebit.optim.contract import backward
from tests.onebit.runs import Case, bits, on_ranks, on_warnings, same, snapshot
from tests.ranks import group, run_ranks, run_ranks_once

BF16, INF, NAN = "bfloat16", math.inf, math.nan
A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
SHAPES = ((7, 9), (33,), (130,), (400,))
LARGER = (*SHAPES[:-1], (6200,))  # of which two chunks are worth measuring
CHOOSING = "choosing a number of chunks"
LOCAL = {"var_update_scaler": 3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
FROZEN, CHUNKS = {"freeze_step": 3}, {"freeze_step": 3, "chunks": 2, "elastic": True}
ONE = {"freeze_step": 3, "elastic": True}
SYNC = {**LOCAL, "elastic": True}
FULL = {"var_update_scaler": 2}
MEASURED = {"freeze_step": 3, "chunks": "auto", "elastic": True}
EARLY = {"freeze_step": 3, "chunks": 2, "overlap": True}
RANKS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Death:
    """Rank 2 of three is lost, or of two nodes of two the second one. failures: by rank. taken: the step that ranks 0
    and 1 have taken in the end."""

    kind: str
    options: dict[str, Any]
    failures: dict[int, Failure]
    taken: int
    clip: float | None = None
    each: int = 1  # ranks a node
    dtype: str = "float32"
    last_dtype: str = ""
    bad: tuple[tuple[int, int, float], ...] = field(default=())
    group: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-3})  # the second param group
    second: dict[int, Failure] = field(default_factory=dict)  # of ranks of three, in the reform

    @property
    def has_frozen(self) -> bool:
        """Return whether some rank has begun stage 2, of which no step is taken in the end."""
        first = self.options.get("freeze_step", 0) + 1
        begun = (each.step == first and each.phase != CHOOSING for each in self.failures.values())
        return self.taken == first - 1 and any(begun)

    @property
    def case(self) -> Case:
        shapes = LARGER if self.options.get("chunks") == "auto" else SHAPES
        more = {name: getattr(self, name) for name in ("options", "dtype", "last_dtype", "bad", "each", "clip")}
        return Case(self.kind, shapes, groups=({}, self.group), **more)


def everywhere(step: int, phase: str, skip: int = 0, ranks: tuple[int, ...] = RANKS) -> dict[int, Failure]:
    return dict.fromkeys(ranks, Failure(step, phase, skip=skip))


LAST = f"{SCATTER} 1"
BEGUN = dict.fromkeys((0, 2), Failure(4, FINITE, "before"))
DEATHS = {
    "all fail in the average of stage 1": Death(A, FROZEN, everywhere(2, AVERAGE), 1),
    "all fail when they ask for flags": Death(L, CHUNKS, everywhere(6, FINITE), 5),
    "all fail in the gather phase": Death(A, FROZEN, everywhere(6, GATHER), 5),
    "all fail in the scatter phase": Death(L, FROZEN, everywhere(6, SCATTER), 5),
    "all fail in the scatter phase, tensor scale": Death(A, {**FROZEN, "scale": "tensor"}, everywhere(6, SCATTER), 5),
    "all fail in the first exchange of two": Death(A, ONE, everywhere(6, GATHER), 5, last_dtype=BF16),
    "all fail in the second exchange of two": Death(A, ONE, everywhere(6, SCATTER, 1), 5, last_dtype=BF16),
    "all fail in the last scatter phase": Death(A, CHUNKS, everywhere(6, LAST), 5),
    "all fail in a direct exchange": Death(L, {**FROZEN, "reply": "direct"}, everywhere(6, EXCHANGE), 5),
    "all fail in the first compressed step": Death(L, CHUNKS, everywhere(4, LAST), 3),
    "rank 0 has taken a full step": Death(A, FROZEN, {1: Failure(2, FINITE)}, 2),
    "rank 0 has taken a full step, clipped": Death(L, FROZEN, {1: Failure(2, FINITE)}, 2, clip=0.5),
    "rank 0 has skipped a full step": Death(A, FROZEN, {1: Failure(2, FINITE)}, 2, bad=((2, 1, INF),)),
    "rank 1 has taken the last full step": Death(L, CHUNKS, {0: Failure(3, FINITE)}, 3),
    "rank 0 has frozen": Death(A, CHUNKS, {1: Failure(3, FINITE), 0: Failure(4, FINITE, "before")}, 3),
    "rank 0 has taken a compressed step": Death(L, CHUNKS, {1: Failure(6, LAST)}, 6),
    "rank 0 has taken a compressed step, clipped": Death(A, CHUNKS, {1: Failure(6, LAST)}, 6, clip=0.5),
    "rank 0 has taken a step whose flags travel": Death(A, FROZEN, {1: Failure(6, SCATTER)}, 6),
    "rank 0 has skipped a step whose flags travel": Death(L, FROZEN, {1: Failure(6, SCATTER)}, 6, bad=((6, 0, NAN),)),
    "rank 0 has begun the next": Death(
        A, FROZEN, {1: Failure(6, SCATTER), 0: Failure(7, GATHER, "before")}, 6, dtype=BF16
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
    "all fail when they choose chunks of the second dtype": Death(
        L, MEASURED, everywhere(4, CHOOSING, 1), 3, last_dtype=BF16
    ),
    "rank 0 has chosen chunks, 1 for one dtype and 2 for the other": Death(
        A, MEASURED, {1: Failure(4, CHOOSING, skip=1), **BEGUN}, 3, last_dtype=BF16
    ),
    "all fail in messages that left in backward": Death(A, EARLY, everywhere(6, f"{SCATTER} 1"), 5),
    "rank 0 has taken a step with parameters that are not compressed": Death(
        A, EARLY, {1: Failure(6, FINITE)}, 6, group={"compress": False}
    ),
    "rank 1 has no average of parameters that are not compressed": Death(
        A,
        EARLY,
        {1: Failure(6, AVERAGE), 0: Failure(6, FINITE, "before"), 2: Failure(6, FINITE, "before")},
        5,
        group={"compress": False},
    ),
}


def choose_chunks(setup: Setup, state: FlatState) -> int:
    """Choose as if two were faster for 16 bits."""
    if setup.options.chunks == "auto":
        setup.topology.everyone.all_max(torch.zeros(1), CHOOSING)
        return 1 + (state.dtype != torch.float32)
    return setup.options.chunks


@pytest.mark.parametrize("name", DEATHS)
def test_what_is_left_is_as_after_a_reform_between_two_steps(name: str) -> None:
    death = DEATHS[name]
    # On nodes a thread of Gloo is busy with messages that nobody reads, until the process ends.
    found = run_ranks(3, die, death) if death.each == 1 else run_ranks_once(4, die, (death,))
    for got, wanted in found[:2]:
        assert got["steps"] == wanted["steps"] == death.taken
        assert same(got, wanted)


BEGINNING = "comparing the ranks' layouts"  # in a reform, and before the first messages of a new group
MERGING = "averaging residuals"
COMPARING, BUILDING = "comparing how far the ranks are", "comparing whether all can go on"
SECOND_DEATHS = {
    "when ranks compare": Death(A, CHUNKS, everywhere(6, LAST), 5, second=everywhere(0, COMPARING, 1)),
    "when rank 1 has finished the step": Death(L, CHUNKS, {1: Failure(6, LAST)}, 6, second=everywhere(0, BUILDING)),
    "when all have moved in a sync": Death(Z, SYNC, everywhere(15, SCATTER), 15, second=everywhere(0, BUILDING, 1)),
    "when rank 0 has gone on": Death(A, CHUNKS, everywhere(6, LAST), 5, second=everywhere(0, BUILDING, 1, (1, 2))),
    "when rank 1 has gone on, direct": Death(
        L, {**CHUNKS, "reply": "direct"}, everywhere(6, f"{EXCHANGE} 1"), 5, second=everywhere(0, BUILDING, 1, (0, 2))
    ),
    "when rank 0 has gone on to the sync": Death(
        Z,
        SYNC,
        everywhere(15, SCATTER),
        15,
        second={**everywhere(0, BUILDING, 1, (1, 2)), 0: Failure(0, BEGINNING, "before", skip=2)},
    ),
}


@pytest.mark.parametrize("name", SECOND_DEATHS)
def test_after_a_second_death_within_a_reform_the_next_one_goes_on(name: str) -> None:
    """It is, if no rank had gone on, bit for bit as if the second had died with the first. A sync is not left out."""
    death = SECOND_DEATHS[name]
    found = run_ranks(4, die, death)[:2]
    for got, wanted in found:
        assert got["steps"] == wanted["steps"] == death.taken
        if death.kind != Z:
            assert got["after"][0] == wanted["after"][0]
            assert same(got, wanted) or "gone on" in name
        if death.kind == A:
            assert_owed_alike(got["after"][1], wanted["after"][1])
    last = "after" if death.kind == Z else "later"  # local steps follow
    assert found[0][0][last][0] == found[1][0][last][0]
    assert found[0][0]["in step"] and found[1][0]["in step"]


def test_a_rank_that_dies_as_it_joins_leaves_ranks_that_go_on_together() -> None:
    """Rank 0 had gone on with three ranks, for which the messages of two are none, and rank 1 had not."""
    found = run_ranks(3, die_while_joining)
    assert found[0] == found[1] and all(found[0][0])


def die_while_joining(rank: int, size: int) -> Any:
    case = Case(A, SHAPES, options={**FROZEN, "reply": "auto"})
    params, optimizer = case.made(group(2 if rank < 2 else 3))
    for step in range(1, 6 if rank < 2 else 1):
        take(case, rank, optimizer, params, step)
    die_again(optimizer, Failing(group(3), Failure(0, BUILDING, skip=1) if rank else None))
    if rank == 2:
        return None
    onebit.reform(optimizer, group(2))
    states = optimizer.state_dict()["state"].values()
    momentum = [bits([own["exp_avg"]]) for own in states]
    for step in range(6, 9):
        take(case, rank, optimizer, params, step)
    return momentum, state_of(optimizer, params)[0]


def assert_owed_alike(got: Any, wanted: Any) -> None:
    """All to rounding, which comes twice where a residual was multiplied twice."""
    assert same(got["state"], wanted["state"])
    for own, other in zip(got["residuals"], wanted["residuals"], strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-6 * float(other.abs().max()))


def die(rank: int, size: int, death: Death) -> list[Any]:
    """The state after the reform and three more steps: of the run with the death, and of the one without."""
    with on_warnings("ignore", UserWarning), mock.patch.object(Setup, "choose_chunks", choose_chunks):
        return [run(rank, death, death.failures.get(rank), True), run(rank, death, None)]


def die_again(optimizer: Any, ranks: Failing) -> None:
    """Another rank dies within the reform: this one hears of it, or has gone on."""
    if ranks.failure is None:
        onebit.reform(optimizer, ranks)
    else:
        with pytest.raises(CollectiveError):
            onebit.reform(optimizer, ranks)


def run(rank: int, death: Death, failure: Failure | None, failed: bool = False) -> Any:
    """failed: whether ranks have died."""
    case, transport = death.case, Failing(group(), failure)
    params, optimizer = case.made(transport)
    last = death.taken if failure is None else failure.step
    step = 1
    try:
        while step <= last:
            transport.step = step
            take(case, rank, optimizer, params, step)
            step += 1
    except CollectiveError:
        assert failure is not None and step == failure.step
    else:
        assert failure is None
    if failure is None and death.has_frozen:
        optimizer.begin_step()
    if rank < 3 and death.second and failed:
        die_again(optimizer, Failing(group(3), death.second.get(rank)))
    if rank >= 2:
        return None
    if death.each == 1:
        onebit.reform(optimizer, group(2))
    else:
        onebit.reform(optimizer, Topology.of(dist.new_group([0, 1], use_local_synchronization=True)))
    attempts = int(internals.stages(optimizer).counts.sum())
    after, synchronized = state_of(optimizer, params), optimizer.synchronized
    for step in range(attempts + 1, attempts + 4):
        take(case, rank, optimizer, params, step)
    return {"steps": attempts, "in step": synchronized, "after": after, "later": state_of(optimizer, params)}


def take(case: Case, rank: int, optimizer: Any, params: Any, step: int) -> None:
    """Take a step, by autograd if messages leave in backward."""
    if not case.options.get("overlap"):
        return runs.take(case, rank, optimizer, params, step)
    backward(case, rank, optimizer, params, step)
    optimizer.step()


def state_of(optimizer: Any, params: Any) -> Any:
    """What all have, and the residuals of this rank alone."""
    if internals.state(optimizer).under_way is not None:  # nothing else may be asked for
        return [bits(params), internals.left_out(optimizer)]
    if not optimizer.synchronized:
        return [bits(params), False]
    saved = snapshot(optimizer.state_dict())
    numbers = json.loads(saved["param_groups"][0]["onebit"])
    saved["param_groups"][0]["onebit"] = {name: value for name, value in numbers.items() if name != "wire_bytes"}
    return [bits(params), {**saved, "residuals": internals.left_out(optimizer)}]


ENDS = [
    (False, 2, 0, ""),
    (False, 2, 0, BF16),
    (False, 2, 1, BF16),
    (True, 2, 1, BF16),
    (True, 1, 1, BF16),
    (True, 2, 0, ""),
]


@pytest.mark.parametrize(("called", "failing", "skip", "last_dtype"), ENDS)
@on_ranks(3)
def test_an_exchange_after_local_steps_is_ended_by_the_new_group_or_with_the_replies_of_the_old_one(
    rank: int, called: bool, failing: int, skip: int, last_dtype: str
) -> None:
    """A sync ends, or synchronize. The first: as if the step had been a local one, after which the new group
    synchronises at once. failing: of the ranks that stay, how many; with one the other has ended the exchange."""
    case, found, at = Case(Z, SHAPES, options=SYNC, last_dtype=last_dtype), [], 14 if called else 15
    for dies in (True, False):
        failure = Failure(at, SCATTER, skip=skip) if dies and rank >= 2 - failing else None
        if called and dies and failing == 1 and rank == 0:
            failure = Failure(at, MERGING, "before")
        if not dies and not called:
            case = case.but(options={**SYNC, "local_step_clipper": 16})
        transport, params = Failing(group(3), failure), case.parameters()
        optimizer = case.build(params, transport)
        try:
            for step in range(1, at + (not called)):
                transport.step = step
                take(case, rank, optimizer, params, step)
            transport.step = at
            if called and (dies or failing == 1):
                if not last_dtype:
                    optimizer.clip_grad_norm_(1.0)  # of a local step that is not taken
                (optimizer.synchronize if dies else optimizer.end_local_steps)()
        except CollectiveError:
            assert failure is not None
        if rank < 2:
            onebit.reform(optimizer, group(2))
            assert optimizer.synchronized == (dies or failing == 1)
            if not optimizer.synchronized:
                optimizer.end_local_steps()
            x, saved = state_of(optimizer, params)
            found.append([x, saved["state"], saved["residuals"]])
    assert rank == 2 or same(*found)


@on_ranks(3)
def test_messages_in_flight_are_taken_back_whatever_their_error_and_their_groups_are_dropped(rank: int) -> None:
    """overlap=True: a rank dies in backward, and another than a collective's error comes of a message that is half
    there."""
    warnings.simplefilter("ignore", UserWarning)
    case, found = Case(A, SHAPES, options=EARLY), []
    for dies in (True, False):
        failure = Failure(6, f"{SCATTER} 0", error=MessageError) if dies and rank < 2 else None
        transport, params = Failing(group(3), failure), case.parameters()
        optimizer = case.build(params, transport)
        for step in range(1, 6):
            take(case, rank, optimizer, params, step)
        transport.step = 6
        if dies:
            backward(case, rank, optimizer, params, 6)
        if rank == 2:
            optimizer.zero_grad()
            continue
        onebit.reform(optimizer, group(2))
        gc.collect()
        assert [each() for each in transport.duplicates] == [None]
        found.append(state_of(optimizer, params))
    assert rank == 2 or same(*found)


@pytest.mark.parametrize("behind", [2, 3])
def test_a_rank_that_is_local_steps_behind_leaves_them_out(behind: int) -> None:
    """A rank that missed all since the last sync takes part in the next, after which all have the same parameters."""
    one, other = run_ranks(3, be_late, behind)[:2]
    assert one["steps"] == other["steps"] == [10, 14]
    assert one["skipped"] == 0 and other["skipped"] == behind
    assert one["end"] == other["end"] and one["x"] != other["x"]


def be_late(rank: int, size: int, behind: int) -> Any:
    case = Case(Z, SHAPES, options={**LOCAL})
    params, optimizer = case.made(group())
    for step in range(1, (11, 11 - behind, 9)[rank]):
        take(case, rank, optimizer, params, step)
        torch._foreach_mul_([p.data for p in params], 0.9)  # as users do with weights: also right after a sync
    if rank == 2:
        return None
    onebit.reform(optimizer, group(2))
    assert not optimizer.synchronized
    steps, x = [optimizer.steps], bits(params)
    for step in range(11, 15):
        take(case, rank, optimizer, params, step)
    optimizer.synchronize()
    return {"steps": [*steps, optimizer.steps], "skipped": optimizer.skipped_steps, "x": x, "end": bits(params)}
