"""A model on ever more ranks, and on links ever longer: `onebit plan --scale`.

    message        bytes of what a rank sends to a server, in one chunk: 1 bit an element over slices and nodes
    messages       that a rank sends one after the other in a step: M - 1 to servers, M - 1 replies
    servers        that could take LEAST bytes each: with more, messages get smaller and nothing is gained
    round trips    for which a step waits
    share          a server's average of its shard: of N messages, 1/N of the elements each

M are the ranks to the network: nodes with two levels, else all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from onebit.cli.plan.model import (
    Cluster,
    Groups,
    Model,
    message_bytes,
    pass_seconds,
    rounds,
    stage_2,
    state_bytes,
    uncompressed,
)
from onebit.collectives.reply import way_for

RANKS = (8, 64, 512, 4096)
NODES = (1, 8)  # ranks of a node
ROUND_TRIPS = (0.05e-3, 30e-3, 100e-3)  # seconds: a rack, and between sites
LEAST = 2**16  # bytes of a message that is worth its latency


@dataclass(frozen=True)
class Size:
    """Bytes and seconds of a step at a number of ranks. `fp16` and `one_bit`: seconds of a step by round trip."""

    ranks: int
    node: int
    message: float
    messages: int
    servers: int
    state: float
    direct: float
    share: float
    round_trips: float
    fp16: list[float]
    one_bit: list[float]


def sizes(model: Model, cluster: Cluster) -> list[Size]:
    """By the ranks of a node; where there are several nodes."""
    shapes = [(ranks, node) for node in NODES for ranks in RANKS if ranks > node]
    return [_size(model, replace(cluster, gpus=ranks, gpus_per_node=node)) for ranks, node in shapes]


def _size(model: Model, cluster: Cluster) -> Size:
    groups = Groups.of(cluster, model.levels)
    n, slices = groups.replicas.gpus, groups.slices
    way = way_for(model.reply, n)
    gathered, replied = message_bytes(model.elements, n, 1, way, slices)
    two_phases = gathered > 0
    shard = model.elements / slices / n
    share = pass_seconds("average", shard, groups.replicas, model.itemsize, way) if two_phases else 0.0
    there = [replace(cluster, rtt=rtt) for rtt in ROUND_TRIPS]
    return Size(
        ranks=cluster.gpus,
        node=cluster.on_node,
        message=(gathered if two_phases else replied) / slices / n,
        messages=(2 if two_phases else 1) * (n - 1),
        servers=min(n, max(1, int(model.elements / 8 / slices / LEAST))),
        state=model.elements * state_bytes(model, cluster),
        direct=model.elements * state_bytes(replace(model, reply="direct"), cluster),
        share=share,
        round_trips=rounds(model, cluster),
        fp16=[uncompressed(model, each, 2).total for each in there],
        one_bit=[stage_2(model, each).total for each in there],
    )


def scale_as_json(model: Model, cluster: Cluster) -> dict[str, Any]:
    return {"round_trips_s": ROUND_TRIPS, "sizes": [asdict(each) for each in sizes(model, cluster)]}


def scale_table(model: Model, cluster: Cluster) -> str:
    """Two tables, of what a step needs and how long it takes. Widths are those of Markdown's cells."""
    found = sizes(model, cluster)
    needs = [("ranks", "kB a message", "messages", "servers of 64 kB", "GB of state", "direct", "share, ms", "waits")]
    times = [("seconds a step", *(f"{what}, {1e3 * rtt:g} ms" for rtt in ROUND_TRIPS for what in ("fp16", "1 bit")))]
    for each in found:
        name = f"{each.ranks:,}" + (f", {each.node} a node" if each.node > 1 else "")
        state = (f"{1e-9 * each.state:,.2f}", f"{1e-9 * each.direct:,.2f}")
        counts = (f"{each.messages:,}", f"{each.servers:,}")
        share = f"{1e3 * each.share:.2f}" if each.share else "none"
        needs.append((name, f"{each.message / 1e3:,.1f}", *counts, *state, share, f"{each.round_trips:g}"))
        pairs = [f"{seconds:,.3g}" for pair in zip(each.fp16, each.one_bit, strict=True) for seconds in pair]
        times.append((name, *pairs))
    about = (
        f"{model.elements:,} elements, {cluster.network / 1e9:g} Gbit/s a node, {cluster.transport}. Predicted, not "
        "measured.\nWaits: round trips that a step of stage 2 waits for, in one chunk."
    )
    return "\n\n".join([about, _columns(needs), _columns(times)])


def _columns(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"{first:<16}" + "".join(f"{cell:>17}" for cell in cells) for first, *cells in rows]
    return "\n".join(line.rstrip() for line in lines)
