"""Parameters that are dense and permuted in memory, as channels_last has them.

A parameter is trained as the contiguous one that its memory is: the twin. `stored` are the twins, `shown` the permuted.
"""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import onebit
from tests.onebit.runs import Case, arrays, assert_message, bits, build, kinds, run, same, snapshot, take
from tests.ranks import group, run_ranks

SHAPES = ((4, 2, 5, 3), (33,), (6, 7), (5, 1, 1, 9), (2, 2, 2, 2, 3))  # as they lie in memory
BACK = ((0, 3, 1, 2), (0,), (1, 0), (0, 3, 1, 2), (0, 4, 1, 2, 3))  # from memory to the shape
CASE = Case(shapes=SHAPES, steps=9, options={"freeze_step": 3})
LOCAL = {"var_freeze_step": 3, "local_step_scaler": 1, "local_step_clipper": 4, "var_update_scaler": 3}


def shown(stored: list[Any]) -> list[Any]:
    return [t if t is None else t.permute(back) for t, back in zip(stored, BACK, strict=True)]


def as_stored(tensors: list[Any]) -> list[Tensor]:
    return [
        t.detach().permute([back.index(d) for d in range(len(back))]) for t, back in zip(tensors, BACK, strict=True)
    ]


def permuted(case: Case) -> list[nn.Parameter]:
    found = [nn.Parameter(p) for p in shown([p.detach() for p in case.parameters()])]
    assert [p.is_contiguous() for p in found] == [False, True, False, True, False]
    return found


def step_of(case: Case, rank: int, optimizer: Any, params: list[nn.Parameter], step: int, grads: str) -> None:
    """grads: "alike": as the parameters lie; "contiguous"; "scattered": every second element of others."""
    for p, g in zip(params, shown(case.gradients(rank, step)), strict=True):
        if g is not None and grads == "contiguous":
            g = g.contiguous()
        elif g is not None and grads == "scattered":
            g = torch.stack([g, g], -1)[..., 0]
        p.grad = g
    optimizer.step()


def twins(rank: int, size: int, case: Case, grads: str) -> bytes:
    of = group() if size > 1 else None
    stored, params = case.parameters(), permuted(case)
    plain, optimizer = case.build(stored, of), case.build(params, of)
    memory = [p.data_ptr() for p in params]
    for step in range(1, case.steps + 1):
        take(case, rank, plain, stored, step)
        step_of(case, rank, optimizer, params, step, grads)
        assert bits(as_stored(params)) == bits(stored), step
    assert optimizer.compressing
    assert [p.data_ptr() for p in params] == memory
    if optimizer.synchronized:
        kept = [optimizer.state[p].get("exp_avg_sq", optimizer.state[p].get("denominator")) for p in params]
        theirs = [plain.state[p].get("exp_avg_sq", plain.state[p].get("denominator")) for p in stored]
        assert [t.shape for t in kept] == [p.shape for p in params]
        assert bits(as_stored(kept)) == bits(theirs)
    return bits(params)


@kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grads", ["alike", "contiguous", "scattered"])
def test_a_permuted_parameter_trains_as_what_lies_in_memory(kind: str, dtype: str, grads: str) -> None:
    missing = ((2, 0, 0), (6, 0, 3))
    twins(0, 1, CASE.but(kind=kind, dtype=dtype, missing=missing), grads)


@kinds
@pytest.mark.parametrize(
    ("size", "each", "options"),
    [
        (3, 1, {"reply": 1, "chunks": 2}),
        (2, 1, {"reply": "direct", "scale": "tensor"}),
        (4, 2, {"chunks": 2}),
        (3, 1, {"check_every": 1, "gradient_dtype": torch.bfloat16}),
    ],
    ids=["3 ranks", "direct", "nodes", "watched"],
)
def test_so_do_ranks(kind: str, size: int, each: int, options: dict[str, Any]) -> None:
    case = CASE.but(kind=kind, each=each, options={**CASE.options, **options})
    assert len(set(run_ranks(size, twins, case, "contiguous"))) == 1


def test_so_do_local_steps() -> None:
    case = CASE.but(kind="ZeroOneAdam", options={**LOCAL, "weight_decay": 0.1}, steps=12)
    run_ranks(2, twins, case, "alike")


