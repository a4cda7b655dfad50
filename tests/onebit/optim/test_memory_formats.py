"""Parameters that are dense and permuted in memory, as channels_last has them.

A parameter is trained as the contiguous one that its memory is: the twin. `stored` are the twins, `shown` the permuted.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.optim import simulation
from tests.onebit.optim.contract import backward, give, options, started
from tests.onebit.runs import Case, arrays, assert_message, bits, build, on_ranks, run, same, snapshot, take
from tests.ranks import group, run_ranks

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


def twins(rank: int, size: int, case: Case) -> bytes:
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
    if optimizer.synchronized:
        kept, theirs = (
            [o.state[p].get("exp_avg_sq", o.state[p].get("denominator")) for p in own]
            for o, own in ((optimizer, params), (plain, stored))
        )
        assert [t.shape for t in kept] == [p.shape for p in params]
        assert bits(as_stored(kept)) == bits(theirs)
        mine, others = (onebit.adamw_state(o.state_dict())["state"] for o in (optimizer, plain))
        for name in ("exp_avg", "exp_avg_sq"):
            assert bits(as_stored([mine[i][name] for i in range(5)])) == bits(others[i][name] for i in range(5))
    return bits(params)


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


@pytest.mark.parametrize("name", TWINS)
def test_a_permuted_parameter_trains_as_what_lies_in_memory(name: str) -> None:
    size, case, own = TWINS[name]
    ends = simulation.on_ranks(size, twins, options(case.but(steps=12), **own))
    assert len(set(ends)) == 1 or name == "local steps"


@on_ranks(3)
def test_the_watch_finds_a_rank_that_holds_others(rank: int, size: int) -> None:
    case = options(CASE, check_every=1, chunks=1)
    params, optimizer = started(case, case.steps - 1, rank, size)
    if rank == 1:
        with torch.no_grad():
            params[0].data[1, 2, 1, 3] += 1
            optimizer.state[params[2]]["denominator"].data[3, 2] *= 2
    with pytest.raises(onebit.DivergenceError) as caught:
        take(case, rank, optimizer, params, case.steps)
    differs = f"parameter 0 of group 0 (shape {tuple(params[0].shape)}) has other values on rank 1 than on rank 0"
    others = "and 2 more tensors differ on rank 1 (the first is parameter 2 of group 0"  # and its denominator
    assert_message(caught, differs, others)


# Models


def conv_net(channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3, groups=2), nn.Tanh(), nn.AvgPool2d(6),
        nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last) if channels_last else net


def conv_steps(net: nn.Module, rank: int, optimizer: Any, first: int, last: int, channels_last: bool) -> float:
    loss = torch.zeros(())
    for step in range(first, last):
        data = torch.Generator().manual_seed(100 * step + rank)
        images, target = torch.randn(6, 3, 8, 8, generator=data), torch.randn(6, 4, generator=data)
        optimizer.zero_grad()
        images = images.to(memory_format=torch.channels_last) if channels_last else images
        loss = (net(images) - target).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def conv_trained(rank: int, kind: str, last: int, channels_last: bool, ddp: bool, **own: Any) -> tuple[Any, Any, Any]:
    """A net, the same within DDP or not, and its optimizer after so many steps."""
    net = wrapped = conv_net(channels_last)
    optimizer = build(kind, net.parameters(), lr=3e-3, process_group=group(), **own)
    if ddp:
        wrapped = DistributedDataParallel(net, process_group=group(), gradient_as_bucket_view=True, bucket_cap_mb=0.002)
        onebit.attach(wrapped, optimizer)
    conv_steps(wrapped, rank, optimizer, 0, last, channels_last)
    return net, wrapped, optimizer


def conv_run(rank: int, size: int, kind: str, channels_last: bool, own: dict[str, Any], folder: str) -> Any:
    """DDP with attach: values after stage 1 and at the end, the same of a run that goes on from a checkpoint."""
    net, ddp, optimizer = conv_trained(rank, kind, 4, channels_last, True, freeze_step=4, **own)
    stage_1 = arrays(net.parameters())
    conv_steps(ddp, rank, optimizer, 4, 8, channels_last)
    onebit.save(folder, net, optimizer)
    loss = conv_steps(ddp, rank, optimizer, 8, 12, channels_last)
    assert optimizer.compressing
    assert channels_last != all(p.is_contiguous() for p in net.parameters())
    again, wrapped, other = conv_trained(rank, kind, 0, channels_last, True, freeze_step=4, **own)
    onebit.load(folder, again, other)
    conv_steps(wrapped, rank, other, 8, 12, channels_last)
    assert bits(again.parameters()) == bits(net.parameters())
    return stage_1, bits(net.parameters()), loss


EARLY = {"overlap": True, "chunks": 2}


@pytest.mark.parametrize(
    ("kind", "own"),
    [("OneBitAdam", EARLY | {"block_size": 64, "reply": 1}), ("OneBitLamb", {}), ("ZeroOneAdam", EARLY)],
)
def test_a_channels_last_net_under_ddp(kind: str, own: dict[str, Any], tmp_path: Path) -> None:
    """The same bits on all ranks, the numbers of the contiguous net, and a checkpoint that goes on bit for bit."""
    found, expected = (run_ranks(2, conv_run, kind, last, own, str(tmp_path / f"{last}")) for last in (True, False))
    assert len({values for _, values, _ in found}) == 1
    for one, other in zip(found[0][0], expected[0][0], strict=True):
        assert abs(one - other).max() <= 1e-5 * abs(other).max()
    assert found[0][2] == pytest.approx(expected[0][2], rel=0.02)


def test_a_memory_format_that_is_switched_holds_in_stage_1_and_is_an_error_in_stage_2() -> None:
    nets = conv_net(False), conv_net(True)
    optimizers = [build("OneBitAdam", net.parameters(), lr=1e-2, freeze_step=6) for net in nets]
    for step in range(7):
        if step == 3:
            nets[0].to(memory_format=torch.channels_last)
        for net, optimizer in zip(nets, optimizers, strict=True):
            conv_steps(net, 0, optimizer, step, step + 1, True)
        if step == 5:
            for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert p.stride() == q.stride() == optimizers[0].state[p]["exp_avg"].stride()
                torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    nets[0].to(memory_format=torch.contiguous_format)
    before = bits(nets[0].parameters())
    with pytest.raises(ValueError) as caught:
        optimizers[0].step()
    assert_message(caught, "after the freeze", "memory format", "Put them back")
    assert bits(nets[0].parameters()) == before
    nets[0].to(memory_format=torch.channels_last)
    optimizers[0].step()
    assert bits(nets[0].parameters()) != before


@on_ranks(3)
def test_ranks_with_other_memory_formats_are_told(rank: int) -> None:
    net = conv_net(rank == 1)
    optimizer = build("OneBitAdam", net.named_parameters(), process_group=group())
    with pytest.raises(ValueError) as caught:
        conv_steps(net, rank, optimizer, 0, 1, False)
    of_rank_1 = "rank 1 has memory order 'parameter 0.weight (0, 2, 3, 1)"
    assert_message(caught, of_rank_1, "where rank 0 has 'contiguous'")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 6)[:, ::2], torch.zeros(3, 1).expand(3, 4), torch.zeros(8, 8).t()[1:]]
)
def test_a_parameter_that_is_not_dense_is_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError) as caught:
        build("OneBitAdam", [nn.Parameter(torch.ones(4)), nn.Parameter(tensor)])
    shape, strides = tuple(tensor.shape), tensor.stride()
    assert_message(caught, f"parameter 1 (shape {shape}, strides {strides})", "not dense", "p.data.contiguous()")
    p = nn.Parameter(torch.ones(tensor.shape))
    optimizer = build("OneBitAdam", [p])
    p.data, p.grad = tensor, torch.ones(p.shape)
    with pytest.raises(ValueError, match="not dense"):
        optimizer.step()


# States


def lay(values: list[Tensor], how: str) -> list[nn.Parameter]:
    """New parameters with these values: as they lay, contiguous, or in another order."""
    if how == "alike":
        return [nn.Parameter(v.clone()) for v in values]
    ends = (0, -1) if how == "other" else (0, 0)
    laid = [v.transpose(*ends).clone(memory_format=torch.contiguous_format) for v in values]
    return [nn.Parameter(v.transpose(*ends)) for v in laid]


def go_on(case: Case, state: Any, values: list[Tensor], how: str, first: int, rank: int = 0, of: Any = None) -> Any:
    params = lay(values, how)
    optimizer = case.build(params, of)
    optimizer.load_state_dict(snapshot(state))
    run(case.but(grads="contiguous"), rank, optimizer, params, first, first + 2)
    return params


def recorded(rank: int, size: int, case: Case) -> list[tuple[Any, list[Tensor]]]:
    """States and values after every step."""
    (params, optimizer), found = started(case, 0, rank, size), []
    for step in range(1, case.steps + 1):
        take(case, rank, optimizer, params, step)
        found.append((snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]))
    return found


def assert_near(found: list[Any], expected: list[Any], start: list[Tensor]) -> None:
    """To a thousandth of the way."""
    for p, q, x in zip(found, expected, start, strict=True):
        assert float((p - q).detach().abs().max()) <= 1e-3 * float((q - x).detach().abs().max())


@pytest.mark.parametrize(("kind", "reply"), [("OneBitAdam", 1), ("OneBitLamb", "direct"), ("ZeroOneAdam", 1)])
@pytest.mark.filterwarnings("ignore:elements without a variance", "error:the state does not hold")
def test_a_state_loads_element_for_element(kind: str, reply: Any) -> None:
    """In stage 1, at its end and later. One block a parameter: what compression leaves out is the same in any order."""
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


@pytest.mark.parametrize(
    ("kind", "reply", "each"), [("OneBitAdam", 1, 1), ("OneBitLamb", "direct", 1), ("ZeroOneAdam", 1, 2)]
)
@pytest.mark.filterwarnings("error:the state does not hold")
def test_the_states_of_ranks_put_together_load_in_any_order(kind: str, reply: Any, each: int) -> None:
    """Pieces of residuals are in small blocks, which lie elsewhere in another order."""
    case = options(CASE.but(kind=kind, each=each, steps=7), reply=reply)
    found = run_ranks(2 * each, recorded, case)
    state, values = onebit.merge_states([own[-1][0] for own in found]), found[0][-1][1]
    alone = options(case.but(each=1), block_size=512)
    expected = go_on(alone, state, values, "alike", 8)
    for how in ("contiguous", "other"):
        assert_near(go_on(alone, state, values, how, 8), expected, values)


@pytest.mark.parametrize("reply", [1, "direct"])
@on_ranks(2)
def test_a_ranks_own_state_in_another_order(rank: int, size: int, reply: Any) -> bytes:
    """What servers have left out lies elsewhere: without the others' states it is lost, which is said."""
    case = options(CASE.but(steps=7), reply=reply)
    state, values = recorded(rank, size, case)[-1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = go_on(case, state, values, "contiguous", 8, rank, group())
    assert all(bool(p.isfinite().all()) for p in params)
    assert len(caught) == (reply == 1)
    assert all("does not hold the residuals of all 2 ranks" in str(w.message) for w in caught)
    return bits(params)


@pytest.mark.parametrize(
    ("order", "error"),
    [(torch.tensor([0, 1, 1, 2]), ValueError), (torch.tensor([0, 1]), ValueError), (torch.ones(4), TypeError),
     ("last", TypeError)],
)  # fmt: skip
def test_an_order_that_cannot_be_is_refused(order: Any, error: type[Exception]) -> None:
    _, optimizer = started(CASE, 6)
    kept, state = (snapshot(optimizer.state_dict()) for _ in range(2))
    state["state"][0]["memory_order"] = order
    with pytest.raises(error, match="memory_order of parameter 0"):
        optimizer.load_state_dict(state)
    assert same(snapshot(optimizer.state_dict()), kept)


FLAT, FULL = {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}


@pytest.mark.parametrize(("tool", "was"), [({}, False), (FLAT, True), (FULL, True), (None, False), (None, True)])
def test_torchs_tools_carry_a_state_to_another_memory_format(tool: Any, was: bool, tmp_path: Path) -> None:
    run_ranks(2, carried, was, tool, str(tmp_path / "saved"))


def carried(rank: int, size: int, was: bool, tool: dict[str, bool] | None, folder: str) -> None:
    """Into a net of the other memory format, whose optimizer is in stage 2 too: by torch's tools, which are
    torch.distributed.checkpoint (None) and others, and without them."""

    of, own = (rank, "OneBitLamb"), {"freeze_step": 2, "reply": "direct"}
    net, _, optimizer = conv_trained(*of, 5, was, False, **own)
    (one, _, by_tool), (other, _, by_hand) = (conv_trained(*of, 4, not was, False, **own) for _ in range(2))
    for each in (one, other):
        each.load_state_dict(net.state_dict())
    by_hand.load_state_dict(snapshot(optimizer.state_dict()))
    if tool is None:
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, process_group=group())
        onebit.make_room(folder, one, by_tool)
        state = {"optimizer": by_tool.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group())
        by_tool.load_state_dict(state["optimizer"])
    else:
        chosen = StateDictOptions(**tool)
        saved = snapshot(get_optimizer_state_dict(net, optimizer, options=chosen))
        if chosen.flatten_optimizer_state_dict:
            onebit.make_room(saved, one, by_tool)
        set_optimizer_state_dict(one, by_tool, saved, options=chosen)
    assert same(snapshot(by_tool.state_dict()), snapshot(by_hand.state_dict()))
    conv_steps(one, rank, by_tool, 5, 6, not was)
    conv_steps(other, rank, by_hand, 5, 6, not was)
    assert bits(one.parameters()) == bits(other.parameters())
