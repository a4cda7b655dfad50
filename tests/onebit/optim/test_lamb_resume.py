"""1-bit LAMB's own state survives a resume bit for bit: coefficients, ratios, momentum scaling."""

from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn

from tests.onebit.optim.lamb_simulation import LAMB, as_numpy, without_warnings
from tests.onebit.optim.simulation import group_or_none, on_ranks, options
from tests.onebit.runs import bits, run, same, snapshot, take


def lamb_state(optimizer):
    [state] = optimizer.current.states
    names = {"average": "coefficient_average", "dense": "first_momentum", "counted": "counted_bits", "d": "denominator"}
    own = {name: state.get(names.get(name, name)) for name in (*names, "ratio", "gamma")}
    return {name: None if tensor is None else tensor.clone() for name, tensor in own.items()}


def resume(rank, size, case, start, folder):
    """Save after step `start`, go on; load into another optimizer, and go on as well. What LAMB's state was."""
    return without_warnings(lambda: _resume(rank, size, case, start, folder))


def _resume(rank, size, case, start, folder):
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    run(case, rank, optimizer, params, 1, start)
    file = f"{folder}/{rank}.pt"
    torch.save({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, file)
    before = lamb_state(optimizer)
    expected = []
    for step in range(start + 1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        expected.append((bits(params), lamb_state(optimizer)))

    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(value) for value in saved["model"]]
    resumed = case.build(again, group_or_none(size))
    resumed.load_state_dict(saved["optimizer"])
    assert same(lamb_state(resumed), before)
    for step, (their_bits, their_state) in enumerate(expected, start + 1):
        take(case, rank, resumed, again, step)
        assert bits(again) == their_bits, f"step {step}"
        assert same(lamb_state(resumed), their_state), f"step {step}"
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))
    return {name: None if tensor is None else as_numpy(tensor) for name, tensor in before.items()}


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2])
def test_resume_before_the_first_compressed_step_was_taken(size, scale, tmp_path):
    """It was due twice and skipped: what m was at the freeze, uncompressed, has to survive."""
    bad = ((9, size - 1, nan), (10, 0, inf))
    case = options(LAMB.but(steps=20, bad=bad, g_sizes=(1.0, 1e-2, 1e-1, 1e2, 10.0, 1.0, 1.0, 1.0)), scale=scale)
    case = case.but(shapes=(*case.shapes[:6], (5, 0), (3,)), untouched=((0, 2, 14),))
    for before in on_ranks(size, resume, case, 10, str(tmp_path)):
        assert np.abs(before["dense"]).max() > 0
        assert len(set(before["average"].round(4))) > 3
        assert before["counted"] is not None
        assert (before["gamma"] is None) == (scale == "block")
        assert (before["ratio"] == 1).all()


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2])
def test_coefficients_ratios_and_scaling_survive_a_resume(size, scale, tmp_path):
    case = options(LAMB.but(steps=24, untouched=((0, 2, 14),)), scale=scale)
    for before in on_ranks(size, resume, case, 16, str(tmp_path)):
        assert before["dense"] is None
        assert len(set(before["ratio"].round(4))) > 2
        assert before["counted"] is not None
        if scale == "tensor":
            assert before["gamma"].max() > 100 * before["gamma"].min()


def test_coefficients_survive_a_resume_in_stage_1(tmp_path):
    """Also how many steps they are averages of, since the freeze corrects for it."""
    case = LAMB.but(steps=14)
    before = resume_into_stage_2(case, str(tmp_path))
    assert len(set(before.round(4))) > 3


def resume_into_stage_2(case, folder):
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 5)
    torch.save({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, f"{folder}/state.pt")
    average = as_numpy(optimizer.current.states[0]["coefficient_average"])
    saved = torch.load(f"{folder}/state.pt", weights_only=True)
    again = [nn.Parameter(value) for value in saved["model"]]
    resumed = case.build(again)
    resumed.load_state_dict(saved["optimizer"])
    for step in range(6, case.steps + 1):
        take(case, 0, optimizer, params, step)
        take(case, 0, resumed, again, step)
        assert bits(params) == bits(again), f"step {step}"
    assert optimizer.compressing
    assert same(lamb_state(resumed), lamb_state(optimizer))
    return average
