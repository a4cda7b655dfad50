"""A long run in which gradients with NaN and inf turn up on random ranks, saved and resumed as it goes.

python -m tests.faults.poisoned        2,000 steps of four ranks, 5 % of them poisoned; a plot in perf/results
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import onebit
from perf import plots
from tests.faults.training import digest
from tests.onebit.runs import OPTIMIZERS, Case, bits
from tests.ranks import group, run_ranks

RESULTS = Path(__file__).parents[2] / "perf" / "results"
VALUES = (math.nan, math.inf, -math.inf)
LRS = (1e-2, 3e-3)  # of the two param groups, at their highest


@dataclass(frozen=True)
class Plan:
    kind: str
    steps: int = 2000
    freeze: int = 300  # optimizer steps, skipped ones not counted
    resume_every: int = 200
    share: float = 0.05  # of the steps
    ranks: int = 4

    @property
    def case(self) -> Case:
        options = {"freeze_step": self.freeze, "check_every": 100, "weight_decay": 0.01}
        return Case(self.kind, steps=self.steps, options=options, groups=({}, {}), seed=OPTIMIZERS.index(self.kind))

    def poison(self, step: int) -> dict[int, tuple[int, int, float]]:
        """The ranks that are poisoned in a step, and each one's parameter, element and value."""
        source = np.random.default_rng([7, step])
        if source.random() >= self.share:
            return {}
        ranks = source.choice(self.ranks, size=int(source.integers(1, self.ranks + 1)), replace=False)
        shapes = self.case.shapes
        picked = {int(rank): int(source.integers(len(shapes))) for rank in ranks}
        return {
            rank: (p, int(source.integers(math.prod(shapes[p]))), VALUES[source.integers(len(VALUES))])
            for rank, p in picked.items()
        }


@dataclass
class Record:
    """The record of one rank: a checksum of its parameters after every step, norms of its residuals, and all it ends
    with."""

    params: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)
    server_residuals: list[float] = field(default_factory=list)
    skipped: int = 0
    resumed: int = 0
    end: str = ""


def train(rank: int, size: int, plan: Plan, folder: str) -> tuple[Record, Record]:
    """All steps, and those that are not poisoned, in one go."""
    return _train(rank, plan, folder, poisoned=True), _train(rank, plan, folder, poisoned=False)


def _train(rank: int, plan: Plan, folder: str, poisoned: bool) -> Record:
    case, record = plan.case, Record()
    params = case.parameters()
    optimizer = case.build(params, group())
    for step in range(1, plan.steps + 1):
        poison = plan.poison(step)
        if step > 1 and (step - 1) % plan.resume_every == 0 and not poisoned:
            optimizer.synchronize()  # as the save does in the other run
        if poison and not poisoned:
            continue
        for g, values in enumerate(optimizer.param_groups):
            values["lr"] = LRS[g] * (0.55 + 0.45 * math.cos(step / (60 + 25 * g)))
        for p, gradient in zip(params, case.gradients(rank, step), strict=True):
            p.grad = gradient
        if rank in poison:
            p, element, value = poison[rank]
            params[p].grad.view(-1)[element] = value
        optimizer.step()
        record.params.append(zlib.crc32(bits(params)))
        if optimizer.compressing and step % (1 + plan.steps // 200) == 0:
            found = optimizer.diagnostics().values()
            record.steps.append(step)
            record.residuals.append(math.hypot(*(row["residual_norm"] for row in found)))
            record.server_residuals.append(math.hypot(*(row["server_residual_norm"] for row in found)))
        if poisoned and step % plan.resume_every == 0:
            params, optimizer = resumed(case, params, optimizer, f"{folder}/step-{step}")
            record.resumed += 1
    record.skipped = optimizer.skipped_steps
    optimizer.synchronize()
    state = optimizer.state_dict()
    numbers = json.loads(state["param_groups"][0]["onebit"])
    counting = ("skipped_steps", "wire_bytes")  # also of steps that were skipped
    state["param_groups"][0]["onebit"] = {name: value for name, value in numbers.items() if name not in counting}
    record.end = digest([params, state])
    return record


def resumed(case: Case, params: list[nn.Parameter], optimizer: Any, folder: str) -> tuple[list[nn.Parameter], Any]:
    """Saved, and loaded into others, which know nothing of what was before."""
    onebit.save(folder, nn.ParameterList(params), optimizer)
    fresh = [nn.Parameter(torch.full_like(p, math.nan)) for p in params]
    other = case.build(fresh, group())
    onebit.load(folder, nn.ParameterList(fresh), other)
    return fresh, other


def problems(plan: Plan, ranks: list[Record], clean: list[Record]) -> list[str]:
    """What is not as it should be."""
    found, first = [], ranks[0]
    bad = [step for step in range(1, plan.steps + 1) if plan.poison(step)]
    if any(one.params != first.params or len(one.params) != plan.steps for one in ranks):
        found.append("the ranks' parameters were not the same after every step")
    if any(first.params[step - 1] != first.params[step - 2] for step in bad if step > 1):
        found.append("a poisoned step changed parameters")
    if not bad or any(one.skipped != len(bad) for one in ranks):
        found.append(f"{[one.skipped for one in ranks]} steps were skipped, {len(bad)} were poisoned")
    if [one.end for one in ranks] != [one.end for one in clean]:
        found.append("the end is not that of a run without the poisoned steps")
    for name in ("residuals", "server_residuals"):
        early, late = np.array_split(np.array([getattr(one, name) for one in ranks]), 2, axis=1)
        if not np.isfinite(late).all() or late.mean() > 1.5 * early.mean() or late.max() > 2 * early.max():
            found.append(f"{name} grow: from {early.mean():.3g} to {late.mean():.3g}")
    return found


def run(plan: Plan) -> tuple[list[Record], list[str]]:
    with tempfile.TemporaryDirectory(prefix="onebit-poisoned-") as folder:
        ranks, clean = zip(*run_ranks(plan.ranks, train, plan, folder, timeout=2400), strict=True)
    return list(ranks), problems(plan, list(ranks), list(clean))


def draw(kind: str, ranks: list[Record], axes: Any) -> None:
    for rank, one in enumerate(ranks):
        axes.plot(one.steps, one.residuals, color=f"C{rank}", linewidth=0.7, label=f"e of rank {rank}")
        axes.plot(one.steps, one.server_residuals, ":", color=f"C{rank}", linewidth=0.7, label=f"E of rank {rank}")
    axes.set(title=kind, xlabel="step", ylabel="norm of the residuals")
    axes.set_ylim(0)
    axes.legend(ncols=4, fontsize="x-small")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.poisoned")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    panels: list[plots.Draw] = []
    failed = False
    for kind in OPTIMIZERS:
        ranks, wrong = run(Plan(kind, options.steps))
        one = ranks[0]
        print(
            f"{kind}: {options.steps} steps of {len(ranks)} ranks, {one.skipped} poisoned and skipped, {one.resumed} "
            f"times resumed, largest residual norm {max(max(r.residuals) for r in ranks):.3g}: "
            f"{'; '.join(wrong) or 'as if they had not been'}",
            flush=True,
        )
        panels.append(functools.partial(draw, kind, ranks))
        failed |= bool(wrong)
    title = "4 ranks, 5 % of the steps poisoned, resumed every 200"
    plots.save(RESULTS / "reliability-poisoned.png", panels, title)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
