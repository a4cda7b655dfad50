"""What lies in a checkpoint's folder, how it gets there whole, and what is read of it.

    checkpoint.json       which data folder holds the checkpoint; version, layout, size and sha256 of every file
    data-0123456789abcdef/
        index.json        what lies where in the other files
        *.distcp          what torch.distributed.checkpoint wrote; its .metadata, a pickle, is for others to read

A save writes a new data folder beside the old one. When all of it is on the disk, checkpoint.json is replaced by a
rename: a reader finds the old checkpoint or the new one, and whoever dies while saving leaves the old one. What is left
of saves that did not end is removed by the next.

sha256 finds what storage and networks do to files (1.7 GB/s on one core, measured; the ranks share the files). It is no
signature: who can write a folder can write its checksums. So nothing is unpickled but tensors and plain values:
torch.distributed.checkpoint keeps its index as a pickle, and loads values that are no tensors by
torch.load(weights_only=False), which run whatever code a file says. Here the index is JSON, checked entry by entry, and
every value is loaded with weights_only=True. The rest, which ranks read what, is torch's.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from operator import add, gt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from onebit.kernels.data.checks import is_whole
from onebit.optim import facts
from onebit.optim.setup import Setup

MANIFEST = "checkpoint.json"
INDEX = "index.json"
VERSION = 1
_KIND = "onebit checkpoint"
_PIECE = 2**22
_DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_NEXT = "Load another checkpoint, or copy this one anew from where it was written"
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_MOST_DIMENSIONS = 64
_WHOLE = range(2**62)  # what can be a size of torch's


def new_name() -> str:
    return f"data-{os.urandom(8).hex()}"


def write(path: Path, value: Any) -> None:
    """Write JSON in one step: `path` holds what it did, or all of `value`, on the disk."""
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def read(path: Path) -> Any:
    """JSON; a ValueError if it is none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({str(error)[:100]}). {_NEXT}") from error


def sync_folder(path: Path) -> None:
    """The names in it reach the disk."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def described(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Size and sha256 of files as they are read back."""
    return {name: [(folder / name).stat().st_size, sha256(folder / name)] for name in names}


def checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def check_readable(data: Path) -> None:
    """A PermissionError if a rank of another user has written what this one can't load."""
    for path in sorted([*data.glob("__*"), data / ".metadata"]):
        try:
            path.open("rb").close()
        except PermissionError:
            raise PermissionError(
                f"may not read {path}, which another rank wrote, so that no run could load it: run all ranks as one "
                f"user, or as users of the folder's group, with umask 007"
            ) from None


def commit(folder: Path, data: str, files: Mapping[str, list[Any]], layout: Mapping[str, Any]) -> None:
    """Make what lies in `data` the checkpoint in `folder` from here on."""
    manifest = {"kind": _KIND, "version": VERSION, "data": data, "files": dict(files), "layout": dict(layout)}
    write(folder / MANIFEST, {**manifest, "checksum": checksum(manifest)})


def prune(folder: Path) -> None:
    """Remove data folders that no checkpoint is in. Where checkpoint.json can't be read, everything stays."""
    try:
        kept = Manifest(folder).data if (folder / MANIFEST).exists() else None
    except (ValueError, OSError):
        return
    for found in folder.iterdir():
        if _DATA.fullmatch(found.name) and found.name != kept and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)


class Manifest:
    """checkpoint.json of a folder, checked."""

    def __init__(self, folder: Path) -> None:
        path = folder / MANIFEST
        if not path.exists():
            if (folder / ".metadata").exists():
                raise ValueError(
                    f"{folder} holds no optimizer that onebit.save wrote (it has no {MANIFEST}): "
                    f"torch.distributed.checkpoint wrote it. Load it with dcp.load, if you trust its .metadata, which "
                    f"is a pickle"
                )
            if not folder.exists():
                raise ValueError(f"there is no folder {folder.absolute()}: give the path that onebit.save got")
            if inside := sorted(each.parent for each in folder.glob(f"*/{MANIFEST}")):
                raise ValueError(f"{folder} holds no checkpoint, its folders do: give one, such as {inside[-1]}")
            raise ValueError(
                f"{folder} holds no checkpoint (it has no {MANIFEST}): was the run ended before its first save was "
                f"whole?"
            )
        found = read(path)
        if not isinstance(found, dict) or found.get("kind") != _KIND:
            raise ValueError(f"{path} was not written by onebit.save: it is another program's, or damaged. {_NEXT}")
        version = found.get("version")
        if not is_whole(version, VERSION, VERSION):
            raise ValueError(
                f"{path} has version {version!r} of the format, this onebit reads {VERSION}: load it with the onebit "
                f"that saved it"
            )
        self.checksum = found.pop("checksum", None)
        if self.checksum != checksum(found):
            raise ValueError(f"{path} is damaged: its checksum is not that of its content. {_NEXT}")
        given: dict[str, Any] = {name: found.get(name) for name in ("data", "files", "layout")}
        self.data, own, self.layout = given["data"], given["files"], given["layout"]
        good = isinstance(self.data, str) and _DATA.fullmatch(self.data) and isinstance(self.layout, dict)
        if not good or not isinstance(own, dict) or INDEX not in own or not all(map(_is_file, own.items())):
            raise ValueError(f"{path} is damaged: it does not list the files of a checkpoint. {_NEXT}")
        self.folder, self.files = folder / self.data, {name: (size, digest) for name, (size, digest) in own.items()}

    def check_files(self, rank: int, ranks: int) -> None:
        """All are there and of their size, and those that fall to this rank hold what was written."""
        for name, (size, _) in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing from the checkpoint. {_NEXT}")
            if path.stat().st_size != size:
                raise ValueError(f"{path} holds {path.stat().st_size} bytes, {size} were written: truncated? {_NEXT}")
        for name in sorted(self.files, key=lambda name: -self.files[name][0])[rank::ranks]:
            if sha256(self.folder / name) != self.files[name][1]:
                raise ValueError(f"{self.folder / name} is damaged: its sha256 is not that of what was saved. {_NEXT}")


