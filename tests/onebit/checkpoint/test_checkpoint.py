"""onebit.save and load: one checkpoint of all ranks in a folder, whole at any time, with what else a run has, loaded by
as many ranks and by other numbers."""

import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import onebit
from onebit.checkpoint import files as checkpoint_files
from onebit.checkpoint import save_load as checkpoint
from tests.checkpoints import Holder, Run, manifest
from tests.onebit.checkpoint.states import TWO_GROUPS, one_of
from tests.onebit.optim.test_own_algorithm import CASE as OWN
from tests.onebit.runs import OPTIMIZERS, Case, bits, on_ranks, on_warnings, same, take
from tests.ranks import group, run_ranks, run_ranks_once

WRITER = torch.distributed.checkpoint.FileSystemWriter
CASE = Case(options={"freeze_step": 3})
APART = ({}, {"compress": False})
NESTED = {"epoch": 3, "order": [1, 2, (3, None)], 7: "seven"}


class Training(Run):
    """A run with a schedule, random noise and a place in the data."""

    def __init__(self, case, rank, seed=0):
        super().__init__(case.but(seed=seed), 0, rank, group())
        self.case = case
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=30)
        self.random = torch.Generator().manual_seed(rank)
        self.place = 100 * rank

    def train(self, steps):
        for _ in range(steps):
            noise = torch.rand((), generator=self.random)
            take(self.case, self.rank, self.optimizer, self.params, self.place % 100 + int(noise * 5) + 1)
            self.schedule.step()
            self.place += 1

    def save(self, folder):
        extra = {"schedule": self.schedule, "random": self.random.get_state(), "place": self.place, "nested": NESTED}
        onebit.save(folder, self.model, self.optimizer, extra=extra)

    def load(self, folder):
        found = onebit.load(folder, self.model, self.optimizer, extra={"schedule": self.schedule})
        self.random.set_state(found["random"])
        self.place = found["place"]
        assert found["nested"] == NESTED

    def all(self):
        return *super().all(), self.schedule.state_dict(), self.place


def saving(rank, size, case, folder):
    """A run that is saved after 6 steps and goes on."""
    training = Training(case, rank)
    training.train(6)
    training.save(folder)
    state = training.all()
    training.train(4)
    return state, training.all()


def loading(rank, size, case, folder, begun):
    """Goes on from there, in an optimizer that has begun, or not."""
    training = Training(case, rank, seed=1)
    training.train(begun)
    with on_warnings() as said:
        training.load(folder)
    texts = [text for text in said if text.startswith("onebit: ")]
    state = training.all()
    training.train(4)
    assert all(torch.isfinite(p).all() for p in training.params)
    return state, training.all(), texts


ROWS = [  # ranks there, and here; each with ranks a node
    (Case("OneBitAdam", dtype="bfloat16", options={"freeze_step": 4, "chunks": 2}, groups=TWO_GROUPS), 2, ((3, 1),)),
    (Case("OneBitAdam", options={"freeze_step": 4, "gradient_dtype": torch.bfloat16}), 4, ((2, 1), (1, 1))),
    (Case("OneBitLamb", options={"freeze_step": 3, "scale": "tensor"}), 3, ((2, 1),)),
    (Case("OneBitLamb", options={"freeze_step": 3}), 1, ((3, 1),)),
    (Case("ZeroOneAdam", options={"freeze_step": 3}), 2, ((4, 1),)),
    (Case("ZeroOneAdam", dtype="bfloat16", options={"freeze_step": 50}), 2, ((1, 1),)),
    (Case("OneBitAdam", options={"freeze_step": 3, "reply": 1}, each=2), 4, ((4, 1), (2, 1))),
    (Case("OneBitLamb", options={"freeze_step": 3, "reply": "direct"}, each=2), 4, ((4, 1),)),
    (Case("ZeroOneAdam", options={"freeze_step": 3, "reply": "direct"}, each=2), 4, ((2, 1),)),
    *((Case(kind, options={"freeze_step": 3, "chunks": 2}, groups=APART), 2, ((1, 1),)) for kind in OPTIMIZERS),
    (OWN, 2, ((3, 1),)),
]


