"""What is saved, and how it comes back.

    state[p]           one parameter's state, in a form that no layout is in, so that any number of ranks can load it
        step, exp_avg, exp_avg_sq                        stage 1: what torch.optim.AdamW saves
        step, denominator                                stage 2: d
        momentum_bits, momentum_scales                   m, as blocks: bits uint8 [blocks, block_size / 8], a scale each
        residual_of_rank_3, server_residual_of_rank_3    what rank 3 has left out: e, and the part of E that it keeps
        master                                           the fp32 copy of a 16-bit parameter
    param_groups[0]["onebit"]                            numbers: how far the run has come

Each rank's residuals have a name of their own, so that torch.distributed.checkpoint, which stores equal names once,
stores them all. A state that holds those of all ranks (`merge_states`) loads on any number of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit.kernels.data.layout import Layout, Span
from onebit.optim.flat_state import Space

if TYPE_CHECKING:
    from onebit.optim.optimizer import OneBitOptimizer

PROGRESS = "onebit"
VERSION = 1

Saved = Mapping[str, Any]  # one parameter's


def save(optimizer: OneBitOptimizer) -> dict[Tensor, dict[str, Any]]:
    step = torch.tensor(float(optimizer._counts[0]), dtype=torch.float32, device="cpu")
    saved: dict[Tensor, dict[str, Any]] = {}
    for space in optimizer._spaces:
        extra = optimizer._save_more(space)
        messages = _save_exchange(space, optimizer._transport.rank)
        for i, p in enumerate(space.params):
            shaped = {k: v for k, v in space.views(i).items() if k != "residual"}
            saved[p] = {"step": step.clone(), **shaped, **messages[i], **{k: v[i] for k, v in extra.items()}}
    return saved


def progress(optimizer: OneBitOptimizer) -> dict[str, Any]:
    options = optimizer._options
    return {
        "version": VERSION,
        "optimizer": type(optimizer).__name__,
        "ranks": optimizer._transport.size,
        "steps": int(optimizer._counts[0]),
        "skipped_steps": optimizer.skipped_steps,
        "compressing": optimizer.compressing,
        "chunks": [s.layout.chunks for s in optimizer._spaces],
        "block_size": options.block_size,
        "scale": options.scale,
        "wire_bytes": optimizer.wire_bytes,
        "trace": optimizer._rule.state(),
    }


def progress_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers = groups[0].get(PROGRESS, {}) if groups else {}
    if not isinstance(numbers, Mapping):
        raise TypeError(
            f"{PROGRESS!r} of the first param group is a {type(numbers).__name__}, not a dict: it is damaged"
        )
    return dict(numbers)


def rank_of(name: object) -> int | None:
    """Whose residual a name says it is."""
    found = re.fullmatch(r"residual_of_rank_([0-9]{1,9})", str(name))
    return int(found[1]) if found else None


def _save_exchange(space: Space, rank: int) -> list[dict[str, Tensor]]:
    """Residuals and momentum of each parameter; nothing in stage 1."""
    exchange, layout = space.exchange, space.layout
    if exchange is None:
        return [{} for _ in space.params]
    exchange.materialize()
    width = layout.block_size // 8
    bits = exchange.replies.bits.reshape(-1, width).contiguous()
    scales = exchange.replies.scale_of_blocks().contiguous()
    ends = [*layout.first.tolist(), layout.used_blocks]
    pieces: list[list[Tensor]] = [[] for _ in space.params]
    for span, value in shards(layout, rank, exchange.server_residual.value):
        for s in span.segments():
            pieces[s.parameter].append(value[s.offset : s.offset + s.stop - s.start])
    saved = []
    for i in range(len(space.params)):
        own = {
            "momentum_bits": bits[ends[i] : ends[i + 1]].clone(),
            "momentum_scales": scales[ends[i] : ends[i + 1]].clone(),
            f"residual_of_rank_{rank}": space.views(i)["residual"],
        }
        if pieces[i]:
            own[f"server_residual_of_rank_{rank}"] = torch.cat(pieces[i])
        saved.append(own)
    return saved


def shards(layout: Layout, rank: int, flat: Tensor) -> Iterator[tuple[Span, Tensor]]:
    """A rank's shard of every chunk, and its part of what that rank keeps."""
    size = layout.shard_blocks * layout.block_size
    for chunk in range(layout.chunks):
        yield layout.shard(chunk, rank), flat[chunk * size : (chunk + 1) * size]
