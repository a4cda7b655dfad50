"""Save and load on as many ranks, at any step of either stage: the resumed run is the uninterrupted one bit for bit."""

import warnings
from math import inf, nan

import pytest
import torch

from tests.onebit.checkpoint.states import AUTO, TWO_GROUPS, counters, other_parameters, set_parameters, trained
from tests.onebit.runs import Case, bits, freezing_kinds, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks, run_ranks_once


def resume_at_every_step(rank, size, case, folder, ahead=2):
    """A run that is never saved, one saved after every step, and one that resumes from each of these files."""
    stages = []
    params, expected = case.parameters(), []
    optimizer = case.build(params, group())
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        expected.append(bits(params))
        stages.append(optimizer.compressing)
    end = snapshot(optimizer.state_dict())

    params, states, numbers = case.parameters(), [], []
    optimizer = case.build(params, group())
    for step in range(case.steps + 1):
        if step:
            take(case, rank, optimizer, params, step)
            assert bits(params) == expected[step - 1], f"saving changed step {step}"
        states.append(snapshot(optimizer.state_dict()))
        numbers.append(counters(optimizer))
        values = [p.detach() for p in params]
        torch.save({"model": values, "optimizer": states[-1]}, f"{folder}/{step}-{rank}.pt")
    assert same(states[-1], end), "saving changed the state"

    for start in range(case.steps):
        saved = torch.load(f"{folder}/{start}-{rank}.pt", weights_only=True)
        params = other_parameters(case)
        optimizer = case.build(params, group())
        if start % 2:
            set_parameters(params, saved["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(saved["optimizer"])
        if not start % 2:
            set_parameters(params, saved["model"])
        assert counters(optimizer) == numbers[start], f"loaded after step {start}"
        assert same(snapshot(optimizer.state_dict()), states[start]), f"loaded after step {start}"
        last = min(start + ahead, case.steps)
        for step in range(start + 1, last + 1):
            take(case, rank, optimizer, params, step)
            assert bits(params) == expected[step - 1], f"resumed after step {start}, wrong at step {step}"
        assert same(snapshot(optimizer.state_dict()), states[last]), f"resumed after step {start}, wrong at {last}"
        assert counters(optimizer) == numbers[last], f"resumed after step {start}, wrong at {last}"
    return stages, numbers[-1]


ROTATED = {"reply": "direct", "norm": "rotated", "chunks": 2}
RESUMES = {  # options, more of the case, sizes
    "int": ({"freeze_step": 4}, {}, (1, 2, 3)),
    "auto": (AUTO, {"steps": 14}, (1, 2, 3)),
    "tensor": ({"freeze_step": 3, "scale": "tensor", "chunks": 2}, {"groups": TWO_GROUPS}, (1, 2, 3)),
    "tensor, auto": ({**AUTO, "scale": "tensor"}, {"groups": TWO_GROUPS, "steps": 14}, (2,)),
    "chunks": ({"freeze_step": 3, "chunks": 2}, {"groups": TWO_GROUPS}, (1, 2, 3)),
    "bf16": ({"freeze_step": 4, "chunks": 2}, {"dtype": "bfloat16"}, (1, 3)),
    "bf16, tensor": ({"freeze_step": 3, "scale": "tensor"}, {"dtype": "bfloat16", "groups": TWO_GROUPS}, (1, 2)),
    "bf16 alone": ({"freeze_step": 3, "master_weights": False}, {"dtype": "bfloat16"}, (2,)),
    "direct": ({"freeze_step": 3, "reply": "direct", "chunks": 2}, {"groups": TWO_GROUPS}, (1, 2, 3)),
    "direct, bf16, tensor": ({"freeze_step": 3, "reply": "direct", "scale": "tensor"}, {"dtype": "bfloat16"}, (2,)),
    "two bits": ({"freeze_step": 3, "reply": 2, "chunks": 2}, {"groups": TWO_GROUPS}, (1, 2, 3)),
    "two bits, tensor": ({"freeze_step": 3, "reply": 2, "scale": "tensor"}, {}, (2,)),
    "measured chunks": ({"freeze_step": 3, "chunks": "auto", "norm": "l2"}, {}, (2,)),
}


@freezing_kinds
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, own in RESUMES.items() for size in own[2]])
def test_a_resumed_run_is_the_uninterrupted_one(kind, size, name, tmp_path):
    options, more, _ = RESUMES[name]
    case = Case(kind, **{"steps": 9, "options": options, **more})
    for stages, numbers in run_ranks(size, resume_at_every_step, case, str(tmp_path)):
        assert 2 < stages.index(True) < case.steps - 3
        assert numbers[:2] == (True, 0)
        assert (numbers[2] > 0) == (size > 1)
        assert (numbers[3] is None) == (options["freeze_step"] != "auto")


