"""Plots of the all-reduce benchmark: time, speed-up and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf import plots
from perf.all_reduce.measure import KINDS, ONE_BIT, Row, by_kind
from perf.all_reduce.targets import LARGE, SPEED, SPEED_HOSTS, faster
from perf.lab.rates import rate_and_rtt, rate_bits

Curves = dict[str, list[tuple[float, float]]]


def plot(rows: Sequence[Row], title: str, path: Path) -> Path:
    """Time against size, speed-up against bandwidth, bytes on the wire: each as far as it was measured."""
    groups = by_kind(rows)
    own = [group[ONE_BIT] for group in groups]
    hosts = SPEED_HOSTS if any(row.hosts == SPEED_HOSTS for row in own) else own[-1].hosts
    rate = "1gbit" if any(row.rate == "1gbit" for row in own) else own[-1].rate
    sizes = [group for group in groups if (group[ONE_BIT].hosts, group[ONE_BIT].rate) == (hosts, rate)]
    times = {kind: [(g[kind].elements, 1e3 * s) for g in sizes if (s := g[kind].seconds)] for kind in (*KINDS, ONE_BIT)}
    where = f"{hosts} ranks" + (f", {rate}" if rate else "")
    panels = [plots.lines(f"Time, {where}", "elements", "milliseconds", times), *_speed_ups(groups)]
    biggest = sizes[-1]
    sent = {kind: nbytes for kind in (*KINDS, ONE_BIT) if (nbytes := biggest[kind].bytes)}
    if ONE_BIT in sent:
        megabytes = {kind: 1e-6 * nbytes for kind, nbytes in sent.items()}
        notes = {kind: f"{mb:.3g} MB\n{mb / megabytes[ONE_BIT]:.1f} x" for kind, mb in megabytes.items()}
        title_of_bytes = f"Bytes on the wire, {biggest[ONE_BIT].elements:,} elements"
        panels.append(plots.bars(title_of_bytes, "MB a call", megabytes, notes))
    return plots.save(path, panels, title)


def _speed_ups(groups: Sequence[dict[str, Row]]) -> list[plots.Draw]:
    """A panel of the largest size's speed-ups if links are shaped."""
    largest = max(group[ONE_BIT].elements for group in groups)
    speeds: Curves = {}
    for group in groups:
        row, bits = group[ONE_BIT], rate_bits(group[ONE_BIT].rate)
        for kind in ("fp32", "fp16"):
            if bits and row.elements == largest and (ratio := faster(row, group[kind])):
                label = ", ".join(filter(None, (kind, f"{row.hosts} hosts", rate_and_rtt(row.rate)[1])))
                speeds.setdefault(label, []).append((bits / 1e9, ratio))
    if not speeds:
        return []
    goals = [((rate_bits(rate) or 0) / 1e9, x) for rate, x in SPEED.items()] if largest == LARGE else []
    title, goal = f"Speed-up, {largest:,} elements", "target, fp32, 4 hosts"
    return [plots.lines(title, "link, Gbit/s", "times as fast as", speeds, logy=False, goals=goals, goal=goal)]
