"""Links of the lab: how rates and round trips are written, and what of a rate is payload.

A link in options and records is "1gbit", "unshaped", or with a round trip "100mbit+50ms", "unshaped+10ms".
"""

from __future__ import annotations

import re

UNSHAPED = "unshaped"
PAYLOAD = 0.956  # of a link's rate; measured, see perf.lab.network


def parse_rate(rate: str | None) -> int | None:
    """Bits per second of "100mbit", "2.5gbit", ...; None, an unshaped link, stays None."""
    if rate is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate.strip().lower())
    bits = round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if not 1_000_000 <= bits <= 100_000_000_000:
        raise ValueError(
            f"rate {rate!r} is not a link rate from 1mbit to 100gbit: "
            'write a number and a unit, as "100mbit" or "2.5gbit", or None for an unshaped link'
        )
    return bits


def parse_rtt(rtt: str | None) -> float | None:
    """Seconds of "1ms" to "100ms"; None, without added delay, stays None."""
    if rtt is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", rtt.strip().lower())
    milliseconds = float(match[1]) if match else 0.0
    if not 1 <= milliseconds <= 100:
        raise ValueError(
            f'rtt {rtt!r} is not a round trip from 1ms to 100ms: write "50ms", or None for a link without added delay'
        )
    return milliseconds / 1e3


def link_of(rate: str, rtt: str | None) -> str:
    """As records have it."""
    return rate if rtt is None else f"{rate}+{rtt}"


def rate_and_rtt(link: str | None) -> tuple[str | None, str | None]:
    """The arguments of NetworkLab for a link as records have it; None stands for one that is not known."""
    rate, _, rtt = (link or UNSHAPED).partition("+")
    return None if rate == UNSHAPED else rate, rtt or None


def clock_option(link: str) -> list[str]:
    """Of a worker on such links: their barriers would leave ranks a round trip apart."""
    return ["--one-clock"] if rtt_seconds(link) else []


def rate_bits(link: str | None) -> int | None:
    """Bits per second of a link as records have it; None where it is not shaped."""
    return parse_rate(rate_and_rtt(link)[0])


def rtt_seconds(link: str | None) -> float | None:
    """Of a link as records have it; None where no delay was added."""
    return parse_rtt(rate_and_rtt(link)[1])
