"""torch.distributed.checkpoint carries an optimizer's state, whatever its options: in memory, where it walks the live
one, and by files, as PyTorch's own recipe has it, or by way of make_room into a new optimizer."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as tools
from torch.distributed.checkpoint.stateful import Stateful

import onebit
from tests.checkpoints import Holder
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import TWO_GROUPS, checkpoint, trained
from tests.onebit.runs import Case, bits, on_ranks, on_warnings, run, same, snapshot, take
from tests.ranks import group, run_ranks

OPTIONS = {
    "default": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "flattened and offloaded": {"flatten_optimizer_state_dict": True, "cpu_offload": True},
}
FLATTENED, FREEZE = tools.StateDictOptions(**OPTIONS["flattened"]), {"freeze_step": 3}
CASE, TENSOR = Case(options=FREEZE), {"scale": "tensor", "chunks": 2}


# In memory


CARRIED = [  # optimizer, option, steps there, steps here, more options; by files there are others
    ("OneBitAdam", "default", 2, 6, {}),
    ("OneBitLamb", "flattened and offloaded", 2, 3, {}),
    ("ZeroOneAdam", "offloaded", 2, 0, {}),
    ("OneBitLamb", "flattened", 6, 5, {}),
    ("ZeroOneAdam", "full", 6, 5, {}),
    ("OneBitAdam", "full", 6, 0, {}),
    # of what "auto" compares, three rows of numbers here and none there, or the other way round
    ("OneBitAdam", "flattened", 4, 0, states.AUTO),
    ("OneBitLamb", "full", 1, 4, states.AUTO),
]


@pytest.mark.parametrize(("kind", "name", "steps", "there", "more"), CARRIED)
@on_ranks(2)
def test_a_state_goes_on_bit_for_bit(rank, kind, name, steps, there, more):
    """The state of `steps` steps by way of torch into an optimizer that has taken `there` others."""
    case, options = Case(kind, options={**FREEZE, **more}, groups=TWO_GROUPS), tools.StateDictOptions(**OPTIONS[name])
    params, optimizer = trained(case, rank, steps, group())
    carried = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=options))
    again, other = trained(case.but(seed=1), rank, there, group())
    states.set_parameters(again, params)
    tools.set_optimizer_state_dict(Holder(again), other, carried, options=options)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))
    states.assert_go_on_alike(case, rank, (params, optimizer), (again, other), steps + 1, steps + 4)


@pytest.mark.parametrize(
    ("kind", "steps", "there"),
    [("OneBitAdam", 2, 6), ("OneBitLamb", 6, 2), ("OneBitLamb", 6, 0), ("ZeroOneAdam", 6, 2)],
)
def test_a_flattened_state_of_another_stage_needs_room(kind, steps, there):
    """torch looks in it only for what the optimizer has."""
    case = Case(kind, options=FREEZE, groups=TWO_GROUPS)
    params, optimizer = trained(case, 0, steps)
    flat = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=FLATTENED))
    again, other = trained(case.but(seed=1), 0, there)
    before = snapshot(other.state_dict())
    if there > 0:
        with pytest.raises(ValueError, match=r"call onebit\.make_room first"):
            tools.set_optimizer_state_dict(Holder(again), other, flat, options=FLATTENED)
    assert same(snapshot(other.state_dict()), before)
    onebit.make_room(flat, Holder(again), other)
    tools.set_optimizer_state_dict(Holder(again), other, flat, options=FLATTENED)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))


def test_a_flattened_state_of_a_run_to_which_a_parameter_was_added_needs_room():
    """torch leaves out that it was, and the freeze would not know."""
    case = Case(shapes=((40,), (33,)), groups=TWO_GROUPS, options={"freeze_step": 4})
    params = case.parameters()
    optimizer = case.but(groups=({},)).build(params[:1])
    for step in range(1, 4):
        if step == 3:
            optimizer.add_param_group({**TWO_GROUPS[1], "params": params[1:]})
        take(case, 0, optimizer, params, step)
    carried = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=FLATTENED))
    again, other = trained(case, 0, 0)
    states.set_parameters(again, params)
    with pytest.raises(ValueError, match="the state has no joined_after_step, with which it was saved"):
        tools.set_optimizer_state_dict(Holder(again), other, snapshot(carried), options=FLATTENED)
    onebit.make_room(carried, Holder(again), other)
    tools.set_optimizer_state_dict(Holder(again), other, carried, options=FLATTENED)
    states.assert_go_on_alike(case, 0, (params, optimizer), (again, other), 4, 6)


def test_what_an_optimizer_has_beside_a_full_state_is_not_loaded_with_it():
    """torch puts the two together. Here one had elements without a variance, and LAMB a field for them."""
    case = Case("OneBitLamb", options=FREEZE)
    params, optimizer = trained(case, 0, 6)
    options = tools.StateDictOptions(full_state_dict=True)
    full = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=options))
    with pytest.warns(UserWarning, match="without a variance"):
        again, other = trained(case.but(untouched=((0, 2, 9),)), 0, 6)
    assert "counted_bits" in other.state[again[0]]
    tools.set_optimizer_state_dict(Holder(again), other, full, options=options)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))


LIVE = [
    ("OneBitAdam", {}, 1),
    ("OneBitLamb", {"reply": "direct"}, 2),
    ("ZeroOneAdam", {}, 1),
    ("OneBitLamb", {"scale": "tensor"}, 1),
    ("OneBitAdam", {}, 2),
]


@pytest.mark.parametrize(("kind", "options", "each"), LIVE, ids=str)
@on_ranks(2)
def test_what_is_saved_is_in_the_live_state_under_the_same_names(rank, kind, options, each):
    """A step where AdamW has it."""
    case = Case(kind, dtype="bfloat16", options={**FREEZE, **options}, each=each)
    params, optimizer = trained(case, rank, 0, group())
    for step in range(1, 7):
        assert [int(optimizer.state[p]["step"]) for p in params] == [step - 1] * 4
        take(case, rank, optimizer, params, step)
        if step % 2 == 0:
            saved = optimizer.state_dict()
            assert all(set(optimizer.state[p]) == set(saved["state"][i]) for i, p in enumerate(params))
            assert optimizer.param_groups[0].keys() == saved["param_groups"][0].keys()


# By files


class App(Stateful):
    """As PyTorch's tutorial has it."""

    def __init__(self, model, optimizer, options):
        self.both, self.options = (model, optimizer), tools.StateDictOptions(**options)

    def state_dict(self):
        model, optimizer = tools.get_state_dict(*self.both, options=self.options)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optim"]
        tools.set_state_dict(*self.both, model_state_dict=model, optim_state_dict=optimizer, options=self.options)


