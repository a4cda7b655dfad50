"""A bit that flips on the wire: where ranks then hold different bits the next check finds it, elsewhere nothing can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import onebit
from onebit.collectives.transport.protocol import Work
from tests import internals
from tests.faults.striking import AVERAGE, EXCHANGE, GATHER, SCATTER, AndThen, Watched
from tests.onebit.runs import Case, bits, kinds, take
from tests.ranks import group, run_ranks

AT, CHECK_AT, WHO = 6, 8, 1


class Damaging(Watched):
    """Flips a bit of what one phase delivers, once `due` is set: of the first message that arrives."""

    def __init__(self, ranks: Any, phase: str, place: str) -> None:
        super().__init__(ranks)
        self.due, self._phase, self._place = False, phase, place
        self.format: Any = None

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        if not self.due or not phase.startswith(self._phase):
            return start()

        def damage() -> None:
            self.due = False
            if self.format is None:
                out.view(-1).view(torch.uint8)[2] ^= 64  # of a fraction: what an exponent's would make is skipped
            else:
                shard, form = self.format.layout.shard(0, 0), self.format
                byte = {"scale": form.scales_offset + 2, "sign": form.bits_offset(shard.count), "flags": 4}
                out[0, byte[self._place]] ^= 1

        return AndThen(start(), damage)


@dataclass
class Found:
    error: str = ""
    step: int = 0
    params: list[bytes] = field(default_factory=list)  # after each step


def damaged(rank: int, case: Case, phase: str, place: str = "scale") -> Found:
    params, found = case.parameters(), Found()
    transport = Damaging(group(), phase, place)
    optimizer = case.build(params, transport)
    try:
        for step in range(1, case.steps + 1):
            found.step = step
            if (rank, step) == (WHO, AT):
                if optimizer.compressing:
                    transport.format = internals.exchanges(optimizer)[0].reply_format
                transport.due = phase != "residual"
                if phase == "residual":
                    internals.exchanges(optimizer)[0].residual.value[0] += 0.5
            take(case, rank, optimizer, params, step=step)
            found.params.append(bits(params))
    except onebit.DivergenceError as error:
        found.error = str(error)
    return found


def all_damaged(rank: int, size: int, kind: str) -> dict[str, Found]:
    """A run for each place; "direct" is reached with another one by each optimizer."""
    case = Case(kind, steps=10, options={"freeze_step": 3, "check_every": 4})
    direct = {"OneBitAdam": "scale", "OneBitLamb": "sign", "ZeroOneAdam": "flags"}[kind]
    found = {f"1, {place}": damaged(rank, case, SCATTER, place) for place in ("scale", "sign", "flags")}
    found["direct"] = damaged(rank, case.but(options={**case.options, "reply": "direct"}), EXCHANGE, direct)
    found[AVERAGE] = damaged(rank, case.but(options={**case.options, "freeze_step": 50}), AVERAGE)
    return found | {phase: damaged(rank, case, phase) for phase in (GATHER, "residual", "nowhere")}


@functools.cache
def runs(kind: str) -> dict[str, list[Found]]:
    """What three ranks found, by place."""
    ranks = run_ranks(3, all_damaged, kind)
    return {name: [one[name] for one in ranks] for name in ranks[0]}


@kinds
def test_in_the_all_gather_and_in_the_all_reduce_of_stage_1_it_is_found(kind: str) -> None:
    for name, found in runs(kind).items():
        if name in (GATHER, "residual", "nowhere"):
            continue
        assert found[0].params[AT - 2] == found[1].params[AT - 2]
        assert found[0].params[AT - 1] != found[1].params[AT - 1], f"the damage had no effect: {name}"
        for one in found:
            assert one.step == CHECK_AT, name
            assert "parameter 0 of group 0 (shape (7, 9)) has other values on rank 1 than on rank 0" in one.error


@kinds
def test_before_the_mean_it_is_a_wrong_number_for_all(kind: str) -> None:
    """What docs/reliability.md leaves to the transport: no rank differs from another."""
    right = runs(kind)["nowhere"][0].params
    for found in (runs(kind)[GATHER], runs(kind)["residual"]):
        assert all(one.error == "" and len(one.params) == 10 for one in found)
        assert all(one.params == found[0].params for one in found)
        assert found[0].params[AT - 2] == right[AT - 2]
        assert found[0].params[-1] != right[-1], "the damage had no effect"
