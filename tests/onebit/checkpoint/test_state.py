"""Kill and resume: at any step, in either stage, on as many ranks or on others, from this class's state or AdamW's.

What a state means is read from it by `meaning`, with numpy alone. Every step keeps

    m' + mean e' + E'  =  b1 m + (1 - b1) mean g + mean e + E

whatever the ranks, chunks, blocks or scales, so that a load on other ranks is right when this still holds after it.
"""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import onebit
from tests.onebit.runs import Case, bits, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks, run_ranks_once

nan, inf = float("nan"), float("inf")
TWO_GROUPS = ({}, {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1})
AUTO = {"freeze_step": "auto", "freeze_window": 3, "freeze_threshold": 0.7, "betas": (0.9, 0.95)}


def other_parameters(case):
    """Those of a new process, before anything is loaded."""
    return [nn.Parameter(p.detach() * 0.5 + 1) for p in case.parameters()]


def set_parameters(params, values):
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)


def trained(case, rank, steps, of=None):
    params = case.parameters()
    optimizer = case.build(params, of)
    run(case, rank, optimizer, params, 1, steps)
    return params, optimizer


def seen(optimizer):
    return optimizer.compressing, optimizer.skipped_steps, optimizer.wire_bytes, optimizer.freeze_ratio


# Same number of ranks: bit for bit


def resume_at_every_step(rank, size, case, folder, ahead=2):
    """A run that is never saved, one saved after every step, and one that resumes from each of these files."""
    stages = []
    params, expected = case.parameters(), []
    optimizer = case.build(params, group())
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        expected.append(bits(params))
        stages.append(optimizer.compressing)
    end = snapshot(optimizer.state_dict())

    params, states, numbers = case.parameters(), [], []
    optimizer = case.build(params, group())
    for step in range(case.steps + 1):
        if step:
            take(case, rank, optimizer, params, step)
            assert bits(params) == expected[step - 1], f"saving changed step {step}"
        states.append(snapshot(optimizer.state_dict()))
        numbers.append(seen(optimizer))
        values = [p.detach() for p in params]
        torch.save({"model": values, "optimizer": states[-1]}, f"{folder}/{step}-{rank}.pt")
    assert same(states[-1], end), "saving changed the state"

    for start in range(case.steps):
        saved = torch.load(f"{folder}/{start}-{rank}.pt", weights_only=True)
        params = other_parameters(case)
        optimizer = case.build(params, group())
        if start % 2:
            set_parameters(params, saved["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved["optimizer"])
        if not start % 2:
            set_parameters(params, saved["model"])
        assert seen(optimizer) == numbers[start], f"loaded after step {start}"
        assert same(snapshot(optimizer.state_dict()), states[start]), f"loaded after step {start}"
        last = min(start + ahead, case.steps)
        for step in range(start + 1, last + 1):
            take(case, rank, optimizer, params, step)
            assert bits(params) == expected[step - 1], f"resumed after step {start}, wrong at step {step}"
        assert same(snapshot(optimizer.state_dict()), states[last]), f"resumed after step {start}, wrong at {last}"
        assert seen(optimizer) == numbers[last], f"resumed after step {start}, wrong at {last}"
    return stages, numbers[-1]


RESUMES = {  # options, more of the case, sizes
    "int": ({"freeze_step": 4}, {}, (1, 2, 3)),
    "auto": (AUTO, {"steps": 14}, (1, 2, 3)),
    "tensor": ({"freeze_step": 3, "scale": "tensor", "chunks": 2}, {"groups": TWO_GROUPS}, (1, 2, 3)),
    "tensor, auto": ({**AUTO, "scale": "tensor"}, {"groups": TWO_GROUPS, "steps": 14}, (2,)),
    "chunks": ({"freeze_step": 3, "chunks": 2}, {"groups": TWO_GROUPS}, (1, 2, 3)),
    "bf16": ({"freeze_step": 4, "chunks": 2}, {"dtype": "bfloat16"}, (1, 3)),
    "bf16, tensor": ({"freeze_step": 3, "scale": "tensor"}, {"dtype": "bfloat16", "groups": TWO_GROUPS}, (1, 2)),
    "bf16 alone": ({"freeze_step": 3, "master_weights": False}, {"dtype": "bfloat16"}, (2,)),
    "measured chunks": ({"freeze_step": 3, "chunks": "auto", "norm": "l2"}, {}, (2,)),
}


@kinds
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, own in RESUMES.items() for size in own[2]])
def test_a_resumed_run_is_the_uninterrupted_one(kind, size, name, tmp_path):
    options, more, _ = RESUMES[name]
    case = Case(kind, **{"steps": 9, "options": options, **more})
    for stages, numbers in run_ranks(size, resume_at_every_step, case, str(tmp_path)):
        assert 2 < stages.index(True) < case.steps - 3
        assert numbers[:2] == (True, 0)
        assert (numbers[2] > 0) == (size > 1)
        assert (numbers[3] is None) == (options["freeze_step"] != "auto")


