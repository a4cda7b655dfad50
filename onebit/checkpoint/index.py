"""index.json: what lies where in a checkpoint, read without unpickling anything a stranger could have written.

torch.distributed.checkpoint keeps its own index (.metadata) as a pickle, and loads values that are no tensors by
torch.load(weights_only=False): either runs whatever code the file says. Here the index is JSON, checked entry by entry,
and every value is loaded with weights_only=True. The rest, which ranks read what, is torch's.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from onebit.checkpoint.files import INDEX, Manifest, read
from onebit.kernels.data.checks import is_whole

KeyPath = tuple[str | int, ...]

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_MOST_DIMENSIONS = 64
_MOST = 2**62 - 1


@dataclass(frozen=True)
class Slice:
    """Where a value lies: what torch's reader calls _StorageInfo."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def written(metadata: Metadata) -> dict[str, Any]:
    """What goes into index.json, by key: path, and dtype and size of a tensor; then where its pieces lie."""
    return {key: _entry(metadata, key) for key in metadata.state_dict_metadata}


def _entry(metadata: Metadata, key: str) -> dict[str, Any]:
    found = metadata.state_dict_metadata[key]
    own: dict[str, Any] = {"path": list((metadata.planner_data or {})[key])}
    if isinstance(found, TensorStorageMetadata):
        own |= {"dtype": str(found.properties.dtype).removeprefix("torch."), "size": list(found.size)}
        places = [(chunk.offsets, chunk.sizes) for chunk in found.chunks]
    else:
        places = [(None, None)]  # type: ignore[list-item]
    own["pieces"] = [
        [list(offsets or ()), list(sizes or ()), at.relative_path, at.offset, at.length]
        for offsets, sizes in places
        for at in [metadata.storage_data[MetadataIndex(key, offsets)]]
    ]
    return own


class Reader(FileSystemReader):
    """torch's, with the index of `manifest` in the place of .metadata."""

    def __init__(self, manifest: Manifest, index: Metadata | None = None) -> None:
        super().__init__(manifest.folder)
        self.index = _index(manifest) if index is None else index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


class Planner(DefaultLoadPlanner):
    """torch's, with weights_only=True for what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def _index(manifest: Manifest) -> Metadata:
    path = manifest.folder / INDEX
    index = read(path)
    if not isinstance(index, dict):
        raise _damaged(path, "it is no table of entries")
    made = Metadata({}, {}, {})
    for key, entry in index.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), list) or not entry["path"]:
            raise _damaged(path, f"{key!r} has no path")
        if not all(isinstance(step, str) or is_whole(step, 0, _MOST) for step in entry["path"]):
            raise _damaged(path, f"{key!r} has a path of other things than names and numbers")
        made.planner_data[key] = tuple(entry["path"])
        pieces = list(_pieces(path, key, entry, manifest.files))
        if "dtype" in entry:
            made.state_dict_metadata[key] = _tensor(path, key, entry, pieces)
        elif len(pieces) == 1:
            made.state_dict_metadata[key] = BytesStorageMetadata()
        else:
            raise _damaged(path, f"{key!r} lies in {len(pieces)} places")
        tensor = "dtype" in entry
        made.storage_data |= {MetadataIndex(key, offsets if tensor else None): at for offsets, _, at in pieces}
    return made


Piece = tuple[list[int], list[int], Slice]


def _pieces(path: Path, key: str, entry: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> Iterator[Piece]:
    pieces = entry.get("pieces")
    if not isinstance(pieces, list) or not pieces:
        raise _damaged(path, f"{key!r} lies nowhere")
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 5:
            raise _damaged(path, f"{key!r} lies nowhere")
        offsets, sizes, name, start, length = piece
        if not _are_whole(offsets) or not _are_whole(sizes) or len(offsets) != len(sizes):
            raise _damaged(path, f"{key!r} has a piece of no size")
        if not isinstance(name, str) or name not in files or not _are_whole([start, length]):
            raise _damaged(path, f"{key!r} lies in no file of the checkpoint")
        if start + length > files[name][0]:
            raise _damaged(path, f"{key!r} lies beyond the end of {name}")
        yield offsets, sizes, Slice(name, start, length)


def _tensor(path: Path, key: str, entry: Mapping[str, Any], pieces: list[Piece]) -> TensorStorageMetadata:
    dtype, size = _DTYPES.get(str(entry["dtype"])), entry.get("size")
    if dtype is None or not _are_whole(size) or len(size) > _MOST_DIMENSIONS:  # type: ignore[arg-type]
        raise _damaged(path, f"{key!r} has no dtype or no size")
    assert isinstance(size, list)
    for offsets, sizes, at in pieces:
        inside = len(sizes) == len(size) and all(o + s <= n for o, s, n in zip(offsets, sizes, size, strict=True))
        if not inside or math.prod(sizes) * dtype.itemsize > at.length:
            raise _damaged(path, f"{key!r} has a piece that does not fit")
    if sum(math.prod(sizes) for _, sizes, _ in pieces) != math.prod(size):
        raise _damaged(path, f"the pieces of {key!r} are not the whole of it")
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in pieces]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _are_whole(values: object) -> bool:
    return isinstance(values, list) and all(is_whole(value, 0, _MOST) for value in values)


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}. Load another checkpoint")
