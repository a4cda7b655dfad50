"""Ranks leave and join between two steps: sums of what is owed, the same bits of all else, and ten more steps as the
float64 oracle takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import onebit
from onebit.collectives.transport.protocol import Work
from tests.faults.striking import Watched
from tests.onebit.elastic.moves import RATE, Move, Moved, expected, flat, is_direct, moved, own_e, plan
from tests.onebit.optim.simulation import LambSimulation, Simulation, check, of_senders
from tests.onebit.optim.zero_one_simulation import ZeroOneSimulation
from tests.onebit.runs import Case, bits, options_of, take
from tests.ranks import group, run_ranks

A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
FIVE = ((7, 9), (33,), (2,), (130,), (400,))
GROUPS = ({}, {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1})
AUTO, DIRECT, TENSOR, CHUNKS = {"reply": "auto"}, {"reply": "direct"}, {"scale": "tensor"}, {"chunks": 2}
LOCAL = {"var_update_scaler": 3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4}
OF = {A: Simulation, L: LambSimulation, Z: ZeroOneSimulation}
EXACT = 1e-6  # of what is owed, relative to the largest of it


def case(kind: str, **options: Any) -> Case:
    frozen = {} if "var_freeze_step" in options else {"freeze_step": 3}
    return Case(kind, FIVE, options={**frozen, **options}, groups=GROUPS)


MOVES = {
    "2 to 3": Move(case(A), 2, 3, 6),
    "2 to 3, stage 1": Move(case(A), 2, 3, 2),
    "2 to 3, at the freeze": Move(case(L), 2, 3, 3),
    "2 to 3, direct before": Move(case(L, **AUTO), 2, 3, 6),
    "2 to 4, tensor scale": Move(case(L, **TENSOR), 2, 4, 6),
    "3 to 2": Move(case(L, **CHUNKS), 3, 2, 6),
    "3 to 2, stage 1": Move(case(L), 3, 2, 2),
    "3 to 2, direct after": Move(case(A, **AUTO), 3, 2, 6),
    "3 to 2, in good order": Move(case(A), 3, 2, 6, in_good_order=True),
    "4 to 3": Move(case(Z), 4, 3, 7),
    "3 to 2, in good order, in stage 1": Move(case(A), 3, 2, 2, in_good_order=True),
    "4 to 2, in good order": Move(case(Z, **CHUNKS), 4, 2, 7, in_good_order=True),
    "4 to 3, always direct": Move(case(A, **DIRECT), 4, 3, 6),
    "3 to 1": Move(case(A), 3, 1, 6),
    "3 to 1, stage 1": Move(case(Z), 3, 1, 2),
    "1 to 3": Move(case(L), 1, 3, 6),
    "3 to 3, nobody moves": Move(case(A, **CHUNKS), 3, 3, 6),
    "3 to 2, bfloat16": Move(case(A).but(dtype="bfloat16"), 3, 2, 6),
    "2 to 3, a local step": Move(case(Z, **LOCAL), 2, 3, 9),
    "3 to 2, a local step": Move(case(Z, **LOCAL), 3, 2, 9),
    "3 to 2, a local step, bfloat16, good order": Move(case(Z, **LOCAL).but(dtype="bfloat16"), 3, 2, 9, True),
    "2 to 3, a local step, bfloat16, direct before": Move(case(Z, **LOCAL, **AUTO).but(dtype="bfloat16"), 2, 3, 9),
    "2 x 2 to 1 x 2": Move(case(A).but(each=2), 4, 2, 6),
    "2 x 2 to 3": Move(case(L, **CHUNKS).but(each=2), 4, 3, 6),
    "2 to 2 x 2": Move(case(A), 2, 4, 6, each=2),
    "4 to 2 x 2": Move(case(L, **CHUNKS), 4, 4, 6, each=2),
    "2 x 2 to 1 x 2, in good order": Move(case(Z).but(each=2), 4, 2, 7, in_good_order=True),
    "2 to 3, bfloat16": Move(case(L).but(dtype="bfloat16"), 2, 3, 6),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_is_owed_stays_and_all_else_has_the_same_bits(name: str) -> None:
    move = MOVES[name]
    found = moved(move)
    now = found[: move.here]
    check_parameters(move, found)
    assert len({tuple(own.rates) for own in now}) == 1
    assert np.allclose(now[0].rates, [RATE * g.get("lr", 1e-2) for g in GROUPS], rtol=1e-12)
    assert all(own.counts == [move.at, 0] for own in now)
    check_fields(move, found)
    if now[0].later[0].e is not None:
        check_residuals(move, found)
    check_said(move, found)
    check_more_steps(move, found)


def check_parameters(move: Move, found: Sequence[Moved]) -> None:
    """As they were. A rank that joins has what all had after the last exchange."""
    for own in found[: move.here]:
        if own.before is not None:
            assert own.later[0].bits == own.before.bits
        elif moved_alone(found):
            anchors = plan(move.now, move.here).unflatten(own.later[0].fields["anchor"])
            rounded = 2e-2 if move.case.dtype == "bfloat16" else 0
            for x, anchor in zip(own.later[0].x, anchors, strict=True):
                assert np.allclose(x.ravel(), anchor, rtol=rounded, atol=0)
        else:
            assert own.later[0].bits == found[0].later[0].bits


def moved_alone(found: Sequence[Moved]) -> bool:
    """Whether ranks had taken local steps since the last exchange."""
    first = found[0].before
    assert first is not None
    return bool(first.fields.get("taken", 0))


def check_fields(move: Move, found: Sequence[Moved]) -> None:
    """Moments, denominators and all that is kept for parameters."""
    first = found[0].before
    assert first is not None
    was, layout = plan(move.case, move.there), plan(move.now, move.here)
    for own, own_before in ((each.later[0], each.before) for each in found[: move.here]):
        assert own.fields.keys() - {"first_momentum"} == first.fields.keys()
        skipped = {"coefficient"}  # which every step makes anew
        if own_before is None and moved_alone(found):
            skipped |= {"own_momentum", "master"}
        for name, before in (own_before or first).fields.items():
            value = own.fields[name]
            if name in skipped:
                continue
            if value.ndim and value.shape != (len(FIVE),):
                value, before = flat(layout, value), flat(was, before)
            assert np.array_equal(value, before), name


def folded(move: Move) -> bool:
    """Whether messages of the group before are none of the group now: m is then in the residuals of all ranks."""
    return move.case.options.get("scale") == "tensor" or (
        is_direct(move.case, move.there) or is_direct(move.now, move.here)
    )


def momentum(move: Move, found: Sequence[Moved]) -> tuple[np.ndarray, np.ndarray]:
    """m before, and beta1 m."""
    before, beta1 = found[0].before, []
    assert before is not None and before.m is not None
    for p in move.case.order:
        betas: Any = GROUPS[move.case.group_of(p)].get("betas", (0.9, 0.999))
        beta1.append(np.full(int(np.prod(move.case.shapes[p])), betas[0]))
    m = flat(plan(move.case, move.there), before.m)
    return m, np.concatenate(beta1) * m


def check_residuals(move: Move, found: Sequence[Moved]) -> None:
    """Each rank's, and that servers owe nothing. m is the same, or in the residuals of all ranks."""
    layout, wanted = plan(move.now, move.here), expected(move, found)
    m, beta1_m = momentum(move, found)
    largest = max(np.abs(e).max() for e in wanted)
    for rank, (own, want) in enumerate(zip(found[: move.here], wanted, strict=True)):
        now = own.later[0]
        assert now.m is not None and now.E is not None
        assert not np.any(flat(layout, now.E))
        assert np.array_equal(flat(layout, now.m), 0 * m if folded(move) else m)
        in_residuals = folded(move) and not moved_alone(found)
        got = own_e(layout, move.now, rank, now) - (beta1_m if in_residuals else 0)
        assert np.abs(got - want).max() <= EXACT * largest, f"rank {rank}"