@pytest.mark.parametrize(
    ("case", "there", "others"),
    ROWS,
    ids=lambda row: f"{row.kind}, {row.options}" if isinstance(row, Case) else str(row),
)
def test_as_many_ranks_go_on_bit_for_bit_and_others_with_the_same_state(case, there, others, tmp_path):
    """What that means a step later: see test_other_ranks.py."""
    before = run_ranks(there, saving, case, str(tmp_path))
    after = run_ranks(there, loading, case, str(tmp_path), 2)
    assert same([own[:2] for own in after], before) and all(texts == [] for *_, texts in after)
    saved = one_of([state[1] for state, _ in before])["state"]
    for size, each in others:
        after = run_ranks(size, loading, case.but(each=each), str(tmp_path), 0)
        assert len({state[0] for state, *_ in after}) == len({end[0] for _, end, _ in after}) == 1
        for rank, (state, _, texts) in enumerate(after):
            assert same(state[1]["state"], saved)
            assert state[-1] == 100 * (rank % there) + 6, "each has the extra of a rank"
            says = f"onebit: extra was saved by {there} ranks, here are {size}"
            assert [text.rpartition(":")[0] for text in texts] == [says] * (rank == 0 and size != there)


class Counter:
    """Refuses what another one has saved, when it has taken a part of it. Its state_dict is no copy."""

    def __init__(self, kind, count=0):
        self.state = {"kind": kind, "count": count}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state["count"] = state["count"]
        if state["kind"] != self.state["kind"]:
            raise RuntimeError("a state of another kind")


@on_ranks(2)
def test_extra_that_can_not_be_kept_or_given_is_an_error_on_all_ranks(rank, tmp_path):
    """A load is whole or changes nothing. Each rank gets its own: one that gave none gets none."""
    training = Training(CASE, rank)
    training.train(5)

    def fails(do, extra, words, errors=(ValueError, TypeError)):
        with pytest.raises(errors, match=words):
            do(tmp_path, training.model, training.optimizer, extra=extra)

    fails(onebit.save, {"it": object() if rank else 1}, "rank 1: extra 'it'")
    for extra in ({3: 1}, [1]):
        fails(onebit.save, extra, "by names")
    assert not (tmp_path / "checkpoint.json").exists()
    saved = {"first": Counter("a", 5), "second": Counter("a", 5), "epoch": 1}
    onebit.save(tmp_path, training.model, training.optimizer, extra=saved)
    kept = Run.all(training)
    training.train(2)
    before, first = training.all(), Counter("a", 2)
    fails(onebit.load, {"schedule": training.schedule} if rank else {}, "no extra 'schedule'")
    fails(onebit.load, {"epoch": 2}, "no load_state_dict")
    fails(onebit.load, {"first": first, "second": Counter("ab"[rank])}, "rank 1: a state of an", RuntimeError)
    assert same(training.all(), before) and first.state["count"] == 2
    onebit.load(tmp_path, training.model, training.optimizer, extra={"first": first})
    assert same(Run.all(training), kept) and first.state["count"] == 5
    onebit.save(tmp_path, training.model, training.optimizer, extra=None if rank else {"epoch": 7})
    assert onebit.load(tmp_path, training.model, training.optimizer) == ({} if rank else {"epoch": 7})


def test_a_checkpoint_without_extra(tmp_path):
    run = Run(CASE, 5)
    run.save(tmp_path)
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda t: 1.0)
    with pytest.raises(ValueError, match="it has none"):
        onebit.load(tmp_path, run.model, run.optimizer, extra={"schedule": schedule})
    assert onebit.load(tmp_path, run.model, run.optimizer) == {}


def test_torch_need_not_tell_where_it_has_put_things(tmp_path, monkeypatch):
    """The writer of torch up to 2.12 fills a copy of the metadata that `dcp.save` returns."""
    finish = WRITER.finish
    monkeypatch.setattr(WRITER, "finish", lambda self, metadata, results: finish(self, replace(metadata), results))
    run, other = Run(CASE, 5), Run(CASE, 0)
    run.save(tmp_path)
    onebit.load(tmp_path, other.model, other.optimizer)
    assert bits(run.model.parameters()) == bits(other.model.parameters())


# A folder holds a whole checkpoint at any time: while a rank saves, and wherever it dies


