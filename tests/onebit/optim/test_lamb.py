"""1-bit LAMB: stage 1 is LAMB in float64, stage 2 the simulation of the paper's Algorithm 1, re-synced at each step.

See test_stages.py, whose ways and tolerances these tests share.
"""

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit import kernels
from onebit.kernels import reference
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.residual import Residual
from onebit.kernels.data.wire import Format
from onebit.optim.lamb import GAMMA
from tests import oracle
from tests.onebit.optim.test_stages import (
    ROUNDING,
    Simulation,
    assert_close,
    averaged,
    decay,
    decoded,
    hypers,
    on_ranks,
    options,
    the_group,
    turned,
    whole_c,
    whole_scale,
)
from tests.onebit.runs import Case, arrays, bits, run, same, snapshot, take
from tests.ranks import run_ranks

nan, inf = math.nan, math.inf
CPU = torch.device("cpu")
RATIO = 1e-5  # relative: the largest of quotients of v_T, which comes back from d, and v, which holds (m - b1 m_prev)^2
COEFFICIENTS = ("coeff_beta", "min_coeff", "max_coeff", "factor_min", "factor_max", "factor_threshold")


@dataclass(frozen=True)
class Sized(Case):
    """Gradients and parameters of the sizes given, one a parameter; parameters that are multiplied after each step."""

    kind: str = "OneBitLamb"
    g_sizes: tuple[float, ...] = ()
    x_sizes: tuple[float, ...] = ()

    def parameters(self):
        sizes = self.x_sizes or [1.0] * len(self.shapes)
        return [nn.Parameter(p.detach() * size) for p, size in zip(super().parameters(), sizes, strict=True)]

    def gradients(self, rank, step):
        sizes = [size / 10.0 ** (p % 3 - 1) for p, size in enumerate(self.g_sizes)] or [1.0] * len(self.shapes)
        return [None if g is None else g * s for g, s in zip(super().gradients(rank, step), sizes, strict=True)]


