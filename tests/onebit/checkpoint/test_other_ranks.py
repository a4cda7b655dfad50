"""Load on another number of ranks: merged states keep the mean residual, a single rank's start it from zero."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import onebit
from tests.onebit.checkpoint.states import (
    TWO_GROUPS,
    assert_near,
    assert_step,
    load_run,
    other_parameters,
    per_element,
    save_run,
    saved_and_loaded,
    set_parameters,
    trained,
)
from tests.onebit.runs import Case, freezing_kinds, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

MOVES = {
    "4 to 2": (4, 2, {}, {}),
    "2 to 3": (2, 3, {}, {}),
    "1 to 2": (1, 2, {}, {}),
    "3 to 1": (3, 1, {}, {}),
    "4 to 2, two chunks": (4, 2, {"chunks": 2}, {}),
    "chunks 1 to 2": (2, 2, {}, {"chunks": 2}),
    "chunks 3 to 1, 3 to 2": (3, 2, {"chunks": 3}, {"chunks": 1}),
    "blocks 64 to 32": (2, 2, {}, {"block_size": 32}),
    "blocks 32 to 96, 2 to 3": (2, 3, {"block_size": 32, "chunks": 2}, {"block_size": 96}),
    "block to tensor": (2, 2, {}, {"scale": "tensor"}),
    "tensor to block": (2, 3, {"scale": "tensor"}, {"scale": "block"}),
    "direct, 2 to 3": (2, 3, {"reply": "direct", "chunks": 2}, {}),
    "direct, 3 to 1, blocks 64 to 96": (3, 1, {"reply": "direct"}, {"block_size": 96}),
    "direct, chunks 1 to 2": (2, 2, {"reply": "direct"}, {"chunks": 2}),
    "direct to two phases": (2, 2, {"reply": "direct"}, {"reply": 1}),
    "two phases to direct, 3 to 2": (3, 2, {"chunks": 2}, {"reply": "direct"}),
    "two bits, 2 to 3": (2, 3, {"reply": 2, "chunks": 2}, {}),
    "two bits, blocks 64 to 96": (2, 2, {"reply": 2}, {"block_size": 96}),
    "two bits to one": (2, 2, {"reply": 2}, {"reply": 1}),
    "one bit to two, 3 to 2": (3, 2, {"chunks": 2}, {"reply": 2}),
    "direct to two bits": (2, 2, {"reply": "direct"}, {"reply": 2}),
    "two bits to direct, tensor": (2, 2, {"reply": 2, "scale": "tensor"}, {"reply": "direct"}),
    "rotated, 2 to 3": (2, 3, {"reply": "direct", "norm": "rotated"}, {}),
    "rotated, blocks 64 to 96": (2, 2, {"reply": "direct", "norm": "rotated"}, {"block_size": 96}),
    "rotated to mean sizes": (2, 2, {"reply": "direct", "norm": "rotated"}, {"norm": "l1"}),
    "mean sizes to rotated, 3 to 2": (3, 2, {"reply": "direct"}, {"norm": "rotated"}),
    "rotated, direct to two phases": (2, 2, {"reply": "direct", "norm": "rotated"}, {"reply": 1}),
    "rotated, two phases to direct": (2, 2, {"norm": "rotated"}, {"reply": "direct"}),
    "tensor, 4 to 2": (4, 2, {"scale": "tensor"}, {}),
    "tensor, 2 to 3, two chunks": (2, 3, {"scale": "tensor", "chunks": 2}, {}),
    "tensor, 1 to 2": (1, 2, {"scale": "tensor"}, {}),
    "tensor, chunks 1 to 2": (2, 2, {"scale": "tensor"}, {"chunks": 2}),
}


@freezing_kinds
@pytest.mark.parametrize("move", [pytest.param(m, marks=[pytest.mark.slow] * ("two bits" in m)) for m in MOVES])
def test_other_ranks_keep_the_mean_residual(kind, move):
    there, size, options, here = MOVES[move]
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    moved = saved_and_loaded(case, there, size, here, lambda states: [onebit.merge_states(states)])
    saved, before, beta1 = moved.saved, moved.before, per_element(case, lambda o: o["betas"][0])
    assert min(np.abs(saved.e).max(), np.abs(saved.m).max()) > 0
    replies = options.get("reply", 1), {**options, **here}.get("reply", 1)
    assert (
        there == 1 or replies[0] == "direct" or np.abs(saved.server).max() > 0
    )  # of one message the mean is the message: E is rounding, or 0
    assert moved.warned == [[]] * size
    assert_near(before.d, saved.d)
    served = replies[1] != "direct"  # else what servers had left out is sent with the rest
    assert_near(before.server, saved.server if served else 0 * saved.server)
    e = saved.e if served else saved.e + saved.server
    blocks_fit = not {"block_size", "scale", "norm"} & here.keys() and case.options.get("scale") != "tensor"
    messages_fit = replies[0] == replies[1] and (served or there == size)
    if blocks_fit and messages_fit:
        assert_near(before.m, saved.m)
        assert_near(before.e, e)
    else:
        assert not before.m.any()
        assert_near(before.e, e + beta1 * saved.m)
    assert_step(moved.case, size, 7, saved, moved.after, moved.x, moved.params)


OTHER_REPLIES = [
    (1, "direct"), (1, 2),
    *(pytest.param(pair, marks=pytest.mark.slow) for pair in ((2, 1), (2, "direct"), ("direct", 1), ("direct", 2))),
]  # fmt: skip


@freezing_kinds
@pytest.mark.parametrize("replies", OTHER_REPLIES, ids=lambda r: f"{r[0]} to {r[1]}")
def test_each_ranks_own_state_keeps_all_residuals_with_another_reply(kind, replies):
    """As many ranks: none needs what the others have left out."""
    case = Case(kind, options={"freeze_step": 3, "reply": replies[0], "chunks": 2}, groups=TWO_GROUPS)
    moved = saved_and_loaded(case, 3, 3, {"reply": replies[1]}, lambda states: states)
    saved, before, beta1 = moved.saved, moved.before, per_element(case, lambda o: o["betas"][0])
    assert moved.warned == [[]] * 3
    served = replies[1] != "direct"
    assert_near(before.server, saved.server if served else 0 * saved.server)
    assert_near(before.e, saved.e + (0 if served else saved.server) + beta1 * saved.m)
    assert not before.m.any()


@kinds
def test_other_ranks_go_on_with_16_bit_parameters(kind):
    case = Case(kind, options={"freeze_step": 3}, dtype="bfloat16")
    saved = run_ranks(2, save_run, case, 6)
    merged = onebit.merge_states([s for s, _ in saved])
    for own in run_ranks(3, load_run, case, [merged], saved[0][1], 7):
        assert all(same(own.before["state"][p]["master"], merged["state"][p]["master"]) for p in range(4))


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_merged_states_on_as_many_ranks_continue_bit_for_bit(kind, scale):
    case = Case(kind, options={"freeze_step": 3, "scale": scale})
    saved = run_ranks(3, save_run, case, 6)
    states, values = [s for s, _ in saved], saved[0][1]
    own = run_ranks(3, load_run, case, states, values, 7)
    merged = run_ranks(3, load_run, case, [onebit.merge_states(states[::-1])], values, 7)
    for one, other in zip(own, merged, strict=True):
        assert one.warned == other.warned == []
        assert one.end == other.end
        assert same(one.after, other.after)


@kinds
def test_states_of_stage_1_move_to_any_number_of_ranks(kind):
    case = Case(kind, options={"freeze_step": 6})
    saved = run_ranks(2, save_run, case, 4)
    states, values = [s for s, _ in saved], saved[0][1]
    merged = onebit.merge_states(states)
    assert same(merged["state"], states[0]["state"])
    run_ranks(3, load_stage_1, case, states[0], values)
    run_ranks(1, load_stage_1, case, merged, values)


def load_stage_1(rank, size, case, state, values):
    params = other_parameters(case)
    set_parameters(params, values)
    optimizer = case.build(params, group())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(snapshot(state))
    assert same(snapshot(optimizer.state_dict()["state"]), state["state"])
    run(case, rank, optimizer, params, 5, 6)
    assert not optimizer.compressing
    run(case, rank, optimizer, params, 7, 8)
    assert optimizer.compressing


def test_merge_states_refuses_states_of_different_steps():
    case = Case(options={"freeze_step": 1})
    with pytest.raises(ValueError, match="no states"):
        onebit.merge_states([])
    early, late = (trained(case, 0, steps)[1].state_dict() for steps in (2, 3))
    with pytest.raises(ValueError, match="number 1 has steps 3 where the first has 2"):
        onebit.merge_states([early, late])


def test_merge_states_leaves_its_arguments_as_they_are():
    states = [s for s, _ in run_ranks(2, save_run, Case(options={"freeze_step": 2}), 4)]
    before = snapshot(states)
    onebit.merge_states(states)
    assert same(states, before)


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_tensors_of_a_state_have_default_strides(kind, scale):
    """With the strides of a fresh tensor, so that any tool can read their bytes."""
    _, optimizer = trained(Case(kind, options={"freeze_step": 3, "scale": scale}), 0, 5)
    for own in optimizer.state_dict()["state"].values():
        for name, value in own.items():
            assert value.stride() == torch.empty(value.shape).stride(), name


LOSSES = {
    "the same ranks": (3, 3, {}, {}),
    "tensor scale": (3, 3, {"scale": "tensor"}, {}),
    "other ranks": (2, 3, {}, {}),
    "other ranks, tensor scale": (2, 3, {"scale": "tensor"}, {}),
    "one rank": (4, 1, {}, {}),
    "other scale": (2, 2, {}, {"scale": "tensor"}),
    "other blocks": (2, 2, {}, {"block_size": 32}),
}


@freezing_kinds
@pytest.mark.parametrize("loss", LOSSES)
def test_one_ranks_state_on_all_starts_from_zero_residuals(kind, loss):
    there, size, options, here = LOSSES[loss]
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    moved = saved_and_loaded(case, there, size, here, lambda states: [states[0]])
    assert_zero_residuals(moved, size)
    without_warning = [0] if there == size else []  # that rank's own state is loaded
    for rank, warned in enumerate(moved.warned):
        if rank not in without_warning:
            assert len(warned) == 1
            assert "residuals" in warned[0]
            assert "start from zero" in warned[0]


@freezing_kinds
def test_own_states_on_fewer_ranks_start_from_zero_residuals(kind):
    """Not merged: a rank's own file lacks what the others had left out."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    moved = saved_and_loaded(case, 3, 2, {}, lambda states: states[:2])
    assert_zero_residuals(moved, 2)
    assert all(len(warned) == 1 and "merge_states" in warned[0] for warned in moved.warned)


def assert_zero_residuals(moved, size):
    lost = SimpleNamespace(e=0.0, server=0.0, m=moved.saved.m, d=moved.saved.d)
    assert_step(moved.case, size, 7, lost, moved.after, moved.x, moved.params)


def load_different_states(rank, size, case):
    params, optimizer = trained(case, rank, 5, group())
    states = [snapshot(optimizer.state_dict())]
    take(case, rank, optimizer, params, 6)
    states.append(snapshot(optimizer.state_dict()))
    optimizer.load_state_dict(states[rank])
    with pytest.raises(ValueError, match=r"rank 1 has steps 6(\.0)? where rank 0 has 5"):
        take(case, rank, optimizer, params, 7)


@kinds
def test_ranks_that_loaded_different_states_are_refused_by_the_next_step(kind):
    """Also in an optimizer whose ranks had agreed before."""
    run_ranks(2, load_different_states, Case(kind, options={"freeze_step": 3}))
