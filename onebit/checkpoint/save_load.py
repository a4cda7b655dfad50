"""Checkpoints of a whole run, over torch.distributed.checkpoint: saved by all ranks, loaded by any number of them.

A save is whole or not there, and until it is whole the checkpoint before it stays (`onebit.checkpoint.files`). A load
checks version, layout and every file before it reads. Every rank then reads and builds what it needs beside what is
there; when all have, all install it. A checkpoint that is damaged or does not fit is a ValueError on every rank (a
TypeError where a value is of another kind) and changes nothing.

`dcp.load`, and torch's set_optimizer_state_dict with flattened states, fill what an optimizer has: a new one has
nothing of stage 2, and one of three ranks lacks what two have saved. `make_room` gives an optimizer tensors of the
names and sizes that were saved, until the next load.
"""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from onebit.checkpoint import files
from onebit.checkpoint.checks import checked_numbers
from onebit.checkpoint.elements import ORDER, owner_of, rank_of, residual_name, room_for, server_residual_name
from onebit.checkpoint.files import Planner, Reader, check_layout, index_of, layout_of, read_index
from onebit.checkpoint.ranks import (
    EXTRA,
    CheckpointRanks,
    checked_extra,
    own_error,
    packed_extra,
    rank_to_read,
    restore_extra,
    saved_bytes,
    unpacked_extra,
)
from onebit.checkpoint.restore import Cut
from onebit.optim.param_groups import PROGRESS
from onebit.optim.setup import Setup
from onebit.optim.sharding import local
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import layers_of, own_module, own_optimizer

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
Read = Callable[[Iterable[str]], Mapping[str, Any]]


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the model and all ranks' state into `folder`: a collective call.

    extra: what else the run needs, by names: objects with a state_dict (a scheduler, a GradScaler, a data loader) and
    plain data (an epoch, random states). Each rank's own is kept. A checkpoint that is in `folder` already stays until
    this one is whole, then goes. What the ranks can't write is an OSError on all of them.
    """
    inner, optimizer = own_module(model, "save"), own_optimizer(optimizer, "save")
    optimizer.find_ranks()
    ranks, folder = CheckpointRanks(optimizer.setup), Path(folder)

    def made() -> tuple[dict[str, Any], dict[str, Any]]:
        found = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
        return _plain(found), layout_of(found["model"], optimizer.setup)

    otherwise = "have another model or other options than rank 0: give every rank the same, and save again"
    state, layout = ranks.on_all(made, lambda found: found[1]["fingerprint"], otherwise)
    if own := ranks.on_all(lambda: packed_extra({} if extra is None else extra)):  # others' code may call collectives
        state[EXTRA] = {str(ranks.rank): own}
    name = ranks.gathered(files.new_name)[0]
    ranks.on_all(lambda: _begin(folder, name, ranks.rank))
    writer = _Writer(folder / name)
    with ranks.saving(), quiet():
        dcp.save(state, storage_writer=writer, process_group=ranks.group)
    found = ranks.gathered(lambda: _finish(folder / name, writer, ranks))
    ranks.on_all(lambda: _commit(folder, name, {k: v for own in found for k, v in own.items()}, layout, ranks.rank))


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Continue from what `save` wrote, on any number of ranks: a collective call. Returns all of its `extra`.

    extra: objects that get what was saved under their names, by load_state_dict. The same number of ranks continues bit
    for bit; another number with the mean of the residuals. A checkpoint that is damaged, another program's or another
    model's is a ValueError or TypeError on every rank and changes nothing. Where the model's own load_state_dict raises
    (a hook of its layers, say), part of the model and what is in extra may have changed.
    """
    inner, optimizer, asked = own_module(model, "load"), own_optimizer(optimizer, "load"), extra or {}
    manifest, ranks = _opened(folder, inner, optimizer)

    def read() -> tuple[Any, ...]:
        source = _Source(manifest, optimizer)
        return source.model_state(inner), source.extra(ranks), source.optimizer_state()

    state, found, saved = ranks.on_all(read)
    install = ranks.on_all(lambda: optimizer.prepare_load(saved))  # where hooks of others may call collectives
    before = ranks.on_all(lambda: checked_extra(asked, found))
    try:  # the only part that others' code can refuse comes first
        ranks.on_all(lambda: restore_extra(asked, found))
    except Exception:
        restore_extra(asked, before)
        raise
    inner.load_state_dict(state)
    install()
    return found