def dies(module, name, *, after=False, only=None):
    """Die before the function or after it, or `only` when it puts a file of that name in place."""
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
    "before the data folder is made": lambda: dies(checkpoint, "_begin"),
    "before it writes": lambda: dies(WRITER, "write_data"),
    "after it has written": lambda: dies(WRITER, "write_data", after=True),
    "before the index": lambda: dies(checkpoint, "index_of"),
    "at the checksums": lambda: dies(checkpoint_files, "sha256"),
    "before the commit": lambda: dies(checkpoint, "_commit"),
    "before the rename": lambda: dies(os, "replace", only=MANIFEST),
}
AFTER = {
    "after the rename": lambda: dies(os, "replace", after=True, only=MANIFEST),
    "before the old one goes": lambda: dies(checkpoint_files.shutil, "rmtree"),
}
DEATHS = {**BEFORE, **AFTER}


def die_at_each_place(folder):
    """A checkpoint after 4 steps, then a save after 5 in a process that dies. Needs one thread, as it forks."""
    torch.set_num_threads(1)
    runs = {steps: Run(CASE, steps) for steps in (4, 5)}
    for where, die in DEATHS.items():
        own = folder / where
        runs[4].save(own)
        if (child := os.fork()) == 0:
            try:
                die()
                runs[5].save(own)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, where
        run, again, steps = Run(CASE, 0), Run(CASE.but(seed=1), 0), 4 if where in BEFORE else 5
        run.load(own)
        assert same(run.all(), runs[steps].all()), where
        assert len(list(own.glob("data-*"))) == 2 or where == "before the data folder is made", where
        run.on(steps + 1, steps + 1)
        run.save(own)
        again.load(own)
        assert same(again.all(), run.all()) and len(list(own.glob("data-*"))) == 1, where


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_dies_while_saving_leaves_the_last_checkpoint_or_the_next(tmp_path):
    process = multiprocessing.get_context("forkserver").Process(target=die_at_each_place, args=(tmp_path,), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0, "see the captured stderr"


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
    if rank == who:
        DEATHS[where]()
    try:
        save_on(rank, size, folder, 5)
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


FULL = (  # places of a save, and the rank where there is no space left
    (Holder, "state_dict", 2),
    (onebit.OneBitAdam, "state_dict", 1),
    (WRITER, "write_data", 1),
    (checkpoint, "index_of", 0),
    (checkpoint_files, "sha256", 1),
    (checkpoint_files, "commit", 0),
)


@on_ranks(3)
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_leaves_the_checkpoint_before(rank, tmp_path):
    """A disk is full, at each of its places, or the model is another."""
    run, other = Run(CASE, 4, rank, group()), Run(CASE, 0, rank, group())
    run.save(tmp_path)
    kept = run.all()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    run.on(5, 6)
    for module, name, who in FULL:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match=f"rank {who}.*No space left"):
            if rank == who:
                patch.setattr(module, name, full)
            run.save(tmp_path)
        other.load(tmp_path)
        assert same(other.all(), kept)
    another = Run(CASE.but(shapes=((3,),)) if rank == 2 else CASE, 0, rank, group())
    with pytest.raises(ValueError, match=r"ranks \[2\] have another model"):
        another.save(tmp_path)
    run.save(tmp_path)
    other.load(tmp_path)
    assert same(other.all(), run.all())
    assert len(list(tmp_path.iterdir())) == 2


def saving_as_users(rank, size, folder, umasks):
    run, umask = Run(CASE, 4, rank, group()), os.umask(umasks[rank])
    os.seteuid(65533 - rank)
    try:
        run.save(folder)
        run.load(folder)
    except OSError as error:
        return str(error)
    finally:
        os.seteuid(0)
        os.umask(umask)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may be two users")
def test_what_another_user_could_not_load_is_not_saved():
    with TemporaryDirectory() as top:  # tmp_path is root's alone
        os.chmod(top, 0o777)
        assert run_ranks(2, saving_as_users, f"{top}/open", (0, 0)) == [None, None]
        errors = run_ranks(2, saving_as_users, f"{top}/closed", (0, 0o077))
        assert all(re.search(r"rank 0\b.*may not read .*__1_0.distcp.*run all ranks as one user", e) for e in errors)
        assert not Path(top, "closed", MANIFEST).exists()


def test_only_data_folders_are_removed(tmp_path):
    others = ["data-1", "data-0123456789abcdefg", "notes", ".metadata"]
    for name in (*others, "data-0123456789abcdef"):
        (tmp_path / name).mkdir()
    run = Run(CASE, 2)
    run.save(tmp_path)
    run.save(tmp_path)
    data = manifest(tmp_path)["data"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, MANIFEST, data])
