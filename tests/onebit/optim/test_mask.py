"""A param group's mask: what it holds never moves, and everything else is as if its gradient had been 0.

The twin has no mask: its gradients are 0 where the other's parameters are held.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.optim.contract import give
from tests.onebit.optim.simulation import on_ranks
from tests.onebit.runs import Case, assert_message, bits, build, frozen_name, kinds, options_of, parameters, snapshot
from tests.ranks import group, run_ranks

SHAPES = ((40, 3), (33,), (2, 65))
OPTIONS = {"lr": 1e-2, "block_size": 32, "chunks": 1, "freeze_step": 4, "variance_floor": 0.0, "zero_variance": "hold"}
CASE = Case(shapes=SHAPES, steps=11)
LOCAL = {"var_freeze_step": 3, "local_step_scaler": 1, "local_step_clipper": 4, "var_update_scaler": 3}


def masks() -> list[Tensor | None]:
    """Some rows, all of a parameter but an element, and one parameter without a mask."""
    rows = torch.ones(SHAPES[0], dtype=torch.bool)
    rows[::3] = False
    one = torch.zeros(SHAPES[1], dtype=torch.bool)
    one[5] = True
    return [rows, one, None]


def gradients(case: Case, rank: int, step: int, held: bool) -> list[Tensor | None]:
    found = case.gradients(rank, step)
    for g, mask in zip(found, masks(), strict=True):
        if g is not None and mask is not None and held:
            g[~mask] = 0
    return found


def one_step(case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], step: int, held: bool) -> None:
    for p, g in zip(params, gradients(case, rank, step, held), strict=True):
        p.grad = g
    optimizer.step()


def beside_its_twin(rank: int, size: int, case: Case, options: dict[str, Any], twins_too: bool) -> bytes:
    of = {"process_group": group()} if size > 1 else {}
    params, others = case.parameters(), case.parameters()
    chosen = {**OPTIONS, **options, **of}
    masked = build(case.kind, [{"params": params, "mask": masks()}], **chosen)
    twin = build(case.kind, others, **chosen | {"zero_variance": "hold"})
    first = case.parameters()
    for step in range(1, case.steps + 1):
        one_step(case, rank, masked, params, step, held=False)
        if twins_too:
            one_step(case, rank, twin, others, step, held=True)
        for p, q, x, mask in zip(params, others, first, masks(), strict=True):
            free = torch.ones_like(p, dtype=torch.bool) if mask is None else mask
            assert bits([p[~free]]) == bits([x[~free]]), "a held coordinate has moved"
            assert not twins_too or bits([p[free]]) == bits([q[free]]), f"step {step}: the others differ"
            assert bits([p[free]]) != bits([x[free]])
            if "master" in masked.state[p]:
                assert bits([masked.state[p]["master"][~free]]) == bits([x[~free].float()])
    assert masked.compressing
    return bits(params)


SPACED = {"freeze_step": None, "var_update_scaler": 2}  # with full steps between compressed ones
TWINS = {  # ranks, kind, dtype, options
    "Adam": (1, "OneBitAdam", "float32", {}),
    "Adam, floor, 16 bits": (1, "OneBitAdam", "bfloat16", {"zero_variance": "floor", "weight_decay": 0.1}),
    "LAMB, floor": (1, "OneBitLamb", "float32", {"zero_variance": "floor"}),
    "LAMB, tensor scale, 16 bits": (1, "OneBitLamb", "bfloat16", {"scale": "tensor"}),
    "0/1 Adam, tensor scale": (1, "ZeroOneAdam", "float32", {"scale": "tensor", "zero_variance": "floor"}),
    "0/1 Adam, full steps": (1, "ZeroOneAdam", "float32", SPACED),
    "0/1 Adam, full steps, floor": (1, "ZeroOneAdam", "bfloat16", {"zero_variance": "floor", **SPACED}),
    "Adam on ranks": (3, "OneBitAdam", "float32", {"reply": 1, "chunks": 2, "weight_decay": 0.1}),
    "Adam without a copy": (3, "OneBitAdam", "bfloat16", {"master_weights": False}),
    "LAMB on ranks": (3, "OneBitLamb", "float32", {"reply": "direct", "zero_variance": "floor"}),
    "LAMB, decay": (2, "OneBitLamb", "bfloat16", {"weight_decay": 0.1}),
    "0/1 Adam on ranks": (3, "ZeroOneAdam", "float32", {"reply": 1, "chunks": 2, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", TWINS)
def test_what_is_held_never_moves_and_costs_the_others_nothing(name: str) -> None:
    """LAMB's norms have all of a parameter, and its decay: there the twin is another."""
    size, kind, dtype, options = TWINS[name]
    case = CASE.but(kind=kind, dtype=dtype, steps=14)
    twins_too = not (kind == "OneBitLamb" and "weight_decay" in options)
    assert len(set(on_ranks(size, beside_its_twin, case, options, twins_too))) == 1