def optimizer_state(folder: str | os.PathLike[str], model: nn.Module, optimizer: OneBitOptimizer) -> dict[str, Any]:
    """What `save` wrote of the optimizer, checked as `load` does, as this rank's `load_state_dict` takes it: a
    collective call."""
    manifest, ranks = _opened(folder, own_module(model, "load"), optimizer)
    return ranks.on_all(lambda: _Source(manifest, optimizer).optimizer_state())


def make_room(source: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Before torch's own tools load a state into `optimizer`: give it the names and sizes of what was saved.

    source: the folder or StorageReader that `dcp.load` is to read, or a state from `get_optimizer_state_dict`. Call it
    on every rank, on the model that the state is of, then load as ever. A state that rank 0 alone has
    (broadcast_from_rank0) needs dist.broadcast_object_list before. Like `dcp.load` it unpickles what it reads
    (.metadata, and values that are no tensors): trust the checkpoint, or use `onebit.save` and `load`.
    """
    optimizer = own_optimizer(optimizer, "make_room")
    if isinstance(source, Mapping) and not source:
        raise ValueError(
            "make_room got an empty state: with full_state_dict rank 0 alone may have it. Send it to every rank "
            "first, by torch.distributed.broadcast_object_list"
        )
    optimizer.find_ranks()
    setup, params = optimizer.setup, [p for group in optimizer.param_groups for p in group["params"]]
    tensors, others, read = _of_state(source) if isinstance(source, Mapping) else _of_checkpoint(source)
    places = _places_by_name(model, params)
    numbers = _numbers_of_tools(others, read, places)
    own = {key: found for key in tensors if (found := _place_and_name(key, places)) is not None}
    state: dict[Tensor, dict[str, Tensor]] = {}
    for key in _needed(own, numbers, read, setup):
        (place, name), (size, dtype) = own[key], tensors[key]
        p, like = params[place], None if name in setup.algorithm.numbers() else params[place]
        state.setdefault(p, {})[name] = room_for(size, dtype, like, p.device if size else "cpu")
    if not state:
        raise ValueError(
            "make_room found no state of this optimizer's parameters: they are called by other names there. Give the "
            "model that the state was saved with"
        )
    optimizer.overlap.check_at_rest("make_room")
    optimizer.install(optimizer.current, (state, numbers))


def _needed(own: Mapping[str, tuple[int, str]], numbers: Mapping[str, Any], read: Read, setup: Setup) -> list[str]:
    """The keys that this rank has to load, of those of a state, each with its parameter's place and its name: of
    residuals this rank's own, where they are all that it needs, otherwise those of all."""
    names, permuted = {name for _, name in own.values()}, [key for key, (_, name) in own.items() if name == ORDER]
    orders = {own[key][0]: tuple(v.flatten().tolist()) for key, v in read(permuted).items() if isinstance(v, Tensor)}
    there = Cut.of_state(numbers, orders)
    mine = {residual_name(setup.topology.place), server_residual_name(setup.topology.place)}
    if not names & mine or not Cut.of_run(setup, there).keeps_residuals_of(there):
        return list(own)
    return [key for key, (_, name) in own.items() if name in mine or owner_of(name) is None]


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Dicts from the paths into them."""
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise ValueError(f"the checkpoint has two values for {path}: it is damaged. Load another")
        node[path[-1]] = value
    return root


@contextmanager
def quiet() -> Iterator[None]:
    """One process alone is not worth a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def _begin(folder: Path, name: str, rank: int) -> None:
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        files.prune(folder)
        (folder / name).mkdir()


class _Writer(FileSystemWriter):
    """On rank 0 it knows where everything lies, which not every version of torch tells."""

    metadata: Metadata

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.metadata = replace(metadata, storage_data={one.index: one.storage_data for of in results for one in of})


def _finish(data: Path, writer: _Writer, ranks: CheckpointRanks) -> dict[str, list[Any]]:
    """This rank's files, on the disk, and what is in them: those that it has written, and has in its memory still."""
    own = sorted(path.name for path in data.glob(f"__{ranks.rank}_*"))
    if ranks.rank == 0:
        files.write(data / files.INDEX, index_of(writer.metadata))
        own += [files.INDEX, ".metadata"]
    found = files.described(data, own)
    files.sync_folder(data)
    return found


def _commit(folder: Path, name: str, found: Mapping[str, list[Any]], layout: Mapping[str, Any], rank: int) -> None:
    if rank == 0:
        files.commit(folder, name, found, layout)
        files.prune(folder)


def _plain(value: Any) -> Any:
    """What `load` will read: found out when it is saved, not when it is needed."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, (Tensor, str, int, float, type(None))):
        saved_bytes(value, f"{value!r:.80}")
    return value


def _opened(
    folder: str | os.PathLike[str], inner: nn.Module, optimizer: OneBitOptimizer
) -> tuple[files.Manifest, CheckpointRanks]:
    """A checkpoint that is whole, the same for all ranks, and of this model."""
    optimizer.find_ranks()
    ranks = CheckpointRanks(optimizer.setup)

    def opened() -> files.Manifest:
        here = layout_of(inner.state_dict(), optimizer.setup)  # first: others' code may call collectives
        manifest = files.Manifest(Path(folder))
        check_layout(manifest.layout, here)
        manifest.check_files(ranks.rank, ranks.size)
        return manifest

    otherwise = f"find another checkpoint in {folder} than rank 0: it must be one folder that all ranks see"
    return ranks.on_all(opened, lambda manifest: manifest.checksum, otherwise), ranks


class _Source:
    """A checkpoint that was checked, as one rank reads it."""

    def __init__(self, manifest: files.Manifest, optimizer: OneBitOptimizer) -> None:
        self._manifest, self._setup, self._index = manifest, optimizer.setup, read_index(manifest)
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._own: dict[str, tuple[int, str]] = {}  # of every key of state the parameter's place, and the name
        self._groups: dict[str, tuple[Any, ...]] = {}  # of every key of a param group the path in all of them
        self._extra: dict[int, dict[str, str]] = {}  # keys by rank and name
        for key, path in self._index.planner_data.items():
            match path:
                case ("optimizer", "state", str(place), str(name)) if place.isdecimal():
                    self._own[key] = (int(place), name)
                case ("optimizer", "param_groups", _, _, *_):
                    self._groups[key] = path[2:]
                case ("extra", str(rank), str(name)) if rank.isdecimal():
                    self._extra.setdefault(int(rank), {})[name] = key
        if not self._groups:
            raise ValueError(f"{manifest.folder} holds no optimizer: it is damaged. Load another checkpoint")

    def model_state(self, inner: nn.Module) -> dict[str, Any]:
        return self._fill({"model": {name: _room_like(value) for name, value in inner.state_dict().items()}})["model"]

    def extra(self, ranks: CheckpointRanks) -> dict[str, Any]:
        """What this rank, or the one in its place, saved beside model and optimizer."""
        if not self._extra:
            return {}
        keys = self._extra.get(rank_to_read(ranks.rank, self._manifest.layout.get("ranks"), ranks.size), {})
        values = self._read(keys.values())
        return {name: unpacked_extra(name, values[key]) for name, key in keys.items()}

    def optimizer_state(self) -> dict[str, Any]:
        """What this rank needs of the optimizer's state."""
        of_groups = self._read(self._groups)
        groups = _nested({self._groups[key]: value for key, value in of_groups.items()})
        if sorted(groups, key=str) != sorted(range(len(groups)), key=str):
            raise ValueError("the checkpoint lacks param groups: it is damaged. Load another")
        numbers = checked_numbers(groups[0].get(PROGRESS, {}))
        if not numbers:
            raise ValueError(f"the checkpoint's first param group has no {PROGRESS!r}: it is damaged. Load another")
        keys = _needed(self._own, numbers, self._read, self._setup)
        residuals = [key for key in keys if rank_of(self._own[key][1]) is not None]
        found = self._read(set(keys) - set(residuals)) | self._mean(residuals, int(numbers["slices"]))
        state = _nested({self._own[key]: value for key, value in found.items()})
        return {"state": state, "param_groups": [groups[i] for i in range(len(groups))]}

    def _mean(self, residuals: Collection[str], slices: int) -> dict[str, Tensor]:
        """The mean over nodes in the place of each rank's, read rank by rank: one model's size in memory, not N."""
        ranks = {key: rank_of(self._own[key][1]) or 0 for key in residuals}
        nodes = len({rank // slices for rank in ranks.values()})
        mean: dict[tuple[int, int], Tensor] = {}
        for rank in sorted(set(ranks.values())):
            for key, value in self._read(key for key in residuals if ranks[key] == rank).items():
                at = (self._own[key][0], rank % slices)
                mean[at] = mean.get(at, 0) + value.double() / nodes
        single = {at: value.float() for at, value in mean.items()}
        return {key: single[self._own[key][0], ranks[key] % slices] for key in residuals}

    def _read(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `keys`; of a sharded parameter's tensors this rank's part."""
        found = self._fill({key: self._room(key) for key in keys})
        return {key: local(value) if isinstance(value, Tensor) else value for key, value in found.items()}

    def _room(self, key: str) -> Tensor | None:
        entry = self._index.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        place, name = self._own.get(key, (-1, ""))
        like = place in range(len(self._params)) and name not in self._setup.algorithm.numbers()
        return room_for(entry.size, entry.properties.dtype, self._params[place] if like else None)

    def _fill(self, state: dict[str, Any]) -> dict[str, Any]:
        reader = Reader(self._manifest.folder, self._index)
        try:
            with quiet():
                dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise own_error("reading a checkpoint", error) from None
        return state


def _room_like(value: Any) -> Any:
    """For a tensor of the model, in host memory where it is an ordinary one."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return torch.empty_like(value, device="cpu" if type(value) in (Tensor, nn.Parameter) else None)


Sizes = dict[str, tuple[torch.Size, torch.dtype]]


def _of_state(state: Mapping[str, Any]) -> tuple[Sizes, Collection[str], Read]:
    """Of a state by dotted keys: its tensors, the keys of its other values, and how to read values."""
    flat, _ = flatten_state_dict(dict(state))
    tensors = {key: (v.size(), v.dtype) for key, v in flat.items() if isinstance(v, Tensor)}
    return tensors, flat.keys() - tensors.keys(), lambda keys: {key: flat[key] for key in keys}


def _of_checkpoint(source: Any) -> tuple[Sizes, Collection[str], Read]:
    """The same of a checkpoint of torch.distributed.checkpoint."""
    reader = dcp.FileSystemReader(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(reader, dcp.StorageReader):
        raise TypeError(
            f"make_room takes the folder of a checkpoint, a StorageReader or a state, not a {type(source).__name__}"
        )
    try:
        found = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(f"{source} holds no checkpoint of torch.distributed.checkpoint: {error}") from error
    tensors = {k: (m.size, m.properties.dtype) for k, m in found.items() if isinstance(m, TensorStorageMetadata)}

    def read(keys: Iterable[str]) -> Mapping[str, Any]:
        values: dict[str, Any] = {key: room_for(*tensors[key], like=None) if key in tensors else None for key in keys}
        with quiet():
            dcp.load(values, storage_reader=reader, no_dist=True)
        return values

    return tensors, found.keys() - tensors.keys(), read


def _places_by_name(model: nn.Module, params: list[Tensor]) -> dict[str, int]:
    """By the names that states have for parameters, the model's without wrappers, and their numbers."""
    places = {p: i for i, p in enumerate(params)}
    names = {str(i): i for i in places.values()}
    for layer in layers_of(model):
        for name, p in layer.named_parameters(remove_duplicate=False):
            if p in places:
                names[".".join(part for part in name.split(".") if part not in _WRAPPERS)] = places[p]
    return names


def _place_and_name(key: str, places: Mapping[str, int]) -> tuple[int, str] | None:
    """Of the parameter whose value a key of a state has, and of the value."""
    head, _, name = key.rpartition(".")
    return next(((places[end], name) for end in _ends_after("state", head) if end in places), None)


def _ends_after(word: str, key: str) -> list[str]:
    """What comes after each `word` of a dotted key."""
    parts = key.split(".")
    return [".".join(parts[i + 1 :]) for i, part in enumerate(parts) if part == word]


def _numbers_of_tools(keys: Iterable[str], read: Read, places: Mapping[str, int]) -> dict[str, Any]:
    """How far the run had come: what the first param group, or in a flattened state its first parameter, has."""
    groups: dict[str, dict[str, tuple[str, ...]]] = {}
    for key in keys:
        for end in _ends_after("param_groups", key):
            group, found, rest = end.partition(f".{PROGRESS}.")
            if found and group in places:
                groups.setdefault(group, {})[key] = tuple(rest.split("."))
    if not groups:
        raise ValueError(
            f"make_room found no param group of this optimizer with {PROGRESS!r} in it, which says how far the run had "
            f"come: the state is no onebit optimizer's, or another model's. Give the one that was saved"
        )
    paths = min(groups.items(), key=lambda each: each[0] != "0")[1]
    numbers = _nested({paths[key]: value for key, value in read(paths).items()})
    checked_numbers(numbers)
    return numbers
