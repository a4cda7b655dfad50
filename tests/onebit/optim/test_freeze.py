"""When stage 1 ends: the rule against the variance that the optimizer shows, on all ranks at once, and the log."""

import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onebit
from tests.onebit.optim.simulation import group_or_none, on_ranks
from tests.onebit.runs import Case, bits, build, freezing_kinds, run, take
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Swelling(Case):
    """Gradients that grow by `growth` a step up to step `until`, and stay as large as they are from there on."""

    growth: float = 0.0
    until: int = 0

    def gradients(self, rank, step):
        size = 1 + self.growth * min(step, self.until)
        return [None if g is None else g * size for g in super().gradients(rank, step)]


WINDOW = 20
SHORT = {"betas": (0.9, 0.95)}  # 1 / (1 - beta2) = 20
STEADY = Swelling(shapes=((20, 40), (33,), (300,)), steps=200, options=SHORT)
RISING = STEADY.but(growth=0.2, until=60)
SINKING = STEADY.but(growth=-0.012, until=70)


def vhat_norm(case, params, optimizer, step):
    """||vhat||_1 of the whole model after so many steps."""
    total = 0.0
    for group_ in optimizer.param_groups:
        debias = 1 - group_["betas"][1] ** step if case.options.get("bias_correction", True) else 1.0
        total += sum(float(optimizer.state[p]["exp_avg_sq"].double().sum()) / debias for p in group_["params"])
    return total


@dataclass(frozen=True)
class Traced:
    norms: list[float]  # ||vhat||_1 after step 1, 2, ...
    ratios: list[float | None]  # optimizer.freeze_ratio after step 1, 2, ...
    frozen: int | None  # the last step of stage 1
    messages: list[str]
    end: bytes


def traced(rank, size, case):
    """Run until a few steps into stage 2."""
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    norms, ratios, frozen = [], [], None
    with captured_logs() as messages:
        for step in range(1, case.steps + 1):
            take(case, rank, optimizer, params, step)
            if optimizer.compressing and frozen is None:
                frozen = step - 1
            if frozen is None:
                norms.append(vhat_norm(case, params, optimizer, step))
            ratios.append(optimizer.freeze_ratio)
            if frozen is not None and step > frozen + 3:
                break
    return Traced(norms, ratios, frozen, messages, bits(params))


class captured_logs(logging.Handler):
    """The messages that the library logs at INFO, in a rank as well."""

    def __enter__(self):
        self.logger, self.messages = logging.getLogger("onebit"), []
        self.before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        return self.messages

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)

    def emit(self, record):
        self.messages.append(record.getMessage())


def ratio(norms, step, window):
    """||vhat_t||_1 / ||vhat_(t-D)||_1, None while there is none."""
    return norms[step - 1] / norms[step - 1 - window] if step > window else None


def expected_freeze(norms, window, threshold=0.96):
    """The first step t >= 2D with min(r, 1/r) >= threshold."""
    for step in range(2 * window, len(norms) + 1):
        r = ratio(norms, step, window)
        if min(r, 1 / r) >= threshold:
            return step
    return None


def assert_frozen_by_the_rule(found, window, threshold=0.96):
    assert found.frozen is not None, "stage 1 did not end: the test shows nothing"
    assert expected_freeze(found.norms, window, threshold) == found.frozen
    for step in range(1, len(found.norms) + 1):  # freeze_ratio lags by one step: no step waits for the device
        shown, expected = found.ratios[step], ratio(found.norms, step, window)
        if expected is None:
            assert shown is None
        else:
            assert shown == pytest.approx(expected, rel=1e-5)
    assert found.ratios[0] is None


@pytest.mark.parametrize(
    ("size", "case"), [(1, STEADY), (2, RISING), (1, SINKING)], ids=["steady", "rising", "sinking"]
)
def test_stage_1_ends_where_the_rule_says_on_all_ranks(size, case):
    """r >= threshold alone, as the papers have it, would end stage 1 of one that rises at 2D."""
    found = on_ranks(size, traced, case)
    for each in found:
        assert_frozen_by_the_rule(each, WINDOW)
        assert each.end == found[0].end
    if case is not STEADY:
        assert found[0].frozen > (60 if case is RISING else 2 * WINDOW + 10)
    if case is RISING:
        assert ratio(found[0].norms, 2 * WINDOW, WINDOW) > 1 / 0.96


def test_three_ranks_and_groups_with_a_window_each_and_what_rank_0_logs():
    """The whole model counts, each group's variance corrected by its own beta2; D is that of the longest. The log has
    the ratio every D steps, so that a run too short for "auto" does not stay in stage 1 unnoticed."""
    groups = ({"betas": (0.9, 0.95)}, {"betas": (0.8, 0.9)}, {"betas": (0.9, 0.5)})
    first, *others = run_ranks(3, traced, RISING.but(groups=groups))
    for each in (first, *others):
        assert_frozen_by_the_rule(each, WINDOW)
        assert each.end == first.end
    assert all(each.messages == [] for each in others)
    early, *seen, last = first.messages
    assert f"after step {2 * WINDOW} at the earliest" in early
    steps = range(WINDOW, first.frozen + 1, WINDOW)
    assert len(seen) == len(steps) >= 3
    for text, step in zip(seen, steps, strict=True):
        r = ratio(first.norms, step, WINDOW)
        assert f"step {step}," in text
        assert ("not known" if r is None else f"{r:.4f}") in text
    assert "tage 2" in last and f"step {first.frozen}:" in last


