"""What a round trip costs the compressed all-reduce: how many of them a call takes beyond its bytes' time."""

from __future__ import annotations

from perf.all_reduce.measure import Row
from perf.lab.rates import PAYLOAD, rate_bits, rtt_seconds
from perf.targets import Target

MOST = 3.0  # round trips: of a small call, and of a large one beyond its bytes' time
SMALL, LARGE = 2**18, 25_000_000  # elements


def round_trips(row: Row) -> float | None:
    """A call's time in round trips; None where none were added."""
    rtt = rtt_seconds(row.rate)
    return row.seconds / rtt if row.seconds and rtt else None


def beyond_bytes(row: Row) -> float | None:
    """The same, less the time in which its bytes pass the link."""
    rtt, bits = rtt_seconds(row.rate), rate_bits(row.rate)
    if not row.seconds or not row.bytes or rtt is None or bits is None:
        return None
    return (row.seconds - 8 * row.bytes / PAYLOAD / bits) / rtt


def line(row: Row) -> str:
    """Beside the table; empty where no round trips were added."""
    trips, beyond = round_trips(row), beyond_bytes(row)
    if trips is None:
        return ""
    less = "" if beyond is None else f", {beyond:.1f} beyond its bytes' time"
    return f"1 bit, {row.hosts} hosts, {row.rate}, {row.elements:,} elements: {trips:.1f} round trips a call{less}"


def targets(row: Row) -> list[Target]:
    where = f"({row.hosts} hosts, {row.rate}, {row.elements:,} elements)"
    trips, beyond = round_trips(row), beyond_bytes(row)
    if row.elements == SMALL and trips is not None:
        return [Target(f"round trips a call {where}", trips, MOST, at_most=True)]
    if row.elements == LARGE and beyond is not None:
        return [Target(f"round trips a call beyond its bytes' time {where}", beyond, MOST, at_most=True)]
    return []