GROUPS = (
    {"lr": 2e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    {},
    {"lr": 5e-3, "betas": (0.95, 0.99), "weight_decay": 0.02},
)
UNDECAYED = tuple({**own, "weight_decay": 0.0} for own in GROUPS)
# Coefficients on both limits and between; a bias of 2 elements that starts at 0; gradients from 0.01 to 100.
LAMB = Sized(
    shapes=((7, 9), (33,), (40,), (2,), (130,), (1,), (0,), (5, 0)),
    x_sizes=(1.0, 0.1, 1e-3, 0.0, 0.05, 0.2, 1.0, 1.0),
    g_sizes=(1.0, 1e-2, 1e-1, 1e2, 10.0, 1.0, 1.0, 1.0),
    steps=108,
    groups=GROUPS,
    missing=(
        *((1, 0, 1), (3, 0, 4), (4, 0, 0), (4, 1, 0), (4, 2, 0), (4, 3, 0), (17, 1, 4), (17, 0, 5), (18, 0, 0)),
        *((30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0)),
    ),
    options={"freeze_step": 8},
)


def lamb_hypers(case):
    """Of every parameter, in the order of `case.shapes`."""
    own = {name: value for name, value in case.options.items() if name in COEFFICIENTS}
    return [oracle.LambHyper(h["lr"], *h["betas"], h["eps"], h["weight_decay"], **own) for h in hypers(case)]


def quietly(work):
    """Without the warning of coordinates without a variance: test_stages.py is of this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return work()


def fp32(params, optimizer):
    """What the optimizer moves: fp32 parameters, or their copy."""
    return arrays([optimizer.state[p].get("master", p) for p in params])


def numpy(tensor):
    return tensor.detach().double().numpy().copy()


# Stage 1


def stage_1(rank, size, case):
    """x, parameters, moments in the order of `case.shapes`; averages and coefficients too."""
    params = case.parameters()
    optimizer = case.build(params, the_group(size))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    seen = []
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        schedule.step()
        seen.append(numpy(optimizer.current.states[0]["coefficient"]))
    [state] = optimizer.current.states
    back = np.argsort(case.order)
    return SimpleNamespace(
        x=fp32(params, optimizer),
        p=arrays(params),
        exp_avg=arrays([optimizer.state[p]["exp_avg"] for p in params]),
        exp_avg_sq=arrays([optimizer.state[p]["exp_avg_sq"] for p in params]),
        average=numpy(state["coefficient_average"])[back],
        coefficients=np.array(seen)[:, back],
        bits=bits(params),
    )


def lamb(case, ranks):
    x, h, c = arrays(case.parameters()), lamb_hypers(case), np.zeros(len(case.shapes))
    m, v, seen = oracle.zeros(x), oracle.zeros(x), []
    for step in range(1, case.steps + 1):
        now = [replace(own, lr=own.lr * decay(step - 1)) for own in h]
        mean = [g.numpy() for g in averaged(case, ranks, step)]
        corrected = case.options.get("bias_correction", True)
        x, m, v, c, coefficients = oracle.lamb_step(x, mean, m, v, c, now, step, corrected)
        seen.append(coefficients)
    return SimpleNamespace(x=x, exp_avg=m, exp_avg_sq=v, average=c, coefficients=np.array(seen))


def assert_lamb(found, expected, case):
    holds = [int(np.prod(shape)) > 0 for shape in case.shapes]
    assert_close(found.x, expected.x)
    assert_close(found.exp_avg, expected.exp_avg, [np.sqrt(v) for v in expected.exp_avg_sq], "exp_avg")
    assert_close(found.exp_avg_sq, expected.exp_avg_sq, what="exp_avg_sq")
    for got, want in ((found.coefficients.T, expected.coefficients.T), (found.average, expected.average)):
        np.testing.assert_allclose(got[holds], want[holds], rtol=1e-5)


def assert_limits(case, coefficients):
    """A test of coefficients that are all clipped, or none, would show little."""
    least, most = case.options.get("min_coeff", 0.01), case.options.get("max_coeff", 0.3)
    assert (coefficients == least).any() and (coefficients == most).any()
    assert ((coefficients > least) & (coefficients < most)).sum() > 30
    assert coefficients[0, 3] == 1  # the bias that starts at 0


STAGE_1 = LAMB.but(steps=50, options={"coeff_beta": 0.8})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2])
def test_stage_1_is_lamb(size, dtype):
    case = STAGE_1.but(dtype=dtype)
    expected = lamb(case, size)
    assert_limits(case, expected.coefficients)
    ranks = on_ranks(size, stage_1, case)
    for found in ranks:
        assert_lamb(found, expected, case)
        assert found.bits == ranks[0].bits
        for p, x in zip(found.p, found.x, strict=True):
            assert np.array_equal(p, torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy())


@pytest.mark.parametrize(
    "more",
    [
        {"bias_correction": False},
        {"min_coeff": 0.1, "max_coeff": 2.0, "coeff_beta": 0.0, "weight_decay": 0.3},
    ],
    ids=["BertAdam's moments", "other limits"],
)
def test_stage_1_with_other_options_is_lamb(more):
    case = STAGE_1.but(options=more, groups=({}, {"betas": (0.8, 0.9)}))
    expected = lamb(case, 1)
    assert_limits(case, expected.coefficients)
    assert_lamb(stage_1(0, 1, case), expected, case)


@pytest.mark.parametrize("size", [1, 2])
def test_with_all_coefficients_1_stage_1_is_adamw(size):
    case = STAGE_1.but(options={"max_coeff": 1.0, "min_coeff": 1.0, "weight_decay": 0.05})
    params = [nn.Parameter(p.detach().double()) for p in case.parameters()]
    adamw = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, hypers(case), strict=True)])
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, decay)
    for step in range(1, case.steps + 1):
        for p, g in zip(params, averaged(case, size, step), strict=True):
            p.grad = g
        adamw.step()
        schedule.step()
    for found in on_ranks(size, stage_1, case):
        assert_close(found.x, arrays(params))
        assert (found.coefficients == 1).all()


# Stage 2


@dataclass(frozen=True)
class Recorded:
    """One rank's run, in the order of the flat space. Flat arrays are float64 and cover it: see oracle.Layout."""

    x0: list[np.ndarray]  # at the freeze: parameters, moments, the average as accumulated
    m0: list[np.ndarray]
    v0: list[np.ndarray]
    average0: np.ndarray
    average: np.ndarray  # c_avg, debiased
    gamma: np.ndarray | None
    d: list[np.ndarray]  # the rest after each step of stage 2
    e: list[np.ndarray]
    E: list[np.ndarray]
    m: list[np.ndarray]
    v: list[np.ndarray]
    ratio: list[np.ndarray]
    coefficient: list[np.ndarray]
    x: list[list[np.ndarray]]
    bits: list[bytes]  # parameters after every step of both stages


def both_stages(rank, size, case):
    return quietly(lambda: _both_stages(rank, size, case))


def _both_stages(rank, size, case):
    params = case.parameters()
    optimizer = case.build(params, the_group(size))
    recorded: dict[str, list[Any]] = {name: [] for name in ("d", "e", "E", "m", "v", "ratio", "coefficient", "x")}
    everything, before = [], {}
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        everything.append(bits(params))
        [part] = optimizer.current.parts
        state = part.state
        if step == case.options["freeze_step"]:
            own = [optimizer.state[p] for p in state.params]
            before = {
                "x0": fp32(state.params, optimizer),
                "m0": arrays([s["exp_avg"] for s in own]),
                "v0": arrays([s["exp_avg_sq"] for s in own]),
                "average0": numpy(state["coefficient_average"]),
            }
        assert optimizer.compressing == (step > case.options["freeze_step"])
        if optimizer.compressing:
            record(recorded, optimizer, part)
    gamma = numpy(state["gamma"]) if "gamma" in state else None
    return Recorded(**before, average=numpy(state["coefficient_average"]), gamma=gamma, **recorded, bits=everything)


def record(recorded, optimizer, part):
    exchange, state = part.reducer.exchange, part.state
    found = {
        "d": state["denominator"],
        "e": exchange.residual.left_out(),
        "E": exchange.gathered_server_residual(),
        "v": state["exp_avg_sq"],
        "ratio": state["ratio"],
        "coefficient": state["coefficient"],
    }
    for name, tensor in found.items():
        recorded[name].append(numpy(tensor))
    recorded["m"].append(decoded(exchange.replies))
    recorded["x"].append(fp32(state.params, optimizer))


class LambSimulation(Simulation):
    """Algorithm 1 for a case in float64. Messages and residuals hold gamma times the momentum, `m` the momentum."""

    def __init__(self, case, ranks):
        super().__init__(case, ranks)
        self.hypers = self.ordered(lamb_hypers(case))
        self.ratio = case.options.get("ratio", "variance")

    def freeze(self, m, v, c_avg):
        own = self.case.options
        scale, norm = own.get("scale", "block"), own.get("norm", "l1")
        self.frozen = oracle.freeze_lamb(
            m, v, c_avg, self.hypers, self.freeze_step,
            scale=scale, bias_correction=self.corrected, zero_variance=own.get("zero_variance", "floor"),
        )  # fmt: skip
        self.d = self.frozen.d
        self.live = self.layout.flatten(self.d) > 0
        self.all_reduce = oracle.SimulatedAllReduce(self.layout, scale, norm, counted=self.live)
        self.m, self.v, self.r = m, self.frozen.v, np.ones(len(m))
        self.gamma = self.layout.flatten([np.full(a.shape, g) for a, g in zip(m, self.frozen.gamma, strict=True)], 1.0)

    def sizes(self, step):
        own = super().sizes(step)
        return [
            self.gamma * (size - np.abs(e)) + np.abs(e) for size, e in zip(own, self.all_reduce.worker, strict=True)
        ]

    def step(self, x, step):
        x, self.m, self.v, self.r = oracle.onebit_lamb_step(
            x, self.gradients(step), self.m, self.v, self.r, self.frozen, self.hypers, self.all_reduce, self.ratio
        )
        return x

    def unclipped(self, v):
        pairs = zip(self.frozen.v, v, self.hypers, strict=True)
        return np.array([oracle.variance_ratio(*own, self.ratio) for own in pairs])


def check(case, recorded):
    """Every step of stage 2 on every rank against the simulation. Returns how the ratios came about."""
    first, sim = recorded[0], LambSimulation(case, len(recorded))
    for own in recorded:
        assert own.bits == first.bits, "the ranks have other parameters"
        assert all(map(np.array_equal, own.ratio, first.ratio)), "the ranks have other ratios"
    sim.freeze(first.m0, first.v0, first.average0)
    check_freeze(case, first, sim)
    x, compared, ways = first.x0, 0, []
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        m, v, r = sim.m, sim.v, sim.r
        compared += check_exchange(sim, recorded, i, x, step)
        sim.m = sim.shaped(np.where(sim.live, first.m[i] / sim.gamma, 0.0))
        ways.append(check_update(sim, first, i, (x, m, v, r), step))
        x, sim.v, sim.r = first.x[i], sim.shaped(first.v[i]), first.ratio[i]
        sim.all_reduce.worker = [np.where(sim.live, own.e[i], 0.0) for own in recorded]
        sim.all_reduce.server = np.where(sim.live, first.E[i], 0.0)
    assert compared >= 0.9 * (case.steps - sim.freeze_step), f"only {compared} steps could be compared"
    return set().union(*ways)


def check_freeze(case, first, sim):
    """What is kept for good."""
    holds = [m.size > 0 for m in first.m0]
    np.testing.assert_allclose(first.average[holds], sim.frozen.c_avg[holds], rtol=1e-6)
    assert (first.gamma is None) == (case.options.get("scale", "block") == "block")
    if first.gamma is not None:
        np.testing.assert_allclose(first.gamma, sim.frozen.gamma, rtol=1e-6)
    d = sim.layout.flatten(sim.d) / sim.gamma
    np.testing.assert_allclose(first.d[0][sim.layout.valid], d[sim.layout.valid], rtol=2e-6)
    assert all(np.array_equal(later, first.d[0]) for later in first.d)


def check_exchange(sim, recorded, i, x, step):
    """Messages and residuals. Returns whether all of it could be compared."""
    first, reduce, sizes = recorded[0], sim.all_reduce, sim.sizes(step)
    server_size = sum(sizes) / sim.ranks + np.abs(reduce.server)
    sim.step(x, step)
    away = False
    for rank, messages in enumerate(reduce.gathered):
        size, what = sizes[rank] + whole_scale(messages), f"what rank {rank} has left out in step {step}"
        away |= turned(recorded[rank].e[i], reduce.worker[rank], messages, size, sim.live, what)
    if away:  # what rounding has turned is in this step's average
        return False
    size = server_size + whole_scale(reduce.scattered) + sum(map(whole_scale, reduce.gathered)) / sim.ranks
    what = f"what the servers have left out in step {step}"
    away |= turned(first.E[i], reduce.server, reduce.scattered, size, sim.live, what)
    m = sim.gamma * sim.layout.flatten(sim.m)
    away |= turned(first.m[i], m, reduce.scattered, size, sim.live, f"the momentum of step {step}")
    return not away


def check_update(sim, first, i, before, step):
    """Lines 15 to 21 from what was recorded before, with the m that was received."""
    x, m_previous, v, r = before
    moved, fresh, ratio = oracle.onebit_lamb_update(x, sim.m, m_previous, v, r, sim.frozen, sim.hypers, sim.ratio)
    counted = [frozen > 0 for frozen in sim.frozen.v]
    parts = zip(sim.shaped(first.v[i]), fresh, v, sim.m, m_previous, sim.hypers, counted, strict=True)
    for got, want, old, m, m_prev, h, some in parts:
        size = h.beta2 * old + (1 - h.beta2) * ((np.abs(m) + h.beta1 * np.abs(m_prev)) / (1 - h.beta1)) ** 2
        assert np.all(np.abs(got - want)[some] <= ROUNDING * size[some]), f"the fresh variance after step {step}"
    holds = [part.size > 0 for part in x]
    what = f"after step {step}"
    np.testing.assert_allclose(first.ratio[i][holds], ratio[holds], rtol=RATIO, err_msg=f"ratios {what}")
    coefficient = (ratio * sim.frozen.c_avg)[holds]
    np.testing.assert_allclose(first.coefficient[i][holds], coefficient, rtol=RATIO, err_msg=f"coefficients {what}")
    for got, old, new, d in zip(first.x[i], x, moved, sim.d, strict=True):
        allowed = 1e-6 * np.abs(old) + 2 * RATIO * np.abs(new - old)
        assert np.all(np.abs(got - new) <= allowed), f"parameters {what}"
        assert np.array_equal(got[d == 0], old[d == 0]), f"what cannot move has moved in step {step}"
    return {how(*own) for own in zip(sim.unclipped(fresh), r, ratio, sim.hypers, holds, strict=True)}


def how(unclipped, before, after, h, holds):
    """What a ratio is, so that a test can tell that it has seen all of it."""
    if not holds:
        return "none"
    if after in (h.factor_min, h.factor_max):
        return "limit"
    if after == unclipped:
        return "the largest"
    return "as far up as it may" if after > before else "as far down as it may"


def several(rank, size, cases):
    return [both_stages(rank, size, case) for case in cases]


EVERY = list(itertools.product(("variance", "denominator"), ("block", "tensor"), (True, False)))
CHOICES = {  # ratio, scale, weight decay
    1: [EVERY[0], EVERY[7]],
    2: [EVERY[0], EVERY[3], EVERY[5], EVERY[6]],
    3: [EVERY[1], EVERY[2], EVERY[4], EVERY[7]],
    4: [EVERY[2], EVERY[5]],
}


def chosen(i, ratio, scale, decayed):
    own = {"ratio": ratio, "scale": scale, "chunks": 1 + i % 3, "norm": ("l1", "l2")[i % 4 // 2]}
    limits = {"factor_max": 1.5, "factor_min": 0.8, "factor_threshold": 0.05, "bias_correction": False} if i % 2 else {}
    return options(LAMB.but(groups=GROUPS if decayed else UNDECAYED), **own, **limits)


@pytest.mark.parametrize("size", CHOICES)
def test_100_steps_of_stage_2_equal_the_simulation(size):
    cases = [chosen(i, *own) for i, own in enumerate(CHOICES[size])]
    ways = set()
    for case, recorded in zip(cases, zip(*on_ranks(size, several, cases), strict=True), strict=True):
        ways |= check(case, recorded)
    assert ways == {"none", "limit", "the largest", "as far up as it may", "as far down as it may"}


def test_stage_2_in_16_bits_equals_the_simulation():
    case = LAMB.but(dtype="bfloat16", steps=40, options={"freeze_step": 8, "scale": "tensor"})
    check(case, on_ranks(2, both_stages, case))


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_simulation_that_is_left_alone(size, scale):
    """From the first step of stage 1 on, until |c| is within rounding of 0 anywhere; these gradients leave 22 steps."""
    case = options(LAMB.but(steps=30, seed=3), scale=scale)
    recorded, sim = on_ranks(size, both_stages, case)[0], LambSimulation(case, size)
    x, c = sim.ordered(arrays(case.parameters())), np.zeros(len(case.shapes))
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, sim.freeze_step + 1):
        mean = [g.numpy() for g in sim.ordered(averaged(case, size, step))]
        x, m, v, c, _ = oracle.lamb_step(x, mean, m, v, c, sim.hypers, step)
    sim.freeze(m, v, c)
    holds, followed = [part.size > 0 for part in x], 0
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        x = sim.step(x, step)
        messages = [*sim.all_reduce.gathered, sim.all_reduce.scattered]
        if any((sim.live & (np.abs(whole_c(ms)) <= ROUNDING * whole_scale(ms))).any() for ms in messages):
            break
        for got, expected in zip(recorded.x[i], x, strict=True):
            assert np.abs(got - expected).max(initial=0.0) <= ROUNDING * np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(recorded.ratio[i][holds], sim.r[holds], rtol=10 * RATIO)
        followed += 1
    assert followed >= 15


# Momentum scaling


def frozen_run(scale, steps=12):
    """A run in stage 2, before its next step."""
    case = LAMB.but(groups=({},), steps=steps + 20, missing=(), options={"freeze_step": 6, "scale": scale})
    params = case.parameters()
    optimizer = case.build(params)
    quietly(lambda: run(case, 0, optimizer, params, 1, steps))
    return case, params, optimizer


def scale_momentum_(part, gamma):
    """Have messages and residuals of a running exchange hold gamma times the momentum."""
    layout, exchange = part.state.layout, part.reducer.exchange
    whole = torch.from_numpy(layout.owner())
    of_blocks = gamma[whole]
    of_elements = of_blocks.repeat_interleave(layout.block_size)
    exchange.residual.value.mul_(of_elements)
    exchange.server_residual.value.mul_(of_elements)
    for messages in (exchange.replies, exchange.reply):
        messages.scales.mul_(of_blocks.view(messages.scales.shape))
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
    form, span = Format.of(layout, scale), layout.all()
    out, residual = form.empty(1), Residual.zeros(span, form)
    grads = Pointers(layout, CPU, torch.float32, "gradient")
    grads.bind_tensors([torch.from_numpy(m).float() for m in momenta])
    flags = torch.zeros(1, dtype=torch.int32)
    passes.compress(span, grads, None, residual, hyper_table([Hyper()]), flags, out, gamma=gamma)
    plan, factors = oracle.Layout(tuple(layout.numel), 32), [1.0] * 5 if gamma is None else gamma.tolist()
    parts = zip(momenta, plan.unflatten(decoded(out)), factors, strict=True)
    return np.array([np.linalg.norm(m - got / factor) / np.linalg.norm(m) for m, got, factor in parts])


@pytest.mark.parametrize("passes", [reference, kernels.backend(CPU)], ids=["reference", "cpu"])
def test_with_a_tensor_scale_small_layers_need_momentum_scaling(passes):
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


# Parameters that have little


NOTHING = Sized(
    shapes=((12, 8), (2,), (0,), (33,), (40,), (1,)),
    x_sizes=(1.0, 0.0, 1.0, 0.1, 1.0, 0.5),
    steps=30,
    options={"freeze_step": 1, "weight_decay": 0.1},
    groups=({}, {"betas": (0.8, 0.9), "eps": 1e-3}),
    missing=((1, 0, 3), (2, 0, 1), (5, 1, 0), (7, 0, 3), (7, 1, 3)),
    untouched=((0, 3, 15), (4, 40, 10**6)),  # rows without gradients until stage 2 is well under way; a whole parameter
)
HARD = [
    options(NOTHING, ratio=ratio, scale=scale, zero_variance=zero_variance, bias_correction=scale == "block")
    for ratio, scale, zero_variance in itertools.product(
        ("variance", "denominator"), ("block", "tensor"), ("floor", "hold")
    )
]


def everything_finite(rank, size, cases):
    return [quietly(lambda case=case: _everything_finite(rank, size, case)) for case in cases]


def _everything_finite(rank, size, case):
    params = case.parameters()
    optimizer = case.build(params, the_group(size))
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        tensors = [*params, *(t for own in optimizer.state_dict()["state"].values() for t in own.values())]
        for state in optimizer.current.states:
            tensors += [state[name] for name in ("ratio", "coefficient", "coefficient_average") if name in state]
        for tensor in tensors:
            assert tensor.isfinite().all(), f"step {step}, shape {tuple(tensor.shape)}"
        if step == case.options["freeze_step"]:
            frozen = [p.detach().clone() for p in params]
    assert optimizer.compressing and optimizer.skipped_steps == 0
    moved = [bool((p != before).any()) for p, before in zip(params, frozen, strict=True)]
    return moved, bits(params)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_divides_by_zero(size):
    """Where a parameter, its gradient or both are empty, 0 or missing; and a freeze after the first step."""
    found = on_ranks(size, everything_finite, HARD)
    for own in found:
        for moved, _ in own:  # without a gradient on any rank until the freeze, d is 0
            assert moved == [True, True, False, size > 1, False, True]
        assert [end for _, end in own] == [end for _, end in found[0]]


@pytest.mark.parametrize("ratio", ["variance", "denominator"])
def test_no_gradient_but_one(ratio):
    """The smallest model that can be frozen at all."""
    case = Sized(shapes=((0,), (3,)), steps=8, options={"freeze_step": 1, "ratio": ratio}, missing=((3, 0, 1),))
    params = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))]
    optimizer = case.build(params)
    for step in range(1, 9):
        params[0].grad, params[1].grad = None, None if step == 3 else torch.tensor([0.0, 1e-20, 0.0])
        quietly(optimizer.step)
        assert params[1].isfinite().all()
        assert not optimizer.compressing or optimizer.current.states[0]["ratio"].isfinite().all()
    assert optimizer.compressing


