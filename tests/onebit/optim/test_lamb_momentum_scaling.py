"""With one scale a message, momenta are first scaled to one size: no small layer is lost, and nothing else changes."""

import numpy as np
import pytest
import torch

from onebit import kernels
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format
from tests import oracle
from tests.onebit.optim.contract import options
from tests.onebit.optim.lamb_simulation import LAMB, LambSimulation
from tests.onebit.optim.simulation import both_stages, on_ranks
from tests.wire import values_of

SPREAD = (1.0, 1e-3, 1e-4, 1e-2, 10.0)  # sizes of layers' momenta


def codec_errors(scale, gamma=None):
    """Each layer's relative error in one message: ||m - decode(compress(m))|| / ||m||."""
    rng, cpu = np.random.default_rng(0), torch.device("cpu")
    momenta = [s * rng.normal(size=n) for s, n in zip(SPREAD, (300, 128, 65, 2, 1000), strict=True)]
    layout = Layout([m.size for m in momenta], block_size=32)
    form, span = Format(layout, scale), layout.all()
    out, residual = form.empty(1), Residual.zeros(span, form)
    grads = Pointers(layout, cpu, torch.float32, "gradient")
    grads.bind_tensors([torch.from_numpy(m).float() for m in momenta])
    flags = torch.zeros(1, dtype=torch.int32)
    kernels.backend(cpu).compress(span, grads, None, residual, hyper_table([Hyper()]), flags, out, gamma=gamma)
    plan, factors = oracle.Layout(tuple(layout.numel), 32), [1.0] * 5 if gamma is None else gamma.tolist()
    parts = zip(momenta, plan.unflatten(values_of(out, plan)), factors, strict=True)
    return np.array([np.linalg.norm(m - got / factor) / np.linalg.norm(m) for m, got, factor in parts])


def test_with_a_tensor_scale_small_layers_need_momentum_scaling():
    rms = np.array(SPREAD)
    gamma = torch.from_numpy(rms.mean() / rms).float()
    lost, kept = codec_errors("tensor"), codec_errors("tensor", gamma)
    assert (lost[1:4] > 100).all()
    assert (kept < 1).all()
    assert (codec_errors("block") < 1).all()
    np.testing.assert_allclose(codec_errors("block", gamma), codec_errors("block"), rtol=1e-6)


@pytest.mark.parametrize(("size", "scale"), [(1, "block"), (2, "tensor")])
def test_no_layer_is_lost_in_a_run(size, scale):
    """What is left out of a layer's momentum stays of the momentum's size, though layers differ by 10^4."""
    case = options(LAMB.but(groups=({},), steps=50, missing=()), scale=scale, freeze_step=20)
    for own in on_ranks(size, both_stages, case):
        layout, gamma = LambSimulation(case, size).layout, own.fields[-1].get("gamma", np.ones(8))
        for flat in (own.e[0], own.e[-1], own.E[-1]):
            parts = zip(layout.unflatten(flat), own.m0, gamma, strict=True)
            left_out = [oracle.magnitude(e / g, "l2") / oracle.magnitude(m, "l2") for e, m, g in parts if m.size]
            assert max(left_out) < 10
