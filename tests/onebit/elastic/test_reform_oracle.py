"""`onebit.reform` in real processes, against the float64 oracle that follows from its specification alone: what ranks
have left out after it, what stays bit for bit, and ten more steps."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import onebit
from tests.onebit.optim.contract import options
from tests.onebit.optim.simulation import After, LambSimulation, Simulation, after, assert_alike
from tests.onebit.optim.zero_one_simulation import ZeroOneSimulation
from tests.onebit.runs import Case, take
from tests.oracle.codec import Arrays, Layout
from tests.oracle.reform import left_out, reformed
from tests.ranks import MOST, run_ranks

FIRST_MOMENTUM = "first_momentum"  # m in fp32, where no messages stand for it
MORE = 10  # steps after it
CLOSE = 1e-6  # relative to what is added up: a product and a sum in fp32
SIMULATIONS = {"OneBitAdam": Simulation, "OneBitLamb": LambSimulation, "ZeroOneAdam": ZeroOneSimulation}
DERIVED = ("coefficient", "anchor", "own_momentum", "weights", "decay", "taken")
GROUPS = ({}, {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1})
ADAM = Case(groups=GROUPS, options={"freeze_step": 3})
LAMB = ADAM.but(kind="OneBitLamb")
# Dense steps 1 to 3, a full one at 5. With local steps: they begin after 8, syncs are 10, 12, 16, 20, 24.
ZERO_ONE = Case("ZeroOneAdam", ((7, 9), (33,), (0,), (2,), (130,), (1,)), options={"var_update_scaler": 2})
LOCAL = options(ZERO_ONE, var_freeze_step=5, local_step_scaler=3, local_step_clipper=4)
FEW = ADAM.but(shapes=((5,), (40,)))  # fewer blocks than shards: some ranks average padding alone


@dataclass(frozen=True)
class Move:
    """From the ranks `there` to the ranks `here`, after step `last`."""

    there: tuple[int, ...]
    here: tuple[int, ...]
    case: Case = ADAM
    last: int = 6
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def whole_case(self) -> Case:
        return options(self.case, **self.own)

    @property
    def stays(self) -> list[int | None]:
        """Of every new rank, which of the old ones it was."""
        return [self.there.index(rank) if rank in self.there else None for rank in self.here]

    @property
    def stayed(self) -> list[int]:
        return [who for who in self.stays if who is not None]

    def reply(self, ranks: tuple[int, ...]) -> Any:
        reply = self.whole_case.options.get("reply", 1)
        return reply if reply != "auto" else "direct" if len(ranks) == 2 else 1

    @property
    def holds_momentum(self) -> bool:
        """Whether replies can stand for m as before: a scale a block, and one message of it before and after."""
        replies = self.reply(self.there), self.reply(self.here)
        return self.whole_case.options.get("scale") != "tensor" and replies == (1, 1)

    def simulation(self, ranks: tuple[int, ...]) -> Any:
        case = options(self.whole_case, reply=self.reply(ranks))
        return SIMULATIONS[case.kind](case, len(ranks))


JOINS, IN_FRONT = ((0, 1), (0, 1, 2)), ((1, 2), (0, 1, 2))
LEAVES, FIRST_LEAVES = ((0, 1, 2), (0, 1)), ((0, 1, 2), (1, 2))
BETWEEN, INSTEAD = ((0, 1, 2, 3), (0, 2, 3)), ((0, 1, 2), (1, 2, 3))
CHUNKS, TENSOR, DIRECT, AUTO = {"chunks": 2}, {"scale": "tensor"}, {"reply": "direct"}, {"reply": "auto"}
MOVES = {
    "one joins": Move(*JOINS),
    "one joins in front": Move(*IN_FRONT, own=CHUNKS),
    "the last leaves": Move(*LEAVES, own=CHUNKS),
    "the first leaves": Move(*FIRST_LEAVES),
    "one between leaves": Move(*BETWEEN, own={**CHUNKS, "norm": "l1"}),
    "one for another": Move(*INSTEAD),
    "few blocks, joins": Move(*IN_FRONT, FEW, own=CHUNKS),
    "few blocks, leaves": Move(*BETWEEN, FEW, own=CHUNKS),
    "stage 1": Move(*INSTEAD, last=2),
    "the step of the freeze": Move(*IN_FRONT, last=3),
    "one scale, joins": Move(*JOINS, own={**TENSOR, **CHUNKS}),
    "one scale, leaves": Move(*BETWEEN, own=TENSOR),
    "direct, joins": Move(*IN_FRONT, own=DIRECT),
    "direct, leaves": Move(*BETWEEN, own={**DIRECT, **CHUNKS}),
    "auto, joins": Move(*JOINS, own=AUTO),
    "auto, leaves": Move(*FIRST_LEAVES, own=AUTO),
    "LAMB, joins": Move(*IN_FRONT, LAMB, own=CHUNKS),
    "LAMB, leaves": Move(*FIRST_LEAVES, LAMB),
    "LAMB, one scale": Move(*BETWEEN, LAMB, own=TENSOR),
    "LAMB, auto": Move(*JOINS, LAMB, own=AUTO),
    "0/1 Adam, dense": Move(*INSTEAD, ZERO_ONE, last=2),
    "0/1 Adam, joins after a step of 1 bit": Move(*IN_FRONT, ZERO_ONE, last=4),
    "0/1 Adam, leaves after a full step": Move(*BETWEEN, ZERO_ONE, last=5),
    "0/1 Adam, joins after a full step": Move(*JOINS, ZERO_ONE, last=5, own=CHUNKS),
    "0/1 Adam, leaves before local steps": Move(*FIRST_LEAVES, LOCAL, last=7),
    "0/1 Adam, joins after a sync": Move(*IN_FRONT, LOCAL, last=12),
    "0/1 Adam, leaves after a sync": Move(*BETWEEN, LOCAL, last=12),
}

# On a rank

_made: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of these of the pool's ranks, which all of the pool make."""
    if ranks not in _made:
        _made[ranks] = dist.new_group(list(ranks))
    return _made[ranks]


