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

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit.kernels.layout import Layout, Span
from onebit.space import Space
from onebit.warning import warn

if TYPE_CHECKING:
    from onebit.optimizer import OneBitOptimizer

PROGRESS = "onebit"
VERSION = 1

Saved = Mapping[str, Any]  # one parameter's


def save(optimizer: OneBitOptimizer) -> dict[Tensor, dict[str, Any]]:
    step = torch.tensor(float(optimizer._counts[0]))
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


def merge_states(state_dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states that all ranks saved, one each, as one that any number of ranks can load."""
    if not state_dicts:
        raise ValueError("merge_states got no states: give what every rank saved")
    numbers = [_progress_of(s["param_groups"]) for s in state_dicts]
    for rank, own in enumerate(numbers):
        for name in ("optimizer", "ranks", "steps", "compressing"):
            if own.get(name) != numbers[0].get(name):
                raise ValueError(
                    f"the states do not belong together: number {rank} has {name} {own.get(name)!r} where the first "
                    f"has {numbers[0].get(name)!r}. Give what the ranks of one run saved at one step"
                )
    merged = dict(state_dicts[0])
    merged["state"] = {
        key: dict(chain.from_iterable(s["state"][key].items() for s in state_dicts)) for key in merged["state"]
    }
    return merged


def load(optimizer: OneBitOptimizer, state_dict: dict[str, Any]) -> None:
    """Build what the state says, then put it in the optimizer's place: nothing changes if anything does not fit."""
    groups = _checked_groups(optimizer, state_dict)
    numbers = _progress_of(groups)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in optimizer.param_groups)
    by_parameter = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    if numbers:
        _check_numbers(optimizer, numbers)
        loaded = _Loaded(optimizer, numbers, by_parameter)
    else:
        loaded = _Loaded(optimizer, _numbers_of_adamw(by_parameter), by_parameter)
    _update_groups(optimizer, groups)
    loaded.install()


class _Loaded:
    """New spaces, filled from what was saved."""

    def __init__(self, optimizer: OneBitOptimizer, numbers: Mapping[str, Any], saved: Mapping[Tensor, Saved]) -> None:
        self.optimizer, self.numbers, self.saved = optimizer, numbers, saved
        self.compressing = bool(numbers["compressing"])
        self.residuals_missing = False
        chunks = numbers["chunks"]
        fits = len(chunks) == len(optimizer._spaces)
        self.spaces = [
            self._space(old, chunks[i] if self.compressing and fits else 1) for i, old in enumerate(optimizer._spaces)
        ]

    def install(self) -> None:
        o, numbers = self.optimizer, self.numbers
        o._spaces, o._compressing, o._agreed = self.spaces, self.compressing, False
        o._steps = int(numbers["steps"])
        o._counts.copy_(torch.tensor([o._steps, numbers["skipped_steps"]]))
        o._lagging.take()
        o._loaded(o._steps, list(self.saved.values()))
        o._rule = o._new_rule()
        o._rule.restore(numbers["trace"])
        o._sent_before, o._residuals_missing = int(numbers["wire_bytes"]), self.residuals_missing
        o._gradients.forget()
        o._show_state()

    def _space(self, old: Space, chunks: int) -> Space:
        free = old.options.chunks == "auto"
        space = type(old)(old.params, old.groups, old.options, old.transport, chunks if free else 1)
        saved = [self.saved[p] for p in space.params]
        space.copy_parameters_to_master()
        if self.compressing:
            space.begin_exchange(chunks if free else int(old.options.chunks))
        for i, own in enumerate(saved):
            if own:
                for name, value in space.views(i).items():
                    if name in own:
                        value.copy_(_fitting(own[name], value, name, self.optimizer._name(space.params[i])))
                    elif name not in ("residual", "master"):
                        raise ValueError(
                            f"the state has no {name} for parameter {self.optimizer._name(space.params[i])}: it is "
                            f"damaged, or not a state of {type(self.optimizer).__name__} or AdamW"
                        )
        if self.compressing:
            space.mark_live()
            self._load_exchange(space, saved)
        self.optimizer._load_more(space, saved)
        return space

    def _load_exchange(self, space: Space, saved: Sequence[Saved]) -> None:
        assert space.exchange is not None
        ranks, rank = int(self.numbers["ranks"]), space.transport.rank
        space_index = [s.dtype for s in self.optimizer._spaces].index(space.dtype)
        there = Layout(
            space.numels,
            block_size=self.numbers["block_size"],
            ranks=ranks,
            chunks=self.numbers["chunks"][space_index],
        )
        same = (there.fingerprint, ranks) == (space.layout.fingerprint, space.transport.size)
        holds = [all(f"residual_of_rank_{r}" in own for own in saved) for r in range(ranks)]
        if same and holds[rank]:
            for i, own in enumerate(saved):
                space.views(i)["residual"].copy_(own[f"residual_of_rank_{rank}"])
            _put_server_residual(space, _own_pieces(saved, there, [rank]))
        elif all(holds):
            for i, own in enumerate(saved):
                residual = space.views(i)["residual"].zero_()
                for r in range(ranks):
                    residual.add_(own[f"residual_of_rank_{r}"].to(residual.device), alpha=1 / ranks)
            _put_server_residual(space, _own_pieces(saved, there, range(ranks)))
        else:
            self._warn_of_missing(ranks)
        exact = same or (there.block_size == space.layout.block_size and self.numbers["scale"] == "block")
        if exact and self.numbers["scale"] == space.options.scale:
            _put_momentum(space, saved)
        else:
            _fold_momentum(space, saved, [g["betas"][0] for g in self.optimizer.param_groups])

    def _warn_of_missing(self, ranks: int) -> None:
        if not self.residuals_missing:
            warn(
                f"the state does not hold the residuals of all {ranks} ranks that saved it, nor those of this rank for "
                f"as many: they start from zero, and what compression had left out is lost. Save on every rank; for "
                f"another number of ranks load onebit.merge_states of all of them"
            )
        self.residuals_missing = True


