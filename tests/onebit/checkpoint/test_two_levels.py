"""States of nodes: a rank has what it left out of its slice. They go on bit for bit; on other nodes with the mean."""

import numpy as np
import pytest

import onebit
from tests.checkpoints import Run
from tests.onebit.checkpoint.states import (
    TWO_GROUPS,
    assert_near,
    assert_step,
    load_run,
    per_element,
    save_run,
    saved_and_loaded,
    set_parameters,
    trained,
)
from tests.onebit.runs import Case, bits, freezing_kinds, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

SHAPES = ((7, 9), (33,), (2,), (130,), (400,))
MOVES = {  # ranks and ranks a node, there and here
    "2 x 2 to 4": (4, 2, 4, 1, {}, {}),
    "4 to 2 x 2": (4, 1, 4, 2, {"chunks": 2}, {}),
    "2 x 2 to 2": (4, 2, 2, 1, {}, {}),
    "2 x 2 to 1": (4, 2, 1, 1, {"chunks": 2}, {}),
    "1 to 2 x 2": (1, 1, 4, 2, {}, {}),
    "2 x 2, chunks 1 to 2": (4, 2, 4, 2, {}, {"chunks": 2}),
    "2 x 2, blocks 64 to 96": (4, 2, 4, 2, {"reply": "direct"}, {"block_size": 96}),
    "2 x 2, direct to one bit": (4, 2, 4, 2, {"reply": "direct", "chunks": 3}, {"reply": 1}),
    "2 x 2, one bit to direct": (4, 2, 4, 2, {"chunks": 3}, {"reply": "direct"}),
    "2 x 2, tensor to block": (4, 2, 4, 2, {"scale": "tensor"}, {"scale": "block"}),
}
QUICK = ("2 x 2 to 4", "4 to 2 x 2", "2 x 2, one bit to direct")


@freezing_kinds
@pytest.mark.parametrize("move", [pytest.param(m, marks=[pytest.mark.slow] * (m not in QUICK)) for m in MOVES])
def test_other_nodes_keep_the_mean_residual(kind, move):
    there, each, size, each_here, options, here = MOVES[move]
    case = Case(kind, SHAPES, options={"freeze_step": 3, **options}, groups=TWO_GROUPS, each=each)
    moved = saved_and_loaded(case, there, size, here, lambda states: [onebit.merge_states(states)], each_here)
    saved, before, beta1 = moved.saved, moved.before, per_element(case, lambda o: o["betas"][0])
    assert min(np.abs(saved.e).max(), np.abs(saved.m).max()) > 0
    assert moved.warned == [[]] * size
    served = moved.case.options.get("reply", 1) != "direct"
    everything = beta1 * saved.m + saved.e + saved.server
    assert_near(beta1 * before.m + before.e + before.server, everything)
    assert_near(before.server, saved.server if served else 0 * saved.server)
    assert_step(moved.case, size, 7, saved, moved.after, moved.x, moved.params)


@kinds
@pytest.mark.parametrize("reply", [1, "direct", pytest.param(2, marks=pytest.mark.slow)])
def test_each_ranks_own_state_goes_on_bit_for_bit(kind, reply):
    case = Case(kind, SHAPES, options={"freeze_step": 3, "reply": reply, "chunks": 2}, each=2)
    saved = run_ranks(4, save_run, case, 6)
    whole = run_ranks(4, save_run, case, 10)
    states, values = [s for s, _ in saved], saved[0][1]
    own = run_ranks(4, load_run, case, states, values, 7)
    merged = run_ranks(4, load_run, case, [onebit.merge_states(states)], values, 7)
    for (_, params), one, other in zip(whole, own, merged, strict=True):
        assert one.warned == other.warned == []
        assert one.end == other.end == b"".join(p.numpy().tobytes() for p in params)
        assert same(one.after, other.after)


def resumed_by_a_skipped_step(rank, size, case):
    """A step that is not taken, right after a load: what a rank sent before must be there as well."""
    params, optimizer = trained(case, rank, 6, group())
    other = case.parameters()
    resumed = case.build(other, group())
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    set_parameters(other, params)
    for own, values in ((optimizer, params), (resumed, other)):
        take(case.but(bad=((7, 1, float("nan")),)), rank, own, values, 7)
        run(case, rank, own, values, 8, 10)
    return bits(params) == bits(other), resumed.skipped_steps


@kinds
@pytest.mark.parametrize("reply", [1, "direct"])
def test_a_skipped_step_after_a_load_changes_nothing(kind, reply):
    case = Case(kind, SHAPES, options={"freeze_step": 3, "reply": reply, "chunks": 2}, each=2)
    assert run_ranks(4, resumed_by_a_skipped_step, case) == [(True, 1)] * 4


def saved_in(rank, size, case, folder):
    run = Run(case, 6, rank, group())
    run.save(folder)
    run.on(7, 9)
    return run.all()[0]


def loaded_from(rank, size, case, folder):
    run = Run(case, 0, rank, group())
    run.load(folder)
    compressing = run.optimizer.compressing
    run.on(7, 9)
    return compressing, run.all()[0]


@kinds
@pytest.mark.parametrize("reply", [1, "direct"])
def test_a_checkpoint_of_nodes(kind, reply, tmp_path):
    """onebit.save and load: bit for bit on the same nodes; on others the ranks hold the same, and go on."""
    case = Case(kind, SHAPES, options={"freeze_step": 3, "reply": reply}, each=2)
    ends = run_ranks(4, saved_in, case, tmp_path)
    assert run_ranks(4, loaded_from, case, tmp_path) == [(True, end) for end in ends]
    for size, each in ((4, 1), (2, 1)):
        found = run_ranks(size, loaded_from, case.but(each=each), tmp_path)
        assert found == [(True, found[0][1])] * size
