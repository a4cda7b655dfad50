"""Elements that never move, such as rows of an embedding that nobody uses: a param group's mask.

    {"params": [embedding.weight], "mask": mask}        bool, of the parameter's shape: False is fixed

A fixed element's gradient counts as 0, in norms too, and weight decay leaves it alone. In stage 2 it has no
denominator and no part in a message's scale.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onebit.optim.fields import MASTER
from onebit.optim.flat_state import FlatState
from onebit.optim.memory_order import as_stored
from onebit.optim.sharding import is_sharded, local


def fixed_elements(group: Mapping[str, Any], mask: Any) -> dict[Tensor, Tensor]:
    """Return the fixed elements of a group's parameters with a mask: bool, in the shape of this rank's part, True where
    it is fixed.

    mask: one for a group of one parameter, or a sequence with one, or None, for each.
    """
    params = group["params"]
    masks = [mask] if isinstance(mask, Tensor) else mask
    if not isinstance(masks, (list, tuple)) or len(masks) != len(params):
        given = f"{len(masks)} masks" if isinstance(masks, (list, tuple)) else f"a {type(mask).__name__}"
        raise ValueError(
            f"mask is {given} for {len(params)} parameter{'s' * (len(params) != 1)}: give a list with a tensor of bool "
            f"for each, None for those that move as a whole, or a tensor in a group of one parameter"
        )
    found = {}
    for i, (p, own) in enumerate(zip(params, masks, strict=True)):
        if own is None:
            continue
        if not isinstance(own, Tensor) or own.dtype != torch.bool or own.shape != p.shape:
            what = f"{own.dtype} of shape {tuple(own.shape)}" if isinstance(own, Tensor) else type(own).__name__
            raise ValueError(
                f"the mask of parameter {i} is {what}: it must be a tensor of torch.bool in the parameter's shape "
                f"{tuple(p.shape)}, False where an element never moves"
            )
        if is_sharded(p) != is_sharded(own) or (is_sharded(p) and own.placements != p.placements):  # type: ignore[attr-defined]
            raise ValueError(
                f"parameter {i} is sharded: its mask must be sharded as it is, by torch.distributed.tensor's "
                f"distribute_tensor(mask, p.device_mesh, p.placements)"
                if is_sharded(p)
                else f"the mask of parameter {i} is a DTensor and the parameter is none: give mask.full_tensor()"
            )
        fixed = ~local(own).to(p.device)
        if bool(fixed.any()):
            found[p] = fixed
    return found


def clear_fields(state: FlatState) -> None:
    """What a state may have there that was saved without this mask."""
    names = [name for name, field in state.fields.items() if field.per == "element" and field is not MASTER]
    for i, fixed in enumerate(state.fixed):
        if fixed is not None:
            for name in names:
                state.view(name, i).masked_fill_(fixed, 0)


def clear_gradients(states: Iterable[FlatState]) -> None:
    for state in states:
        if not state.fixed_indices:
            continue
        for fixed, grad in zip(state.fixed, state.gradients_now(), strict=True):
            if fixed is not None and grad is not None:
                grad.masked_fill_(fixed, 0)


def without(state: FlatState, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients, and copies of those of which something is fixed: others may still write to them."""
    return [
        g if g is None or fixed is None else g.masked_fill(fixed, 0)
        for g, fixed in zip(grads, state.fixed, strict=True)
    ]


@contextmanager
def fixed_kept(states: Sequence[FlatState]) -> Iterator[None]:
    """Put what is fixed back after parameters were updated within this."""
    each = _each(states)
    before = list(map(_values, each)) if each else []
    yield
    for (state, i, x, indices), values in zip(each, before, strict=True):
        x.index_copy_(0, indices, values)
        if MASTER.name in state:
            state.elements_of(state[MASTER.name], i).index_copy_(0, indices, values.float())


def _values(fixed: tuple[FlatState, int, Tensor, Tensor]) -> Tensor:
    _, _, x, indices = fixed
    return x[indices]


def checksum(fixed: Iterable[Tensor | None]) -> str:
    """Sum up what is fixed, and in which parameters, for ranks to compare."""
    found = [(i, zlib.crc32(each.cpu().numpy().tobytes())) for i, each in enumerate(fixed) if each is not None]
    return f"{len(found)} (checksum {zlib.crc32(str(found).encode())})" if found else "none"


def _each(states: Iterable[FlatState]) -> list[tuple[FlatState, int, Tensor, Tensor]]:
    """State, place, elements as they lie, and which of them are fixed, of each parameter with a mask."""
    found = []
    for state in states:
        for i, indices in state.fixed_indices.items():
            p = state.params[i].data  # it is no change by the user
            found.append((state, i, as_stored(local(p), state.orders[i]).view(-1), indices))
    return found
