"""Both stages of 1-bit Adam: stage 1 is torch.optim.AdamW, stage 2 the float64 simulation of the paper's Algorithm 1.

The simulation of stage 2 starts every step from what the ranks recorded, so that a bit which rounding may turn (|c|
within rounding of 0) changes nothing that is compared later; `test_a_simulation_that_is_left_alone` never does.
"""

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests import oracle
from tests.onebit.runs import Case, arrays, bits, kinds, take
from tests.ranks import group, run_ranks

CLOSE = 1e-6  # stage 1: relative to the largest value of a parameter
ROUNDING = 1e-5  # stage 2: relative to the size of what is added up: fp32, and sums over a block
HALF_PLACE = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
GROUPS = (
    {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {},
    {"lr": 5e-3, "betas": (0.95, 0.999), "weight_decay": 0.02},
)
HYPERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # what Case gives, or the default
SHAPES = ((7, 9), (33,), (0,), (2,), (130,), (1,), (5, 0))
MISSING = ((1, 0, 1), (3, 0, 4), (4, 0, 0), (4, 1, 0), (4, 2, 0), (4, 3, 0), (17, 1, 4), (17, 0, 5), (18, 0, 0))


def on_ranks(size, work, *args):
    """Real ranks, or this process alone."""
    return run_ranks(size, work, *args) if size > 1 else [work(0, 1, *args)]


def the_group(size):
    return group() if size > 1 else None


def hypers(case):
    """Of every parameter, in the order of `case.shapes`."""
    known = {**HYPERS, **{k: v for k, v in case.options.items() if k in HYPERS}}
    return [{**known, **case.groups[case.group_of(p)]} for p in range(len(case.shapes))]


def averaged(case, ranks, step):
    """float64: what every rank's gradient becomes in stage 1, the mean, in the precision of gradients."""
    means = []
    for gradients in zip(*(case.gradients(rank, step) for rank in range(ranks)), strict=True):
        like = nn.Parameter(torch.zeros(case.shapes[len(means)]))
        total = sum(like.detach().double() if g is None else g.double() for g in gradients)
        means.append((total / ranks).to(getattr(torch, case.dtype)).double())
    return means


def decay(step):
    return 1 / (1 + step / 10)


# Stage 1


@dataclass(frozen=True)
class Warm:
    """Stage 1's results, float64, in the order of `case.shapes`."""

    x: list[np.ndarray]
    p: list[np.ndarray]
    exp_avg: list[np.ndarray]
    exp_avg_sq: list[np.ndarray]
    bits: bytes


def warm(params, optimizer):
    states = [optimizer.state[p] for p in params]
    x = [s.get("master", p) for p, s in zip(params, states, strict=True)]
    moments = (arrays([s[name] for s in states]) for name in ("exp_avg", "exp_avg_sq"))
    return Warm(arrays(x), arrays(params), *moments, bits(params))


def stage_1(rank, size, case):
    params = case.parameters()
    optimizer = case.build(params, the_group(size))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        schedule.step()
    return warm(params, optimizer)


def adamw(case, ranks, dtype=torch.float64):
    """torch.optim.AdamW on the averaged gradients. A gradient that is None counts as zero."""
    params = [nn.Parameter(p.detach().to(dtype)) for p in case.parameters()]
    optimizer = torch.optim.AdamW([{"params": [p], **h} for p, h in zip(params, hypers(case), strict=True)])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    for step in range(1, case.steps + 1):
        for p, g in zip(params, averaged(case, ranks, step), strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
        schedule.step()
    return warm(params, optimizer)


def assert_close(got, expected, sizes=None, what="parameter"):
    """To CLOSE relative to the largest of `sizes`, which are the values themselves if not given."""
    for i, (a, b, size) in enumerate(zip(got, expected, sizes or expected, strict=True)):
        off, largest = np.abs(a - b).max(initial=0.0), np.abs(size).max(initial=0.0)
        assert off <= CLOSE * largest, f"{what} {i} is off by {off:.3g} where values are up to {largest:.3g}"


def assert_moments_close(found, expected):
    sizes = [np.sqrt(v) for v in expected.exp_avg_sq]  # exp_avg itself may happen to be near 0
    assert_close(found.exp_avg, expected.exp_avg, sizes, "exp_avg")
    assert_close(found.exp_avg_sq, expected.exp_avg_sq, what="exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stage_1_is_adamw(size, dtype):
    case = Case(shapes=SHAPES, steps=50, groups=GROUPS, missing=MISSING, options={"weight_decay": 0.05})
    expected = adamw(case, size, dtype)
    for found in on_ranks(size, stage_1, case):
        assert_close(found.x, expected.x)
        assert_moments_close(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 2])
def test_stage_1_in_16_bits_is_adamw_on_the_fp32_copy(size, dtype):
    case = Case(shapes=SHAPES, dtype=dtype, steps=50, groups=GROUPS, missing=MISSING)
    expected = adamw(case, size)
    for found in on_ranks(size, stage_1, case):
        assert_close(found.x, expected.x)
        assert_moments_close(found, expected)
        for p, x in zip(found.p, found.x, strict=True):
            assert np.array_equal(p, torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stage_1_without_a_copy_rounds_every_step(dtype):
    case = Case(shapes=SHAPES, dtype=dtype, steps=10, options={"master_weights": False, "weight_decay": 0.1})
    params = case.parameters()
    optimizer = case.build(params)
    x = arrays(params)
    m, v, h = oracle.zeros(x), oracle.zeros(x), [oracle.Hyper(lr=1e-2, weight_decay=0.1)] * len(x)
    for step in range(1, case.steps + 1):
        take(case, 0, optimizer, params, step)
        x, m, v = oracle.adamw_step(x, [g.double().numpy() for g in case.gradients(0, step)], m, v, h, step)
        for got, expected in zip(arrays(params), x, strict=True):
            assert np.all(np.abs(got - expected) <= np.abs(expected) * HALF_PLACE[dtype] * 1.01)
        x = arrays(params)
        assert "master" not in optimizer.state[params[0]]
    assert_moments_close(warm(params, optimizer), Warm(x, x, m, v, b""))


def test_stage_1_without_bias_correction_is_bertadam():
    case = Case(shapes=SHAPES, steps=30, groups=GROUPS, options={"bias_correction": False})
    params = case.parameters()
    optimizer = case.build(params)
    x, h = arrays(params), [oracle_hyper(**own) for own in hypers(case)]
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, case.steps + 1):
        take(case, 0, optimizer, params, step)
        gradients = [g.double().numpy() for g in case.gradients(0, step)]
        x, m, v = oracle.adamw_step(x, gradients, m, v, h, step, bias_correction=False)
    assert_close(arrays(params), x)


def oracle_hyper(lr, betas, eps, weight_decay):
    return oracle.Hyper(lr, *betas, eps, weight_decay)


SAMPLES = 12  # of the whole batch


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model, step, rank, size, dtype=torch.float32):
    """The mean over a rank's part of the batch."""
    data = torch.Generator().manual_seed(step)
    part = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    x = torch.randn(SAMPLES, 10, generator=data, dtype=torch.float64)[part].to(dtype)
    y = torch.randn(SAMPLES, 3, generator=data, dtype=torch.float64)[part].to(dtype)
    return ((model(x) - y) ** 2).mean()


def train(rank, size, steps, kind, wrapped):
    """What a rank's model comes to: under DDP with attach, or without DDP."""
    model = net()
    options = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.05, "freeze_step": 10**6, "process_group": the_group(size)}
    optimizer = getattr(onebit, kind)(model.parameters(), **options)
    run = model
    if wrapped:
        run = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        onebit.attach(run, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(run, step, rank, size).backward()
        before = bits(p.grad for p in model.parameters())
        optimizer.step()
        assert not wrapped or bits(p.grad for p in model.parameters()) == before, "DDP has done that already"
    return arrays(model.parameters()), bits(model.parameters())


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "DDP"])
@pytest.mark.parametrize("size", [2, 3])
@kinds
def test_ranks_in_stage_1_are_one_process_on_the_whole_batch(kind, size, wrapped):
    (expected, _), *_ = on_ranks(1, train, 30, kind, False)
    found = on_ranks(size, train, 30, kind, wrapped)
    for parameters, their_bits in found:
        assert_close(parameters, expected)
        assert their_bits == found[0][1]


