"""One state for any number of ranks, and for other messages: nothing that was left out is lost, neither over
`synchronize` nor over a load. Without `synchronize` it is, and a warning says so."""

import numpy as np
import pytest
import torch

from tests.checkpoints import Run
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import (
    FIVE,
    TWO_GROUPS,
    assert_near,
    checkpoint,
    load_run,
    meaning,
    one_of,
    save_run,
    trained,
)
from tests.onebit.runs import Case, kinds, on_ranks, on_warnings, same, snapshot, take
from tests.ranks import group, run_ranks

A, L, Z = "OneBitAdam", "OneBitLamb", "ZeroOneAdam"
DIRECT, TENSOR, CHUNKS = {"reply": "direct"}, {"scale": "tensor"}, {"chunks": 2}
MOVES = {  # ranks there and here, options, others here, ranks a node there and here
    "4 to 2, two chunks": (A, 4, 2, CHUNKS, {}),
    "2 to 4": (Z, 2, 4, {}, {}),
    "3 to 2": (L, 3, 2, {}, {}),
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
    "2 x 2 to 4": (A, 4, 4, {}, {}, 2, 1),
    "4 to 2 x 2": (L, 4, 4, CHUNKS, {}, 1, 2),
    "1 to 2 x 2": (A, 1, 4, {}, {}, 1, 2),
    "2 x 2, direct to one bit": (L, 4, 4, {**DIRECT, "chunks": 3}, {"reply": 1}, 2, 2),
    "2 x 2, one bit to direct, chunks 3 to 1": (A, 4, 4, {"chunks": 3}, {**DIRECT, "chunks": 1}, 2, 2),
    "2 x 2, tensor to block": (A, 4, 4, TENSOR, {"scale": "block"}, 2, 2),
    "2 x 2 to 1": (Z, 4, 1, CHUNKS, {}, 2, 1),
}


def case_of(kind, options, nodes):
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    return case.but(shapes=FIVE, each=nodes[0]) if nodes else case


@pytest.mark.parametrize("move", MOVES)
def test_other_ranks_and_messages_lose_nothing(move):
    """What is loaded is what was saved, bit for bit; and a step later nothing is missing."""
    kind, there, size, options, here, *nodes = MOVES[move]
    case = case_of(kind, options, nodes)
    saved = run_ranks(there, save_run, case, 6)
    state, values = one_of([own for own, _ in saved]), saved[0][1]
    other = case.but(options={**case.options, **here}, each=nodes[1] if nodes else 1)
    loaded = run_ranks(size, load_run, other, state, values, 7)
    assert len({own.end for own in loaded}) == 1 and all(own.warned == [] for own in loaded)
    assert same(one_of([own.before for own in loaded])["state"], state["state"])
    before, after = meaning(state, case), meaning(one_of([own.after for own in loaded]), other)
    assert min(np.abs(before.e).max(), np.abs(before.m).max()) > 0
    states.assert_step(other, size, 7, before, after, states.flat(case, values), loaded[0].params)


SYNCHRONIZED = {  # ranks, options, ranks a node
    "3": (A, 3, CHUNKS),
    "direct": (A, 3, {**DIRECT, **CHUNKS}),
    "tensor": (L, 2, {**TENSOR, **CHUNKS}),
    "0/1 Adam": (Z, 3, TENSOR),
    "2 x 2": (A, 4, CHUNKS, 2),
    "2 x 2, direct": (L, 4, {**DIRECT, **CHUNKS}, 2),
}


def momenta(rank, size, case):
    """Two states, after steps 6 and 12; m of all steps from 6 on; and what is left out before and after each call."""
    params, optimizer = trained(case, rank, 5, group())
    found, m, around = [], [], []
    for step in range(6, 13):
        take(case, rank, optimizer, params, step)
        if step in (6, 12):
            around.append(states.left_out(optimizer))
            optimizer.synchronize()
            around.append(states.left_out(optimizer))
            found.append(snapshot(optimizer.state_dict()))
        with on_warnings("ignore", message="state_dict"):
            m.append(meaning(optimizer.state_dict(), case).m)
    return found, m, around


@pytest.mark.parametrize("which", SYNCHRONIZED)
def test_synchronize_loses_nothing(which):
    """The states are held against a simulation in float64, that adds up what every step has left out, and the ranks'
    memory."""
    kind, size, options, *nodes = SYNCHRONIZED[which]
    case = case_of(kind, options, nodes)
    ranks = run_ranks(size, momenta, case)
    first, last = (meaning(one_of([found[i] for found, *_ in ranks]), case) for i in (0, 1))
    beta1 = per_element(case)
    m = one_of([torch.from_numpy(np.stack(of)) for _, of, _ in ranks]).numpy()
    owed = first.e.copy()
    for i, step in enumerate(range(7, 13)):
        owed += beta1 * m[i] + (1 - beta1) * states.mean_gradient(case, size, step) - m[i + 1]
    assert_near(last.e, owed)
    assert_near(last.m, m[-1])
    for i, of in ((0, first), (2, last)):
        before, after = (np.sum([around[j] for *_, around in ranks], axis=0) for j in (i, i + 1))
        assert_near(of.e, before)
        assert_near(of.e, after)


def per_element(case):
    return states.per_element(case, lambda o: o["betas"][0])


def around_a_full_step(rank, size, case):
    """States before it and after it, and parameters."""
    params, optimizer = trained(case, rank, 6, group())
    assert optimizer.compressing and optimizer.schedule.kind == "full"
    found = []
    for step in (7, 8):
        optimizer.synchronize()
        found.append(checkpoint(params, optimizer))
        take(case, rank, optimizer, params, step)
    return found


