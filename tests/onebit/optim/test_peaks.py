"""Bytes an element that are alive at once at every moment of a run, beside parameters, gradients and a loaded state.

    stage 1                               AdamW's 8 + 2
    stage 2                               what docs/usage.md says of it ("Memory") + 2
    while the momentum is in no message   4 more: 1-bit LAMB's freeze, from `synchronize` to the step after it
    load_state_dict                       the state there was, or the new one + 2
    onebit.save, onebit.load              the saved state once more, on the host; a load the parameters too, and while
                                          they are read the largest tensor twice

python -m tests.onebit.optim.test_peaks        prints what the test bounds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.collectives import averaging
from onebit.collectives.transport.protocol import Done, LocalTransport, Work
from onebit.kernels.data import pieces
from tests.onebit.optim.test_memory import living
from tests.onebit.runs import build, parameters

SHAPES = ((2048, 1024), (1000, 1024), (512,), (3,))
NUMEL = sum(torch.Size(s).numel() for s in SHAPES)
LARGEST = 4 * torch.Size(SHAPES[0]).numel() / NUMEL  # bytes of a tensor
SMALL = 2**15  # elements of a piece, as small beside this model as 2^20 beside a real one
RUNS: dict[str, tuple[str, dict[str, Any], int]] = {  # the class, its options, and steps up to the last kind
    "AdamW": ("AdamW", {}, 3),
    "1-bit Adam": ("OneBitAdam", {"freeze_step": 2}, 4),
    "1-bit LAMB": ("OneBitLamb", {"freeze_step": 2}, 4),
    "0/1 Adam": ("ZeroOneAdam", {"var_update_scaler": 2, "var_freeze_step": 5}, 6),
    "0/1 Adam, local steps": (
        "ZeroOneAdam",
        {"var_update_scaler": 2, "var_freeze_step": 5, "local_step_scaler": 1, "local_step_clipper": 4},
        10,
    ),
}
STAGE_2 = {"1-bit Adam": 8.66, "1-bit LAMB": 12.79, "0/1 Adam": 8.79, "0/1 Adam, local steps": 16.79}
SAVED = {"1-bit Adam": 12, "1-bit LAMB": 17, "0/1 Adam": 12, "0/1 Adam, local steps": 12}
DERIVED = {"1-bit Adam": 4}  # of what is saved, and not kept: the variance
ADAMW, DENSE, MARGIN = 8, 4, 2
ALONE = 4  # one rank keeps E of all elements, and m once more


class Alike(LocalTransport):
    """Eight ranks that have the same, of which this is one: no other thread holds or frees a tensor."""

    size = 8

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        out.copy_(sent[:1])
        return Done()

    def all_sum(self, values: Tensor, phase: str) -> Work:
        values.mul_(self.size)
        return Done()


class Peak:
    """What torch's allocator gave at once, beyond what there was before: also within its operations. It knows how much
    was freed only of what was given within a `Peak`, be it another."""

    bytes = 0

    def __enter__(self) -> Peak:
        cpu = torch.profiler.ProfilerActivity.CPU
        self._profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        now = 0
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            now += event.nbytes()
            self.bytes = max(self.bytes, now)


class Moments:
    """The largest peak of each, in bytes an element."""

    def __init__(self) -> None:
        self.most: dict[str, float] = {}
        self._before = living()

    def kept(self) -> float:
        return sum(n for where, n in living().items() if where not in self._before) / NUMEL

    def leave_out(self, tensors: list[Tensor]) -> None:
        """What is not the optimizer's own."""
        self._before |= {t.untyped_storage().data_ptr(): 0 for t in tensors}

    def at(self, moment: str, act: Callable[[], Any]) -> Any:
        kept = self.kept()
        with Peak() as peak:
            found = act()
        self.most[moment] = max(self.most.get(moment, 0), kept + peak.bytes / NUMEL)
        return found


def kind_of_step(optimizer: Any) -> str:
    optimizer.catch_up()
    run = optimizer.run
    if run.state.stages.compressing:
        return f"{run.kind()} step"
    return "freeze" if run.state.stages.freeze_is_due else "stage 1"


