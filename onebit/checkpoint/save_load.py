"""One checkpoint of a whole run, over torch.distributed.checkpoint: saved by all ranks, loaded by any number of them.

A save is whole or not there, and until it is whole the checkpoint before it stays (`onebit.checkpoint.files`). A load
checks version, layout and every file before it reads, and reads and builds everything beside what is there: a
checkpoint that is damaged or does not fit is a ValueError on every rank (a TypeError where a value is of another kind)
and changes nothing.

`dcp.save` and `dcp.load` take an optimizer as it is, but `dcp.load` fills what is there already. `load` looks first
what was saved: a new optimizer may load a state of stage 2, and of another number of ranks.
"""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onebit.checkpoint import files
from onebit.checkpoint.checks import check_numbers
from onebit.checkpoint.compatibility import check_layout, layout_of
from onebit.checkpoint.extra import EXTRA, checked, packed, rank_to_read, restore, unpacked
from onebit.checkpoint.index import KeyPath, Planner, Reader, written
from onebit.checkpoint.names import ORDER, rank_of, residual_name, server_rank_of, server_residual_name
from onebit.checkpoint.ranks import CheckpointRanks
from onebit.checkpoint.restore import same_cut
from onebit.checkpoint.schema import progress_of
from onebit.checkpoint.sharded import room_for
from onebit.kernels.data.checks import is_whole
from onebit.optim.memory_order import order_of
from onebit.optim.param_groups import PROGRESS
from onebit.optim.sharding import local
from onebit.optimizers.optimizer import OneBitOptimizer
from onebit.parallel.unwrap import own_module, own_optimizer

_SAVING, _READING = "saving a checkpoint", "reading a checkpoint"


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
    ranks, folder = CheckpointRanks(optimizer.setup.topology.everyone, optimizer.setup.device), Path(folder)
    state = {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}
    layout = layout_of(state["model"], optimizer.setup)
    state = ranks.on_all(lambda: _plain(state))
    if own := ranks.on_all(lambda: packed({} if extra is None else extra)):
        state[EXTRA] = {str(ranks.rank): own}
    data = ranks.all_gather([layout["fingerprint"], files.new_name()])
    ranks.on_all(lambda: _agree_on_layout(data))
    name = data[0][1]
    ranks.on_all(lambda: _make_room(folder, name, ranks.rank))
    with ranks.inside_dcp(_SAVING), quiet():
        metadata = dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / name), process_group=ranks.group)
    found = ranks.all_gather(ranks.on_all(lambda: _finish(folder / name, metadata, ranks)))
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
    model's is a ValueError or TypeError on every rank and changes nothing.
    """
    inner, optimizer = own_module(model, "load"), own_optimizer(optimizer, "load")
    optimizer.find_ranks()
    ranks = CheckpointRanks(optimizer.setup.topology.everyone, optimizer.setup.device)
    here = inner.state_dict()
    source = _checked(Path(folder), here, optimizer, ranks)
    loaded = _optimizer_state(source, optimizer)
    state = {"model": {name: _room_like(value) for name, value in here.items()}}
    source.fill(state)
    install = ranks.on_all(lambda: optimizer.prepare_load(loaded))
    found = _extra(source)
    asked = {} if extra is None else extra
    before = ranks.on_all(lambda: checked(asked, found))
    try:  # the only part that others' code can refuse comes first
        ranks.on_all(lambda: restore(asked, found))
    except Exception:
        restore(asked, before)
        raise
    inner.load_state_dict(state["model"])
    install()
    return found


def optimizer_state(folder: str | os.PathLike[str], model: nn.Module, optimizer: OneBitOptimizer) -> dict[str, Any]:
    """What `save` wrote of the optimizer, checked as `load` does, as this rank's `load_state_dict` takes it: a
    collective call."""
    optimizer.find_ranks()
    ranks = CheckpointRanks(optimizer.setup.topology.everyone, optimizer.setup.device)
    return _optimizer_state(_checked(Path(folder), own_module(model, "load").state_dict(), optimizer, ranks), optimizer)


def _checked(folder: Path, here: Mapping[str, Any], optimizer: OneBitOptimizer, ranks: CheckpointRanks) -> _Source:
    """A checkpoint that is whole, the same for all ranks, and of this model, whose state is `here`."""
    manifest = ranks.on_all(lambda: files.Manifest(folder))
    seen = ranks.all_gather(manifest.checksum)
    ranks.on_all(lambda: _agree_on_folder(folder, seen))
    ranks.on_all(lambda: check_layout(manifest.layout, layout_of(here, optimizer.setup)))
    ranks.on_all(lambda: manifest.check_files(ranks.rank, ranks.size))
    return ranks.on_all(lambda: _Source(manifest, ranks, optimizer))


def _extra(source: _Source) -> dict[str, Any]:
    """What this rank, or the one in its place, saved beside model and optimizer."""
    if not source.extra:
        return {}
    ranks, saved = source.ranks, source.manifest.layout.get("ranks")
    keys = source.extra.get(ranks.on_all(lambda: rank_to_read(ranks.rank, saved, ranks.size)), {})
    values = source.read(keys.values())
    return ranks.on_all(lambda: {name: unpacked(name, values[key]) for name, key in keys.items()})


def _optimizer_state(source: _Source, optimizer: OneBitOptimizer) -> dict[str, Any]:
    """What this rank needs of the optimizer's state."""
    paths, place = source.paths, optimizer.setup.topology.place
    found = source.read(k for k, p in paths.items() if p[1] == "param_groups" or p[-1] == ORDER)
    groups = {paths[k]: v for k, v in found.items() if paths[k][1] == "param_groups"}
    orders = {str(paths[k][2]): v for k, v in found.items() if paths[k][-1] == ORDER and isinstance(v, Tensor)}
    numbers = source.ranks.on_all(lambda: _numbers(groups))
    own_residual, own_server = residual_name(place), server_residual_name(place)
    servers = {k for k, p in paths.items() if server_rank_of(p[-1]) is not None}
    residuals: dict[int, list[str]] = {}
    for key, path in paths.items():
        if (rank := rank_of(path[-1])) is not None:
            residuals.setdefault(rank, []).append(key)
    others = {k for own in residuals.values() for k in own}
    if source.ranks.on_all(lambda: same_cut(optimizer.setup, numbers) and _same_orders(optimizer, orders)):
        others = {k for k in others if paths[k][-1] != own_residual}
        others |= {k for k in servers if paths[k][-1] != own_server}
        found |= source.read(k for k in paths if k not in found and k not in others)
    else:
        found |= source.read(k for k in paths if k not in found and k not in others)
        found |= _mean_residuals(source, residuals, int(numbers["ranks"]), int(numbers["slices"]))
    return source.ranks.on_all(lambda: _nested({paths[k]: v for k, v in found.items()}))


