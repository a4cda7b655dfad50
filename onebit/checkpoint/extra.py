"""What a run has beside model and optimizer: schedules, scalers, the place in the data, random states.

Every rank saves its own, one value a name, as bytes: any data that torch.load(weights_only=True) reads. On another
number of ranks, rank r reads what rank r mod (ranks that saved) has written.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit.kernels.data.checks import is_whole
from onebit.warning import warn

EXTRA = "extra"


def packed(extra: Mapping[str, Any]) -> dict[str, Tensor]:
    """By name the bytes of what each has for its state: of objects with a state_dict that, else the value itself."""
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) and name for name in extra):
        raise TypeError("extra is a dict, by names: extra={'schedule': schedule, 'epoch': 3}")
    return {name: _packed(name, value) for name, value in extra.items()}


def unpacked(name: str, value: Tensor) -> Any:
    try:
        return torch.load(io.BytesIO(value.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"extra {name!r} of the checkpoint is damaged ({error!s:.200}). Load another") from error


def checked(extra: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What each object has for its state now. A ValueError or TypeError where one can't be given what was saved under
    its name."""
    for name, value in extra.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(
                f"extra {name!r} is a {type(value).__name__}, which has no load_state_dict: leave it out, and take it "
                f"from what onebit.load returns"
            )
        if name not in found:
            raise ValueError(
                f"the checkpoint has no extra {name!r}, it has {sorted(found) or 'none'}: load without it, or load "
                f"another checkpoint"
            )
    return {name: deepcopy(value.state_dict()) for name, value in extra.items() if hasattr(value, "state_dict")}


def restore(extra: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name in found:
            value.load_state_dict(found[name])


def rank_to_read(rank: int, saved: Any, ranks: int) -> int:
    """Whose values a rank of `ranks` reads, of `saved` ranks."""
    if not is_whole(saved, 1):
        raise ValueError(f"the checkpoint was saved by {saved!r:.80} ranks: it is damaged. Load another")
    if saved != ranks and rank == 0:
        warn(
            f"extra was saved by {saved} ranks, here are {ranks}: rank r has what rank r mod {saved} saved. Random "
            f"states and places in the data may be another's, or the same on several"
        )
    return rank % saved


def _packed(name: str, value: Any) -> Tensor:
    state = value.state_dict() if callable(getattr(value, "state_dict", None)) else value
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"extra {name!r} ({type(value).__name__}) could be saved and not be loaded: onebit.load unpickles no "
            f"objects. Pass numbers, strings, tensors, and lists, tuples and dicts of these; for a NumPy array pass "
            f"torch.from_numpy(array), for a torch.Generator its get_state()"
        ) from error
    return torch.from_numpy(np.frombuffer(file.getvalue(), dtype=np.uint8).copy())
