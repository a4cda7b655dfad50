"""Profiles show what the passes and the network are doing, by name."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import onebit
from tests.onebit.optim.contract import give, started
from tests.onebit.runs import Case
from tests.ranks import run_ranks

TWICE = ("compress", "average", "wait for the gather phase", "wait for the scatter phase")  # of two chunks
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def operations(rank: int, size: int, case: Case, last: int) -> dict[str, list[dict[str, int]]]:
    """By kind, of each step from the eighth on: how often which operation ran."""
    params, optimizer = started(case, 4, rank, size)
    found: dict[str, list[dict[str, int]]] = {}
    for step in range(5, last):
        give(case, params, step, rank)
        kind = optimizer.setup.algorithm.kind(step) if optimizer.compressing else "full"
        with profile() as recorded:
            optimizer.step()
        if step > 7:
            found.setdefault(kind, []).append({e.key: e.count for e in recorded.key_averages()})
    return found


@pytest.mark.parametrize(
    ("kind", "updates"),
    [("OneBitAdam", {"onebit.adam_update": 1}), ("OneBitLamb", {"onebit.lamb_statistics": 1, "onebit.adam_update": 1})],
)
def test_a_profile_names_every_pass_and_wait(kind: str, updates: dict[str, int]) -> None:
    case = Case(kind, options={"freeze_step": 2, "chunks": 2})
    for found in run_ranks(2, operations, case, 9):
        [step] = found["1 bit"]
        ranges = {name: count for name, count in step.items() if name.startswith("onebit.")}
        assert ranges == {"onebit.scan": 1} | {f"onebit.{name}": 2 for name in TWICE} | updates


LOCAL = {"var_update_scaler": 1, "var_freeze_step": 4, "local_step_scaler": 2, "local_step_clipper": 2}


@pytest.mark.parametrize(
    ("kind", "options", "kinds"),
    [
        ("OneBitAdam", {"freeze_step": 5}, {"1 bit"}),
        ("OneBitAdam", {"freeze_step": 50}, {"full"}),
        ("OneBitLamb", {"freeze_step": 5}, {"1 bit"}),
        ("OneBitLamb", {"freeze_step": 50}, {"full"}),
        ("ZeroOneAdam", {"var_update_scaler": 3}, {"1 bit", "full"}),
        ("ZeroOneAdam", LOCAL, {"local", "sync"}),
    ],
)
def test_no_step_makes_the_host_wait_or_asks_for_each_parameter_alone(kind: str, options: Any, kinds: Any) -> None:
    """What reads a value of the device; and `masked_fill_`, which marked one parameter after the other."""
    case = Case(kind, shapes=((70,), (3, 3), (0,), (300,)) * 5, options=options)
    for found in run_ranks(2, operations, case, 15):
        assert found.keys() >= kinds
        for counts in (each for of_kind in found.values() for each in of_kind):
            restores = counts.get("onebit.restore", 0)  # of which the CPU's reads its flag
            assert sum(counts.get(name, 0) for name in WAITS) == restores
            assert counts.get("aten::masked_fill_", 0) < 5


def test_the_last_full_step_and_the_one_after_a_sync_ask_for_no_parameter_alone() -> None:
    """However many parameters there are, as many operations; a CPU copies a list of tensors one by one."""

    def counts(parameters: int) -> dict[int, dict[str, int]]:
        params = [nn.Parameter(torch.ones(7)) for _ in range(parameters)]
        schedule = {"var_update_scaler": 1, "var_freeze_step": 4, "local_step_scaler": 2, "local_step_clipper": 2}
        optimizer = onebit.ZeroOneAdam(params, lr=1e-3, **schedule)
        found = {}
        for step in range(1, 10):
            for p in params:
                p.grad = torch.full_like(p, float(step))
            with profile() as recorded:
                optimizer.step()
            names = [(e.key, e.count) for e in recorded.key_averages() if e.key.startswith("aten::")]
            found[step] = {name: n for name, n in names if name not in ("aten::detach", "aten::copy_")}
        return found

    few, many = counts(5), counts(15)
    assert few[4] == many[4]
    assert few[9]["aten::_foreach_copy_"] == many[9]["aten::_foreach_copy_"] > 0
