"""A state_dict on as many ranks, at any step of either stage: the resumed run is the uninterrupted one bit for bit, by
the conventions of torch.optim (hooks, schedules, groups, copies, parameters that do not train)."""

import copy
import json
from math import inf, nan

import pytest
import torch
from torch import nn

import onebit
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, assert_go_on_alike, checkpoint, trained
from tests.onebit.optim.contract import resumes
from tests.onebit.runs import Case, bits, build, kinds, on_ranks, on_warnings, run, same, snapshot, step_by, take
from tests.ranks import group

FREEZE = {"freeze_step": 3}


CHUNKS, DIRECT, TENSOR, LIMIT = {"chunks": 2}, {"reply": "direct"}, {"scale": "tensor"}, {"update_limit": "auto"}
GROUPS, BF16 = {"groups": TWO_GROUPS}, {"dtype": "bfloat16"}
NEVER = {"missing": tuple((step, rank, 2) for step in range(1, 10) for rank in range(2))}
NODES = {"shapes": states.FIVE, "each": 2, "bad": ((5, 1, nan),)}  # skipped right after a load: what was sent is there


def skipping(size):
    """Steps that are skipped: the first after a resume, and the first that would have compressed, which leaves exp_avg
    in e."""
    bad = tuple((step, step % size, value) for step, value in ((2, nan), (5, inf), (7, nan), (8, nan)))
    return {"steps": 10, "bad": bad, "missing": ((6, 0, 1), (9, size - 1, 2)), "grown": ((9, 10, 50.0),)}


RESUMES = [  # ranks, options, more of the case; test_contract.py has others
    ("OneBitAdam", 2, {**AUTO, **TENSOR}, {**GROUPS, "steps": 14}),
    ("OneBitAdam", 2, {"master_weights": False}, BF16),
    ("OneBitAdam", 3, {**DIRECT, "norm": "unbiased", **CHUNKS, **LIMIT}, skipping(3)),
    ("OneBitAdam", 2, {"zero_variance": "hold"}, NEVER),
    ("OneBitAdam", 4, CHUNKS, NODES),
    ("OneBitLamb", 3, {**TENSOR, **CHUNKS, **LIMIT}, {**GROUPS, **skipping(3)}),
    ("OneBitLamb", 2, {**DIRECT, **CHUNKS}, {**BF16, **GROUPS}),
    ("OneBitLamb", 2, {"zero_variance": "floor"}, NEVER),
    ("OneBitLamb", 4, {**DIRECT, **CHUNKS}, NODES),
    ("ZeroOneAdam", 2, {**CHUNKS, **LIMIT}, skipping(2)),
    ("ZeroOneAdam", 3, {**DIRECT, **CHUNKS}, {**BF16, **GROUPS}),
    ("ZeroOneAdam", 4, CHUNKS, NODES),
]


@pytest.mark.parametrize(("kind", "size", "options", "more"), RESUMES, ids=str)
@on_ranks()
def test_a_resumed_run_is_the_uninterrupted_one(rank, size, kind, options, more):
    """It may begin from the state of each step."""
    case = Case(kind, **{"steps": 9, **more, "options": {**FREEZE, **options}})
    return resumes(rank, size, case, tuple(range(1, case.steps)))


@kinds
@on_ranks(2)
def test_saving_changes_nothing_and_states_load_before_parameters(rank, kind):
    """A run of one state after every step, that is saved and loads what it has saved, as Accelerate does at
    construction. One beside it each time loads the state before the parameters."""
    options = {**FREEZE, "chunks": 3, **{"OneBitAdam": TENSOR, "OneBitLamb": AUTO}.get(kind, {})}
    case = Case(kind, steps=9, options=options, bad=((2, 0, nan),), dtype="bfloat16", groups=TWO_GROUPS)

    def seen(params, optimizer):
        found = checkpoint(params, optimizer)  # which reads what the last step has left to be read
        return *found, (optimizer.compressing, optimizer.skipped_steps, optimizer.wire_bytes, optimizer.freeze_ratio)

    never_saved, (params, optimizer) = (trained(case, rank, 0, group()) for _ in range(2))
    for step in range(1, case.steps + 1):
        beside, state = states.other_parameters(case), optimizer.state_dict()
        assert all(v.stride() == torch.empty(v.shape).stride() for own in state["state"].values() for v in own.values())
        chunks = "auto" if optimizer.compressing else 3  # measured anew, the saved ones are kept
        other, kept = case.but(options={**options, "chunks": chunks}).build(beside, group()), snapshot(state)
        with on_warnings("error"):
            other.load_state_dict(snapshot(state))
            optimizer.load_state_dict(state)
        states.set_parameters(beside, params)
        assert same(seen(beside, other), seen(params, optimizer)), f"loaded before step {step}"
        assert same(seen(params, optimizer)[0], kept)
        assert_go_on_alike(case, rank, (params, optimizer), (beside, other), step, step)
        for p, own in kept["state"].items():  # copies, as what they lie in is written over
            assert same(own["step"], state["state"][p]["step"])
        take(case, rank, never_saved[1], never_saved[0], step)
        never_saved[1].synchronize()
    assert same(seen(params, optimizer), seen(*never_saved)), "saving changed the run"
    *_, (compressing, skipped, nbytes, ratio) = seen(params, optimizer)
    assert compressing and skipped == 1 and nbytes > 0 and (ratio is None) == (kind != "OneBitLamb")


# As torch.optim has it


