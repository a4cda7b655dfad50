"""Runs of 1-bit Adam that are recorded step by step, and the float64 simulation of the paper's Algorithm 1.

`check` starts every step of the simulation from what the ranks recorded, so that a bit which rounding may flip (|c|
within rounding of 0) changes nothing that is compared later.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests import oracle
from tests.onebit.runs import arrays, bits, take
from tests.ranks import group, run_ranks
from tests.wire import values_of

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
MISSING_LATER = ((30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0))


def on_ranks(size, work, *args):
    """Real ranks, or this process alone."""
    return run_ranks(size, work, *args) if size > 1 else [work(0, 1, *args)]


def group_or_none(size):
    return group() if size > 1 else None


def hypers(case):
    """Of every parameter, in the order of `case.shapes`."""
    known = {**HYPERS, **{k: v for k, v in case.options.items() if k in HYPERS}}
    return [{**known, **case.groups[case.group_of(p)]} for p in range(len(case.shapes))]


def oracle_hypers(case, of=oracle.Hyper, **own):
    return [of(h["lr"], *h["betas"], h["eps"], h["weight_decay"], **own) for h in hypers(case)]


def averaged(case, ranks, step):
    """float64: what every rank's gradient becomes in stage 1, the mean, in the precision of gradients."""
    means = []
    for gradients in zip(*(case.gradients(rank, step) for rank in range(ranks)), strict=True):
        like = nn.Parameter(torch.zeros(case.shapes[len(means)]))
        total = sum(like.detach().double() if g is None else g.double() for g in gradients)
        means.append((total / ranks).to(getattr(torch, case.dtype)).double())
    return means


def lr_factor(step):
    return 1 / (1 + step / 10)


def assert_close(got, expected, sizes=None, what="parameter"):
    """To CLOSE relative to the largest of `sizes`, which are the values themselves if not given."""
    for i, (a, b, size) in enumerate(zip(got, expected, sizes or expected, strict=True)):
        off, largest = np.abs(a - b).max(initial=0.0), np.abs(size).max(initial=0.0)
        assert off <= CLOSE * largest, f"{what} {i} is off by {off:.3g} where values are up to {largest:.3g}"


@dataclass(frozen=True)
class Recorded:
    """One rank's run, float64, in the order of the flat space. Flat arrays cover it: see oracle.Layout."""

    x0: list[np.ndarray]  # at the end of stage 1: parameters, moments, LAMB's average of coefficients as accumulated
    m0: list[np.ndarray]
    v0: list[np.ndarray]
    average0: np.ndarray | None
    e: list[np.ndarray] = field(default_factory=list)  # after each step of stage 2: this rank's residual
    E: list[np.ndarray] = field(default_factory=list)  # the servers', of all ranks
    m: list[np.ndarray] = field(default_factory=list)  # what was received
    x: list[list[np.ndarray]] = field(default_factory=list)
    fields: list[dict[str, np.ndarray]] = field(default_factory=list)  # of the state, alike on all ranks
    bits: list[bytes] = field(default_factory=list)  # parameters after every step of both stages


FIELDS = ("denominator", "exp_avg_sq", "ratio", "coefficient", "coefficient_average", "gamma")  # those that there are