@kinds
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"scale": "tensor", "chunks": 2}])
def test_steps_that_are_skipped_before_and_after_a_resume(kind, size, options, tmp_path):
    """Also the first after a resume, also the first that would have compressed: that one leaves exp_avg in e."""
    bad = tuple((step, step % size, value) for step, value in ((2, nan), (5, inf), (7, nan), (8, nan)))
    case = Case(kind, steps=10, options={"freeze_step": 3, **options}, bad=bad, missing=((6, 0, 1), (9, size - 1, 2)))
    for stages, numbers in run_ranks(size, resume_at_every_step, case, str(tmp_path)):
        assert stages == [step > 4 for step in range(1, 11)]
        assert numbers[:2] == (True, 4)


@kinds
@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
def test_coordinates_without_a_variance_survive_a_resume(kind, zero_variance, tmp_path):
    never = tuple((step, rank, 2) for step in range(1, 9) for rank in range(2))
    case = Case(kind, steps=8, options={"freeze_step": 3, "zero_variance": zero_variance}, missing=never)
    with_warning(run_ranks(2, resume_where_some_are_dead, case, str(tmp_path)))


def with_warning(results):
    assert any("without a variance" in text for texts in results for text in texts)


def resume_where_some_are_dead(rank, size, case, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params, optimizer = trained(case, rank, 5, group())
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, rank, optimizer, params, 6, 8)
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = case.build(again, group())
    resumed.load_state_dict(state)
    run(case, rank, resumed, again, 6, 8)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))
    return [str(w.message) for w in caught]


def first_half(rank, size, case, folder):
    params, optimizer = trained(case, rank, 6, group())
    saved = {"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
    torch.save(saved, f"{folder}/{rank}.pt")
    run(case, rank, optimizer, params, 7, case.steps)
    return bits(params), snapshot(optimizer.state_dict())


def second_half(rank, size, case, folder):
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    params = other_parameters(case)
    set_parameters(params, saved["model"])
    optimizer = case.build(params, group())
    optimizer.load_state_dict(saved["optimizer"])
    run(case, rank, optimizer, params, 7, case.steps)
    return bits(params), snapshot(optimizer.state_dict())


@kinds
def test_resume_in_new_processes(kind, tmp_path):
    case = Case(kind, options={"freeze_step": 4}, groups=TWO_GROUPS)
    whole = run_ranks_once(2, first_half, (case, str(tmp_path)))
    resumed = run_ranks_once(2, second_half, (case, str(tmp_path)))
    for one, other in zip(whole, resumed, strict=True):
        assert one[0] == other[0]
        assert same(one[1], other[1])


def adopt_chunks(rank, size, case):
    params, optimizer = trained(case, rank, 6, group())
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, rank, optimizer, params, 7, 9)
    again = other_parameters(case)
    set_parameters(again, values)
    auto = case.but(options={**case.options, "chunks": "auto"})
    resumed = auto.build(again, group())
    resumed.load_state_dict(state)
    run(case, rank, resumed, again, 7, 9)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_measured_chunks_stay_those_of_the_saved_run(kind, scale):
    """What is measured anew may differ, and under a tensor scale so would the numerics."""
    run_ranks(2, adopt_chunks, Case(kind, options={"freeze_step": 3, "chunks": 3, "scale": scale}))


# What a state means, and a load on other ranks


def decoded(own, numel):
    signs = np.unpackbits(own["momentum_bits"].numpy(), axis=1, bitorder="little").astype(np.float64) * 2 - 1
    return (signs * own["momentum_scales"].double().numpy()[:, None]).reshape(-1)[:numel]