def continues(optimizer: OneBitOptimizer, numbers: Mapping[str, Any]) -> bool:
    """Whether a state is cut as this optimizer would cut it, so that every rank's residuals are its own."""
    options = optimizer._options
    return (
        numbers.get("ranks") == optimizer._transport.size
        and numbers["block_size"] == options.block_size
        and (options.chunks == "auto" or all(c == options.chunks for c in numbers["chunks"]))
    )


def forget_residuals(optimizer: OneBitOptimizer) -> None:
    for space in optimizer._spaces:
        if space.exchange is not None:
            for residual in (space.exchange.residual, space.exchange.server_residual):
                residual.settle()
                residual.value.zero_()


def _save_exchange(space: Space, rank: int) -> list[dict[str, Tensor]]:
    """Residuals and momentum of each parameter; nothing in stage 1."""
    exchange, layout = space.exchange, space.layout
    if exchange is None:
        return [{} for _ in space.params]
    exchange.settle()
    width = layout.block_size // 8
    bits = exchange.replies.bits.reshape(-1, width)
    scales = exchange.replies.scale_of_blocks()
    ends = [*layout.first.tolist(), layout.used_blocks]
    pieces: list[list[Tensor]] = [[] for _ in space.params]
    for span, value in _shards(layout, rank, exchange.server_residual.value):
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


def _shards(layout: Layout, rank: int, flat: Tensor) -> Iterator[tuple[Span, Tensor]]:
    """A rank's shard of every chunk, and its part of what that rank keeps."""
    size = layout.shard_blocks * layout.block_size
    for chunk in range(layout.chunks):
        yield layout.shard(chunk, rank), flat[chunk * size : (chunk + 1) * size]


def _own_pieces(saved: Sequence[Saved], there: Layout, ranks: Sequence[int]) -> list[Tensor]:
    """E of each parameter, as far as the shards of `ranks` hold it; 0 elsewhere."""
    whole = [torch.zeros(n) for n in there.numel.tolist()]
    for rank in ranks:
        read = [0] * len(saved)
        for chunk in range(there.chunks):
            for s in there.shard(chunk, rank).segments():
                values, start = saved[s.parameter][f"server_residual_of_rank_{rank}"], read[s.parameter]
                read[s.parameter] = start + s.stop - s.start
                whole[s.parameter][s.start : s.stop] = values[start : read[s.parameter]].cpu()
    return whole


def _put_server_residual(space: Space, whole: Sequence[Tensor]) -> None:
    exchange = space.exchange
    assert exchange is not None
    for chunk in exchange.chunks:
        for s in chunk.shard.segments():
            part = whole[s.parameter][s.start : s.stop]
            chunk.server_residual.value[s.offset : s.offset + s.stop - s.start] = part.to(space.device)


