"""Load on another number of ranks, or with other messages: merged states keep the mean residual, a single rank's start
it from zero. With two levels a rank has what it left out of its slice."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import onebit
from tests.checkpoints import Run
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import FIVE, TWO_GROUPS, assert_near, load_run, save_run, saved_and_loaded, trained
from tests.onebit.runs import Case, on_ranks, on_warnings, same, snapshot, take
from tests.ranks import group, run_ranks

A, L = "OneBitAdam", "OneBitLamb"
DIRECT, TENSOR, CHUNKS = {"reply": "direct"}, {"scale": "tensor"}, {"chunks": 2}
MOVES = {  # ranks there and here, options, others here, ranks a node there and here
    "4 to 2, two chunks": (A, 4, 2, CHUNKS, {}),
    "1 to 2": (A, 1, 2, {}, {}),
    "chunks 1 to 2": (L, 2, 2, {}, CHUNKS),
    "blocks 32 to 96, 2 to 3": (A, 2, 3, {"block_size": 32, **CHUNKS}, {"block_size": 96}),
    "block to tensor": (L, 2, 2, {}, TENSOR),
    "tensor, 4 to 2": (L, 4, 2, TENSOR, {}),
    "tensor, chunks 1 to 2": (A, 2, 2, TENSOR, CHUNKS),
    "direct, 2 to 3": (L, 2, 3, {**DIRECT, **CHUNKS}, {}),
    "direct, 3 to 1, blocks 64 to 96": (A, 3, 1, DIRECT, {"block_size": 96}),
    "direct to two phases": (L, 2, 2, DIRECT, {"reply": 1}),
    "two phases to direct, 3 to 2": (A, 3, 2, CHUNKS, DIRECT),
    "own states, one bit to direct": (A, 3, 3, CHUNKS, DIRECT),
    "own states, direct to one bit": (A, 3, 3, {**DIRECT, **CHUNKS}, {"reply": 1}),
    "2 x 2 to 4": (A, 4, 4, {}, {}, 2, 1),
    "4 to 2 x 2": (L, 4, 4, CHUNKS, {}, 1, 2),
    "1 to 2 x 2": (A, 1, 4, {}, {}, 1, 2),
    "2 x 2, direct to one bit": (L, 4, 4, {**DIRECT, "chunks": 3}, {"reply": 1}, 2, 2),
    "2 x 2, one bit to direct, chunks 3 to 1": (A, 4, 4, {"chunks": 3}, {**DIRECT, "chunks": 1}, 2, 2),
    "2 x 2, tensor to block": (A, 4, 4, TENSOR, {"scale": "block"}, 2, 2),
}


@pytest.mark.parametrize("move", MOVES)
def test_other_ranks_and_messages_keep_the_mean_residual(move):
    """From merged states; each rank's own do for as many ranks: none needs what the others have left out."""
    kind, there, size, options, here, *nodes = MOVES[move]
    each, each_here = nodes or (1, 1)
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    case = case.but(shapes=FIVE, each=each) if nodes else case

    def prepare(states):
        return states if "own" in move else [onebit.merge_states(states)]

    moved = saved_and_loaded(case, there, size, here, prepare, each_here)
    saved, before, beta1 = moved.saved, moved.before, states.per_element(case, lambda o: o["betas"][0])
    assert min(np.abs(saved.e).max(), np.abs(saved.m).max()) > 0
    replies = options.get("reply", 1), {**options, **here}.get("reply", 1)
    # of one message the mean is the message: E is rounding, or 0
    assert there == each or replies[0] == "direct" or np.abs(saved.server).max() > 0
    assert moved.warned == [[]] * size
    assert_near(before.d, saved.d)
    served = replies[1] != "direct"  # else what servers had left out is sent with the rest
    assert_near(before.server, saved.server if served else 0 * saved.server)
    e = saved.e if served else saved.e + saved.server
    blocks_fit = not {"block_size", "scale"} & here.keys() and case.options.get("scale") != "tensor"
    if nodes:
        assert_near(beta1 * before.m + before.e, beta1 * saved.m + e)
    elif blocks_fit and replies[0] == replies[1] and (served or there == size):
        assert_near(before.m, saved.m)
        assert_near(before.e, e)
    else:
        assert not before.m.any()
        assert_near(before.e, e + beta1 * saved.m)
    states.assert_step(moved.case, size, 7, saved, moved.after, moved.x, moved.params)


