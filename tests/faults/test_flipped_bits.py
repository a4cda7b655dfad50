"""A bit that flips on the wire: where ranks then hold different bits the next check finds it, elsewhere nothing can.

in the all-gather, on its way to one rank      that rank moves otherwise: found
in stage 1's all-reduce, at one rank           found
in the all-to-all, or in a residual            one wrong number, the same for every rank: not found
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import onebit
from onebit.collectives.transport.protocol import Work
from onebit.collectives.transport.torch import TorchTransport
from tests.faults.striking import AVERAGE, EXCHANGE, GATHER, SCATTER
from tests.onebit.runs import Case, bits, kinds, take
from tests.ranks import group, run_ranks

AT, CHECK_AT, WHO = 6, 8, 1
PLACES = ("scale", "sign", "flags")  # of the first message that arrives


@dataclass
class _Damaged:
    work: Work
    damage: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.damage()


class Damaging(TorchTransport):
    """Flips a bit of what one phase delivers, in the step for which `due` is set."""

    def __init__(self, ranks: Any, phase: str, place: str) -> None:
        super().__init__(ranks)
        self.due, self._phase, self._place = False, phase, place
        self.format: Any = None

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self._after(super().all_to_all(out, sent, phase), out, phase)

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        return self._after(super().all_gather(out, sent, phase), out, phase)

    def all_sum(self, values: Tensor, phase: str) -> Work:
        return self._after(super().all_sum(values, phase), values, phase)

    def _after(self, work: Work, out: Tensor, phase: str) -> Work:
        if not self.due or not phase.startswith(self._phase):
            return work

        def damage() -> None:
            self.due = False
            if self.format is None:
                out.view(-1).view(torch.uint8)[2] ^= 64  # of a fraction: what an exponent's would make is skipped
            else:
                shard, form = self.format.layout.shard(0, 0), self.format
                byte = {"scale": form.scales_offset + 2, "sign": form.bits_offset(shard.count), "flags": 4}
                out[0, byte[self._place]] ^= 1

        return _Damaged(work, damage)


def damaged(rank: int, size: int, case: Case, phase: str, place: str) -> dict[str, Any]:
    params = case.parameters()
    transport = Damaging(group(), phase, place)
    optimizer = case.build(params, transport)
    found: dict[str, Any] = {"error": "", "step": 0, "params": []}
    try:
        for step in range(1, case.steps + 1):
            found["step"] = step
            if (rank, step) == (WHO, AT):
                if optimizer.compressing:
                    transport.format = optimizer.current.reducers[0].exchange.reply_format
                transport.due = phase != "residual"
                if phase == "residual":
                    optimizer.current.reducers[0].exchange.residual.value[0] += 0.5
            take(case, rank, optimizer, params, step=step)
            found["params"].append(bits(params))
    except onebit.DivergenceError as error:
        found["error"] = str(error)
    return found


def case_of(kind: str, freeze_step: int, **options: Any) -> Case:
    return Case(kind, steps=10, options={"freeze_step": freeze_step, "check_every": 4, **options})


@kinds
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("reply", "phase"), [(1, SCATTER), pytest.param(2, SCATTER, marks=pytest.mark.slow), ("direct", EXCHANGE)]
)
def test_in_the_all_gather_it_is_found(kind: str, reply: Any, phase: str, place: str) -> None:
    found = run_ranks(3, damaged, case_of(kind, 3, reply=reply), phase, place)
    assert found[0]["params"][AT - 2] == found[1]["params"][AT - 2]
    assert found[0]["params"][AT - 1] != found[1]["params"][AT - 1], "the damage had no effect"
    for one in found:
        assert one["step"] == CHECK_AT
        assert "has other values on rank 1 than on rank 0" in one["error"]
        assert "parameter 0 of group 0" in one["error"]


@kinds
def test_in_the_all_reduce_of_stage_1_it_is_found(kind: str) -> None:
    for one in run_ranks(3, damaged, case_of(kind, 50), AVERAGE, ""):
        assert one["step"] == CHECK_AT
        assert "parameter 0 of group 0 (shape (7, 9)) has other values on rank 1 than on rank 0" in one["error"]


@kinds
@pytest.mark.parametrize("phase", [GATHER, "residual"])
def test_before_the_mean_it_is_a_wrong_number_for_all(kind: str, phase: str) -> None:
    """What docs/reliability.md leaves to the transport: no rank differs from another."""
    case = case_of(kind, 3)
    found = run_ranks(3, damaged, case, phase, "scale")
    right = run_ranks(3, damaged, case, "no phase", "")
    assert all(one["error"] == "" and one["step"] == case.steps for one in found)
    assert all(one["params"] == found[0]["params"] for one in found)
    assert found[0]["params"][AT - 2] == right[0]["params"][AT - 2]
    assert found[0]["params"][-1] != right[0]["params"][-1], "the damage had no effect"
