"""Checkpoints for tests: written by a small run, damaged in every way, and forged with checksums that fit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

from torch import nn

import onebit
from onebit.checkpoint.files import INDEX, MANIFEST, checksum
from tests.onebit.runs import Case, bits, on_warnings, run, snapshot


class Holder(nn.Module):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)


class Run:
    """A model and its optimizer after some steps of a case."""

    def __init__(self, case: Case, steps: int, rank: int = 0, group: Any = None) -> None:
        self.case, self.rank, self.params = case, rank, case.parameters()
        self.optimizer = case.build(self.params, group)
        self.model = Holder(self.params)
        self.on(1, steps)

    def on(self, first: int, last: int) -> None:
        run(self.case, self.rank, self.optimizer, self.params, first, last)

    def save(self, folder: Path | str) -> None:
        onebit.save(folder, self.model, self.optimizer)

    def load(self, folder: Path | str) -> None:
        onebit.load(folder, self.model, self.optimizer)

    def all(self) -> tuple[bytes, Any, Any]:
        """What must not change: also what this rank alone has left out, which is in no state."""
        with on_warnings("ignore", message="state_dict"):
            state = snapshot(self.optimizer.state_dict())
        return bits(self.params), state, snapshot([own.get("residual") for own in self.optimizer.state.values()])


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def data(folder: Path) -> Path:
    return folder / manifest(folder)["data"]


def index(folder: Path) -> dict[str, Any]:
    return json.loads((data(folder) / INDEX).read_text())


def written_files(folder: Path) -> list[Path]:
    return [folder / MANIFEST, *sorted(data(folder).iterdir())]


def put_manifest(folder: Path, changed: dict[str, Any]) -> None:
    """Write a manifest with a checksum that fits."""
    changed = {k: v for k, v in changed.items() if k != "checksum"}
    (folder / MANIFEST).write_text(json.dumps({**changed, "checksum": checksum(changed)}))


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of the data folder as somebody would who knows the format."""
    changed = manifest(folder)
    (data(folder) / name).write_bytes(content)
    changed["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    put_manifest(folder, changed)


def forge_value(folder: Path, key: str, value: bytes) -> None:
    """Replace the bytes stored under `key`."""
    changed = index(folder)
    name = changed[key]["pieces"][0][2]
    content = (data(folder) / name).read_bytes()
    forge(folder, name, content + value)
    changed[key]["pieces"][0][3:] = [len(content), len(value)]
    forge(folder, INDEX, json.dumps(changed).encode())


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.marker}'",)

    def pickled(self) -> bytes:
        return pickle.dumps(self, protocol=2)  # torch's own