LOSSES = {  # ranks there and here, options, others here, whose states are loaded
    "the same ranks": (A, 3, 3, {}, {}, 1),
    "other ranks": (L, 2, 3, {}, {}, 1),
    "one rank": (A, 4, 1, {}, {}, 1),
    "own states on fewer ranks": (A, 3, 2, {}, {}, 2),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_states_that_lack_other_ranks_residuals_start_from_zero(loss):
    kind, there, size, options, here, given = LOSSES[loss]
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    moved = saved_and_loaded(case, there, size, here, lambda states: states[:given])
    lost = SimpleNamespace(e=0.0, server=0.0, m=moved.saved.m, d=moved.saved.d)
    states.assert_step(moved.case, size, 7, lost, moved.after, moved.x, moved.params)
    for rank, warned in enumerate(moved.warned):
        if rank > 0 or there != size:  # that rank's own state is loaded
            assert len(warned) == 1
            assert all(word in warned[0] for word in ("residuals", "start from zero", "merge_states"))


@pytest.mark.parametrize(
    ("kind", "each", "options"),
    [(A, 2, CHUNKS), (L, 2, {**DIRECT, **CHUNKS}), ("ZeroOneAdam", 1, TENSOR)],
    ids=str,
)
def test_as_many_ranks_go_on_alike_from_own_and_merged_states(kind, each, options):
    """Own states do as the run that nothing interrupts: see test_resume.py."""
    case = Case(kind, FIVE, options={"freeze_step": 3, **options}, each=each)
    size = 2 * each if each > 1 else 3
    saved = run_ranks(size, save_run, case, 6)
    states, values = [s for s, _ in saved], saved[0][1]
    kept = snapshot(states)
    together = onebit.merge_states(states[::-1])
    assert same(states, kept), "merge_states has changed its arguments"
    own = run_ranks(size, load_run, case, states, values, 7)
    merged = run_ranks(size, load_run, case, [together], values, 7)
    for one, other in zip(own, merged, strict=True):
        assert one.warned == other.warned == []
        assert one.end == other.end and same(one.after, other.after)


@on_ranks(2)
def test_ranks_that_loaded_different_states_are_refused_by_the_next_step(rank):
    """Also in an optimizer whose ranks had agreed before."""
    case = Case(options={"freeze_step": 3})
    params, optimizer = trained(case, rank, 5, group())
    states = [snapshot(optimizer.state_dict())]
    take(case, rank, optimizer, params, 6)
    states.append(snapshot(optimizer.state_dict()))
    optimizer.load_state_dict(states[rank])
    with pytest.raises(ValueError, match=r"rank 1 has steps 6(\.0)? where rank 0 has 5"):
        take(case, rank, optimizer, params, 7)


@on_ranks(2)
def test_residuals_come_along_into_another_memory_format(rank, tmp_path):
    """Norms of what was left out: as it was, loaded as it was, loaded into channels_last; none is missed."""
    case, found = Case(shapes=((16, 8, 3, 3),), options={"freeze_step": 3}), []
    rows = (8, torch.contiguous_format), (0, torch.contiguous_format), (0, torch.channels_last)
    with on_warnings("error", message=".*residual"):
        for steps, memory_format in rows:
            run = Run(case, 0, rank, group())
            run.params[0].data = run.params[0].data.contiguous(memory_format=memory_format)
            run.on(1, steps)
            (run.load if found else run.save)(tmp_path)
            (own,) = run.optimizer.diagnostics().values()
            found.append([own["residual_norm"], own["server_residual_norm"]])
    before, alike, other = found
    assert before == alike and min(before) > 0
    assert other[1] == pytest.approx(before[1], rel=1e-5) and other[0] > 0.5 * before[0]
