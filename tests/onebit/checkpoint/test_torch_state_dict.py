"""torch.distributed.checkpoint.state_dict carries an optimizer's state, whatever its options. It walks the live one."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, as_model, assert_go_on_alike, set_parameters, trained
from tests.onebit.runs import Case, build, kinds, same, snapshot, take
from tests.ranks import group, run_ranks

OPTIONS = {
    "default": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "flattened and offloaded": {"flatten_optimizer_state_dict": True, "cpu_offload": True},
}
FLATTENED, FREEZE = StateDictOptions(**OPTIONS["flattened"]), {"freeze_step": 3}


def carried(rank, size, case, name, steps, there):
    """The state of `steps` steps by way of torch into an optimizer that has taken `there` others."""
    options = StateDictOptions(**OPTIONS[name])
    params, optimizer = trained(case, rank, steps, group())
    carried = snapshot(get_optimizer_state_dict(as_model(params), optimizer, options=options))
    again, other = trained(case.but(seed=1), rank, there, group())
    set_parameters(again, params)
    set_optimizer_state_dict(as_model(again), other, carried, options=options)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))
    assert_go_on_alike(case, rank, (params, optimizer), (again, other), steps + 1, steps + 4)


CARRIED = [  # optimizer, option, steps there, steps here
    ("OneBitAdam", "default", 2, 6),
    ("OneBitAdam", "flattened", 2, 0),
    ("OneBitLamb", "full", 2, 6),
    ("OneBitLamb", "flattened and offloaded", 2, 3),
    ("ZeroOneAdam", "offloaded", 2, 0),
    ("OneBitAdam", "flattened and offloaded", 6, 5),
    ("OneBitLamb", "flattened", 6, 5),
    ("ZeroOneAdam", "full", 6, 5),
    ("OneBitAdam", "full", 6, 0),
    ("OneBitLamb", "offloaded", 6, 0),
    ("ZeroOneAdam", "default", 6, 0),
]


@pytest.mark.parametrize(("kind", "name", "steps", "there"), CARRIED)
def test_a_state_goes_on_bit_for_bit(kind, name, steps, there):
    run_ranks(2, carried, Case(kind, options=FREEZE, groups=TWO_GROUPS), name, steps, there)


def test_what_auto_compares_is_carried():
    """Three rows of numbers here and none there, or the other way round."""
    for kind, name in (("OneBitAdam", "flattened"), ("OneBitAdam", "full"), ("OneBitLamb", "default")):
        for steps, there in ((4, 0), (1, 4)):
            run_ranks(1, carried, Case(kind, options=AUTO), name, steps, there)


@pytest.mark.parametrize(
    ("kind", "steps", "there"), [("OneBitAdam", 2, 6), ("OneBitLamb", 6, 2), ("ZeroOneAdam", 6, 2)]
)
def test_a_flattened_state_of_another_stage_needs_room(kind, steps, there):
    """torch looks in it only for what the optimizer has."""
    case = Case(kind, options=FREEZE)
    params, optimizer = trained(case, 0, steps)
    flat = get_optimizer_state_dict(as_model(params), optimizer, options=FLATTENED)
    again, other = trained(case, 0, there)
    before = snapshot(other.state_dict())
    with pytest.raises(ValueError, match=r"call onebit\.make_room first"):
        set_optimizer_state_dict(as_model(again), other, flat, options=FLATTENED)
    assert same(snapshot(other.state_dict()), before)


def test_what_an_optimizer_has_beside_a_full_state_is_not_loaded_with_it():
    """torch puts the two together. Here one had coordinates without a variance, and LAMB a field for them."""
    case = Case("OneBitLamb", options=FREEZE)
    params, optimizer = trained(case, 0, 6)
    options = StateDictOptions(full_state_dict=True)
    full = snapshot(get_optimizer_state_dict(as_model(params), optimizer, options=options))
    with pytest.warns(UserWarning, match="without a variance"):
        again, other = trained(case.but(untouched=((0, 2, 9),)), 0, 6)
    assert "counted_bits" in other.state[again[0]]
    set_optimizer_state_dict(as_model(again), other, full, options=options)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))


@kinds
def test_the_step_is_where_adamw_has_it(kind):
    case = Case(kind, options=FREEZE)
    params, optimizer = trained(case, 0, 0)
    for step in range(1, 7):
        assert [int(optimizer.state[p]["step"]) for p in params] == [step - 1] * 4
        take(case, 0, optimizer, params, step)


def names(rank, size, case):
    for steps in (2, 4, 6):
        params, optimizer = trained(case, rank, steps, group())
        saved = optimizer.state_dict()
        assert all(set(optimizer.state[p]) == set(saved["state"][i]) for i, p in enumerate(params))
        assert optimizer.param_groups[0].keys() == saved["param_groups"][0].keys()


@pytest.mark.parametrize(
    ("kind", "options", "each"),
    [("OneBitAdam", {}, 1), ("OneBitLamb", {"reply": "direct"}, 2), ("ZeroOneAdam", {"reply": 2}, 1),
     ("OneBitLamb", {"scale": "tensor"}, 1), ("OneBitAdam", {}, 2)], ids=str,
)  # fmt: skip
def test_what_is_saved_is_in_the_live_state_under_the_same_names(kind, options, each):
    run_ranks(2, names, Case(kind, dtype="bfloat16", options={**FREEZE, **options}, each=each))


def test_moments_without_a_step_are_refused():
    params, optimizer = trained(Case(options=FREEZE), 0, 2)
    state = snapshot(optimizer.state_dict())
    del state["param_groups"][0]["onebit"], state["state"][1]["step"]
    with pytest.raises(ValueError, match="moments of parameter 1 and no step"):
        optimizer.load_state_dict(state)
    flat = get_optimizer_state_dict(as_model(params), optimizer, options=FLATTENED)
    without = {key: value for key, value in flat.items() if not key.endswith(".step")}
    with pytest.raises(ValueError, match="no step"):
        set_optimizer_state_dict(as_model(params), optimizer, without, options=FLATTENED)


def test_a_state_of_stage_2_with_other_steps_is_refused():
    params, optimizer = trained(Case(options=FREEZE), 0, 6)
    state = snapshot(optimizer.state_dict())
    for own in state["state"].values():
        own["step"] = torch.tensor(5.0)
    with pytest.raises(ValueError, match="of step 6, and its parameters have taken 5"):
        build("OneBitAdam", params).load_state_dict(state)