def local_steps(rank: int, size: int) -> bytes:
    case = CASE.but(kind="ZeroOneAdam", steps=13)
    params, first = case.parameters(), case.parameters()
    options = {name: value for name, value in OPTIONS.items() if name != "freeze_step"} | LOCAL
    optimizer = build(
        case.kind, [{"params": params, "mask": masks()}], weight_decay=0.1, process_group=group(), **options
    )
    alone = 0
    for step in range(1, case.steps + 1):
        one_step(case, rank, optimizer, params, step, held=False)
        alone += not optimizer.synchronized
    optimizer.synchronize()
    for p, x, mask in zip(params, first, masks(), strict=True):
        if mask is not None:
            assert bits([p[~mask]]) == bits([x[~mask]])
    assert alone > 0
    return bits(params)


def test_local_steps() -> None:
    assert len(set(run_ranks(2, local_steps))) == 1


@pytest.mark.parametrize(("kind", "freeze_step"), [("OneBitAdam", 1), ("OneBitAdam", 100), ("ZeroOneAdam", 1)])
def test_norms_have_no_part_of_it(kind: str, freeze_step: int) -> None:
    params, others = CASE.parameters(), CASE.parameters()
    options = {**OPTIONS, "freeze_step": freeze_step}
    masked, twin = build(kind, [{"params": params, "mask": masks()}], **options), build(kind, others, **options)
    for step in range(1, 4):
        norms = []
        for optimizer, own, held in ((masked, params, False), (twin, others, True)):
            for p, g in zip(own, gradients(CASE, 0, step, held), strict=True):
                p.grad = g
            norms.append(float(optimizer.clip_grad_norm_(0.1)))
            optimizer.step()
        assert norms[0] == norms[1] > 0
    assert masked.compressing == (freeze_step == 1)


@kinds
def test_a_bad_value_skips_the_step_unless_it_is_held(kind: str) -> None:
    params = CASE.parameters()
    optimizer = build(kind, [{"params": params, "mask": masks()}], **OPTIONS)
    for step in range(1, 9):
        give(CASE, params, step)
        params[0].grad[0, 0] = float("nan")  # held
        before = bits(params)
        optimizer.step()
        assert bits(params) != before
    params[0].grad[1, 1] = float("inf")
    before = bits(params)
    optimizer.step()
    assert (bits(params), optimizer.skipped_steps) == (before, 1)


@kinds
def test_a_state_has_no_mask_and_goes_on_under_one(kind: str) -> None:
    def built() -> tuple[list[nn.Parameter], Any]:
        params = CASE.parameters()
        return params, build(kind, [{"params": params, "mask": masks()}], **OPTIONS)

    params, optimizer = built()
    for step in range(1, 7):
        one_step(CASE, 0, optimizer, params, step, held=False)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert not any("mask" in g for g in optimizer.state_dict()["param_groups"] + optimizer.param_groups)
    file.seek(0)
    again, resumed = built()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    for step in range(7, 12):
        one_step(CASE, 0, optimizer, params, step, held=False)
        one_step(CASE, 0, resumed, again, step, held=False)
    assert bits(again) == bits(params)


@kinds
def test_moments_of_a_state_from_elsewhere_do_not_move_it(kind: str) -> None:
    params, others = CASE.parameters(), CASE.parameters()
    whole = build(kind, others, **OPTIONS)
    for step in range(1, 4):
        one_step(CASE, 0, whole, others, step, held=False)
    first = [p.detach().clone() for p in params]
    masked = build(kind, [{"params": params, "mask": masks()}], **OPTIONS)
    masked.load_state_dict(snapshot(whole.state_dict()))
    for step in range(4, 9):
        one_step(CASE, 0, masked, params, step, held=False)
    assert masked.compressing
    for p, x, mask in zip(params, first, masks(), strict=True):
        assert mask is None or bits([p[~mask]]) == bits([x[~mask]])
    frozen, mask = masked.state[params[0]][frozen_name(kind)], masks()[0]
    assert mask is not None and bool((frozen[~mask] == 0).all()) and bool((frozen[mask] != 0).all())


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


