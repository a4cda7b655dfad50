"""torch.distributed.checkpoint carries an optimizer's state, whatever its options, with no call of ours but
`optimizer.synchronize()`: in memory, where it walks the live one, and by files, as PyTorch's own recipe has it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as tools
from torch.distributed.checkpoint.stateful import Stateful

from tests.checkpoints import Holder
from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import TWO_GROUPS, checkpoint, one_of, trained
from tests.onebit.runs import Case, bits, on_ranks, on_warnings, run, same, snapshot, take
from tests.ranks import group, run_ranks, run_ranks_once

OPTIONS = {
    "default": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "flattened and offloaded": {"flatten_optimizer_state_dict": True, "cpu_offload": True},
}
FREEZE, TENSOR = {"freeze_step": 3}, {"scale": "tensor", "chunks": 2}


# In memory


CARRIED = [  # optimizer, option, steps there, steps here, more of the case; by files there are others
    ("OneBitAdam", "default", 2, 6, {}),
    ("OneBitLamb", "flattened and offloaded", 2, 3, {}),
    ("ZeroOneAdam", "offloaded", 2, 0, {}),
    ("OneBitLamb", "flattened", 6, 5, {}),
    ("ZeroOneAdam", "full", 6, 5, {}),
    ("OneBitAdam", "full", 6, 0, {}),
    # from one stage into the other, or into an optimizer that has taken no step
    ("OneBitAdam", "flattened", 6, 0, {}),
    ("OneBitAdam", "flattened", 2, 6, {}),
    ("OneBitLamb", "flattened", 6, 2, TENSOR),
    ("OneBitLamb", "flattened", 6, 0, {"dtype": "bfloat16"}),
    ("ZeroOneAdam", "flattened", 6, 2, {"update_limit": "auto"}),
    # of what "auto" compares, three rows of numbers here and none there, or the other way round
    ("OneBitAdam", "flattened", 4, 0, states.AUTO),
    ("OneBitLamb", "full", 1, 4, states.AUTO),
]


@pytest.mark.parametrize(("kind", "name", "steps", "there", "more"), CARRIED)
@on_ranks(2)
def test_a_state_goes_on_bit_for_bit(rank, kind, name, steps, there, more):
    """The state of `steps` steps by way of torch into an optimizer that has taken `there` others."""
    dtype, more = more.get("dtype", "float32"), {k: v for k, v in more.items() if k != "dtype"}
    case = Case(kind, dtype=dtype, options={**FREEZE, **more}, groups=TWO_GROUPS)
    options = tools.StateDictOptions(**OPTIONS[name])
    params, optimizer = trained(case, rank, steps, group())
    optimizer.synchronize()
    carried = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=options))
    again, other = trained(case.but(seed=1), rank, there, group())
    states.set_parameters(again, params)
    with on_warnings("ignore", message="state_dict"):  # torch asks for the state that is replaced
        tools.set_optimizer_state_dict(Holder(again), other, carried, options=options)
    assert same(snapshot(other.state_dict()), snapshot(optimizer.state_dict()))
    states.assert_go_on_alike(case, rank, (params, optimizer), (again, other), steps + 1, steps + 4)


def to_rank_0(rank, size, case):
    """Save one file as PyTorch's recipe does: other ranks have nothing."""
    options = tools.StateDictOptions(full_state_dict=True, cpu_offload=True)
    params, optimizer = trained(case, rank, 6, group())
    optimizer.synchronize()
    carried = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=options))
    assert bool(carried) == (rank == 0)
    state, values = checkpoint(params, optimizer)
    run(case, rank, optimizer, params, 7, 9)
    return carried, state, values, bits(params)


def from_rank_0(rank, size, case, carried, values):
    options = tools.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    params, optimizer = trained(case.but(seed=1), rank, 0, group())
    states.set_parameters(params, values)
    tools.set_optimizer_state_dict(Holder(params), optimizer, carried if rank == 0 else {}, options=options)
    state = snapshot(optimizer.state_dict())
    run(case, rank, optimizer, params, 7, 9)
    return state, bits(params)


BROADCAST = [  # optimizer, more of the case, ranks there and here, ranks a node there and here
    ("OneBitAdam", {}, 2, 3, 1, 1),
    ("OneBitLamb", {"options": {**FREEZE, **TENSOR}}, 3, 2, 1, 1),
    ("ZeroOneAdam", {"dtype": "bfloat16"}, 4, 2, 2, 1),
]


@pytest.mark.parametrize(("kind", "more", "there", "size", "each", "each_here"), BROADCAST, ids=str)
def test_rank_0s_state_is_broadcast_to_all(kind, more, there, size, each, each_here):
    """Bit for bit on as many ranks; on others all of the state. torch broadcasts over all ranks there are."""
    case = Case(kind, groups=TWO_GROUPS, **{"options": FREEZE, "each": each, **more})
    found = run_ranks_once(there, to_rank_0, (case,))
    (carried, saved, values, end), *_ = found
    assert all(same(own[1:], found[0][1:]) for own in found)
    for ranks, own in ((there, case), (size, case.but(each=each_here))):
        loaded = run_ranks_once(ranks, from_rank_0, (own, carried, values))
        assert all(same(state["state"], saved["state"]) for state, _ in loaded)
        assert ranks != there or {its_end for _, its_end in loaded} == {end}


