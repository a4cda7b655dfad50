"""How a saved state comes back: what `onebit.checkpoint.schema` describes, or what torch.optim.AdamW has saved.

Everything is built and checked beside the old state, then put in its place: a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onebit.checkpoint.checks import check_numbers, check_options, check_own, check_structure, shaped, steps_of
from onebit.checkpoint.schema import PROGRESS, Saved, progress_of, rank_of
from onebit.kernels.data.layout import Layout
from onebit.optim.flat_state import Space
from onebit.optim.options import check_group
from onebit.warning import warn

if TYPE_CHECKING:
    from onebit.optim.optimizer import OneBitOptimizer

_NOT_OPTIONS = {
    "params", PROGRESS, "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
    "decoupled_weight_decay",
}  # fmt: skip


def prepared(optimizer: OneBitOptimizer, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Build what the state says; the result puts it in the optimizer's place. Nothing changes if it does not fit."""
    groups = _checked_groups(optimizer, state_dict)
    keys = chain.from_iterable(g["params"] for g in groups)
    params = chain.from_iterable(g["params"] for g in optimizer.param_groups)
    saved = {p: state_dict["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    merged = _merged(optimizer, groups)
    loaded = _Loaded(optimizer, _numbers(optimizer, progress_of(groups), saved), saved)

    def install() -> None:
        for group, new in zip(optimizer.param_groups, merged, strict=True):
            group.update(new)
        loaded.install()

    return install


class _Loaded:
    """New spaces, filled from what was saved."""

    def __init__(self, optimizer: OneBitOptimizer, numbers: Mapping[str, Any], saved: Mapping[Tensor, Saved]) -> None:
        self.optimizer, self.numbers, self.saved = optimizer, numbers, saved
        self.compressing = bool(numbers["compressing"])
        self.residuals_missing = False
        chunks = numbers["chunks"]
        if self.compressing and len(chunks) != len(optimizer._spaces):
            raise ValueError(
                f"the state was saved with parameters of {len(chunks)} dtypes, here they have "
                f"{len(optimizer._spaces)}: messages of stage 2 are made for each. Cast the model as it "
                f"was when it was saved"
            )
        self.spaces = [self._space(i, chunks[i] if self.compressing else 1) for i in range(len(optimizer._spaces))]

    def install(self) -> None:
        o, numbers = self.optimizer, self.numbers
        o._spaces, o._compressing, o._agreed = self.spaces, self.compressing, False
        o._steps = int(numbers["steps"])
        o._counts.copy_(torch.tensor([o._steps, numbers["skipped_steps"]], device="cpu"))
        o._lagging.take()
        o._loaded(o._steps, list(self.saved.values()))
        o._rule = o._new_rule()
        o._rule.restore(numbers["trace"])
        o._sent_before, o._residuals_missing = int(numbers["wire_bytes"]), self.residuals_missing
        o._gradients.forget()
        o._show_state()

    def _space(self, index: int, chunks: int) -> Space:
        old = self.optimizer._spaces[index]
        chunks = chunks if old.options.chunks == "auto" else int(old.options.chunks)
        space = type(old)(old.params, old.groups, old.options, old.transport, chunks)
        saved = [self.saved[p] for p in space.params]
        space.copy_parameters_to_master()
        if self.compressing:
            space.begin_exchange(chunks)
        for i, own in enumerate(saved):
            if own or self.compressing:
                self._load_views(space, i, own)
        space.master_is_true = all("master" in own for own in saved)
        if self.compressing:
            space.mark_live()
            self._load_exchange(space, saved, self._layout_there(space, index))
        self.optimizer._load_more(space, saved)
        return space

    def _load_views(self, space: Space, index: int, own: Saved) -> None:
        name = self.optimizer._name(space.params[index])
        check_own(own, tuple(space.params[index].shape), name)
        for what, value in space.views(index).items():
            if what in own:
                value.copy_(shaped(own, what, tuple(value.shape), name))
            elif what not in ("residual", "master"):
                raise ValueError(
                    f"the state has no {what} for parameter {name}: it is damaged, or not a state of "
                    f"{type(self.optimizer).__name__} or AdamW"
                )

    def _layout_there(self, space: Space, index: int) -> Layout:
        n = self.numbers
        return Layout(space.numels, block_size=n["block_size"], ranks=int(n["ranks"]), chunks=n["chunks"][index])

    def _load_exchange(self, space: Space, saved: Sequence[Saved], there: Layout) -> None:
        self._check_messages(space, saved, there)
        rank, ranks = space.transport.rank, range(there.ranks)
        same = (there.fingerprint, there.ranks) == (space.layout.fingerprint, space.transport.size)
        holds = [all(f"residual_of_rank_{r}" in own for own in saved) for r in ranks]
        if same and holds[rank]:
            _put_residuals(space, saved, there, [rank])
        elif all(holds):
            _put_residuals(space, saved, there, ranks)
        else:
            self._warn_of_missing(there.ranks)
        exact = same or (there.block_size == space.layout.block_size and self.numbers["scale"] == "block")
        if exact and self.numbers["scale"] == space.options.scale:
            _put_momentum(space, saved)
        else:
            betas = [group["betas"][0] for group in self.optimizer.param_groups]
            space.fold_again = partial(_fold_momentum, space, saved, betas)
            space.fold_again()

    def _check_messages(self, space: Space, saved: Sequence[Saved], there: Layout) -> None:
        present = {r for own in saved for what in own if (r := rank_of(what)) is not None and r < there.ranks}
        held = {r: _elements_of(there, r) for r in present}
        for i, own in enumerate(saved):
            name, blocks = self.optimizer._name(space.params[i]), -(-space.numels[i] // there.block_size)
            shaped(own, "momentum_bits", (blocks, there.block_size // 8), name)
            shaped(own, "momentum_scales", (blocks,), name)
            for r, elements in held.items():
                if f"residual_of_rank_{r}" in own:
                    shaped(own, f"residual_of_rank_{r}", tuple(space.params[i].shape), name)
                    if elements[i]:
                        shaped(own, f"server_residual_of_rank_{r}", (elements[i],), name)

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
                residual.materialize()
                residual.value.zero_()
            if space.fold_again is not None:
                space.fold_again()


def _put_residuals(space: Space, saved: Sequence[Saved], there: Layout, ranks: Sequence[int]) -> None:
    """The mean of these ranks' e, and what they hold of E."""
    for i, own in enumerate(saved):
        e = space.views(i)["residual"]
        for r in ranks:
            e.add_(own[f"residual_of_rank_{r}"].to(e.device), alpha=1 / len(ranks))
    _put_server_residual(space, _own_pieces(saved, there, ranks))


def _elements_of(layout: Layout, rank: int) -> list[int]:
    """Of each parameter, how many elements lie in a rank's shards."""
    elements = [0] * layout.parameters
    for chunk in range(layout.chunks):
        for s in layout.shard(chunk, rank).segments():
            elements[s.parameter] += s.stop - s.start
    return elements


def _own_pieces(saved: Sequence[Saved], there: Layout, ranks: Sequence[int]) -> list[Tensor]:
    """E of each parameter, as far as the shards of `ranks` hold it; 0 elsewhere."""
    whole = [torch.zeros(n, dtype=torch.float32, device="cpu") for n in there.numel.tolist()]
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
    scales = torch.zeros(layout.blocks, dtype=torch.float32, device=space.device)
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
    check_structure(state_dict)
    optimizer._rebuild_if_changed()
    groups = list(state_dict["param_groups"])
    here, there = ([len(g["params"]) for g in g_] for g_ in (optimizer.param_groups, groups))
    if here != there:
        raise ValueError(
            f"the state has param groups of {there} parameters, this optimizer of {here}: give it the parameters in "
            f"the groups it was saved with"
        )
    check_options(groups)
    if any(g.get("maximize") for g in groups):
        raise ValueError("the state was saved with maximize=True, which onebit does not know: negate the loss instead")
    if any(g.get("amsgrad") for g in groups):
        warn("the state was saved with amsgrad=True: its maximum of variances is not used")
    return groups


def _merged(optimizer: OneBitOptimizer, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options that this optimizer has, and what others (schedulers) have left in the groups."""
    merged = []
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        new = deepcopy({k: v for k, v in saved.items() if k not in _NOT_OPTIONS})
        if isinstance(new["betas"], list):  # as JSON and torch.distributed.checkpoint have it
            new["betas"] = tuple(new["betas"])
        check_group({**group, **new})
        merged.append(new)
    return merged


def _numbers(optimizer: OneBitOptimizer, numbers: dict[str, Any], saved: Mapping[Tensor, Saved]) -> Mapping[str, Any]:
    """How far the run had come that saved the state: as it says, or as torch.optim.AdamW's does."""
    name = type(optimizer).__name__
    check_numbers(numbers)
    if numbers and numbers["compressing"]:
        if numbers["optimizer"] != name:
            raise ValueError(f"the state is one of {numbers['optimizer']} in stage 2: {name} can't continue it")
        return numbers
    steps = _steps_of(saved)
    if numbers and numbers["steps"] == steps and numbers["optimizer"] == name:
        return numbers
    return {
        "ranks": 1, "steps": steps, "skipped_steps": 0, "compressing": False, "chunks": [], "wire_bytes": 0,
        "trace": [],
    }  # fmt: skip


def _steps_of(saved: Mapping[Tensor, Saved]) -> int:
    steps = {steps_of(own) for own in saved.values() if "step" in own}
    if len(steps) > 1:
        raise ValueError(
            f"the parameters have taken different numbers of steps ({sorted(steps)}): onebit counts the same for all. "
            f"Some had no gradient at times; set every state's step to {max(steps)} to continue with that"
        )
    return max(steps, default=0)
