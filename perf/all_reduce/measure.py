"""A rank of the all-reduce benchmark: it checks the compressed all-reduce, and times it and the others."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives import CompressedAllReduce
from onebit.collectives.exchange import Chunk, Server
from onebit.collectives.reply import AskedReply
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.pointers import Pointers
from perf.command import WrongResult
from perf.ranks import Ranks, Show, check_same, describe_group, process_group, unsupported

KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ONE_BIT = "1 bit"
DIRECT = "direct"  # 1 bit, with reply="direct"
CHECKED_CALLS = 3
CHECKED_ELEMENTS = 2**16


@dataclass(frozen=True)
class Row:
    """One kind of all-reduce, of one size, on one network."""

    hosts: int
    rate: str | None  # of each link of the lab: "1gbit", "unshaped"; None outside it
    elements: int
    kind: str
    seconds: float | None = None
    calls: tuple[float, ...] = ()  # seconds of each, the slowest rank's
    bytes: float | None = None  # sent a call, by the rank that sends most
    chunks: int | None = None
    phases: dict[str, float] | None = None  # seconds of each alone, unpipelined
    error: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Row:
        """From JSON."""
        return cls(**{**fields, "calls": tuple(fields["calls"])})


def check(ranks: Ranks, average: CompressedAllReduce, elements: int) -> None:
    """A few calls: all ranks get the same, and sum of results + mean residual + E = sum of mean inputs.

    Sums are compared on elements an odd stride apart, so that no place within a block is left out.
    """
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    x = torch.empty(elements, device=ranks.device)
    sampled = torch.arange(0, elements, elements // CHECKED_ELEMENTS | 1, device=ranks.device)
    given, got = (torch.zeros(len(sampled), dtype=torch.float64, device=ranks.device) for _ in range(2))
    for call in range(1, CHECKED_CALLS + 1):
        given += x.normal_(generator=generator)[sampled]
        average(x)
        check_same(ranks, x, f"after call {call}")
        got += x[sampled]
    exchange = average.prepare()
    server = torch.zeros(exchange.layout.all().elements, device=ranks.device)
    for own in (chunk.server for chunk in exchange.chunks):
        if own is not None:
            own.shard.of(server).copy_(own.residual.value)
    expected = (given - exchange.residual.value[sampled]) / ranks.size - server[sampled]
    dist.all_reduce(expected)
    error, limit = float((got - expected).abs().max()), 1e-5 * float(1 + expected.abs().max())
    if not error <= limit:
        raise WrongResult(
            f"after {CHECKED_CALLS} calls with {elements:,} elements the sum of the results plus the mean residuals "
            f"differs from the sum of the mean inputs by {error:.3g}, more than rounding's {limit:.3g}"
        )


def measure(ranks: Ranks, elements: int, chunks: Any, repeats: int, phases: bool, direct: bool = False) -> list[Row]:
    """The rows of one size. A collective call."""
    replies: dict[str, AskedReply] = {ONE_BIT: 1, **({DIRECT: "direct"} if direct else {})}
    rows = [_compressed(ranks, kind, reply, elements, chunks, repeats, phases) for kind, reply in replies.items()]
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    return [*rows, *(_uncompressed(ranks, kind, source, repeats, f"{elements:,} elements") for kind in KINDS)]


def _compressed(
    ranks: Ranks, kind: str, reply: AskedReply, elements: int, chunks: Any, repeats: int, phases: bool
) -> Row:
    what = f"{elements:,} elements"
    ranks.progress(f"{what}: checking results")
    average = CompressedAllReduce(elements, device=ranks.device, reply=reply, chunks=chunks)
    check(ranks, average, elements)
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    x = torch.empty_like(source)
    row = _timed(ranks, Row(ranks.size, None, elements, kind), source, x, lambda: average(x), repeats, what)
    check_same(ranks, x, "after the timed calls")
    return replace(row, chunks=average.chunks, phases=_phases(ranks, average, x, repeats) if phases else None)


def _uncompressed(ranks: Ranks, kind: str, source: Tensor, repeats: int, what: str) -> Row:
    row, inputs = Row(ranks.size, None, source.numel(), kind), source.to(KINDS[kind])
    if error := unsupported(inputs):
        return replace(row, error=error)
    x = torch.empty_like(inputs)
    return _timed(ranks, row, inputs, x, lambda: dist.all_reduce(x), repeats, what)


def _timed(
    ranks: Ranks, row: Row, source: Tensor, x: Tensor, run: Callable[[], object], repeats: int, what: str
) -> Row:
    seconds, before = [], None
    for call in range(repeats + 1):
        x.copy_(source)
        ranks.progress(f"{what}: {row.kind}, call {call + 1} of {repeats + 1}")
        if call == 1:
            ranks.barrier()  # what the call before has sent, has left
            before = ranks.bytes_sent()
        seconds.append(ranks.seconds(run))
    ranks.barrier()
    after = ranks.bytes_sent()
    calls = ranks.slowest(seconds)[1:]
    sent = ranks.bytes_a_call(before, after, repeats)
    return replace(row, seconds=statistics.median(calls), calls=calls, bytes=sent)


def _phases(ranks: Ranks, average: CompressedAllReduce, x: Tensor, repeats: int) -> dict[str, float]:
    """Seconds of each phase alone on all ranks at once: what pipelining has to overlap."""
    exchange, transport = average.prepare(), average.transport
    backend, everything = exchange.backend, exchange.layout.all()
    pointers, hyper = Pointers.to(exchange.layout, [x]), hyper_table([Hyper()], ranks.device)
    flags = torch.zeros(1, dtype=torch.int32, device=ranks.device)

    def of_server(c: Chunk, server: Server) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("all-to-all", lambda: transport.all_to_all(server.received.buffer, c.sent.buffer, "gather").wait()),
            ("average", lambda: backend.average(server.shard, server.received, server.residual, server.reply)),
        ]

    def of_chunk(c: Chunk) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("compress", lambda: backend.compress(c.slice, pointers, None, c.residual, hyper, flags, c.sent)),
            *(of_server(c, c.server) if c.server is not None else ()),
            ("all-gather", lambda: transport.all_gather(c.replies.buffer, c.own_reply.buffer, "scatter").wait()),
            ("decode", lambda: backend.decode(c.span, c.replies, pointers)),
        ]

    parts: list[tuple[str, Callable[[], object]]] = [
        ("scan", lambda: backend.scan(everything, pointers, hyper, flags)),
        ("agree", lambda: transport.all_max(flags, "agree")),
        *(part for chunk in exchange.chunks for part in of_chunk(chunk)),
    ]
    runs = [ranks.slowest([ranks.seconds(run) for _, run in parts]) for _ in range(repeats)]
    medians = [statistics.median(calls) for calls in zip(*runs, strict=True)]
    names = dict.fromkeys(name for name, _ in parts)
    return {n: sum(s for s, (name, _) in zip(medians, parts, strict=True) if name == n) for n in names}


def run_rank(arguments: argparse.Namespace, show: Show) -> tuple[list[Row], dict[str, Any], int]:
    """Measure on this process's group: the rows, which are the same on all ranks, what group it is, and our rank."""
    with process_group(arguments, show) as ranks:
        group = describe_group(ranks)
        rows = []
        for elements in arguments.elements:
            rows += measure(ranks, elements, arguments.chunks, arguments.repeats, arguments.phases, arguments.direct)
        return rows, group, ranks.rank
