"""With one scale a message, momenta are first scaled to one size: no small layer is lost, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit import kernels
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format
from onebit.optim.lamb import GAMMA
from tests import oracle
from tests.onebit.optim.lamb_simulation import LAMB, LambSimulation, both_stages, lamb_hypers, without_warnings
from tests.onebit.optim.simulation import on_ranks, options
from tests.onebit.runs import arrays, bits, run
from tests.wire import values_of

CPU = torch.device("cpu")


def frozen_run(scale, steps=12):
    """A run in stage 2, before its next step."""
    case = LAMB.but(groups=({},), steps=steps + 20, missing=(), options={"freeze_step": 6, "scale": scale})
    params = case.parameters()
    optimizer = case.build(params)
    without_warnings(lambda: run(case, 0, optimizer, params, 1, steps))
    return case, params, optimizer


def scale_momentum_(part, gamma):
    """Have messages and residuals of a running exchange hold gamma times the momentum."""
    layout, exchange = part.state.layout, part.reducer.exchange
    whole = torch.from_numpy(layout.owner())
    of_blocks = gamma[whole]
    of_elements = of_blocks.repeat_interleave(torch.from_numpy(layout.lengths()))
    exchange.residual.value.mul_(of_elements)
    exchange.server_residual.value.mul_(of_elements)
    for messages in (exchange.replies, exchange.reply):
        messages.scales(0, layout.all()).mul_(of_blocks)
    part.state["denominator"].div_(of_elements)
    part.state.add(GAMMA).copy_(gamma)
    part.reducer.gamma = part.state["gamma"]


def test_with_block_scales_momentum_scaling_changes_not_a_bit():
    """Of parameters, ratios and fresh variances; with powers of two, which round nothing."""
    ends = []
    for scaled in (False, True):
        case, params, optimizer = frozen_run("block")
        [part] = optimizer.current.parts
        state = part.state
        assert "gamma" not in state
        if scaled:
            scale_momentum_(part, 2.0 ** torch.tensor([-9.0, 7, 0, 3, 12, -2, 1, 5]))
        run(case, 0, optimizer, params, 13, 30)
        ends.append((bits(params), bits([state["ratio"], state["coefficient"]]), bits([state["exp_avg_sq"]])))
    assert ends[0] == ends[1]


def test_with_block_scales_any_momentum_scaling_is_rounding():
    """Algorithm 1 itself, in float64."""
    case = LAMB.but(missing=())
    ends = []
    for gamma in (np.ones(8), np.array([1e-3, 0.7, 300.0, 3.3, 1e4, 11.0, 1.0, 1.0])):
        x, h = arrays(case.parameters()), lamb_hypers(case)
        gradients = [[[g.double().numpy() for g in case.gradients(r, t)] for r in (0, 1)] for t in range(30)]
        m, v = gradients[0][0], [g**2 + 1e-4 * (g**2).mean() if g.size else g for g in gradients[1][0]]
        frozen = replace(oracle.freeze_lamb(m, v, np.full(8, 0.3), h, 10), gamma=gamma)
        layout = oracle.Layout(tuple(a.size for a in x), 32, 2)
        reduce, r, v = oracle.SimulatedAllReduce(layout), np.ones(8), frozen.v
        for own in gradients:
            x, m, v, r = oracle.onebit_lamb_step(x, own, m, v, r, frozen, h, reduce)
        ends.append(np.concatenate([np.ravel(a) for a in (*x, *m, *v, r)]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-9)


SPREAD = (1.0, 1e-3, 1e-4, 1e-2, 10.0)  # sizes of layers' momenta


def codec_errors(passes, scale, gamma=None):
    """Each layer's relative error in one message: ||m - decode(compress(m))|| / ||m||."""
    rng = np.random.default_rng(0)
    momenta = [s * rng.normal(size=n) for s, n in zip(SPREAD, (300, 128, 65, 2, 1000), strict=True)]
    layout = Layout([m.size for m in momenta], block_size=32)
    form, span = Format(layout, scale), layout.all()
    out, residual = form.empty(1), Residual.zeros(span, form)
    grads = Pointers(layout, CPU, torch.float32, "gradient")
    grads.bind_tensors([torch.from_numpy(m).float() for m in momenta])
    flags = torch.zeros(1, dtype=torch.int32)
    passes.compress(span, grads, None, residual, hyper_table([Hyper()]), flags, out, gamma=gamma)
    plan, factors = oracle.Layout(tuple(layout.numel), 32), [1.0] * 5 if gamma is None else gamma.tolist()
    parts = zip(momenta, plan.unflatten(values_of(out, plan)), factors, strict=True)
    return np.array([np.linalg.norm(m - got / factor) / np.linalg.norm(m) for m, got, factor in parts])


def test_with_a_tensor_scale_small_layers_need_momentum_scaling():
    passes = kernels.backend(CPU)
    rms = np.array(SPREAD)
    gamma = torch.from_numpy(rms.mean() / rms).float()
    lost, kept = codec_errors(passes, "tensor"), codec_errors(passes, "tensor", gamma)
    print("relative errors without scaling, with it:", lost, kept)
    assert (lost[1:4] > 100).all()
    assert (kept < 1).all()
    assert (codec_errors(passes, "block") < 1).all()
    np.testing.assert_allclose(codec_errors(passes, "block", gamma), codec_errors(passes, "block"), rtol=1e-6)


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2])
def test_no_layer_is_lost_in_a_run(size, scale):
    """What is left out of a layer's momentum stays of the momentum's size, though layers differ by 10^4."""
    case = options(LAMB.but(groups=({},), steps=50, missing=()), scale=scale, freeze_step=20)
    for own in on_ranks(size, both_stages, case):
        sim = LambSimulation(case, size)
        gamma = np.ones(8) if own.gamma is None else own.gamma
        for flat in (own.e[0], own.e[-1], own.E[-1]):
            parts = zip(sim.layout.unflatten(flat), own.m0, gamma, strict=True)
            left_out = [oracle.magnitude(e / g, "l2") / oracle.magnitude(m, "l2") for e, m, g in parts if m.size]
            assert max(left_out) < 10
