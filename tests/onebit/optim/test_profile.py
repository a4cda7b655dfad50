"""Profiles show what the passes and the network are doing, by name."""

from typing import Any

import pytest
from torch.profiler import profile

from tests import internals
from tests.onebit.optim.contract import give, started
from tests.onebit.runs import Case
from tests.ranks import run_ranks

TWICE = ("compress", "average", "wait for the gather phase", "wait for the scatter phase")  # of two chunks
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def operations(rank: int, size: int, case: Case, steps: range) -> dict[int, tuple[str, dict[str, int]]]:
    """Return each of these steps' kind, and how often which operation ran."""
    (params, optimizer), found = started(case, steps[0] - 1, rank, size), {}
    for step in steps:
        give(case, params, step, rank)
        kind = internals.algorithm(optimizer).kind(step) if optimizer.compressing else "full"
        with profile() as recorded:
            optimizer.step()
        found[step] = kind, {e.key: e.count for e in recorded.key_averages()}
    return found


@pytest.mark.parametrize(
    ("kind", "updates"),
    [("OneBitAdam", {"onebit.adam_update": 1}), ("OneBitLamb", {"onebit.lamb_statistics": 1, "onebit.adam_update": 1})],
)
def test_a_profile_names_every_pass_and_wait(kind: str, updates: dict[str, int]) -> None:
    case = Case(kind, options={"freeze_step": 2, "chunks": 2})
    for found in run_ranks(2, operations, case, range(8, 9)):
        kind_of_step, counts = found[8]
        ranges = {name: count for name, count in counts.items() if name.startswith("onebit.")}
        assert kind_of_step == "1 bit"
        assert counts[f"Optimizer.step#{kind}.step"] == 1  # torch's own, by which its tools find the step
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
    for found in run_ranks(2, operations, case, range(8, 15)):
        assert {of_step for of_step, _ in found.values()} >= kinds
        for _, counts in found.values():
            restores = counts.get("onebit.restore", 0)  # of which the CPU's reads its flag
            assert sum(counts.get(name, 0) for name in WAITS) == restores
            assert counts.get("aten::masked_fill_", 0) < 5


def test_the_last_full_step_and_the_one_after_a_sync_ask_for_no_parameter_alone() -> None:
    """However many parameters there are, as many operations; a CPU copies a list of tensors one by one."""
    by_parameter, found = ("aten::detach", "aten::copy_"), []
    for parameters in (5, 15):
        of_steps = operations(0, 1, Case("ZeroOneAdam", ((7,),) * parameters, options=LOCAL), range(4, 10))
        found.append({step: {n: c for n, c in of.items() if "aten::" in n} for step, (_, of) in of_steps.items()})
    few, many = ({n: c for n, c in of[4].items() if n not in by_parameter} for of in found)
    assert few == many
    few, many = (of[9]["aten::_foreach_copy_"] for of in found)
    assert few == many > 0