@kinds
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"scale": "tensor", "chunks": 2}, {"reply": "direct", "chunks": 2}, ROTATED])
def test_resume_is_bit_exact_with_skipped_steps_before_and_after(kind, size, options, tmp_path):
    """Also the first after a resume, also the first that would have compressed: that one leaves exp_avg in e."""
    bad = tuple((step, step % size, value) for step, value in ((2, nan), (5, inf), (7, nan), (8, nan)))
    case = Case(kind, steps=10, options={"freeze_step": 3, **options}, bad=bad, missing=((6, 0, 1), (9, size - 1, 2)))
    for stages, numbers in run_ranks(size, resume_at_every_step, case, str(tmp_path)):
        assert stages == [step > 4 for step in range(1, 11)]
        assert numbers[:2] == (True, 4)


@freezing_kinds
@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
def test_coordinates_without_a_variance_survive_a_resume(kind, zero_variance, tmp_path):
    never = tuple((step, rank, 2) for step in range(1, 9) for rank in range(2))
    case = Case(kind, steps=8, options={"freeze_step": 3, "zero_variance": zero_variance}, missing=never)
    assert_warned(run_ranks(2, resume_without_some_variances, case, str(tmp_path)))


def assert_warned(results):
    assert any("without a variance" in text for texts in results for text in texts)


def resume_without_some_variances(rank, size, case, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params, optimizer = trained(case, rank, 5, group())
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, rank, optimizer, params, 6, 8)
    again = other_parameters(case)
    set_parameters(again, values)
    resumed = case.build(again, group())
    resumed.load_state_dict(state)
    run(case, rank, resumed, again, 6, 8)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))
    return [str(w.message) for w in caught]


def first_half(rank, size, case, folder):
    params, optimizer = trained(case, rank, 6, group())
    saved = {"model": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
    torch.save(saved, f"{folder}/{rank}.pt")
    run(case, rank, optimizer, params, 7, case.steps)
    return bits(params), snapshot(optimizer.state_dict())


def second_half(rank, size, case, folder):
    saved = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    params = other_parameters(case)
    set_parameters(params, saved["model"])
    optimizer = case.build(params, group())
    optimizer.load_state_dict(saved["optimizer"])
    run(case, rank, optimizer, params, 7, case.steps)
    return bits(params), snapshot(optimizer.state_dict())


@kinds
def test_resume_in_new_processes_is_bit_exact(kind, tmp_path):
    case = Case(kind, options={"freeze_step": 4}, groups=TWO_GROUPS)
    whole = run_ranks_once(2, first_half, (case, str(tmp_path)))
    resumed = run_ranks_once(2, second_half, (case, str(tmp_path)))
    for one, other in zip(whole, resumed, strict=True):
        assert one[0] == other[0]
        assert same(one[1], other[1])


def resume_with_measured_chunks(rank, size, case):
    params, optimizer = trained(case, rank, 6, group())
    state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
    run(case, rank, optimizer, params, 7, 9)
    again = other_parameters(case)
    set_parameters(again, values)
    auto = case.but(options={**case.options, "chunks": "auto"})
    resumed = auto.build(again, group())
    resumed.load_state_dict(state)
    run(case, rank, resumed, again, 7, 9)
    assert bits(again) == bits(params)
    assert same(snapshot(resumed.state_dict()), snapshot(optimizer.state_dict()))


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_a_resumed_run_keeps_the_chunks_of_the_saved_one(kind, scale):
    """What is measured anew may differ, and under a tensor scale so would the numerics."""
    run_ranks(2, resume_with_measured_chunks, Case(kind, options={"freeze_step": 3, "chunks": 3, "scale": scale}))