@pytest.mark.parametrize(("size", "wrapped"), [(1, False), (2, False), (2, True), (3, True)])
def test_a_model_in_stage_1_trains_as_with_adamw(size, wrapped):
    model = net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.05)
    for step in range(50):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1, torch.float64).backward()
        optimizer.step()
    for found, _ in on_ranks(size, train, 50, "OneBitAdam", wrapped):
        assert_close(found, arrays(model.parameters()))


@kinds
def test_lr_as_a_tensor_is_lr_as_a_number(kind):
    """In both stages, with a scheduler: halves are exact in either precision."""
    ends = []
    for lr in (1e-2, torch.tensor(1e-2)):
        case = Case(kind, steps=12, options={"lr": lr, "freeze_step": 6, "weight_decay": 0.1})
        params = case.parameters()
        optimizer = case.build(params)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 2))
        for step in range(1, case.steps + 1):
            take(case, 0, optimizer, params, step)
            schedule.step()
        assert optimizer.compressing
        ends.append(bits(params))
    assert ends[0] == ends[1]


# Stage 2


@dataclass(frozen=True)
class Recorded:
    """One rank's run. Flat arrays are float64 and cover the space: see oracle.Layout."""

    warm: Warm
    denominator: list[np.ndarray]  # in the order of `case.shapes`, as x
    e: list[np.ndarray]  # after each step of stage 2: this rank's residual
    E: list[np.ndarray]  # the servers', of all ranks
    m: list[np.ndarray]  # what was received
    x: list[list[np.ndarray]]
    bits: list[bytes]  # parameters after every step of both stages


