"""Links of the lab: how they are written, and what of a rate is payload.

A link in options and records is "1gbit", "unshaped", or with a round trip "100mbit+50ms", "unshaped+10ms".
"""

from __future__ import annotations

import re

UNSHAPED = "unshaped"


def parse_link(text: str) -> str:
    """Return a link as records have it; ValueError if it is none."""
    link = text.strip().lower()
    bits, rtt = rate_bits(link), rtt_seconds(link)
    if not (bits is None or 1e6 <= bits <= 100e9) or not (rtt is None or 1e-3 <= rtt <= 0.1):
        raise ValueError(_says(text))
    return link


def rate_and_rtt(link: str | None) -> tuple[str | None, str | None]:
    """The parts of a link as records have it, None where there is none; None stands for a link that is not known."""
    rate, plus, rtt = (link or UNSHAPED).partition("+")
    return None if rate == UNSHAPED else rate, rtt if plus else None


def rate_bits(link: str | None) -> int | None:
    """Bits per second of a link as records have it; None where it is not shaped."""
    rate = rate_and_rtt(link)[0]
    if rate is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if not match:
        raise ValueError(_says(link))
    return round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]])


def rtt_seconds(link: str | None) -> float | None:
    """The round trip of a link as records have it; None if no delay was added."""
    rtt = rate_and_rtt(link)[1]
    if rtt is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)ms", rtt)
    if not match:
        raise ValueError(_says(link))
    return float(match[1]) / 1e3


def link_title(link: str) -> str:
    """A link for people to read: "1 Gbit/s", "100 Mbit/s, 50ms"."""
    bits, rtt = rate_bits(link), rate_and_rtt(link)[1]
    rate = UNSHAPED if bits is None else f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
    return f"{rate}, {rtt}" if rtt else rate


def _says(link: str | None) -> str:
    return (
        f'{link!r} is no link: write a rate from 1mbit to 100gbit or "unshaped", and behind it a round trip from 1ms '
        'to 100ms if it has one, as "2.5gbit" or "100mbit+50ms"'
    )