def measure(name: str, ranks: int = 8) -> dict[str, float]:
    """Measure a run of ranks that are alike; of one rank alone with onebit.save and onebit.load."""
    kind, options, steps = RUNS[name]
    params, source = parameters(*SHAPES), torch.Generator().manual_seed(0)
    for p in params:
        p.grad = torch.randn(p.shape, generator=source)
    moments, at_hand = Moments(), LocalTransport() if ranks == 1 else Alike()
    if kind == "AdamW":
        optimizer: Any = torch.optim.AdamW(params, fused=True)
    else:
        with Peak():
            optimizer = build(kind, params, chunks=1, process_group=at_hand, node_group=None, **options)
    for _ in range(steps):
        moments.at("stage 1" if kind == "AdamW" else kind_of_step(optimizer), optimizer.step)
    if kind != "AdamW":
        moments.at("synchronize", optimizer.synchronize)
        moments.at("first step after it", optimizer.step)
        with Peak():
            optimizer.step()
            optimizer.synchronize()
    saved = moments.at("state_dict", optimizer.state_dict)
    dtype = torch.float64 if kind == "AdamW" else None  # as from another device: torch's keeps what it gets
    saved["state"] = {key: {n: v.to(dtype, copy=True) for n, v in own.items()} for key, own in saved["state"].items()}
    moments.leave_out([v for own in saved["state"].values() for v in own.values()])
    moments.at("load_state_dict", lambda: optimizer.load_state_dict(saved))
    if kind != "AdamW" and ranks == 1:
        model = nn.ParameterList(params)
        with TemporaryDirectory() as folder:
            moments.at("save", lambda: onebit.save(Path(folder), model, optimizer))
            moments.at("load", lambda: onebit.load(Path(folder), model, optimizer))
    return moments.most


def limits(name: str, ranks: int) -> dict[str, float]:
    stage_2 = STAGE_2[name] + (ALONE if ranks == 1 else 0)
    dense = stage_2 + DENSE
    steps = ("freeze", "full step", "1 bit step", "local step", "sync step")
    found = {"stage 1": ADAMW, **dict.fromkeys(steps, stage_2), "synchronize": dense, "first step after it": dense}
    if name == "1-bit LAMB":
        found["freeze"] = dense
    found |= {"state_dict": dense + DERIVED.get(name, 0), "load_state_dict": dense}
    found |= {"save": dense + SAVED[name], "load": dense + SAVED[name] + 4 + 2 * LARGEST}
    return {moment: most + MARGIN for moment, most in found.items()}


MOMENTS = {
    "1-bit Adam": {"freeze", "1 bit step"},
    "1-bit LAMB": {"freeze", "1 bit step"},
    "0/1 Adam": {"freeze", "1 bit step", "full step"},
    "0/1 Adam, local steps": {"freeze", "1 bit step", "full step", "local step", "sync step"},
}
ALWAYS = {"stage 1", "synchronize", "first step after it", "state_dict", "load_state_dict"}


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    with mock.patch.object(pieces, "PIECE", SMALL), mock.patch.object(averaging, "BUCKET_BYTES", 4 * SMALL):
        yield


@pytest.mark.parametrize("ranks", [8, 1])
@pytest.mark.parametrize("name", list(STAGE_2))
def test_no_moment_has_more_alive_than_it_may(name: str, ranks: int) -> None:
    found, most = measure(name, ranks), limits(name, ranks)
    assert found.keys() == ALWAYS | MOMENTS[name] | ({"save", "load"} if ranks == 1 else set())
    assert {moment: found[moment] for moment in found if found[moment] > most[moment]} == {}


if __name__ == "__main__":
    with mock.patch.object(pieces, "PIECE", SMALL), mock.patch.object(averaging, "BUCKET_BYTES", 4 * SMALL):
        for name in RUNS:
            for ranks in (8, 1):
                found = measure(name, ranks)
                words = ", ".join(f"{moment} {most:.2f}" for moment, most in found.items())
                print(f"{name}, {ranks} rank{'s' * (ranks > 1)}: {words} bytes an element", flush=True)