def _same_orders(optimizer: OneBitOptimizer, saved: Mapping[str, Tensor]) -> bool:
    """Whether parameters lie in memory as they did: else blocks have other elements."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    here = {str(i): order for i, p in enumerate(params) if p.requires_grad and (order := order_of(local(p)))}
    return here == {i: tuple(order.flatten().tolist()) for i, order in saved.items()}


def _numbers(groups: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """How far the run had come that saved these param groups."""
    numbers = progress_of(_nested(groups)["param_groups"])
    if not numbers:
        raise ValueError(f"the checkpoint's first param group has no {PROGRESS!r}: it is damaged. Load another")
    check_numbers(numbers)
    return numbers


def _mean_residuals(source: _Source, residuals: Mapping[int, list[str]], ranks: int, slices: int) -> dict[str, Tensor]:
    """The mean over nodes in the place of each one's, read rank by rank: one model's size in memory, not N."""
    mean: dict[tuple[int, KeyPath], Tensor] = {}
    of = {key: (rank % slices, source.paths[key][:-1]) for rank, keys in residuals.items() for key in keys}
    for keys in residuals.values():
        for key, value in source.read(keys).items():
            mean[of[key]] = mean.get(of[key], 0) + value.double() * slices / ranks
    single = {each: value.float() for each, value in mean.items()}
    return {key: single[each] for key, each in of.items()}


def _nested(flat: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """The dicts and lists of an optimizer's state from the paths into it."""
    root: dict[Any, Any] = {"optimizer": {"state": {}, "param_groups": {}}}
    for path, value in flat.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(_key(step), {})
            if not isinstance(node, dict):
                raise ValueError(f"the checkpoint has two values for {path}: it is damaged. Load another")
        node[_key(path[-1])] = value
    own = root["optimizer"]
    groups = own["param_groups"]
    if not groups or sorted(groups, key=str) != sorted(range(len(groups)), key=str):
        raise ValueError("the checkpoint lacks param groups: it is damaged. Load another")
    return {**own, "param_groups": [groups[i] for i in range(len(groups))]}


