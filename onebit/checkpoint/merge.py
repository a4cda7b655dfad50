"""What every rank saved, put together: a state that any number of ranks can load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from onebit.checkpoint.checks import check_numbers, check_structure
from onebit.checkpoint.schema import progress_of


def merge_states(state_dicts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The states that all ranks saved, one each, as one that any number of ranks can load."""
    if not state_dicts:
        raise ValueError("merge_states got no states: give what every rank saved")
    for each in state_dicts:
        check_structure(each)
    numbers = [progress_of(s["param_groups"]) for s in state_dicts]
    for rank, own in enumerate(numbers):
        check_numbers(own)
        for name in ("optimizer", "ranks", "slices", "shards", "steps", "compressing"):
            if own.get(name) != numbers[0].get(name):
                raise ValueError(
                    f"the states do not belong together: number {rank} has {name} {own.get(name)!r} where the first "
                    f"has {numbers[0].get(name)!r}. Give what the ranks of one run saved at one step"
                )
    keys = [s["state"].keys() for s in state_dicts]
    if odd := next((rank for rank, own in enumerate(keys) if own != keys[0]), 0):
        raise ValueError(f"the states do not belong together: number {odd} is not of the parameters the first is of")
    merged = dict(state_dicts[0])
    merged["state"] = {
        key: dict(chain.from_iterable(s["state"][key].items() for s in state_dicts)) for key in merged["state"]
    }
    return merged
