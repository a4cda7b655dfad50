"""A folder holds a whole checkpoint at any time: while a rank saves, and wherever it dies."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from onebit.checkpoint import files as checkpoint_files
from onebit.checkpoint import save_load as checkpoint
from tests.checkpoints import Run, manifest
from tests.onebit.runs import Case, same
from tests.ranks import group, run_ranks, run_ranks_once

CASE = Case(steps=6, options={"freeze_step": 3})
WRITER = torch.distributed.checkpoint.FileSystemWriter


def dies(module, name, *, after=False, only=None):
    """Before the function or after it; `only` where it puts a file of that name in place."""
    original = getattr(module, name)

    def deadly(*args, **options):
        if only and Path(args[1]).name != only:
            return original(*args, **options)
        if after:
            original(*args, **options)
        os._exit(1)

    setattr(module, name, deadly)


MANIFEST = checkpoint_files.MANIFEST
BEFORE = {  # where a save dies, and leaves the checkpoint before
    "before the data folder is made": lambda: dies(checkpoint, "_make_room"),
    "before it writes": lambda: dies(WRITER, "write_data"),
    "after it has written": lambda: dies(WRITER, "write_data", after=True),
    "before the index": lambda: dies(checkpoint, "written"),
    "at the checksums": lambda: dies(checkpoint_files, "sha256"),
    "before the commit": lambda: dies(checkpoint, "_commit"),
    "before the rename": lambda: dies(os, "replace", only=MANIFEST),
}
AFTER = {
    "after the rename": lambda: dies(os, "replace", after=True, only=MANIFEST),
    "before the old one goes": lambda: dies(checkpoint_files.shutil, "rmtree"),
}
DEATHS = {**BEFORE, **AFTER}


# One process


def forked(work):
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(9)
    return child


def died_while_saving(folder, where):
    """A checkpoint after 4 steps, then a save after 5 in another process: how that ended."""
    Run(CASE, 4).save(folder)

    def save():
        run = Run(CASE, 5)
        DEATHS[where]()
        run.save(folder)
        os._exit(0)

    return os.waitstatus_to_exitcode(os.waitpid(forked(save), 0)[1])


def killed_after(folder, seconds):
    """How many saves a process had reported when it was killed, some time after the first."""
    reading, writing = os.pipe()

    def save_for_ever():
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


def kill_often(folder, attempts, answer):
    """In a process with one thread, which may fork. Of every death: what came of it, steps that are loaded, whether
    they are whole, and data folders before and after one more save."""
    torch.set_num_threads(1)
    source, found = np.random.default_rng(0), {}
    for attempt in [*DEATHS, *range(attempts)]:
        own = Path(folder) / str(attempt)
        last = died_while_saving(own, attempt) if attempt in DEATHS else killed_after(own, source.uniform(0, 0.1))
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_it_leaves_the_last_checkpoint_or_the_next(tmp_path):
    """At each place of a save, and by SIGKILL at moments drawn over the length of a few."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=kill_often, args=(str(tmp_path), 8, theirs), daemon=True)
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    assert len(found) == len(DEATHS) + 8
    for where, (last, steps, whole, left, after) in found.items():
        if where in DEATHS:
            assert (last, steps) == (1, 4 if where in BEFORE else 5), where
            assert left == 2 or where == "before the data folder is made", where
        else:
            assert steps in (last, last + 1)
        assert whole and after == 1, where


# Several ranks


def save_on(rank, size, folder, steps):
    run = Run(CASE, steps, rank, group())
    run.save(folder)
    return run.all()


def load_on(rank, size, folder):
    run = Run(CASE.but(seed=1), 0, rank, group())
    run.load(folder)
    return run.all()


def dying(rank, size, folder, where, who):
    run = Run(CASE, 5, rank, group())
    if rank == who:
        DEATHS[where]()
    try:
        run.save(folder)
    except (RuntimeError, OSError, ValueError) as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize(("who", "where"), [(1, "before it writes"), (1, "at the checksums"), (0, "before the rename")])
def test_a_rank_that_dies_while_saving_leaves_a_whole_checkpoint(who, where, tmp_path):
    folder = str(tmp_path)
    before = run_ranks(2, save_on, folder, 4)
    outcomes = run_ranks_once(2, dying, (folder, where, who), expect_dead=[who], group_timeout=10.0)
    assert outcomes[1 - who] == "CollectiveError"
    assert same(run_ranks(2, load_on, folder), before)
    again = run_ranks(2, save_on, folder, 6)
    assert same(run_ranks(2, load_on, folder), again)
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".tmp"))
    assert left == sorted([MANIFEST, manifest(tmp_path)["data"]])


def fails_on_one(rank, size, folder):
    run = Run(CASE, 5, rank, group())

    def refuse(*args):
        raise OSError("this disk is broken")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError) as caught:
        if rank == 1:
            patch.setattr(checkpoint_files, "sha256", refuse)
        run.save(folder)
    return str(caught.value)


def test_what_fails_on_one_rank_is_an_error_on_all(tmp_path):
    before = run_ranks(3, save_on, str(tmp_path), 4)
    assert run_ranks(3, fails_on_one, str(tmp_path)) == ["rank 1 of 3: this disk is broken"] * 3
    assert same(run_ranks(3, load_on, str(tmp_path)), before)


def other_model(rank, size, folder):
    case = CASE.but(shapes=((3,),)) if rank == 2 else CASE
    with pytest.raises(ValueError, match=r"ranks \[2\] have another model"):
        Run(case, 0, rank, group()).save(folder)


def test_ranks_with_other_models_do_not_save(tmp_path):
    run_ranks(3, other_model, str(tmp_path))
    assert not list(tmp_path.iterdir())


# Without a death


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """As on a disk that is full."""
    run, other = Run(CASE, 4), Run(CASE, 0)
    run.save(tmp_path)
    kept = run.all()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    def assert_loads(expected):
        other.load(tmp_path)
        assert same(other.all(), expected)

    run.on(5, 6)
    places = (
        (WRITER, "write_data"),
        (checkpoint, "written"),
        (checkpoint_files, "sha256"),
        (checkpoint_files, "commit"),
    )
    for module, name in places:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(OSError, match="No space left"):
                run.save(tmp_path)
        assert_loads(kept)
    run.save(tmp_path)
    assert_loads(run.all())
    assert len(list(tmp_path.iterdir())) == 2


def test_only_data_folders_are_removed(tmp_path):
    others = ["data-1", "data-0123456789abcdefg", "notes", ".metadata"]
    for name in (*others, "data-0123456789abcdef"):
        (tmp_path / name).mkdir()
    run = Run(CASE, 2)
    run.save(tmp_path)
    run.save(tmp_path)
    data = manifest(tmp_path)["data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, MANIFEST, data])