@pytest.mark.parametrize(("size", "each"), [(3, 1), (4, 2)])
def test_a_full_step_sees_all_of_the_momentum(size, each):
    """The step is 0/1 Adam's, right after `synchronize`. Then all of it is in the residual, and in no message."""
    case = Case(Z, FIVE, options={"var_update_scaler": 2, "betas": (0.9, 0.99)}, each=each)
    first, second = zip(*run_ranks(size, around_a_full_step, case), strict=True)
    before, after = (meaning(one_of([state for state, _ in of]), case) for of in (first, second))
    m = 0.9 * before.m + 0.1 * states.mean_gradient(case, size, 7)
    assert np.abs(before.m).max() > 0 and not after.m.any()
    assert_near(after.e, before.e + 0.9 * m)


def around_a_skipped_step(rank, size, case):
    """The one state before it and after it."""
    params, optimizer = trained(case, rank, 6, group())
    found = []
    for step in (7, 8):
        optimizer.synchronize()
        found.append(snapshot(optimizer.state_dict()))
        take(case, rank, optimizer, params, step)
    assert optimizer.skipped_steps == 1
    return found


@pytest.mark.parametrize(("size", "each"), [(3, 1), (4, 2)])
@kinds
def test_a_step_that_is_skipped_right_after_synchronize_loses_nothing(kind, size, each):
    """Momentum was folded into the residual for it, once."""
    case = case_of(kind, {}, (each,)).but(bad=((7, 1, np.nan),))
    first, second = zip(*run_ranks(size, around_a_skipped_step, case), strict=True)
    before, after = (meaning(one_of(of), case) for of in (first, second))
    beta1 = per_element(case)
    assert_near(beta1 * after.m + after.e, beta1 * before.m + before.e)


LOSSES = {  # ranks there and here
    "the same ranks": (A, 3, 3),
    "other ranks": (L, 2, 3),
    "one rank": (A, 4, 1),
}


def without_synchronize(rank, size, case):
    params, optimizer = trained(case, rank, 6, group())
    with on_warnings() as warned:
        found = checkpoint(params, optimizer)
        again = snapshot(optimizer.state_dict())
    assert same(found[0], again)
    return *found, warned


@pytest.mark.parametrize("loss", LOSSES)
def test_a_state_without_synchronize_lacks_what_was_left_out_and_says_so(loss):
    """It says so once, with the remedy. Momentum, and what steps divide by, are there."""
    kind, there, size = LOSSES[loss]
    case = case_of(kind, {}, ())
    saved = run_ranks(there, without_synchronize, case)
    for *_, warned in saved:
        assert len(warned) == 1 and "state_dict: what compression has left out" in warned[0]
        assert "Call optimizer.synchronize() on every rank first" in warned[0]
    state, values = one_of([own for own, *_ in saved]), saved[0][1]
    lost, whole = meaning(state, case), meaning(run_ranks(there, save_run, case, 6)[0][0], case)
    assert not lost.e.any() and whole.e.any()
    assert_near(lost.m, whole.m)
    loaded = run_ranks(size, load_run, case, state, values, 7)
    after = meaning(one_of([own.after for own in loaded]), case)
    states.assert_step(case, size, 7, lost, after, states.flat(case, values), loaded[0].params)


@kinds
def test_one_process_alone_needs_no_synchronize(kind):
    case = case_of(kind, {}, ())
    params, optimizer = trained(case, 0, 6)
    with on_warnings() as warned:
        state, values = checkpoint(params, optimizer)
    assert warned == [] and meaning(state, case).e.any()
    again = states.resumed(case, state, values)
    states.assert_go_on_alike(case, 0, (params, optimizer), again, 7, 9)


@on_ranks(2)
def test_ranks_that_loaded_different_states_are_refused_by_the_next_step(rank):
    """It does not matter that the ranks had agreed before."""
    case = Case(options={"freeze_step": 3})
    params, optimizer = trained(case, rank, 5, group())
    optimizer.synchronize()
    found = [snapshot(optimizer.state_dict())]
    take(case, rank, optimizer, params, 6)
    optimizer.synchronize()
    found.append(snapshot(optimizer.state_dict()))
    optimizer.load_state_dict(found[rank])
    with pytest.raises(ValueError, match=r"rank 1 has steps 6(\.0)? where rank 0 has 5"):
        take(case, rank, optimizer, params, 7)


@on_ranks(2)
def test_residuals_come_along_into_another_memory_format(rank, tmp_path):
    """The state is the same as it was saved, loaded as it was, and loaded into channels_last."""
    case, found = Case(shapes=((16, 8, 3, 3),), options={"freeze_step": 3}), []
    rows = (8, torch.contiguous_format), (0, torch.contiguous_format), (0, torch.channels_last)
    for steps, memory_format in rows:
        run = Run(case, 0, rank, group())
        run.params[0].data = run.params[0].data.contiguous(memory_format=memory_format)
        run.on(1, steps)
        (run.load if found else run.save)(tmp_path)
        (own,) = run.optimizer.diagnostics().values()
        found.append((snapshot(run.optimizer.state_dict()), own["residual_norm"]))
    (state, norm), *others = found
    assert norm > 0
    assert all(same(its["state"], state["state"]) and its_norm == pytest.approx(norm) for its, its_norm in others)
