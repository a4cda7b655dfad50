"""A param group's mask: what it holds never moves, and everything else is as if its gradient had been 0.

The twin has no mask: its gradients are 0 where the other's parameters are held.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import internals
from tests.onebit.optim.contract import backward, options, resumes, skips, started
from tests.onebit.runs import Case, bits, build, frozen_name, kinds, on_ranks, parameters, refused, run, snapshot
from tests.ranks import group

SHAPES = ((40, 3), (33,), (2, 65))


def masks() -> list[Tensor | None]:
    """Some rows, all of a parameter but an element, and one parameter without a mask."""
    rows = torch.ones(SHAPES[0], dtype=torch.bool)
    rows[::3] = False
    one = torch.zeros(SHAPES[1], dtype=torch.bool)
    one[5] = True
    return [rows, one, None]


class Masked(Case):
    """What is held has gradients that are not finite in every other step; those of the twin are 0."""

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        found, held = super().gradients(rank, step), "mask" not in self.groups[0]
        for g, mask in zip(found, masks(), strict=True):
            if g is not None and mask is not None and (held or step % 2):
                g[~mask] = 0 if held else float("nan")
        return found


CASE = Masked(
    shapes=SHAPES, steps=11, groups=({"mask": masks()},),
    options={"freeze_step": 4, "block_size": 32, "zero_variance": "hold"},
)  # fmt: skip
SPACED = {"freeze_step": None, "var_update_scaler": 2}  # with full steps between compressed ones
LOCAL = {"var_freeze_step": 3, "local_step_scaler": 1, "local_step_clipper": 4, "var_update_scaler": 3}


def assert_held(params: list[nn.Parameter], first: list[Any]) -> None:
    for p, x, mask in zip(params, first, masks(), strict=True):
        assert mask is None or bits([p[~mask]]) == bits([x[~mask]]), "a held element has moved"


FLOOR, DECAY = {"zero_variance": "floor"}, {"weight_decay": 0.1}
TWINS = {  # ranks, kind, dtype, options; clipped where the name says so
    "Adam, clipped": (1, "OneBitAdam", "float32", {"freeze_step": 2}),
    "0/1 Adam, clipped": (1, "ZeroOneAdam", "float32", {"freeze_step": 2}),
    "Adam": (1, "OneBitAdam", "float32", {}),
    "Adam, floor, 16 bits": (1, "OneBitAdam", "bfloat16", FLOOR | DECAY),
    "LAMB, floor": (1, "OneBitLamb", "float32", FLOOR),
    "LAMB, tensor scale, 16 bits": (1, "OneBitLamb", "bfloat16", {"scale": "tensor"}),
    "0/1 Adam, tensor scale": (1, "ZeroOneAdam", "float32", {"scale": "tensor"} | FLOOR),
    "0/1 Adam, full steps": (1, "ZeroOneAdam", "float32", SPACED),
    "0/1 Adam, full steps, floor": (1, "ZeroOneAdam", "bfloat16", SPACED | FLOOR),
    "Adam on ranks": (3, "OneBitAdam", "float32", {"chunks": 2} | DECAY),
    "Adam without a copy": (3, "OneBitAdam", "bfloat16", {"master_weights": False}),
    "Adam, early": (2, "OneBitAdam", "float32", {"chunks": 2, "overlap": True}),
    "LAMB on ranks": (3, "OneBitLamb", "float32", {"reply": "direct"} | FLOOR),
    "LAMB, decay, early": (2, "OneBitLamb", "bfloat16", {"overlap": True} | DECAY),
    "0/1 Adam on ranks": (3, "ZeroOneAdam", "float32", {"chunks": 2} | DECAY),
    "0/1 Adam, full steps, early": (2, "ZeroOneAdam", "float32", SPACED | {"overlap": True}),
    "local steps": (2, "ZeroOneAdam", "float32", {"freeze_step": None} | LOCAL | DECAY),
}


@pytest.mark.parametrize(("name", "size"), [(name, row[0]) for name, row in TWINS.items()], ids=TWINS)
@on_ranks()
def test_what_is_held_never_moves_and_costs_the_others_nothing(rank: int, size: int, name: str) -> bytes:
    """Norms have no part of what is held. LAMB's have all of a parameter, and its decay: there the twin is another."""
    _, kind, dtype, own = TWINS[name]
    case, clip = options(CASE.but(kind=kind, dtype=dtype, steps=14), **own), "clipped" in name
    without = options(case.but(groups=({},)), zero_variance="hold", overlap=False)
    alike = kind != "OneBitLamb" or "weight_decay" not in own
    params, others, first = (case.parameters() for _ in range(3))
    masked, twin, alone = case.build(params, group()), without.build(others, group()), False
    for step in range(1, case.steps + 1):
        norms = []
        for of, optimizer, each in ((case, masked, params), (without, twin, others)):
            backward(of, rank, optimizer, each, step)
            norms.append(float(optimizer.clip_grad_norm_(0.1)) if clip else 1.0)
            with warnings.catch_warnings():  # what is held is no surprise; of the twin it has no variance
                warnings.simplefilter("error" if optimizer is masked else "ignore")
                optimizer.step()
        alone |= not masked.synchronized
        assert norms[0] == norms[1] > 0
        assert_held(params, first)
        for p, q, x, mask in zip(params, others, first, masks(), strict=True):
            free = torch.ones_like(p, dtype=torch.bool) if mask is None else mask
            assert not alike or bits([p[free]]) == bits([q[free]]), f"step {step}: the others differ"
            assert bits([p[free]]) != bits([x[free]])
            if "master" in masked.state[p]:
                assert bits([masked.state[p]["master"][~free]]) == bits([x[~free].float()])
    assert masked.compressing and masked.skipped_steps == 0
    assert alone == ("local_step_scaler" in own)
    masked.synchronize()
    assert_held(params, first)
    return bits(params)


