"""overlap=True: messages leave while backward computes, and nothing else is different, to the last bit."""

from __future__ import annotations

import math
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.collectives.exchange import Exchange
from tests.internals import break_scatter, join_flight
from tests.limits import HUNG
from tests.onebit import runs as optimizers
from tests.onebit.runs import Case, bits, kinds, snapshot, unchanged
from tests.ranks import group, run_ranks

OPTIONS = {"freeze_step": 3, "chunks": 3}


def backward(case: Case, rank: int, params: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Gradients of the case, as a backward pass leaves them: parameter by parameter."""
    terms = [(p * g * factor).sum() for p, g in zip(params, case.gradients(rank, step), strict=True) if g is not None]
    sum(terms).backward()


def build(case: Case, overlap: bool) -> tuple[Any, list[nn.Parameter]]:
    params = case.parameters()
    return case.but(options={**OPTIONS, **case.options, "overlap": overlap}).build(params, group()), params


def overlap_warnings(optimizer: Any, step: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in caught if "overlap" in str(w.message)]


def run_with_and_without(rank: int, size: int, case: Case, clip_from: int = 99) -> dict[str, Any]:
    """With overlap and without: is every step the same, and did messages leave before step was called?"""
    runs = [build(case, overlap) for overlap in (True, False)]
    equal, early, warned = [], [], []
    for step in range(1, case.steps + 1):
        for optimizer, params in runs:
            optimizer.zero_grad()
            backward(case, rank, params, step)
            if optimizer.setup.options.overlap:
                early.append(optimizer.overlap.in_flight)
            if step >= clip_from:
                optimizer.clip_grad_norm_(0.5)
            warned += overlap_warnings(optimizer, optimizer.step)
        states = [(snapshot(o.state_dict()), bits(params)) for o, params in runs]
        equal.append(unchanged(states[0][0], states[1][0]) and states[0][1] == states[1][1])
    (optimizer, params), _ = runs
    return {
        "equal": equal, "early": early, "warned": warned, "skipped": optimizer.skipped_steps, "params": bits(params),
    }  # fmt: skip


WAYS: Any = pytest.mark.parametrize("options", [{}, {"scale": "tensor"}, {"reply": "direct"}, {"reply": 2}], ids=str)


@kinds
@WAYS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_step_is_the_same_bit_for_bit(kind: str, options: dict[str, Any], dtype: str) -> None:
    case = Case(kind, dtype=dtype, steps=8, options=options, missing=((6, 0, 1),))
    found = run_ranks(3, run_with_and_without, case)
    for one in found:
        assert all(one["equal"])
        assert one["early"] == [False] * 4 + [True] * 4  # the exchange begins with the first step of stage 2
        assert not one["warned"]
        assert one["params"] == found[0]["params"]


@kinds
@WAYS
@pytest.mark.parametrize("at", [4, 5, 7])
@pytest.mark.parametrize("parameter", [0, 3])
def test_a_bad_gradient_skips_the_step_after_messages_have_left(
    kind: str, options: dict[str, Any], at: int, parameter: int
) -> None:
    """Of the first parameter, whose message leaves last, and of the last one."""
    shapes = Case().shapes
    order = list(range(len(shapes))) if parameter == 3 else [3, 1, 2, 0]
    case = Case(
        kind, shapes=tuple(shapes[i] for i in order), steps=9, options=options,
        bad=((at, 1, math.nan), (8, 0, math.inf), (9, 1, -math.inf)),
    )  # fmt: skip
    for one in run_ranks(2, run_with_and_without, case):
        assert all(one["equal"])
        assert one["skipped"] == (3 if at < 8 else 2)
        assert not one["warned"]


@kinds
def test_a_step_skipped_after_overlap_was_disabled_is_the_same(kind: str) -> None:
    """Its messages hold what the last replies had: not those of the step before, which was cancelled."""
    case = Case(kind, steps=9, bad=((6, 1, math.nan), (7, 0, math.nan)))
    for one in run_ranks(2, run_with_and_without, case, 7):
        assert all(one["equal"])
        assert one["early"][5:8] == [True, True, False]


def mixed(rank: int, size: int, kind: str) -> dict[str, Any]:
    """A model of two dtypes, whose exchanges follow each other."""
    found = []
    for overlap in (True, False):
        source = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=source)) for n in (70, 33)]
        params += [nn.Parameter(torch.randn(90, generator=source).bfloat16())]
        optimizer = optimizers.build(
            kind, params, lr=1e-2, block_size=32, freeze_step=2, chunks=2, overlap=overlap, process_group=group()
        )
        own = torch.Generator().manual_seed(rank)
        for _ in range(6):
            optimizer.zero_grad()
            sum((p * torch.randn(p.shape, generator=own).to(p.dtype)).sum() for p in params).backward()
            optimizer.step()
        found.append(bits(params))
    return {"equal": found[0] == found[1], "params": found[0]}


@kinds
def test_parameters_of_two_dtypes_give_the_same_bits(kind: str) -> None:
    found = run_ranks(2, mixed, kind)
    assert all(one["equal"] and one["params"] == found[0]["params"] for one in found)


class Chain(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def with_ddp(rank: int, size: int, kind: str, view: bool, accumulate: int) -> dict[str, Any]:
    found, early = [], []
    for overlap in (True, False):
        ddp = DistributedDataParallel(Chain(), process_group=group(), bucket_cap_mb=0.002, gradient_as_bucket_view=view)
        optimizer = optimizers.build(
            kind,
            ddp.parameters(),
            lr=1e-2,
            block_size=32,
            freeze_step=3,
            chunks=4,
            overlap=overlap,
            process_group=group(),
        )
        onebit.attach(ddp, optimizer)
        source = torch.Generator().manual_seed(rank)
        for step in range(1, 9):
            optimizer.zero_grad()
            for _ in range(accumulate - 1):
                with ddp.no_sync():
                    ddp(torch.randn(3, 20, generator=source)).square().sum().backward()
            ddp(torch.randn(3, 20, generator=source)).square().sum().backward()
            if overlap and step > 3:
                early.append(optimizer.overlap.in_flight)
            assert not overlap_warnings(optimizer, optimizer.step)
        found.append((bits(ddp.parameters()), optimizer.wire_bytes))
    return {"equal": found[0] == found[1], "early": early, "params": found[0]}


@kinds
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_with_ddp_the_same_bits_leave_early(kind: str, view: bool, accumulate: int) -> None:
    found = run_ranks(2, with_ddp, kind, view, accumulate)
    for one in found:
        assert one["equal"]
        assert one["early"] == [True] * 5
        assert one["params"] == found[0]["params"]


def waiting_for_the_wire(rank: int, size: int) -> list[bool]:
    """Backward of the first layer does not go on until the last layers' messages have gone through both phases."""
    model = Chain()
    optimizer = onebit.OneBitAdam(
        model.parameters(), lr=1e-2, block_size=32, freeze_step=1, chunks=6, overlap=True, process_group=group()
    )
    arrived = []

    def wait(grad: Tensor) -> None:
        exchange: Exchange = optimizer.current.reducers[0].exchange
        a_chunk = exchange.wire_bytes
        stop = time.monotonic() + HUNG / 8
        while time.monotonic() < stop and exchange.wire_bytes < before + 3 * nbytes:
            time.sleep(0.001)
        arrived.append(exchange.wire_bytes >= before + 3 * nbytes and a_chunk >= 0)

    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 20) * (rank + 1)).square().sum()
        if step == 3:
            before = optimizer.wire_bytes
            nbytes = optimizer.current.reducers[0].exchange.format.nbytes * (size - 1)
            model.layers[0].weight.register_hook(wait)
        loss.backward()
        optimizer.step()
    return arrived


