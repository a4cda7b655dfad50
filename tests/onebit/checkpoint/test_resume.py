"""Save and load on as many ranks, at any step of either stage: the resumed run is the uninterrupted one bit for bit."""

import io
import warnings
from math import inf, nan

import pytest
import torch

from tests.onebit.checkpoint import states
from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, checkpoint, trained
from tests.onebit.runs import Case, run, same, take
from tests.ranks import group, run_ranks


def resume_around_the_freeze(rank, size, case):
    """A run that is saved after every step, and ones that resume at the start, about the freeze, and before the end."""

    def seen(params, optimizer):
        found = checkpoint(params, optimizer)  # which reads what the last step has left to be read
        return *found, (optimizer.compressing, optimizer.skipped_steps, optimizer.wire_bytes, optimizer.freeze_ratio)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        never_saved = trained(case, rank, case.steps, group())
    params, optimizer = trained(case, rank, 0, group())
    saved = [seen(params, optimizer)]
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        saved.append(seen(params, optimizer))
    assert same(saved[-1], seen(*never_saved)), "saving changed the run"

    stages = [counters[0] for _, _, counters in saved[1:]]
    freeze = stages.index(True)  # the last step of stage 1
    for i, start in enumerate((0, freeze - 1, freeze, freeze + 1, case.steps - 2)):
        file = io.BytesIO()
        torch.save(saved[start][:2], file)
        file.seek(0)
        state, values = torch.load(file, weights_only=True)
        params = states.other_parameters(case)
        optimizer = case.build(params, group())
        if i % 2:
            states.set_parameters(params, values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(state)
        states.set_parameters(params, values)
        assert same(seen(params, optimizer), saved[start]), f"loaded after step {start}"
        run(case, rank, optimizer, params, start + 1, start + 2)
        assert same(seen(params, optimizer), saved[start + 2]), f"resumed after step {start}"
    return stages, saved[-1][2], [str(w.message) for w in caught]


CHUNKS, DIRECT, TWO_BITS, TENSOR = {"chunks": 2}, {"reply": "direct"}, {"reply": 2}, {"scale": "tensor"}
ROTATED = {**DIRECT, "norm": "rotated", **CHUNKS}
GROUPS, BF16 = {"groups": TWO_GROUPS}, {"dtype": "bfloat16"}
NEVER = {"missing": tuple((step, rank, 2) for step in range(1, 10) for rank in range(2))}


def skipping(size):
    """Steps that are skipped: the first after a resume, and the first that would have compressed, which leaves exp_avg
    in e."""
    bad = tuple((step, step % size, value) for step, value in ((2, nan), (5, inf), (7, nan), (8, nan)))
    return {"steps": 10, "bad": bad, "missing": ((6, 0, 1), (9, size - 1, 2))}


RESUMES = [  # ranks, options, more of the case
    ("OneBitAdam", 1, {"freeze_step": 4}, {}),
    ("OneBitAdam", 2, {**AUTO, **TENSOR}, {**GROUPS, "steps": 14}),
    ("OneBitAdam", 3, {**CHUNKS}, BF16),
    ("OneBitAdam", 2, {**DIRECT, **TENSOR}, {**BF16, **GROUPS}),
    ("OneBitAdam", 3, {**TWO_BITS, **CHUNKS}, GROUPS),
    ("OneBitAdam", 2, {"chunks": "auto", "norm": "l2"}, {}),
    ("OneBitAdam", 2, {"master_weights": False}, BF16),
    ("OneBitAdam", 3, ROTATED, skipping(3)),
    ("OneBitAdam", 2, {"zero_variance": "hold"}, NEVER),
    ("OneBitLamb", 2, AUTO, {"steps": 14}),
    ("OneBitLamb", 3, {**TENSOR, **CHUNKS}, {**GROUPS, **skipping(3)}),
    ("OneBitLamb", 2, {**TENSOR}, BF16),
    ("OneBitLamb", 2, {**DIRECT, **CHUNKS}, GROUPS),
    ("OneBitLamb", 1, {**TWO_BITS, **TENSOR}, {}),
    ("OneBitLamb", 2, {"zero_variance": "floor"}, NEVER),
    ("ZeroOneAdam", 1, TENSOR, GROUPS),
    ("ZeroOneAdam", 2, {**CHUNKS}, skipping(2)),
    ("ZeroOneAdam", 3, ROTATED, {**BF16, **GROUPS}),
    ("ZeroOneAdam", 2, {**TWO_BITS, **CHUNKS}, {}),
]


@pytest.mark.parametrize("row", RESUMES, ids=lambda row: f"{row[0]} on {row[1]}, {row[2]}, {', '.join(row[3])}")
def test_a_resumed_run_is_the_uninterrupted_one(row):
    kind, size, options, more = row
    case = Case(kind, **{"steps": 9, **more, "options": {"freeze_step": 3, **options}})
    found = run_ranks(size, resume_around_the_freeze, case)
    assert any("without a variance" in text for _, _, warned in found for text in warned) == (more == NEVER)
    for stages, numbers, _ in found:
        assert 2 < stages.index(True) < case.steps - 3
        assert numbers[:2] == (True, 4 if case.bad else 0)
        assert (numbers[2] > 0) == (size > 1)
        assert (numbers[3] is None) == (case.options["freeze_step"] != "auto")
        if case.bad:
            assert stages == [step > 4 for step in range(1, 11)]


def resume_with_measured_chunks(rank, size, case):
    params, optimizer = trained(case, rank, 6, group())
    measured = case.but(options={**case.options, "chunks": "auto"})
    other = states.resumed(measured, *checkpoint(params, optimizer), group())
    states.assert_go_on_alike(case, rank, (params, optimizer), other, 7, 9)


@pytest.mark.parametrize(("kind", "scale"), [("OneBitAdam", "tensor"), ("OneBitLamb", "block")])
def test_a_resumed_run_keeps_the_chunks_of_the_saved_one(kind, scale):
    """What is measured anew may differ, and under a tensor scale so would the numerics."""
    run_ranks(2, resume_with_measured_chunks, Case(kind, options={"freeze_step": 3, "chunks": 3, "scale": scale}))