def entries(how, params, optimizer):
    """By names, as the option `how` has it, or the optimizer alone, whose parameters have numbers."""
    if how == "alone":
        return {"optimizer": optimizer}
    return {"app": App(Holder(params), optimizer, OPTIONS[how])}


def seen(case, rank, params, optimizer, steps):
    """As it is, and parameters three steps later."""
    state, values = checkpoint(params, optimizer)
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return state, bits(params), values


def saving(rank, size, case, folder, how, steps):
    params, optimizer = trained(case, rank, steps, group())
    dcp.save(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    return seen(case, rank, params, optimizer, steps)


def loading(rank, size, case, folder, how, steps, new, values):
    """new: the optimizer is, else it has taken as many steps of another run."""
    params, optimizer = trained(case.but(seed=1), rank, 0 if new else steps, group())
    if new:
        onebit.make_room(folder, Holder(params), optimizer)
    with on_warnings("error", message="the state does not hold the residuals"):
        dcp.load(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    if how == "alone":
        states.set_parameters(params, values)
    return seen(case, rank, params, optimizer, steps)


ROWS = [  # optimizer, how, steps, new, ranks there, options, ranks here, ranks a node
    ("OneBitAdam", "default", 2, True, 2, {}, 3, 1),
    ("OneBitLamb", "default", 6, False, 2, TENSOR, 2, 1),
    ("ZeroOneAdam", "default", 6, True, 2, {}, 3, 1),
    ("OneBitAdam", "flattened", 6, True, 2, {}, 1, 1),
    ("OneBitLamb", "full", 6, True, 2, {}, 3, 1),
    ("ZeroOneAdam", "flattened and offloaded", 6, True, 2, {}, 2, 1),
    ("OneBitLamb", "alone", 2, False, 2, TENSOR, 2, 1),
    ("OneBitAdam", "alone", 6, True, 1, {}, 1, 1),
    ("OneBitAdam", "default", 6, True, 4, {"reply": "direct", "dtype": "bfloat16"}, 4, 2),
    ("OneBitLamb", "default", 6, True, 4, {"reply": 1, "chunks": 2}, 4, 2),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row)))
