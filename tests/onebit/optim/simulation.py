"""Runs of an optimizer that are recorded step by step, and the papers' Algorithm 1 of 1-bit Adam and 1-bit LAMB in
float64. zero_one_simulation.py has that of 0/1 Adam.

`check` starts every step of a simulation from what the ranks recorded, so that a bit which rounding may flip (|c|
within rounding of 0) changes nothing that is compared later.
"""

import copy
import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests import internals, oracle
from tests.collectives import steps
from tests.collectives.steps import HALF_PLACE, ROUNDING, whole_scale
from tests.onebit.runs import Case, arrays, bits, on_warnings, take
from tests.ranks import group, run_ranks
from tests.wire import values_of

CLOSE = 2e-6  # of a step without messages: relative to what is added up
RATIO = 1e-5  # relative: the largest of quotients of v_T, which comes back from d, and v, which holds (m - b1 m_prev)^2
GROUPS = (
    {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {},
    {"lr": 5e-3, "betas": (0.95, 0.999), "weight_decay": 0.02},
)
HYPERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # what Case gives, or the default
COEFFICIENTS = ("coeff_beta", "min_coeff", "max_coeff", "factor_min", "factor_max", "factor_threshold")
SHAPES = ((7, 9), (33,), (0,), (2,), (130,), (1,), (5, 0))
MISSING = ((1, 0, 1), (3, 0, 4), (4, 0, 0), (4, 1, 0), (4, 2, 0), (4, 3, 0), (17, 1, 4), (17, 0, 5), (18, 0, 0))
MISSING_LATER = ((30, 0, 1), (31, 0, 0), (31, 1, 0), (31, 2, 0), (31, 3, 0))


@dataclass(frozen=True)
class Sized(Case):
    """Gradients and parameters of the sizes given, one a parameter."""

    kind: str = "OneBitLamb"
    g_sizes: tuple[float, ...] = ()
    x_sizes: tuple[float, ...] = ()

    def parameters(self):
        sizes = self.x_sizes or [1.0] * len(self.shapes)
        return [nn.Parameter(p.detach() * size) for p, size in zip(super().parameters(), sizes, strict=True)]

    def gradients(self, rank, step):
        sizes = [size / 10.0 ** (p % 3 - 1) for p, size in enumerate(self.g_sizes)] or [1.0] * len(self.shapes)
        return [None if g is None else g * s for g, s in zip(super().gradients(rank, step), sizes, strict=True)]


# Coefficients on both limits and between; a bias of 2 elements that starts at 0; gradients from 0.01 to 100.
LAMB = Sized(
    shapes=((7, 9), (33,), (40,), (2,), (130,), (1,), (0,), (5, 0)),
    x_sizes=(1.0, 0.1, 1e-3, 0.0, 0.05, 0.2, 1.0, 1.0),
    g_sizes=(1.0, 1e-2, 1e-1, 1e2, 10.0, 1.0, 1.0, 1.0),
    steps=40,
    groups=({**GROUPS[0], "betas": (0.8, 0.9)}, {}, {**GROUPS[2], "betas": (0.95, 0.99)}),
    missing=MISSING + MISSING_LATER,
    options={"freeze_step": 8},
)


def on_ranks(size, work, *args):
    """Real ranks, or this process alone."""
    return run_ranks(size, work, *args) if size > 1 else [work(0, 1, *args)]


def group_or_none(size):
    """The group of the ranks that work, also of one alone; None in this process."""
    return group() if size > 1 or torch.distributed.is_initialized() else None


def hypers(case):
    """Hyper-parameters of every parameter, in the order of `case.shapes`."""
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


def assert_close(got, want, before, what, half_place=0.0):
    """Compare to the rounding of a step from `before`. half_place: of a dtype in which the result is stored."""
    for p, (a, b, x) in enumerate(zip(got, want, before, strict=True)):
        off, size = np.abs(a - b), np.abs(x) + np.abs(b - x) + np.abs(b)
        allowed = CLOSE * size + half_place * np.abs(b) + 1e-12
        assert np.all(off <= allowed), f"{what}: parameter {p} is off by {off.max():.3g}"


# What a run records

plan_of = functools.cache(oracle.Layout)


@dataclass(frozen=True)
class After:
    """One rank after a step, in float64 and the order of the flat space. Flat arrays cover it: see oracle.Layout."""

    step: int
    kind: str  # "full", "1 bit", "local" or "sync"
    bits: bytes  # of the parameters
    x: list[np.ndarray]  # what the optimizer moves: fp32 parameters, or their copies
    fields: dict[str, np.ndarray]  # of the flat state, as it keeps them, and of local steps
    e: np.ndarray | None  # in stage 2: this rank's residual, the servers' of all ranks, and m as replies stand for it
    E: np.ndarray | None
    m: np.ndarray | None


def record_run(rank, size, case, extra_syncs=()):
    """extra_syncs: local steps after which ranks exchange, whatever the schedule says."""
    params, found = case.parameters(), []
    with on_warnings("ignore", UserWarning):  # other tests are of these
        optimizer = case.build(params, group_or_none(size))
        for step in range(1, case.steps + 1):
            coming = getattr(optimizer, "schedule", None)
            take(case, rank, optimizer, params, step)
            if step in extra_syncs:
                optimizer.end_local_steps()
            kind = coming.kind if coming else "1 bit" if optimizer.compressing else "full"
            found.append(after(step, kind, optimizer, [params[p] for p in case.order]))
    return found


def after(step, kind, optimizer, params):
    [state], [local] = internals.states(optimizer), internals.local_steps(optimizer)
    values = [optimizer.state[p].get("master", p) for p in params]
    assert bits(params) == bits(x.to(p.dtype) for p, x in zip(params, values, strict=True))
    fields = {name: as_numpy(state[name]) for name in state.fields if name != "residual"}
    received = [None] * 3
    if optimizer.compressing:
        [exchange] = internals.exchanges(optimizer)
        received = [as_numpy(exchange.residual.left_out()), server_residual(exchange), decoded(exchange)]
        if local is not None:
            of_steps = {"weights": local.weights, "decay": local.decay, "taken": local.taken}
            fields |= {name: as_numpy(torch.as_tensor(value)) for name, value in of_steps.items()}
    return After(step, kind, bits(params), arrays(values), fields, *received)


def as_numpy(tensor):
    return tensor.detach().double().numpy().copy()


def server_residual(exchange):
    """The servers' residual, of all ranks; 0 where there are none."""
    gathered = exchange.gathered_server_residual()
    return np.zeros(exchange.layout.elements) if gathered is None else gathered.double().numpy()


def decoded(exchange):
    """m, as the replies stand for it."""
    layout = exchange.layout
    numels, sizes = (tuple(each.tolist()) for each in (layout.numel, layout.block_sizes))
    return values_of(exchange.replies, plan_of(numels, layout.block_size, layout.ranks, layout.chunks, sizes))


# The simulation of a case


class Simulation:
    """1-bit Adam. Lists are in the order of the flat space. x, m and v, and all that LAMB has, are of before a step."""

    gamma: Any = 1.0  # what messages and residuals have of the momentum, which is `m`
    gammas: Any = None  # the same, a number a parameter
    same_denominator = 1e-6
    hyper = oracle.Hyper
    longest, trusted = 2.0, 0.0  # steps with update_limit="auto", in units of what is usual

    def __init__(self, case, ranks):
        """ranks: to the network, which are nodes with two levels."""
        self.case, self.ranks = case, ranks
        self.freeze_step = case.options.get("freeze_step", 0)
        self.corrected = case.options.get("bias_correction", True)
        own = {k: v for k, v in case.options.items() if k in COEFFICIENTS}
        of = [self.hyper(h["lr"], *h["betas"], h["eps"], h["weight_decay"], **own) for h in hypers(case)]
        self.hypers = self.ordered(of)
        self.shapes = [case.shapes[p] for p in case.order]
        self.messages = messages_of(case, ranks)
        self.layout = self.messages.plan(ranks * case.each)
        self.x = self.ordered(arrays(case.parameters()))
        self.m, self.v, self.average = oracle.zeros(self.x), oracle.zeros(self.x), np.zeros(len(self.x))
        self.kept, self.reasons = {}, set()  # the recorded d; see check
        self.limit = case.options.get("update_limit")
        self.usual = self.coming_usual = np.zeros(len(self.x))  # R_p: as it was recorded, and after the coming step

    def ordered(self, arrays):
        return [arrays[p] for p in self.case.order]

    def gradients(self, step):
        """Every rank's gradients."""
        own = [self.ordered(self.case.node_gradients(rank, step)) for rank in range(self.ranks)]
        return [[None if g is None else g.double().numpy() for g in gradients] for gradients in own]

    def shaped(self, flat):
        return [part.reshape(s) for part, s in zip(self.layout.unflatten(flat), self.shapes, strict=True)]

    def flat(self, values):
        """Fill the flat space with one number a parameter."""
        return self.layout.flatten([np.full(shape, value) for shape, value in zip(self.shapes, values, strict=True)])

    @property
    def live(self):
        """What takes part."""
        return self.layout.flatten(self.d) > 0

    @property
    def half_place(self):
        """Half a place of a parameter that has no copy in fp32."""
        return 0.0 if self.case.options.get("master_weights", True) else HALF_PLACE[self.case.dtype]

    def full_step(self, step, mean):
        return oracle.adamw_step(self.x, mean, self.m, self.v, self.hypers, step, self.corrected)

    def check_full(self, now, step):
        """A step of stage 1: x, m and v. Returns what else the step computes."""
        what, ranks = f"after step {step}", self.ranks * self.case.each
        mean = [g.numpy() for g in self.ordered(averaged(self.case, ranks, step))]
        x, m, v, *others = self.full_step(step, mean)
        assert_close(now.x, x, self.x, f"x {what}", self.half_place)
        own = zip(*(self.ordered(self.case.gradients(rank, step)) for rank in range(ranks)), strict=True)
        sizes = [sum(0.0 if g is None else g.double().abs().numpy() for g in of) / ranks for of in own]
        added = [(1 - h.beta1) * size for h, size in zip(self.hypers, sizes, strict=True)]
        assert_close(self.shaped(now.fields["exp_avg"]), m, added, f"m {what}")
        added = [(1 - h.beta2) * size**2 for h, size in zip(self.hypers, sizes, strict=True)]
        assert_close(self.shaped(now.fields["exp_avg_sq"]), v, added, f"v {what}")
        return others

    def freeze(self):
        """Stage 2 begins with m, nothing left out, and d."""
        zero_variance = self.case.options.get("zero_variance", "floor")
        self.d = oracle.freeze(self.v, self.hypers, self.freeze_step, self.corrected, zero_variance)
        self.begin()

    def begin(self):
        self.all_reduce = self.messages.simulation(self.ranks * self.case.each)
        self.all_reduce.worker = self.all_reduce.worker[: self.ranks]
        self.all_reduce.counted = self.live

    def set_to(self, now):
        """Go to where the ranks are after a step."""
        first = now[0]
        self.x = first.x
        self.remember_usual(first)
        if first.step <= self.freeze_step:
            self.m, self.v = (self.shaped(first.fields[name]) for name in ("exp_avg", "exp_avg_sq"))
            self.average = first.fields.get("coefficient_average")
        if first.step == self.freeze_step:
            self.freeze()
        elif first.step > self.freeze_step:
            self.m = self.received(first)
            self.all_reduce.worker = [np.where(self.live, own.e, 0.0) for own in now]
            self.all_reduce.server = np.where(self.live, first.E, 0.0)

    def remember_usual(self, now):
        self.usual = self.coming_usual = now.fields.get("usual_step", self.usual)

    def received(self, now):
        return self.shaped(np.where(self.live, now.m / self.gamma, 0.0))

    def sizes(self, step):
        """The sizes of what is added up to make c, for every rank."""
        m = [np.abs(part) for part in self.m]
        gradients = [[None if g is None else np.abs(g) for g in own] for own in self.gradients(step)]
        ys = [self.layout.flatten(oracle.local_momentum(own, m, self.hypers)) for own in gradients]
        return [self.gamma * y + np.abs(e) for y, e in zip(ys, self.all_reduce.worker, strict=True)]

    def step(self, step):
        """m and residuals: the update is by the m that was received, see `check_moved`."""
        self.m = oracle.averaged_momentum(self.gradients(step), self.m, self.hypers, self.all_reduce, self.gammas)

    def check_step(self, now, step):
        """Check a step. Returns whether what ranks have exchanged could be compared; None if they have exchanged
        nothing."""
        if step <= self.freeze_step:
            self.check_full(now[0], step)
            return None
        self.check_frozen(now[0].fields)
        stepped, sizes, server = copy.copy(self), self.sizes(step), np.abs(self.all_reduce.server)
        stepped.step(step)
        compared = stepped.check_exchange(now, sizes, server)
        self.check_moved(now[0])
        return compared

    def check_frozen(self, fields):
        """What is kept for good."""
        valid, d, found = self.layout.valid, self.layout.flatten(self.d) / self.gamma, fields["denominator"]
        np.testing.assert_allclose(found[valid], d[valid], rtol=self.same_denominator)
        assert np.array_equal(found, self.kept.setdefault("denominator", found))

    def check_exchange(self, now, sizes, server):
        """Messages and residuals, of which sizes and server are those before. Whether all of it could be compared."""
        first, found = now[0], steps.Exchanged([own.e for own in now], now[0].E, now[0].m)
        m, size = self.gamma * self.layout.flatten(self.m), sum(sizes) / self.ranks + server
        return bool(found.check(self.all_reduce, m, sizes, size, self.live, first.step))

    def check_moved(self, now):
        """x - lr (m d + wd x) with the m that was received, whose terms may cancel: N roundings of what is added."""
        reduce, received = self.all_reduce, self.received(now)
        added = sum(map(whole_scale, reduce.gathered)) if reduce.direct else np.zeros(self.layout.size)
        moved = oracle.onebit_adam_update(self.x, self.shortened(received, self.d), self.d, self.hypers)
        parts = zip(self.x, moved, self.hypers, self.d, self.shaped(2.0**-24 * added), strict=True)
        rounding = [1e-6 * np.abs(new - x) + self.half_place * np.abs(new) + h.lr * d * a for x, new, h, d, a in parts]
        self.assert_moved(now, moved, rounding)

    def shortened(self, m, d, weights=None, sizes=None):
        """f m, so that RMS(f m d) is at most the limit over every parameter, or what is trusted. sizes: of m, where the
        step is not by m as messages have it. weights: what m is multiplied by in a step."""
        if self.limit is None:
            return m
        by_messages = sizes is None
        if by_messages:
            sizes = [np.abs(part) for part in m]
            if self.all_reduce.direct:
                gathered = self.all_reduce.gathered
                sizes = self.shaped(sum(map(whole_scale, gathered)) / len(gathered) / self.gamma)
        parts = zip(m, sizes, d, weights or [1.0] * len(m), strict=True)
        rms = np.array([w * np.sqrt(np.mean((own * d_p) ** 2)) if p.size else 0.0 for p, own, d_p, w in parts])
        if by_messages:
            smaller = np.where((self.usual < 0) & (rms > 0), np.minimum(-self.usual, rms), self.usual)
            self.coming_usual = np.where(self.usual == 0, rms, smaller)
        limit, trusted = self.limits()
        long = rms > trusted
        self.reasons |= {"shortened"} if long.any() else set()
        self.reasons |= {"trusted"} if np.any((rms > limit) & ~long) else set()
        factors = np.where(long, limit / np.where(long, rms, 1.0), 1.0)
        return [f * part for f, part in zip(factors, m, strict=True)]

    def limits(self):
        """The limits of the length of a step, and of one that is left as it is."""
        if self.limit != "auto":
            return self.limit, self.limit
        limit = np.maximum(0.25, self.longest * np.abs(self.coming_usual))
        return limit, np.maximum(limit, self.trusted * np.abs(self.coming_usual))

    def check_usual(self, now):
        if self.limit == "auto" and "usual_step" in now.fields:
            what = f"what is usual after step {now.step}"
            np.testing.assert_allclose(now.fields["usual_step"], self.coming_usual, rtol=2 * RATIO, err_msg=what)

    def assert_moved(self, now, moved, rounding):
        """rounding: of what is added to x."""
        for got, old, new, d, own in zip(now.x, self.x, moved, self.d, rounding, strict=True):
            assert np.all(np.abs(got - new) <= 1e-6 * np.abs(old) + own), f"parameters after step {now.step}"
            assert np.array_equal(got[d == 0], old[d == 0]), f"what cannot move has moved in step {now.step}"


def messages_of(case, ranks):
    """What is sent in a case. ranks: to the network."""
    names = ("block_size", "chunks", "scale", "norm", "reply")
    own = {"block_size": 64, "norm": "auto", **{k: v for k, v in case.options.items() if k in names}}
    if own["norm"] == "auto":
        own["norm"] = "l1" if own.get("scale") == "tensor" else "unbiased"
    shapes = [case.shapes[p] for p in case.order]
    numels = tuple(int(np.prod(shape)) for shape in shapes)
    sizes = tuple(oracle.size_of_blocks(shape, own["block_size"]) for shape in shapes)
    return steps.Case(numels, **own, nodes=ranks if case.each > 1 else 0, block_sizes=sizes)


class LambSimulation(Simulation):
    """1-bit LAMB. Messages and residuals hold gamma times the momentum, `m` the momentum."""

    same_denominator = 2e-6
    hyper = oracle.LambHyper
    longest, trusted = 1.5, 4.0

    def full_step(self, step, mean):
        return oracle.lamb_step(self.x, mean, self.m, self.v, self.average, self.hypers, step, self.corrected)

    def check_full(self, now, step):
        average, coefficients = super().check_full(now, step)
        for name, want in (("coefficient_average", average), ("coefficient", coefficients)):
            got = now.fields[name][self.holds]
            np.testing.assert_allclose(got, want[self.holds], rtol=1e-5, err_msg=f"{name} after step {step}")
        least, most = self.hypers[0].min_coeff, self.hypers[0].max_coeff
        self.reasons |= {"least" if c == least else "most" if c == most else "between" for c in coefficients}

    def freeze(self):
        own = self.case.options
        self.frozen = oracle.freeze_lamb(
            self.m, self.v, self.average, self.hypers, self.freeze_step, scale=own.get("scale", "block"),
            bias_correction=self.corrected, zero_variance=own.get("zero_variance", "floor"),
        )  # fmt: skip
        self.d, self.ratio = self.frozen.d, own.get("ratio", "variance")
        self.begin()
        self.v, self.r = self.frozen.v, np.ones(len(self.m))
        self.gammas = self.frozen.gamma
        self.gamma = np.where(self.layout.valid, self.flat(self.gammas), 1.0)

    @property
    def holds(self):
        """Which parameters have an element."""
        return [part.size > 0 for part in self.x]

    def check_frozen(self, fields):
        super().check_frozen(fields)
        average = fields["coefficient_average"][self.holds]
        np.testing.assert_allclose(average, self.frozen.c_avg[self.holds], rtol=1e-6)
        assert ("gamma" in fields) == (self.case.options.get("scale", "block") == "tensor")
        np.testing.assert_allclose(fields.get("gamma", 1.0), self.frozen.gamma, rtol=1e-6)

    def set_to(self, now):
        super().set_to(now)
        if now[0].step > self.freeze_step:
            self.v, self.r = self.shaped(now[0].fields["exp_avg_sq"]), now[0].fields["ratio"]

    def check_moved(self, now):
        """Lines 15 to 21 from what was recorded before, with the m that was received."""
        received = self.received(now)
        moved, fresh, ratio = oracle.onebit_lamb_update(
            self.x, received, self.m, self.v, self.r, self.frozen, self.hypers, self.ratio
        )
        if self.limit is not None:
            c = ratio * self.frozen.c_avg
            scaled = [
                oracle.Hyper(h.lr * c_p, weight_decay=h.weight_decay) for h, c_p in zip(self.hypers, c, strict=True)
            ]
            shortened = self.shortened(received, self.d, list(ratio))
            moved = oracle.onebit_adam_update(self.x, shortened, self.d, scaled)
        recorded = self.shaped(now.fields["exp_avg_sq"])
        parts = zip(recorded, fresh, self.v, received, self.m, self.hypers, self.frozen.v, strict=True)
        for got, want, old, m, m_previous, h, frozen in parts:
            size = h.beta2 * old + (1 - h.beta2) * ((np.abs(m) + h.beta1 * np.abs(m_previous)) / (1 - h.beta1)) ** 2
            some = frozen > 0
            assert np.all(np.abs(got - want)[some] <= ROUNDING * size[some]), f"fresh variance after step {now.step}"
        for name, expected in (("ratio", ratio), ("coefficient", ratio * self.frozen.c_avg)):
            got, want = now.fields[name][self.holds], expected[self.holds]
            np.testing.assert_allclose(got, want, rtol=RATIO, err_msg=f"{name} after step {now.step}")
        self.assert_moved(now, moved, [2 * RATIO * np.abs(new - x) for x, new in zip(self.x, moved, strict=True)])
        pairs = zip(self.frozen.v, fresh, self.hypers, strict=True)
        unclipped = [oracle.variance_ratio(*own, self.ratio) for own in pairs]
        self.reasons |= set(map(reason_of_ratio, unclipped, self.r, ratio, self.hypers, self.holds))


def reason_of_ratio(unclipped, before, after, h, holds):
    """Which of its bounds a ratio comes from, so that a test can check that it covers all of them."""
    if not holds:
        return "none"
    if after in (h.factor_min, h.factor_max):
        return "limit"
    if after == unclipped:
        return "the largest"
    return "as far up as it may" if after > before else "as far down as it may"


# What is compared


def of_senders(case, recorded, sim):
    """The runs of one rank a node, each with the residuals of all its node's slices."""
    nodes = [recorded[n : n + case.each] for n in range(0, len(recorded), case.each)]

    def whole(now):
        if now[0].e is None:
            return now[0]
        states = [{"residual": own.e} for own in now]
        return replace(now[0], e=steps.worker_residual(sim.messages, len(recorded), *states))

    return [[whole(now) for now in zip(*node, strict=True)] for node in nodes]


def assert_alike(case, recorded):
    """The ranks that are to agree, which between syncs are those of a node: parameters and states, bit for bit."""
    for now in zip(*recorded, strict=True):
        alike = case.each if now[0].fields.get("taken") else len(now)
        for rank, own in enumerate(now):
            other, what = now[rank // alike * alike], f"rank {rank} after step {own.step}"
            assert own.bits == other.bits and own.kind == other.kind, what
            assert all(np.array_equal(own.fields[name], other.fields[name]) for name in other.fields), what


def check(case, recorded, of=Simulation, earlier=()):
    """Every step on every rank against the simulation, re-synced before each. Returns how steps, LAMB's coefficients
    and ratios came about.
    earlier: what ranks had recorded before."""
    assert_alike(case, recorded)
    sim = of(case, len(recorded) // case.each)
    compared = []
    for now in earlier:
        sim.set_to(now)
    for now in zip(*of_senders(case, recorded, sim), strict=True):
        compared.append(sim.check_step(now, now[0].step))
        sim.check_usual(now[0])
        sim.set_to(now)
    exchanged = [own for own in compared if own is not None]
    assert sum(exchanged) >= 0.9 * len(exchanged) > 0, f"only {sum(exchanged)} of {len(exchanged)} could be compared"
    return sim.reasons