def _is_file(item: tuple[str, Any]) -> bool:
    name, own = item
    plain = _FILE.fullmatch(name) is not None and name not in (".", "..")
    return plain and isinstance(own, list) and len(own) == 2 and is_whole(own[0], least=0) and isinstance(own[1], str)


def layout_of(model: Mapping[str, Any], setup: Setup) -> dict[str, Any]:
    """Shapes of the model by name, and the number of ranks; with a fingerprint of these, dtypes, groups and options."""
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    made = {"model": {name: list(t.shape) for name, t in tensors.items()}, "ranks": setup.topology.everyone.size}
    common = {**facts.of_model(setup), **facts.of_options(setup), facts.MASKS: ""}
    return {**made, "fingerprint": checksum([made, [t.dtype for t in tensors.values()], common])}


def check_layout(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """A ValueError that names the first differences of the models. Param groups are looked at with the state; options,
    dtypes and numbers of ranks may be others."""
    own, model = here["model"], there.get("model")
    if not isinstance(model, dict):
        raise ValueError("the checkpoint does not say what model it is of: it is damaged. Load another")
    differences = [
        *(f"{name} is only there" for name in model if name not in own),
        *(f"{name} is only here" for name in own if name not in model),
        *(f"{n} has shape {model[n]} there and {own[n]} here" for n in own if model.get(n, own[n]) != own[n]),
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"the checkpoint is another model's: {'; '.join(differences[:5])}{more}. Build the model as it was when it "
            f"was saved"
        )


def index_of(metadata: Metadata) -> dict[str, Any]:
    """What goes into index.json, by key: path, and dtype and size of a tensor; then where its pieces lie."""
    index: dict[str, Any] = {}
    for key, found in metadata.state_dict_metadata.items():
        index[key] = {"path": list((metadata.planner_data or {})[key])}
        places: list[tuple[Any, Any]] = [(None, ())]
        if isinstance(found, TensorStorageMetadata):
            index[key] |= {"dtype": str(found.properties.dtype).removeprefix("torch."), "size": list(found.size)}
            places = [(chunk.offsets, chunk.sizes) for chunk in found.chunks]
        lies = [(*place, metadata.storage_data[MetadataIndex(key, place[0])]) for place in places]
        index[key]["pieces"] = [
            [list(offsets or ()), list(sizes), at.relative_path, at.offset, at.length] for offsets, sizes, at in lies
        ]
    return index


def read_index(manifest: Manifest) -> Metadata:
    """index.json, as torch.distributed.checkpoint would have it from .metadata."""
    path = manifest.folder / INDEX
    index, made = read(path), Metadata({}, {}, {})
    if not isinstance(index, dict):
        raise ValueError(f"{path} is damaged: it is no table of entries. Load another checkpoint")
    for key, entry in index.items():
        if fault := _fault(entry, manifest.files):
            raise ValueError(f"{path} is damaged: {key!r} {fault}. Load another checkpoint")
        chunks, is_tensor = list[ChunkStorageMetadata](), "dtype" in entry
        for offsets, sizes, *place in entry["pieces"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            made.storage_data[MetadataIndex(key, offsets if is_tensor else None)] = _StorageInfo(*place)
        made.planner_data[key] = tuple(entry["path"])
        made.state_dict_metadata[key] = BytesStorageMetadata()
        if is_tensor:
            dtype = TensorProperties(dtype=_DTYPES[entry["dtype"]])
            made.state_dict_metadata[key] = TensorStorageMetadata(dtype, torch.Size(entry["size"]), chunks)
    return made


def _fault(entry: Any, files: Mapping[str, tuple[int, str]]) -> str:
    """What is wrong with an entry of index.json, if anything is."""
    path, pieces = (entry.get("path"), entry.get("pieces")) if isinstance(entry, dict) else (None, None)
    if not isinstance(path, list) or not path:
        return "has no path"
    if not set(map(type, path)) <= {str, int}:
        return "has a path of other things than names and numbers"
    if not isinstance(pieces, list) or not pieces:
        return "lies nowhere"
    size, itemsize, found = [], 0, 0  # as of a value that is no tensor, which is one piece without a size
    if "dtype" in entry:
        dtype, size = _DTYPES.get(str(entry["dtype"])), entry.get("size")
        if dtype is None or not isinstance(size, list) or len(size) > _MOST_DIMENSIONS:
            return "has no dtype or no size"
        itemsize = dtype.itemsize
    for piece in pieces:
        if not isinstance(piece, list) or list(map(type, piece)) != [list, list, str, int, int]:
            return "lies nowhere"
        offsets, sizes, name, start, length = piece
        if name not in files or min(start, length) < 0:
            return "lies in no file of the checkpoint"
        if start + length > files[name][0]:
            return f"lies beyond the end of {name}"
        numbers, same = offsets + sizes + size, len(offsets) == len(sizes) == len(size)
        if not same or not set(map(type, numbers)) <= {int} or not all(map(_WHOLE.__contains__, numbers)):
            return "has a piece that does not fit"
        if any(map(gt, map(add, offsets, sizes), size)) or math.prod(sizes) * itemsize > length:
            return "has a piece that does not fit"
        found += math.prod(sizes)
    return "has pieces that are not the whole of it" if found != math.prod(size) else ""


class Reader(FileSystemReader):
    """torch's, with another index than that in .metadata."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class Planner(DefaultLoadPlanner):
    """torch's, with weights_only=True for what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
