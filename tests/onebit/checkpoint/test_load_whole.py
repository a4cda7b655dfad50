"""A load is whole or changes nothing, extra too; and each rank gets its own extra."""

import pytest

import onebit
from tests.checkpoints import Run
from tests.onebit.runs import Case, same
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3})


class Counter:
    """Refuses what another one has saved."""

    def __init__(self, kind, count=0):
        self.kind, self.count = kind, count

    def state_dict(self):
        return {"kind": self.kind, "count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        if state["kind"] != self.kind:
            raise RuntimeError("a state of another kind")


def refused(rank, size, folder):
    saved = Run(CASE, 5, rank, group())
    onebit.save(folder, saved.model, saved.optimizer, extra={"first": Counter("a", 5), "second": Counter("a", 5)})
    here, extra = Run(CASE, 2, rank, group()), {"first": Counter("a", 2), "second": Counter("ab"[rank], 2)}
    before = here.all()
    with pytest.raises(RuntimeError, match="rank 1 of 2: a state of another kind"):
        onebit.load(folder, here.model, here.optimizer, extra=extra)
    unchanged = same(here.all(), before) and extra["first"].count == 2
    onebit.load(folder, here.model, here.optimizer, extra={"first": extra["first"]})
    return unchanged, same(here.all(), saved.all()), extra["first"].count


def test_an_extra_that_refuses_its_state_on_one_rank_leaves_all_as_it_was(tmp_path):
    assert run_ranks(2, refused, str(tmp_path)) == [(True, True, 5)] * 2


def of_one_rank(rank, size, folder):
    run = Run(CASE, 5, rank, group())
    onebit.save(folder, run.model, run.optimizer, extra={"epoch": 7} if rank == 0 else None)
    return onebit.load(folder, run.model, run.optimizer)


def test_a_rank_that_gave_no_extra_gets_none(tmp_path):
    assert run_ranks(2, of_one_rank, str(tmp_path)) == [{"epoch": 7}, {}]
