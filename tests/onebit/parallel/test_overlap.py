"""overlap=True: messages leave while backward computes, and nothing else is different, to the last bit."""

from __future__ import annotations

import math
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests import internals
from tests.limits import HUNG
from tests.onebit.checkpoint.states import set_parameters
from tests.onebit.optim.contract import options
from tests.onebit.optim.test_contract import APART, LOCAL, SPACED, ZERO_ONE
from tests.onebit.runs import OPTIMIZERS, Case, bits, kinds, on_ranks, on_warnings, snapshot, unchanged
from tests.ranks import group

OPTIONS = {"freeze_step": 3, "chunks": 3}


def backward(case: Case, rank: int, params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Gradients of the case, as a backward pass leaves them: parameter by parameter."""
    terms = [(p * g * factor).sum() for p, g in zip(params, case.gradients(rank, step), strict=True) if g is not None]
    if terms:
        sum(terms).backward()


def build(case: Case, overlap: bool) -> tuple[Any, list[nn.Parameter]]:
    params, own = case.parameters(), {**case.options, "overlap": overlap}
    own = own if "var_update_scaler" in own else {**OPTIONS, **own}
    return case.but(options=own).build(params, group()), params


def end_step(how: str, case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """A step, after a change to what messages were made of."""
    match how:
        case "clip":
            optimizer.clip_grad_norm_(0.5)
        case "accumulate":
            backward(case, rank, params, step + 100)
        case "change":
            for p in params:
                p.grad.mul_(0.5)  # type: ignore[union-attr]
        case "replace":
            params[1].grad = torch.ones_like(params[1])
        case "betas":
            optimizer.param_groups[0]["betas"] = (0.8 + step / 100, 0.999)
        case "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            return
    optimizer.step()


def run_with_and_without(rank: int, case: Case, how: str, first: int) -> dict[str, Any]:
    """Compare runs with overlap and without: is every step the same, and did messages leave before step was called?

    how: what is done from step `first` on, between backward and step or, with "no_sync", before the last backward of a
    step, of which one is left out.
    """
    threads, runs = threading.active_count(), [build(case, overlap) for overlap in (True, False)]
    equal, early, warned = [], [], []
    for step in range(1, case.steps + 1):
        now = how if step >= first else ""
        for optimizer, params in runs:
            optimizer.zero_grad()
            if now == "no_sync":
                with optimizer.no_sync():
                    backward(case, rank, params, step + 50)
                    backward(case, rank, params, step + 100)
            backward(case, rank, params, step, 8.0 if now == "scaler" else 1.0)
            if internals.options(optimizer).overlap:
                early.append(optimizer.overlap.in_flight)
            if (now, step) != ("no_sync", 6):
                with on_warnings() as texts:
                    end_step(now, case, rank, optimizer, params, step)
                warned += [text for text in texts if "overlap" in text]
        if (now, step) != ("no_sync", 6):
            one, other = (o.synchronized and snapshot(o.state_dict()) for o, _ in runs)
            values = [bits([*params, *internals.left_out(o)]) for o, params in runs]
            equal.append((one is False or unchanged(one, other)) and values[0] == values[1])
    (optimizer, params), _ = runs
    return {
        "equal": equal, "early": early, "warned": warned, "skipped": optimizer.skipped_steps, "params": bits(params),
        "more threads": threading.active_count() - threads,
    }  # fmt: skip


SHAPES = (*Case().shapes, (400,))
LAST_FIRST = tuple(SHAPES[i] for i in (3, 1, 2, 0))
TENSOR, DIRECT = {"scale": "tensor"}, {"reply": "direct"}
NAN, INF = math.nan, math.inf


def one_level(kind: str, at: int, last: bool = False, **more: Any) -> Case:
    """Bad gradients of the last parameter, which has 130 elements, or of the small one whose message leaves last."""
    bad = ((at, 1, NAN), (8, 0, INF), (9, 1, -INF))
    return Case(kind, LAST_FIRST if last else SHAPES[:4], steps=9, bad=bad, missing=((6, 0, 1),), **more)


def of_nodes(kind: str, **options: Any) -> Case:
    """A bad gradient of one rank, in its own slice or another's."""
    return Case(kind, SHAPES, steps=9, options=options, each=2, bad=((6, 3, NAN), (7, 0, INF)))


def cancelled(kind: str, each: int = 1) -> Case:
    """The messages of step 7 hold what the last replies had: not those of step 6, which were cancelled."""
    return Case(kind, SHAPES, steps=9, each=each, bad=((6, 1, NAN), (7, 0, NAN)))


# Ranks, the case, how gradients change and from which step on; "#" for each step whose messages leave in backward.
# The exchange begins with the first step of stage 2, whose own messages leave in step.
SENT, AT_ONCE, LATER = "....#####", "........", "....#..."
SPREAD = ".....#.###.##"  # of 0/1 Adam's steps 4, 6, 8 to 10, 12 and 13 are compressed ones
CASES: list[tuple[int, Case, str, int, str]] = [
    *((2, one_level("OneBitAdam", at), "", 1, SENT) for at in (4, 5)),
    (3, one_level("OneBitAdam", 7, options=TENSOR), "", 1, SENT),
    (2, one_level("OneBitAdam", 5, True, dtype="bfloat16", options=DIRECT), "", 1, SENT),
    (2, one_level("OneBitLamb", 4, True, options=DIRECT), "", 1, SENT),
    (2, one_level("OneBitLamb", 5, dtype="bfloat16", options=TENSOR), "", 1, SENT),
    (3, one_level("OneBitLamb", 7, True), "", 1, SENT),
    (2, one_level("ZeroOneAdam", 4, dtype="bfloat16", options=TENSOR), "", 1, SENT),
    (2, one_level("ZeroOneAdam", 5, options=DIRECT), "", 1, SENT),
    (3, one_level("ZeroOneAdam", 7, True, dtype="bfloat16"), "", 1, SENT),
    (4, of_nodes("OneBitAdam"), "", 1, SENT),
    (4, of_nodes("OneBitAdam", **DIRECT, **TENSOR), "", 1, SENT),
    (4, of_nodes("OneBitLamb", **DIRECT), "", 1, SENT),
    (4, of_nodes("ZeroOneAdam", **TENSOR), "", 1, SENT),
    *((2, cancelled(kind), "clip", 7, "....###..") for kind in OPTIMIZERS),
    (4, cancelled("OneBitAdam", each=2), "clip", 7, "....###.."),
    (1, Case(steps=8), "clip", 6, AT_ONCE),
    *((2, Case("OneBitAdam", steps=8), what, 1, AT_ONCE) for what in ("clip", "scaler")),
    *((2, Case("OneBitAdam", steps=8), what, 1, LATER) for what in ("accumulate", "change", "replace", "betas")),
    (2, Case("OneBitLamb", steps=8), "replace", 1, LATER),
    (2, Case("ZeroOneAdam", steps=8), "clip", 1, AT_ONCE),
    *((2, Case(kind, steps=8), "no_sync", 1, "....####") for kind in OPTIMIZERS),
    *((2, Case(kind, steps=7, last_dtype="bfloat16"), "", 1, "....###") for kind in OPTIMIZERS),  # two exchanges
    *((n, options(ZERO_ONE.but(each=n // 2), chunks=2), "", 1, SPREAD) for n in (2, 4)),
    *((n, options(ZERO_ONE.but(steps=16, each=n // 2), chunks=2, **LOCAL), "", 1, ".....###........") for n in (2, 4)),
    (2, options(APART, chunks=2), "", 1, SENT),
    (4, options(APART.but(kind="OneBitLamb", each=2), chunks=2), "", 1, SENT),
    (2, options(SPACED, chunks=2), "", 1, SPREAD),
]


@pytest.mark.parametrize(("size", "case", "how", "first", "early"), CASES)
@on_ranks()
def test_every_step_is_the_same_bit_for_bit(
    rank: int, size: int, case: Case, how: str, first: int, early: str
) -> bytes:
    """It is even if a step is skipped after messages have left. Gradients that change after backward end overlap, and
    no more than that; accumulation within no_sync and a step that is left out don't."""
    one = run_with_and_without(rank, case, how, first)
    assert all(one["equal"]) and one["skipped"] == len(case.bad)
    assert one["early"] == [each == "#" for each in early]
    assert len(one["warned"]) == (size > 1 and how not in ("", "no_sync"))
    assert all("off from here on" in text for text in one["warned"])
    assert one["more threads"] <= 0
    return one["params"]


@on_ranks(2)
def test_overlap_is_disabled_where_one_rank_has_sent_nothing(rank: int) -> bytes:
    """It had no gradient in this step, and the other had."""
    one = run_with_and_without(rank, Case(steps=8, missing=tuple((6, 1, p) for p in range(4))), "clip", 6)
    assert all(one["equal"]) and one["early"] == [False] * 4 + [True, rank == 0, False, False]
    return one["params"]


@on_ranks(2)
def test_messages_arrive_while_backward_still_computes(rank: int) -> None:
    """Backward of the first layer does not go on until the last layers' messages have gone through both phases."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(20, 20), nn.Tanh())))
    optimizer = onebit.OneBitAdam(
        model.parameters(), lr=1e-2, block_size=32, freeze_step=1, chunks=6, overlap=True, process_group=group()
    )
    arrived = []

    def wait(grad: Tensor) -> None:
        [exchange] = internals.exchanges(optimizer)
        stop = time.monotonic() + HUNG / 8
        while time.monotonic() < stop and exchange.wire_bytes < before + 3 * nbytes:
            time.sleep(0.001)
        arrived.append(exchange.wire_bytes >= before + 3 * nbytes)

    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 20) * (rank + 1)).square().sum()
        if step == 3:
            before, nbytes = optimizer.wire_bytes, internals.exchanges(optimizer)[0].format.nbytes
            model[0].weight.register_hook(wait)
        loss.backward()
        optimizer.step()
    assert arrived == [True]


@kinds
@on_ranks(2)
def test_state_is_of_whole_steps_and_resumes(rank: int, kind: str) -> bytes:
    """State between backward and step is refused; after the step it resumes bit for bit, with overlap at once. The run
    itself goes back to it, too."""
    case = Case(kind, steps=10)
    (optimizer, params), (other, theirs) = build(case, True), build(case, True)
    for step in range(1, case.steps + 1):
        optimizer.zero_grad()
        backward(case, rank, params, step)
        if step == 6:
            for call in (optimizer.state_dict, optimizer.diagnostics, lambda: optimizer.load_state_dict({})):
                with pytest.raises(ValueError, match="between backward and step"):
                    call()
        optimizer.step()
        if step == 6:
            optimizer.synchronize()
            state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    end = bits(params)
    for again, own in ((other, theirs), (optimizer, params)):
        set_parameters(own, values)
        again.load_state_dict(state)
        early = []
        for step in range(7, case.steps + 1):
            again.zero_grad()
            backward(case, rank, own, step)
            early.append(again.overlap.in_flight)
            again.step()
        assert bits(own) == end
        assert early == [again is optimizer, True, True, True]  # new ranks agree on the start in the first step
    return end


@on_ranks(2)
def test_a_default_device_changes_nothing(rank: int) -> bytes:
    case, ends = Case(), []
    for device in ("meta", "cpu"):
        optimizer, params = build(case, overlap=True)
        for step in range(1, 7):
            optimizer.zero_grad()
            backward(case, rank, params, step)
            with torch.device(device):
                optimizer.step()
        assert optimizer.overlap.on
        ends.append(bits(params))
    assert ends[0] == ends[1]
    return ends[0]


@on_ranks(2)
def test_an_error_of_the_thread_is_raised_by_step(rank: int) -> None:
    optimizer, params = build(Case(), overlap=True)
    for step in range(1, 6):
        optimizer.zero_grad()
        backward(Case(), rank, params, step)
        if step == 5:
            internals.join_flight(optimizer)
        optimizer.step()
    optimizer.zero_grad()
    exchange = internals.exchanges(optimizer)[0]
    exchange.backend = Mock(run=Mock(side_effect=RuntimeError("the network is gone")))  # which averages in the thread
    backward(Case(), rank, params, 6)
    with pytest.raises(RuntimeError, match=r"^the network is gone$"):
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "how"), [("OneBitAdam", "change"), ("OneBitLamb", "accumulate"), ("ZeroOneAdam", "replace")]
)
@on_ranks(3)
def test_a_gradient_that_one_rank_changes_turns_it_off_on_all(rank: int, kind: str, how: str) -> bytes:
    one = run_with_and_without(rank, Case(kind, steps=9), how if rank == 1 else "", 6)
    assert all(one["equal"]) and len(one["warned"]) == 1
    assert "overlap is off from here on: on rank 1 alone" in one["warned"][0]
    return one["params"]


class Summed(nn.Module):
    """A model of which each parameter has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ParameterList([torch.ones(8) for _ in range(9)])

    def forward(self, factor: Tensor) -> Tensor:
        return sum((p * factor).sum() for p in self.own)  # type: ignore[return-value]


@pytest.mark.parametrize(("ddp", "overlap"), [(False, True), (True, False), (True, True)])
@on_ranks(2)
def test_a_step_is_decided_once(rank: int, ddp: bool, overlap: bool) -> None:
    """The first of many buckets or gradients in backward decides, or else step. Found: whether it was decided already,
    each time that it was begun."""
    model: nn.Module = Summed()
    options: Any = {"var_update_scaler": 2, "overlap": overlap, "process_group": group()}
    optimizer: Any = onebit.ZeroOneAdam(model.parameters(), **options)
    if ddp:
        model = DistributedDataParallel(model, process_group=group(), bucket_cap_mb=1e-6)
        onebit.attach(model, optimizer)
    begin, found = optimizer.begin_step, []
    optimizer.begin_step = lambda: (found[-1].append(optimizer.begun), begin())[1]
    for _ in range(12):
        found.append([])
        optimizer.zero_grad()
        model(torch.tensor(rank + 1.0)).backward()
        optimizer.step()
    assert found.count([False, True]) > 3 and all(each in ([False], [False, True]) for each in found)
