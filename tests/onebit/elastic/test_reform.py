"""Ranks leave and join between two steps: sums of what is owed, the same bits of all else, and ten more steps as the
float64 oracle takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onebit
from onebit.collectives.transport.protocol import LocalTransport, Work
from tests import internals
from tests.faults.striking import Watched
from tests.onebit.elastic.moves import RATE, Move, Moved, expected, flat, is_direct, moved, own_e, plan
from tests.onebit.optim.simulation import LambSimulation, Simulation, check, of_senders
from tests.onebit.optim.zero_one_simulation import ZeroOneSimulation
from tests.onebit.runs import Case, bits, on_ranks, on_warnings, options_of, run, take
from tests.ranks import group, run_ranks

A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
FIVE = ((7, 9), (33,), (2,), (130,), (400,))
EMPTY = ((7, 9), (0,), (33,), (1,))
GROUPS = ({}, {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1})
AUTO, DIRECT, TENSOR, CHUNKS = {"reply": "auto"}, {"reply": "direct"}, {"scale": "tensor"}, {"chunks": 2}
FULL = {"var_update_scaler": 2}  # dense steps 1 to 3, a full one at 5
SYNCS = {**FULL, "var_freeze_step": 5, "local_step_scaler": 3, "local_step_clipper": 4}  # after step 8: 10, 12, 16
LOCAL = {"var_update_scaler": 3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
FRONT, BETWEEN, FIRST, OTHER = ((1, 2), range(3)), (range(4), (0, 2, 3)), (range(3), (1, 2)), (range(3), (1, 2, 3))
OF = {A: Simulation, L: LambSimulation, Z: ZeroOneSimulation}
EXACT = 1e-6  # of what is owed, relative to the largest of it


def case(kind: str, **options: Any) -> Case:
    frozen = {} if "var_update_scaler" in options else {"freeze_step": 3}
    return Case(kind, FIVE, options={**frozen, **options}, groups=GROUPS)


FEW = case(A, **CHUNKS).but(shapes=((5,), (40,)))  # fewer blocks than shards: some ranks average padding alone


MOVES = {
    "2 to 3": Move(case(A), range(2), range(3), 6),
    "2 to 3, stage 1": Move(case(A), range(2), range(3), 2),
    "2 to 3, at the freeze": Move(case(L), range(2), range(3), 3),
    "2 to 3, direct before": Move(case(L, **AUTO), range(2), range(3), 6),
    "2 to 4, tensor scale": Move(case(L, **TENSOR), range(2), range(4), 6),
    "3 to 2": Move(case(L, **CHUNKS), range(3), range(2), 6),
    "3 to 2, stage 1": Move(case(L), range(3), range(2), 2),
    "3 to 2, direct after": Move(case(A, **AUTO), range(3), range(2), 6),
    "3 to 2, in good order": Move(case(A), range(3), range(2), 6, in_good_order=True),
    "4 to 3": Move(case(Z), range(4), range(3), 7),
    "3 to 2, in good order, in stage 1": Move(case(A), range(3), range(2), 2, in_good_order=True),
    "4 to 2, in good order": Move(case(Z, **CHUNKS), range(4), range(2), 7, in_good_order=True),
    "4 to 3, always direct": Move(case(A, **DIRECT), range(4), range(3), 6),
    "3 to 1": Move(case(A), range(3), range(1), 6),
    "3 to 1, stage 1": Move(case(Z), range(3), range(1), 2),
    "1 to 3": Move(case(L), range(1), range(3), 6),
    "3 to 3, nobody moves": Move(case(A, **CHUNKS), range(3), range(3), 6),
    "3 to 2, bfloat16": Move(case(A).but(dtype="bfloat16"), range(3), range(2), 6),
    "2 to 3, a local step": Move(case(Z, **LOCAL), range(2), range(3), 9),
    "3 to 2, a local step": Move(case(Z, **LOCAL), range(3), range(2), 9),
    "3 to 2, a local step, bfloat16, good order": Move(
        case(Z, **LOCAL).but(dtype="bfloat16"), range(3), range(2), 9, True
    ),
    "2 to 3, a local step, bfloat16, direct before": Move(
        case(Z, **LOCAL, **AUTO).but(dtype="bfloat16"), range(2), range(3), 9
    ),
    "2 x 2 to 1 x 2": Move(case(A).but(each=2), range(4), range(2), 6),
    "2 x 2 to 3": Move(case(L, **CHUNKS).but(each=2), range(4), range(3), 6),
    "2 to 2 x 2": Move(case(A), range(2), range(4), 6, each=2),
    "4 to 2 x 2": Move(case(L, **CHUNKS), range(4), range(4), 6, each=2),
    "2 x 2 to 1 x 2, in good order": Move(case(Z).but(each=2), range(4), range(2), 7, in_good_order=True),
    "one joins in front": Move(case(A, **CHUNKS), *FRONT, 6),
    "one joins in front, direct": Move(case(A, **DIRECT), *FRONT, 6),
    "one joins in front, few blocks": Move(FEW, *FRONT, 6),
    "one joins in front, after a full step": Move(case(Z, **FULL), *FRONT, 5),
    "one joins in front, after a sync": Move(case(Z, **SYNCS), *FRONT, 12),
    "one joins in front, with an empty parameter": Move(case(Z, **FULL).but(shapes=EMPTY), *FRONT, 4),
    "one between leaves": Move(case(A, **CHUNKS, norm="l1"), *BETWEEN, 6),
    "one between leaves, few blocks": Move(FEW, *BETWEEN, 6),
    "one between leaves, tensor scale": Move(case(L, **TENSOR, **CHUNKS), *BETWEEN, 6),
    "one between leaves, after a full step": Move(case(Z, **FULL), *BETWEEN, 5),
    "one between leaves, after a sync": Move(case(Z, **SYNCS), *BETWEEN, 12),
    "one between leaves, in good order": Move(case(A), *BETWEEN, 6, in_good_order=True),
    "the first leaves": Move(case(L), *FIRST, 6),
    "the first leaves, direct after": Move(case(A, **AUTO), *FIRST, 6),
    "the first leaves before local steps": Move(case(Z, **SYNCS), *FIRST, 7),
    "one for another": Move(case(A), *OTHER, 6),
    "one for another, stage 1": Move(case(Z, **FULL), *OTHER, 2),
    "2 to 3, saved": Move(case(A, elastic=True), range(2), range(3), 6, saves=6),
    "3 to 2, saved, in good order": Move(case(L, **CHUNKS), range(3), range(2), 6, in_good_order=True, saves=6),
    "2 to 3, saved before a step": Move(case(L), range(2), range(3), 7, saves=6),
    "2 x 2 to 3, saved": Move(case(L, **AUTO).but(each=2), range(4), range(3), 6, saves=6),
    "one between leaves, saved before a full step": Move(case(Z, **FULL), *BETWEEN, 4, saves=4),
    "one joins in front, saved before a local step": Move(case(Z, **LOCAL), *FRONT, 9, saves=8),
    "one for another, saved before two local steps": Move(case(Z, **SYNCS), *OTHER, 14, saves=12),
    "2 to 3, bfloat16": Move(case(L).but(dtype="bfloat16"), range(2), range(3), 6),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_owed_stays_and_all_else_has_the_same_bits(name: str) -> None:
    move = MOVES[name]
    old, now = moved(move)
    check_parameters(move, old, now)
    assert len({tuple(own.rates) for own in now}) == 1
    assert np.allclose(now[0].rates, [RATE * g.get("lr", 1e-2) for g in GROUPS], rtol=1e-12)
    assert all(own.counts == [move.at, 0] for own in now)
    check_fields(move, old, now)
    if now[0].later[0].e is not None:
        check_residuals(move, old, now)
    check_said(move, now)
    check_more_steps(move, old, now)


def check_parameters(move: Move, old: Sequence[Moved], now: Sequence[Moved]) -> None:
    """Check that parameters are as they were. A rank that joins has what all had after the last exchange."""
    for own in now:
        if own.before is not None:
            assert own.later[0].bits == own.before.bits
        elif moved_alone(old):
            anchors = plan(move.now, len(now)).unflatten(own.later[0].fields["anchor"])
            rounded = 2e-2 if move.case.dtype == "bfloat16" else 0
            for x, anchor in zip(own.later[0].x, anchors, strict=True):
                assert np.allclose(x.ravel(), anchor, rtol=rounded, atol=0)
        else:
            assert own.later[0].bits == old[0].before.bits


def moved_alone(old: Sequence[Moved]) -> bool:
    """Return whether ranks had taken local steps since the last exchange."""
    first = old[0].before
    assert first is not None
    return bool(first.fields.get("taken", 0))


def check_fields(move: Move, old: Sequence[Moved], now: Sequence[Moved]) -> None:
    """Moments, denominators and all that is kept for parameters, but for what every step makes anew."""
    first = old[0].before
    assert first is not None
    was, layout = plan(move.case, len(old)), plan(move.now, len(now))
    for own in now:
        skipped, own_before = {"coefficient"}, own.before
        if moved_alone(old) and own_before is None:
            skipped |= {"own_momentum", "master"}
        elif first.fields.get("taken") == 0:
            skipped |= {"anchor", "own_momentum", "weights", "decay", "taken"}
        if own.later[0].e is not None:
            skipped |= {"exp_avg", "folded_momentum", "last_momentum"}
        kept = (own_before or first).fields.keys() - skipped
        assert own.later[0].fields.keys() - skipped == first.fields.keys() - skipped
        for name in kept:
            value, before = own.later[0].fields[name], (own_before or first).fields[name]
            if value.ndim and value.shape != (len(move.case.shapes),):
                value, before = flat(layout, value), flat(was, before)
            assert np.array_equal(value, before), name


def check_residuals(move: Move, old: Sequence[Moved], now: Sequence[Moved]) -> None:
    """Each rank's, and that servers owe nothing. m is dense, or local steps have begun from it; no message has it."""
    layout, wanted = plan(move.now, len(now)), expected(move, old)
    largest = max(np.abs(e).max() for e in wanted)
    for rank, (own, want) in enumerate(zip(now, wanted, strict=True)):
        later = own.later[0]
        assert later.m is not None and later.E is not None
        assert not np.any(flat(layout, later.E)) and not np.any(flat(layout, later.m))
        assert np.array_equal(flat(layout, later.fields[dense_name(old)]), old[0].momentum)
        assert np.abs(own_e(layout, move.now, rank, later) - want).max() <= EXACT * largest, f"rank {rank}"


