"""The end of stage 1: the rule against the variance that the optimizer shows, on all ranks at once, and the log. Of
LAMB the coefficients that it needs, and its own rule."""

import math
import warnings
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from onebit import FreezeRule
from onebit.optim.state import Part
from tests import internals, oracle
from tests.collectives.work import logged
from tests.onebit.optim import simulation
from tests.onebit.optim.contract import options, started
from tests.onebit.optim.simulation import LambSimulation, Sized, as_numpy
from tests.onebit.runs import (
    Case,
    adamw_state,
    arrays,
    assert_message,
    bits,
    build,
    freezing_kinds,
    on_ranks,
    snapshot,
    take,
)
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Swelling(Case):
    """Gradients that grow by `growth` a step up to step `until`, and stay as large as they are from there on."""

    growth: float = 0.0
    until: int = 0

    def gradients(self, rank, step):
        size = 1 + self.growth * min(step, self.until)
        return [None if g is None else g * size for g in super().gradients(rank, step)]

    def measure(self, params, optimizer, step):
        """||vhat||_1 of the whole model after so many steps."""
        total = 0.0
        for group_ in optimizer.param_groups:
            debias = 1 - group_["betas"][1] ** step if self.options.get("bias_correction", True) else 1.0
            total += sum(float(optimizer.state[p]["exp_avg_sq"].double().sum()) / debias for p in group_["params"])
        return total


WINDOW = 20
SHORT = {"betas": (0.9, 0.95)}  # 1 / (1 - beta2) = 20
STEADY = Swelling(shapes=((20, 40), (33,), (300,)), steps=200, options=SHORT)
RISING = STEADY.but(growth=0.2, until=60)
SINKING = STEADY.but(growth=-0.012, until=70)


@dataclass(frozen=True)
class Traced:
    measured: list[Any]  # by the case after step 1, 2, ... of stage 1
    ratios: list[float | None]  # optimizer.freeze_ratio after step 1, 2, ...
    frozen: int | None  # the last step of stage 1
    messages: list[str]
    end: bytes


def traced(rank, size, case):
    """Run until a few steps into stage 2. Steps with a bad gradient come beside those of the case."""
    params, optimizer = started(case, 0, rank, size)
    measured, ratios, frozen, bad = [], [], None, {step for step, *_ in case.bad}
    with logged("%(levelname)s: %(message)s") as messages:
        for step in range(1, case.steps + 1):
            if step in bad:
                take(case, rank, optimizer, params, step)
            take(case.but(bad=()), rank, optimizer, params, step)
            if optimizer.compressing and frozen is None:
                frozen = step - 1
            if frozen is None:
                measured.append(case.measure(params, optimizer, step))
            ratios.append(optimizer.freeze_ratio)
            if frozen is not None and step > frozen + 3:
                break
    assert optimizer.skipped_steps == len(bad) and (frozen or 0) > max(bad, default=-1)
    messages = [text for text in messages if "Compiled" not in text]  # a loop, in a process that had none
    return Traced(measured, ratios, frozen, messages, bits(params))


def ratio(norms, step, window):
    """||vhat_t||_1 / ||vhat_(t-D)||_1, None while there is none."""
    return norms[step - 1] / norms[step - 1 - window] if step > window else None


def assert_frozen_by(found, window, values, is_stable, rel=1e-6):
    """Stage 1 ends at the first step t >= 2D whose value is stable. values: None, or what freeze_ratio shows of it one
    step later, since no step waits for the device."""
    assert found.frozen is not None, "stage 1 did not end: the test shows nothing"
    assert found.frozen == next(t for t in range(2 * window, len(values) + 1) if is_stable(values[t - 1]))
    for shown, expected in zip(found.ratios, [None, *values], strict=False):
        assert shown == (None if expected is None else pytest.approx(expected, rel=rel))


def assert_frozen_by_the_rule(found, window, threshold=0.96):
    """All ranks freeze by the rule, and end alike."""
    for each in found:
        values = [ratio(each.measured, step, window) for step in range(1, len(each.measured) + 1)]
        assert_frozen_by(each, window, values, lambda r: min(r, 1 / r) >= threshold, 1e-5)
        assert each.end == found[0].end