DEAD = Sized(
    shapes=((12, 8), (33,), (7,), (0,)),
    g_sizes=(1.0, 1e-2, 1.0, 1.0),
    steps=40,
    options={"freeze_step": 8, "weight_decay": 0.1},
    untouched=((0, 3, 20), (2, 7, 10**6)),
)


@pytest.mark.parametrize("ratio", ["variance", "denominator"])
@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_coordinates_without_a_variance(size, zero_variance, ratio):
    """`check` knows of the floor, of what never moves, of what stays out of the scale, and of what a ratio counts."""
    case = options(DEAD, zero_variance=zero_variance, ratio=ratio, scale=("block", "tensor")[size % 2])
    recorded = on_ranks(size, both_stages, case)
    check(case, recorded)
    first = recorded[0]
    moved = (first.x[-1][0] != first.x0[0]).all(axis=1)
    assert moved[3:].all()
    assert moved[:3].all() if zero_variance == "floor" else not (first.x[-1][0] != first.x0[0])[:3].any()
    assert np.array_equal(first.x[-1][2], first.x0[2])
    if (
        zero_variance == "floor"
    ):  # where the fresh variance has grown from 0, so that its quotient would be the largest by far
        layout = LambSimulation(case, size).layout
        d, fresh = layout.unflatten(first.d[-1])[0], layout.unflatten(first.v[-1])[0]
        quotient = (1 / (d * (1 if first.gamma is None else first.gamma[0]))) ** 2 / fresh
        assert quotient[:24].max() > 2 * quotient[24:].max()
        assert first.ratio[-1][0] < 1.2
    assert all(r[2] == 1 for r in first.ratio)  # no live coordinate


