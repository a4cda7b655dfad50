"""Coordinates whose variance is 0 at the freeze: what moves, what stays, and the warning."""

import warnings

import numpy as np
import pytest

import onebit
from tests.onebit.optim.simulation import both_stages, check, group_or_none, on_ranks, options
from tests.onebit.runs import Case, bits, take

EMBEDDING = Case(
    shapes=((12, 8), (33,), (7,), (0,)),
    steps=40,
    options={"freeze_step": 6, "weight_decay": 0.1},
    untouched=((0, 3, 20), (2, 7, 10**6)),  # three rows without gradients far into stage 2; a parameter without any
)


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_without_a_gradient_move_with_the_floor_and_stay_with_hold(size, zero_variance, scale):
    """`check` knows of the floor, of what never moves, and of what stays out of the scale."""
    case = options(EMBEDDING, zero_variance=zero_variance, scale=scale)
    recorded = on_ranks(size, both_stages, case)
    check(case, recorded)
    before, after = recorded[0].warm.x[0], recorded[0].x[-1][0]
    moved = (after != before).all(axis=1)
    assert moved[3:].all()
    assert moved[:3].all() if zero_variance == "floor" else not (after != before)[:3].any()
    assert np.array_equal(recorded[0].warm.x[2], recorded[0].x[-1][2])


def test_with_hold_gradients_of_coordinates_without_a_variance_change_nothing():
    """Neither the scale nor any parameter, however large."""
    ends = []
    for largest in (0.0, 1e6):
        case = options(EMBEDDING, zero_variance="hold", scale="tensor")
        params = case.parameters()
        optimizer = case.build(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 20):
                for p, g in zip(params, case.gradients(0, step), strict=True):
                    p.grad = g
                if step > 6:
                    params[0].grad[:3] = largest
                    params[2].grad[:] = largest
                optimizer.step()
        ends.append(bits(params))
    assert ends[0] == ends[1]


def freeze_warnings(rank, size, zero_variance):
    params = EMBEDDING.parameters()
    names = list(zip(("embedding.weight", "a", "b", "c"), params, strict=True))
    optimizer = onebit.OneBitAdam(
        names, freeze_step=6, zero_variance=zero_variance, process_group=group_or_none(size), block_size=32
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 12):
            take(EMBEDDING, rank, optimizer, params, step)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("zero_variance", ["floor", "hold"])
@pytest.mark.parametrize("size", [1, 2])
def test_one_warning_names_the_parameters_and_counts(size, zero_variance):
    (text,), *others = on_ranks(size, freeze_warnings, zero_variance)
    assert "embedding.weight (24 of 96)" in text
    assert "b (7 of 7)" in text
    assert "a (" not in text and "c (" not in text
    assert ("mean" in text) == (zero_variance == "floor")
    assert not any(others)


def test_no_warning_where_every_coordinate_has_a_variance(recwarn):
    case = Case(options={"freeze_step": 3})
    params = case.parameters()
    optimizer = case.build(params)
    for step in range(1, 8):
        take(case, 0, optimizer, params, step)
    assert optimizer.compressing
    assert [str(w.message) for w in recwarn] == []
