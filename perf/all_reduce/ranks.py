"""What a rank of the all-reduce benchmark does: it checks the compressed all-reduce, and times it and the others."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit.cli import main as cli
from onebit.collectives import CompressedAllReduce
from onebit.collectives.exchange import Chunk
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.tuning.machine import device_name

KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ONE_BIT = "1 bit"
CHECKED_CALLS = 3
CHECKED_ELEMENTS = 2**16


class WrongResult(Exception):
    """A compressed all-reduce that does not compute what it is to compute."""


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


class Ranks:
    """One rank's view of the group: barriers, clocks and counters."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self._say, self._said = device, say, 0.0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def say(self, text: str) -> None:
        """A line of progress, one every two seconds."""
        if self.rank == 0 and time.monotonic() - self._said > 2:
            self._said = time.monotonic()
            self._say(text)

    def barrier(self) -> None:
        self.most(torch.zeros(1))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def most(self, values: Tensor) -> Tensor:
        """The maximum over ranks, elementwise."""
        on_device = values.to(self.device)
        dist.all_reduce(on_device, dist.ReduceOp.MAX)
        return on_device.cpu()

    def slowest(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(self.most(torch.tensor(seconds, dtype=torch.float64)).tolist())

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call on this rank; all ranks begin together."""
        self.barrier()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def bytes_sent(self) -> int | None:
        """This rank's interface's counter; None where it has none for itself."""
        names = (os.environ.get(f"{library}_SOCKET_IFNAME") for library in ("GLOO", "NCCL"))
        name = next((name for name in names if name), None)
        counters = Path("/proc/net/dev")
        if name is None or os.environ.get("LOCAL_WORLD_SIZE") != "1" or not counters.exists():
            return None
        line = re.search(rf"^\s*{re.escape(name)}:(.*)$", counters.read_text(encoding="ascii"), re.MULTILINE)
        return int(line[1].split()[8]) if line else None


def same_everywhere(ranks: Ranks, x: Tensor, when: str) -> None:
    """WrongResult on every rank unless all have the same bits."""
    digest = hashlib.blake2b(x.cpu().view(torch.uint8).numpy().data, digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    most = ranks.most(torch.tensor([number, -number]))
    if most[0] != -most[1]:
        raise WrongResult(f"the ranks' results of {x.numel():,} elements differ {when}")


def check(ranks: Ranks, average: CompressedAllReduce, elements: int) -> None:
    """A few calls: all ranks get the same, and sum of results + mean residual + E = sum of mean inputs.

    The sums are looked at on elements an odd stride apart, so that no place within a block is left out.
    """
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    x = torch.empty(elements, device=ranks.device)
    looked_at = torch.arange(0, elements, elements // CHECKED_ELEMENTS | 1, device=ranks.device)
    given, got = (torch.zeros(len(looked_at), dtype=torch.float64, device=ranks.device) for _ in range(2))
    for call in range(1, CHECKED_CALLS + 1):
        given += x.normal_(generator=generator)[looked_at]
        average(x)
        same_everywhere(ranks, x, f"after call {call}")
        got += x[looked_at]
    layout, owned = average.exchange.layout, average.exchange.server_residual.value
    server = torch.zeros(layout.all().elements, device=ranks.device)
    for chunk, part in enumerate(owned.chunk(layout.chunks)):
        layout.shard(chunk, ranks.rank).of(server).copy_(part)
    expected = (given - average.exchange.residual.value[looked_at]) / ranks.size - server[looked_at]
    dist.all_reduce(expected)
    error, limit = float((got - expected).abs().max()), 1e-5 * float(1 + expected.abs().max())
    if not error <= limit:
        raise WrongResult(
            f"after {CHECKED_CALLS} calls with {elements:,} elements the sum of the results plus the mean residuals "
            f"differs from the sum of the mean inputs by {error:.3g}, more than rounding's {limit:.3g}"
        )


def measure(ranks: Ranks, elements: int, chunks: Any, repeats: int, phases: bool) -> list[Row]:
    """The rows of one size. A collective call."""
    what = f"{elements:,} elements"
    ranks.say(f"{what}: checking results")
    average = CompressedAllReduce(elements, device=ranks.device, chunks=chunks)
    check(ranks, average, elements)
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    source = torch.randn(elements, generator=generator, device=ranks.device)
    x = torch.empty_like(source)
    row = _timed(ranks, Row(ranks.size, None, elements, ONE_BIT), source, x, lambda: average(x), repeats, what)
    same_everywhere(ranks, x, "after the timed calls")
    row = replace(row, chunks=average.chunks, phases=_phases(ranks, average, x, repeats) if phases else None)
    return [row, *(_uncompressed(ranks, kind, source, repeats, what) for kind in KINDS)]


def _uncompressed(ranks: Ranks, kind: str, source: Tensor, repeats: int, what: str) -> Row:
    row, inputs = Row(ranks.size, None, source.numel(), kind), source.to(KINDS[kind])
    if error := refusal(inputs):
        return replace(row, error=error)
    x = torch.empty_like(inputs)
    return _timed(ranks, row, inputs, x, lambda: dist.all_reduce(x), repeats, what)


def refusal(like: Tensor) -> str | None:
    """What the backend says if it can't add this dtype; it says so on every rank, before anything is sent."""
    try:
        dist.all_reduce(torch.zeros_like(like[:1]))
    except (RuntimeError, ValueError, TypeError) as error:
        if isinstance(error, dist.DistError):
            raise
        return str(error).strip().splitlines()[0]
    return None


def _timed(
    ranks: Ranks, row: Row, source: Tensor, x: Tensor, run: Callable[[], object], repeats: int, what: str
) -> Row:
    seconds, before = [], None
    for call in range(repeats + 1):
        x.copy_(source)
        ranks.say(f"{what}: {row.kind}, call {call + 1} of {repeats + 1}")
        if call == 1:
            ranks.barrier()  # what the call before has sent, has left
            before = ranks.bytes_sent()
        seconds.append(ranks.seconds(run))
    ranks.barrier()
    after = ranks.bytes_sent()
    calls = ranks.slowest(seconds)[1:]
    sent = math.nan if before is None or after is None else (after - before) / repeats
    sent = ranks.slowest([sent])[0]
    return replace(row, seconds=statistics.median(calls), calls=calls, bytes=None if math.isnan(sent) else sent)


def _phases(ranks: Ranks, average: CompressedAllReduce, x: Tensor, repeats: int) -> dict[str, float]:
    """Seconds of each phase alone on all ranks at once: what pipelining has to overlap."""
    exchange, transport = average.exchange, average.transport
    backend, everything = exchange.backend, exchange.layout.all()
    pointers, hyper = Pointers.to(exchange.layout, [x]), hyper_table([Hyper()], ranks.device)
    flags = torch.zeros(1, dtype=torch.int32, device=ranks.device)

    def of_chunk(c: Chunk) -> list[tuple[str, Callable[[], object]]]:
        return [
            ("compress", lambda: backend.compress(c.span, pointers, None, c.residual, hyper, flags, c.sent)),
            ("all-to-all", lambda: transport.all_to_all(c.received.buffer, c.sent.buffer, "gather").wait()),
            ("average", lambda: backend.average(c.shard, c.received, c.server_residual, c.reply)),
            ("all-gather", lambda: transport.all_gather(c.replies.buffer, c.reply.buffer, "scatter").wait()),
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


@contextlib.contextmanager
def joined(arguments: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Ranks]:
    """This process's group: made here, and ended, where there is none yet."""
    own = not dist.is_initialized()
    device = cli.pick_device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if own:
        backend = arguments.backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(backend, timeout=timedelta(seconds=arguments.timeout))
    try:
        ranks = Ranks(device, say)
        if ranks.size == 1:
            raise cli.CommandError("a group of one rank has nothing to send: start two or more")
        yield ranks
    finally:
        if own:
            dist.destroy_process_group()


def group_of(ranks: Ranks) -> dict[str, Any]:
    """What a record says of the group."""
    return {
        "device": device_name(ranks.device),
        "backend": str(dist.get_backend()),
        "ranks": ranks.size,
        "threads": torch.get_num_threads(),
    }


def run_rank(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any], int]:
    """Measure on this process's group: the rows, which are the same on all ranks, what group it is, and our rank."""
    with joined(arguments, say) as ranks:
        group = group_of(ranks)
        rows = []
        for elements in arguments.elements:
            rows += measure(ranks, elements, arguments.chunks, arguments.repeats, arguments.phases)
        return rows, group, ranks.rank