def adamw_state(case, steps):
    params = case.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)
    run(case, 0, optimizer, params, 1, steps)
    return params, snapshot(optimizer.state_dict())


def from_adamw(rank, size, case, state, values):
    """What a run says that goes on with the state, and is to freeze at once."""
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = case.build(params, the_group(size))
    if state:
        optimizer.load_state_dict(snapshot(state))
    with pytest.raises(ValueError, match="there are no coefficients to go on with") as caught:
        take(case, rank, optimizer, params, 6)
    assert bits(params) == bits(values)
    assert not optimizer.compressing
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
def test_stage_2_from_the_start_needs_coefficients(size):
    """A variance of AdamW's is not enough."""
    case = Sized(options={"freeze_step": 0})
    params, state = adamw_state(case, 5)
    values = [p.detach() for p in params]
    for given, words in ((None, "after 0 steps"), (state, "after 5 steps")):
        texts = on_ranks(size, from_adamw, case, given, values)
        assert len(set(texts)) == 1
        assert words in texts[0] and "freeze_step=" in texts[0]


def test_coefficients_are_averaged_from_where_lamb_began():
    """After 5 steps of AdamW: 3 of LAMB, and stage 2."""
    case = Sized(x_sizes=(0.1,) * 4, options={"freeze_step": 8})
    params, state = adamw_state(case, 5)
    optimizer = case.build(params)
    optimizer.load_state_dict(state)
    x, h, c = arrays(params), lamb_hypers(case), np.zeros(4)
    m, v = ([numpy(state["state"][i][name]) for i in range(4)] for name in ("exp_avg", "exp_avg_sq"))
    for step in (6, 7, 8):
        take(case, 0, optimizer, params, step)
        x, m, v, c, _ = oracle.lamb_step(x, [g.numpy() for g in case.gradients(0, step)], m, v, c, h, step)
    take(case, 0, optimizer, params, 9)
    assert optimizer.compressing
    expected = oracle.debiased(c, h, 3)
    assert len(set(expected.round(3))) > 2
    np.testing.assert_allclose(numpy(optimizer.current.states[0]["coefficient_average"]), expected, rtol=1e-5)


