"""What a whole run takes: its steps of each kind, as the schedule of its optimizer has them, times what each takes.

1-bit Adam, 1-bit LAMB    `warmup` of the steps in stage 1, the others with 1 bit
0/1 Adam                  full-precision steps ever farther apart, the others with 1 bit
with local steps          after a fifth of the run no more full-precision steps, and after as many steps as a
                          third of that exchanges every second step, then every fourth, up to local_step_clipper
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from onebit.cli.plan.cluster import Cluster
from onebit.cli.plan.model import (
    WORTH,
    Model,
    local_step,
    sent_compressed,
    sent_uncompressed,
    stage_1,
    stage_2,
    uncompressed,
)
from onebit.optim.schedule import SyncSchedule, VarianceSchedule

UNCOMPRESSED = {"fp32": 4, "fp16": 2}  # bytes of a gradient's element
FREEZE, SCALER = 1 / 5, 1 / 15  # of the steps: var_freeze_step and local_step_scaler of a run with local ones


@dataclass(frozen=True)
class Run:
    """Steps of each kind, seconds, and the bytes that a node sends to others."""

    uncompressed: int
    compressed: int
    local: int
    seconds: float
    sent: float


class First(NamedTuple):
    """Which run ends first, and how many times the best uncompressed one's speed the best compressed one has."""

    name: str
    factor: float


def first(found: Mapping[str, Run], local: bool) -> First:
    """Find the fastest of runs by method, those with local steps among them or not. A factor below WORTH counts as
    none."""
    seconds = {name: run.seconds for name, run in found.items() if local or not run.local}
    plain = min(UNCOMPRESSED, key=lambda name: seconds[name])
    best = min(seconds.keys() - UNCOMPRESSED.keys(), key=lambda name: (seconds[name], name))
    factor = seconds[plain] / seconds[best]
    return First(best if factor >= WORTH else plain, factor)


def runs(model: Model, cluster: Cluster) -> dict[str, Run]:
    """Predict runs by the optimizer, or the type of an uncompressed all-reduce."""
    found = {name: _run(model, cluster, model.steps, 0, 0, itemsize) for name, itemsize in UNCOMPRESSED.items()}
    warmup = round(model.warmup * model.steps)
    name = "1-bit Adam" if model.optimizer == "adam" else "1-bit LAMB"
    found[name] = _run(model, cluster, warmup, model.steps - warmup, 0)
    if model.optimizer == "adam":
        zero_one = replace(model, optimizer="zero_one")
        full = _full_steps(model.steps, model.var_update_scaler, None)
        found["0/1 Adam"] = _run(zero_one, cluster, full, model.steps - full, 0)
        last = max(1, round(FREEZE * model.steps))
        full = _full_steps(model.steps, model.var_update_scaler, last)
        local = _local_steps(model.steps, model.local_step_clipper, last)
        found["and local steps"] = _run(zero_one, cluster, full, model.steps - full - local, local)
    return found


@cache
def _full_steps(steps: int, var_update_scaler: int, last: int | None) -> int:
    schedule = VarianceSchedule(var_update_scaler, last)
    step, count = 0, 0
    while (found := schedule.next_full(step) if step else 1) is not None and found <= steps:
        step, count = found, count + 1
    return count


@cache
def _local_steps(steps: int, clipper: int, last: int) -> int:
    syncs = SyncSchedule(last, max(1, round(SCALER * steps)), clipper)
    return sum(syncs.is_alone(step) and not syncs.is_sync(step) for step in range(last + 1, steps + 1))


def _run(model: Model, cluster: Cluster, full: int, compressed: int, local: int, itemsize: int | None = None) -> Run:
    """itemsize: of an uncompressed run's all-reduce; None for a run of ours."""
    slow = stage_1(model, cluster) if itemsize is None else uncompressed(model, cluster, itemsize)
    fast = stage_2(model, cluster)
    seconds = full * slow.total + compressed * fast.total + local * local_step(model, cluster).total
    sent, packed = sent_uncompressed(model, cluster, itemsize), sent_compressed(model, cluster, fast.chunks)
    return Run(full, compressed, local, seconds, full * sent + compressed * packed)
