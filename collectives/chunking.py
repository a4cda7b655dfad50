"""How many chunks: measured once on the real group, the same on all ranks, kept in rank 0's cache.

More chunks overlap more of the packing with the network and pay more latency; which wins depends on both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onebit.collectives.exchange import Exchange
from onebit.collectives.flags import MOST_ELEMENTS
from onebit.collectives.topology import Topology, on_one_host
from onebit.collectives.transport.protocol import Ranks
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels import streams
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import BLOCK_SIZE, Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Bits, Norm, Scale
from onebit.kernels.log import to_log
from onebit.kernels.passes import Gradients
from onebit.kernels.tuning import cache

CANDIDATES = (1, 2, 4, 8)
_MOST_ELEMENTS = 2**25  # what is measured of a larger model: the ratio of packing to sending is the same
_BLOCKS_A_SHARD = 16  # a chunk with fewer is latency alone


def candidates(numel: int, ranks: int, block_size: int) -> list[int]:
    """Chunk counts worth measuring."""
    return [c for c in CANDIDATES if c == 1 or numel >= c * ranks * _BLOCKS_A_SHARD * block_size]


def chunk_options(numel: int, ranks: int, block_size: int) -> list[int]:
    """One chunk where its message, being the only one and small, carries the flags; else those worth measuring."""
    return [1] if numel <= MOST_ELEMENTS else candidates(numel, ranks, block_size)


def shards_of(topology: Topology, exchange_class: type[Exchange]) -> int:
    """The number of shards of a chunk: with two levels every slice is cut as a chunk otherwise is."""
    return topology.slices * exchange_class.shards(topology.replicas.size)


@dataclass(frozen=True)
class Chunking:
    """The number of chunks for a model of `numel` elements on a group of ranks."""

    topology: Topology
    numel: int
    device: torch.device
    scale: Scale = "block"
    norm: Norm = "l1"
    bits: Bits = 1
    block_size: int = BLOCK_SIZE
    exchange_class: type[Exchange] = TwoPhases

    @property
    def options(self) -> list[int]:
        """Those worth measuring."""
        some = chunk_options if self.topology.shard is None else candidates
        return some(self.numel, shards_of(self.topology, self.exchange_class), self.block_size)

    def choose(self) -> int:
        """The one in the cache of rank 0, or the one measured to be best: a collective call."""
        everyone, options = self.topology.data_parallel, self.options
        if everyone.size == 1 or len(options) == 1:
            return 1
        key = self._key()
        cached = cache.shared().get(key).get("chunks", 0) if everyone.rank == 0 else 0
        chunks = torch.tensor([cached if cached in options else 0], dtype=torch.int32, device=self.device)
        everyone.all_max(chunks, "agreeing on the number of chunks (all-reduce of one number)")
        if int(chunks) > 0:
            return int(chunks)
        seconds = self.measure(options)
        if len(seconds) < len(options):
            best = min(seconds, key=lambda c: (seconds[c], c), default=1)
            if everyone.rank == 0:
                to_log(
                    logging.WARNING,
                    "Pipelining over %d chunks: a rank has no memory left beside the model to measure more. Pass "
                    "chunks=N, or run `onebit tune` before the next run", best,
                )  # fmt: skip
            return best
        best, _ = self.save(seconds)
        if everyone.rank == 0:
            table = ", ".join(f"{c}: {t * 1e3:.1f} ms" for c, t in seconds.items())
            to_log(logging.INFO, "Pipelining over %d chunks (measured on the group: %s)", best, table)
        return best

    def measure(self, options: Sequence[int], dtype: torch.dtype = torch.float32) -> dict[int, float]:
        """Seconds of one exchange for each number of chunks: the slowest rank's, the same on all ranks. It ends at the
        first for which a rank has no memory left beside the model."""
        everyone, seconds = self.topology.data_parallel, {}
        tensor: Tensor | None = None
        for chunks in options:
            step, short = None, torch.zeros(1, dtype=torch.int32, device=self.device)
            try:
                tensor = self._drawn(dtype) if tensor is None else tensor
                step = self._step(chunks, tensor)
            except RuntimeError as error:
                to_log(logging.DEBUG, "No exchange over %d chunks is measured: %s", chunks, error)
                short.fill_(1)
            everyone.all_max(short, "comparing who has memory to measure with (all-reduce of one number)")
            if step is None or int(short):
                break
            seconds[chunks] = _slowest(everyone, self.device, step)
        return seconds

    def _drawn(self, dtype: torch.dtype) -> Tensor:
        source = torch.Generator(self.device).manual_seed(self.topology.data_parallel.rank)
        return torch.randn(min(self.numel, _MOST_ELEMENTS), generator=source, device=self.device).to(dtype)

    def _step(self, chunks: int, tensor: Tensor) -> Callable[[], None]:
        """An exchange, and what is done before and after. Without communication: all memory that it needs is there."""
        flags = torch.zeros(1, dtype=torch.int32, device=self.device)
        hyper = hyper_table([Hyper()], self.device)
        ranks = shards_of(self.topology, self.exchange_class)
        layout = Layout([tensor.numel()], block_size=self.block_size, ranks=ranks, chunks=chunks)
        exchange = self.exchange_class(self.topology, layout, self.device, self.scale, self.norm, self.bits)
        x = Pointers.to(layout, [tensor])

        def step() -> None:
            replies = exchange.run(lambda c: exchange.compress(c, Gradients(x, hyper, flags)))
            exchange.decode(exchange.layout.all(), replies, x)  # in the place of the update, after all chunks

        return step

    def save(self, seconds: dict[int, float]) -> tuple[int, bool]:
        """The fastest, the fewest of equally fast ones; rank 0 writes it to its cache, for all. Whether it could. A
        collective call."""
        best = min(seconds, key=lambda c: (seconds[c], c))
        key = self._key()
        return best, self.topology.data_parallel.rank > 0 or cache.shared().put(key, {"chunks": best})

    def _key(self) -> str:
        """What is measured on one host, where messages pass no network, is kept apart. A collective call."""
        topology, everyone = self.topology, self.topology.data_parallel
        ranks = f"{everyone.size} ranks" + (f", {topology.node.size} a node" if topology.node else "")
        ranks += ", one host" if on_one_host(everyone, self.device) else ""
        kind = "" if self.exchange_class is TwoPhases else f", reply {self.exchange_class.reply_option}"
        kind += "" if self.bits == 1 else f", {self.bits} bits"
        return f"{everyone.name}, {ranks}, {self.device.type}, 2^{self.numel.bit_length()} elements{kind}, chunks"


def _slowest(everyone: Ranks, device: torch.device, step: Callable[[], None]) -> float:
    """Fastest of three runs after one that does not count, on the slowest rank."""
    step()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        if streams.has_streams(device):
            streams.wait_on_host(streams.current(device))
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    everyone.all_max(slowest, "comparing measurements (all-reduce of three numbers)")
    return float(slowest.min())