# freeze_step="auto"


@dataclass(frozen=True)
class Growing(Sized):
    """With lr = 0: parameters that are multiplied by `1 + growth` after each step up to `until`. The coefficients
    follow, since the other norm hardly changes."""

    growth: tuple[float, ...] = ()
    until: tuple[int, ...] = ()

    def grow(self, params, step):
        with torch.no_grad():
            for p, growth, until in zip(params, self.growth, self.until, strict=True):
                p.mul_(1 + growth if step <= until else 1.0)


@dataclass(frozen=True)
class Traced:
    averages: list[np.ndarray]  # c_avg, debiased, after step 1, 2, ...
    shares: list[float | None]  # optimizer.freeze_ratio after step 1, 2, ...
    frozen: int | None  # the last step of stage 1
    end: bytes


def traced(rank, size, case):
    """Run until a step into stage 2."""
    params = case.parameters()
    optimizer = case.build(params, the_group(size))
    averages, shares = [], []
    for step in range(1, case.steps + 1):
        if (step, 0) in {own[:2] for own in case.bad}:  # one more, that is not taken
            params[-1].grad = torch.full_like(params[-1], nan)
            optimizer.step()
        run(case.but(bad=()), rank, optimizer, params, step, step)
        case.grow(params, step)
        shares.append(optimizer.freeze_ratio)
        if optimizer.compressing:
            return Traced(averages, shares, step - 1, bits(params))
        c = np.concatenate([numpy(state["coefficient_average"]) for state in optimizer.current.states])
        averages.append(c / (1 - case.options.get("coeff_beta", 0.9) ** step))
    return Traced(averages, shares, None, bits(params))