def check_said(move: Move, found: Sequence[Moved]) -> None:
    """One line of what is lost, on one rank."""
    lost = move.there > move.here and not move.in_good_order and found[0].later[0].e is not None
    said = [line for own in found for line in own.said if "did not come along" in line]
    assert len(said) == lost
    if lost:
        assert said[0].startswith(f"rank{'s' * (move.there - move.here > 1)} {move.here}")


def check_more_steps(move: Move, found: Sequence[Moved]) -> None:
    """The float64 oracle goes on from what was recorded after the reform."""
    now, layout, of = found[: move.here], plan(move.now, move.here), OF[move.case.kind]
    groups = tuple({**g, "lr": RATE * g.get("lr", 1e-2)} for g in GROUPS)
    reply = "direct" if is_direct(move.now, move.here) else 1
    options = options_of(move.case.kind, {**move.case.options, "reply": reply})
    after = move.now.but(options=options, groups=groups)
    start = [own.later[0] for own in now]
    if start[0].e is not None and folded(move) and not moved_alone(found):
        m, beta1_m = (layout.flatten(split(move, each)) for each in momentum(move, found))
        start = [replace(own, e=own.e - beta1_m, m=m) for own in start]
    start = [each[0] for each in of_senders(after, [[own] for own in start], of(after, move.here // move.each))]
    earlier = [[found[0].frozen] * len(start)] if found[0].frozen else []
    check(after, [own.later[1:] for own in now], of, [*earlier, start])


def split(move: Move, values: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([int(np.prod(move.case.shapes[p])) for p in move.case.order])[:-1]
    return np.split(values, ends)


def test_ranks_change_again_and_again() -> None:
    """1 to 3, 3 to 2, 2 to 4, and 4 to 1: all ranks have the same parameters at any time."""
    found = run_ranks(4, change_ranks)
    for row in zip(*found, strict=True):
        there = [each for each in row if each is not None]
        assert len(there) in (1, 2, 3, 4) and len(set(there)) == 1
    assert len({x for x in found[0] if x is not None}) == 5


def change_ranks(rank: int, size: int) -> list[bytes | None]:
    """Parameters after three steps each, as far as this rank takes part."""
    own, found, step = Case(A, FIVE, options={"freeze_step": 3, "check_every": 2}), [], 0
    params, optimizer = None, None
    for now in (1, 3, 2, 4, 1):
        if rank >= now:
            params, optimizer = None, None
            found.append(None)
            step += 3
            continue
        if optimizer is None:
            params = own.parameters()
            optimizer = own.build(params, group(now))
        if step:
            onebit.reform(optimizer, group(now))
        for _ in range(3):
            step += 1
            take(own, rank, optimizer, params, step)
        found.append(bits(params))
    return found


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
def test_ranks_that_stay_send_no_state(in_good_order: bool) -> None:
    """To anyone, where nobody joins; all that ranks compare has some kilobytes."""
    assert max(run_ranks(3, count_sent, in_good_order)[:2]) < 8000


def count_sent(rank: int, size: int, in_good_order: bool) -> int:
    own = Case(A, ((40000,),), options={"freeze_step": 3})
    params = own.parameters()
    optimizer = own.build(params, group(3))
    for step in range(1, 7):
        take(own, rank, optimizer, params, step)
    ranks = Counting(group(2)) if rank < 2 else None
    if ranks or in_good_order:
        onebit.reform(optimizer, ranks, leaving=[2] if in_good_order else [])
    return ranks.sent if ranks else 0
