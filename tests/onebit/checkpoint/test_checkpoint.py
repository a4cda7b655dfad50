"""onebit.save and load: one checkpoint of all ranks in a folder, with what else a run has, loaded by as many ranks and
by other numbers."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import onebit
from tests.checkpoints import Run, written_files
from tests.onebit.checkpoint.states import TWO_GROUPS
from tests.onebit.runs import Case, arrays, same, take
from tests.ranks import group, run_ranks

CASE = Case(options={"freeze_step": 3})
NESTED = {"epoch": 3, "order": [1, 2, (3, None)], 7: "seven"}


class Training(Run):
    """A run with a schedule, a scaler, random noise and a place in the data."""

    def __init__(self, case, rank, seed=0):
        super().__init__(case.but(seed=seed), 0, rank, group())
        self.case = case
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=30)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0 * (rank + 1))
        self.random = torch.Generator().manual_seed(rank)
        self.place = 100 * rank

    def train(self, steps):
        for _ in range(steps):
            noise = torch.rand((), generator=self.random)
            take(self.case, self.rank, self.optimizer, self.params, self.place % 100 + int(noise * 5) + 1)
            self.schedule.step()
            self.place += 1

    def save(self, folder):
        extra = {"schedule": self.schedule, "scaler": self.scaler, "random": self.random.get_state()}
        extra |= {"python": random.getstate(), "place": self.place, "nested": NESTED}
        onebit.save(folder, self.model, self.optimizer, extra=extra)

    def load(self, folder):
        asked = {"schedule": self.schedule, "scaler": self.scaler}
        found = onebit.load(folder, self.model, self.optimizer, extra=asked)
        self.random.set_state(found["random"])
        self.place = found["place"]
        return found

    def all(self):
        return *super().all(), self.schedule.state_dict(), self.place


def residual_of(case, optimizer):
    """mean_i e_i + E of each parameter, where there is one: what the next messages have to make up for."""
    if case.each > 1 or case.options.get("reply", 1) != 1:
        return None
    found = []
    transport = optimizer.setup.topology.replicas
    for reducer in optimizer.current.reducers:
        mean, state = reducer.exchange.residual.left_out().clone(), reducer.state
        transport.all_sum(mean, "adding up residuals in a test").wait()
        mean.div_(transport.size).add_(reducer.exchange.gathered_server_residual())
        found += [state.cut(mean, i).double().numpy().copy() for i in range(len(state.params))]
    return found


def saving(rank, size, case, folder):
    """A run that is saved after 6 steps and goes on; the same one goes on from there in an optimizer that had begun."""
    training = Training(case, rank)
    training.train(6)
    training.save(folder)
    python = random.getstate()
    state, residual = training.all(), residual_of(case, training.optimizer)
    training.train(4)
    again = Training(case, rank, seed=1)
    again.train(2)
    found = again.load(folder)
    assert found["nested"] == NESTED and found["python"] == python
    assert again.scaler.get_scale() == 256.0 * (rank + 1)
    assert same(again.all(), state)
    again.train(4)
    assert same(again.all(), training.all())
    return state, residual, training.all()


def loading(rank, size, case, folder):
    training = Training(case, rank, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.load(folder)
    texts = [str(w.message) for w in caught if "residuals" in str(w.message) or "extra was" in str(w.message)]
    state, residual = training.all(), residual_of(case, training.optimizer)
    training.train(4)
    return state, residual, training.all(), arrays(training.params), texts


ROWS = [  # ranks there, and here; each with ranks a node
    (Case("OneBitAdam", dtype="bfloat16", options={"freeze_step": 4, "chunks": 2}, groups=TWO_GROUPS), 2, ((3, 1),)),
    (Case("OneBitAdam", options={"freeze_step": 4}), 4, ((2, 1), (1, 1))),
    (Case("OneBitLamb", options={"freeze_step": 3, "scale": "tensor"}), 3, ((2, 1),)),
    (Case("OneBitLamb", options={"freeze_step": 3}), 1, ((3, 1),)),
    (Case("ZeroOneAdam", options={"freeze_step": 3}), 2, ((4, 1),)),
    (Case("ZeroOneAdam", dtype="bfloat16", options={"freeze_step": 50}), 2, ((1, 1),)),
    (Case("OneBitLamb", options={"freeze_step": 50}), 2, ()),
    (Case("OneBitAdam", options={"freeze_step": 3, "gradient_dtype": torch.bfloat16, "reply": 2}), 2, ()),
    (Case("OneBitAdam", options={"freeze_step": 3, "reply": 1}, each=2), 4, ((4, 1), (2, 1))),
    (Case("OneBitLamb", options={"freeze_step": 3, "reply": "direct"}, each=2), 4, ((4, 1),)),
    (Case("ZeroOneAdam", options={"freeze_step": 3, "reply": "direct"}, each=2), 4, ((2, 1),)),
]


@pytest.mark.parametrize(
    ("case", "there", "others"),
    ROWS,
    ids=lambda row: f"{row.kind}, {row.options}" if isinstance(row, Case) else str(row),
)
def test_as_many_ranks_go_on_bit_for_bit_and_others_with_the_mean_residual(case, there, others, tmp_path):
    before = run_ranks(there, saving, case, str(tmp_path))
    after = run_ranks(there, loading, case, str(tmp_path))
    for (state, _, end), (its, _, its_end, _, texts) in zip(before, after, strict=True):
        assert same(its, state) and same(its_end, end) and texts == []
    for size, each in others:
        after = run_ranks(size, loading, case.but(each=each), str(tmp_path))
        for rank, (state, residual, _, _, texts) in enumerate(after):
            assert state[-1] == 100 * (rank % there) + 6, "each has the extra of a rank"
            expected = [f"extra was saved by {there} ranks, here are {size}"] if rank == 0 and size != there else []
            assert [text.split(":")[0] for text in texts] == expected
            if before[0][1] is None or residual is None:
                continue
            for here, was in zip(residual, before[0][1], strict=True):
                if case.options.get("scale") != "tensor":
                    np.testing.assert_allclose(here, was, rtol=1e-5, atol=1e-6)
                else:  # with the momentum, which no message of this number of ranks can hold
                    assert not np.allclose(here, was, rtol=1e-5, atol=1e-6)
        assert len({state[0] for state, *_ in after}) == 1
        assert all(np.isfinite(x).all() for _, _, _, end, _ in after for x in end)


class Picky:
    def state_dict(self):
        return {"it": 1}

    def load_state_dict(self, state):
        raise KeyError("no such thing")


def wrong_extra(rank, size, folder):
    training = Training(CASE, rank)
    training.train(5)
    model, optimizer = training.model, training.optimizer
    found = []

    def fails(do, extra):
        with pytest.raises((ValueError, TypeError)) as caught:
            do(folder, model, optimizer, extra=extra)
        found.append(str(caught.value))

    for extra in ({"it": object() if rank else 1}, {3: 1}, [1]):
        fails(onebit.save, extra)
    assert not (Path(folder) / "checkpoint.json").exists()
    onebit.save(folder, model, optimizer, extra={"picky": Picky(), "epoch": 1})
    training.train(2)
    before = training.all()
    for asked in ({"schedule": training.schedule} if rank else {}, {"epoch": 2}):
        fails(onebit.load, asked)
    assert same(training.all(), before)
    return found


def test_extra_that_can_not_be_kept_or_given_is_an_error_on_all_ranks(tmp_path):
    words = ("rank 1 of 2: extra 'it'", "by names", "by names", "no extra 'schedule'", "no load_state_dict")
    for texts in run_ranks(2, wrong_extra, str(tmp_path)):
        assert all(word in text for text, word in zip(texts, words, strict=True)), texts


def test_a_checkpoint_without_extra(tmp_path):
    run = Run(CASE, 5)
    run.save(tmp_path)
    assert onebit.load(tmp_path, run.model, run.optimizer) == {}
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda t: 1.0)
    with pytest.raises(ValueError, match="it has none"):
        onebit.load(tmp_path, run.model, run.optimizer, extra={"schedule": schedule})
    for path in written_files(tmp_path):
        assert b"extra" not in path.read_bytes()


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path):
    run = Run(CASE, 0)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        run.load(tmp_path)
    torch.distributed.checkpoint.save({"model": {"x": torch.zeros(2)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ValueError, match="holds no optimizer"):
        run.load(tmp_path / "other")
