"""Checkpoints of a whole run, over torch.distributed.checkpoint: saved by all ranks, loaded by any number of them.

A save is whole or not there, and until it is whole the checkpoint before it stays (`onebit.checkpoint.files`). A load
checks version, layout and every file before it reads. Every rank then reads and checks what it needs; when all have,
each builds its state in the place of the one there was. A checkpoint that is damaged or does not fit is a ValueError on
every rank (a TypeError where a value is of another kind) and changes nothing.
"""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from onebit.checkpoint import files
from onebit.checkpoint.checks import checked_numbers
from onebit.checkpoint.files import Planner, Reader, check_layout, index_of, layout_of, read_index
from onebit.checkpoint.ranks import (
    EXTRA,
    CheckpointRanks,
    check_extra,
    own_error,
    packed_extra,
    rank_to_read,
    restore_extra,
    saved_bytes,
    unpacked_extra,
)
from onebit.optim.param_groups import PROGRESS
from onebit.optim.sharding import as_whole, is_sharded, local
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_module, own_optimizer


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write the model and the optimizer's state into `folder`, after `optimizer.synchronize()`: a collective call.

    Args:
        folder: one that all ranks see. A checkpoint that is there already stays until this one is whole, then goes.
        model: the module, wrapped or not.
        optimizer: one of onebit, wrapped or not.
        extra: what else the run needs, by names: objects with a state_dict (a scheduler, a GradScaler, a data loader)
            and plain data (an epoch, random states). Each rank's own is kept.

    Raises:
        OSError: on all ranks, what one of them can't write, or another has written and one can't read.
    """
    inner, optimizer = own_module(model, "save"), own_optimizer(optimizer, "save")
    optimizer.find_ranks()
    ranks, folder = CheckpointRanks(optimizer.setup), Path(folder)
    ranks.on_all(optimizer.check_synchronize)
    optimizer.synchronize()

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
    """Continue from what `save` wrote, on any number of ranks: a collective call.

    The run goes on bit for bit on as many ranks. If the model's own load_state_dict raises (a hook of its layers, say),
    or memory runs out as the state is built, model, state and what is in extra may be part old, part new: load again.

    Args:
        folder: what `save` has written to.
        model: the module, wrapped or not.
        optimizer: one of onebit, wrapped or not.
        extra: objects that get what was saved under their names, by load_state_dict.

    Returns:
        All of the `extra` that this rank, or the one in its place, saved.

    Raises:
        ValueError, TypeError: on every rank, for a checkpoint that is damaged, another program's or another model's.
            Nothing has changed.
    """
    inner, optimizer, asked = own_module(model, "load"), own_optimizer(optimizer, "load"), extra or {}
    manifest, ranks = _opened(folder, inner, optimizer)

    def read() -> tuple[Any, ...]:
        source = _Source(manifest, optimizer)
        found = source.extra(ranks)
        check_extra(asked, found)
        return source.model_state(inner), found, source.optimizer_state()

    state, found, saved = ranks.on_all(read)
    install_state = ranks.on_all(lambda: optimizer.prepare_load(saved))  # where hooks of others may call collectives
    before: dict[str, Any] = {}

    def restore() -> None:
        before.update({name: deepcopy(v.state_dict()) for name, v in asked.items() if hasattr(v, "state_dict")})
        restore_extra(asked, found)

    try:  # the only part that others' code can refuse comes first
        ranks.on_all(restore)
    except Exception:
        restore_extra(asked, before)
        raise

    def install() -> None:
        inner.load_state_dict(state)
        install_state()

    ranks.on_all(install)
    return found


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
    """A writer that knows on rank 0 where everything lies, which not every version of torch tells."""

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
    files.check_readable(data)
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
        self._manifest, self._index = manifest, read_index(manifest)
        fields = optimizer.setup.algorithm.saved_fields(compressed=True)
        self._numbers = {field.name for field in fields if field.per == "parameter"}
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
        """The optimizer's state, of sharded parameters this rank's part."""
        of_groups = self._read(self._groups)
        groups = _nested({self._groups[key]: value for key, value in of_groups.items()})
        if sorted(groups, key=str) != sorted(range(len(groups)), key=str):
            raise ValueError("the checkpoint lacks param groups: it is damaged. Load another")
        if not checked_numbers(groups[0].get(PROGRESS, "")):
            raise ValueError(f"the checkpoint's first param group has no {PROGRESS!r}: it is damaged. Load another")
        state = _nested({self._own[key]: value for key, value in self._read(self._own).items()})
        return {"state": state, "param_groups": [groups[i] for i in range(len(groups))]}

    def _read(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `keys`; of a sharded parameter's tensors this rank's part is read."""
        return self._fill({key: self._empty(key) for key in keys})

    def _empty(self, key: str) -> Tensor | None:
        entry = self._index.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        place, name = self._own.get(key, (-1, ""))
        like = self._params[place] if place in range(len(self._params)) and name not in self._numbers else None
        if like is not None and is_sharded(like) and tuple(entry.size) == tuple(like.shape):
            return as_whole(torch.zeros(local(like).shape, dtype=entry.properties.dtype, device=like.device), like)
        return torch.zeros(entry.size, dtype=entry.properties.dtype)

    def _fill(self, state: dict[str, Any]) -> dict[str, Any]:
        reader = Reader(self._manifest.folder, self._index)
        try:
            with quiet():
                dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise own_error("reading a checkpoint", error) from None
        return state


def _room_like(value: Any) -> Any:
    """Make room for a tensor of the model, in host memory if it is an ordinary one. Copy other values."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return torch.empty_like(value, device="cpu" if type(value) in (Tensor, nn.Parameter) else None)