def test_two_dtypes_count_as_one_model():
    case = RISING.but(shapes=((400,), (300,)))
    params = [nn.Parameter(p.to(d)) for p, d in zip(case.parameters(), (torch.bfloat16, torch.float32), strict=True)]
    optimizer = case.build(params)
    norms, frozen = [], None
    for step in range(1, case.steps + 1):
        for p, g in zip(params, case.gradients(0, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
        if optimizer.compressing:
            frozen = step - 1
            break
        norms.append(vhat_norm(case, params, optimizer, step))
    assert frozen is not None
    assert frozen == expected_freeze(norms, WINDOW)


def test_a_variance_that_grows_from_zero_is_not_frozen():
    """Without bias correction vhat is v, which has reached 0.87 of its size after 2D steps."""
    found = traced(0, 1, STEADY.but(shapes=((4000,),), options={**SHORT, "bias_correction": False}))
    q = next(t for t in range(1000) if (1 - 0.95**t) / (1 - 0.95 ** (t + WINDOW)) >= 0.96) + WINDOW  # of its mean: 75
    assert abs(found.frozen - q) <= 5
    assert_frozen_by_the_rule(found, WINDOW)


@pytest.mark.parametrize(("threshold", "window"), [(0.99, None), (0.96, 7), (0.9, 31)])
def test_the_threshold_and_the_window_can_be_chosen(threshold, window):
    options = {**SHORT, "freeze_threshold": threshold, "freeze_window": window}
    found = traced(0, 1, RISING.but(shapes=((8000,),), options=options))
    assert_frozen_by_the_rule(found, window or WINDOW, threshold)
    assert found.frozen != traced(0, 1, RISING.but(shapes=((8000,),))).frozen


def test_skipped_steps_are_not_in_the_trace():
    """The same ratios and the same decision, as many steps later as were skipped."""
    at = (5, 33, 34, 60)
    with_bad_gradients = RISING.but(
        bad=tuple((step, 0, value) for step, value in zip(at, (math.nan, math.inf, -math.inf, math.nan), strict=True))
    )
    found = []
    for extra in ((), at):
        params = RISING.parameters()
        optimizer = RISING.build(params)
        ratios = []
        for step in range(1, RISING.steps + 1):
            if step in extra:
                take(with_bad_gradients, 0, optimizer, params, step)
            take(RISING, 0, optimizer, params, step)
            ratios.append(optimizer.freeze_ratio)
            if optimizer.compressing:
                break
        assert optimizer.skipped_steps == len(extra)
        assert max(at) < step < RISING.steps
        found.append((ratios, bits(params)))
    assert found[0] == found[1]


def freeze_after(rank, size, kind):
    """Without skipped steps and with them; and that there is none after 0 steps, without a variance."""
    for bad in ((), ((1, size - 1, math.nan), (4, 0, math.inf), (6, 0, math.nan))):
        case = Case(kind, steps=12, options={"freeze_step": 5}, bad=bad)
        params = case.parameters()
        optimizer = case.build(params, group_or_none(size))
        for step in range(1, 7 + len(bad)):
            take(case, rank, optimizer, params, step)
            assert optimizer.compressing == (step == 6 + len(bad))
        assert optimizer.skipped_steps == len(bad)
    case = Case(kind, options={"freeze_step": 0})
    params = case.parameters()
    optimizer = case.build(params, group_or_none(size))
    before = bits(params)
    with pytest.raises(ValueError, match=r"begin after 0 steps.*ive stage 1 some steps.*freeze_step=1") as caught:
        take(case, rank, optimizer, params, 1)
    assert bits(params) == before and not optimizer.compressing
    assert kind != "OneBitAdam" or "no variance to freeze" in str(caught.value)
    return str(caught.value)


@freezing_kinds
def test_a_number_is_the_last_step_of_stage_1_and_skipped_ones_do_not_count(kind):
    one, other = run_ranks(2, freeze_after, kind)
    assert one == other


def test_stage_2_from_the_start_with_the_variance_of_adamw():
    case = Case(options={"freeze_step": 0})
    params = case.parameters()
    prior = torch.optim.AdamW(params, lr=1e-2)
    run(case, 0, prior, params, 1, 5)
    optimizer = case.build(params)
    optimizer.load_state_dict(prior.state_dict())
    take(case, 0, optimizer, params, 6)
    assert optimizer.compressing
    for p in params:
        vhat = prior.state[p]["exp_avg_sq"].double() / (1 - 0.999**5)
        expected = 1 / (vhat.sqrt() + 1e-8)
        torch.testing.assert_close(optimizer.state[p]["denominator"].double(), expected, rtol=1e-6, atol=0)


def test_a_freeze_while_the_variance_grows_from_zero_warns():
    grows = {"bias_correction": False}
    for kind, options, warned in (
        ("OneBitAdam", {"freeze_step": 19, **grows, **SHORT}, True),
        ("OneBitLamb", {"freeze_step": 999, **grows}, True),
        ("OneBitAdam", {"freeze_step": 20, **grows, **SHORT}, False),
        ("OneBitAdam", {"freeze_step": 1000, **grows}, False),
        ("OneBitAdam", {"freeze_step": 19, "bias_correction": True, **SHORT}, False),
        ("OneBitAdam", {"freeze_step": "auto", **grows}, False),
        ("OneBitAdam", {"freeze_step": 0, **grows}, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(onebit, kind)([nn.Parameter(torch.ones(3))], **options)
        texts = [str(w.message) for w in caught]
        assert len(texts) == warned, options
        if warned:
            assert f"freeze_step={options['freeze_step']} " in texts[0]
            assert "bias_correction=True" in texts[0]
            assert caught[0].filename == __file__, "it points elsewhere than to where the optimizer is made"


def test_a_small_training_run_freezes_by_its_trace(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = onebit.OneBitAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    losses, ratios, stages = [], [], []
    with caplog.at_level(logging.INFO, logger="onebit"):
        for step in range(200):
            data = torch.Generator().manual_seed(step)
            x, noise = torch.randn(64, 8, generator=data), torch.randn(64, 1, generator=data)
            loss = ((model(x) - x.sum(1, keepdim=True) - 0.3 * noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            ratios.append(optimizer.freeze_ratio)
            stages.append(optimizer.compressing)
    frozen = stages.index(True)
    assert frozen >= 2 * WINDOW
    assert stages == [False] * frozen + [True] * (200 - frozen)
    assert ratios[:WINDOW] == [None] * WINDOW  # known from step 21 on, and read one step later
    assert None not in ratios[WINDOW + 1 :]
    assert min(ratios[frozen], 1 / ratios[frozen]) >= 0.96
    assert all(min(r, 1 / r) < 0.96 for r in ratios[2 * WINDOW : frozen])
    # Of short runs, every window, at the freeze, and the report.
    assert len(caplog.records) == 1 + frozen // WINDOW + 2
    assert {(r.name, r.levelno) for r in caplog.records} <= {("onebit", logging.INFO), ("onebit", logging.WARNING)}
    assert sum(losses[-20:]) < 0.5 * sum(losses[frozen - 20 : frozen])


@pytest.mark.parametrize(("kind", "floor"), [("OneBitAdam", 0.0), ("OneBitAdam", 1e-2), ("OneBitLamb", 1e-2)])
def test_a_variance_far_below_the_others_is_floored(kind: str, floor: float) -> None:
    """v is known: a gradient of 1 in most places, of 1e-3 in some, of 0 in one."""
    grad = torch.tensor([1.0] * 6 + [1e-3] * 2 + [0.0])
    p = nn.Parameter(torch.zeros(9))
    optimizer = build(kind, [p], freeze_step=1, variance_floor=floor, zero_variance="hold", block_size=32)
    for _ in range(2):
        p.grad = grad.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    small = max(1e-6, floor * (6 + 2e-6) / 8)
    v = np.array([1.0] * 6 + [small] * 2)
    np.testing.assert_allclose(optimizer.state[p]["denominator"][:8], 1 / (np.sqrt(v) + 1e-8), rtol=1e-5)
    assert optimizer.state[p]["denominator"][8] == 0


def test_rare_words_do_not_blow_up_after_the_freeze() -> None:
    """Words as often as in language: the rarest had a gradient or two before the freeze. Without a floor the loss
    goes beyond 10."""
    torch.manual_seed(0)
    words = 500
    table, out = nn.Embedding(words, 32), nn.Linear(32, words)
    params = [*table.parameters(), *out.parameters()]
    optimizer = onebit.OneBitAdam(params, lr=2e-3, betas=(0.9, 0.98), freeze_step=300)
    source = torch.Generator().manual_seed(1)
    often, target = 1 / torch.arange(1, words + 1.0) ** 1.5, torch.randperm(words, generator=source)
    losses = []
    for _ in range(700):
        seen = torch.multinomial(often, 64, True, generator=source)
        loss = nn.functional.cross_entropy(out(table(seen)), target[seen])
        optimizer.zero_grad()
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-50:]) < np.mean(losses[250:300])
    assert float(table.weight.detach().abs().max()) < 8


@pytest.mark.parametrize(
    ("kind", "freeze_step", "warned"), [("OneBitAdam", "auto", 1), ("OneBitLamb", "auto", 1), ("OneBitAdam", 5, 0)]
)
def test_the_first_step_warns_of_runs_that_are_too_short_for_auto(
    kind: str, freeze_step: Any, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    p = nn.Parameter(torch.ones(40))
    optimizer = build(kind, [p], freeze_step=freeze_step, betas=(0.9, 0.98))
    for _ in range(3):
        p.grad = torch.ones(40)
        optimizer.step()
    texts = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(texts) == warned
    assert not warned or "after step 100 at the earliest" in texts[0]