def share(averages, numels, step, window, threshold):
    """Elements of parameters whose average changed by less over the window, looked at 16 times a window."""
    apart = math.ceil(window / 16)
    now = step // apart * apart
    before = now - math.ceil(window / apart) * apart
    if before < 1:
        return None
    a, b = averages[now - 1], averages[before - 1]
    return float(np.array(numels)[np.abs(a - b) / b < 1 - threshold].sum() / sum(numels))


def rule(averages, numels, window, threshold=0.96):
    for step in range(2 * window, len(averages) + 1):
        if share(averages, numels, step, window, threshold) >= 0.95:
            return step
    return None


SHORT = {"lr": 0.0, "betas": (0.0, 0.95)}  # 1 / (1 - beta2) = 20
GROWING = Growing(
    shapes=((900,), (40,), (60,)),
    x_sizes=(0.02, 0.02, 0.02),
    steps=120,
    options=SHORT,
    growth=(0.01, 0.01, 0.01),
    until=(30, 30, 30),
)
AUTO = {  # case, window, the end of the last growth that counts
    "from 2D on": (GROWING.but(until=(0, 0, 0)), 20, None),
    "when all have settled": (GROWING.but(until=(50, 50, 50)), 20, 50),
    "4 % may go on": (GROWING.but(until=(50, 200, 50)), 20, 50),
    "6 % may not": (GROWING.but(until=(30, 30, 80)), 20, 80),
    "shrinking": (GROWING.but(growth=(-0.01, -0.01, -0.01), until=(60, 0, 0)), 20, 60),
    "another threshold": (options(GROWING.but(until=(50, 50, 50)), freeze_threshold=0.9), 20, 50),
    "another window": (options(GROWING.but(until=(50, 50, 50)), freeze_window=9), 9, 50),
    "16 looks a window": (options(GROWING.but(until=(50, 50, 50)), freeze_window=16), 16, 50),
    "two steps a look": (options(GROWING.but(until=(60, 60, 60)), freeze_window=32), 32, 60),
    "a window of strides": (options(GROWING.but(until=(50, 50, 50)), freeze_window=33, coeff_beta=0.5), 33, 50),
}


