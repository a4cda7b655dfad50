"""Rates of links: how they are written, and what of them is payload."""

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


def lab_rate(rate: str | None) -> str | None:
    """The argument of NetworkLab for a rate as records have it: None for "unshaped"."""
    return None if rate == UNSHAPED else rate


def rate_bits(rate: str | None) -> int | None:
    """Bits per second of a rate as records have it; None where the link is not shaped."""
    return parse_rate(lab_rate(rate))