def dense_name(old: Sequence[Moved]) -> str:
    """The field that has m after a reform of stage 2."""
    return "last_momentum" if moved_alone(old) else "exp_avg"


def check_said(move: Move, now: Sequence[Moved]) -> None:
    """One line of what is lost, on one rank."""
    lost = [] if move.in_good_order or now[0].later[0].e is None else move.gone
    said = [line for own in now for line in own.said if "did not come along" in line]
    assert len(said) == bool(lost)
    if lost:
        ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        assert said[0].startswith(f"WARNING onebit: {ranks} of {len(move.there)} ")


def check_more_steps(move: Move, old: Sequence[Moved], now: Sequence[Moved]) -> None:
    """The float64 oracle goes on from what was recorded after the reform."""
    layout, of = plan(move.now, len(now)), OF[move.case.kind]
    groups = tuple({**g, "lr": RATE * g.get("lr", 1e-2)} for g in GROUPS)
    reply = "direct" if is_direct(move.now, len(now)) else 1
    options = options_of(move.case.kind, {**move.case.options, "reply": reply})
    after = move.now.but(options=options, groups=groups)
    start = [own.later[0] for own in now]
    first = old[0].before
    if first is not None and first.fields.get("taken") == 0:  # a sync has left what local steps begin with
        of_sync = {name: first.fields[name] for name in ("weights", "decay", "taken")}
        for name in ("anchor", "own_momentum"):
            of_sync[name] = layout.flatten(split(move, flat(plan(move.case, len(old)), first.fields[name])))
        start = [replace(own, fields={**own.fields, **of_sync}) for own in start]
    if start[0].e is not None:
        factors = np.repeat(start[0].fields.get("momentum_factor", np.ones(len(move.case.shapes))), numels(move))
        sent = np.divide(old[0].momentum, factors, out=np.zeros(len(factors)), where=factors > 0)
        start = [replace(own, m=layout.flatten(split(move, sent))) for own in start]
    start = [each[0] for each in of_senders(after, [[own] for own in start], of(after, len(now) // move.each))]
    earlier = [[old[0].frozen] * len(start)] if old[0].frozen else []
    check(after, [own.later[1:] for own in now], of, [*earlier, start])


def split(move: Move, values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(numels(move))[:-1])


def numels(move: Move) -> list[int]:
    return [int(np.prod(move.case.shapes[p])) for p in move.case.order]


def test_ranks_change_again_and_again() -> None:
    """1 to 3, 3 to 2, 2 to 4, and 4 to 1: all ranks have the same parameters at any time."""
    found = [ends for ends, _ in run_ranks(4, change_ranks, (1, 3, 2, 4, 1))]
    for row in zip(*found, strict=True):
        there = [each for each in row if each is not None]
        assert len(there) in (1, 2, 3, 4) and len(set(there)) == 1
    assert len({x for x in found[0] if x is not None}) == 5


def change_ranks(rank: int, size: int, numbers: Sequence[int]) -> tuple[list[bytes | None], Any]:
    """Parameters after three steps with each number of ranks, as far as this rank takes part; and at the end the report
    and the bytes of messages."""
    own, found, step = Case(A, FIVE, options={"freeze_step": 3, "check_every": 2}), [], 0
    params, optimizer = None, None
    for now in numbers:
        if rank >= now:
            params, optimizer = None, None
            found.append(None)
            step += 3
            continue
        if optimizer is None:
            params, optimizer = own.made(group(now))
        if step:
            onebit.reform(optimizer, group(now))
        for _ in range(3):
            step += 1
            take(own, rank, optimizer, params, step)
        found.append(bits(params))
    return found, optimizer and (optimizer.report(), optimizer.wire_bytes)


def test_the_report_counts_who_left_and_came_and_all_that_was_sent() -> None:
    """Three ranks, then two, then three again."""
    found = [report for _, report in run_ranks(3, change_ranks, (3, 2, 3))]
    for rank, (report, nbytes) in enumerate(found):
        assert (report.left, report.came) == (rank < 2, 1)
        in_stage_1 = 0 if rank == 2 else 3 * 4 * sum(map(math.prod, FIVE)) * 2 * 2 / 3  # a step's ring of three ranks
        assert report.sent == pytest.approx(nbytes + in_stage_1)
    first, _ = found[0]
    assert first.reforming > 0 and "1 left, 1 came, in 0." in str(first)
    assert first.numbers()["onebit/ranks_left"] == 1


class Counting(Watched):
    """Counts what a rank may send."""

    sent = 0

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        self.sent += out.nbytes
        return start()

    def send(self, values: Tensor, to: int, phase: str) -> Work:
        self.sent += values.nbytes
        return super().send(values, to, phase)


@pytest.mark.parametrize("in_good_order", [False, True])
@on_ranks(3)
def test_ranks_that_stay_send_no_state(rank: int, in_good_order: bool) -> None:
    """Nobody joins, and nobody is sent any; all that ranks compare has some kilobytes. What they owe is their own."""
    own = Case(A, ((40000,),), options={"freeze_step": 3})
    params, optimizer = own.made(group(3))
    for step in range(1, 7):
        take(own, rank, optimizer, params, step)
    ranks = Counting(group(2)) if rank < 2 else None
    if ranks or in_good_order:
        onebit.reform(optimizer, ranks, leaving=[2] if in_good_order else [])
    assert ranks is None or ranks.sent < 8000
    with pytest.warns(UserWarning, match="what compression has left out") if ranks else nullcontext():
        optimizer.state_dict()


@on_ranks(3)
def test_all_go_on_with_what_the_first_rank_knows_of_norms(rank: int) -> list[float]:
    """Rank 1 has clipped the gradients of a step in which a rank died; rank 2 joins."""
    clipped = case(A).but(clip=0.5)
    params, optimizer = clipped.made(group(2) if rank < 2 else LocalTransport())
    run(clipped, rank, optimizer, params, 1, 5 if rank < 2 else 0)
    if rank == 1:
        internals.mean_norm(optimizer).compressed_step(*torch.tensor([[3.0], [0.0]]), senders=2)
    onebit.reform(optimizer, group(3))
    before = internals.mean_norm(optimizer).numbers.tolist()
    take(clipped, rank, optimizer, params, 6)
    assert internals.mean_norm(optimizer).numbers.tolist() != before
    of_other_ranks, local, steps, share = before
    assert of_other_ranks == 0 and local > 0 and steps == 2 and 0 < share < 1
    return before


@on_ranks(3)
def test_a_rank_joins_where_overlap_was_turned_off(rank: int) -> bytes:
    own = case(A, overlap=True)
    params, optimizer = own.made(group(2) if rank < 2 else LocalTransport())
    with on_warnings() as said:
        run(own.but(clip=0.5), rank, optimizer, params, 1, 5 if rank < 2 else 0)
    assert any("overlap is off" in each for each in said) == (rank < 2)
    onebit.reform(optimizer, group(3))
    assert not optimizer.overlap.wanted  # else it would make groups, and the others would not
    run(own, rank, optimizer, params, 6, 8)
    return bits(params)


@on_ranks(3)
def test_a_rank_joins_after_skipped_steps(rank: int) -> None:
    """All count anew, and look for the one to blame in the same step."""
    own = case(A).but(bad=tuple((step, 0, float("nan")) for step in range(6, 12)))
    params, optimizer = own.made(group(2) if rank < 2 else LocalTransport())
    run(own, rank, optimizer, params, 1, 7 if rank < 2 else 0)
    onebit.reform(optimizer, group(3))
    assert internals.stages(optimizer).skipped_in_a_row == 0
    with on_warnings() as said:
        run(own, rank, optimizer, params, 8, 12)
    assert sum("3 steps in a row were skipped" in each for each in said) == (rank == 0)


@pytest.mark.parametrize("kind", [A, L, Z])
def test_a_rank_joins_where_a_parameter_was_added_late(kind: str) -> None:
    """How late goes with the state: at the freeze the variance is corrected alike on all."""
    assert len(set(run_ranks(3, join_with_a_late_parameter, kind))) == 1


def join_with_a_late_parameter(rank: int, size: int, kind: str) -> bytes:
    own = case(kind, **({"var_update_scaler": 5} if kind == Z else {"freeze_step": 6})).but(groups=({}, {}))
    params = own.parameters()
    everyone = group(2) if rank < 2 else LocalTransport()
    optimizer = own.but(groups=({},), shapes=FIVE[:3]).build(params[:3], everyone)
    for step in range(1, 5):
        if step == 3 or rank == 2:
            optimizer.add_param_group({"params": params[3:]})
        if rank == 2:
            break
        run(own, rank, optimizer, params, step, step)
    onebit.reform(optimizer, group(3))
    assert [int(state["joined_after_step"].max()) for state in internals.states(optimizer)] == [2]
    run(own, rank, optimizer, params, 5, 8)
    assert optimizer.compressing
    return bits(params)
