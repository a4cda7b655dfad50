"""Runs that are saved and loaded, and what a state means, read from it by `meaning` with numpy alone.

Every step of stage 2 keeps

    m' + mean e' + E'  =  b1 m + (1 - b1) mean g + mean e + E

whatever the ranks, chunks, blocks or scales, so that a load on other ranks is right when this still holds after it.
"""

from math import nan
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import onebit
from tests import oracle
from tests.checkpoints import Run
from tests.onebit.runs import bits, frozen_name, on_warnings, run, same, snapshot, take
from tests.ranks import group, run_ranks
from tests.wire import signed

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
    """As in a new process."""
    params = other_parameters(case)
    set_parameters(params, values)
    optimizer = case.build(params, of)
    optimizer.load_state_dict(state)
    return params, optimizer


def assert_go_on_alike(case, rank, one, other, first, last):
    for params, optimizer in (one, other):
        run(case, rank, optimizer, params, first, last)
    assert bits(one[0]) == bits(other[0])
    assert same(snapshot(one[1].state_dict()), snapshot(other[1].state_dict()))


def decoded(own, numel, block_size=64):
    """m; with direct replies the mean of what each rank's message says."""
    lengths = oracle.Layout((numel,), block_size).lengths[: -(-numel // block_size)]
    scales = own["momentum_scales"].double().numpy()
    messages = np.atleast_2d(np.unpackbits(own["momentum_bits"].numpy(), axis=-1, bitorder="little") == 1)
    values = [signed(b, s, lengths) for b, s in zip(messages, np.atleast_2d(scales), strict=True)]
    return np.mean(values, axis=0)[:numel]


def meaning(states, case):
    """Of the states of all ranks, in stage 2: mean e, E, m and d, flat in the order of the param groups.

    Where messages hold gamma times the momentum, so do e and E, and d makes up for it.
    """
    size, each, chunks = len(states), case.each, case.options.get("chunks", 1)
    nodes, served = size // each, case.options.get("reply", 1) != "direct"
    shards = each * (nodes if served else 1)
    numels = tuple(int(np.prod(case.shapes[p])) for p in case.order)
    plan = oracle.Layout(numels, case.options.get("block_size", 64), shards, chunks)
    shard_of = np.repeat(np.arange(len(plan.shards())) % shards, [part.stop - part.start for part in plan.shards()])
    slice_of = shard_of // (shards // each)
    owner = shard_of % nodes * each + slice_of  # of what was averaged, by place
    found = []
    for p, (keepers, slices) in enumerate(zip(plan.unflatten(owner), plan.unflatten(slice_of), strict=True)):
        numel, own = numels[p], [s["state"][p] for s in states]
        gamma = float(own[0].get("gamma", 1.0))
        mean, whole = np.zeros(numel), np.full(numel, nan if served else 0.0)
        for r, of in enumerate(own):
            here = np.full(numel, True) if each == 1 else slices == r % each
            assert (f"residual_of_rank_{r}" in of) == (each == 1 or here.any())
            if f"residual_of_rank_{r}" in of:
                mean[here] += of[f"residual_of_rank_{r}"].double().numpy().ravel() / nodes
            assert (f"server_residual_of_rank_{r}" in of) == (served and (keepers == r).any())
            if f"server_residual_of_rank_{r}" in of:
                whole[keepers == r] = of[f"server_residual_of_rank_{r}"].double().numpy()
            assert all(same(of[name], own[0][name]) for name in ("momentum_bits", "momentum_scales"))
        m = decoded(own[0], numel, plan.block_size)
        d = own[0][frozen_name(case.kind)].double().numpy().ravel()
        found.append((mean / gamma, whole / gamma, m / gamma, d * gamma))
    e, server, m, d = (np.concatenate(parts) for parts in zip(*found, strict=True))
    assert all(np.isfinite(a).all() for a in (e, server, m, d))
    return SimpleNamespace(e=e, server=server, m=m, d=d)


def left_out(states, case):
    """mean e + E: what the next messages have to make up for."""
    found = meaning(states, case)
    return found.e + found.server


def per_element(case, read):
    """`read(options of the group)` for every element, in the order of the param groups."""
    default = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0, **case.options}
    values = [read({**default, **case.groups[case.group_of(p)]}) for p in case.order]
    return np.repeat(values, [int(np.prod(case.shapes[p])) for p in case.order])


def flat(case, tensors):
    return np.concatenate([np.asarray(tensors[p].detach().double()).ravel() for p in case.order])


def assert_near(got, expected, **kwargs):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max(), **kwargs)


def assert_step(case, size, step, before, after, x_before, params):
    """A step in float64, from one state to the next: nothing was lost, and d and m moved the parameters."""
    beta1 = per_element(case, lambda o: o["betas"][0])
    gradient = np.mean([flat(case, case.gradients(r, step)) for r in range(size)], axis=0)
    everything = beta1 * before.m + (1 - beta1) * gradient + before.e + before.server
    assert_near(after.m + after.e + after.server, everything)
    assert_near(after.d, before.d)
    if case.kind == "OneBitAdam":
        lr, decay = per_element(case, lambda o: o["lr"]), per_element(case, lambda o: o["weight_decay"])
        assert_near(flat(case, params), x_before - lr * (after.m * before.d + decay * x_before))


def save_run(rank, size, case, steps):
    return checkpoint(*trained(case, rank, steps, group()))


def load_run(rank, size, case, states, values, step):
    """Load the rank's one of `states`, or the only one, and take step `step`."""
    given = snapshot(states[rank % len(states)])
    with on_warnings() as warned:
        params, optimizer = resumed(case, given, values, group())
    assert same(given, states[rank % len(states)])
    before = snapshot(optimizer.state_dict())
    take(case, rank, optimizer, params, step)
    assert optimizer.compressing
    after, x = checkpoint(params, optimizer)
    run(case, rank, optimizer, params, step + 1, step + 3)
    assert all(torch.isfinite(p).all() for p in params)
    return SimpleNamespace(before=before, after=after, params=x, end=bits(params), warned=warned)


def saved_and_loaded(case, there, size, here, prepare, each=1):
    """Save on `there` ranks, load on `size`, `each` a node, with the options `here`. Returns what both mean, checked
    over a step."""
    saved = run_ranks(there, save_run, case, 6)
    states, values = [s for s, _ in saved], saved[0][1]
    other = case.but(options={**case.options, **here}, each=each)
    loaded = run_ranks(size, load_run, other, prepare(snapshot(states)), values, 7)
    assert len({own.end for own in loaded}) == 1
    return SimpleNamespace(
        case=other,
        saved=meaning(states, case),
        before=meaning([own.before for own in loaded], other),
        after=meaning([own.after for own in loaded], other),
        x=flat(case, values),
        params=loaded[0].params,
        warned=[own.warned for own in loaded],
    )


def adamw_run(case, steps, **options):
    params = case.parameters()
    groups = [{"params": [params[p] for p in case.order], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 5e-3, "betas": (0.8, 0.99), "eps": 1e-6, **options})
    run(case, 0, optimizer, params, 1, steps)
    return params, optimizer
