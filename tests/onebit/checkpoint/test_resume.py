"""Save and load on as many ranks, at any step of either stage: the resumed run is the uninterrupted one bit for bit."""

from __future__ import annotations

import warnings
from math import inf, nan
from typing import Any

import pytest
import torch

from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, counters, other_parameters, set_parameters, trained
from tests.onebit.runs import Case, bits, run, same, snapshot, take
from tests.ranks import group, run_ranks, run_ranks_once


def resume_around_the_freeze(rank: int, size: int, case: Case, folder: str) -> Any:
    """A run that is never saved, one saved after every step, and ones that resume at the start, about the freeze, and
    before the end."""
    stages, seen = [], []
    params, expected = case.parameters(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = case.build(params, group())
        for step in range(1, case.steps + 1):
            take(case, rank, optimizer, params, step)
            expected.append(bits(params))
            stages.append(optimizer.compressing)
        seen = [str(w.message) for w in caught]
    end = snapshot(optimizer.state_dict())

    params, states, numbers = case.parameters(), [], []
    optimizer = case.build(params, group())
    for step in range(case.steps + 1):
        if step:
            take(case, rank, optimizer, params, step)
            assert bits(params) == expected[step - 1], f"saving changed step {step}"
        states.append(snapshot(optimizer.state_dict()))
        numbers.append(counters(optimizer))
        torch.save({"model": [p.detach() for p in params], "optimizer": states[-1]}, f"{folder}/{step}-{rank}.pt")
    assert same(states[-1], end), "saving changed the state"

    freeze = stages.index(True)  # the last step of stage 1
    for i, start in enumerate((0, freeze - 1, freeze, freeze + 1, case.steps - 2)):
        saved = torch.load(f"{folder}/{start}-{rank}.pt", weights_only=True)
        params = other_parameters(case)
        optimizer = case.build(params, group())
        if i % 2:
            set_parameters(params, saved["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved["optimizer"])
        if not i % 2:
            set_parameters(params, saved["model"])
        assert counters(optimizer) == numbers[start], f"loaded after step {start}"
        assert same(snapshot(optimizer.state_dict()), states[start]), f"loaded after step {start}"
        for step in (start + 1, start + 2):
            take(case, rank, optimizer, params, step)
            assert bits(params) == expected[step - 1], f"resumed after step {start}, wrong at step {step}"
        assert same(snapshot(optimizer.state_dict()), states[step]), f"resumed after step {start}, wrong at {step}"
        assert counters(optimizer) == numbers[step], f"resumed after step {start}, wrong at {step}"
    return stages, numbers[-1], seen


CHUNKS, DIRECT, TWO_BITS, TENSOR = {"chunks": 2}, {"reply": "direct"}, {"reply": 2}, {"scale": "tensor"}
ROTATED = {**DIRECT, "norm": "rotated", **CHUNKS}
GROUPS, BF16 = {"groups": TWO_GROUPS}, {"dtype": "bfloat16"}
NEVER = {"missing": tuple((step, rank, 2) for step in range(1, 10) for rank in range(2))}


def skipping(size: int) -> dict[str, Any]:
    """Steps that are skipped: the first after a resume, and the first that would have compressed, which leaves exp_avg
    in e."""
    bad = tuple((step, step % size, value) for step, value in ((2, nan), (5, inf), (7, nan), (8, nan)))
    return {"steps": 10, "bad": bad, "missing": ((6, 0, 1), (9, size - 1, 2))}


RESUMES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [  # ranks, options, more of the case
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
def test_a_resumed_run_is_the_uninterrupted_one(row: Any, tmp_path: Any) -> None:
    kind, size, options, more = row
    case = Case(kind, **{"steps": 9, **more, "options": {"freeze_step": 3, **options}})
    found = run_ranks(size, resume_around_the_freeze, case, str(tmp_path))
    assert any("without a variance" in text for _, _, warned in found for text in warned) == (more == NEVER)
    for stages, numbers, _ in found:
        assert 2 < stages.index(True) < case.steps - 3
        assert numbers[:2] == (True, 4 if case.bad else 0)
        assert (numbers[2] > 0) == (size > 1)
        assert (numbers[3] is None) == (case.options["freeze_step"] != "auto")
        if case.bad:
            assert stages == [step > 4 for step in range(1, 11)]


def first_half(rank: int, size: int, case: Case, folder: str) -> Any:
    params, optimizer = trained(case, rank, 6, group())
    torch.save({"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, f"{folder}/{rank}.pt")
    run(case, rank, optimizer, params, 7, case.steps)
    return bits(params), snapshot(optimizer.state_dict())


def second_half(rank: int, size: int, case: Case, folder: str) -> Any:
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    params = other_parameters(case)
    set_parameters(params, saved["model"])
    optimizer = case.build(params, group())
    optimizer.load_state_dict(saved["optimizer"])
    run(case, rank, optimizer, params, 7, case.steps)
    return bits(params), snapshot(optimizer.state_dict())


@pytest.mark.slow
def test_a_run_goes_on_in_new_processes(tmp_path: Any) -> None:
    case = Case("OneBitLamb", options={"freeze_step": 4}, groups=TWO_GROUPS)
    whole = run_ranks(2, first_half, case, str(tmp_path))
    resumed = run_ranks_once(2, second_half, (case, str(tmp_path)))
    assert same(whole, resumed)


def resume_with_measured_chunks(rank: int, size: int, case: Case) -> None:
    params, optimizer = trained(case, rank, 6, group())
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, rank, optimizer, params, 7, 9)
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = case.but(options={**case.options, "chunks": "auto"}).build(again, group())
    resumed.load_state_dict(state)
    run(case, rank, resumed, again, 7, 9)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


@pytest.mark.parametrize(("kind", "scale"), [("OneBitAdam", "tensor"), ("OneBitLamb", "block")])
def test_a_resumed_run_keeps_the_chunks_of_the_saved_one(kind: str, scale: str) -> None:
    """What is measured anew may differ, and under a tensor scale so would the numerics."""
    run_ranks(2, resume_with_measured_chunks, Case(kind, options={"freeze_step": 3, "chunks": 3, "scale": scale}))