def overlapped(rank: int, size: int, kind: str) -> tuple[bytes, bool]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    mask = torch.ones(30, 16, dtype=torch.bool)
    mask[10:20] = False
    first = net[0].weight[10:20].detach().clone()
    ddp = DistributedDataParallel(net, process_group=group())
    options = options_of(kind, {"freeze_step": 3})
    optimizer = getattr(onebit, kind)(
        [{"params": net[0].parameters(), "mask": mask}, {"params": [p for m in net[1:] for p in m.parameters()]}],
        lr=1e-2, weight_decay=0.1, overlap=True, block_size=64, reply=1, process_group=group(), **options,
    )  # fmt: skip
    onebit.attach(ddp, optimizer)
    source = torch.Generator().manual_seed(rank)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randint(30, (8, 4), generator=source)).square().mean().backward()
        optimizer.step()
    return bits(net.parameters()), bits([net[0].weight[10:20]]) == bits([first])


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_with_overlap_under_ddp(kind: str) -> None:
    found = run_ranks(2, overlapped, kind)
    assert found[0] == found[1] and found[0][1]


def held_at_infinity(rank: int, size: int, kind: str, overlap: bool) -> tuple[int, bytes]:
    """sqrt at a held 0, whose gradient is inf."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.rand(64, 64) + 1)
    p.data[0, 0] = 0
    mask = torch.ones(64, 64, dtype=torch.bool)
    mask[0, 0] = False
    options = options_of(kind, {"freeze_step": 4}) | {"block_size": 64, "chunks": 2, "process_group": group()}
    optimizer = getattr(onebit, kind)([{"params": [p], "mask": mask}], overlap=overlap, **options)
    for _ in range(8):
        optimizer.zero_grad()
        (p.sqrt() * (1 + rank)).sum().backward()
        optimizer.step()
    return optimizer.skipped_steps, bits([p])


@pytest.mark.parametrize("kind", ["OneBitLamb", "ZeroOneAdam"])
def test_a_held_gradient_that_is_not_finite_skips_nothing_with_overlap_either(kind: str) -> None:
    plain, overlapping = (run_ranks(2, held_at_infinity, kind, overlap) for overlap in (False, True))
    assert plain == overlapping and [skipped for skipped, _ in plain] == [0, 0]


@kinds
def test_a_mask_that_comes_with_a_load_leaves_the_held_out_of_scales(kind: str) -> None:
    """After a hundred steps under it scales are those of a run without what is held."""

    def step(optimizer: Any, p: nn.Parameter, number: int) -> None:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) + 0.5
        optimizer.step()

    p = nn.Parameter(torch.zeros(64, 32))
    options = options_of(kind, {"freeze_step": 4}) | {"lr": 1e-3, "block_size": 2048}
    optimizer = getattr(onebit, kind)([p], **options)
    for number in range(8):
        step(optimizer, p, number)
    mask = torch.zeros(64, 32, dtype=torch.bool)
    mask[0] = True
    q, first = nn.Parameter(p.detach().clone()), p.detach().clone()
    masked = getattr(onebit, kind)([{"params": [q], "mask": mask}], **options)
    masked.load_state_dict(optimizer.state_dict())
    for number in range(8, 108):
        step(optimizer, p, number)
        step(masked, q, number)
    (own,), (everything,) = masked.diagnostics().values(), optimizer.diagnostics().values()
    assert own["momentum_scale"] == pytest.approx(everything["momentum_scale"], rel=0.3)
    assert torch.equal(q[1:], first[1:]) and not torch.equal(q[0], first[0])


def one_rank_masked(rank: int, size: int) -> str:
    params = parameters((4, 4), (3,))
    mask = torch.eye(4, dtype=torch.bool) if rank else ~torch.eye(4, dtype=torch.bool)
    optimizer = build("OneBitAdam", [{"params": params, "mask": [mask, None]}], process_group=group())
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    return str(caught.value)


def test_ranks_with_other_masks_are_told() -> None:
    for text in run_ranks(2, one_rank_masked):
        assert "rank 1 has masks '1 (checksum" in text


WRONG: list[tuple[Any, list[str]]] = [
    ([torch.ones(3, 2), None], ["the mask of parameter 0 is torch.float32 of shape (3, 2)", "torch.bool"]),
    ([torch.ones(2, 3, dtype=torch.bool), None], ["is torch.bool of shape (2, 3)", "shape (3, 2)", "never moves"]),
    ([None, [True] * 5], ["the mask of parameter 1 is list", "torch.bool"]),
    (torch.ones(3, 2, dtype=torch.bool), ["1 masks for 2 parameters", "None for those that move as a whole"]),
    ("all", ["a str for 2 parameters"]),
]


@pytest.mark.parametrize(("mask", "parts"), WRONG, ids=str)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        build("OneBitAdam", [{"params": parameters((3, 2), (5,)), "mask": mask}])
    assert_message(caught, *parts)


def test_a_mask_given_later_is_an_error() -> None:
    params = parameters((3, 2))
    optimizer = build("OneBitAdam", params)
    optimizer.param_groups[0]["mask"] = torch.ones(3, 2, dtype=torch.bool)
    params[0].grad = torch.ones(3, 2)
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    assert_message(caught, "'mask'", "when the optimizer is built, or to add_param_group")