def overlapped(rank: int, size: int, case: Case) -> list[bytes]:
    """With messages that leave in backward and without, and the twins."""
    found = []
    for overlap, lay in ((True, True), (False, True), (True, False)):
        params = permuted(case) if lay else case.parameters()
        optimizer = case.but(options={**case.options, "overlap": overlap}).build(params, group())
        for step in range(1, case.steps + 1):
            optimizer.zero_grad()
            grads = case.gradients(rank, step)
            loss = [(p * g).sum() for p, g in zip(params, shown(grads) if lay else grads, strict=True)]
            sum(loss, torch.zeros(())).backward()
            optimizer.step()
        assert optimizer.overlap.on == (overlap and optimizer.kind == "1 bit")
        found.append(bits(as_stored(params) if lay else params))
    return found


@kinds
@pytest.mark.parametrize(("size", "each"), [(2, 1), (4, 2)])
def test_so_do_messages_that_leave_early(kind: str, size: int, each: int) -> None:
    case = CASE.but(kind=kind, each=each, options={**CASE.options, "chunks": 2})
    assert len({each for found in run_ranks(size, overlapped, case) for each in found}) == 1


def clipped(case: Case, params: list[nn.Parameter], lay: bool) -> list[float]:
    optimizer, norms = case.build(params), []
    for step in range(1, 7):
        grads = case.gradients(0, step)
        for p, g in zip(params, shown(grads) if lay else grads, strict=True):
            p.grad = g
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
    return norms


@kinds
def test_clipping(kind: str) -> None:
    case = CASE.but(kind=kind)
    stored, params = case.parameters(), permuted(case)
    assert clipped(case, stored, False) == clipped(case, params, True)
    assert bits(as_stored(params)) == bits(stored)


# Models


def conv_net(channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 6, 3, groups=2), nn.Tanh(), nn.AvgPool2d(6),
        nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last) if channels_last else net


def conv_loss(net: nn.Module, rank: int, step: int, channels_last: bool) -> Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    images, target = torch.randn(6, 3, 8, 8, generator=data), torch.randn(6, 4, generator=data)
    return (net(images.to(memory_format=torch.channels_last) if channels_last else images) - target).square().mean()


def conv_run(
    rank: int, size: int, kind: str, channels_last: bool, options: dict[str, Any], folder: str | None = None
) -> Any:
    """DDP with attach: values after stage 1 and at the end; with a folder also of a run that goes on from it."""

    def built() -> tuple[nn.Module, nn.Module, Any]:
        net = conv_net(channels_last)
        ddp = DistributedDataParallel(net, process_group=group(), gradient_as_bucket_view=True, bucket_cap_mb=0.002)
        optimizer = build(kind, net.parameters(), lr=3e-3, freeze_step=4, process_group=group(), **options)
        onebit.attach(ddp, optimizer)
        return net, ddp, optimizer

    def steps(ddp: nn.Module, optimizer: Any, first: int, last: int) -> float:
        loss = torch.zeros(())
        for step in range(first, last):
            optimizer.zero_grad()
            loss = conv_loss(ddp, rank, step, channels_last)
            loss.backward()
            optimizer.step()
        return loss.item()

    net, ddp, optimizer = built()
    steps(ddp, optimizer, 0, 4)
    stage_1 = arrays(list(net.parameters()))
    steps(ddp, optimizer, 4, 8)
    if folder is not None:
        onebit.save(folder, net, optimizer)
    loss = steps(ddp, optimizer, 8, 12)
    assert optimizer.compressing
    assert channels_last != all(p.is_contiguous() for p in net.parameters())
    if folder is not None:
        again, wrapped, other = built()
        onebit.load(folder, again, other)
        steps(wrapped, other, 8, 12)
        assert bits(again.parameters()) == bits(net.parameters())
    return stage_1, bits(net.parameters()), loss