def test_messages_arrive_while_backward_still_computes() -> None:
    assert run_ranks(2, waiting_for_the_wire) == [[True], [True]]


def changed_before_step(rank: int, size: int, case: Case, what: str) -> dict[str, Any]:
    """A change between backward and step, after messages have left."""
    runs, warned, early = [build(case, overlap) for overlap in (True, False)], [], []
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in runs]
    for scaler in scalers:
        scaler.scale(torch.zeros(()))
    for step in range(1, case.steps + 1):
        for (optimizer, params), scaler in zip(runs, scalers, strict=True):
            optimizer.zero_grad()
            backward(case, rank, params, step, 8.0 if what == "scaler" else 1.0)
            if optimizer.setup.options.overlap:
                early.append(optimizer.overlap.in_flight)
            match what:
                case "clip":
                    warned += overlap_warnings(optimizer, lambda o=optimizer: (o.clip_grad_norm_(0.5), o.step()))
                    continue
                case "accumulate":
                    backward(case, rank, params, step + 100)
                case "change":
                    for p in params:
                        p.grad.mul_(0.5)
                case "replace":
                    params[1].grad = torch.ones_like(params[1])
                case "scaler":
                    warned += overlap_warnings(optimizer, lambda o=optimizer, s=scaler: s.step(o))
                    scaler.update()
                    continue
                case "betas":
                    optimizer.param_groups[0]["betas"] = (0.8 + step / 100, 0.999)
            warned += overlap_warnings(optimizer, optimizer.step)
    (one, params), (other, theirs) = runs
    sent = [o.state_dict()["param_groups"][0]["onebit"].pop("wire_bytes", None) for o in (one, other)]
    assert sent
    return {"equal": bits(params) == bits(theirs), "warned": warned, "early": early, "params": bits(params)}


