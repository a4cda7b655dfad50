"""Parameters that are dense and permuted in memory, as channels_last has them.

A parameter is trained as the contiguous one that its memory is: the twin. `stored` are the twins, `shown` the permuted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from tests.checkpoints import Holder
from tests.onebit.optim.contract import backward, give, options, started
from tests.onebit.optim.test_parameter_changes import step_refused
from tests.onebit.runs import Case, bits, build, on_ranks, refused, run, same, snapshot, take
from tests.ranks import group

SHAPES = ((4, 2, 5, 3), (33,), (6, 7), (5, 1, 1, 9), (2, 2, 2, 2, 3))  # as they lie in memory
BACK = ((0, 3, 1, 2), (0,), (1, 0), (0, 3, 1, 2), (0, 4, 1, 2, 3))  # from memory to the shape
LOCAL = {"var_freeze_step": 3, "local_step_scaler": 1, "local_step_clipper": 4, "var_update_scaler": 3}
LIES: dict[str, Any] = {  # how gradients lie: as parameters do, or not
    "alike": lambda g: g,
    "contiguous": Tensor.contiguous,
    "scattered": lambda g: torch.stack([g, g], -1)[..., 0],
}


def shown(stored: list[Any]) -> list[Any]:
    return [t if t is None else t.detach().permute(back) for t, back in zip(stored, BACK, strict=True)]


def as_stored(tensors: list[Any]) -> list[Tensor]:
    """`shown` taken back."""
    return [t.detach().permute(sorted(range(len(b)), key=b.__getitem__)) for t, b in zip(tensors, BACK, strict=True)]


@dataclass(frozen=True)
class Permuted(Case):
    grads: str = "alike"  # how they lie; "stored": parameters and gradients of the twin

    def parameters(self) -> list[nn.Parameter]:
        stored = super().parameters()
        return stored if self.grads == "stored" else [nn.Parameter(p) for p in shown(stored)]

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        stored = super().gradients(rank, step)
        return stored if self.grads == "stored" else [g if g is None else LIES[self.grads](g) for g in shown(stored)]


CASE = Permuted(shapes=SHAPES, steps=9, options={"freeze_step": 3})


ALONE, LAMB, ZERO_ONE = CASE.but(missing=((2, 0, 0), (6, 0, 3))), CASE.but(kind="OneBitLamb"), "ZeroOneAdam"
CONTIGUOUS = CASE.but(grads="contiguous")
TWINS = {  # ranks, the case, its options; one rank with gradients "alike" is clipped
    "Adam": (1, ALONE.but(grads="contiguous"), {}),
    "Adam, clipped": (1, ALONE, {}),
    "Adam, 16 bits": (1, ALONE.but(dtype="bfloat16", grads="scattered"), {}),
    "LAMB": (1, ALONE.but(kind="OneBitLamb", grads="scattered"), {}),
    "LAMB, 16 bits": (1, ALONE.but(kind="OneBitLamb", dtype="bfloat16"), {}),
    "0/1 Adam": (1, ALONE.but(kind=ZERO_ONE), {}),
    "Adam, 3 ranks": (3, CONTIGUOUS, {"reply": 1, "chunks": 2}),
    "Adam, watched": (3, CONTIGUOUS, {"check_every": 1, "gradient_dtype": torch.bfloat16}),
    "LAMB, direct": (2, LAMB.but(grads="contiguous"), {"reply": "direct", "scale": "tensor"}),
    "LAMB of nodes, early": (4, LAMB.but(each=2), {"chunks": 2, "overlap": True}),
    "0/1 Adam, early": (2, CASE.but(kind=ZERO_ONE, dtype="bfloat16"), {"chunks": 2, "overlap": True}),
    "0/1 Adam of nodes": (4, CONTIGUOUS.but(kind=ZERO_ONE, each=2), {"chunks": 2}),
    "local steps": (2, CASE.but(kind=ZERO_ONE), {"freeze_step": None, **LOCAL, "weight_decay": 0.1}),
}


@pytest.mark.parametrize(("name", "size"), [(name, row[0]) for name, row in TWINS.items()], ids=TWINS)
@on_ranks()
def test_a_permuted_parameter_trains_as_what_lies_in_memory(rank: int, size: int, name: str) -> bytes:
    _, case, own = TWINS[name]
    case = options(case.but(steps=12), **own)
    twin, early = options(case.but(grads="stored"), overlap=False), "overlap" in case.options
    (stored, plain), (params, optimizer) = (started(each, 0, rank, size) for each in (twin, case))
    assert [p.is_contiguous() for p in params] == [False, True, False, True, False]
    memory, was_early = [p.data_ptr() for p in params], False
    for step in range(1, case.steps + 1):
        give(twin, stored, step, rank)
        if early:
            backward(case, rank, optimizer, params, step)
        else:
            give(case, params, step, rank)
        if size == 1 and case.grads == "alike":
            assert float(plain.clip_grad_norm_(0.5)) == float(optimizer.clip_grad_norm_(0.5))
        plain.step()
        optimizer.step()
        was_early |= optimizer.overlap.on
        assert bits(as_stored(params)) == bits(stored), step
    assert optimizer.compressing and was_early == early
    assert [p.data_ptr() for p in params] == memory
    for each in (optimizer, plain):
        each.synchronize()
    mine, others = (o.state_dict()["state"] for o in (optimizer, plain))
    for name in (name for name, value in mine[0].items() if value.shape == params[0].shape):
        own = [mine[i][name] for i in range(5)]
        assert [t.shape for t in own] == [p.shape for p in params]
        assert bits(as_stored(own)) == bits(others[i][name] for i in range(5))
    return bits(params)


def lay(values: Sequence[Tensor], how: str) -> list[nn.Parameter]:
    """New parameters with these values: as they lay, contiguous, or in another order."""
    if how == "alike":
        return [nn.Parameter(v.detach().clone()) for v in values]
    ends = (0, -1) if how == "other" else (0, 0)
    laid = [v.detach().transpose(*ends).clone(memory_format=torch.contiguous_format) for v in values]
    return [nn.Parameter(v.transpose(*ends)) for v in laid]


def test_a_memory_format_that_is_switched_holds_in_stage_1_and_is_an_error_in_stage_2() -> None:
    case = options(CASE, freeze_step=6)
    (others, _), params = started(case, 6), lay(case.parameters(), "contiguous")
    optimizer = case.build(params)
    run(case, 0, optimizer, params, 1, 3)
    for p, q in zip(params, others, strict=True):
        p.data = torch.empty_strided(q.shape, q.stride()).copy_(p)
    run(case, 0, optimizer, params, 4, 6)
    for p, q in zip(params, others, strict=True):
        assert 1 in p.shape or p.stride() == q.stride() == optimizer.state[p]["exp_avg"].stride()
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    run(case, 0, optimizer, params, 7, 7)
    permuted = [p.data for p in params]
    for p in params:
        p.data = p.data.contiguous()
    step_refused(optimizer, params, ValueError, "after the freeze", "memory format", "Put them back")
    for p, data in zip(params, permuted, strict=True):
        p.data = data
    before = bits(params)
    run(case, 0, optimizer, params, 8, 8)
    assert bits(params) != before


@on_ranks(3)
def test_ranks_with_other_memory_formats_are_told(rank: int) -> None:
    params = lay(CASE.parameters(), "alike" if rank == 1 else "contiguous")
    optimizer = CASE.build(params, group())
    give(CASE, params, 1, rank)
    order = "rank 1 has memory order 'parameter 0 of group 0 (shape (4, 3, 2, "
    step_refused(optimizer, params, ValueError, order, "where rank 0 has 'contiguous'")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 6)[:, ::2], torch.zeros(3, 1).expand(3, 4), torch.zeros(8, 8).t()[1:]]
)
def test_a_parameter_that_is_not_dense_is_refused(tensor: Tensor) -> None:
    named = f"parameter 1 (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
    with refused(ValueError, named, "not dense", "p.data.contiguous()"):
        build("OneBitAdam", [nn.Parameter(torch.ones(4)), nn.Parameter(tensor)])
    p = nn.Parameter(torch.ones(tensor.shape))
    optimizer = build("OneBitAdam", [p])
    p.data, p.grad = tensor, torch.ones(p.shape)
    with pytest.raises(ValueError, match="not dense"):
        optimizer.step()


# States


def go_on(case: Case, state: Any, values: list[Tensor], how: str, first: int, rank: int = 0, of: Any = None) -> Any:
    params = lay(values, how)
    optimizer = case.build(params, of)
    optimizer.load_state_dict(snapshot(state))
    for step in range(first, first + 3):  # as `recorded`
        take(case.but(grads="contiguous"), rank, optimizer, params, step)
        optimizer.synchronize()
    return params


def recorded(rank: int, size: int, case: Case) -> list[tuple[Any, list[Tensor]]]:
    """States and values after every step."""
    (params, optimizer), found = started(case, 0, rank, size), []
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        optimizer.synchronize()
        found.append((snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]))
    return found


def assert_near(found: list[Any], expected: list[Any], start: list[Tensor]) -> None:
    """Compare to a thousandth of the way."""
    for p, q, x in zip(found, expected, start, strict=True):
        assert float((p - q).detach().abs().max()) <= 1e-3 * float((q - x).detach().abs().max())


@pytest.mark.parametrize(("kind", "reply"), [("OneBitAdam", 1), ("OneBitLamb", "direct"), ("ZeroOneAdam", 1)])
@pytest.mark.filterwarnings("ignore:onebit. elements without a variance")
def test_a_state_loads_element_for_element(kind: str, reply: Any) -> None:
    """It does in stage 1, at its end and later. One block a parameter: what compression leaves out is the same in any
    order."""
    untouched = ((0, 2, 99), (2, 3, 99))  # elements without a variance
    own = {"freeze_step": 3, "block_size": 512, "zero_variance": "hold", "reply": reply}
    case = CASE.but(kind=kind, options=own, untouched=untouched, steps=10)
    saved = recorded(0, 1, case)
    for steps in (2, 3, 7):
        (state, values), (_, ends) = saved[steps - 1], saved[steps + 2]
        for how in ("alike", "contiguous", "other"):
            again = go_on(case, state, values, how, steps + 1)
            assert_near(again, ends, values)
            assert how != "alike" or bits(again) == bits(ends)


@pytest.mark.parametrize("reply", [1, "direct"])
@on_ranks(2)
def test_ranks_go_on_in_another_order(rank: int, size: int, reply: Any) -> bytes:
    case = options(CASE.but(steps=7), reply=reply, block_size=512)
    state, values = recorded(rank, size, case)[-1]
    expected, params = (go_on(case, state, values, how, 8, rank, group()) for how in ("alike", "contiguous"))
    assert_near(params, expected, values)
    return bits(params)


FLAT, FULL = {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}


@pytest.mark.parametrize(("tool", "was"), [({}, False), (FLAT, True), (FULL, True), (None, False), (None, True)])
@on_ranks(2)
def test_torchs_tools_carry_a_state_to_another_memory_format(rank: int, tool: Any, was: bool, tmp_path: Path) -> None:
    """The net has the other memory format, and its optimizer is in stage 2 too. torch's tools, which are
    torch.distributed.checkpoint (None) and others, carry the state; a load without them does it, too."""
    case = options(CASE.but(kind="OneBitLamb"), freeze_step=2, reply="direct")

    def after(steps: int, permuted: bool) -> tuple[Any, Any]:
        params = lay(case.parameters(), "alike" if permuted else "contiguous")
        optimizer = case.build(params, group())
        run(case, rank, optimizer, params, 1, steps)
        optimizer.synchronize()
        return Holder(params), optimizer

    net, optimizer = after(5, was)
    (one, by_tool), (other, by_hand) = (after(4, not was) for _ in range(2))
    for each in (one, other):
        each.load_state_dict(net.state_dict())
    by_hand.load_state_dict(snapshot(optimizer.state_dict()))
    if tool is None:
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, process_group=group())
        state = {"optimizer": by_tool.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, process_group=group())
        by_tool.load_state_dict(state["optimizer"])
    else:
        chosen = StateDictOptions(**tool)
        saved = snapshot(get_optimizer_state_dict(net, optimizer, options=chosen))
        set_optimizer_state_dict(one, by_tool, saved, options=chosen)
    assert same(snapshot(by_tool.state_dict()), snapshot(by_hand.state_dict()))
    for each, own in ((one, by_tool), (other, by_hand)):
        run(case, rank, own, list(each.parameters()), 6, 6)
    assert bits(one.parameters()) == bits(other.parameters())
