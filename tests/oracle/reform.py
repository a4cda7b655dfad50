"""Another set of ranks, without a restart, in float64.

From N ranks to N', of which some were among the N and the others join:

    e_i = e_i N' / N        e_k on shard k += N' E_k        E = 0

so that sum_i e_i / N' + E stays what it was, less what those had that leave. Who joins has e = 0. x, m, d, moments and
counters stay as they are, on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracle.codec import Arrays, Layout

Stays = Sequence["int | None"]  # of every new rank, which of the old ones it was; None: it joins


def reformed(worker: Arrays, server: np.ndarray, old: Layout, new: Layout, stays: Stays) -> Arrays:
    """e of the N' ranks, in the new layout. `worker`: e of the N ranks. With direct replies a layout has one shard a
    chunk, and `server` is 0."""
    return [np.zeros(new.size) if who is None else _moved(worker, server, old, new, who, len(stays)) for who in stays]


def _moved(worker: Arrays, server: np.ndarray, old: Layout, new: Layout, who: int, ranks: int) -> np.ndarray:
    e = worker[who] * ranks / len(worker)
    for part in owned(old, who):
        e[part] += ranks * server[part]
    return new.flatten(old.unflatten(e))


def owned(layout: Layout, rank: int) -> list[slice]:
    """The shards that a rank averages. With direct replies a layout has one a chunk, and nothing is left out there."""
    return [layout.shard(chunk, rank) for chunk in range(layout.chunks)] if rank < layout.ranks else []


def left_out(worker: Arrays, server: np.ndarray, layout: Layout, of: Sequence[int]) -> Arrays:
    """What ranks `of` have of sum_i e_i / N + E, by parameter."""
    total = sum((worker[who] for who in of), np.zeros(layout.size)) / len(worker)
    for who in of:
        for part in owned(layout, who):
            total[part] += server[part]
    return layout.unflatten(total)
