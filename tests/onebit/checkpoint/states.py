"""Runs that are saved and loaded, and what a state means, read from it by `meaning` with numpy alone.

Every step of stage 2 keeps

    m' + mean e' + E'  =  b1 m + (1 - b1) mean g + mean e + E

whatever the ranks, chunks, blocks or scales, so that a load on other ranks is right when this still holds after it. A
state has e for mean e + E.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import onebit
from tests import internals
from tests.checkpoints import Run
from tests.onebit.runs import bits, on_warnings, run, same, snapshot, take
from tests.ranks import group

FIVE = ((7, 9), (33,), (2,), (130,), (400,))  # shapes of what two levels share
TWO_GROUPS = ({}, {"lr": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1})
AUTO = {"freeze_step": onebit.FreezeRule(0.7, window=3), "betas": (0.9, 0.95)}


def other_parameters(case):
    """Those of a new process, before anything is loaded."""
    return [nn.Parameter(p.detach() * 0.5 + 1) for p in case.parameters()]


def set_parameters(params, values):
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)


def trained(case, rank, steps, of=None):
    run = Run(case, steps, rank, of)
    return run.params, run.optimizer


def checkpoint(params, optimizer):
    """What no later step changes."""
    return snapshot(optimizer.state_dict()), snapshot(list(params))


def resumed(case, state, values, of=None):
    """Resume as in a new process."""
    params = other_parameters(case)
    set_parameters(params, values)
    optimizer = case.build(params, of)
    optimizer.load_state_dict(state)
    return params, optimizer


def assert_go_on_alike(case, rank, one, other, first, last):
    for params, optimizer in (one, other):
        run(case, rank, optimizer, params, first, last)
        optimizer.synchronize()
    assert bits(one[0]) == bits(other[0])
    assert same(snapshot(one[1].state_dict()), snapshot(other[1].state_dict()))


def meaning(state, case):
    """m, e and d of a state of stage 2, flat in the order of the param groups, float64; 0/1 Adam's d is its variance.

    Where messages hold gamma times the momentum, so do m and e, and d makes up for it.
    """
    found = []
    for p, own in state["state"].items():
        gamma = float(own.get("gamma", 1.0))
        m, e, d = (own[name].double().numpy().ravel() for name in ("exp_avg", "residual", saved_d(case.kind)))
        if case.kind == "OneBitAdam":
            group = next(group for group in state["param_groups"] if p in group["params"])
            d = denominator(d, np.float32(group["eps"]), 1 - group["betas"][1] ** int(own["step"]))
        found.append((m / gamma, e / gamma, d * gamma))
    m, e, d = (np.concatenate(parts) for parts in zip(*found, strict=True))
    assert all(np.isfinite(a).all() for a in (m, e, d))
    return SimpleNamespace(m=m, e=e, d=d)


def saved_d(kind):
    """The saved field that has what compressed steps divide by."""
    return "denominator" if kind == "OneBitLamb" else "exp_avg_sq"


def denominator(v, eps, weight):
    """d of AdamW's variance, of which all gradients weigh so much."""
    return np.where(v == 0, 0, 1 / (np.sqrt(v / weight) + eps))


def left_out(optimizer):
    """Return what a run that goes on owes: e / N and E of this rank, a float64 tensor a parameter, as they are in its
    memory."""
    [reducer], [exchange], found = internals.reducers(optimizer), internals.exchanges(optimizer), []
    state = reducer.state
    exchange.materialize()
    for i, p in enumerate(state.params):
        own = torch.zeros(p.numel(), dtype=torch.float64)
        for span, e in state.parts_of("residual", i):
            own[span] += e.double() / exchange.transport.size
        for span, e in reducer.served(i):
            own[span] += e.double()
        found.append(own / (1.0 if reducer.gamma is None else float(reducer.gamma[i])))
    return torch.cat(found).numpy()


def per_element(case, read):
    """`read(options of the group)` for every element, in the order of the param groups."""
    default = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0, **case.options}
    values = [read({**default, **case.groups[case.group_of(p)]}) for p in case.order]
    return np.repeat(values, [int(np.prod(case.shapes[p])) for p in case.order])


def flat(case, tensors):
    return np.concatenate([np.asarray(tensors[p].detach().double()).ravel() for p in case.order])


def assert_near(got, expected, **kwargs):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max(), **kwargs)


def mean_gradient(case, size, step):
    return np.mean([flat(case, case.gradients(r, step)) for r in range(size)], axis=0)


def assert_step(case, size, step, before, after, x_before, params):
    """A step in float64, from one state to the next: nothing was lost, and d and m moved the parameters."""
    beta1 = per_element(case, lambda o: o["betas"][0])
    assert_near(after.m + after.e, beta1 * before.m + (1 - beta1) * mean_gradient(case, size, step) + before.e)
    assert_near(after.d, before.d)
    if case.kind == "OneBitAdam":
        lr, decay = per_element(case, lambda o: o["lr"]), per_element(case, lambda o: o["weight_decay"])
        assert_near(flat(case, params), x_before - lr * (after.m * before.d + decay * x_before))


def save_run(rank, size, case, steps):
    """A run that has one state after so many steps."""
    params, optimizer = trained(case, rank, steps, group())
    optimizer.synchronize()
    return checkpoint(params, optimizer)


def load_run(rank, size, case, state, values, step):
    """Load a state, take step `step`, and have one state again."""
    given = snapshot(state)
    with on_warnings() as warned:
        params, optimizer = resumed(case, given, values, group())
        before = snapshot(optimizer.state_dict())
    assert same(given, state)
    take(case, rank, optimizer, params, step)
    assert optimizer.compressing
    optimizer.synchronize()
    after, x = checkpoint(params, optimizer)
    run(case, rank, optimizer, params, step + 1, step + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return SimpleNamespace(before=before, after=after, params=x, end=bits(params), warned=warned)


def one_of(states):
    """What all ranks have alike."""
    assert all(same(own, states[0]) for own in states), "ranks have other states"
    return states[0]


def adamw_run(case, steps, **options):
    params = case.parameters()
    groups = [{"params": [params[p] for p in case.order], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 5e-3, "betas": (0.8, 0.99), "eps": 1e-6, **options})
    run(case, 0, optimizer, params, 1, steps)
    return params, optimizer