def _put_momentum(space: Space, saved: Sequence[Saved]) -> None:
    """m as the replies of the last step, on the rank that sent a reply also as what it sent."""
    exchange, layout = space.exchange, space.layout
    assert exchange is not None
    rows, width = layout.chunks * layout.ranks, layout.block_size // 8
    bits = torch.zeros((layout.blocks, width), dtype=torch.uint8, device=space.device)
    scales = torch.zeros(layout.blocks, device=space.device)
    for i, own in enumerate(saved):
        first = int(layout.first[i])
        bits[first : first + len(own["momentum_bits"])] = own["momentum_bits"].to(space.device)
        scales[first : first + len(own["momentum_scales"])] = own["momentum_scales"].to(space.device)
    replies = exchange.replies
    replies.bits.copy_(bits.view(rows, layout.shard_blocks, width))
    replies.scales.copy_(scales.view(rows, layout.shard_blocks)[:, : replies.format.scales])
    for chunk in exchange.chunks:
        chunk.reply.buffer.copy_(chunk.replies.buffer[space.transport.rank][None])


def _fold_momentum(space: Space, saved: Sequence[Saved], betas: Sequence[float]) -> None:
    """Where messages of another shape held m."""
    for i, own in enumerate(saved):
        bits = own["momentum_bits"].to(space.device)
        signs = ((bits.unsqueeze(-1) >> torch.arange(8, device=bits.device)) & 1).view(len(bits), -1).float() * 2 - 1
        m = (signs * own["momentum_scales"].to(space.device)[:, None]).view(-1)[: space.numels[i]]
        space.fold_momentum(i, m.view(space.params[i].shape), betas[space.groups[i]])


def _checked_groups(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "state" not in state_dict or "param_groups" not in state_dict:
        raise ValueError(f"not a state of an optimizer: it has {sorted(state_dict)}, not state and param_groups")
    groups = list(state_dict["param_groups"])
    here, there = ([len(g["params"]) for g in g_] for g_ in (optimizer.param_groups, groups))
    if here != there:
        raise ValueError(
            f"the state has param groups of {there} parameters, this optimizer of {here}: give it the parameters in "
            f"the groups it was saved with"
        )
    if any(g.get("maximize") for g in groups):
        raise ValueError("the state was saved with maximize=True, which onebit does not know: negate the loss instead")
    if any(g.get("amsgrad") for g in groups):
        warn("the state was saved with amsgrad=True: its maximum of variances is not used")
    return groups


def _update_groups(optimizer: OneBitOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Options that this optimizer has, and what others (schedulers) have left in the groups."""
    foreign = {"params", PROGRESS, "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in saved.items() if k not in foreign and k != "decoupled_weight_decay"})
        group["betas"] = tuple(group["betas"])


def _progress_of(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return dict(groups[0].get(PROGRESS) or {}) if groups else {}


def _check_numbers(optimizer: OneBitOptimizer, numbers: Mapping[str, Any]) -> None:
    if numbers.get("version") != VERSION:
        raise ValueError(
            f"the state has version {numbers.get('version')!r}, this onebit reads {VERSION}: load it with the onebit "
            f"that saved it"
        )
    name = type(optimizer).__name__
    if numbers["optimizer"] != name and numbers["compressing"]:
        raise ValueError(f"the state is one of {numbers['optimizer']} in stage 2: {name} can't continue it")


def _numbers_of_adamw(saved: Mapping[Tensor, Saved]) -> dict[str, Any]:
    """Progress of a state that torch.optim.AdamW saved."""
    steps = {int(own["step"]) for own in saved.values() if "step" in own}
    if len(steps) > 1:
        raise ValueError(
            f"the parameters have taken different numbers of steps ({sorted(steps)}): onebit counts the same for all. "
            f"Some had no gradient at times; set every state's step to {max(steps)} to continue with that"
        )
    return {
        "ranks": 1, "steps": max(steps, default=0), "skipped_steps": 0, "compressing": False, "chunks": [],
        "wire_bytes": 0, "trace": [], "optimizer": "AdamW",
    }  # fmt: skip


def _fitting(value: Tensor, like: Tensor, what: str, name: str) -> Tensor:
    if value.shape != like.shape:
        raise ValueError(
            f"{what} of parameter {name} has shape {tuple(value.shape)} in the state and {tuple(like.shape)} here: "
            f"the state is another model's"
        )
    return value
