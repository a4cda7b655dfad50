"""When 1-bit LAMB's stage 1 ends: the coefficients that it needs, and the rule of freeze_step="auto"."""

import math
from dataclasses import dataclass
from math import nan

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests import oracle
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.lamb_simulation import Sized, lamb_hypers
from tests.onebit.optim.simulation import as_numpy, on_ranks
from tests.onebit.optim.test_freeze import assert_frozen_by, traced
from tests.onebit.runs import adamw_state, arrays, bits, take
from tests.ranks import run_ranks


def from_adamw(rank, size, case, state):
    """The error of a run that continues from the state, and is to freeze at once."""
    params, optimizer = started(case, 0, rank, size)
    if state:
        optimizer.load_state_dict(state)
    before = bits(params)
    with pytest.raises(ValueError, match="there are no coefficients to go on with") as caught:
        take(case, rank, optimizer, params, 6)
    assert bits(params) == before and not optimizer.compressing
    return str(caught.value)


def test_stage_2_from_the_start_needs_coefficients():
    """A variance of AdamW's is not enough."""
    case = Sized(options={"freeze_step": 0})
    for state, words in ((None, "after 0 steps"), (adamw_state(case, 5), "after 5 steps")):
        one, other = run_ranks(2, from_adamw, case, state)
        assert one == other and words in one and "freeze_step=" in one


def test_coefficients_are_averaged_from_where_lamb_began():
    """After 5 steps of AdamW: 3 of LAMB, and stage 2."""
    case = Sized(x_sizes=(0.1,) * 4, options={"freeze_step": 8})
    (params, optimizer), state = started(case, 0), adamw_state(case, 5, 1e-2, weight_decay=0.0)
    optimizer.load_state_dict(state)
    x, h, c = arrays(params), lamb_hypers(case), np.zeros(4)
    m, v = ([as_numpy(state["state"][i][name]) for i in range(4)] for name in ("exp_avg", "exp_avg_sq"))
    for step in (6, 7, 8):
        take(case, 0, optimizer, params, step)
        x, m, v, c, _ = oracle.lamb_step(x, [g.numpy() for g in case.gradients(0, step)], m, v, c, h, step)
    take(case, 0, optimizer, params, 9)
    assert optimizer.compressing
    expected = oracle.debiased(c, h, 3)
    assert len(set(expected.round(3))) > 2
    np.testing.assert_allclose(as_numpy(optimizer.current.states[0]["coefficient_average"]), expected, rtol=1e-5)


@dataclass(frozen=True)
class Growing(Sized):
    """With lr = 0: parameters that are multiplied by `1 + growth` after each step up to `until`. The coefficients
    follow, since the other norm hardly changes."""

    growth: tuple[float, ...] = ()
    until: tuple[int, ...] = ()

    def measure(self, params, optimizer, step):
        """Grows, and returns the debiased averages of coefficients."""
        with torch.no_grad():
            for p, growth, until in zip(params, self.growth, self.until, strict=True):
                p.mul_(1 + growth if step <= until else 1.0)
        c = np.concatenate([as_numpy(state["coefficient_average"]) for state in optimizer.current.states])
        return c / (1 - self.options.get("coeff_beta", 0.9) ** step)


def stable_share(averages, numels, step, window, threshold):
    """Elements of parameters whose average changed by less over the window, compared 16 times a window."""
    apart = math.ceil(window / 16)
    now = step // apart * apart
    before = now - math.ceil(window / apart) * apart
    if before < 1:
        return None
    a, b = averages[now - 1], averages[before - 1]
    return float(np.array(numels)[np.abs(a - b) / b < 1 - threshold].sum() / sum(numels))


SHORT = {"lr": 0.0, "betas": (0.0, 0.95)}  # 1 / (1 - beta2) = 20
GROWING = Growing(
    shapes=((900,), (40,), (60,)), x_sizes=(0.02,) * 3, steps=120, options=SHORT, growth=(0.01,) * 3, until=(30,) * 3
)
UP_TO_50 = GROWING.but(until=(50, 50, 50))
AUTO = {  # ranks, case, window, the end of the last growth that counts
    "from 2D on": (1, GROWING.but(until=(0, 0, 0)), 20, None),
    "when all are stable": (1, UP_TO_50, 20, 50),
    "4 % may go on": (1, GROWING.but(until=(50, 200, 50)), 20, 50),
    "6 % may not": (3, GROWING.but(until=(30, 30, 80)), 20, 80),
    "shrinking": (1, GROWING.but(growth=(-0.01, -0.01, -0.01), until=(60, 0, 0)), 20, 60),
    "another threshold": (1, options(UP_TO_50, freeze_threshold=0.9), 20, 50),
    "another window": (2, options(UP_TO_50, freeze_window=9), 9, 50),
    "16 comparisons a window": (1, options(UP_TO_50, freeze_window=16), 16, 50),
    "two steps a comparison": (1, options(GROWING.but(until=(60, 60, 60)), freeze_window=32), 32, 60),
    "a window of strides": (1, options(UP_TO_50, freeze_window=33, coeff_beta=0.5), 33, 50),
}


@pytest.mark.parametrize("name", AUTO)
def test_stage_1_ends_when_the_coefficients_are_stable(name):
    size, case, window, stable_from = AUTO[name]
    numels, threshold = [int(np.prod(shape)) for shape in case.shapes], case.options.get("freeze_threshold", 0.96)
    found = on_ranks(size, traced, case)
    for each in found:
        steps = range(1, len(each.measured) + 1)
        shares = [stable_share(each.measured, numels, step, window, threshold) for step in steps]
        assert_frozen_by(each, window, shares, lambda share: share >= 0.95)
        assert each.end == found[0].end
    [early] = [text for text in found[0].messages if "at the earliest" in text]
    assert early.startswith("WARNING") and f"after step {2 * window}" in early
    if stable_from is None:
        assert found[0].frozen == 2 * window
    else:
        assert stable_from < found[0].frozen <= stable_from + window + 20  # which an average with beta 0.9 needs


def test_skipped_steps_are_not_in_the_trace():
    bad = ((5, 0, nan), (33, 0, nan), (34, 0, nan))
    plain, skipping = (traced(0, 1, UP_TO_50.but(bad=own)) for own in ((), bad))
    assert (plain.ratios, plain.end) == (skipping.ratios, skipping.end)


def test_a_model_without_elements_stays_in_stage_1():
    """A rank's shard of a model may hold nothing."""
    params = [nn.Parameter(torch.zeros(0))]
    optimizer = onebit.OneBitLamb(params, freeze_window=2)
    for _ in range(8):
        params[0].grad = torch.zeros(0)
        optimizer.step()
    assert not optimizer.compressing
