"""What the compressed all-reduce is to reach.

Two levels have two rivals over a host's link: one level as it was measured, and the least that any fp32 all-reduce
between M hosts sends, were the ranks of a host one: 2 (M - 1) / M times 4 bytes an element, computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from onebit.cli.paced_link import PAYLOAD
from perf.all_reduce.measure import ONE_BIT, TWO_LEVELS, Row, by_kind
from perf.lab.rates import rate_bits, rtt_seconds
from perf.targets import Target

# Times fp32's speed: 4 hosts, 25 M elements, 2 cores.
SPEED = {"100mbit": 25.0, "1gbit": 11.0, "3gbit": 4.5, "10gbit": 2.0}
SPEED_HOSTS, LARGE = 4, 25_000_000
SMALL = {("1gbit", 2**18): 1.0, ("1gbit", 2**20): 1.0}  # times fp16's speed: latency counts as much as bytes
BYTES = {"fp32": 28.0, "fp16": 14.0}  # times fewer bytes
BYTES_ELEMENTS = 2**21  # and more: in less, barriers and headers count
ROUND_TRIPS, FEW = 3.0, 2**18  # of a call with few elements, and of a large one beyond its bytes' time
ONE_LEVEL, EACH = 3.8, 4  # times fewer bytes than one level, with so many ranks a host
LEAST_FP32 = 28.0  # times fewer bytes than the least of fp32


def faster(row: Row, than: Row) -> float | None:
    """How many times as fast it is."""
    return than.seconds / row.seconds if row.seconds and than.seconds else None


def smaller(row: Row, than: Row) -> float | None:
    """How many times fewer bytes it sends."""
    return than.bytes / row.bytes if row.bytes and than.bytes else None


def least_fp32(row: Row) -> float:
    """Bytes over a host's link of an fp32 all-reduce between the hosts."""
    return 2 * (row.hosts - 1) / row.hosts * 4 * row.elements


def round_trips(row: Row, without_bytes: bool = False) -> float | None:
    """A call's time in round trips, or that beyond the time in which its bytes pass the link; None where none are."""
    rtt, bits = rtt_seconds(row.rate), rate_bits(row.rate)
    if not row.seconds or not row.bytes or rtt is None or bits is None:
        return None
    return (row.seconds - without_bytes * 8 * row.bytes / PAYLOAD / bits) / rtt


def targets(rows: Sequence[Row]) -> list[Target]:
    """Those that these rows are a measurement of."""
    groups = by_kind(rows)
    if any(TWO_LEVELS in group for group in groups):
        return [*_against_one_level(groups), *_against_least(groups)]
    return [*(target for group in groups for target in _of_times(group)), *_of_bytes(groups)]


def _of_times(group: dict[str, Row]) -> list[Target]:
    own = group[ONE_BIT]
    where = f"({own.hosts} hosts, {own.rate}, {own.elements:,} elements)"
    if own.elements == FEW and (trips := round_trips(own)):
        return [Target(f"round trips a call {where}", trips, ROUND_TRIPS, at_most=True)]
    if own.elements == LARGE and (trips := round_trips(own, without_bytes=True)):
        return [Target(f"round trips a call beyond its bytes' time {where}", trips, ROUND_TRIPS, at_most=True)]
    if own.hosts != SPEED_HOSTS or own.rate is None:
        return []
    large = SPEED.get(own.rate) if own.elements == LARGE else None
    needed = {"fp32": large, "fp16": SMALL.get((own.rate, own.elements))}
    ratios = {kind: faster(own, group[kind]) for kind in needed}
    return [
        Target(f"as fast as {kind} {where}", ratio, x) for kind, x in needed.items() if x and (ratio := ratios[kind])
    ]


def _of_bytes(groups: Sequence[dict[str, Row]]) -> list[Target]:
    large = [group for group in groups if group[ONE_BIT].elements >= BYTES_ELEMENTS]
    return [
        Target(f"fewer bytes than {kind} ({_least_of(ratios)})", min(ratios), needed)
        for kind, needed in BYTES.items()
        if (ratios := [ratio for group in large if (ratio := smaller(group[ONE_BIT], group[kind]))])
    ]


def _against_one_level(groups: Sequence[dict[str, Row]]) -> list[Target]:
    found = []
    for group in groups:
        own = group[TWO_LEVELS]
        if own.elements >= BYTES_ELEMENTS and own.each == EACH and (ratio := smaller(own, group[ONE_BIT])):
            where = f"({own.hosts} hosts of {own.each} ranks, {own.rate}, {own.elements:,} elements)"
            found.append(Target(f"fewer bytes over a link than one level {where}", ratio, ONE_LEVEL))
    return found


def _against_least(groups: Sequence[dict[str, Row]]) -> list[Target]:
    large = [group[TWO_LEVELS] for group in groups if group[TWO_LEVELS].elements >= BYTES_ELEMENTS]
    ratios = [least_fp32(row) / row.bytes for row in large if row.bytes]
    what = f"fewer bytes than an fp32 all-reduce between hosts ({_least_of(ratios)})"
    return [Target(what, min(ratios), LEAST_FP32)] if ratios else []


def _least_of(ratios: Sequence[float]) -> str:
    return f"the least of {len(ratios)} networks and sizes, {BYTES_ELEMENTS:,} elements or more"