@pytest.mark.parametrize(
    ("size", "case", "after"),
    [
        (1, STEADY, 2 * WINDOW - 1),
        (2, RISING, 60),
        (1, SINKING, 2 * WINDOW + 10),
        (1, RISING.but(shapes=((400,), (300,)), last_dtype="bfloat16"), 60),
    ],
    ids=["steady", "rising", "sinking", "two dtypes are one model"],
)
def test_stage_1_ends_where_the_rule_says_on_all_ranks(size, case, after):
    """r >= threshold alone, as the papers have it, would end stage 1 of one that rises at 2D."""
    found = simulation.on_ranks(size, traced, case)
    assert_frozen_by_the_rule(found, WINDOW)
    assert found[0].frozen > after
    if case is RISING:
        assert ratio(found[0].measured, 2 * WINDOW, WINDOW) > 1 / 0.96


def test_three_ranks_and_groups_with_a_window_each_and_what_rank_0_logs():
    """The whole model counts, each group's variance corrected by its own beta2; D is that of the longest. The log has
    the ratio every D steps, so that a run too short for "auto" does not stay in stage 1 unnoticed."""
    groups = ({"betas": (0.9, 0.95)}, {"betas": (0.8, 0.9)}, {"betas": (0.9, 0.5)})
    first, *others = found = run_ranks(3, traced, RISING.but(groups=groups))
    assert_frozen_by_the_rule(found, WINDOW)
    assert all(each.messages == [] for each in others)
    early, *seen, last = first.messages
    assert early.startswith("WARNING") and f"after step {2 * WINDOW} at the earliest" in early
    steps = range(WINDOW, first.frozen + 1, WINDOW)
    assert len(seen) == len(steps) >= 3
    for text, step in zip(seen, steps, strict=True):
        r = ratio(first.measured, step, WINDOW)
        assert text.startswith("INFO") and f"step {step}," in text
        assert ("not known" if r is None else f"{r:.4f}") in text
    assert last.startswith("INFO") and "tage 2" in last and f"step {first.frozen}:" in last


def test_a_variance_that_grows_from_zero_is_not_frozen():
    """vhat is v without bias correction, which has reached 0.87 of its size after 2D steps."""
    found = traced(0, 1, options(STEADY.but(shapes=((4000,),)), bias_correction=False))
    q = next(t for t in range(1000) if (1 - 0.95**t) / (1 - 0.95 ** (t + WINDOW)) >= 0.96) + WINDOW  # of its mean: 75
    assert abs(found.frozen - q) <= 5
    assert_frozen_by_the_rule([found], WINDOW)


@pytest.mark.parametrize(("threshold", "window"), [(0.99, None), (0.96, 7), (0.9, 31)])
def test_the_threshold_and_the_window_can_be_chosen(threshold, window):
    case = RISING.but(shapes=((8000,),))
    found = traced(0, 1, options(case, freeze_step=FreezeRule(threshold, window)))
    assert_frozen_by_the_rule([found], window or WINDOW, threshold)
    assert found.frozen != traced(0, 1, case).frozen


def test_skipped_steps_are_not_in_the_trace():
    """The same ratios and the same decision, as many steps later as were skipped."""
    bad = ((5, 0, math.nan), (33, 0, math.inf), (34, 0, -math.inf), (60, 0, math.nan))
    plain, skipping = (traced(0, 1, RISING.but(bad=own)) for own in ((), bad))
    assert (plain.ratios, plain.end) == (skipping.ratios, skipping.end)


@freezing_kinds
@on_ranks(2)
def test_a_number_is_the_last_step_of_stage_1_and_skipped_ones_do_not_count(rank, size, kind):
    for bad in ((), ((1, 1, math.nan), (4, 0, math.inf), (6, 0, math.nan))):
        case = Case(kind, options={"freeze_step": 5}, bad=bad)
        params, optimizer = started(case, 0, rank, size)
        with logged("%(levelname)s: %(message)s") as messages:
            for step in range(1, 7 + len(bad)):
                take(case, rank, optimizer, params, step)
                assert optimizer.compressing == (step == 6 + len(bad))
        assert optimizer.skipped_steps == len(bad) and not any("earliest" in text for text in messages)


FROM_THE_START = {"freeze_step": 0}