def meaning(states, case):
    """Of the states of all ranks, in stage 2: mean e, E, m and d, flat in the order of the param groups.

    Where messages hold gamma times the momentum, so do e and E, and d makes up for it.
    """
    size, chunks = len(states), case.options.get("chunks", 1)
    block_size = case.options.get("block_size", 32)
    numels = [int(np.prod(case.shapes[p])) for p in case.order]
    blocks = [-(-n // block_size) for n in numels]
    shard = max(1, -(-sum(blocks) // (size * chunks)))
    owner = np.arange(sum(blocks)) // shard % size
    first = np.cumsum([0, *blocks])
    e, server, m, d = [], [], [], []
    for p, numel in enumerate(numels):
        own = [s["state"][p] for s in states]
        gamma = float(own[0].get("gamma", 1.0))
        left_out = [own[r][f"residual_of_rank_{r}"].double().numpy().ravel() for r in range(size)]
        e.append(np.mean(left_out, axis=0) / gamma)
        keepers = np.repeat(owner[first[p] : first[p + 1]], block_size)[:numel]
        whole = np.full(numel, nan)
        for r in range(size):
            if (keepers == r).any():
                whole[keepers == r] = own[r][f"server_residual_of_rank_{r}"].double().numpy()
            else:
                assert f"server_residual_of_rank_{r}" not in own[r]
        server.append(whole / gamma)
        for r in range(1, size):
            assert same(snapshot(own[r]["momentum_bits"]), own[0]["momentum_bits"])
            assert same(snapshot(own[r]["momentum_scales"]), own[0]["momentum_scales"])
        m.append(decoded(own[0], numel) / gamma)
        d.append(own[0]["denominator"].double().numpy().ravel() * gamma)
    e, server, m, d = (np.concatenate(parts) for parts in (e, server, m, d))
    assert all(np.isfinite(a).all() for a in (e, server, m, d))
    return SimpleNamespace(e=e, server=server, m=m, d=d)


def per_element(case, read):
    """`read(options of the group)` for every element, in the order of the param groups."""
    default = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0, **case.options}
    values = [read({**default, **case.groups[case.group_of(p)]}) for p in case.order]
    return np.repeat(values, [int(np.prod(case.shapes[p])) for p in case.order])


def flat(case, tensors):
    return np.concatenate([np.asarray(tensors[p].detach().double()).ravel() for p in case.order])


def mean_gradient(case, size, step):
    return np.mean([flat(case, case.gradients(r, step)) for r in range(size)], axis=0)


def assert_near(got, expected, **kwargs):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max(), **kwargs)


def assert_step(case, size, step, before, after, x_before, params):
    """A step in float64, from one state to the next: nothing was lost, and d and m moved the parameters."""
    beta1 = per_element(case, lambda o: o["betas"][0])
    everything = beta1 * before.m + (1 - beta1) * mean_gradient(case, size, step) + before.e + before.server
    assert_near(after.m + after.e + after.server, everything)
    assert_near(after.d, before.d)
    if case.kind == "OneBitAdam":
        lr, decay = per_element(case, lambda o: o["lr"]), per_element(case, lambda o: o["weight_decay"])
        assert_near(flat(case, params), x_before - lr * (after.m * before.d + decay * x_before))


def save_run(rank, size, case, steps):
    params, optimizer = trained(case, rank, steps, group())
    return snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]


def load_run(rank, size, case, states, values, step):
    """Load the rank's one of `states`, or the only one, and take step `step`."""
    params = other_parameters(case)
    set_parameters(params, values)
    optimizer = case.build(params, group())
    given = snapshot(states[rank % len(states)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(given)
    assert same(given, states[rank % len(states)])
    before = snapshot(optimizer.state_dict())
    take(case, rank, optimizer, params, step)
    assert optimizer.compressing
    after, x = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, rank, optimizer, params, step + 1, step + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return SimpleNamespace(
        before=before, after=after, params=x, end=bits(params), texts=[str(w.message) for w in caught]
    )


def saved_and_loaded(case, there, size, here, prepare):
    """Save on `there` ranks, load on `size` with the options `here`. Returns what both mean, checked over a step."""
    saved = run_ranks(there, save_run, case, 6)
    states, values = [s for s, _ in saved], saved[0][1]
    other = case.but(options={**case.options, **here})
    loaded = run_ranks(size, load_run, other, prepare(snapshot(states)), values, 7)
    assert len({own.end for own in loaded}) == 1
    return SimpleNamespace(
        case=other,
        saved=meaning(states, case),
        before=meaning([own.before for own in loaded], other),
        after=meaning([own.after for own in loaded], other),
        x=flat(case, values),
        params=loaded[0].params,
        texts=[own.texts for own in loaded],
    )


MOVES = {
    "4 to 2": (4, 2, {}, {}),
    "2 to 3": (2, 3, {}, {}),
    "1 to 2": (1, 2, {}, {}),
    "3 to 1": (3, 1, {}, {}),
    "4 to 2, two chunks": (4, 2, {"chunks": 2}, {}),
    "chunks 1 to 2": (2, 2, {}, {"chunks": 2}),
    "chunks 3 to 1, 3 to 2": (3, 2, {"chunks": 3}, {"chunks": 1}),
    "blocks 32 to 64": (2, 2, {}, {"block_size": 64}),
    "blocks 64 to 32, 2 to 3": (2, 3, {"block_size": 64, "chunks": 2}, {"block_size": 32}),
    "block to tensor": (2, 2, {}, {"scale": "tensor"}),
    "tensor to block": (2, 3, {"scale": "tensor"}, {"scale": "block"}),
    "tensor, 4 to 2": (4, 2, {"scale": "tensor"}, {}),
    "tensor, 2 to 3, two chunks": (2, 3, {"scale": "tensor", "chunks": 2}, {}),
    "tensor, 1 to 2": (1, 2, {"scale": "tensor"}, {}),
    "tensor, chunks 1 to 2": (2, 2, {"scale": "tensor"}, {"chunks": 2}),
}


@kinds
@pytest.mark.parametrize("move", MOVES)
def test_other_ranks_keep_the_mean_residual(kind, move):
    there, size, options, here = MOVES[move]
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    got = saved_and_loaded(case, there, size, here, lambda states: [onebit.merge_states(states)])
    saved, before, beta1 = got.saved, got.before, per_element(case, lambda o: o["betas"][0])
    assert min(np.abs(saved.e).max(), np.abs(saved.server).max(), np.abs(saved.m).max()) > 0
    assert got.texts == [[]] * size
    assert_near(before.d, saved.d)
    assert_near(before.server, saved.server)
    blocks_fit = not {"block_size", "scale"} & here.keys() and case.options.get("scale") != "tensor"
    if blocks_fit:
        assert_near(before.m, saved.m)
        assert_near(before.e, saved.e)
    else:
        assert not before.m.any()
        assert_near(before.e, saved.e + beta1 * saved.m)
    assert_step(got.case, size, 7, saved, got.after, got.x, got.params)


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
        assert one.texts == other.texts == []
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


def test_merge_states_says_what_does_not_belong_together():
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
def test_tensors_of_a_state_are_plain(kind, scale):
    """With the strides of a fresh tensor, so that any tool can look at their bytes."""
    _, optimizer = trained(Case(kind, options={"freeze_step": 3, "scale": scale}), 0, 5)
    for own in optimizer.state_dict()["state"].values():
        for name, value in own.items():
            assert value.stride() == torch.empty(value.shape).stride(), name


# Not all ranks' states: residuals from zero, and a warning

LOSSES = {
    "the same ranks": (3, 3, {}, {}),
    "tensor scale": (3, 3, {"scale": "tensor"}, {}),
    "other ranks": (2, 3, {}, {}),
    "other ranks, tensor scale": (2, 3, {"scale": "tensor"}, {}),
    "one rank": (4, 1, {}, {}),
    "other scale": (2, 2, {}, {"scale": "tensor"}),
    "other blocks": (2, 2, {}, {"block_size": 64}),
}


@kinds
@pytest.mark.parametrize("loss", LOSSES)
def test_one_ranks_state_on_all_starts_from_zero_residuals(kind, loss):
    there, size, options, here = LOSSES[loss]
    case = Case(kind, options={"freeze_step": 3, **options}, groups=TWO_GROUPS)
    got = saved_and_loaded(case, there, size, here, lambda states: [states[0]])
    assert_zero_residuals(got, size)
    may_be_quiet = [0] if there == size and "block_size" not in here else []  # it has its own; it hears of the others
    for rank, texts in enumerate(got.texts):
        if rank not in may_be_quiet:
            assert len(texts) == 1
            assert "residuals" in texts[0]
            assert "start from zero" in texts[0]


@kinds
def test_own_states_on_fewer_ranks_start_from_zero_residuals(kind):
    """Not merged: a rank's own file does not tell what the others had left out."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    got = saved_and_loaded(case, 3, 2, {}, lambda states: states[:2])
    assert_zero_residuals(got, 2)
    assert all(len(texts) == 1 and "merge_states" in texts[0] for texts in got.texts)


def assert_zero_residuals(got, size):
    lost = SimpleNamespace(e=0.0, server=0.0, m=got.saved.m, d=got.saved.d)
    assert_step(got.case, size, 7, lost, got.after, got.x, got.params)


def load_different_states(rank, size, case):
    params, optimizer = trained(case, rank, 5, group())
    states = [snapshot(optimizer.state_dict())]
    take(case, rank, optimizer, params, 6)
    states.append(snapshot(optimizer.state_dict()))
    optimizer.load_state_dict(states[rank])
    with pytest.raises(ValueError, match=r"rank 1 has steps 6(\.0)? where rank 0 has 5"):
        take(case, rank, optimizer, params, 7)


@kinds
def test_ranks_that_loaded_different_states_hear_of_it(kind):
    """Also in an optimizer whose ranks had agreed before."""
    run_ranks(2, load_different_states, Case(kind, options={"freeze_step": 3}))


# torch.optim.AdamW's states

ADAMW = {
    "plain": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "lr is a tensor": {"lr": torch.tensor(5e-3)},
}


def adamw_run(case, steps, **options):
    params = case.parameters()
    groups = [{"params": [params[p] for p in case.order], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 5e-3, "betas": (0.8, 0.99), "eps": 1e-6, **options})
    run(case, 0, optimizer, params, 1, steps)
    return params, optimizer


def near(params, others):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("name", ADAMW)
def test_adamw_continues_in_stage_1(kind, name):
    case = Case(kind, options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5, **ADAMW[name])
    params = other_parameters(case)
    set_parameters(params, theirs)
    optimizer = case.build(params)
    optimizer.load_state_dict(adamw.state_dict())
    group = optimizer.param_groups[0]
    assert (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"]) == (
        pytest.approx(5e-3),
        (0.8, 0.99),
        1e-6,
        0.1,
    )
    assert not {"fused", "foreach", "amsgrad", "capturable"} & group.keys()
    for p, q in zip(params, theirs, strict=True):
        assert same(snapshot(optimizer.state[p]["exp_avg"]), snapshot(adamw.state[q]["exp_avg"]))
        assert same(snapshot(optimizer.state[p]["exp_avg_sq"]), snapshot(adamw.state[q]["exp_avg_sq"]))
    run(case, 0, optimizer, params, 6, 9)
    run(case, 0, adamw, theirs, 6, 9)
    if kind == "OneBitAdam":
        near(params, theirs)
    assert [int(own["step"]) for own in optimizer.state_dict()["state"].values()] == [9] * 4


@kinds
def test_adamw_continues_in_stage_1_after_its_freeze_step_came(kind):
    """Its steps count: 5 of them, and two more to the freeze."""
    case = Case(kind, options={"freeze_step": 7})
    theirs, adamw = adamw_run(case, 5)
    optimizer = case.build(theirs)
    optimizer.load_state_dict(adamw.state_dict())
    stages = []
    for step in range(6, 9):
        take(case, 0, optimizer, theirs, step)
        stages.append(optimizer.compressing)
    assert stages == [False, False, True]


def test_adamw_in_bf16_continues_in_stage_1():
    case = Case(dtype="bfloat16", options={"freeze_step": 20, "master_weights": False})
    theirs, adamw = adamw_run(case, 5)
    assert adamw.state[theirs[0]]["exp_avg"].dtype == torch.bfloat16
    params = other_parameters(case)
    set_parameters(params, theirs)
    optimizer = case.build(params)
    optimizer.load_state_dict(adamw.state_dict())
    for p, q in zip(params, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][name].dtype == torch.float32
            assert torch.equal(optimizer.state[p][name], adamw.state[q][name].float())
    run(case, 0, optimizer, params, 6, 7)
    run(case, 0, adamw, theirs, 6, 7)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("first", ["parameters", "optimizer"])
def test_adamw_in_bf16_moves_on_from_the_parameters_as_they_are(first):
    """Its state has no master copy: the parameters are it, in whichever order the two are loaded."""
    case = Case(dtype="bfloat16", options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5)
    values = [p.detach().clone() for p in theirs]
    params = other_parameters(case)
    if first == "parameters":
        set_parameters(params, values)
    optimizer = case.build(params)
    optimizer.load_state_dict(adamw.state_dict())
    set_parameters(params, values)
    take(case, 0, optimizer, params, 6)
    for p, value in zip(params, values, strict=True):
        assert (p - value).abs().max() < 0.1


def warm_start(rank, size, case, state, values):
    params = other_parameters(case)
    set_parameters(params, values)
    optimizer = case.build(params, group())
    optimizer.load_state_dict(snapshot(state))
    assert not optimizer.compressing
    take(case, rank, optimizer, params, 6)
    assert optimizer.compressing
    return snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]


@pytest.mark.parametrize("size", [1, 2])
def test_adamw_starts_stage_2_at_once(size):
    """1-bit Adam; 1-bit LAMB has no coefficients yet, and says so."""
    case = Case(options={"freeze_step": 0})
    theirs, adamw = adamw_run(case, 5)
    state, values = adamw.state_dict(), [p.detach() for p in theirs]
    results = run_ranks(size, warm_start, case, snapshot(state), values)
    v, m = (np.concatenate([own[k].double().numpy().ravel() for own in state["state"].values()])
            for k in ("exp_avg_sq", "exp_avg"))  # fmt: skip
    own = {"lr": 5e-3, "betas": (0.8, 0.99), "weight_decay": 0.1}
    before = SimpleNamespace(e=0.0, server=0.0, m=m, d=1 / (np.sqrt(v / (1 - 0.99**5)) + 1e-6))
    after = meaning([s for s, _ in results], case)
    assert_step(case.but(options={**case.options, **own}), size, 6, before, after, flat(case, values), results[0][1])


@kinds
def test_a_fresh_optimizer_can_not_start_in_stage_2(kind):
    case = Case(kind, options={"freeze_step": 0})
    params = case.parameters()
    with pytest.raises(ValueError, match="stage 2 is to begin after 0 steps"):
        take(case, 0, case.build(params), params, 1)


@kinds
def test_amsgrad_warns(kind):
    case = Case(kind, options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5, amsgrad=True)
    optimizer = case.build(theirs)
    with pytest.warns(UserWarning, match="amsgrad") as caught:
        optimizer.load_state_dict(adamw.state_dict())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(optimizer.state[theirs[0]]["exp_avg_sq"], adamw.state[theirs[0]]["exp_avg_sq"])


@kinds
def test_parameters_that_adamw_never_moved_start_from_zero(kind):
    case = Case(kind, missing=tuple((step, 0, 1) for step in range(1, 6)), options={"freeze_step": 20})
    theirs, adamw = adamw_run(case, 5)
    optimizer = case.build(theirs)
    optimizer.load_state_dict(adamw.state_dict())
    for i, p in enumerate(theirs):
        assert bool(optimizer.state[p]["exp_avg_sq"].any()) == (i != 1)


def test_stage_1_continues_as_adamw():
    case = Case(options={"freeze_step": 20, "weight_decay": 0.1}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 5)
    theirs = other_parameters(case)
    set_parameters(theirs, params)
    groups = [{"params": [p for i, p in enumerate(theirs) if i % 2 == g]} for g in range(2)]
    adamw = torch.optim.AdamW(groups, lr=1.0)
    adamw.load_state_dict(snapshot(optimizer.state_dict()))
    run(case, 0, optimizer, params, 6, 9)
    run(case, 0, adamw, theirs, 6, 9)
    near(params, theirs)


def test_a_run_that_adamw_went_on_with_comes_back():
    """AdamW counts its own steps, and hands on what it does not know as it got it."""
    case = Case(options={"freeze_step": 10})
    params, optimizer = trained(case, 0, 5)
    theirs = other_parameters(case)
    set_parameters(theirs, params)
    adamw = torch.optim.AdamW([theirs[p] for p in case.order], lr=1.0)
    adamw.load_state_dict(snapshot(optimizer.state_dict()))
    run(case, 0, adamw, theirs, 6, 9)
    again = case.build(theirs)
    again.load_state_dict(adamw.state_dict())
    assert [int(own["step"]) for own in again.state_dict()["state"].values()] == [9] * 4
    run(case, 0, optimizer, params, 6, 10)
    take(case, 0, again, theirs, 10)
    near(params, theirs)
    take(case, 0, again, theirs, 11)
    assert again.compressing


# torch.distributed.checkpoint


def dcp_round_trip(rank, size, case, folder, steps):
    params, optimizer = trained(case, rank, steps, group())
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder, process_group=group())
    run(case, rank, optimizer, params, steps + 1, steps + 3)

    elsewhere = case.but(seed=1)
    again, resumed = trained(elsewhere, rank, steps, group())
    assert not same(snapshot(resumed.state_dict()), state)
    dcp.load({"optimizer": resumed}, checkpoint_id=folder, process_group=group())
    set_parameters(again, values)
    assert same(snapshot(resumed.state_dict()), state)
    run(case, rank, resumed, again, steps + 1, steps + 3)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))
    return state


@kinds
@pytest.mark.parametrize("steps", [2, 6])
@pytest.mark.parametrize("options", [{"freeze_step": 3}, {"freeze_step": 3, "scale": "tensor", "chunks": 2}])
def test_dcp_gives_every_rank_its_own_back(kind, options, steps, tmp_path):
    case = Case(kind, options=options, groups=TWO_GROUPS)
    states = run_ranks(2, dcp_round_trip, case, str(tmp_path), steps)
    own = [s["state"][3].get(f"residual_of_rank_{r}") for r, s in enumerate(states)]
    if steps == 6:
        assert not torch.equal(*own)


def as_model(params):
    model = nn.Module()
    for i, p in enumerate(params):
        model.register_parameter(f"w{i}", p)
    return model


def dcp_by_name(rank, size, case, folder, steps):
    params, optimizer = trained(case, rank, steps)
    state = snapshot(optimizer.state_dict())
    model_state, optimizer_state = get_state_dict(as_model(params), optimizer)
    assert set(optimizer_state["state"]) == {"w0", "w1", "w2", "w3"}
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    run(case, rank, optimizer, params, steps + 1, steps + 3)

    again, resumed = trained(case.but(seed=1), rank, steps)
    model = as_model(again)
    model_state, optimizer_state = get_state_dict(model, resumed)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert same(snapshot(resumed.state_dict()), state)
    run(case, rank, resumed, again, steps + 1, steps + 3)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


def dcp_by_name_in_both_stages(rank, size, case, folder):
    for steps in (2, 6):
        dcp_by_name(rank, size, case, f"{folder}/{steps}", steps)


@kinds
def test_dcp_with_names_for_keys(kind, tmp_path):
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    run_ranks_once(2, dcp_by_name_in_both_stages, (case, str(tmp_path)))


# What can't be loaded, and leaves everything as it was


def change(state, path, value):
    """`state` with state[path[0]][path[1]]... = value, or without it where value is None."""
    *way, last = path
    inner = state
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value(inner[last]) if callable(value) else value
    return state


def shorter(tensor):
    return tensor.reshape(-1)[:-1].clone()


def one_number(tensor):
    return tensor.reshape(-1)[:1].clone()


ONE = ("state", 0)
GROUP = ("param_groups", 0)
BROKEN = {
    "no param_groups": (("param_groups",), None, "param_groups"),
    "no state": (("state",), None, "param_groups"),
    "a group too few": (("param_groups",), lambda groups: groups[:1], "groups"),
    "a parameter too few": ((*GROUP, "params"), lambda keys: keys[:-1], "groups"),
    "another version": ((*GROUP, "onebit", "version"), 99, "version"),
    "no version": ((*GROUP, "onebit", "version"), None, "version"),
    "maximize": ((*GROUP, "maximize"), lambda _: True, "maximize"),
}
BROKEN_STAGE_1 = {
    **BROKEN,
    "shape of exp_avg": ((*ONE, "exp_avg"), shorter, "exp_avg"),
    "shape of exp_avg_sq": ((*ONE, "exp_avg_sq"), one_number, "exp_avg_sq"),
    "no exp_avg": ((*ONE, "exp_avg"), None, "exp_avg"),
    "no exp_avg_sq": ((*ONE, "exp_avg_sq"), None, "exp_avg_sq"),
}
BROKEN_STAGE_2 = {
    **BROKEN,
    "another optimizer's": ((*GROUP, "onebit", "optimizer"), "OneBitOther", "OneBitOther"),
    "shape of denominator": ((*ONE, "denominator"), shorter, "denominator"),
    "no denominator": ((*ONE, "denominator"), None, "denominator"),
    "no parameter": (ONE, None, ""),
    "no bits": ((*ONE, "momentum_bits"), None, "momentum_bits"),
    "no scales": ((*ONE, "momentum_scales"), None, "momentum_scales"),
    "bits of fewer blocks": ((*ONE, "momentum_bits"), lambda b: b[:1], "momentum_bits"),
    "scales of fewer blocks": ((*ONE, "momentum_scales"), lambda s: s[:1], "momentum_scales"),
    "no server residual": ((*ONE, "server_residual_of_rank_0"), None, "server_residual"),
    "shape of residual": ((*ONE, "residual_of_rank_0"), shorter, "residual_of_rank_0"),
    "number for a residual": ((*ONE, "residual_of_rank_0"), one_number, "residual_of_rank_0"),
    "shape of server residual": ((*ONE, "server_residual_of_rank_0"), shorter, "server_residual_of_rank_0"),
}


def assert_refused(case, steps, broken, match):
    """The optimizer did not notice: this step and the next are those of one that was given nothing."""
    params, optimizer = trained(case.but(seed=1), 0, steps)
    state, values, numbers = snapshot(optimizer.state_dict()), bits(params), seen(optimizer)
    shown = {p: snapshot(own) for p, own in optimizer.state.items()}
    current = optimizer.current
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(broken)
    assert optimizer.current is current
    assert bits(params) == values
    assert seen(optimizer) == numbers
    assert same(snapshot(optimizer.state_dict()), state)
    assert all(same(snapshot(optimizer.state[p]), own) for p, own in shown.items())
    others, undisturbed = trained(case.but(seed=1), 0, steps)
    run(case, 0, optimizer, params, steps + 1, steps + 2)
    run(case, 0, undisturbed, others, steps + 1, steps + 2)
    assert bits(params) == bits(others)
    assert same(snapshot(optimizer.state_dict()), snapshot(undisturbed.state_dict()))


def broken_case(kind):
    return Case(kind, options={"freeze_step": 3, "betas": (0.9, 0.95)}, groups=({"lr": 1e-3}, {"weight_decay": 0.1}))


def broken_state(case, steps, path, value):
    state = snapshot(trained(case.but(options={**case.options, "lr": 0.5}), 0, steps)[1].state_dict())
    state["param_groups"][0].setdefault("maximize", False)
    return change(state, path, value)


@kinds
@pytest.mark.parametrize("name", BROKEN_STAGE_1)
def test_a_broken_state_of_stage_1_changes_nothing(kind, name):
    path, value, match = BROKEN_STAGE_1[name]
    case = broken_case(kind)
    assert_refused(case, 2, broken_state(case, 2, path, value), match)


@kinds
@pytest.mark.parametrize("name", BROKEN_STAGE_2)
@pytest.mark.parametrize("here", [2, 6])
def test_a_broken_state_of_stage_2_changes_nothing(kind, name, here):
    """Neither for an optimizer in stage 1 nor for one in stage 2."""
    path, value, match = BROKEN_STAGE_2[name]
    case = broken_case(kind)
    assert_refused(case, here, broken_state(case, 6, path, value), match)


def save_two_dtypes(rank, size, case, steps):
    params = case.parameters()
    params[1].data = params[1].data.bfloat16()
    optimizer = case.build(params, group())
    for step in range(1, steps + 1):
        for p, g in zip(params, case.gradients(rank, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return snapshot(optimizer.state_dict())


def load_one_dtype(rank, size, case, states):
    params, optimizer = trained(case, rank, 6, group())
    before = snapshot(optimizer.state_dict())
    with pytest.raises(ValueError, match="dtype"):
        optimizer.load_state_dict(states[rank])
    assert same(snapshot(optimizer.state_dict()), before)
    run(case, rank, optimizer, params, 7, 8)


@kinds
def test_a_state_of_other_dtypes_changes_nothing(kind):
    """Saved with parameters in two dtypes, which lie in two spaces; here in one, so that E lies on other ranks."""
    case = broken_case(kind)
    run_ranks(2, load_one_dtype, case, run_ranks(2, save_two_dtypes, case, 6))


@kinds
def test_moments_fit_parameters_of_any_dtype(kind):
    case = broken_case(kind)
    (state,) = run_ranks(1, save_two_dtypes, case, 2)
    params = case.parameters()
    optimizer = case.build(params)
    optimizer.load_state_dict(state)
    loaded = snapshot(optimizer.state_dict()["state"])
    for p, own in state["state"].items():
        assert all(same(loaded[p][name], own[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


@kinds
def test_adamw_with_different_steps_changes_nothing(kind):
    case = Case(kind, missing=((2, 0, 1), (4, 0, 1)), options={"freeze_step": 3})
    _, adamw = adamw_run(case, 5)
    assert_refused(case, 2, adamw.state_dict(), r"different numbers of steps \(\[3, 5\]\)")


@kinds
def test_adamw_that_maximizes_changes_nothing(kind):
    case = Case(kind, options={"freeze_step": 3})
    _, adamw = adamw_run(case, 5, maximize=True)
    assert_refused(case, 2, adamw.state_dict(), "maximize")


@kinds
def test_no_state_at_all_changes_nothing(kind):
    assert_refused(broken_case(kind), 6, {}, "not a state of an optimizer")


# As torch.optim.Optimizer


@kinds
@pytest.mark.parametrize("steps", [2, 6])
def test_hooks_run(kind, steps):
    case = Case(kind, options={"freeze_step": 3})
    _, optimizer = trained(case, 0, steps)
    calls = []

    def before_save(own):
        calls.append(("before save", own is optimizer))

    def after_save(own, state_dict):
        calls.append(("after save", state_dict["param_groups"][0]["onebit"]["steps"]))
        return {**state_dict, "note": 7}

    def before_load(own, state_dict):
        calls.append(("before load", state_dict["note"]))
        return {k: v for k, v in state_dict.items() if k != "note"}

    def after_load(own):
        calls.append(("after load", len(own.state)))

    optimizer.register_state_dict_pre_hook(before_save)
    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(after_load)
    state = optimizer.state_dict()
    assert state["note"] == 7
    optimizer.load_state_dict(state)
    assert state["note"] == 7
    assert calls == [("before save", True), ("after save", steps), ("before load", 7), ("after load", 4)]


@kinds
def test_a_hook_may_wrap_the_state(kind):
    """As torch's own state_dict: what a post hook returns is what the caller gets."""
    _, optimizer = trained(Case(kind, options={"freeze_step": 3}), 0, 5)
    optimizer.register_state_dict_post_hook(lambda own, state_dict: {"wrapped": state_dict})
    optimizer.register_load_state_dict_pre_hook(lambda own, state_dict: state_dict["wrapped"])
    state = optimizer.state_dict()
    assert state.keys() == {"wrapped"}
    assert state["wrapped"]["param_groups"][0]["onebit"]["steps"] == 5
    optimizer.load_state_dict(state)
    assert optimizer.compressing


@kinds
@pytest.mark.parametrize("steps", [0, 2, 6])
def test_loading_what_was_just_saved_changes_nothing(kind, steps):
    """What Accelerate does at construction."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS, dtype="bfloat16")
    params, optimizer = trained(case, 0, steps)
    others, undisturbed = trained(case, 0, steps)
    before = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert same(snapshot(optimizer.state_dict()), before)
    run(case, 0, optimizer, params, steps + 1, steps + 4)
    run(case, 0, undisturbed, others, steps + 1, steps + 4)
    assert bits(params) == bits(others)
    assert same(snapshot(optimizer.state_dict()), snapshot(undisturbed.state_dict()))


def scheduled_steps(case, optimizer, params, scheduler, first, last):
    for step in range(first, last + 1):
        take(case, 0, optimizer, params, step)
        scheduler.step()


@kinds
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
def test_a_learning_rate_schedule_goes_on(kind, lr):
    case = Case(kind, options={"freeze_step": 3, "lr": lr.clone() if isinstance(lr, torch.Tensor) else lr})
    params = case.parameters()
    optimizer = case.build(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    scheduled_steps(case, optimizer, params, scheduler, 1, 5)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    scheduled_steps(case, optimizer, params, scheduler, 6, 9)

    other = case.but(options={"freeze_step": 3, "lr": 0.7})
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = other.build(again)
    kept = snapshot(state)
    resumed.load_state_dict(state)
    assert float(resumed.param_groups[0]["initial_lr"]) == pytest.approx(1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(resumed, lambda t: 1 / (1 + t), last_epoch=4)
    scheduled_steps(case, resumed, again, scheduler, 6, 9)
    assert bits(again) == bits(params)
    assert same(state, kept), "training changed the state that was loaded"


@kinds
def test_a_param_group_that_was_added_is_loaded(kind):
    """Added, as in fine-tuning, after the optimizer was built and before it took a step."""
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    for steps in (2, 6):
        params, optimizer = trained(case, 0, steps)
        state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
        run(case, 0, optimizer, params, steps + 1, steps + 2)
        again = other_parameters(case)
        set_parameters(again, values)
        options = {"lr": 1e-2, "block_size": 32, "chunks": 1, **case.options}
        resumed = getattr(onebit, kind)(again[::2], **options)
        resumed.add_param_group({"params": again[1::2]})
        resumed.load_state_dict(state)
        assert same(snapshot(resumed.state_dict()), state)
        run(case, 0, resumed, again, steps + 1, steps + 2)
        assert bits(again) == bits(params)


@kinds
def test_parameters_that_do_not_train_have_no_state(kind):
    case = Case(kind, options={"freeze_step": 3})

    def built():
        params = case.parameters()
        params[1].requires_grad_(False)
        return params, case.build(params)

    params, optimizer = built()
    run(case, 0, optimizer, params, 1, 6)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    assert sorted(state["state"]) == [0, 2, 3]
    run(case, 0, optimizer, params, 7, 8)
    again, resumed = built()
    set_parameters(again, values)
    resumed.load_state_dict(state)
    run(case, 0, resumed, again, 7, 8)
    assert bits(again) == bits(params)


@kinds
def test_momentum_in_a_state_is_a_copy(kind):
    """The messages it lies in are written over by the next step."""
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = trained(case, 0, 6)
    state = optimizer.state_dict()
    names = ("momentum_bits", "momentum_scales", "step")
    before = snapshot([[own[name] for name in names] for own in state["state"].values()])
    run(case, 0, optimizer, params, 7, 8)
    assert same([[own[name] for name in names] for own in state["state"].values()], before)
    assert not same(snapshot(optimizer.state_dict())["state"][3]["momentum_bits"], before[3][0])


@kinds
def test_what_was_loaded_is_not_shared(kind):
    """Two optimizers, one state: neither trains the other, nor the state."""
    case = Case(kind, options={"freeze_step": 3}, dtype="bfloat16")
    for steps in (2, 6):
        state = snapshot(trained(case, 0, steps)[1].state_dict())
        kept = snapshot(state)
        params = case.parameters()
        optimizer = case.build(params)
        optimizer.load_state_dict(state)
        run(case, 0, optimizer, params, steps + 1, steps + 3)
        assert same(state, kept)


@kinds
@pytest.mark.parametrize("options", [{"freeze_step": 3}, AUTO])
@pytest.mark.parametrize("there", [2, 3, 5, 9])
def test_an_optimizer_goes_back_to_an_earlier_state(kind, options, there):
    """As after a spike of the loss: what the last step left to be heard of is no longer true."""
    case = Case(kind, options=options)
    params, optimizer = trained(case, 0, 2)
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, 0, optimizer, params, 3, 10)
    assert optimizer.compressing
    again, resumed = trained(case.but(seed=1), 0, there)
    set_parameters(again, values)
    resumed.load_state_dict(state)
    assert not resumed.compressing
    assert set(resumed.state[again[0]]) == {"exp_avg", "exp_avg_sq"}
    run(case, 0, resumed, again, 3, 10)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))
