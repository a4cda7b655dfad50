"""What lies in a checkpoint's folder, and how it gets there whole.

    checkpoint.json       which data folder holds the checkpoint; version, layout, size and sha256 of every file
    data-0123456789abcdef/
        index.json        what lies where in the other files
        *.distcp          what torch.distributed.checkpoint wrote; its .metadata, a pickle, is for others to read

A save writes a new data folder beside the old one. When all of it is on the disk, checkpoint.json is replaced by a
rename: a reader finds the old checkpoint or the new one, and whoever dies while saving leaves the old one. What is left
of saves that did not end is removed by the next.

sha256 finds what storage and networks do to files (1.7 GB/s on one core, measured; the ranks share the files). It is no
signature: who can write a folder can write its checksums. What such a file could do is held down in
`onebit.checkpoint.index`: nothing is unpickled but tensors and plain values, by torch's weights_only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onebit.kernels.data.checks import is_whole

MANIFEST = "checkpoint.json"
INDEX = "index.json"
VERSION = 1
_KIND = "onebit checkpoint"
_PIECE = 2**22
_DATA = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_NEXT = "Load another checkpoint, or copy this one anew from where it was written"


def new_name() -> str:
    return f"data-{os.urandom(8).hex()}"


def write(path: Path, value: Any) -> None:
    """As JSON, in one step: `path` holds what it did, or all of `value`, on the disk."""
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
    except (ValueError, RecursionError) as error:
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
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def commit(folder: Path, data: str, files: Mapping[str, list[Any]], layout: Mapping[str, Any]) -> None:
    """From here on the checkpoint in `folder` is what lies in `data`."""
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
            raise ValueError(_nothing_in(folder))
        if not path.is_file():
            raise ValueError(f"{path} is a folder, where onebit.save has written a file. {_NEXT}")
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
        self.data, self.files, self.layout = _checked(path, found)
        self.folder = folder / self.data

    def check_files(self, rank: int, ranks: int) -> None:
        """All are there and of their size, and those that fall to this rank hold what was written."""
        for name, (size, _) in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing from the checkpoint. {_NEXT}")
            if path.stat().st_size != size:
                raise ValueError(f"{path} holds {path.stat().st_size} bytes, {size} were written: truncated? {_NEXT}")
        for name in self._share(rank, ranks):
            if sha256(self.folder / name) != self.files[name][1]:
                raise ValueError(f"{self.folder / name} is damaged: its sha256 is not that of what was saved. {_NEXT}")

    def _share(self, rank: int, ranks: int) -> list[str]:
        """About as many bytes to read for every rank."""
        loads, shares = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[str]]]
        for name, (size, _) in sorted(self.files.items(), key=lambda item: -item[1][0]):
            least = loads.index(min(loads))
            loads[least] += size
            shares[least].append(name)
        return shares[rank]


def _checked(path: Path, found: Mapping[str, Any]) -> tuple[str, dict[str, tuple[int, str]], dict[str, Any]]:
    data, files, layout = found.get("data"), found.get("files"), found.get("layout")
    good = isinstance(data, str) and _DATA.fullmatch(data) and isinstance(files, dict) and isinstance(layout, dict)
    if not good or INDEX not in files or not all(map(_is_file, files.items())):  # type: ignore[operator, union-attr]
        raise ValueError(f"{path} is damaged: it does not list the files of a checkpoint. {_NEXT}")
    return str(data), {name: (size, digest) for name, (size, digest) in files.items()}, layout  # type: ignore[union-attr, return-value]


def _is_file(item: tuple[str, Any]) -> bool:
    name, own = item
    plain = _FILE.fullmatch(name) is not None and name not in (".", "..")
    return plain and isinstance(own, list) and len(own) == 2 and is_whole(own[0], least=0) and isinstance(own[1], str)


def _nothing_in(folder: Path) -> str:
    if (folder / ".metadata").exists():
        return (
            f"{folder} holds no optimizer that onebit.save wrote (it has no {MANIFEST}): torch.distributed.checkpoint "
            f"wrote it. Load it with dcp.load, if you trust its .metadata, which is a pickle"
        )
    return f"{folder} holds no checkpoint (it has no {MANIFEST}): was the run ended before its first save was whole?"