@pytest.mark.parametrize("name", AUTO)
@pytest.mark.parametrize("size", [1, 2])
def test_stage_1_ends_when_the_coefficients_are_stable(size, name):
    case, window, settled = AUTO[name]
    numels, threshold = [int(np.prod(shape)) for shape in case.shapes], case.options.get("freeze_threshold", 0.96)
    found = on_ranks(size, traced, case)
    for each in found:
        assert each.frozen is not None, "stage 1 did not end: the test shows nothing"
        assert each.frozen == rule(each.averages, numels, window, threshold)
        assert each.end == found[0].end
        for step in range(1, len(each.averages) + 1):  # freeze_ratio lags by one step: nobody waits for the device
            expected = share(each.averages, numels, step, window, threshold)
            assert each.shares[step] == (None if expected is None else pytest.approx(expected))
        assert each.shares[0] is None
    if settled is None:
        assert found[0].frozen == 2 * window
    else:
        assert settled < found[0].frozen <= settled + window + 20  # which an average with beta 0.9 takes to settle


def test_three_ranks_end_stage_1_together():
    found = run_ranks(3, traced, AUTO["6 % may not"][0])
    assert len({(each.frozen, each.end) for each in found}) == 1
    assert found[0].frozen == rule(found[0].averages, [900, 40, 60], 20)


