"""A folder holds a whole checkpoint at any time: while a rank saves, and wherever it dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebit.checkpoint import files as checkpoint_files
from onebit.checkpoint import save_load as checkpoint
from tests import checkpoints
from tests.checkpoints import Run
from tests.onebit.runs import Case, kinds, same
from tests.ranks import group, run_ranks, run_ranks_once

CASE = Case(steps=6, options={"freeze_step": 3})


def dies_before(module: Any, name: str) -> Callable[..., Any]:
    def end(*args: Any, **options: Any) -> Any:
        os._exit(1)

    setattr(module, name, end)
    return end


def dies_after(module: Any, name: str) -> None:
    original = getattr(module, name)

    def end(*args: Any, **options: Any) -> Any:
        original(*args, **options)
        os._exit(1)

    setattr(module, name, end)


DEATHS: dict[str, tuple[int, Callable[[], Any]]] = {  # which rank dies, and where
    "before the data folder is made": (0, lambda: dies_before(checkpoint, "_make_room")),
    "before it writes": (1, lambda: dies_before(torch.distributed.checkpoint.FileSystemWriter, "write_data")),
    "after it has written": (1, lambda: dies_after(torch.distributed.checkpoint.FileSystemWriter, "write_data")),
    "before the index": (0, lambda: dies_before(checkpoint, "written")),
    "at the checksums": (1, lambda: dies_before(checkpoint_files, "sha256")),
    "before the commit": (0, lambda: dies_before(checkpoint, "_commit")),
    "before the rename": (0, lambda: dies_before(checkpoint_files.os, "replace")),
}
LATE: dict[str, tuple[int, Callable[[], Any]]] = {
    "after the rename": (0, lambda: dies_after(checkpoint_files.os, "replace")),
    "before the old one goes": (0, lambda: dies_before(checkpoint_files.shutil, "rmtree")),
}


def save_on(rank: int, size: int, folder: str, steps: int) -> Any:
    run = Run(CASE, steps, rank, group())
    run.save(folder)
    return run.all()


def dying(rank: int, size: int, folder: str, where: str) -> str:
    who, prepare = {**DEATHS, **LATE}[where]
    run = Run(CASE, 5, rank, group())
    replace = os.replace
    if rank == who:
        prepare()
    if where in ("before the rename", "after the rename") and rank == who:
        ending, os.replace = os.replace, replace

        def on_the_manifest(source: Any, target: Any) -> None:
            (ending if Path(target).name == checkpoint_files.MANIFEST else replace)(source, target)

        os.replace = on_the_manifest
    try:
        run.save(folder)
    except (RuntimeError, OSError, ValueError) as error:
        return type(error).__name__
    return "saved"


def load_on(rank: int, size: int, folder: str) -> Any:
    run = Run(CASE.but(seed=1), 0, rank, group())
    run.load(folder)
    return run.all()


@pytest.mark.parametrize("where", [*DEATHS, *LATE])
def test_a_rank_that_dies_while_saving_leaves_a_whole_checkpoint(where: str, tmp_path: Path) -> None:
    """The one before, up to the rename; from there on the new one."""
    folder, who = str(tmp_path), {**DEATHS, **LATE}[where][0]
    before = run_ranks(2, save_on, folder, 4)
    outcomes = run_ranks_once(2, dying, (folder, where), expect_dead=[who], group_timeout=10.0)
    assert outcomes[1 - who] == "CollectiveError"
    expected = before if where in DEATHS else run_ranks(2, after, 5)
    assert same(run_ranks(2, load_on, folder), expected)
    again = run_ranks(2, save_on, folder, 6)
    assert same(run_ranks(2, load_on, folder), again)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".tmp"))
    assert left == sorted([checkpoint_files.MANIFEST, checkpoints.manifest(tmp_path)["data"]])


def after(rank: int, size: int, steps: int) -> Any:
    return Run(CASE, steps, rank, group()).all()


def save_for_ever(folder: Path, writing: Any) -> None:
    run, step = Run(CASE, 0), 0
    while True:
        step += 1
        run.on(step, step)
        run.save(folder)
        os.write(writing, b".")


def killed_after(folder: Path, seconds: float) -> int:
    """How many saves a process had reported when it was killed, some time after the first."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            save_for_ever(folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    last = len(os.read(reading, 1))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 4096):
        last += len(more)
    os.close(reading)
    return last


def kill_often(folder: str, attempts: int, answer: Connection) -> None:
    """In a process with one thread, which may fork."""
    torch.set_num_threads(1)
    source, found = np.random.default_rng(0), []
    for attempt in range(attempts):
        own = Path(folder) / str(attempt)
        last = killed_after(own, source.uniform(0, 0.1))
        run = Run(CASE, 0)
        run.load(own)
        steps = run.optimizer.steps
        found.append((last, steps, same(run.all(), Run(CASE, steps).all()), len(list(own.glob("data-*")))))
    answer.send(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_it_leaves_the_last_checkpoint_or_the_next(tmp_path: Path) -> None:
    """SIGKILL at moments drawn over the length of a few saves."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=kill_often, args=(str(tmp_path), 20, theirs), daemon=True)
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert len(found) == 20
    for last, steps, whole, _ in found:
        assert steps in (last, last + 1)
        assert whole
    assert any(folders > 1 for *_, folders in found), "no kill came in the middle of a save: draw other moments"


@kinds
def test_a_save_that_fails_leaves_the_checkpoint_before(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is full."""
    run = Run(CASE.but(kind=kind), 4)
    run.save(tmp_path)
    kept = run.all()

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    run.on(5, 6)
    for module, name in (
        (torch.distributed.checkpoint.FileSystemWriter, "write_data"),
        (checkpoint, "written"),
        (checkpoint_files, "sha256"),
        (checkpoint_files, "commit"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space left"):
                run.save(tmp_path)
        other = Run(CASE.but(kind=kind), 0)
        other.load(tmp_path)
        assert same(other.all(), kept)
    run.save(tmp_path)
    other.load(tmp_path)
    assert same(other.all(), run.all())
    assert len(list(tmp_path.iterdir())) == 2


def fails_on_one(rank: int, size: int, folder: str) -> str:
    run = Run(CASE, 5, rank, group())
    if rank == 1:

        def refuse(*args: Any) -> None:
            raise OSError("this disk is broken")

        checkpoint_files.sha256, whole = refuse, checkpoint_files.sha256
    try:
        run.save(folder)
    except OSError as error:
        return str(error)
    finally:
        if rank == 1:
            checkpoint_files.sha256 = whole
    return "saved"


def test_what_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    before = run_ranks(3, save_on, str(tmp_path), 4)
    assert run_ranks(3, fails_on_one, str(tmp_path)) == ["rank 1 of 3: this disk is broken"] * 3
    assert same(run_ranks(3, load_on, str(tmp_path)), before)


def other_model(rank: int, size: int, folder: str) -> str:
    case = CASE.but(shapes=((3,),)) if rank == 2 else CASE
    with pytest.raises(ValueError) as caught:
        Run(case, 0, rank, group()).save(folder)
    return str(caught.value)


def test_ranks_with_other_models_do_not_save(tmp_path: Path) -> None:
    assert all("ranks [2] have another model" in text for text in run_ranks(3, other_model, str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_only_data_folders_are_removed(tmp_path: Path) -> None:
    others = ["data-1", "data-0123456789abcdefg", "notes", ".metadata"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "data-0123456789abcdef").mkdir()
    run = Run(CASE, 2)
    run.save(tmp_path)
    run.save(tmp_path)
    data = checkpoints.manifest(tmp_path)["data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, checkpoint_files.MANIFEST, data])