@kinds
def test_skipped_steps_and_states_know_nothing_of_it(kind: str) -> None:
    case = CASE.but(kind=kind)
    skips(0, 1, case, ((3, 0, float("inf")), (7, 0, float("nan"))))
    resumes(0, 1, case, (3, 6), False)
    optimizer = case.build(case.parameters())
    assert not any("mask" in g for g in optimizer.state_dict()["param_groups"] + optimizer.param_groups)


@pytest.mark.parametrize("saved_after", [3, 8])
@kinds
def test_a_state_from_elsewhere_does_not_move_it(kind: str, saved_after: int) -> None:
    """The state is of stage 1 or 2. What was left out of messages there is in no message here."""
    case, first = CASE.but(kind=kind), CASE.parameters()
    _, whole = started(Case(kind, SHAPES, options=case.options), saved_after)
    params, masked = started(case, 0)
    masked.load_state_dict(snapshot(whole.state_dict()))
    run(case, 0, masked, params, saved_after + 1, saved_after + 5)
    assert masked.compressing
    assert_held(params, first)
    [state], [exchange] = internals.states(masked), internals.exchanges(masked)
    left_out = exchange.residual.left_out()
    for i, (p, mask) in enumerate(zip(params[:2], masks(), strict=False)):
        frozen = state.view(frozen_name(kind), i)
        assert mask is not None and bool((frozen[~mask] == 0).all()) and bool((frozen[mask] != 0).all())
        assert not state.cut(left_out, i).view_as(p)[~mask].any()


def test_a_permuted_parameter_and_a_group_added_later() -> None:
    p = nn.Parameter(torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last))
    mask = torch.rand(p.shape) < 0.5
    first, other = p.detach().clone(), nn.Parameter(torch.ones(7))
    optimizer = build("OneBitAdam", [other], lr=1e-2, freeze_step=3, weight_decay=0.1)
    given = {"params": [p], "mask": mask}
    optimizer.add_param_group(given)
    for _ in range(6):
        p.grad, other.grad = torch.randn(p.shape), torch.randn(7)
        optimizer.step()
    assert bits([p[~mask]]) == bits([first[~mask]]) and bits([p[mask]]) != bits([first[mask]])
    assert not p.is_contiguous()
    assert given["mask"] is mask, "what the user gave is the user's"


def test_a_mask_that_does_not_fit_or_is_given_later_is_refused() -> None:
    ones = torch.ones(3, 2, dtype=torch.bool)
    for mask, *parts in (
        ([ones.float(), None], "the mask of parameter 0 is torch.float32 of shape (3, 2)", "torch.bool"),
        ([ones.T, None], "is torch.bool of shape (2, 3)", "shape (3, 2)", "never moves"),
        ([None, [True] * 5], "the mask of parameter 1 is list", "torch.bool"),
        (ones, "1 masks for 2 parameters", "None for those that move as a whole"),
        ("all", "a str for 2 parameters"),
    ):
        with refused(ValueError, *parts):
            build("OneBitAdam", [{"params": parameters((3, 2), (5,)), "mask": mask}])
    optimizer = build("OneBitAdam")
    optimizer.param_groups[0]["mask"] = ones
    with refused(ValueError, "'mask'", "when the optimizer is built, or to add_param_group"):
        optimizer.step()
