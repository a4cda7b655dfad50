"""One checkpoint of a whole run, over torch.distributed.checkpoint: saved by all ranks, loaded by any number of them.

`dcp.save` and `dcp.load` take an optimizer as it is, but `dcp.load` fills what is there already. `load` looks first
what was saved: a new optimizer may load a state of stage 2, and of another number of ranks.
"""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from onebit.collectives.transport import TorchTransport, Transport
from onebit.loading import continues
from onebit.optimizer import OneBitOptimizer
from onebit.state import PROGRESS

_Path = tuple[str | int, ...]


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: OneBitOptimizer) -> None:
    """Write the model and all ranks' state into `folder`: a collective call."""
    state = {"model": _inner(model).state_dict(), "optimizer": optimizer.state_dict()}
    _Folder(folder, optimizer._transport).save(state)


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: OneBitOptimizer) -> None:
    """Continue from what `save` wrote, on any number of ranks: a collective call.

    The same number of ranks continues bit for bit; another number with the mean of the residuals.
    """
    source = _Folder(folder, optimizer._transport)
    paths = {k: p for k, p in (source.metadata.planner_data or {}).items() if p[0] == "optimizer"}
    if not paths:
        raise ValueError(f"{folder} holds no optimizer: it was not written by onebit.save")
    found = source.read((k for k, p in paths.items() if p[1] == "param_groups"))
    numbers = _nested({paths[k]: v for k, v in found.items()})["optimizer"]["param_groups"][0].get(PROGRESS, {})
    ranks, group = int(numbers.get("ranks", 1)), optimizer._transport
    residuals = {r: [k for k, p in paths.items() if p[-1] == f"residual_of_rank_{r}"] for r in range(ranks)}
    others = {k for own in residuals.values() for k in own}
    if continues(optimizer, numbers):
        servers = {k for k, p in paths.items() if str(p[-1]).startswith("server_residual_of_rank_")}
        own = {k for k in servers if paths[k][-1] == f"server_residual_of_rank_{group.rank}"}
        found |= source.read(k for k in paths if k not in found and k not in others | (servers - own))
        found |= source.read(residuals[group.rank])
    else:
        found |= source.read(k for k in paths if k not in found and k not in others)
        found |= _mean_residuals(source, paths, residuals)
    optimizer.load_state_dict(_nested({paths[k]: v for k, v in found.items()})["optimizer"])
    state = {"model": _inner(model).state_dict()}
    source.fill(state)
    _inner(model).load_state_dict(state["model"])


def _mean_residuals(source: _Folder, paths: dict[str, _Path], residuals: dict[int, list[str]]) -> dict[str, Tensor]:
    """The mean over ranks in the place of each one's, read rank by rank: one model's size in memory, not N."""
    mean: dict[_Path, Tensor] = {}
    for keys in residuals.values():
        for key, value in source.read(keys).items():
            place = paths[key][:-1]
            mean[place] = mean.get(place, 0) + value.double() / len(residuals)
    single = {place: value.float() for place, value in mean.items()}
    return {key: single[paths[key][:-1]] for keys in residuals.values() for key in keys}


def _nested(flat: dict[_Path, Any]) -> dict[str, Any]:
    """The dicts and lists of an optimizer's state from the paths into it."""
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        node = root
        for step in path[:-1]:
            node = node.setdefault(_key(step), {})
        node[_key(path[-1])] = value
    groups = root["optimizer"]["param_groups"]
    root["optimizer"]["param_groups"] = [groups[i] for i in sorted(groups)]
    return root


def _key(step: str | int) -> str | int:
    return int(step) if isinstance(step, str) and step.isdigit() else step


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


class _Folder:
    """Where a checkpoint lies, and the ranks that read and write it together."""

    def __init__(self, path: str | os.PathLike[str], transport: Transport) -> None:
        alone = not dist.is_initialized()
        if alone and transport.size > 1:
            raise ValueError(
                f"a checkpoint of {transport.size} ranks needs torch.distributed (init_process_group); over "
                f"{transport.name} alone save optimizer.state_dict() on every rank"
            )
        group = transport.group if isinstance(transport, TorchTransport) else None
        self.path, self.how = Path(path), {"checkpoint_id": path, "process_group": group}

    def save(self, state: dict[str, Any]) -> None:
        with _quiet():
            dcp.save(state, **self.how)

    def fill(self, state: dict[str, Any]) -> None:
        with _quiet():
            dcp.load(state, **self.how)

    @cached_property
    def metadata(self) -> Metadata:
        if not (self.path / ".metadata").exists():
            raise ValueError(
                f"{self.path} holds no checkpoint (it has no .metadata): was the run ended while it was saving?"
            )
        return dcp.FileSystemReader(self.path).read_metadata()

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `keys`."""
        found = {key: self._room(key) for key in keys}
        if found:
            self.fill(found)
        return found

    def _room(self, key: str) -> Tensor | None:
        entry = self.metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """One process alone is not worth a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