def test_steps_not_taken_are_no_part_of_the_trace():
    case = AUTO["when all have settled"][0]
    plain, spoiled = (traced(0, 1, case.but(bad=tuple((at, 0, nan) for at in steps))) for steps in ((), (5, 33, 34)))
    assert plain.shares == spoiled.shares
    assert plain.end == spoiled.end


def test_a_model_without_elements_has_no_share():
    """A rank's shard of a model may hold nothing."""
    params = [nn.Parameter(torch.zeros(0))]
    optimizer = onebit.OneBitLamb(params, freeze_window=2)
    for _ in range(8):
        params[0].grad = torch.zeros(0)
        optimizer.step()
    assert not optimizer.compressing


# What is refused


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *(({"coeff_beta": value}, "coeff_beta") for value in (-0.1, 1.0, 1.5, nan, inf)),
        *(({"min_coeff": value}, "coeff") for value in (0.0, -0.1, 0.4, nan, inf)),
        *(({"max_coeff": value}, "coeff") for value in (0.0, -1.0, 0.005, nan, inf)),
        *(({"factor_min": value}, "factor") for value in (0.0, -0.5, 4.5, nan, inf)),
        *(({"factor_max": value}, "factor") for value in (0.0, -4.0, 0.4, nan, inf)),
        *(({"factor_threshold": value}, "factor_threshold") for value in (0.0, -0.1, 1.0, 2.0, nan, inf)),
        *(({"ratio": value}, "ratio") for value in ("", "Variance", "max", None, 1)),
    ],
)
def test_bad_options_are_refused(wrong, words):
    """The text names the option and what was given."""
    with pytest.raises(ValueError) as caught:
        onebit.OneBitLamb([nn.Parameter(torch.ones(3))], **wrong)
    [value] = wrong.values()
    assert words in str(caught.value) and repr(value) in str(caught.value)


def test_limits_that_are_equal_are_fine():
    case = Sized(steps=9, options={"freeze_step": 3, "min_coeff": 0.2, "max_coeff": 0.2, "factor_min": 2.0})
    case = options(case, factor_max=2.0)
    params = case.parameters()
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 9)
    np.testing.assert_allclose(numpy(optimizer.current.states[0]["coefficient"]), 0.4, rtol=1e-6)


OTHERS = {
    **{"coeff_beta": 0.8, "min_coeff": 0.02, "max_coeff": 0.5, "factor_min": 0.25, "factor_max": 3.0},
    **{"factor_threshold": 0.2, "ratio": "denominator"},
}


def disagree(rank, size):
    texts = {}
    for name, other in OTHERS.items():
        case = Sized(options={"freeze_step": 3, **({name: other} if rank == size - 1 else {})})
        params = case.parameters()
        optimizer = case.build(params, the_group(size))
        before = bits(params)
        with pytest.raises(ValueError, match=f"the ranks do not agree: rank .* has {name} ") as caught:
            take(case, rank, optimizer, params, 1)
        assert bits(params) == before
        texts[name] = str(caught.value)
    return texts


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_are_told_so(size):
    found = run_ranks(size, disagree)
    assert all(texts == found[0] for texts in found)
    for name, text in found[0].items():
        assert f"has {name} {OTHERS[name]!r} where rank 0 has" in text or f"where rank {size - 1}" in text


# Resume


def lamb_state(optimizer):
    [state] = optimizer.current.states
    names = {"average": "coefficient_average", "dense": "first_momentum", "counted": "counted_bits", "d": "denominator"}
    own = {name: state.get(names.get(name, name)) for name in (*names, "ratio", "gamma")}
    return {name: None if tensor is None else tensor.clone() for name, tensor in own.items()}


def resume(rank, size, case, start, folder):
    """Save after step `start`, go on; load into another optimizer, and go on as well. What LAMB's state was."""
    return quietly(lambda: _resume(rank, size, case, start, folder))


def _resume(rank, size, case, start, folder):
    params = case.parameters()
    optimizer = case.build(params, the_group(size))
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
    resumed = case.build(again, the_group(size))
    resumed.load_state_dict(saved["optimizer"])
    assert same(lamb_state(resumed), before)
    for step, (their_bits, their_state) in enumerate(expected, start + 1):
        take(case, rank, resumed, again, step)
        assert bits(again) == their_bits, f"step {step}"
        assert same(lamb_state(resumed), their_state), f"step {step}"
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))
    return {name: None if tensor is None else numpy(tensor) for name, tensor in before.items()}


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
    average = numpy(optimizer.current.states[0]["coefficient_average"])
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
