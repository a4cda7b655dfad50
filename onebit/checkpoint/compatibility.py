"""What a checkpoint was made of, and whether it fits what is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from onebit.checkpoint.files import checksum
from onebit.optim.setup import Setup


def layout_of(model: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """Names, shapes and dtypes of the model, param groups, and the optimizer's options; with a fingerprint of all."""
    made = {
        "model": {name: _tensor(value) for name, value in model.items() if isinstance(value, Tensor)},
        "groups": [[_tensor(p) for p in group["params"]] for group in setup.groups],
        "optimizer": setup.name,
        "options": {name: _plain(value) for name, value in asdict(setup.options).items()},
        "ranks": setup.topology.everyone.size,
    }
    return {**made, "fingerprint": checksum(made)}


def check_layout(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """A ValueError that names the first differences. Other options, dtypes and numbers of ranks can be loaded."""
    if there == here:
        return
    try:
        model = {name: list(shape) for name, (_, shape) in there["model"].items()}
        groups = [[list(shape) for _, shape in group] for group in there["groups"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError("the checkpoint does not say what model it is of: it is damaged. Load another") from error
    own = {name: shape for name, (_, shape) in here["model"].items()}
    shapes = [f"{n} has shape {model[n]} there and {own[n]} here" for n in own if n in model and model[n] != own[n]]
    differences = [*_missing(model, own, "there"), *_missing(own, model, "here"), *shapes]
    if differences:
        raise ValueError(
            f"the checkpoint is another model's: {_listed(differences)}. Build the model as it was when it was saved"
        )
    if groups != [[shape for _, shape in group] for group in here["groups"]]:
        raise ValueError(
            f"the checkpoint has param groups of {[len(g) for g in groups]} parameters, this optimizer of "
            f"{[len(g) for g in here['groups']]}, or in another order: give it the parameters in the groups and in "
            f"the order they were saved in"
        )


def _plain(value: Any) -> Any:
    """What JSON holds as it is, or the name of a dtype."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _tensor(value: Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _missing(some: Mapping[str, Any], others: Mapping[str, Any], where: str) -> list[str]:
    return [f"{name} is only {where}" for name in some if name not in others]


def _listed(differences: list[str]) -> str:
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    return "; ".join(differences[:5]) + more
