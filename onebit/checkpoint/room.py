"""Room for a saved state, where tools fill what is there already.

`dcp.load`, and torch's set_optimizer_state_dict with flattened states, load what an optimizer has. A new one is in
stage 1 and has nothing of stage 2, nor has one of three ranks what two have saved. `make_room` looks what was saved,
and gives the optimizer tensors of the same names and sizes, until the next load: this rank's residuals where ranks are
as they were, those of all ranks where they are not, of which the mean is kept. Like `dcp.load` it unpickles what it
reads (.metadata, and values that are no tensors): trust the checkpoint, or use `onebit.save` and `load`.
"""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onebit.checkpoint.checks import check_numbers
from onebit.checkpoint.names import ORDER, rank_of, residual_name, server_rank_of
from onebit.checkpoint.restore import same_cut
from onebit.checkpoint.save_load import quiet
from onebit.checkpoint.schema import progress_of
from onebit.checkpoint.sharded import room_for
from onebit.optim.memory_order import order_of
from onebit.optim.param_groups import PROGRESS
from onebit.optim.sharding import local
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import layers_of, own_optimizer

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)")


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint or a state has, by torch's flat keys."""

    paths: Mapping[str, tuple[str | int, ...]]
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    read: Callable[[Iterable[str]], Mapping[str, Any]]  # values that are no tensors


def make_room(source: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Before torch's own tools load a state into `optimizer`: give it the names and sizes of what was saved.

    source: the folder or StorageReader that `dcp.load` is to read, or a state from `get_optimizer_state_dict`. Call it
    on every rank, on the model that the state is of, then load as ever.
    """
    optimizer = own_optimizer(optimizer, "make_room")
    optimizer.find_ranks()
    saved = _of_state(source) if isinstance(source, Mapping) else _of_checkpoint(source)
    names = _names_of_parameters(model, optimizer)
    numbers = _numbers(saved, names)
    own_alone = not numbers["compressing"] or (
        same_cut(optimizer.setup, progress_of([{PROGRESS: numbers}])) and _same_parameters_permuted(saved, names)
    )
    own = residual_name(optimizer.setup.topology.place)
    own_alone = own_alone and any(_parameter_of(key, names)[1] == own for key in saved.tensors)  # else of what is there
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key, (size, dtype) in saved.tensors.items():
        p, name = _parameter_of(key, names)
        rank = rank_of(name) if server_rank_of(name) is None else server_rank_of(name)
        if p is not None and (rank is None or not own_alone or rank == optimizer.setup.topology.place):
            like = None if name in optimizer.setup.algorithm.numbers() else p
            state.setdefault(p, {})[name] = room_for(size, dtype, like, p.device if size else "cpu")
    if not state:
        raise ValueError(
            "make_room found no state of this optimizer's parameters: they are called by other names there. Give the "
            "model that the state was saved with"
        )
    optimizer.overlap.check_at_rest("make_room")
    optimizer.install(optimizer.current, (state, numbers))


def _of_state(state: Mapping[str, Any]) -> _Saved:
    flat, paths = flatten_state_dict(dict(state))
    tensors = {key: (v.size(), v.dtype) for key, v in flat.items() if isinstance(v, Tensor)}
    return _Saved(paths, tensors, lambda keys: {key: flat[key] for key in keys})


def _of_checkpoint(source: Any) -> _Saved:
    reader = dcp.FileSystemReader(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(reader, dcp.StorageReader):
        raise TypeError(
            f"make_room takes the folder of a checkpoint, a StorageReader or a state, not a {type(source).__name__}"
        )
    try:
        metadata = reader.read_metadata()
    except OSError as error:
        raise ValueError(f"{source} holds no checkpoint of torch.distributed.checkpoint: {error}") from error
    found = metadata.state_dict_metadata
    tensors = {k: (m.size, m.properties.dtype) for k, m in found.items() if isinstance(m, TensorStorageMetadata)}

    def read(keys: Iterable[str]) -> Mapping[str, Any]:
        values: dict[str, Any] = dict.fromkeys(keys)
        with quiet():
            dcp.load(values, storage_reader=reader, no_dist=True)
        return values

    return _Saved(metadata.planner_data or {}, tensors, read)


def _names_of_parameters(model: nn.Module, optimizer: OneBitOptimizer) -> dict[str, Tensor]:
    """By the names that states have for them: the model's, without wrappers, and their numbers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = {str(i): p for i, p in enumerate(params)}
    known = set(params)
    for each in layers_of(model):
        for name, p in each.named_parameters(remove_duplicate=False):
            if p in known:
                names[_WRAPPERS.sub("", name).lstrip(".")] = p
    return names


def _parameter_of(key: str, names: Mapping[str, Tensor]) -> tuple[Tensor | None, str]:
    """Whose a key's value is, and what it is called."""
    head, _, name = key.rpartition(".")
    for found in _ends_after("state", head):
        if found in names:
            return names[found], name
    return None, name


def _same_parameters_permuted(saved: _Saved, names: Mapping[str, Tensor]) -> bool:
    """Whether those that are permuted in memory are those that were."""
    there = {p for p, name in (_parameter_of(key, names) for key in saved.tensors) if name == ORDER}
    return there == {p for p in names.values() if p.requires_grad and order_of(local(p)) is not None}


def _ends_after(word: str, key: str) -> Iterator[str]:
    """What comes after each `word` of a dotted key."""
    return (key[found.end() :] for found in re.finditer(rf"(?:^|(?<=\.)){word}\.", key))


def _numbers(saved: _Saved, names: Mapping[str, Tensor]) -> dict[str, Any]:
    """How far the run had come: what the first param group, or in a flattened state its first parameter, has."""
    groups: dict[str, dict[str, tuple[str | int, ...]]] = {}
    for key in saved.paths:
        for end in _ends_after("param_groups", key):
            group, found, _ = end.partition(f".{PROGRESS}.")
            if found and group in names:
                groups.setdefault(group, {})[key] = _path_in_numbers(saved.paths[key])
    if not groups:
        raise ValueError(
            f"make_room found no param group of this optimizer with {PROGRESS!r} in it, which says how far the run had "
            f"come: the state is no onebit optimizer's, or another model's. Give the one that was saved"
        )
    paths = min(groups.items(), key=lambda each: each[0] != "0")[1]
    numbers: dict[str, Any] = {}
    for key, value in saved.read(paths).items():
        set_element(numbers, paths[key], value)
    check_numbers(progress_of([{PROGRESS: numbers}]))
    return numbers


def _path_in_numbers(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    at = next(i for i, step in enumerate(path) if str(step).split(".")[-1] == PROGRESS)
    return path[at + 1 :]