def test_dcp_carries_a_run(row, tmp_path):
    """Bit for bit on as many ranks; on others stage 1 as it is, stage 2 with the mean residual."""
    kind, how, steps, new, there, options, size, each = row
    options = {**FREEZE, **options}
    case = Case(kind, dtype=options.pop("dtype", "float32"), options=options, groups=TWO_GROUPS, each=each)
    before = run_ranks(there, saving, case, str(tmp_path), how, steps)
    values = before[0][2]
    if steps == 6 and there == 2:
        assert not torch.equal(*(own[0]["state"][3][f"residual_of_rank_{r}"] for r, own in enumerate(before)))
    after = run_ranks(there, loading, case, str(tmp_path), how, steps, new, values)
    for (state, end, _), (again, its_end, _) in zip(before, after, strict=True):
        assert same(state, again) and end == its_end
    if size != there:
        after = run_ranks(size, loading, case, str(tmp_path), how, steps, new, values)
        assert len({end for _, end, _ in after}) == 1
        if steps == 2:
            assert same(after[0][0]["state"], before[0][0]["state"])
        else:
            here, was = (states.left_out([own[0] for own in of], case) for of in (after, before))
            np.testing.assert_allclose(here, was, rtol=1e-5, atol=1e-6)


# make_room


def test_wrappers_are_no_part_of_names():
    params, optimizer = trained(CASE, 0, 6)
    plain = Holder(params)
    wrapper = nn.ModuleDict({"module": plain})  # as DDP is, to names
    flat, within = (tools.get_optimizer_state_dict(model, optimizer) for model in (plain, nn.Sequential(plain)))
    compiled = nn.Sequential(torch.compile(plain))
    for model, saved in ((wrapper, flat), (torch.compile(wrapper), flat), (compiled, within)):
        resumed = CASE.build(params)
        onebit.make_room(saved, model, resumed)
        assert set(resumed.state[params[0]]) == set(optimizer.state[params[0]])


def test_what_make_room_refuses_and_what_is_refused_after_it(tmp_path):
    (params, optimizer), (_, saved) = trained(CASE, 0, 0), trained(CASE, 0, 6)
    model, adamw = Holder(params), torch.optim.AdamW(params)
    run(CASE, 0, adamw, params, 1, 1)
    before = snapshot(optimizer.state_dict())
    by_name = tools.get_optimizer_state_dict(model, saved.__class__(params))
    renamed = {
        k: {f"other.{n}": v for n, v in own.items()} if isinstance(own, dict) else own for k, own in by_name.items()
    }
    another = snapshot(saved.state_dict())
    another["param_groups"][0]["onebit"]["version"] = 3
    for source, error, match in (
        (tmp_path / "nowhere", ValueError, "holds no checkpoint"),
        (3, TypeError, "not a int"),
        ({}, ValueError, "empty state.*broadcast_object_list"),
        ({"optimizer": adamw.state_dict()}, ValueError, "no onebit optimizer's"),
        (renamed, ValueError, "called by other names"),
        ({"optimizer": another}, ValueError, "version 3"),
    ):
        with pytest.raises(error, match=match):
            onebit.make_room(source, model, optimizer)
    assert same(snapshot(optimizer.state_dict()), before)
    onebit.make_room({"optimizer": saved.state_dict()}, model, optimizer)
    with pytest.raises(ValueError, match="a step after make_room"):
        run(CASE, 0, optimizer, params, 1, 1)
    with pytest.raises(ValueError, match="nothing was loaded into what make_room has made"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved.state_dict())
    assert same(snapshot(optimizer.state_dict()), snapshot(saved.state_dict()))