def both_stages(rank, size, case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # other tests are of these
        params, every = case.parameters(), []
        recorded: Any = None
        optimizer = case.build(params, group_or_none(size))
        for step in range(1, case.steps + 1):
            take(case, rank, optimizer, params, step)
            every.append(bits(params))
            assert optimizer.compressing == (step > case.options["freeze_step"])
            [part] = optimizer.current.parts
            if optimizer.compressing:
                record(recorded, optimizer, part)
            elif step == case.options["freeze_step"]:
                own = [optimizer.state[p] for p in part.state.params]
                moments = [arrays([s[name] for s in own]) for name in ("exp_avg", "exp_avg_sq")]
                average = part.state.get("coefficient_average")
                start = updated_values(part.state.params, optimizer)
                recorded = Recorded(start, *moments, None if average is None else as_numpy(average), bits=every)
    return recorded


def record(recorded, optimizer, part):
    exchange, state = part.reducer.exchange, part.state
    recorded.e.append(as_numpy(exchange.residual.left_out()))
    recorded.E.append(server_residual(exchange))
    recorded.m.append(decoded(exchange))
    recorded.x.append(updated_values(state.params, optimizer))
    recorded.fields.append({name: as_numpy(state[name]) for name in FIELDS if name in state})
    for p in state.params:
        assert torch.equal(p, optimizer.state[p].get("master", p).to(p.dtype))


def updated_values(params, optimizer):
    """What the optimizer moves: fp32 parameters, or their copy."""
    return arrays([optimizer.state[p].get("master", p) for p in params])


def as_numpy(tensor):
    return tensor.detach().double().numpy().copy()


def server_residual(exchange):
    """The servers' residual, of all ranks; 0 where there are none."""
    gathered = exchange.gathered_server_residual()
    return np.zeros(exchange.layout.elements) if gathered is None else gathered.double().numpy()


def decoded(exchange):
    """m, as the replies stand for it."""
    layout = exchange.layout
    plan = oracle.Layout(tuple(layout.numel.tolist()), layout.block_size, layout.ranks, layout.chunks)
    return values_of(exchange.replies, plan)


def plan_of(case, ranks):
    """The flat space of a case. ranks: to the network, which are nodes with two levels."""
    options, numels = case.options, tuple(int(np.prod(case.shapes[p])) for p in case.order)
    shards = case.each * (1 if options.get("reply") == "direct" else ranks)
    return oracle.Layout(numels, options.get("block_size", 64), shards, options.get("chunks", 1))


class Simulation:
    """The paper's steps for a case in float64. Lists are in the order of the flat space."""

    norm = "l1"  # of scales, where a case does not say it
    gamma: Any = 1.0  # what messages and residuals have of the momentum, which is `m`
    same_denominator = 1e-6

    def __init__(self, case, ranks):
        """ranks: to the network, which are nodes with two levels."""
        self.case, self.ranks = case, ranks
        self.freeze_step = case.options["freeze_step"]
        self.corrected = case.options.get("bias_correction", True)
        self.hypers = self.ordered(oracle_hypers(case))
        self.shapes = [case.shapes[p] for p in case.order]
        self.direct = ranks if case.options.get("reply") == "direct" else 0
        self.layout = plan_of(case, ranks)

    def ordered(self, arrays):
        return [arrays[p] for p in self.case.order]

    def gradients(self, step):
        """Of every rank."""
        own = [self.ordered(self.case.node_gradients(rank, step)) for rank in range(self.ranks)]
        return [[None if g is None else g.double().numpy() for g in gradients] for gradients in own]

    def shaped(self, flat):
        return [part.reshape(s) for part, s in zip(self.layout.unflatten(flat), self.shapes, strict=True)]

    def stage_1(self):
        """Its steps, and the freeze. What parameters are then."""
        x = self.ordered(arrays(self.case.parameters()))
        state = [oracle.zeros(x), oracle.zeros(x)]
        for step in range(1, self.freeze_step + 1):
            mean = [g.numpy() for g in self.ordered(averaged(self.case, self.ranks, step))]
            x, *state = self.full_step(step, x, mean, *state)
        self.freeze(*state)
        return x

    def full_step(self, step, x, mean, m, v):
        return oracle.adamw_step(x, mean, m, v, self.hypers, step)

    def freeze(self, m, v, average=None):
        """Stage 2 begins with m, nothing left out, and d."""
        options = self.case.options
        self.d = oracle.freeze(v, self.hypers, self.freeze_step, self.corrected, options.get("zero_variance", "floor"))
        self.begin(m)

    def begin(self, m):
        self.has_variance = self.layout.flatten(self.d) > 0
        self.all_reduce = self.simulated_all_reduce()
        self.m = m

    def check_freeze(self, first):
        """What is kept for good."""
        d = self.layout.flatten(self.d) / self.gamma
        found, valid = [own["denominator"] for own in first.fields], self.layout.valid
        np.testing.assert_allclose(found[0][valid], d[valid], rtol=self.same_denominator)
        assert all(np.array_equal(later, found[0]) for later in found)

    def simulated_all_reduce(self):
        options = self.case.options
        scale, norm = options.get("scale", "block"), options.get("norm", self.norm)
        if scale == "tensor" and norm == "unbiased":
            norm = "l1"
        made = oracle.SimulatedAllReduce(
            self.layout, scale, norm, self.has_variance, self.direct, reply_bits=2 if options.get("reply") == 2 else 1
        )
        made.worker = made.worker[: self.ranks]
        return made

    def sizes(self, step):
        """Of what is added up to make c, for every rank."""
        m = [np.abs(part) for part in self.m]
        gradients = [[None if g is None else np.abs(g) for g in own] for own in self.gradients(step)]
        ys = [self.layout.flatten(oracle.local_momentum(own, m, self.hypers)) for own in gradients]
        return [self.gamma * y + np.abs(e) for y, e in zip(ys, self.all_reduce.worker, strict=True)]

    def step(self, x, step):
        x, self.m = oracle.onebit_adam_step(x, self.gradients(step), self.m, self.d, self.hypers, self.all_reduce)
        return x

    def check_followed(self, fields):
        """What there is beside parameters, after a step that was not synced."""

    def check_step(self, first, i, x, before, step):
        """x - lr (m d + wd x) with the m that was received. `before`: the simulation's m, and all that LAMB has."""
        half_place = 0.0 if self.case.options.get("master_weights", True) else HALF_PLACE[self.case.dtype]
        moved = oracle.onebit_adam_update(x, self.m, self.d, self.hypers)
        rounding = [h.lr * d * m for h, d, m in zip(self.hypers, self.d, rounding_of_mean(self), strict=True)]
        for a, old, b, still, of_mean in zip(first.x[i], x, moved, self.d, rounding, strict=True):
            allowed = 1e-6 * (np.abs(old) + np.abs(b - old)) + half_place * np.abs(b) + of_mean
            assert np.all(np.abs(a - b) <= allowed), f"parameters after step {step}"
            assert np.array_equal(a[still == 0], old[still == 0]), f"what cannot move has moved in step {step}"
        return set()


def whole_scale(messages):
    return np.concatenate([m.scale for m in messages])


def whole_c(messages):
    return np.concatenate([m.c for m in messages])


def any_flipped(got, expected, messages, size, has_variance, what):
    """`got` is `expected`, or 2 scales apart where |c| is within rounding of 0, or anything where rounding may turn
    what is large in a block. Returns whether that is so anywhere."""
    allowed, scale = ROUNDING * size, whole_scale(messages)
    off = np.where(has_variance, np.abs(got - expected), 0.0)
    unsure = (np.abs(whole_c(messages)) <= allowed) & (np.abs(off - 2 * scale) <= allowed)
    start = 0
    for message in messages:
        part = slice(start, start + message.c.size)
        unsure[part] |= message.unsure_blocks(allowed[part])
        start = part.stop
    wrong = ~((off <= allowed) | unsure)
    where = np.flatnonzero(wrong)[:4]
    assert not wrong.any(), f"{what}: {wrong.sum()} differ, {got[where]} for {expected[where]} at {where}"
    return bool((off > allowed).any())


def of_senders(case, recorded):
    """The runs of one rank a node, each with the residuals of all its node's slices."""
    nodes = [recorded[n : n + case.each] for n in range(0, len(recorded), case.each)]
    layout = plan_of(case, len(nodes))

    def whole(slices):
        if slices[0] is None:  # in stage 1
            return None
        found = np.zeros(layout.size)
        for i, e in enumerate(slices):
            parts = [layout.part(chunk, i, case.each) for chunk in range(layout.chunks)]
            found[np.concatenate([np.arange(part.start, part.stop) for part in parts])] = e
        return found

    return [replace(own[0], e=[whole(es) for es in zip(*(r.e for r in own), strict=True)]) for own in nodes]


def check(case, recorded, of=Simulation):
    """Every step of stage 2 on every rank against the simulation, re-synced before each. Returns how LAMB's ratios came
    about."""
    for own in recorded:
        assert own.bits == recorded[0].bits, "the ranks have other parameters"
        for mine, theirs in zip(own.fields, recorded[0].fields, strict=True):
            assert all(np.array_equal(mine[name], theirs[name]) for name in theirs), "the ranks have other states"
    recorded = of_senders(case, recorded)
    first, sim = recorded[0], of(case, len(recorded))
    sim.freeze(first.m0, first.v0, first.average0)
    sim.check_freeze(first)
    x, compared, reasons = first.x0, 0, set()
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        before = vars(sim).copy()
        compared += check_exchange(sim, recorded, i, x, step)
        sim.m = sim.shaped(np.where(sim.has_variance, first.m[i] / sim.gamma, 0.0))
        reasons |= sim.check_step(first, i, x, before, step)
        x = first.x[i]
        sim.all_reduce.worker = [np.where(sim.has_variance, r.e[i], 0.0) for r in recorded]
        sim.all_reduce.server = np.where(sim.has_variance, first.E[i], 0.0)
    assert compared >= 0.9 * (case.steps - sim.freeze_step), f"only {compared} steps could be compared"
    return reasons


def check_exchange(sim, recorded, i, x, step):
    """Messages and residuals. Returns whether all of it could be compared."""
    reduce, sizes = sim.all_reduce, sim.sizes(step)
    server_size = sum(sizes) / sim.ranks + np.abs(reduce.server)
    sim.step(x, step)
    flipped = False
    for rank, messages in enumerate(reduce.gathered):
        size, what = sizes[rank] + whole_scale(messages), f"what rank {rank} has left out in step {step}"
        flipped |= any_flipped(recorded[rank].e[i], reduce.worker[rank], messages, size, sim.has_variance, what)
    if flipped:  # the flipped sign is in this step's average
        return False
    return not check_reply(sim, recorded[0], i, server_size, sim.gamma * sim.layout.flatten(sim.m), step)


def follow(case, recorded, sim):
    """A simulation that is never synced, from the first step of stage 1 on, until |c| is within rounding of 0 anywhere.
    For how many steps of stage 2."""
    x = sim.stage_1()
    for i, step in enumerate(range(sim.freeze_step + 1, case.steps + 1)):
        x = sim.step(x, step)
        messages = [*sim.all_reduce.gathered, sim.all_reduce.scattered]
        if any((sim.has_variance & (np.abs(whole_c(ms)) <= ROUNDING * whole_scale(ms))).any() for ms in messages):
            return i
        for got, expected in zip(recorded.x[i], x, strict=True):
            assert np.abs(got - expected).max(initial=0.0) <= ROUNDING * np.abs(expected).max(initial=0.0)
        sim.check_followed(recorded.fields[i])
    return case.steps - sim.freeze_step


def check_reply(sim, first, i, server_size, m, step):
    """What came back, and what the servers have left out of it. Returns whether a sign of it was flipped."""
    reduce, what = sim.all_reduce, f"the momentum of step {step}"
    size = server_size + sum(map(whole_scale, reduce.gathered)) / sim.ranks
    if sim.direct:
        off = np.where(sim.has_variance, np.abs(first.m[i] - m), 0.0)
        assert np.all(off <= ROUNDING * size), what
        return False
    size = size + whole_scale(reduce.scattered)
    left_out = f"what the servers have left out in step {step}"
    flipped = any_flipped(first.E[i], reduce.server, reduce.scattered, size, sim.has_variance, left_out)
    return flipped | any_flipped(first.m[i], m, reduce.scattered, size, sim.has_variance, what)


def rounding_of_mean(sim):
    """What adding up N messages in fp32 may change of m, whose terms may cancel: N roundings of what is added."""
    size = sum(map(whole_scale, sim.all_reduce.gathered)) / sim.ranks if sim.direct else np.zeros(sim.layout.size)
    return sim.shaped(2.0**-24 * sim.ranks * size)