def _key(step: str | int) -> str | int:
    return int(step) if isinstance(step, str) and re.fullmatch(r"[0-9]{1,9}", step) else step


class _Source:
    """A checkpoint that was checked, and the ranks that read it."""

    def __init__(self, manifest: files.Manifest, ranks: CheckpointRanks, optimizer: OneBitOptimizer) -> None:
        self.manifest, self.ranks, self.index = manifest, ranks, Reader(manifest).index
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        self._numbers = optimizer.setup.algorithm.numbers()
        paths: dict[str, KeyPath] = self.index.planner_data
        self.paths = {k: p for k, p in paths.items() if p[0] == "optimizer" and len(p) > 1}
        self.extra: dict[int, dict[str, str]] = {}  # keys, by rank and name
        for key, path in paths.items():
            if path[0] == EXTRA and len(path) == 3 and is_whole(rank := _key(path[1]), 0):
                self.extra.setdefault(int(rank), {})[str(path[2])] = key
        if not self.paths:
            raise ValueError(f"{manifest.folder} holds no optimizer: it is damaged. Load another checkpoint")

    def fill(self, state: dict[str, Any]) -> None:
        with self.ranks.inside_dcp(_READING), quiet():
            dcp.load(
                state, storage_reader=Reader(self.manifest, self.index), planner=Planner(),
                process_group=self.ranks.group,
            )  # fmt: skip

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `keys`; of a sharded parameter's tensors this rank's part."""
        found = {key: self._room(key) for key in keys}
        self.fill(found)
        return {key: local(value) if isinstance(value, Tensor) else value for key, value in found.items()}

    def _room(self, key: str) -> Tensor | None:
        entry = self.index.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        dtype, path = entry.properties.dtype, self.paths.get(key, ())
        own = path[1:2] == ("state",) and 0 <= int(path[2]) < len(self._params)
        like = self._params[int(path[2])] if own and path[-1] not in self._numbers else None
        return room_for(entry.size, dtype, like)


def _room_like(value: Any) -> Any:
    """For a tensor of the model, in host memory where it is an ordinary one."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return torch.empty_like(value, device="cpu" if type(value) in (Tensor, nn.Parameter) else None)


def _make_room(folder: Path, name: str, rank: int) -> None:
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        files.prune(folder)
        (folder / name).mkdir()


def _finish(data: Path, metadata: Any, ranks: CheckpointRanks) -> dict[str, list[Any]]:
    """This rank's files, on the disk, and what is in them."""
    names = {at.relative_path for at in metadata.storage_data.values()}
    own = [name for name in sorted(names) if _writer(name) % ranks.size == ranks.rank]
    if ranks.rank == 0:
        files.write(data / files.INDEX, written(metadata))
        own += [files.INDEX, ".metadata"]
    found = files.described(data, own)
    files.sync_folder(data)
    return found


def _writer(name: str) -> int:
    """The rank that wrote a file, and has it in its memory still: torch names them __<rank>_<number>.distcp."""
    found = re.match(r"__(\d+)_", name)
    return int(found[1]) if found else 0


def _commit(folder: Path, name: str, found: Mapping[str, list[Any]], layout: Mapping[str, Any], rank: int) -> None:
    if rank == 0:
        files.commit(folder, name, found, layout)
        files.prune(folder)


def _agree_on_layout(answers: list[list[str]]) -> None:
    others = [rank for rank, (fingerprint, _) in enumerate(answers) if fingerprint != answers[0][0]]
    if others:
        raise ValueError(
            f"ranks {others} have another model or other options than rank 0: give every rank the same, and save again"
        )


def _agree_on_folder(folder: Path, seen: list[str]) -> None:
    others = [rank for rank, checksum in enumerate(seen) if checksum != seen[0]]
    if others:
        raise ValueError(
            f"ranks {others} find another checkpoint in {folder} than rank 0: it must be one folder that all ranks see"
        )


def _plain(value: Any) -> Any:
    """What torch.load(weights_only=True) will read: found out when it is saved, not when it is needed."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, (Tensor, str, int, float, type(None))):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{value!r:.80} ({type(value).__name__}) could be saved and not be loaded: onebit.load unpickles no "
                f"objects. Keep plain numbers, strings and tensors in param groups and in a model's extra state"
            ) from error
    return value


@contextmanager
def quiet() -> Iterator[None]:
    """One process alone is not worth a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
