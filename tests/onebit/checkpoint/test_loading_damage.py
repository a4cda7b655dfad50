"""Damaged states: a ValueError or TypeError with a word, and an optimizer that is bit for bit as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import onebit
from tests.checkpoints import Run
from tests.fuzz.states import mark
from tests.onebit.runs import Case, freezing_kinds, kinds, snapshot

CASE = Case(options={"freeze_step": 3, "betas": (0.9, 0.95)}, groups=({"lr": 1e-3}, {"weight_decay": 0.1}))
ONE, GROUP = ("state", 0), ("param_groups", 0)
NUMBERS = (*GROUP, "onebit")
nan, inf = float("nan"), float("inf")


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    return change


BOTH: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "state is a list": (("state",), [], "state is not a dict"),
    "a parameter's state is a list": (ONE, [], "state is not a dict"),
    "param_groups is a dict": (("param_groups",), {}, "not a list of dicts"),
    "a group is a number": (GROUP, 3, "not a list of dicts"),
    "params is a number": ((*GROUP, "params"), 3, "no list of parameters"),
    "params are lists": ((*GROUP, "params"), [[0], [1]], "other things than numbers and names"),
    "a parameter twice": ((*GROUP, "params"), [0, 0], "twice"),
    "no lr": ((*GROUP, "lr"), None, "has no lr"),
    "no betas": ((*GROUP, "betas"), None, "has no betas"),
    "lr is a word": ((*GROUP, "lr"), "fast", "lr='fast'"),
    "lr beyond fp32": ((*GROUP, "lr"), 1e39, "lr=1e"),
    "lr beyond any float": ((*GROUP, "lr"), 10**400, "lr="),
    "lr without a value": ((*GROUP, "lr"), torch.empty(1, device="meta"), "without a value"),
    "betas without end": ((*GROUP, "betas"), torch.zeros(1).expand(2**40), "betas="),
    "amsgrad is a tensor": ((*GROUP, "amsgrad"), torch.zeros(3), "neither true nor false"),
    "numbers are a list": (NUMBERS, [1], "is a list"),
    "version is a tensor": ((*NUMBERS, "version"), torch.zeros(3), "version"),
    "negative steps": ((*NUMBERS, "steps"), -1, "steps is -1"),
    "half a step": ((*NUMBERS, "steps"), 2.5, "steps is 2.5"),
    "steps beyond int64": ((*NUMBERS, "steps"), 2**64, "steps is"),
    "skipped is a word": ((*NUMBERS, "skipped_steps"), "x", "skipped_steps"),
    "no ranks": ((*NUMBERS, "ranks"), 0, "ranks is 0"),
    "ranks without end": ((*NUMBERS, "ranks"), 2**40, "ranks is"),
    "no trace": ((*NUMBERS, "trace"), None, "no trace"),
    "trace of words": ((*NUMBERS, "trace"), [["x"]], "trace"),
    "trace of nothing": ((*NUMBERS, "trace"), [[]], "trace"),
    "trace with rows of other lengths": ((*NUMBERS, "trace"), [[1.0], [1.0, 2.0]], "different lengths"),
    "chunks are a tensor": ((*NUMBERS, "chunks"), torch.ones(2), "not a Tensor"),
    "chunks is a number": ((*NUMBERS, "chunks"), 1, "chunks is a list"),
    "compressing is a word": ((*NUMBERS, "compressing"), "yes", "in which stage"),
    "a negative step": ((*ONE, "step"), torch.tensor(-1.0), "step is -1"),
    "a step that is NaN": ((*ONE, "step"), torch.tensor(nan), "step is nan"),
    "steps in a tensor": ((*ONE, "step"), torch.ones(3), "step is a number"),
    "steps in a word": ((*ONE, "step"), "7", "step is '7'"),
}
STAGE_1: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    **BOTH,
    "a moment that is NaN": ((*ONE, "exp_avg"), with_value(nan), "exp_avg .* nan"),
    "an infinite variance": ((*ONE, "exp_avg_sq"), with_value(inf), "exp_avg_sq .* inf"),
    "a negative variance": ((*ONE, "exp_avg_sq"), with_value(-1.0), "exp_avg_sq .* -1"),
    "a moment of whole numbers": ((*ONE, "exp_avg"), lambda t: t.long(), "dtype torch.int64"),
    "a complex moment": ((*ONE, "exp_avg"), lambda t: t.to(torch.complex64), "dtype torch.complex64"),
    "a moment in a list": ((*ONE, "exp_avg"), lambda t: t.tolist(), "is a list, not a tensor"),
    "a moment of numpy": ((*ONE, "exp_avg"), lambda t: t.numpy(), "is a ndarray, not a tensor"),
    "a moment without values": ((*ONE, "exp_avg"), lambda t: t.to("meta"), "no values"),
    "a sparse moment": ((*ONE, "exp_avg"), lambda t: t.to_sparse(), "no values"),
    "a moment beyond fp32": ((*ONE, "exp_avg"), lambda t: with_value(1e300)(t.double()), "exp_avg .* inf"),
}
STAGE_2: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    **BOTH,
    "a denominator that is NaN": ((*ONE, "denominator"), with_value(nan), "denominator .* nan"),
    "a negative denominator": ((*ONE, "denominator"), with_value(-1.0), "denominator .* -1"),
    "bits that are floats": ((*ONE, "momentum_bits"), lambda t: t.float(), "dtype torch.float32"),
    "a negative scale": ((*ONE, "momentum_scales"), with_value(-1.0), "momentum_scales .* -1"),
    "a residual that is NaN": ((*ONE, "residual_of_rank_0"), with_value(nan), "residual_of_rank_0 .* nan"),
    "an infinite E": ((*ONE, "server_residual_of_rank_0"), with_value(inf), "server_residual_of_rank_0 .* inf"),
    "swapped": ((*ONE, "residual_of_rank_0"), lambda t: torch.zeros(3, dtype=torch.uint8), "shape"),
    "blocks of no size": ((*NUMBERS, "block_size"), 33, "block_size"),
    "blocks of a float": ((*NUMBERS, "block_size"), 32.0, "block_size"),
    "an unknown scale": ((*NUMBERS, "scale"), "row", "scale is 'row'"),
    "scale is a tensor": ((*NUMBERS, "scale"), torch.zeros(3), "scale is"),
    "chunks without end": ((*NUMBERS, "chunks"), [2**31], "chunks is"),
    "no chunks": ((*NUMBERS, "chunks"), [0], "chunks is 0"),
}


def damaged(steps: int, kind: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = snapshot(Run(CASE.but(kind=kind), steps).optimizer.state_dict())
    *way, last = path
    place: Any = state
    for key in way:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return state


def assert_refused(kind: str, here: int, state: Any, match: str) -> None:
    run = Run(CASE.but(kind=kind, seed=1), here)
    before = mark(run)
    with pytest.raises((ValueError, TypeError), match=match):
        run.optimizer.load_state_dict(state)
    assert mark(run) == before
    undisturbed = Run(CASE.but(kind=kind, seed=1), here)
    run.on(here + 1, here + 2)
    undisturbed.on(here + 1, here + 2)
    assert mark(run)[:2] == mark(undisturbed)[:2]


@kinds
@pytest.mark.parametrize("name", STAGE_1)
def test_what_no_stage_1_leaves_behind_is_refused(kind: str, name: str) -> None:
    path, value, match = STAGE_1[name]
    assert_refused(kind, 2, damaged(2, kind, path, value), match)


@freezing_kinds
@pytest.mark.parametrize("name", STAGE_2)
@pytest.mark.parametrize("here", [2, 6])
def test_what_no_stage_2_leaves_behind_is_refused(kind: str, name: str, here: int) -> None:
    path, value, match = STAGE_2[name]
    assert_refused(kind, here, damaged(6, kind, path, value), match)


@pytest.mark.parametrize("state", [None, 3, [], torch.zeros(1).expand(2**40)], ids=["None", "3", "list", "tensor"])
def test_what_is_no_state_is_refused(state: Any) -> None:
    assert_refused("OneBitAdam", 6, state, "a state is a dict")


@pytest.mark.parametrize(
    ("what", "value", "match"),
    [
        ("coefficient_average", torch.tensor(nan), "coefficient_average"),
        ("coefficient_average", torch.zeros(2), "2 elements"),
        ("coefficient_average", torch.zeros(1).expand(2**40), "elements, not one"),
        ("ratio", torch.tensor(-1.0), "ratio"),
        ("ratio", "x", "is a str"),
        ("coefficient_steps", torch.tensor(-1.0), "coefficient_steps is -1"),
        ("first_momentum", torch.zeros(3), "first_momentum .* shape"),
        ("counted_bits", torch.zeros(1, dtype=torch.uint8), "counted_bits .* shape"),
    ],
)
def test_damage_to_lambs_own_state_is_refused(what: str, value: Any, match: str) -> None:
    state = damaged(6, "OneBitLamb", (*ONE, "step"), torch.tensor(6.0))
    state["state"][0][what] = value
    assert_refused("OneBitLamb", 6, state, match)


def test_merge_states_refuses_damaged_states() -> None:
    good = snapshot(Run(CASE, 6).optimizer.state_dict())
    for path, value, match in (
        (NUMBERS, [1], "is a list"),
        ((*NUMBERS, "steps"), torch.ones(3), "steps is"),
        (ONE, None, "number 1 is not of the parameters"),
        (("state",), [], "state is not a dict"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            onebit.merge_states([good, damaged(6, "OneBitAdam", path, value)])


# Found by fuzzing: values that can't be compared, or have no end


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0), np.zeros(3), 10**400, nan, None, "x", [1]])
@pytest.mark.parametrize("name", ["coeff_beta", "min_coeff", "factor_max", "factor_threshold", "ratio"])
def test_lambs_options_are_numbers_or_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"coeff|factor|ratio"):
        onebit.OneBitLamb(CASE.parameters(), **{name: value})


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(0), np.zeros(3), 10**400, 2**63, nan, [1]])
@pytest.mark.parametrize(
    "name", ["freeze_step", "freeze_window", "zero_variance", "scale", "norm", "chunks", "variance_floor"]
)
def test_options_of_a_wrong_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        onebit.OneBitAdam(CASE.parameters(), **{name: value})


@pytest.mark.parametrize("group", [{}, {"lr": 0.1}, [], None, 3])
def test_a_group_without_parameters_is_refused(group: Any) -> None:
    optimizer = onebit.OneBitAdam(CASE.parameters())
    with pytest.raises(TypeError, match="params"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("numel", [None, 1.5, "7", [1.5], torch.empty(3, device="meta"), torch.zeros(1).expand(2**40)])
def test_a_number_of_elements_of_a_wrong_type_is_refused(numel: Any) -> None:
    with pytest.raises(TypeError, match="numel="):
        onebit.CompressedAllReduce(numel)