def newcomer(case: Case, group: dist.ProcessGroup) -> tuple[list[torch.nn.Parameter], Any]:
    """A rank that joins: its own parameters, and an optimizer that has taken no step."""
    params = [torch.nn.Parameter(p.detach() * 0.5 + 1) for p in case.parameters()]
    return params, case.build(params, group)


def on_rank(rank: int, size: int, move: Move) -> SimpleNamespace:
    """What a rank is after each step before, and right after the change and after each step from then on."""
    case, found = move.whole_case, SimpleNamespace(before=[], after=[], counters=None)
    before, group = group_of(move.there), group_of(move.here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what is lost is said once
        optimizer, params = None, None
        if rank in move.there:
            params = case.parameters()
            optimizer = case.build(params, before)
            found.before = steps(case, move.there.index(rank), optimizer, params, 1, move.last)
        if rank not in move.here:
            return found
        if optimizer is None:
            params, optimizer = newcomer(case, group)
        onebit.reform(optimizer, group)
        found.after = [without_derived(record(case, move.last, "", optimizer, params))]
        found.counters = counters(optimizer)
        found.after += steps(case, move.here.index(rank), optimizer, params, move.last + 1, move.last + MORE)
    return found


def steps(case: Case, rank: int, optimizer: Any, params: Any, first: int, last: int) -> list[After]:
    found = []
    for step in range(first, last + 1):
        coming = getattr(optimizer, "schedule", None)
        take(case, rank, optimizer, params, step)
        kind = coming.kind if coming else "1 bit" if optimizer.compressing else "full"
        found.append(record(case, step, kind, optimizer, params))
    return found


def record(case: Case, step: int, kind: str, optimizer: Any, params: Any) -> After:
    return after(step, kind, optimizer, [params[p] for p in case.order])


def without_derived(own: After) -> After:
    """What a step writes anew before anything reads it, a rank that joins does not have."""
    return replace(own, fields={name: value for name, value in own.fields.items() if name not in DERIVED})


def counters(optimizer: Any) -> tuple[int, int, bool]:
    group = optimizer.state_dict()["param_groups"][0]["onebit"]
    return group["steps"], group["skipped_steps"], group["compressing"]


# Here


@pytest.mark.parametrize("name", MOVES)
def test_another_set_of_ranks_is_the_oracles(name: str) -> None:
    move = MOVES[name]
    found = run_ranks(MOST, on_rank, move)
    before = list(zip(*(found[rank].before for rank in move.there), strict=True))
    now = list(zip(*(found[rank].after for rank in move.here), strict=True))
    assert_alike(move.whole_case, [found[rank].after for rank in move.here])
    new = move.simulation(move.here)
    old_layout = move.simulation(move.there).layout
    for recorded in before:
        new.set_to([relaid(recorded[0], old_layout, new.layout)] * len(move.here))
    assert_stays(move, before[-1], now[0], old_layout, new.layout)
    assert {found[rank].counters for rank in move.here} == {(move.last, 0, before[-1][0].e is not None)}
    if before[-1][0].e is not None:
        assert_left_out(move, before[-1], now[0], old_layout, new)
    compared = []
    for recorded in now[1:]:
        compared.append(new.check_step(recorded, recorded[0].step))
        new.set_to(recorded)
    exchanged = [each for each in compared if each is not None]
    assert sum(exchanged) >= 0.9 * len(exchanged) > 0, f"only {sum(exchanged)} of {len(exchanged)} could be compared"


def relaid(own: After, old: Layout, new: Layout) -> After:
    """Flat arrays of one layout as those of another; a parameter begins at the same place in both."""

    def of(array: Any) -> Any:
        return new.flatten(old.unflatten(array)) if array is not None and array.size == old.size else array

    fields = {name: of(value) for name, value in own.fields.items()}
    return replace(own, fields=fields, e=of(own.e), E=of(own.E), m=of(own.m))


def assert_stays(move: Move, before: Any, now: Any, old: Layout, new: Layout) -> None:
    """x, the moments, d and what else is alike on all ranks: bit for bit, also on those that join."""
    kept = without_derived(before[0])
    for own in now:
        assert own.bits == kept.bits
        added_to = {FIRST_MOMENTUM} if LAMB.kind == move.case.kind and not move.holds_momentum else set()
        assert own.fields.keys() == kept.fields.keys() | added_to
        for name, value in kept.fields.items():
            of_old, of_new = by_parameter(value, old), by_parameter(own.fields[name], new)
            assert all(map(np.array_equal, of_old, of_new)), name


def by_parameter(values: np.ndarray, layout: Layout) -> Arrays:
    return layout.unflatten(values) if values.size == layout.size else [values]


def assert_left_out(move: Move, before: Any, now: Any, old: Layout, new: Any) -> None:
    """The residuals, each where it belongs, and their sums; `new` begins with those of the oracle.

    Where replies cannot stand for m, b1 m is in the residuals or still in m: with it the sum is compared.
    """
    first = relaid(before[0], old, new.layout)
    worker, server = [clean(own.e, old) for own in before], clean(before[0].E, old)
    e, E = [clean(own.e, new.layout) for own in now], clean(now[0].E, new.layout)
    m, m_now = clean(first.m, new.layout), clean(now[0].m, new.layout)
    want, got = left_out(worker, server, old, move.stayed), left_out(e, E, new.layout, range(len(e)))
    sizes = left_out([np.abs(each) for each in worker], np.abs(server), old, range(len(worker)))
    if not move.holds_momentum:
        beta1 = new.flat([h.beta1 for h in new.hypers])
        want, got = added(want, new.layout, beta1 * m), added(got, new.layout, beta1 * m_now)
        assert_near(got, want, added(sizes, new.layout, np.abs(m)))
        folded = beta1 * (m - m_now)  # taken back: LAMB's next step needs m as it was
        new.set_to([replace(first, e=own.e - folded, E=own.E, m=first.m) for own in now])
        return
    assert_near(got, want, sizes)
    assert np.array_equal(m, m_now) and not E.any()
    expected = reformed(worker, server, old, new.layout, move.stays)
    for rank, (own, wanted) in enumerate(zip(e, expected, strict=True)):
        off = np.abs(own - wanted)
        assert np.all(off <= CLOSE * len(now) * new.layout.flatten(sizes)), f"what rank {rank} has left out"
    new.set_to([replace(first, e=own, E=np.zeros(new.layout.size)) for own in expected])


def added(arrays: Arrays, layout: Layout, flat: np.ndarray) -> Arrays:
    return [array + part for array, part in zip(arrays, layout.unflatten(flat), strict=True)]


def clean(flat: np.ndarray, layout: Layout) -> np.ndarray:
    """0 in padding."""
    return np.where(layout.valid, flat, 0.0)


def assert_near(got: Arrays, want: Arrays, sizes: Arrays) -> None:
    for p, (a, b, size) in enumerate(zip(got, want, sizes, strict=True)):
        assert np.all(np.abs(a - b) <= CLOSE * size + 1e-12), f"the sum of what is left out of parameter {p}"
