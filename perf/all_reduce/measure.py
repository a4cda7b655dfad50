"""A rank of the all-reduce benchmark: it checks the compressed all-reduce, and times it and the others."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives import CompressedAllReduce
from onebit.collectives.averaging import average_slices
from onebit.collectives.exchange import Chunk, Server
from onebit.collectives.reply import AskedReply
from onebit.collectives.transport.protocol import Transport
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.pointers import Pointers
from perf.command import WrongResult
from perf.ranks import Ranks, Show, check_same, describe_group, process_group, unsupported

KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ONE_BIT = "1 bit"
DIRECT = "direct"  # 1 bit, with reply="direct"
TWO_LEVELS = "1 bit, two levels"  # the ranks of a host are one rank to the network
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
    bytes: float | None = None  # sent a call, by the host that sends most
    chunks: int | None = None
    phases: dict[str, float] | None = None  # seconds of each alone, unpipelined
    error: str | None = None
    each: int = 1  # ranks a host

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Row:
        """From JSON."""
        return cls(**{**fields, "calls": tuple(fields["calls"])})


def by_kind(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """A group for each size on each network: its rows by kind."""
    groups: dict[tuple[int, str | None, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.hosts, row.rate, row.elements), {})[row.kind] = row
    return list(groups.values())


def check(ranks: Ranks, average: CompressedAllReduce, elements: int) -> None:
    """A few calls: all ranks get the same, and sum of results + mean residual + E = sum of mean inputs.

    With two levels a rank has the residual of its slice alone, of which the mean is taken over the nodes. Sums are
    compared on elements an odd stride apart, so that no place within a block is left out.
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
    left_out = torch.zeros(exchange.layout.all().elements, device=ranks.device)  # this rank's part of it
    for chunk in exchange.chunks:
        chunk.slice.of(left_out).add_(chunk.residual.value, alpha=1 / average.topology.nodes)
        if chunk.server is not None:
            chunk.server.shard.of(left_out).add_(chunk.server.residual.value)
    expected = given / ranks.size - left_out[sampled]
    dist.all_reduce(expected)
    error, limit = float((got - expected).abs().max()), 1e-5 * float(1 + expected.abs().max())
    if not error <= limit:
        raise WrongResult(
            f"after {CHECKED_CALLS} calls with {elements:,} elements the sum of the results plus the mean residuals "
            f"differs from the sum of the mean inputs by {error:.3g}, more than rounding's {limit:.3g}"
        )


def measure(ranks: Ranks, elements: int, chunks: Any, repeats: int, phases: bool, direct: bool = False) -> list[Row]:
    """The rows of one size; with several ranks a host also those of two levels. A collective call."""
    replies: dict[str, AskedReply] = {ONE_BIT: 1, **({DIRECT: "direct"} if direct else {})}
    replies |= {TWO_LEVELS: "auto"} if ranks.each > 1 else {}
    rows = [_compressed(ranks, kind, reply, elements, chunks, repeats, phases) for kind, reply in replies.items()]
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    return [*rows, *(_uncompressed(ranks, kind, source, repeats, f"{elements:,} elements") for kind in KINDS)]


def _compressed(
    ranks: Ranks, kind: str, reply: AskedReply, elements: int, chunks: Any, repeats: int, phases: bool
) -> Row:
    what = f"{elements:,} elements"
    ranks.progress(f"{what}: checking results")
    node_group = "auto" if kind == TWO_LEVELS else None
    average = CompressedAllReduce(elements, device=ranks.device, reply=reply, chunks=chunks, node_group=node_group)
    check_levels(ranks, average, kind)
    check(ranks, average, elements)
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    x = torch.empty_like(source)
    row = _timed(ranks, _row(ranks, elements, kind), source, x, lambda: average(x), repeats, what)
    check_same(ranks, x, "after the timed calls")
    return replace(row, chunks=average.chunks, phases=_phases(ranks, average, x, repeats) if phases else None)


def check_levels(ranks: Ranks, average: CompressedAllReduce, kind: str) -> None:
    """WrongResult unless the nodes that were found are the hosts: with one level, ranks."""
    slices = ranks.each if kind == TWO_LEVELS else 1
    if (found := (average.topology.nodes, average.topology.slices)) != (ranks.size // slices, slices):
        raise WrongResult(
            f"{kind}: {found[0]} nodes of {found[1]} ranks were found where {ranks.size // slices} of {slices} are"
        )


def _row(ranks: Ranks, elements: int, kind: str) -> Row:
    """Of what is not yet measured."""
    return Row(ranks.size // ranks.each, None, elements, kind, each=ranks.each)


def _uncompressed(ranks: Ranks, kind: str, source: Tensor, repeats: int, what: str) -> Row:
    row, inputs = _row(ranks, source.numel(), kind), source.to(KINDS[kind])
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
    exchange, transport, node = average.prepare(), average.transport, average.topology.node
    backend, layout = exchange.backend, exchange.layout
    pointers, hyper = Pointers.to(layout, [x]), hyper_table([Hyper()], ranks.device)
    flags = torch.zeros(1, dtype=torch.int32, device=ranks.device)

    def scan(c: Chunk) -> tuple[str, Callable[[], object]]:
        return "scan", lambda: backend.scan(c.slice, pointers, hyper, flags)

    def of_server(c: Chunk, server: Server) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("all-to-all", lambda: transport.all_to_all(server.received.buffer, c.sent.buffer, "gather").wait()),
            ("average", lambda: backend.average(server.shard, server.received, server.residual, server.reply)),
        ]

    def of_node(c: Chunk, node: Transport) -> list[tuple[str, Callable[[], object]]]:
        slices, out, own = layout.slices(c.index, node.size), c.replies.buffer.view(node.size, -1), c.arriving.buffer
        return [
            ("node mean", lambda: average_slices(slices, [x], [x], node)),
            ("spread", lambda: node.all_gather(out, own.view(1, -1), "spread").wait()),
        ]

    def of_chunk(c: Chunk) -> list[tuple[str, Callable[[], object]]]:
        return [
            *(of_node(c, node) if node is not None else ()),
            ("compress", lambda: backend.compress(c.slice, pointers, None, c.residual, hyper, flags, c.sent)),
            *(of_server(c, c.server) if c.server is not None else ()),
            ("all-gather", lambda: transport.all_gather(c.arriving.buffer, c.own_reply.buffer, "scatter").wait()),
            ("decode", lambda: backend.decode(c.span, c.replies, pointers)),
        ]

    parts: list[tuple[str, Callable[[], object]]] = [
        *map(scan, exchange.chunks),
        ("agree", lambda: average.topology.everyone.all_max(flags, "agree")),
        *(part for chunk in exchange.chunks for part in of_chunk(chunk)),
    ]
    runs = [ranks.slowest([ranks.seconds(run) for _, run in parts]) for _ in range(repeats)]
    medians = [statistics.median(calls) for calls in zip(*runs, strict=True)]
    names = dict.fromkeys(name for name, _ in parts)
    return {n: sum(s for s, (name, _) in zip(medians, parts, strict=True) if name == n) for n in names}


def run_rank(arguments: argparse.Namespace, show: Show) -> tuple[list[Row], dict[str, Any], int]:
    """Measure on this process's group: the rows, which are the same on all ranks, what group it is, and our rank."""
    with process_group(arguments, show, arguments.each) as ranks:
        group = describe_group(ranks)
        rows = []
        for elements in arguments.elements:
            rows += measure(ranks, elements, arguments.chunks, arguments.repeats, arguments.phases, arguments.direct)
        return rows, group, ranks.rank
