"""What ranks do for these tests: each function runs on every rank of a group."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import onebit
from onebit.collectives.transport import transport_for
from onebit.collectives.transport.protocol import EarlyReceiver, Transport, Work
from onebit.collectives.transport.torch import TorchTransport
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.passes import Decode
from tests.collectives import steps
from tests.collectives.steps import Case, Recorded
from tests.onebit.runs import nodes_of
from tests.ranks import group


def ranks_of(case: Case, size: int) -> Any:
    """The group of the ranks that work, as nodes where the case has some."""
    return nodes_of(group(), size // case.nodes) if case.nodes else group()


def recorded_many(rank: int, size: int, cases: list[Case]) -> list[Recorded]:
    """A warning would be an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [steps.record(case, rank, group()) for case in cases]


def with_and_without(rank: int, size: int, cases: list[Case], at: int, value: float) -> list[tuple[Recorded, Recorded]]:
    """Each case with a bad value in one step, and without that step."""
    found = []
    for case in cases:
        bad = steps.record(replace(case, bad=((at, 1, value),)), rank, group())
        all_reduce = case.all_reduce(group())
        before = steps.record(replace(case, steps=at), rank, None, all_reduce=all_reduce)
        after = steps.record(case, rank, None, first=at + 1, all_reduce=all_reduce)
        found.append((bad, Recorded(before.states + after.states[1:], before.results + after.results)))
    return found


def resumed(rank: int, size: int, cases: list[Case], stop: int, auto: bool) -> list[tuple[Recorded, Recorded]]:
    """Runs without a stop, and the part after `stop` of those that were saved, loaded and continued."""
    found = []
    for case in cases:
        ranks = ranks_of(case, size)
        whole = steps.record(case, rank, ranks)
        saved, first = case.all_reduce(ranks), replace(case, steps=stop)
        steps.record(first, rank, ranks, all_reduce=saved)
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        loaded = (replace(case, chunks="auto") if auto else case).all_reduce(ranks)
        loaded.load_state_dict(torch.load(file, weights_only=True))
        found.append((whole, steps.record(case, rank, ranks, first=stop, all_reduce=loaded)))
    return found


def kept(rank: int, size: int, case: Case) -> tuple[bytes, bytes, bytes, dict[str, Any]]:
    """The replies, decoded, and what the tensors became; E of all ranks as this one gathered it; its own state."""
    all_reduce = case.all_reduce(group())
    steps.record(case, rank, group(), all_reduce=all_reduce)
    tensors = case.inputs(rank, case.steps)
    all_reduce(tensors)
    exchange = all_reduce.prepare()
    spread = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    exchange.backend.run(Decode(exchange.layout.all(), exchange.replies, Pointers.to(exchange.layout, spread)))
    decoded, results = (b"".join(t.numpy().tobytes() for t in each) for each in (spread, tensors))
    return decoded, results, exchange.gathered_server_residual().numpy().tobytes(), steps.state_of(all_reduce)