@kinds
@pytest.mark.parametrize("what", ["clip", "accumulate", "change", "replace", "scaler", "betas"])
def test_changing_gradients_after_backward_disables_overlap_and_no_more(kind: str, what: str) -> None:
    found = run_ranks(2, changed_before_step, Case(kind, steps=8), what)
    for one in found:
        assert one["equal"]
        assert one["params"] == found[0]["params"]
        assert len(one["warned"]) == 1
        assert "off from here on" in one["warned"][0]
        assert (
            one["early"] == [False] * 4 + [what not in ("clip", "scaler")] + [False] * 3
        )  # those two are met in step 4


def accumulating(rank: int, size: int, case: Case) -> dict[str, Any]:
    """Accumulation within no_sync, and a step that the user leaves out."""
    runs, early, warned = [build(case, overlap) for overlap in (True, False)], [], []
    for step in range(1, case.steps + 1):
        for optimizer, params in runs:
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(case, rank, params, step)
                backward(case, rank, params, step + 50)
            backward(case, rank, params, step + 100)
            if optimizer.setup.options.overlap:
                early.append(optimizer.overlap.in_flight)
            if step != 6:
                warned += overlap_warnings(optimizer, optimizer.step)
    (_, params), (_, theirs) = runs
    return {
        "equal": bits(params) == bits(theirs),
        "warned": warned,
        "early": early,
        "threads": threading.active_count(),
    }


@kinds
def test_accumulation_within_no_sync_and_a_step_left_out_keep_overlap(kind: str) -> None:
    before = run_ranks(2, threads_alive)
    for one, threads in zip(run_ranks(2, accumulating, Case(kind, steps=8)), before, strict=True):
        assert one["equal"]
        assert not one["warned"]
        assert one["early"] == [False] * 4 + [True] * 4
        assert one["threads"] <= threads


def threads_alive(rank: int, size: int) -> int:
    return threading.active_count()


def resumed(rank: int, size: int, case: Case) -> dict[str, Any]:
    """State between backward and step is refused; after the step it resumes bit for bit, with overlap at once."""
    optimizer, params = build(case, overlap=True)
    refused = []
    for step in range(1, case.steps + 1):
        optimizer.zero_grad()
        backward(case, rank, params, step)
        if step == 6:
            saved = [optimizer.state_dict, optimizer.diagnostics, lambda: optimizer.load_state_dict({})]
            for call in saved:
                with pytest.raises(ValueError, match="between backward and step") as error:
                    call()
                refused.append(str(error.value))
        optimizer.step()
        if step == 6:
            state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    other, theirs = build(case, overlap=True)
    for p, value in zip(theirs, values, strict=True):
        p.data.copy_(value)
    other.load_state_dict(state)
    early = []
    for step in range(7, case.steps + 1):
        other.zero_grad()
        backward(case, rank, theirs, step)
        early.append(other.overlap.in_flight)
        other.step()
    return {"equal": bits(params) == bits(theirs), "early": early, "refused": refused}


@kinds
def test_state_is_of_whole_steps_and_resumes(kind: str) -> None:
    for one in run_ranks(2, resumed, Case(kind, steps=10)):
        assert one["equal"]
        assert len(one["refused"]) == 3
        assert one["early"] == [False, True, True, True]  # ranks agree on the start in the first step


def failing(rank: int, size: int) -> str:
    """An error of the thread is raised by step."""
    optimizer, params = build(Case(), overlap=True)
    for step in range(1, 6):
        optimizer.zero_grad()
        backward(Case(), rank, params, step)
        if step == 5:
            join_flight(optimizer)
        optimizer.step()
    optimizer.zero_grad()

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the network is gone")

    break_scatter(optimizer.current.reducers[0].exchange, broken)
    backward(Case(), rank, params, 6)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_an_error_of_the_thread_is_raised_by_step() -> None:
    assert run_ranks(2, failing) == ["the network is gone"] * 2


def test_one_rank_sends_nothing_early() -> None:
    case = Case(steps=6, options={"overlap": True, **OPTIONS})
    params, plain = case.parameters(), case.parameters()
    optimizer, other = case.build(params), case.but(options=OPTIONS).build(plain)
    for step in range(1, 7):
        for o, p in ((optimizer, params), (other, plain)):
            o.zero_grad()
            backward(case, 0, p, step)
            o.step()
    assert bits(params) == bits(plain)
    assert optimizer.compressing


def test_overlap_must_be_true_or_false() -> None:
    with pytest.raises(ValueError, match="overlap='yes'"):
        onebit.OneBitAdam([nn.Parameter(torch.zeros(3))], overlap="yes")
