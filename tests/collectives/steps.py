"""Steps of a compressed all-reduce: what goes in, what a rank records, and the float64 simulation they must equal.

The simulation starts every step from the residuals that the ranks recorded, so that a bit which rounding may turn
(|c| within rounding of 0) changes nothing that is compared later. Inputs follow from (case, rank, step) alone: the
test makes them again on its side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from onebit.collectives import CompressedAllReduce
from tests import oracle
from tests.onebit import runs

Array = np.ndarray
ROUNDING = 1e-5  # relative to the size of what is added up: fp32, and sums over a block
HALF_PLACE = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True)
class Case:
    numels: tuple[int, ...]
    block_size: int = 96  # so that some blocks are short
    chunks: int = 1
    scale: str = "block"
    norm: str = "l1"
    dtype: str = "float32"
    steps: int = 5
    seed: int = 0
    bad: tuple[tuple[int, int, float], ...] = ()  # (step, rank, value): one element of the last tensor
    reply: Any = 1
    nodes: int = 0  # of equally many ranks, which follow one another; 0 for one level
    bits: int = 1  # of an element
    block_sizes: tuple[int, ...] = ()  # of each tensor, where they differ

    def senders(self, ranks: int) -> int:
        """Ranks to the network: nodes, or every rank."""
        return self.nodes or ranks

    def plan(self, ranks: int) -> oracle.Layout:
        senders = self.senders(ranks)
        shards = ranks // senders * (1 if self.reply == "direct" else senders)
        return oracle.Layout(self.numels, self.block_size, shards, self.chunks, self.block_sizes)

    def simulation(self, ranks: int) -> oracle.SimulatedAllReduce:
        """The simulation of the senders."""
        direct = self.senders(ranks) if self.reply == "direct" else 0
        return oracle.SimulatedAllReduce(self.plan(ranks), self.scale, self.norm, direct=direct, bits=self.bits)

    def all_reduce(self, group: Any, device: str = "cpu", node_group: Any = None) -> CompressedAllReduce:
        options = {name: getattr(self, name) for name in ("scale", "norm", "reply", "block_size", "chunks", "bits")}
        groups = {"process_group": group, "node_group": node_group}
        return CompressedAllReduce(list(self.numels), device=device, **options, **groups)

    def inputs(self, rank: int, step: int) -> list[Tensor]:
        """The gradients of a run."""
        shapes = tuple((numel,) for numel in self.numels)
        return runs.Case(shapes=shapes, dtype=self.dtype, seed=self.seed, bad=self.bad).gradients(rank, step)


@dataclass(frozen=True)
class Recorded:
    """One rank's run: the state before each step and after the last, the tensors after each step."""

    states: list[dict[str, Any]]
    results: list[list[Tensor]]

    @property
    def result_bytes(self) -> bytes:
        return runs.bits(tensor for tensors in self.results for tensor in tensors)


def state_of(all_reduce: CompressedAllReduce) -> dict[str, Any]:
    """A copy of this rank's residuals, and how much it has sent."""
    state: dict[str, Any] = {"wire_bytes": all_reduce.wire_bytes}
    for name, residual in all_reduce.prepare().residuals.items():
        state[name] = residual.value.float().cpu().clone()
        if residual.scale is not None:
            state[f"{name}_scale"] = residual.scale.cpu().clone()
    return state


def values(tensors: list[Tensor]) -> list[np.ndarray]:
    return [t.double().numpy() for t in tensors]


def record(case: Case, rank: int, group: Any, first: int = 0, all_reduce: Any = None, device: str = "cpu") -> Recorded:
    """Run a case's steps, from step `first`, on this rank."""
    all_reduce = all_reduce or case.all_reduce(group, device)
    all_reduce.prepare()
    states, results = [state_of(all_reduce)], []
    for step in range(first, case.steps):
        tensors = [x.to(device) for x in case.inputs(rank, step)]
        all_reduce(tensors if len(tensors) > 1 else tensors[0])
        results.append([t.cpu().clone() for t in tensors])
        states.append(state_of(all_reduce))
    return Recorded(states, results)


def node_mean(inputs: list[list[Tensor]]) -> list[Tensor]:
    """The mean over the ranks of a node, rounded as tensors of their dtype are; of one rank what it has."""
    first, *others = ([x.mul(1 / len(inputs)) for x in tensors] for tensors in inputs)
    for tensors in others:
        first = [a + b for a, b in zip(first, tensors, strict=True)]
    return first


def worker_residual(case: Case, ranks: int, *states: dict[str, Any]) -> np.ndarray:
    """e of one sender over the whole space, in float64, 0 in padding. A node's ranks hold its slices."""
    plan = case.plan(ranks)
    parts = [[plan.part(chunk, i, len(states)) for chunk in range(case.chunks)] for i in range(len(states))]
    return _put_together(plan, "residual", states, parts)


