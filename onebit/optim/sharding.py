"""Parameters that are DTensors (FSDP2): every rank has a part of each. All of the library works on the parts; what
concerns whole parameters is added up over the ranks that have the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    whole: Any = tensor
    with torch.no_grad():
        return whole.to_local()


def as_whole(part: Tensor, like: Tensor) -> Tensor:
    """A DTensor as `like` is, whose part on this rank is `part`; `part` itself where `like` is none."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    of: Any = like
    return DTensor.from_local(
        _alone(part), of.device_mesh, of.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_of(value: Any, like: Tensor | None) -> Any:
    """This rank's part of a tensor that is a DTensor, or whole where `like` is one. Without communication."""
    if is_sharded(value) or like is None or not is_sharded(like) or getattr(value, "shape", None) != like.shape:
        return local(value)
    of: Any = like
    rank, dim = of.device_mesh.get_local_rank(), of.placements[0].dim
    parts = value.chunk(of.device_mesh.size(), dim)
    return parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)


def _alone(view: Tensor) -> Tensor:
    """The same memory, of which the storage has no more than this view: DTensors of others can't be copied or saved."""
    storage, size = view.untyped_storage(), view.element_size()
    start = view.storage_offset()
    stop = start + 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    own = storage[size * start : size * (stop if view.numel() else start)]
    return view.new_empty(0).set_(own, 0, view.shape, view.stride())


def shard_group(groups: Sequence[Mapping[str, Any]]) -> Any:
    """The process group of the ranks that have the parts of one copy of the parameters; None where they are whole."""
    params = [p for group in groups for p in group["params"] if p.requires_grad]
    sharded = [p for p in params if is_sharded(p)]
    if not sharded:
        return None
    if len(sharded) < len(params):
        i = next(i for i, p in enumerate(params) if not is_sharded(p))
        raise ValueError(
            f"parameter {i} (shape {tuple(params[i].shape)}) is whole where others are sharded: FSDP would not average "
            f"its gradient. Call fully_shard on the module that holds all of them"
        )
    meshes = {p.device_mesh for p in sharded}
    mesh = sharded[0].device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"the parameters are on a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}: FSDP averages gradients "
            f"over the replicas itself then, uncompressed, and tensor parallelism is not supported. Call "
            f"fully_shard(model, mesh=mesh['shard']) with the dimension inside a node alone, and pass "
            f"process_group=mesh.get_group('replicate') to the optimizer"
        )
    if not all(p.placements[0].is_shard() for p in sharded):
        raise ValueError(
            "a parameter is a DTensor that is whole on every rank of its mesh: only parts that fully_shard has made "
            "are supported, not tensor parallelism"
        )
    if len(meshes) > 1:
        raise ValueError(
            f"the parameters are sharded over {len(meshes)} meshes: one optimizer works on one. Build one for each"
        )
    return mesh.get_group()
