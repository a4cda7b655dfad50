"""Runs that go on with other ranks, recorded before and after `onebit.reform` and over ten more steps."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import onebit
from tests import internals, oracle
from tests.collectives.work import logged
from tests.onebit.checkpoint.states import other_parameters
from tests.onebit.optim.simulation import After, after, as_numpy
from tests.onebit.runs import Case, on_warnings, take
from tests.ranks import MOST, group, run_ranks

MORE = 10  # steps after a reform
RATE = 0.75  # what learning rates are multiplied by before
Arrays = list[np.ndarray]


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HAS_IPV6 = _has_ipv6()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="needs IPv6")


@dataclass(frozen=True)
class Move:
    """Some of the pool's ranks train, then others. Those that leave are lost, or in good order."""

    case: Case
    there: Sequence[int]
    here: Sequence[int]
    at: int  # the step after which ranks change
    in_good_order: bool = False
    each: int = 1  # ranks a node, after it
    saves: int = 0  # the step after which ranks synchronize, as for a save

    @property
    def now(self) -> Case:
        return self.case.but(each=self.each)

    @property
    def gone(self) -> list[int]:
        """The places in the old group of ranks that leave."""
        return [place for place, rank in enumerate(self.there) if rank not in self.here]

    @property
    def leaving(self) -> list[int]:
        return self.gone if self.in_good_order else []

    @property
    def kept(self) -> list[list[int]]:
        """The places of those whose residuals each rank goes on with."""
        kept = {rank: [place] for place, rank in enumerate(self.there) if rank in self.here}
        for place, heir in zip(self.leaving, itertools.cycle(kept.values()), strict=False):
            heir.append(place)
        return [kept.get(rank, []) for rank in self.here]

    @property
    def senders(self) -> tuple[int, int]:
        return len(self.there) // self.case.each, len(self.here) // self.each


@dataclass
class Moved:
    """What a rank saw."""

    frozen: After | None = None  # where stage 1 had come to, if it was over
    before: After | None = None
    momentum: np.ndarray | None = None  # then, of all parameters, in stage 2
    later: list[After] = field(default_factory=list)  # after the reform, and after each step from there
    rates: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def moved(move: Move) -> tuple[list[Moved], list[Moved]]:
    """Run a move. Returns what the ranks before had, and those after."""
    first = all(ranks == range(len(ranks)) for ranks in (move.there, move.here))
    found = run_ranks(max(len(move.there), len(move.here)) if first else MOST, work, move)
    return [found[rank] for rank in move.there], [found[rank] for rank in move.here]


_groups: dict[Sequence[int], Any] = {}


def group_of(ranks: Sequence[int], rank: int) -> Any:
    """The first ranks of the pool; of others a group that all of the pool make."""
    if ranks == range(len(ranks)):
        return group(len(ranks)) if rank in ranks else None
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks))
    return _groups[ranks]


def work(rank: int, size: int, move: Move) -> Moved:
    with on_warnings("ignore", UserWarning):  # of the variance: other tests are of these
        return _moved(rank, move)


def _moved(rank: int, move: Move) -> Moved:
    case, found = move.case, Moved()
    was, is_there = rank in move.there, rank in move.here
    before, now = group_of(move.there, rank), group_of(move.here, rank)
    if not was and not is_there:
        return found
    params = case.parameters() if was else other_parameters(case)
    optimizer = (case if was else move.now).build(params, before if was else now)
    ordered = [params[p] for p in case.order]
    if was:
        for step in range(1, move.at + 1):
            take(case, move.there.index(rank), optimizer, params, step)
            if step == move.saves:
                optimizer.synchronize()
            if step == case.options.get("freeze_step") and step < move.at:
                found.frozen = after(step, "", optimizer, ordered)
        for g in optimizer.param_groups:
            g["lr"] *= RATE  # as a schedule leaves it
        found.before = after(move.at, "", optimizer, ordered)
        optimizer.catch_up()
        for m in internals.last_momentum(optimizer):
            found.momentum = np.concatenate([as_numpy(each).ravel() for each in m])
    if is_there or move.leaving:
        ranks = move.now.ranks(now)["process_group"] if is_there else None
        with logged("%(levelname)s %(message)s") as found.said:
            onebit.reform(optimizer, ranks, leaving=move.leaving)
    if not is_there:
        return found
    found.rates = [g["lr"] for g in optimizer.param_groups]
    found.counts = internals.stages(optimizer).counts.tolist()
    found.later = [after(move.at, "", optimizer, ordered)]
    for step in range(move.at + 1, move.at + 1 + MORE):
        coming = getattr(optimizer, "schedule", None)
        take(case, move.here.index(rank), optimizer, params, step)
        kind = coming.kind if coming else "1 bit" if optimizer.compressing else "full"
        found.later.append(after(step, kind, optimizer, ordered))
    return found


def plan(case: Case, ranks: int) -> oracle.Layout:
    """How a case with reply=1, "auto" or "direct" is cut for so many ranks."""
    senders, options = 1 if is_direct(case, ranks) else ranks // case.each, case.options
    numels = tuple(int(np.prod(case.shapes[p])) for p in case.order)
    return oracle.Layout(numels, options.get("block_size", 64), case.each * senders, options.get("chunks", 1))


def is_direct(case: Case, ranks: int) -> bool:
    reply = case.options.get("reply", 1)
    return reply == "direct" or (reply == "auto" and ranks // case.each == 2)


def flat(layout: oracle.Layout, values: np.ndarray) -> np.ndarray:
    """Keep the elements of parameters alone, which lie the same in every layout."""
    return np.concatenate(layout.unflatten(values))


def owners(layout: oracle.Layout, case: Case) -> np.ndarray:
    """Whose shard each element is in, by place: node * ranks a node + slice."""
    found, nodes = np.full(layout.size, -1), layout.ranks // case.each
    for chunk in range(layout.chunks):
        for shard in range(layout.ranks):
            found[layout.shard(chunk, shard)] = shard % nodes * case.each + shard // nodes
    return flat(layout, found)


def own_e(layout: oracle.Layout, case: Case, rank: int, now: After) -> np.ndarray:
    """What a rank has left out of its slice; 0 in the others."""
    whole, at = np.zeros(layout.size), 0
    assert now.e is not None
    for chunk in range(layout.chunks):
        part = layout.part(chunk, rank % case.each, case.each)
        whole[part], at = now.e[at : at + part.stop - part.start], at + part.stop - part.start
    return flat(layout, whole)


def expected(move: Move, old: Sequence[Moved]) -> Arrays:
    """The oracle's residuals after the reform, by rank."""
    was = plan(move.case, len(move.there))
    before = [each.before for each in old if each.before is not None]
    workers = [own_e(was, move.case, rank, own) for rank, own in enumerate(before)]
    server: Any = before[0].E
    found_e = oracle.reformed(workers, flat(was, server), owners(was, move.case), move.senders, move.kept)
    if move.each == 1:
        return found_e
    whole = [sum(found_e[n : n + move.each]) for n in range(0, len(move.here), move.each)]
    layout = plan(move.now, len(move.here))
    slices = [np.zeros(layout.size) for _ in range(move.each)]
    for chunk in range(layout.chunks):
        for index, own in enumerate(slices):
            own[layout.part(chunk, index, move.each)] = 1
    return [whole[rank // move.each] * flat(layout, slices[rank % move.each]) for rank in range(len(move.here))]