@pytest.mark.parametrize(
    ("case", "steps", "lacks"),
    [
        (Case(options=FROM_THE_START), 0, "there is no variance to freeze"),
        (Sized(options=FROM_THE_START), 0, "there are no coefficients to go on with"),
        (Sized(options=FROM_THE_START), 5, "there are no coefficients to go on with"),
    ],
    ids=["Adam", "LAMB", "LAMB after AdamW"],
)
@on_ranks(2)
def test_stage_2_from_the_start_lacks_what_it_needs(rank, size, case, steps, lacks):
    """LAMB needs coefficients: a variance of AdamW's is not enough."""
    params, optimizer = started(case, 0, rank, size)
    if steps:
        optimizer.load_state_dict(adamw_state(case, steps))
    before = bits(params)
    with pytest.raises(ValueError, match=lacks) as caught:
        take(case, rank, optimizer, params, 6)
    assert_message(caught, f"begin after {steps} steps", "ive stage 1 some steps", "freeze_step=1")
    assert bits(params) == before and not optimizer.compressing


GROWS = {"bias_correction": False}


@pytest.mark.parametrize(
    ("kind", "own", "warned"),
    [
        ("OneBitAdam", {"freeze_step": 19, **GROWS, **SHORT}, True),
        ("OneBitLamb", {"freeze_step": 999, **GROWS}, True),
        ("OneBitAdam", {"freeze_step": 20, **GROWS, **SHORT}, False),
        ("OneBitAdam", {"freeze_step": 1000, **GROWS}, False),
        ("OneBitAdam", {"freeze_step": 19, "bias_correction": True, **SHORT}, False),
        ("OneBitAdam", {"freeze_step": "auto", **GROWS}, False),
        ("OneBitAdam", {"freeze_step": 0, **GROWS}, False),
    ],
)
def test_a_freeze_while_the_variance_grows_from_zero_warns(kind, own, warned, recwarn):
    getattr(onebit, kind)([nn.Parameter(torch.ones(3))], **own)
    assert len(recwarn) == warned
    for warning in recwarn:
        assert f"freeze_step={own['freeze_step']} " in str(warning.message)
        assert "bias_correction=True" in str(warning.message)
        assert warning.filename == __file__, "it points elsewhere than to where the optimizer is made"


