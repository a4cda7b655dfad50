"""torch.distributed.checkpoint saves and loads optimizers and their states, keyed by number or by name."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.onebit.checkpoint.states import TWO_GROUPS, as_model, set_parameters, trained
from tests.onebit.runs import Case, bits, kinds, run, same, snapshot
from tests.ranks import group, run_ranks, run_ranks_once


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
def test_dcp_restores_each_ranks_own_state(kind, options, steps, tmp_path):
    case = Case(kind, options=options, groups=TWO_GROUPS)
    states = run_ranks(2, dcp_round_trip, case, str(tmp_path), steps)
    own = [s["state"][3].get(f"residual_of_rank_{r}") for r, s in enumerate(states)]
    if steps == 6:
        assert not torch.equal(*own)


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
def test_dcp_restores_states_keyed_by_name(kind, tmp_path):
    case = Case(kind, options={"freeze_step": 3}, groups=TWO_GROUPS)
    run_ranks_once(2, dcp_by_name_in_both_stages, (case, str(tmp_path)))
