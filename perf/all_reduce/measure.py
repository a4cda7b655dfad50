"""A rank of the all-reduce benchmark: it times the compressed all-reduce and the others."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.collectives import CompressedAllReduce
from perf.lab.workers import Publish
from perf.ranks import Ranks, Show, check_same, describe_group, process_group

KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ONE_BIT = "1 bit"
DIRECT = "direct"  # 1 bit, with reply="direct"
TWO_LEVELS = "1 bit, two levels"  # the ranks of a host are one rank to the network
COMPRESSED: dict[str, dict[str, Any]] = {  # with the options of CompressedAllReduce
    ONE_BIT: {"reply": 1}, DIRECT: {"reply": "direct"}, TWO_LEVELS: {"node_group": "auto"},
    "4 bits": {"bits": 4}, "8 bits": {"bits": 8},
}  # fmt: skip


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
    phases: dict[str, float] | None = None  # seconds of each alone, in the records of perf.cluster
    each: int = 1  # ranks a host
    measured: float | None = None  # rate of the link, bits a second, where it is paced

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Row:
        """Make a row from a record, which may say more."""
        own = {field.name: fields[field.name] for field in dataclasses.fields(cls) if field.name in fields}
        return cls(**{**own, "calls": tuple(fields["calls"])})


def by_kind(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """A group for each size on each network: its rows by kind."""
    groups: dict[tuple[int, str | None, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.hosts, row.rate, row.elements), {})[row.kind] = row
    return list(groups.values())


@dataclass(frozen=True)
class TimedKind:
    """What is timed: `run` averages x, which is `source` before. finished: the row, from times and bytes."""

    row: Row
    source: Tensor
    x: Tensor
    run: Callable[[], object]
    finished: Callable[[Row], Row] = lambda row: row


def measure(ranks: Ranks, elements: int, how: argparse.Namespace) -> list[Row]:
    """The rows of one size; with several ranks a host also those of two levels. A collective call.

    how: the command's chunks, repeats, in_a_row and direct.
    """
    left_out = {*(() if how.direct else (DIRECT,)), *(() if ranks.each > 1 else (TWO_LEVELS,))}
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    kinds = [_compressed(ranks, kind, source, how.chunks) for kind in COMPRESSED if kind not in left_out]
    kinds += [_uncompressed(ranks, kind, source) for kind in KINDS]
    return time_in_turn(ranks, kinds, how.repeats, how.in_a_row, f"{elements:,} elements")


def _compressed(ranks: Ranks, kind: str, source: Tensor, chunks: Any) -> TimedKind:
    elements = source.numel()
    average = CompressedAllReduce(elements, device=ranks.device, chunks=chunks, **COMPRESSED[kind])
    x = torch.empty_like(source)

    def finished(row: Row) -> Row:
        check_same(ranks, x, "after the timed calls")
        return replace(row, chunks=average.chunks)

    return TimedKind(_row(ranks, elements, kind), source, x, lambda: average(x), finished)


def _row(ranks: Ranks, elements: int, kind: str) -> Row:
    """Make a row of what is not yet measured."""
    return Row(ranks.size // ranks.each, None, elements, kind, each=ranks.each, measured=ranks.link_rate)


def _uncompressed(ranks: Ranks, kind: str, source: Tensor) -> TimedKind:
    inputs = source.to(KINDS[kind])
    x = torch.empty_like(inputs)
    return TimedKind(_row(ranks, source.numel(), kind), inputs, x, lambda: dist.all_reduce(x))


def time_in_turn(ranks: Ranks, kinds: Sequence[TimedKind], repeats: int, in_a_row: int, what: str) -> list[Row]:
    """All kinds in turn, so that what slows the machine for a while slows all of them. The first turn does not count.

    A time is that of a call, the mean of `in_a_row` calls after one barrier. Bytes are those of the turn that sent
    least: TCP on a busy machine sends some again.
    """
    seconds: list[list[float]] = [[] for _ in kinds]
    sent: list[list[float]] = [[] for _ in kinds]
    for turn in range(repeats + 1):
        for i, kind in enumerate(kinds):
            ranks.progress(f"{what}: {kind.row.kind}, turn {turn + 1} of {repeats + 1}")
            kind.x.copy_(kind.source)
            ranks.barrier()  # what was sent before, has left
            before = ranks.bytes_sent()
            took = ranks.seconds(lambda run=kind.run: [run() for _ in range(in_a_row)])  # type: ignore[misc]
            ranks.barrier()
            if turn:
                seconds[i].append(took / in_a_row)
                sent[i].append(ranks.bytes_sent() - before)
    rows = []
    for kind, own, nbytes in zip(kinds, seconds, sent, strict=True):
        calls = ranks.slowest(own)
        most = ranks.most_bytes(min(nbytes) / in_a_row)
        rows.append(kind.finished(replace(kind.row, seconds=statistics.median(calls), calls=calls, bytes=most)))
    return rows


def run_rank(arguments: argparse.Namespace, show: Show, publish: Publish) -> None:
    """Measure on this process's group; on rank 0 `publish` gets what is found, first what group it is."""
    with process_group(arguments, show, arguments.each) as ranks:
        group = describe_group(ranks)
        found = [group, *(row for elements in arguments.elements for row in measure(ranks, elements, arguments))]
        for each in found if ranks.rank == 0 else ():
            publish(each)
