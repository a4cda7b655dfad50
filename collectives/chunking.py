"""How many chunks: measured once on the real group, the same on all ranks, kept in rank 0's cache.

More chunks overlap more of the packing with the network and pay more latency; which wins depends on both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from onebit.collectives.exchange import Exchange
from onebit.collectives.flags import MOST_ELEMENTS
from onebit.collectives.topology import Topology, on_one_host
from onebit.collectives.transport.protocol import Ranks
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels import streams
from onebit.kernels.data.hyper import Hyper, hyper_table
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.kernels.data.wire import Norm, Scale
from onebit.kernels.passes import Compress, Decode, Gradients
from onebit.kernels.tuning import cache

logger = logging.getLogger("onebit")

CANDIDATES = (1, 2, 4, 8)
_MOST_ELEMENTS = 2**25  # what is measured of a larger model: the ratio of packing to sending is the same
_BLOCKS_A_SHARD = 16  # a chunk with fewer is latency alone


def candidates(numel: int, ranks: int, block_size: int) -> list[int]:
    """Chunk counts worth measuring."""
    return [c for c in CANDIDATES if c == 1 or numel >= c * ranks * _BLOCKS_A_SHARD * block_size]


def chunk_options(numel: int, ranks: int, block_size: int) -> list[int]:
    """One chunk where its message, being the only one and small, carries the flags; else those worth measuring."""
    return [1] if numel <= MOST_ELEMENTS else candidates(numel, ranks, block_size)


def shards_of(topology: Topology, way: type[Exchange]) -> int:
    """Into how many a chunk is cut: with two levels, every slice of it as a chunk otherwise."""
    return topology.slices * way.shards(topology.replicas.size)


def candidates_on(topology: Topology, numel: int, block_size: int, way: type[Exchange]) -> list[int]:
    """Those of a group of ranks."""
    if topology.shard is not None:
        return candidates(numel, shards_of(topology, way), block_size)
    return chunk_options(numel, shards_of(topology, way), block_size)


def choose_chunks(
    topology: Topology,
    numel: int,
    device: torch.device,
    scale: Scale,
    norm: Norm,
    block_size: int,
    way: type[Exchange] = TwoPhases,
) -> int:
    """The number of chunks for a model of `numel` elements: a collective call."""
    everyone, options = topology.copies, candidates_on(topology, numel, block_size, way)
    if everyone.size == 1 or len(options) == 1:
        return 1
    key = _key(topology, numel, device, way)
    cached = cache.shared().get(key).get("chunks", 0) if everyone.rank == 0 else 0
    chunks = torch.tensor([cached if cached in options else 0], dtype=torch.int32, device=device)
    everyone.all_max(chunks, "agreeing on the number of chunks (all-reduce of one number)")
    if int(chunks) > 0:
        return int(chunks)
    seconds = measure_chunks(
        topology, numel, device, scale=scale, norm=norm, block_size=block_size, options=options, way=way
    )
    best, _ = save_chunks(topology, numel, device, seconds, way)
    if everyone.rank == 0:
        table = ", ".join(f"{c}: {t * 1e3:.1f} ms" for c, t in seconds.items())
        logger.info("Pipelining over %d chunks (measured on the group: %s)", best, table)
    return best


def save_chunks(
    topology: Topology, numel: int, device: torch.device, seconds: dict[int, float], way: type[Exchange] = TwoPhases
) -> tuple[int, bool]:
    """The fastest, the fewest of equally fast ones; rank 0 writes it to its cache, for all. Whether it could. A
    collective call."""
    best = min(seconds, key=lambda c: (seconds[c], c))
    key = _key(topology, numel, device, way)
    return best, topology.copies.rank > 0 or cache.shared().put(key, {"chunks": best})


def _key(topology: Topology, numel: int, device: torch.device, way: type[Exchange]) -> str:
    """What is measured on one host, where messages pass no network, is kept apart. A collective call."""
    ranks = f"{topology.copies.size} ranks" + (f", {topology.node.size} a node" if topology.node else "")
    ranks += ", one host" if on_one_host(topology.copies, device) else ""
    kind = "" if way is TwoPhases else f", reply {way.way}"
    return f"{topology.copies.name}, {ranks}, {device.type}, 2^{numel.bit_length()} elements{kind}, chunks"


def measure_chunks(
    topology: Topology,
    numel: int,
    device: torch.device,
    *,
    scale: Scale,
    norm: Norm,
    block_size: int,
    options: list[int],
    dtype: torch.dtype = torch.float32,
    way: type[Exchange] = TwoPhases,
) -> dict[int, float]:
    """Seconds of one exchange for each number of chunks: the slowest rank's, the same on all ranks."""
    numel = min(numel, _MOST_ELEMENTS)
    source = torch.Generator(device).manual_seed(topology.copies.rank)
    tensor = torch.randn(numel, generator=source, device=device).to(dtype)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    hyper = hyper_table([Hyper()], device)
    seconds = {}
    for chunks in options:
        layout = Layout([numel], block_size=block_size, ranks=shards_of(topology, way), chunks=chunks)
        exchange = way.of(topology, layout, device, scale, norm)
        x = Pointers.to(layout, [tensor])

        def step(exchange: Exchange = exchange, x: Pointers = x) -> None:
            backend = exchange.backend
            replies = exchange.run(
                lambda c: backend.run(
                    Compress(c.slice, Gradients(x, hyper, flags), momentum=None, residual=c.residual, out=c.sent)
                )
            )
            backend.run(Decode(exchange.layout.all(), replies, x))  # in the place of the update, after the last chunk

        seconds[chunks] = _slowest(topology.copies, device, step)
    return seconds


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