def server_residual(case: Case, ranks: int, states: list[dict[str, Any]]) -> np.ndarray:
    """E over the whole space, built from the shards of all ranks; 0 where there are no servers."""
    plan, senders = case.plan(ranks), case.senders(ranks)
    if case.reply == "direct":
        assert not any("server_residual" in state for state in states)
        return np.zeros(plan.size)
    states = [states[n * (ranks // senders) + g] for g in range(ranks // senders) for n in range(senders)]
    parts = [[plan.shard(chunk, rank) for chunk in range(case.chunks)] for rank in range(ranks)]
    return _put_together(plan, "server_residual", states, parts)


def _put_together(plan: oracle.Layout, name: str, states: Sequence[Any], parts: list[list[slice]]) -> np.ndarray:
    """What ranks keep of some parts each; 0 in padding. With a tensor scale there is one a shard."""
    whole = np.zeros(plan.size)
    for state, own in zip(states, parts, strict=True):
        value = np.asarray(state[name], np.float64)
        if f"{name}_scale" in state:
            shards = [s for s in plan.shards() if any(part.start <= s.start < part.stop for part in own)]
            scale = np.repeat(np.asarray(state[f"{name}_scale"], np.float64), [s.stop - s.start for s in shards])
            value = value - oracle.sigma(value) * scale
        whole[np.concatenate([np.arange(part.start, part.stop) for part in own])] = value
    return np.where(plan.valid, whole, 0.0)


def check(case: Case, recorded: list[Recorded]) -> None:
    """Every step of every rank against the simulation, and every rank's result against rank 0's."""
    ranks, plan = len(recorded), case.plan(len(recorded))
    senders = case.senders(ranks)
    each = ranks // senders
    assert all(r.result_bytes == recorded[0].result_bytes for r in recorded), "the ranks got other results"
    simulation = case.simulation(ranks)
    nodes = [slice(n * each, (n + 1) * each) for n in range(senders)]
    compared = 0
    for t, result in enumerate(recorded[0].results):
        own = [case.inputs(rank, t) for rank in range(ranks)]
        ys = [plan.flatten(values(node_mean(own[node]))) for node in nodes]
        parts = [np.abs(plan.flatten(values(tensors))) for tensors in own]
        before, after = ([r.states[s] for r in recorded] for s in (t, t + 1))
        simulation.worker = [worker_residual(case, ranks, *before[node]) for node in nodes]
        simulation.server = server_residual(case, ranks, before)
        sizes = [np.mean(parts[node], axis=0) + np.abs(e) for node, e in zip(nodes, simulation.worker, strict=True)]
        server = np.abs(simulation.server)
        expected = simulation(ys)
        found = Exchanged(
            [worker_residual(case, ranks, *after[node]) for node in nodes],
            server_residual(case, ranks, after),
            plan.flatten(values(result)),
        )
        rounded = np.abs(expected) * HALF_PLACE[case.dtype] / ROUNDING
        compared += found.check(simulation, expected, sizes, server, plan.valid, t, rounded) is not None
    assert compared >= 0.9 * len(recorded[0].results), f"only {compared} steps could be compared"


@dataclass(frozen=True)
class Exchanged:
    """What an exchange has left: what each sender and the servers have left out, and what all have received."""

    workers: list[Array]
    server: Array
    received: Array

    def check(
        self, simulation: oracle.SimulatedAllReduce, expected: Array, sizes: list[Array], size: Array, live: Array,
        step: int, rounded: Any = 0.0,
    ) -> bool | None:  # fmt: skip
        """Return whether no bit was flipped; None if one of a sender was, whose sign is in the average, which can't be
        compared then. sizes: of what senders have added up. size: of what is added to the mean of messages. rounded:
        that of what is received."""
        flipped = False
        for rank, (e, messages) in enumerate(zip(self.workers, simulation.gathered, strict=True)):
            own, what = sizes[rank] + reach(messages), f"what sender {rank} has left out in step {step}"
            flipped |= any_flipped(e, simulation.worker[rank], messages, own, live, what)
        if flipped:
            return None
        size, what = size + sum(map(reach, simulation.gathered)) / len(self.workers), f"the result of step {step}"
        if simulation.direct:
            off = np.where(live, np.abs(self.received - expected), 0.0)
            assert np.all(off <= ROUNDING * (size + rounded)), what
            return True
        replies, left_out = simulation.scattered, f"what the servers have left out in step {step}"
        size = size + reach(replies)
        flipped = any_flipped(self.server, simulation.server, replies, size, live, left_out)
        return not any_flipped(self.received, expected, replies, size + rounded, live, what) | flipped


def whole_scale(messages: list[oracle.Message]) -> Array:
    return np.concatenate([m.scale for m in messages])


def reach(messages: list[oracle.Message]) -> Array:
    """The size of what each element decodes to, or its scale."""
    return np.concatenate([np.maximum(np.abs(m.decoded), m.scale) for m in messages])


def cut(values: Array, messages: list[oracle.Message]) -> list[Array]:
    """Values of the elements of each message."""
    return np.split(values, np.cumsum([m.c.size for m in messages])[:-1])


def any_flipped(
    got: Array, expected: Array, messages: list[oracle.Message], size: Array, live: Array, what: str
) -> bool:
    """`got` is `expected`, or as far apart as the next code, or the other sign, where rounding may choose it. Returns
    whether that is so anywhere. A residual of codes may round to the next number of 16 bits."""
    allowed, codes = ROUNDING * size, isinstance(messages[0], oracle.Codes)
    sure = np.concatenate([m.sure(ROUNDING * of) for m, of in zip(messages, cut(size, messages), strict=True)])
    off, apart = np.where(live, np.abs(got - expected), 0.0), (1 if codes else 2) * whole_scale(messages)
    allowed = allowed + (np.abs(expected) * 2.0**-7 if codes and what.startswith("what") else 0.0)
    unsure = ~sure & (np.abs(off - apart) <= allowed)
    wrong = ~((off <= allowed) | unsure)
    where = np.flatnonzero(wrong)[:4]
    assert not wrong.any(), f"{what}: {wrong.sum()} differ, {got[where]} for {expected[where]} at {where}"
    return bool((off > allowed).any())