def both_stages(rank, size, case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # other tests are of these
        params = case.parameters()
        optimizer = case.build(params, the_group(size))
        recorded: dict[str, list[Any]] = {name: [] for name in ("e", "E", "m", "x", "bits")}
        before: Any = None
        for step in range(1, case.steps + 1):
            take(case, rank, optimizer, params, step)
            assert optimizer.compressing == (step > case.options["freeze_step"])
            recorded["bits"].append(bits(params))
            if optimizer.compressing:
                record(recorded, optimizer, params)
            else:
                before = warm(params, optimizer)
    return Recorded(before, arrays([optimizer.state[p]["denominator"] for p in params]), **recorded)


def record(recorded, optimizer, params):
    [reducer] = optimizer.current.reducers
    recorded["e"].append(reducer.exchange.residual.left_out().double().numpy().copy())
    recorded["E"].append(reducer.exchange.gathered_server_residual().double().numpy())
    recorded["m"].append(decoded(reducer.exchange.replies))
    recorded["x"].append(arrays([optimizer.state[p].get("master", p) for p in params]))
    for p in params:
        assert torch.equal(p, optimizer.state[p].get("master", p).to(p.dtype))


def decoded(messages):
    positive = np.unpackbits(messages.bits.numpy().reshape(-1), bitorder="little") > 0
    scale = np.repeat(messages.scale_of_blocks().double().numpy(), messages.format.block_size)
    return np.where(positive, scale, -scale)


class Simulation:
    """The paper's steps for a case in float64. Lists are in the order of the flat space."""

    def __init__(self, case, ranks):
        self.case, self.ranks = case, ranks
        self.freeze_step = case.options["freeze_step"]
        self.corrected = case.options.get("bias_correction", True)
        own = hypers(case)
        self.hypers = [oracle_hyper(**own[p]) for p in case.order]
        self.shapes = [case.shapes[p] for p in case.order]
        numels = tuple(int(np.prod(shape)) for shape in self.shapes)
        options = case.options
        self.layout = oracle.Layout(numels, options.get("block_size", 32), ranks, options.get("chunks", 1))

    def ordered(self, arrays):
        return [arrays[p] for p in self.case.order]

    def gradients(self, step):
        """Of every rank."""
        own = [self.ordered(self.case.gradients(rank, step)) for rank in range(self.ranks)]
        return [[None if g is None else g.double().numpy() for g in gradients] for gradients in own]

    def shaped(self, flat):
        return [part.reshape(s) for part, s in zip(self.layout.unflatten(flat), self.shapes, strict=True)]

    def freeze(self, m, v):
        """Stage 2 begins with m, nothing left out, and d."""
        options = self.case.options
        self.d = oracle.freeze(v, self.hypers, self.freeze_step, self.corrected, options.get("zero_variance", "floor"))
        self.live = self.layout.flatten(self.d) > 0
        scale, norm = options.get("scale", "block"), options.get("norm", "l1")
        self.all_reduce = oracle.SimulatedAllReduce(self.layout, scale, norm, counted=self.live)
        self.m = m

    def sizes(self, step):
        """Of what is added up to make c, for every rank."""
        m = [np.abs(part) for part in self.m]
        gradients = [[None if g is None else np.abs(g) for g in own] for own in self.gradients(step)]
        ys = [self.layout.flatten(oracle.local_momentum(own, m, self.hypers)) for own in gradients]
        return [y + np.abs(e) for y, e in zip(ys, self.all_reduce.worker, strict=True)]

    def step(self, x, step):
        x, self.m = oracle.onebit_adam_step(x, self.gradients(step), self.m, self.d, self.hypers, self.all_reduce)
        return x


def whole_scale(messages):
    return np.concatenate([np.repeat(m.scales, m.c.size // m.scales.size) for m in messages])


def whole_c(messages):
    return np.concatenate([m.c for m in messages])


def turned(got, expected, messages, size, live, what):
    """`got` is `expected`, or 2 scales away where |c| is within rounding of 0. Returns whether that is so anywhere."""
    allowed, scale = ROUNDING * size, whole_scale(messages)
    off = np.where(live, np.abs(got - expected), 0.0)
    unsure = (np.abs(whole_c(messages)) <= allowed) & (np.abs(off - 2 * scale) <= allowed)
    wrong = ~((off <= allowed) | unsure)
    where = np.flatnonzero(wrong)[:4]
    assert not wrong.any(), f"{what}: {wrong.sum()} differ, {got[where]} for {expected[where]} at {where}"
    return bool((off > allowed).any())


def check(case, recorded):
    """Every step of stage 2 on every rank against the simulation, re-synced before each."""
    assert all(r.bits == recorded[0].bits for r in recorded), "the ranks have other parameters"
    first, sim = recorded[0], Simulation(case, len(recorded))
    sim.freeze(sim.ordered(first.warm.exp_avg), sim.ordered(first.warm.exp_avg_sq))
    for d, expected in zip(sim.ordered(first.denominator), sim.d, strict=True):
        np.testing.assert_allclose(d, expected, rtol=1e-6)
    live, x, compared = sim.live, sim.ordered(first.warm.x), 0
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        reduce, sizes = sim.all_reduce, sim.sizes(step)
        server_size = sum(sizes) / sim.ranks + np.abs(reduce.server)
        sim.step(x, step)
        away = False
        for rank, messages in enumerate(reduce.gathered):
            size = sizes[rank] + whole_scale(messages)
            what = f"what rank {rank} has left out in step {step}"
            away |= turned(recorded[rank].e[i], reduce.worker[rank], messages, size, live, what)
        if not away:  # what rounding has turned is in this step's average
            size = server_size + whole_scale(reduce.scattered) + sum(map(whole_scale, reduce.gathered)) / sim.ranks
            what = f"what the servers have left out in step {step}"
            away |= turned(first.E[i], reduce.server, reduce.scattered, size, live, what)
            flat = sim.layout.flatten(sim.m)
            away |= turned(first.m[i], flat, reduce.scattered, size, live, f"the momentum of step {step}")
            compared += not away
        sim.m = sim.shaped(np.where(live, first.m[i], 0.0))
        check_update(sim, x, sim.ordered(first.x[i]), step)
        x = sim.ordered(first.x[i])
        reduce.worker = [np.where(live, r.e[i], 0.0) for r in recorded]
        reduce.server = np.where(live, first.E[i], 0.0)
    assert compared >= 0.9 * (case.steps - sim.freeze_step), f"only {compared} steps could be compared"


def check_update(sim, x, got, step):
    """x - lr (m d + wd x) with the m that was received."""
    half_place = 0.0 if sim.case.options.get("master_weights", True) else HALF_PLACE[sim.case.dtype]
    moved = oracle.onebit_adam_update(x, sim.m, sim.d, sim.hypers)
    for a, before, b, still in zip(got, x, moved, sim.d, strict=True):
        allowed = 1e-6 * (np.abs(before) + np.abs(b - before)) + half_place * np.abs(b)
        assert np.all(np.abs(a - b) <= allowed), f"parameters after step {step}"
        assert np.array_equal(a[still == 0], before[still == 0]), f"what cannot move has moved in step {step}"


STAGES = Case(
    shapes=SHAPES,
    steps=108,
    groups=GROUPS,
    missing=(*MISSING, (30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0)),
    options={"freeze_step": 8},
)


def options(case, **more):
    return case.but(options={**case.options, **more})


def several(rank, size, cases):
    return [both_stages(rank, size, case) for case in cases]


EVERY = list(itertools.product(("block", "tensor"), ("l1", "l2"), (True, False)))
CHOICES = {  # scale, norm, bias_correction
    1: EVERY,
    2: [("block", "l1", True), ("block", "l2", False), ("tensor", "l1", False), ("tensor", "l2", True)],
    3: [("block", "l1", True), ("tensor", "l2", False)],
    4: [("block", "l2", False), ("tensor", "l1", True)],
}


@pytest.mark.parametrize("size", CHOICES)
def test_100_steps_of_stage_2_equal_the_simulation(size):
    cases = [
        options(STAGES, scale=scale, norm=norm, bias_correction=corrected, chunks=1 + i % 3)
        for i, (scale, norm, corrected) in enumerate(CHOICES[size])
    ]
    for case, recorded in zip(cases, zip(*on_ranks(size, several, cases), strict=True), strict=True):
        check(case, recorded)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("master", [True, False], ids=["master", "rounded"])
def test_stage_2_in_16_bits_equals_the_simulation(dtype, master):
    case = options(STAGES.but(dtype=dtype, steps=40), master_weights=master)
    check(case, on_ranks(2, both_stages, case))


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_simulation_that_is_left_alone(size, scale):
    """From the first step of stage 1 on, until |c| is within rounding of 0 anywhere; these gradients leave 15 steps."""
    case = options(STAGES.but(steps=38), scale=scale)
    recorded, sim = on_ranks(size, both_stages, case)[0], Simulation(case, size)
    x = sim.ordered(arrays(case.parameters()))
    m, v = oracle.zeros(x), oracle.zeros(x)
    for step in range(1, sim.freeze_step + 1):
        mean = [g.numpy() for g in sim.ordered(averaged(case, size, step))]
        x, m, v = oracle.adamw_step(x, mean, m, v, sim.hypers, step)
    sim.freeze(m, v)
    followed = 0
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        x = sim.step(x, step)
        messages = [*sim.all_reduce.gathered, sim.all_reduce.scattered]
        if any((sim.live & (np.abs(whole_c(ms)) <= ROUNDING * whole_scale(ms))).any() for ms in messages):
            break
        for got, expected in zip(sim.ordered(recorded.x[i]), x, strict=True):
            assert np.abs(got - expected).max(initial=0.0) <= ROUNDING * np.abs(expected).max(initial=0.0)
        followed += 1
    assert followed >= 15


def mixed(rank, size, kind, together):
    """A model of two dtypes in one optimizer, or in one for each."""
    cases = [Case(kind, shapes=((40, 3), (5,)), dtype=d, options={"freeze_step": 4}) for d in ("float32", "bfloat16")]
    params = [case.parameters() for case in cases]
    if together:
        both = [{"params": [params[0][0], params[1][0]]}, {"params": [params[1][1], params[0][1]]}]
        optimizers = [getattr(onebit, kind)(both, lr=1e-2, block_size=32, freeze_step=4, process_group=group())]
    else:
        optimizers = [case.build(own, group()) for case, own in zip(cases, params, strict=True)]
    for step in range(1, 13):
        for case, own in zip(cases, params, strict=True):
            for p, g in zip(own, case.gradients(rank, step), strict=True):
                p.grad = g
        for optimizer in optimizers:
            optimizer.step()
    return bits([*params[0], *params[1]])


@kinds
def test_a_model_of_two_dtypes_is_two_models(kind):
    together, apart = (run_ranks(2, mixed, kind, t) for t in (True, False))
    assert together == apart
    assert together[0] == together[1]


# Coordinates without a variance


EMBEDDING = Case(
    shapes=((12, 8), (33,), (7,), (0,)),
    steps=40,
    options={"freeze_step": 6, "weight_decay": 0.1},
    untouched=((0, 3, 20), (2, 7, 10**6)),  # three rows without gradients far into stage 2; a parameter without any
)


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_that_no_gradient_has_touched(size, zero_variance, scale):
    """`check` knows of the floor, of what never moves, and of what stays out of the scale."""
    case = options(EMBEDDING, zero_variance=zero_variance, scale=scale)
    recorded = on_ranks(size, both_stages, case)
    check(case, recorded)
    before, after = recorded[0].warm.x[0], recorded[0].x[-1][0]
    moved = (after != before).all(axis=1)
    assert moved[3:].all()
    assert moved[:3].all() if zero_variance == "floor" else not (after != before)[:3].any()
    assert np.array_equal(recorded[0].warm.x[2], recorded[0].x[-1][2])


def test_gradients_of_frozen_coordinates_change_nothing():
    """Neither the scale nor any parameter, however large."""
    ends = []
    for largest in (0.0, 1e6):
        case = options(EMBEDDING, zero_variance="hold", scale="tensor")
        params = case.parameters()
        optimizer = case.build(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 20):
                for p, g in zip(params, case.gradients(0, step), strict=True):
                    p.grad = g
                if step > 6:
                    params[0].grad[:3] = largest
                    params[2].grad[:] = largest
                optimizer.step()
        ends.append(bits(params))
    assert ends[0] == ends[1]


def freeze_warnings(rank, size, zero_variance):
    params = EMBEDDING.parameters()
    names = list(zip(("embedding.weight", "a", "b", "c"), params, strict=True))
    optimizer = onebit.OneBitAdam(
        names, freeze_step=6, zero_variance=zero_variance, process_group=the_group(size), block_size=32
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 12):
            take(EMBEDDING, rank, optimizer, params, step)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@pytest.mark.parametrize("size", [1, 2])
def test_one_warning_names_the_parameters_and_counts(size, zero_variance):
    (told,), *others = on_ranks(size, freeze_warnings, zero_variance)
    assert "embedding.weight (24 of 96)" in told
    assert "b (7 of 7)" in told
    assert "a (" not in told and "c (" not in told
    assert ("mean" in told) == (zero_variance == "floor")
    assert not any(others)


def test_no_warning_where_every_coordinate_has_a_variance(recwarn):
    case = Case(options={"freeze_step": 3})
    params = case.parameters()
    optimizer = case.build(params)
    for step in range(1, 8):
        take(case, 0, optimizer, params, step)
    assert optimizer.compressing
    assert [str(w.message) for w in recwarn] == []
