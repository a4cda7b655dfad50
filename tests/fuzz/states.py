"""State dicts and files of checkpoints, changed in a few places: refused, with the optimizer as it was bit for bit, or
loaded and going on. Changed files are refused unless their checksums were made to fit.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import onebit
from onebit.checkpoint.files import INDEX, MANIFEST
from tests import checkpoints, internals
from tests.checkpoints import Run, forge, put_manifest
from tests.fuzz.mutate import ERRORS, Source, junk, mutate, mutated_bytes, pick
from tests.onebit.runs import Case, adamw_state, bits, snapshot

AUTO = {"freeze_step": onebit.FreezeRule(0.5, window=1)}
SMALL = ((3, 5), (33,), (2,))
CASES = [
    Case(kind, shapes=SMALL, dtype=dtype, options={"freeze_step": 2, "betas": (0.9, 0.95), **options}, groups=groups)
    for kind in ("OneBitAdam", "OneBitLamb")
    for dtype, options, groups in (
        ("float32", {}, ({},)),
        ("float32", {"scale": "tensor", "chunks": 2}, ({}, {"lr": 2e-3})),
        ("bfloat16", {**AUTO, "zero_variance": "hold"}, ({},)),
        ("float32", {"chunks": "auto", "reply": 1}, ({},)),
        ("float32", {"reply": "direct"}, ({},)),
    )
]
_FORGED = 0.25  # of the cases: the other files are found by their checksums, which is quick


class States:
    def __init__(self) -> None:
        self.states = [snapshot(Run(case, steps).optimizer.state_dict()) for case in CASES for steps in (0, 1, 4)]
        self.states.append(adamw_state(CASES[0], 3))
        self.runs: dict[tuple[int, int], Run] = {}

    def case(self, source: Source) -> str:
        index = int(source.integers(len(CASES)))
        which = index, int(source.integers(5))  # a run that has refused a state is as it was, and is used again
        run = self.runs.pop(which, None) or Run(CASES[index], which[1])
        near = source.random() < 0.8
        state = snapshot(self.states[3 * index + int(source.integers(3))] if near else pick(source, self.states))
        if source.random() < 0.02:
            state = junk(source)
        elif source.random() < 0.2:
            self._mutate_progress(source, state)
        else:
            mutate(source, state)
        if refused := refused_with(run, partial(run.optimizer.load_state_dict, state)):
            self.runs[which] = run
            return f"load, {refused}"
        run.optimizer.state_dict()
        goes_on(run)
        return "load, accepted"

    def _mutate_progress(self, source: Source, state: Any) -> None:
        """Change it as somebody would who knows that it is JSON."""
        group = state["param_groups"][0]
        numbers = json.loads(group.get("onebit") or "{}")
        mutate(source, numbers, json=True)
        group["onebit"] = json.dumps(numbers)


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
            if refused := refused_with(run, partial(run.load, folder)):
                self.runs[which] = run
                return f"{how}, {refused}"
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


def refused_with(run: Run, load: Callable[[], object]) -> str:
    """The name of the error of a load that is refused, and has changed nothing."""
    before = mark(run)
    try:
        load()
    except ERRORS as error:
        if mark(run) != before:
            raise AssertionError(f"refused ({error}), and something has changed") from error
        return type(error).__name__
    return ""


def goes_on(run: Run) -> None:
    """A step from what was loaded. It may be refused, but only by a documented error."""
    try:
        run.on(5, 5)
    except ValueError as error:
        if "Give stage 1 some steps" not in str(error) and "give stage 1 some steps" not in str(error):
            raise


def mark(run: Run) -> Any:
    """All that a load could change."""
    o = run.optimizer
    states, stages = internals.states(o), internals.stages(o)
    flat = [state[name] for state in states for name in state.fields] + [stages.counts]
    exchanges = internals.exchanges(o)
    flat += [buffer for e in exchanges for buffer in (e.replies.buffer, *(r.value for r in e.residuals.values()))]
    options = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in o.param_groups]
    numbers = (stages.steps, o.compressing, internals.ranks_agree(o), o.wire_bytes, stages.rule.state(), o.freeze_ratio)
    return bits(run.params), bits(flat), [id(state) for state in states], options, numbers


def _plain(value: Any) -> Any:
    return (id(value), value.tolist()) if isinstance(value, Tensor) and value.device.type == "cpu" else repr(value)
