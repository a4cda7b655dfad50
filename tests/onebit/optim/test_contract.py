"""What holds for every optimizer, each with every way of sending, in a list of cases that covers them: steps that are
skipped, runs that are resumed, gradients that are clipped or scaled. test_overlap.py has messages that leave early."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.onebit.optim.contract import clips, options, resumes, scales, skips
from tests.onebit.optim.simulation import LAMB
from tests.onebit.runs import OPTIMIZERS, Case, on_ranks
from tests.ranks import run_ranks

# With one chunk small messages carry what was found of their gradients, with several all ranks are asked before.
ADAM = Case(steps=9, options={"freeze_step": 3, "weight_decay": 0.1})
ZERO_ONE = Case("ZeroOneAdam", ((7, 9), (33,), (0,), (2,), (130,), ()), steps=13, options={"var_update_scaler": 2})
LOCAL = {"var_freeze_step": 5, "local_step_scaler": 3, "local_step_clipper": 4}  # syncs: 10, 12, 16, 20, 24
APART = ADAM.but(groups=({}, {"compress": False}))  # parameters 1 and 3 are not compressed
SPACED = options(ZERO_ONE.but(shapes=ADAM.shapes, groups=APART.groups), weight_decay=0.1)
NAN, INF = math.nan, math.inf


# A bad gradient on one rank: in stage 1, its last step, the first of stage 2, the second, later

TRIES = ((2, 0, NAN), (3, 1, INF), (4, 1, -INF), (5, 0, 2.0**43), (7, 1, NAN))
OF_NODES = (*TRIES, (8, 2, INF))
IN_FULL = ((2, 0, NAN), (4, 1, INF), (5, 1, NAN), (6, 0, -INF), (12, 1, NAN))  # 0/1 Adam: 1 to 3, 5, 7 and 11 are full
SKIPS = {
    "Adam": (3, ADAM, TRIES),
    "Adam, 16 bits, tensor scale": (2, options(ADAM.but(dtype="bfloat16"), scale="tensor", chunks=2), TRIES),
    "LAMB": (2, options(ADAM.but(kind="OneBitLamb"), scale="tensor"), TRIES),
    "LAMB, 16 bits": (3, options(ADAM.but(kind="OneBitLamb", dtype="bfloat16"), chunks=2), TRIES),
    "0/1 Adam": (3, ZERO_ONE, IN_FULL),
    "0/1 Adam, tensor scale": (2, options(ZERO_ONE, scale="tensor", chunks=2), IN_FULL),
    "0/1 Adam, 16 bits, early": (2, options(ZERO_ONE.but(dtype="bfloat16"), overlap=True, chunks=2), IN_FULL),
    "0/1 Adam, direct": (2, options(ZERO_ONE, reply="direct"), IN_FULL),
    "Adam, clipped": (2, ADAM.but(clip=1.0), TRIES),
    "0/1 Adam, clipped": (3, ZERO_ONE.but(clip=1.0), IN_FULL),
    "of what is not compressed": (2, options(APART, chunks=2), TRIES),
    "of what is, beside it": (2, options(APART.but(groups=APART.groups[::-1]), overlap=True, chunks=2), TRIES),
    "of LAMB's, direct": (2, options(APART.but(kind="OneBitLamb"), reply="direct"), TRIES),
    "of 1-bit LAMB's compressed, beside it": (2, APART.but(kind="OneBitLamb", groups=APART.groups[::-1]), TRIES),
    "of 0/1 Adam's": (2, SPACED, IN_FULL),
    **{f"{kind} of nodes": (4, options(ADAM.but(kind=kind, each=2), chunks=2), OF_NODES) for kind in OPTIMIZERS},
}


@pytest.mark.parametrize(("size", "case", "tries"), SKIPS.values(), ids=SKIPS)
@on_ranks()
def test_a_bad_gradient_on_one_rank_skips_the_step_everywhere(rank: int, size: int, case: Case, tries: Any) -> bytes:
    return skips(rank, size, case, tries)


# Resumed: in stage 1, at its end, after the first compressed step, later, at the end. 1-bit Adam: test_resume.py

STOPS = (2, 3, 4, 7, 9)
RARE = LAMB.but(steps=20, untouched=((0, 2, 14),))  # an element without a variance, which a ratio leaves out
FILLED = RARE.but(shapes=(*RARE.shapes[:6], (5, 0), (3,)))  # with an element in the last parameter
RESUMES = {
    "LAMB": (2, RARE, (5, 8, 9, 16)),
    "LAMB, tensor scale": (1, options(RARE, scale="tensor"), (5, 8, 9, 16)),
    "LAMB before its first compressed step": (
        2, options(FILLED.but(bad=((9, 1, NAN), (10, 0, INF))), scale="tensor"), (9, 10, 11),
    ),
    "0/1 Adam": (3, options(ZERO_ONE, chunks=2), (2, 3, 4, 5, 6, 7)),
    "0/1 Adam, clipped": (2, ZERO_ONE.but(steps=20, clip=1.0), (2, 5, 14)),
    "Adam, clipped": (2, ADAM.but(clip=1.0), (2, 3, 4, 6)),
    "0/1 Adam, tensor scale": (2, options(ZERO_ONE, scale="tensor"), (3, 4, 5)),
    "0/1 Adam, direct": (2, options(ZERO_ONE, reply="direct"), (3, 4, 5)),
    "local steps": (2, options(ZERO_ONE.but(steps=20), **LOCAL), (7, 8, 10, 12)),
    "local steps, tensor scale": (2, options(ZERO_ONE.but(steps=20), scale="tensor", **LOCAL), (8, 10, 12)),
    "local steps, direct": (2, options(ZERO_ONE.but(steps=16), reply="direct", **LOCAL), (8, 10, 12)),
    "local steps of nodes": (4, options(ZERO_ONE.but(steps=16, each=2), chunks=2, **LOCAL), (8, 10, 12)),
    "some not compressed": (2, options(APART, chunks="auto"), STOPS),
    "some of LAMB's": (2, options(APART.but(kind="OneBitLamb"), chunks=2), STOPS),
    "some of 0/1 Adam's": (2, SPACED, (3, 4, 5)),
}  # fmt: skip


@pytest.mark.parametrize(("size", "case", "stops"), RESUMES.values(), ids=RESUMES)
@on_ranks()
def test_a_resumed_run_is_the_same(rank: int, size: int, case: Case, stops: tuple[int, ...]) -> bytes:
    return resumes(rank, size, case, stops)


# Clipped

LARGER = ((8, 8, 2.5), (11, 11, 100.0))
CLIPS = {
    "Adam": (2, ADAM.but(steps=18), 3.0),
    "Adam, a norm that is never reached": (2, ADAM.but(steps=6), 1e6),
    "LAMB": (2, ADAM.but(kind="OneBitLamb", steps=6), 3.0),
    "Adam, a large gradient in stage 1": (2, ADAM.but(grown=((2, 2, 100.0),)), 3.0),
    "Adam, some larger ones, and one that noise does not explain": (2, ADAM.but(steps=14, grown=LARGER), 3.0),
    "0/1 Adam": (3, ZERO_ONE.but(steps=30), 3.0),
    "0/1 Adam, larger gradients": (3, ZERO_ONE.but(steps=30, grown=((2, 2, 9.0), *LARGER, (16, 16, 50.0))), 3.0),
    "some not compressed": (2, APART, 1.0),
    "some not compressed, of nodes": (4, APART.but(each=2), 1.0),
    "some of 0/1 Adam's": (2, SPACED.but(steps=6), 1.0),
}


@pytest.mark.parametrize(("size", "case", "max_norm"), CLIPS.values(), ids=CLIPS)
@on_ranks()
def test_gradients_are_clipped_by_the_norm_of_all(rank: int, size: int, case: Case, max_norm: float) -> bytes:
    return clips(rank, size, case, max_norm)


# Scaled by a GradScaler: in step 3 and 8, in stage 1 and 2, a rank has infinite gradients

OVERFLOWS = ((3, 1, INF), (8, 1, INF))
NOTHING = tuple((step, 0, p) for step in (3, 4, 8, 9) for p in range(4))  # rank 0 has no gradient, nor in steps without
SCALED = ADAM.but(steps=12, options={"freeze_step": 5}, bad=OVERFLOWS)
SCALES = {  # the case, whether gradients are unscaled before the step, and the rank that alone leaves a step out
    "Adam": (SCALED, False, None),
    "LAMB": (SCALED.but(kind="OneBitLamb"), True, None),
    "0/1 Adam": (ZERO_ONE.but(steps=12, bad=OVERFLOWS), True, None),
    "Adam, a rank without gradients": (SCALED.but(missing=NOTHING), False, None),
    "0/1 Adam, a rank without gradients": (SCALED.but(kind="ZeroOneAdam", missing=NOTHING), False, None),
    "local steps": (options(ZERO_ONE.but(steps=16, bad=((14, 0, INF),)), **LOCAL), False, 0),
}


@pytest.mark.parametrize("name", SCALES)
def test_scaled_gradients_train_as_others_and_ranks_back_off_together(name: str) -> None:
    """A local step is the exception, which a rank leaves out by itself."""
    case, unscale, alone = SCALES[name]
    found = run_ranks(2, scales, case, unscale)
    for rank, (end, seen) in enumerate(found):
        skipped = {step for step, who, _ in case.bad if alone is None or who == rank}
        assert end == found[0][0] and seen == scales_after(skipped, case.steps)


def scales_after(skipped: set[int], steps: int) -> list[float]:
    """A step that is skipped halves the scale, four that are taken in a row double it."""
    found, scale, taken = [], 2.0**10, 0
    for step in range(1, steps + 1):
        taken = 0 if step in skipped else taken + 1
        if step in skipped:
            scale /= 2
        elif taken == 4:
            scale, taken = scale * 2, 0
        found.append(scale)
    return found
