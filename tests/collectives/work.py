"""What ranks do for these tests: each function runs on every rank of a group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onebit.collectives.transport.protocol import Transport, Work
from onebit.collectives.transport.torch import TorchTransport
from tests.collectives import steps
from tests.collectives.steps import Case, Recorded
from tests.faults.striking import AndThen, Watched
from tests.onebit.runs import nodes_of, on_warnings
from tests.ranks import group


def ranks_of(case: Case, size: int) -> Any:
    """The group of the ranks that work, as nodes where the case has some."""
    return nodes_of(group(), size // case.nodes) if case.nodes else group()


def recorded_many(rank: int, size: int, cases: list[Case]) -> list[Recorded]:
    """A warning would be an error."""
    with on_warnings("error"):
        return [steps.record(case, rank, group()) for case in cases]


class Noting(Watched):
    """Notes what passes through it: starts, waits, and bytes of messages meant for other ranks."""

    def __init__(self, ranks: Any) -> None:
        super().__init__(ranks)
        self.events: list[str] = []
        self.sent = 0

    def around(self, start: Callable[[], Work], out: Tensor, phase: str) -> Work:
        self.events.append(f"start {phase}")
        if phase.startswith("the "):
            self.sent += out.nbytes * (self.size - 1) // self.size
        return AndThen(start(), lambda: self.events.append(f"wait {phase}"))

    def expect(self, out: Tensor, phase: str) -> None:
        self.events.append(f"expect {phase}")
        super().expect(out, phase)


def watched(rank: int, size: int, case: Case, calls: int) -> tuple[list[str], int, int, int]:
    """Return events and bytes of the last of several calls; of all of them what the object counted, and one message."""
    transport = Noting(group())
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


SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_collectives(transport: Transport) -> None:
    """Byte b of message k of rank i is i * 50 + k * 10 + b. What was started last is waited for first."""
    rank, size = transport.rank, transport.size
    ranks, at = torch.arange(size)[:, None], torch.arange(3)
    messages = (50 * rank + 10 * ranks + at).to(torch.uint8)
    first, second, everyone = (torch.full((size, 3), 255, dtype=torch.uint8) for _ in range(3))
    started = [
        transport.all_to_all(first, messages, "first"),
        transport.all_gather(everyone, messages[:1], "second"),
        transport.all_to_all(second, messages + 1, "third"),
    ]
    for one in (started[2], started[0], started[1]):
        one.wait()
    assert torch.equal(first, (50 * ranks + 10 * rank + at).to(torch.uint8))
    assert torch.equal(second, first + 1)
    assert torch.equal(everyone, (50 * ranks + at).to(torch.uint8))
    greatest = torch.tensor([rank, -rank, 7], dtype=torch.int32)
    transport.all_max(greatest, "fourth")
    floats = torch.tensor([0.25 * rank], dtype=torch.float64)
    transport.all_max(floats, "fifth")
    assert (greatest.tolist(), floats.tolist()) == ([size - 1, 0, 7], [0.25 * (size - 1)])
    sums = [torch.tensor([rank, 2.0, -rank, 0.5], dtype=dtype) for dtype in SUMMED]
    precise = torch.tensor([1 + 2.0**-40], dtype=torch.float64)  # more than fp32 holds
    for one in [transport.all_sum(values, "sixth") for values in (*sums, precise)]:
        one.wait()
    total = size * (size - 1) / 2
    assert [values.tolist() for values in sums] == [[total, 2.0 * size, -total, 0.5 * size]] * len(SUMMED)
    assert precise.tolist() == [size * (1 + 2.0**-40)]