@kinds
@pytest.mark.parametrize("options", [{}, {"overlap": True, "block_size": 64, "chunks": 2, "reply": 1}])
def test_a_channels_last_net_under_ddp(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The same bits on all ranks, the numbers of the contiguous net, and a checkpoint that goes on bit for bit."""
    found = run_ranks(2, conv_run, kind, True, options, str(tmp_path / "saved"))
    expected = run_ranks(2, conv_run, kind, False, options)
    assert len({values for _, values, _ in found}) == 1
    for one, other in zip(found[0][0], expected[0][0], strict=True):
        assert abs(one - other).max() <= 1e-5 * abs(other).max()
    assert found[0][2] == pytest.approx(expected[0][2], rel=0.02)


@kinds
def test_a_memory_format_that_is_switched_in_stage_1_holds_from_the_next_step_on(kind: str) -> None:
    nets = conv_net(False), conv_net(True)
    optimizers = [build(kind, net.parameters(), lr=1e-2, freeze_step=50) for net in nets]
    for step in range(6):
        if step == 3:
            nets[0].to(memory_format=torch.channels_last)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            conv_loss(net, 0, step, True).backward()
            optimizer.step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert p.stride() == q.stride()
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert optimizers[0].state[p]["exp_avg"].stride() == q.stride()


@kinds
def test_a_memory_format_that_is_switched_in_stage_2_is_an_error(kind: str) -> None:
    net = conv_net(False)
    optimizer = build(kind, net.parameters(), freeze_step=1)
    for step in range(3):
        conv_loss(net, 0, step, False).backward()
        optimizer.step()
    net.to(memory_format=torch.channels_last)
    before = bits(net.parameters())
    with pytest.raises(ValueError) as caught:
        optimizer.step()
    assert_message(caught, "after the freeze", "memory format", "Put them back")
    assert bits(net.parameters()) == before
    net.to(memory_format=torch.contiguous_format)
    optimizer.step()
    assert bits(net.parameters()) != before


def one_rank_channels_last(rank: int, size: int, kind: str) -> str:
    net = conv_net(rank == 1)
    optimizer = build(kind, net.named_parameters(), process_group=group())
    conv_loss(net, rank, 0, False).backward()
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_memory_formats_are_told() -> None:
    for text in run_ranks(3, one_rank_channels_last, "OneBitAdam"):
        assert "rank 1 has memory order 'parameter 0.weight (0, 2, 3, 1)" in text
        assert "where rank 0 has 'contiguous'" in text


@kinds
@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 6)[:, ::2], torch.zeros(3, 1).expand(3, 4), torch.zeros(8, 8).t()[1:]],
    ids=["a slice", "expanded", "a slice of a permuted one"],
)  # fmt: skip
def test_a_parameter_that_is_not_dense_is_refused(kind: str, tensor: Tensor) -> None:
    with pytest.raises(ValueError) as caught:
        build(kind, [nn.Parameter(torch.ones(4)), nn.Parameter(tensor)])
    shape, strides = tuple(tensor.shape), tensor.stride()
    assert_message(caught, f"parameter 1 (shape {shape}, strides {strides})", "not dense", "p.data.contiguous()")
    p = nn.Parameter(torch.ones(tensor.shape))
    optimizer = build(kind, [p])
    p.data = tensor.clone().as_strided(tensor.shape, tensor.stride()) if 0 in strides else tensor
    p.grad = torch.ones(p.shape)
    with pytest.raises(ValueError, match="not dense"):
        optimizer.step()


def flipped_and_repaired(rank: int, size: int, case: Case) -> bytes:
    params = permuted(case)
    optimizer = case.build(params, group())
    for step in range(1, case.steps):
        step_of(case, rank, optimizer, params, step, "alike")
    if rank == 1:
        with torch.no_grad():
            params[0].data[1, 2, 1, 3] += 1
            optimizer.state[params[2]]["denominator"].data[3, 2] *= 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step_of(case, rank, optimizer, params, case.steps, "alike")
    return bits(params) + bits([optimizer.state[params[2]]["denominator"]])


def test_the_watch_repairs_them() -> None:
    case = CASE.but(options={**CASE.options, "check_every": 1, "on_divergence": "broadcast", "chunks": 1})
    assert len(set(run_ranks(3, flipped_and_repaired, case))) == 1


# States


def lay(values: list[Tensor], how: str) -> list[nn.Parameter]:
    """New parameters with these values: as they lay, contiguous, or in another order."""
    if how == "alike":
        return [nn.Parameter(v.clone()) for v in values]
    if how == "contiguous":
        return [nn.Parameter(v.clone(memory_format=torch.contiguous_format)) for v in values]
    turned = [v.transpose(0, -1).clone(memory_format=torch.contiguous_format) for v in values]
    return [nn.Parameter(v.transpose(0, -1)) for v in turned]


def go_on(case: Case, state: Any, values: list[Tensor], how: str, first: int) -> tuple[list[nn.Parameter], Any]:
    params = lay(values, how)
    optimizer = case.build(params)
    optimizer.load_state_dict(snapshot(state))
    for step in range(first, first + 3):
        step_of(case, 0, optimizer, params, step, "contiguous")
    return params, optimizer


@kinds
@pytest.mark.parametrize("how", ["alike", "contiguous", "other"])
@pytest.mark.parametrize("steps", [2, 3, 7])
@pytest.mark.parametrize("reply", [1, 2, "direct"])
def test_a_state_loads_element_for_element(kind: str, how: str, steps: int, reply: Any) -> None:
    """One block a parameter: what compression leaves out is the same in any order."""
    untouched = ((0, 2, 99), (2, 3, 99))  # coordinates without a variance
    options = {"freeze_step": 3, "block_size": 512, "zero_variance": "hold", "reply": reply}
    case = CASE.but(kind=kind, options=options, untouched=untouched)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coordinates without a variance")
        params = permuted(case)
        optimizer = case.build(params)
        for step in range(1, steps + 1):
            step_of(case, 0, optimizer, params, step, "alike")
        state, values = snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]
        for step in range(steps + 1, steps + 4):
            step_of(case, 0, optimizer, params, step, "alike")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "the state does not hold")
            again, _ = go_on(case, state, values, how, steps + 1)
    for p, q, start in zip(params, again, values, strict=True):
        assert float((p - q).detach().abs().max()) <= 1e-3 * float((p - start).detach().abs().max())
    if how == "alike":
        assert bits(again) == bits(params)


def saved_by_ranks(rank: int, size: int, case: Case, steps: int) -> Any:
    params = permuted(case)
    optimizer = case.build(params, group())
    for step in range(1, steps + 1):
        step_of(case, rank, optimizer, params, step, "alike")
    return snapshot(optimizer.state_dict()), [p.detach().clone() for p in params]


@kinds
@pytest.mark.parametrize("reply", [1, "direct"])
@pytest.mark.parametrize(("size", "each"), [(2, 1), (4, 2)])
def test_the_states_of_ranks_put_together_load_in_any_order(kind: str, reply: Any, size: int, each: int) -> None:
    """Pieces of residuals are in small blocks, which lie elsewhere in another order."""
    case = CASE.but(kind=kind, each=each, options={**CASE.options, "reply": reply})
    found = run_ranks(size, saved_by_ranks, case, 7)
    state, values = onebit.merge_states([own for own, _ in found]), found[0][1]
    alone = case.but(each=1, options={**case.options, "block_size": 512})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the state does not hold")
        expected, _ = go_on(alone, state, values, "alike", 8)
        for how in ("contiguous", "other"):
            again, _ = go_on(alone, state, values, how, 8)
            for p, q, start in zip(expected, again, values, strict=True):
                assert float((p - q).detach().abs().max()) <= 1e-3 * float((p - start).detach().abs().max())


def load_on_ranks(rank: int, size: int, case: Case, states: list[Any], values: list[Tensor]) -> tuple[list[str], bytes]:
    params = lay(values, "contiguous")
    optimizer = case.build(params, group())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(states[rank])
    for step in range(8, 11):
        step_of(case, rank, optimizer, params, step, "alike")
    assert all(math.isfinite(float(p.detach().sum())) for p in params)
    return [str(w.message) for w in caught], bits(params)


@pytest.mark.parametrize("reply", [1, "direct"])
def test_a_ranks_own_state_in_another_order(reply: Any) -> None:
    """What servers have left out lies elsewhere: without the others' states it is lost, which is said."""
    case = CASE.but(options={**CASE.options, "reply": reply})
    found = run_ranks(2, saved_by_ranks, case, 7)
    loaded = run_ranks(2, load_on_ranks, case, [own for own, _ in found], found[0][1])
    assert len({end for _, end in loaded}) == 1
    for warned, _ in loaded:
        assert len(warned) == (reply == 1)
        assert all("does not hold the residuals of all 2 ranks" in text for text in warned)


@kinds
def test_a_state_for_adamw_has_the_parameters_shapes(kind: str) -> None:
    case = CASE.but(kind=kind)
    stored, params = case.parameters(), permuted(case)
    plain, optimizer = case.build(stored), case.build(params)
    run(case, 0, plain, stored, 1, 7)
    for step in range(1, 8):
        step_of(case, 0, optimizer, params, step, "alike")
    mine, twin = (onebit.adamw_state(o.state_dict())["state"] for o in (optimizer, plain))
    for name in ("exp_avg", "exp_avg_sq"):
        assert bits(as_stored([mine[i][name] for i in range(5)])) == bits(twin[i][name] for i in range(5))


def test_adamws_state_of_a_channels_last_net_loads() -> None:
    nets = conv_net(True), conv_net(True)
    adamw = torch.optim.AdamW(nets[0].parameters(), weight_decay=0.0)
    for step in range(3):
        adamw.zero_grad()
        conv_loss(nets[0], 0, step, True).backward()
        adamw.step()
    nets[1].load_state_dict(nets[0].state_dict())
    optimizer = build("OneBitAdam", nets[1].parameters())
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for net, own in zip(nets, (adamw, optimizer), strict=True):
        own.zero_grad()
        conv_loss(net, 0, 3, True).backward()
        own.step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("order", "error"),
    [(torch.tensor([0, 1, 1, 2]), ValueError), (torch.tensor([0, 1]), ValueError), (torch.ones(4), TypeError),
     ("last", TypeError)],
)  # fmt: skip
def test_an_order_that_cannot_be_is_refused(order: Any, error: type[Exception]) -> None:
    params = permuted(CASE)
    optimizer = CASE.build(params)
    for step in range(1, 7):
        step_of(CASE, 0, optimizer, params, step, "alike")
    state = snapshot(optimizer.state_dict())
    kept = snapshot(state)
    state["state"][0]["memory_order"] = order
    with pytest.raises(error, match="memory_order of parameter 0"):
        optimizer.load_state_dict(state)
    assert same(snapshot(optimizer.state_dict()), kept)