def test_state_dict_hooks_run_in_order():
    """They may change or wrap the state: what a post hook returns is what the caller gets."""
    _, optimizer = trained(Case("OneBitLamb", options=FREEZE), 0, 6)
    calls = []

    def after_save(own, state_dict):
        calls.append(("after save", json.loads(state_dict["param_groups"][0]["onebit"])["steps"]))
        return {"wrapped": state_dict}

    def before_load(own, state_dict):
        calls.append(("before load", list(state_dict)))
        return state_dict["wrapped"]

    optimizer.register_state_dict_pre_hook(lambda own: calls.append(("before save", own is optimizer)))
    optimizer.register_state_dict_post_hook(after_save)
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(lambda own: calls.append(("after load", len(own.state))))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert state.keys() == {"wrapped"} and optimizer.compressing
    assert calls == [("before save", True), ("after save", 6), ("before load", ["wrapped"]), ("after load", 4)]


@kinds
@on_ranks(2)
def test_a_hook_may_synchronize_before_each_save(rank, kind):
    """A loop that calls state_dict on all ranks then needs no other call."""
    case = Case(kind, options=FREEZE)
    (_, by_hook), (_, by_hand) = (trained(case, rank, 6, group()) for _ in range(2))
    by_hook.register_state_dict_pre_hook(lambda own: own.synchronize())
    with on_warnings("error"):
        found = by_hook.state_dict()
    by_hand.synchronize()
    assert by_hook.compressing and same(found, by_hand.state_dict())
    assert same(by_hook.state_dict(), found), "the hook is kept"


@pytest.mark.parametrize(
    ("kind", "last", "lr"), [("OneBitAdam", 5, 1e-2), ("OneBitLamb", 2, 1e-2), ("ZeroOneAdam", 5, torch.tensor(1e-2))]
)
def test_a_schedule_continues_and_a_param_group_that_was_added_is_loaded(kind, last, lr):
    """Added, as in fine-tuning, after the optimizer was built and before it took a step."""

    def schedule(optimizer, last_epoch=-1):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t), last_epoch=last_epoch)

    def steps(params, optimizer, scheduler, first, last):
        for step in range(first, last + 1):
            take(case, 0, optimizer, params, step)
            scheduler.step()

    case = Case(kind, options={**FREEZE, "lr": snapshot(lr)}, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, 0)
    scheduler = schedule(optimizer)
    steps(params, optimizer, scheduler, 1, last)
    state, values = checkpoint(params, optimizer)
    kept, again = snapshot(state), states.other_parameters(case)
    other = build(kind, again[::2], lr=0.7, block_size=64, chunks=1, update_limit=None, **FREEZE)
    other.add_param_group({"params": again[1::2]})
    other.load_state_dict(state)
    states.set_parameters(again, values)
    assert [float(own["initial_lr"]) for own in other.param_groups] == pytest.approx([1e-2, 3e-3])
    assert same(snapshot(other.state_dict()), kept)
    steps(params, optimizer, scheduler, last + 1, last + 4)
    steps(again, other, schedule(other, last_epoch=last - 1), last + 1, last + 4)
    assert bits(again) == bits(params)
    assert same(state, kept), "training changed the state that was loaded"


@kinds
def test_parameters_that_do_not_train_have_no_state(kind):
    case = Case(kind, options=FREEZE, dtype="bfloat16")
    (params, optimizer), (again, other) = (trained(case, 0, 0) for _ in range(2))
    for p in (params[1], again[1]):
        p.requires_grad_(False)
    run(case, 0, optimizer, params, 1, 6)
    state, values = checkpoint(params, optimizer)
    kept = snapshot(state)
    assert sorted(state["state"]) == [0, 2, 3]
    states.set_parameters(again, values)
    other.load_state_dict(state)
    assert_go_on_alike(case, 0, (params, optimizer), (again, other), 7, 8)
    assert same(state, kept), "training changed the state that was loaded"


def steps_of(optimizer, *gradients):
    for value in gradients:
        step_by(optimizer, lambda p, value=value: torch.full_like(p, value))


@pytest.mark.parametrize("frozen", [slice(None), slice(0, 500)], ids=["all", "the small ones"])
def test_a_state_saved_while_parameters_are_frozen_goes_on(frozen):
    def built():
        params = [*(nn.Parameter(torch.ones(10)) for _ in range(500)), nn.Parameter(torch.ones(100, 100))]
        return params, onebit.OneBitAdam(params, lr=1e-2, freeze_step=1)

    (params, optimizer), (others, again) = built(), built()
    steps_of(optimizer, 0.1, 0.2)
    for p in params[frozen]:
        p.requires_grad_(False)
    state = copy.deepcopy(optimizer.state_dict())
    for p in params[frozen]:
        p.requires_grad_(True)
    states.set_parameters(others, params)
    again.load_state_dict(state)
    steps_of(optimizer, 0.3, 0.4)
    steps_of(again, 0.3, 0.4)
    assert bits(params) == bits(others)


def test_lambs_coefficients_of_before_a_group_was_added_are_not_saved():
    params = [nn.Parameter(torch.ones(40)) for _ in range(3)]
    options = {"lr": 1e-3, "freeze_step": onebit.FreezeRule(window=32)}
    optimizer = onebit.OneBitLamb(params[:2], **options)
    steps_of(optimizer, *[1.0] * 20)
    optimizer.add_param_group({"params": params[2:]})
    steps_of(optimizer, *[1.0] * 5)
    again = onebit.OneBitLamb(
        [{"params": params[:2]}, {"params": params[2:]}], lr=1e-3, freeze_step=onebit.FreezeRule(window=32)
    )
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(40):
        steps_of(optimizer, 1.0)
        steps_of(again, 1.0)
    assert optimizer.freeze_ratio == again.freeze_ratio is not None