def test_a_flattened_state_of_a_run_to_which_a_parameter_was_added():
    """The freeze has to know that it was, and when."""
    case = Case(shapes=((40,), (33,)), groups=TWO_GROUPS, options={"freeze_step": 4})
    options = tools.StateDictOptions(**OPTIONS["flattened"])
    params = case.parameters()
    optimizer = case.but(groups=({},)).build(params[:1])
    for step in range(1, 4):
        if step == 3:
            optimizer.add_param_group({**TWO_GROUPS[1], "params": params[1:]})
        take(case, 0, optimizer, params, step)
    carried = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=options))
    again, other = trained(case, 0, 0)
    states.set_parameters(again, params)
    tools.set_optimizer_state_dict(Holder(again), other, carried, options=options)
    assert float(other.state_dict()["state"][1]["joined_after_step"]) == 2
    states.assert_go_on_alike(case, 0, (params, optimizer), (again, other), 4, 6)


def test_what_an_optimizer_has_beside_a_full_state_is_not_loaded_with_it():
    """Here one had elements without a variance, and LAMB a field for them."""
    case = Case("OneBitLamb", options=FREEZE)
    params, optimizer = trained(case, 0, 6)
    options = tools.StateDictOptions(full_state_dict=True)
    full = snapshot(tools.get_optimizer_state_dict(Holder(params), optimizer, options=options))
    with pytest.warns(UserWarning, match="without a variance"):
        again, other = trained(case.but(untouched=((0, 2, 9),)), 0, 6)
    assert not other.state_dict()["state"][0]["counted"].all()
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
            optimizer.synchronize()
            saved = optimizer.state_dict()
            assert all(set(optimizer.state[p]) == set(saved["state"][i]) for i, p in enumerate(params))
            assert optimizer.param_groups[0].keys() == saved["param_groups"][0].keys()


# By files


class App(Stateful):
    """The class of PyTorch's tutorial."""

    def __init__(self, model, optimizer, options):
        self.both, self.options = (model, optimizer), tools.StateDictOptions(**options)

    def state_dict(self):
        model, optimizer = tools.get_state_dict(*self.both, options=self.options)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optim"]
        tools.set_state_dict(*self.both, model_state_dict=model, optim_state_dict=optimizer, options=self.options)


def entries(how, params, optimizer):
    """Name entries as the option `how` does, or the optimizer alone, whose parameters have numbers."""
    if how == "alone":
        return {"optimizer": optimizer}
    return {"app": App(Holder(params), optimizer, OPTIONS[how])}


def seen(case, rank, params, optimizer, steps):
    """Return the state, and parameters three steps later."""
    state, values = checkpoint(params, optimizer)
    run(case, rank, optimizer, params, steps + 1, steps + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return state, bits(params), values


def saving(rank, size, case, folder, how, steps):
    params, optimizer = trained(case, rank, steps, group())
    optimizer.synchronize()
    dcp.save(entries(how, params, optimizer), checkpoint_id=folder, process_group=group())
    return seen(case, rank, params, optimizer, steps)


def loading(rank, size, case, folder, how, steps, new, values):
    """new: the optimizer is, else it has taken as many steps of another run."""
    params, optimizer = trained(case.but(seed=1), rank, 0 if new else steps, group())
    with on_warnings("ignore" if not new else "error", message="state_dict"):
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
    ("OneBitLamb", "flattened", 6, True, 3, TENSOR, 2, 1),
    ("OneBitLamb", "alone", 2, False, 2, TENSOR, 2, 1),
    ("OneBitAdam", "alone", 6, True, 2, {}, 3, 1),
    ("OneBitAdam", "default", 6, True, 4, {"reply": "direct", "dtype": "bfloat16"}, 4, 2),
    ("OneBitLamb", "default", 6, True, 4, {"reply": 1, "chunks": 2}, 2, 2),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(map(str, row)))
def test_dcp_carries_a_run(row, tmp_path):
    """Bit for bit on as many ranks; on others all of the state."""
    kind, how, steps, new, there, options, size, each = row
    options = {**FREEZE, **options}
    case = Case(kind, dtype=options.pop("dtype", "float32"), options=options, groups=TWO_GROUPS, each=each)
    before = run_ranks(there, saving, case, str(tmp_path), how, steps)
    saved, values = one_of([state for state, *_ in before]), before[0][2]
    assert bool(saved["state"][0]["residual"].any()) == (steps == 6)
    after = run_ranks(there, loading, case, str(tmp_path), how, steps, new, values)
    for (_, end, _), (again, its_end, _) in zip(before, after, strict=True):
        assert same(saved, again) and end == its_end
    if size != there:
        after = run_ranks(size, loading, case, str(tmp_path), how, steps, new, values)
        assert len({end for _, end, _ in after}) == 1
        assert same(one_of([state for state, *_ in after])["state"], saved["state"])
