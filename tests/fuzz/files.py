"""Checkpoints with changed files: refused, with all as it was, unless the checksums were made to fit."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from onebit.checkpoint.files import INDEX, MANIFEST
from tests import checkpoints
from tests.checkpoints import Run, forge, put_manifest
from tests.fuzz.mutate import ERRORS, Source, mutate, mutated_bytes, pick
from tests.fuzz.states import CASES, goes_on, mark

_FORGED = 0.25  # of the cases: the other files are found by their checksums, which is quick


class Files:
    def __init__(self) -> None:
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
        self.room = tempfile.TemporaryDirectory()
        self.saved = []
        for i, steps in ((0, 4), (5, 1), (6, 4)):
            folder = Path(self.room.name) / str(i)
            Run(CASES[i], steps).save(folder)
            self.saved.append((CASES[i], folder))
        self.runs: dict[tuple[Path, int], Run] = {}

    def case(self, source: Source) -> str:
        case, folder = pick(source, self.saved)
        which = folder, int(source.integers(5))
        run = self.runs.pop(which, None) or Run(case.but(seed=1), which[1])
        kept = folder.with_suffix(".kept")
        shutil.copytree(folder, kept)
        try:
            how = self._change(source, folder)
            before = mark(run)
            try:
                run.load(folder)
            except ERRORS as error:
                if mark(run) != before:
                    raise AssertionError(f"refused ({error}), and something has changed") from error
                self.runs[which] = run
                return f"{how}, {type(error).__name__}"
        finally:
            shutil.rmtree(folder)
            kept.rename(folder)
        if how == "damaged":
            raise AssertionError("damage was not found")
        goes_on(run)
        return f"{how}, accepted"

    def _change(self, source: Source, folder: Path) -> str:
        if source.random() >= _FORGED:
            path = pick(source, checkpoints.written_files(folder))
            path.write_bytes(mutated_bytes(source, path.read_bytes()))
            return "damaged"
        what = pick(source, (MANIFEST, INDEX, INDEX, "content"))
        if what == "content":
            name = pick(source, [path.name for path in checkpoints.written_files(folder) if path.name != MANIFEST])
            forge(folder, name, mutated_bytes(source, (checkpoints.data(folder) / name).read_bytes()))
            return "forged"
        changed: Any = checkpoints.manifest(folder) if what == MANIFEST else checkpoints.index(folder)
        mutate(source, changed, json=True)
        if what == MANIFEST:
            put_manifest(folder, changed)
        else:
            forge(folder, INDEX, json.dumps(changed).encode())
        return "forged"