@pytest.mark.parametrize(("kind", "floor"), [("OneBitAdam", 0.0), ("OneBitAdam", 1e-2), ("OneBitLamb", 1e-2)])
def test_a_variance_far_below_the_others_is_floored(kind: str, floor: float) -> None:
    """v is known: a gradient of 1 in most places, of 1e-3 in some, of 0 in one."""
    grad = torch.tensor([1.0] * 6 + [1e-3] * 2 + [0.0])
    p = nn.Parameter(torch.zeros(9))
    optimizer = build(kind, [p], freeze_step=1, variance_floor=floor, zero_variance="hold", block_size=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            p.grad = grad.clone()
            optimizer.step()
    small = max(1e-6, floor * (6 + 2e-6) / 8)
    v = np.array([1.0] * 6 + [small] * 2)
    d = internals.states(optimizer)[0].view("denominator", 0)
    np.testing.assert_allclose(d[:8], 1 / (np.sqrt(v) + 1e-8), rtol=1e-5)
    assert d[8] == 0


# 1-bit LAMB


def test_coefficients_are_averaged_from_where_lamb_began():
    """There are 5 steps of AdamW, then 3 of LAMB, and stage 2."""
    case = Sized(x_sizes=(0.1,) * 4, options={"freeze_step": 8})
    (params, optimizer), state = started(case, 0), adamw_state(case, 5, 1e-2, weight_decay=0.0)
    optimizer.load_state_dict(state)
    x, h, c = arrays(params), LambSimulation(case, 1).hypers, np.zeros(4)
    m, v = ([as_numpy(state["state"][i][name]) for i in range(4)] for name in ("exp_avg", "exp_avg_sq"))
    for step in (6, 7, 8):
        take(case, 0, optimizer, params, step)
        x, m, v, c, _ = oracle.lamb_step(x, [g.numpy() for g in case.gradients(0, step)], m, v, c, h, step)
    take(case, 0, optimizer, params, 9)
    assert optimizer.compressing
    expected = oracle.debiased(c, h, 3)
    assert len(set(expected.round(3))) > 2
    np.testing.assert_allclose(as_numpy(internals.states(optimizer)[0]["coefficient_average"]), expected, rtol=1e-5)


@dataclass(frozen=True)
class Growing(Sized):
    """A case with lr = 0: parameters that are multiplied by `1 + growth` after each step up to `until`. The
    coefficients follow, since the other norm hardly changes."""

    growth: tuple[float, ...] = ()
    until: tuple[int, ...] = ()

    def measure(self, params, optimizer, step):
        """Grows, and returns the debiased averages of coefficients."""
        with torch.no_grad():
            for p, growth, until in zip(params, self.growth, self.until, strict=True):
                p.mul_(1 + growth if step <= until else 1.0)
        c = np.concatenate([as_numpy(state["coefficient_average"]) for state in internals.states(optimizer)])
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


STILL = {"lr": 0.0, "betas": (0.0, 0.95)}
GROWING = Growing(
    shapes=((900,), (40,), (60,)), x_sizes=(0.02,) * 3, steps=120, options=STILL, growth=(0.01,) * 3, until=(30,) * 3
)
UP_TO_50 = GROWING.but(until=(50, 50, 50))
AUTO = {  # ranks, case, window, the end of the last growth that counts
    "from 2D on": (1, GROWING.but(until=(0, 0, 0)), 20, None),
    "when all are stable": (1, UP_TO_50, 20, 50),
    "4 % may go on": (1, GROWING.but(until=(50, 200, 50)), 20, 50),
    "6 % may not": (3, GROWING.but(until=(30, 30, 80)), 20, 80),
    "shrinking": (1, GROWING.but(growth=(-0.01, -0.01, -0.01), until=(60, 0, 0)), 20, 60),
    "another threshold": (1, options(UP_TO_50, freeze_step=FreezeRule(0.9)), 20, 50),
    "another window": (2, options(UP_TO_50, freeze_step=FreezeRule(window=9)), 9, 50),
    "16 comparisons a window": (1, options(UP_TO_50, freeze_step=FreezeRule(window=16)), 16, 50),
    "two steps a comparison": (1, options(GROWING.but(until=(60, 60, 60)), freeze_step=FreezeRule(window=32)), 32, 60),
    "a window of strides": (1, options(UP_TO_50, freeze_step=FreezeRule(window=33), coeff_beta=0.5), 33, 50),
}


@pytest.mark.parametrize("name", AUTO)
def test_stage_1_ends_when_the_coefficients_are_stable(name):
    size, case, window, stable_from = AUTO[name]
    numels, rule = [int(np.prod(shape)) for shape in case.shapes], case.options.get("freeze_step", FreezeRule())
    found = simulation.on_ranks(size, traced, case)
    for each in found:
        steps = range(1, len(each.measured) + 1)
        shares = [stable_share(each.measured, numels, step, window, rule.threshold) for step in steps]
        assert_frozen_by(each, window, shares, lambda share: share >= 0.95)
        assert each.end == found[0].end
    [early] = [text for text in found[0].messages if "at the earliest" in text]
    assert early.startswith("WARNING") and f"after step {2 * window}" in early
    if stable_from is None:
        assert found[0].frozen == 2 * window
    else:
        assert stable_from < found[0].frozen <= stable_from + window + 20  # which an average with beta 0.9 needs


def test_a_model_without_elements_stays_in_stage_1():
    """A rank's shard of a model may hold nothing."""
    params = [nn.Parameter(torch.zeros(0))]
    optimizer = onebit.OneBitLamb(params, freeze_step=FreezeRule(window=2))
    for _ in range(8):
        params[0].grad = torch.zeros(0)
        optimizer.step()
    assert not optimizer.compressing


@freezing_kinds
def test_after_a_freeze_that_did_not_end_a_state_has_to_be_loaded(kind):
    case = Case(kind, options={"freeze_step": 3})
    params, optimizer = started(case, 3)
    state, before = snapshot(optimizer.state_dict()), bits(params)
    with patch.object(Part, "start_reducer", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        take(case, 0, optimizer, params, 4)
    for call in (optimizer.state_dict, optimizer.step):
        with pytest.raises(ValueError, match="after a freeze that an error or an interrupt has ended"):
            call()
    assert bits(params) == before
    optimizer.load_state_dict(state)
    take(case, 0, optimizer, params, 4)
    other, plain = started(case, 4)
    assert plain.compressing and bits(params) == bits(other)