TOOLS: dict[str, dict[str, bool]] = {
    "default": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
}


def carried(rank: int, size: int, kind: str, was: bool, name: str, folder: str) -> None:
    """Into a net of the other memory format, whose optimizer is in stage 2 too: by torch's tools and without them."""

    def trained(channels_last: bool, steps: int) -> tuple[nn.Module, Any]:
        net = conv_net(channels_last)
        optimizer = build(kind, net.parameters(), lr=3e-3, freeze_step=2, reply="direct", process_group=group())
        for step in range(steps):
            go(net, optimizer, step, channels_last)
        return net, optimizer

    def go(net: nn.Module, optimizer: Any, step: int, channels_last: bool) -> None:
        optimizer.zero_grad()
        conv_loss(net, rank, step, channels_last).backward()
        optimizer.step()

    options = StateDictOptions(**TOOLS.get(name, {}))
    net, optimizer = trained(was, 5)
    (one, by_tool), (other, by_hand) = trained(not was, 4), trained(not was, 4)
    for each in (one, other):
        each.load_state_dict(net.state_dict())
    by_hand.load_state_dict(snapshot(optimizer.state_dict()))
    if name == "dcp":
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, process_group=group())
        onebit.make_room(folder, one, by_tool)
        state = {"optimizer": by_tool.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=group())
        by_tool.load_state_dict(state["optimizer"])
    else:
        saved = snapshot(get_optimizer_state_dict(net, optimizer, options=options))
        if name == "flattened":
            onebit.make_room(saved, one, by_tool)
        set_optimizer_state_dict(one, by_tool, saved, options=options)
    assert same(snapshot(by_tool.state_dict()), snapshot(by_hand.state_dict()))
    go(one, by_tool, 5, not was)
    go(other, by_hand, 5, not was)
    assert bits(one.parameters()) == bits(other.parameters())


@pytest.mark.parametrize("was", [False, True], ids=["from contiguous", "from channels_last"])
@pytest.mark.parametrize("name", [*TOOLS, "dcp"])
def test_torchs_tools_carry_a_state_to_another_memory_format(was: bool, name: str, tmp_path: Path) -> None:
    run_ranks(2, carried, "OneBitLamb", was, name, str(tmp_path / "saved"))
