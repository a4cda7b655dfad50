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
from tests.onebit.runs import Case, same
from tests.ranks import group, run_ranks, run_ranks_once

CASE = Case(steps=6, options={"freeze_step": 3})
WRITER = torch.distributed.checkpoint.FileSystemWriter


def dies_before(module: Any, name: str) -> None:
    setattr(module, name, lambda *args, **options: os._exit(1))


def dies_after(module: Any, name: str) -> None:
    original = getattr(module, name)
    setattr(module, name, lambda *args, **options: (original(*args, **options), os._exit(1)))


def on_the_manifest(dies: Callable[[Any, str], None]) -> None:
    """os.replace kills only where it puts checkpoint.json in place."""
    replace = os.replace
    dies(checkpoint_files.os, "replace")
    deadly = os.replace
    os.replace = lambda source, target: (deadly if Path(target).name == checkpoint_files.MANIFEST else replace)(  # type: ignore[assignment]
        source, target
    )


BEFORE: dict[str, Callable[[], None]] = {  # where a save dies, and leaves the checkpoint before
    "before the data folder is made": lambda: dies_before(checkpoint, "_make_room"),
    "before it writes": lambda: dies_before(WRITER, "write_data"),
    "after it has written": lambda: dies_after(WRITER, "write_data"),
    "before the index": lambda: dies_before(checkpoint, "written"),
    "at the checksums": lambda: dies_before(checkpoint_files, "sha256"),
    "before the commit": lambda: dies_before(checkpoint, "_commit"),
    "before the rename": lambda: on_the_manifest(dies_before),
}
AFTER: dict[str, Callable[[], None]] = {
    "after the rename": lambda: on_the_manifest(dies_after),
    "before the old one goes": lambda: dies_before(checkpoint_files.shutil, "rmtree"),
}
DEATHS = {**BEFORE, **AFTER}


# One process


def forked(work: Callable[[], None]) -> int:
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(9)
    return child


def died_while_saving(folder: Path, where: str) -> int:
    """A checkpoint after 4 steps, then a save after 5 in another process: how that ended."""
    Run(CASE, 4).save(folder)

    def save() -> None:
        run = Run(CASE, 5)
        DEATHS[where]()
        run.save(folder)
        os._exit(0)

    return os.waitstatus_to_exitcode(os.waitpid(forked(save), 0)[1])


def killed_after(folder: Path, seconds: float) -> int:
    """How many saves a process had reported when it was killed, some time after the first."""
    reading, writing = os.pipe()

    def save_for_ever() -> None:
        run, step = Run(CASE, 0), 0
        while True:
            step += 1
            run.on(step, step)
            run.save(folder)
            os.write(writing, b".")

    child = forked(save_for_ever)
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
    """In a process with one thread, which may fork. Of every death: what came of it, steps that are loaded, whether
    they are whole, and data folders before and after one more save."""
    torch.set_num_threads(1)
    source, found = np.random.default_rng(0), {}
    for attempt in [*DEATHS, *range(attempts)]:
        own = Path(folder) / str(attempt)
        last = (
            died_while_saving(own, attempt) if isinstance(attempt, str) else killed_after(own, source.uniform(0, 0.1))
        )
        run = Run(CASE, 0)
        run.load(own)
        steps, left = run.optimizer.steps, len(list(own.glob("data-*")))
        whole = same(run.all(), Run(CASE, steps).all())
        run.on(steps + 1, steps + 1)
        run.save(own)
        again = Run(CASE.but(seed=1), 0)
        again.load(own)
        whole = whole and same(again.all(), run.all())
        found[attempt] = (last, steps, whole, left, len(list(own.glob("data-*"))))
    answer.send(found)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_it_leaves_the_last_checkpoint_or_the_next(tmp_path: Path) -> None:
    """At each place of a save, and by SIGKILL at moments drawn over the length of a few."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=kill_often, args=(str(tmp_path), 8, theirs), daemon=True)
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert len(found) == len(DEATHS) + 8
    for where, (last, steps, whole, _, after) in found.items():
        if isinstance(where, str):
            assert (last, steps) == (1, 4 if where in BEFORE else 5), where
        else:
            assert steps in (last, last + 1)
        assert whole and after == 1, where
    assert {found[where][3] for where in DEATHS if where != "before the data folder is made"} == {2}


# Several ranks


def save_on(rank: int, size: int, folder: str, steps: int) -> Any:
    run = Run(CASE, steps, rank, group())
    run.save(folder)
    return run.all()


def load_on(rank: int, size: int, folder: str) -> Any:
    run = Run(CASE.but(seed=1), 0, rank, group())
    run.load(folder)
    return run.all()


def dying(rank: int, size: int, folder: str, where: str, who: int) -> str:
    run = Run(CASE, 5, rank, group())
    if rank == who:
        DEATHS[where]()
    try:
        run.save(folder)
    except (RuntimeError, OSError, ValueError) as error:
        return type(error).__name__
    return "saved"


@pytest.mark.slow
@pytest.mark.parametrize(("who", "where"), [(1, "before it writes"), (1, "at the checksums"), (0, "before the rename")])
def test_a_rank_that_dies_while_saving_leaves_a_whole_checkpoint(who: int, where: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = run_ranks(2, save_on, folder, 4)
    outcomes = run_ranks_once(2, dying, (folder, where, who), expect_dead=[who], group_timeout=10.0)
    assert outcomes[1 - who] == "CollectiveError"
    assert same(run_ranks(2, load_on, folder), before)
    again = run_ranks(2, save_on, folder, 6)
    assert same(run_ranks(2, load_on, folder), again)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".tmp"))
    assert left == sorted([checkpoint_files.MANIFEST, checkpoints.manifest(tmp_path)["data"]])


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


# Without a death


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full."""
    run = Run(CASE, 4)
    run.save(tmp_path)
    kept = run.all()

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    run.on(5, 6)
    other = Run(CASE, 0)
    for module, name in (
        (WRITER, "write_data"),
        (checkpoint, "written"),
        (checkpoint_files, "sha256"),
        (checkpoint_files, "commit"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space left"):
                run.save(tmp_path)
        other.load(tmp_path)
        assert same(other.all(), kept)
    run.save(tmp_path)
    other.load(tmp_path)
    assert same(other.all(), run.all())
    assert len(list(tmp_path.iterdir())) == 2


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