@dataclass
class Watched:
    """A transport that notes what passes through it: starts, waits, and bytes meant for other ranks."""

    transport: Transport
    events: list[str] = field(default_factory=list)
    sent: int = 0
    hook: Callable[[str], None] = lambda phase: None

    def __post_init__(self) -> None:
        self.rank, self.size, self.name = self.transport.rank, self.transport.size, self.transport.name

    def note(self, event: str, phase: str, nbytes: int = 0) -> None:
        self.hook(phase)
        self.events.append(f"{event} {phase}")
        self.sent += nbytes

    def all_to_all(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        self.note("start", phase, sent.nbytes * (self.size - 1) // self.size)
        return WatchedWork(self, self.transport.all_to_all(out, sent, phase), phase)

    def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
        self.note("start", phase, sent.nbytes * (self.size - 1))
        return WatchedWork(self, self.transport.all_gather(out, sent, phase), phase)

    def expect(self, out: Tensor, phase: str) -> None:
        self.events.append(f"expect {phase}")
        if isinstance(self.transport, EarlyReceiver):
            self.transport.expect(out, phase)

    def all_max(self, values: Tensor, phase: str) -> None:
        self.note("all_max", phase)
        self.transport.all_max(values, phase)


@dataclass
class WatchedWork:
    watched: Watched
    work: Work
    phase: str

    def wait(self) -> None:
        self.watched.events.append(f"wait {self.phase}")
        self.work.wait()


def watched(rank: int, size: int, case: Case, calls: int) -> tuple[list[str], int, int, int]:
    """Of the last of several calls: its events and bytes. Of all of them: what the object counted, and one message."""
    transport = Watched(transport_for(group()))
    all_reduce = case.all_reduce(transport)
    for call in range(calls):
        transport.events.clear()
        transport.sent = 0
        all_reduce(case.inputs(rank, call))
    return transport.events, transport.sent, all_reduce.wire_bytes, all_reduce.prepare().format.nbytes


@contextmanager
def error_of(errors: list[str]) -> Iterator[None]:
    """Note the type and text of an exception."""
    try:
        yield
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


@contextmanager
def logged(form: str = "%(message)s") -> Iterator[list[str]]:
    """What onebit logs meanwhile, in a form of logging's."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("onebit")
    handler.setFormatter(logging.Formatter(form))
    handler.emit = lambda record: said.append(handler.format(record))  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def bare_transport(backends: dict[str, str]) -> TorchTransport:
    """Rank 0 of 2 that are not there."""
    transport = TorchTransport.__new__(TorchTransport)
    transport.group, transport.rank, transport.size, transport.name = None, 0, 2, next(iter(backends.values()))
    transport.backends, transport.members, transport.expected = backends, [0, 1], {}
    return transport


def transports(rank: int, size: int, members: list[int]) -> tuple[str, list[str], list[int]]:
    """Of the default group, and of a group that not all ranks are in, made in both ways. Then rank and size in one half
    of all ranks: some have made more groups than others."""
    made, texts = dist.new_group(members), []
    for maker in (transport_for, TorchTransport):
        with error_of(texts):
            transport = maker(made)
            texts.append(f"{type(transport).__name__} {transport.rank} of {transport.size} {transport.name}")
    default = transport_for(None)
    half = default.split(rank % 2)
    return f"{type(default).__name__} {default.rank} of {default.size} {default.name}", texts, [half.rank, half.size]


def collectives(rank: int, size: int, nbytes: list[int]) -> tuple[Any, ...]:
    return collectives_over(transport_for(group())), gathered(rank, size, nbytes), expected(rank, size)


def gathered(rank: int, size: int, nbytes: list[int]) -> list[list[list[int]]]:
    """The ends of each rank's message of each size. Then where torchrun says that each rank is on a host of its own."""
    found = []
    for variables in ({}, dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE"), str(size))):
        for n in nbytes:
            own = torch.zeros((1, n), dtype=torch.uint8)
            own[0, 0], own[0, -1] = (7 * rank + 250) % 256, n * rank % 256
            everyone = torch.full((size, n), 255, dtype=torch.uint8)
            with patch.dict(os.environ, variables):
                transport_for(group()).all_gather(everyone, own, "gathering").wait()
            found.append(everyone[:, [0, -1]].tolist())
    return found


def expected(rank: int, size: int) -> list[Any]:
    """Two all-gathers that were announced and one that was not, and an all-to-all."""
    transport = transport_for(group())
    outs = [torch.full((size, 5), 255, dtype=torch.uint8) for _ in range(4)]
    sent = [torch.full((1, 5), 10 * k + rank, dtype=torch.uint8) for k in range(4)]
    assert size == 1 or isinstance(transport, EarlyReceiver)
    for out in (outs[0], outs[1], outs[1]) if size > 1 else ():  # a second time is as once
        transport.expect(out, "test")
    works = [transport.all_to_all(outs[3], sent[3].expand(size, 5).contiguous(), "test")]
    works += [transport.all_gather(out, own, "test") for out, own in zip(outs[:3], sent[:3], strict=True)]
    for one in works:
        one.wait()
    return [out.tolist() for out in outs]


SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def collectives_over(transport: Transport) -> tuple[list[Any], ...]:
    rank, size = transport.rank, transport.size
    messages = (rank * 50 + 10 * torch.arange(size)[:, None] + torch.arange(3)).to(torch.uint8)
    first, second, everyone = (torch.full((size, 3), 255, dtype=torch.uint8) for _ in range(3))
    started = [
        transport.all_to_all(first, messages, "first"),
        transport.all_gather(everyone, messages[:1], "second"),
        transport.all_to_all(second, messages + 1, "third"),
    ]
    for one in (started[2], started[0], started[1]):
        one.wait()
    greatest = torch.tensor([rank, -rank, 7], dtype=torch.int32)
    transport.all_max(greatest, "fourth")
    floats = torch.tensor([0.25 * rank], dtype=torch.float64)
    transport.all_max(floats, "fifth")
    sums = [torch.tensor([rank, 2.0, -rank, 0.5], dtype=dtype) for dtype in SUMMED]
    sums.append(torch.tensor([1 + 2.0**-40], dtype=torch.float64))  # more than fp32 holds
    for one in [transport.all_sum(values, "sixth") for values in sums]:
        one.wait()
    answers = first, second, everyone, greatest, floats
    return *(answer.tolist() for answer in answers), [values.tolist() for values in sums]


def over_a_default_group_made_with(rank: int, size: int, backend: str | None, path: str) -> tuple[str, list[Any]]:
    """Groups of a default group that was made with this backend or none named, and what they carry."""
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    transport = transport_for()
    carried: list[Any] = []
    for each in (transport, transport.duplicate(), transport.split(0), transport.split(rank)):
        values = torch.tensor([each.rank], dtype=torch.int64)
        each.all_max(values, "comparing")
        carried.append(int(values))
    params = [torch.nn.Parameter(torch.ones(70))]
    optimizer = onebit.OneBitAdam(params, freeze_step=1, overlap=True)
    for _ in range(3):
        (params[0] * (rank + 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return transport.name, [*carried, params[0].tolist()]
