"""Checkpoints of sharded parameters: bit for bit on the same mesh, resharded to another with nothing lost."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import onebit
from onebit.checkpoint.elements import decoded, encoded, lengths_of, packed, unpacked
from onebit.collectives.transport import transport_for
from tests.limits import HUNG
from tests.onebit.parallel.test_fsdp import OPTIONS, loss_of, mesh_of, model, sharded, whole
from tests.onebit.runs import adam_first, bits, build, frozen_name
from tests.ranks import run_ranks_once
from tests.wire import of_bits

WIDTH = 21  # parts of different sizes; blocks that are not full


def made(mesh: Any, kind: str, **options: Any) -> tuple[Any, Any]:
    net = sharded(model(WIDTH), mesh)
    optimizer = build(kind, net.parameters(), process_group=mesh.get_group("replicate"), **{**OPTIONS, **options})
    onebit.attach(net, optimizer)
    return net, optimizer


def train(rank: int, net: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def tensors(optimizer: Any) -> list[dict[str, np.ndarray]]:
    """Of each parameter its state, whole: a replica's own residual alone."""
    return [
        {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).double().numpy() for name, v in own.items()}
        for own in optimizer.state_dict()["state"].values()
    ]


def values(net: Any) -> bytes:
    return bits(whole(net))


def saved(rank: int, size: int, kind: str, folder: str, shape: tuple[int, int], options: dict[str, Any]) -> Any:
    net, optimizer = made(mesh_of(*shape), kind, **options)
    train(rank, net, optimizer, range(16))
    onebit.save(folder, net, optimizer)
    before, at = tensors(optimizer), values(net)
    train(rank, net, optimizer, range(16, 20))
    return before, at, values(net)


def loaded(rank: int, size: int, kind: str, folder: str, shape: tuple[int, int], options: dict[str, Any]) -> Any:
    net, optimizer = made(mesh_of(*shape), kind, **options)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
    onebit.load(folder, net, optimizer)
    before, at = tensors(optimizer), values(net)
    assert optimizer.compressing
    train(rank, net, optimizer, range(16, 20))
    return before, at, values(net)


def everything(states: list[list[dict[str, np.ndarray]]], beta1: float = 0.9) -> list[np.ndarray]:
    """Of each parameter mean e + E + b1 m, from every rank's state; ranks of a replica say the same."""
    found = []
    for own in zip(*states, strict=True):
        together = {name: value for each in own for name, value in each.items()}
        e = np.mean([v for name, v in together.items() if name.startswith("residual_of")], axis=0)
        servers = sum(v for name, v in together.items() if name.startswith("server_residual_of"))
        m = np.mean([v for name, v in together.items() if name.startswith("momentum_of")], axis=0)
        found.append(e + servers + beta1 * m)
    return found


REPLIES = ["direct", pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@adam_first
@pytest.mark.parametrize("reply", REPLIES)
def test_a_mesh_goes_on_bit_for_bit_and_others_lose_nothing(kind: str, reply: Any, tmp_path: Any) -> None:
    folder, options = str(tmp_path), {"reply": reply}
    there = run_ranks_once(4, saved, (kind, folder, (2, 2), options), timeout=HUNG)
    assert all(end == there[0][2] for _, _, end in there)
    again = run_ranks_once(4, loaded, (kind, folder, (2, 2), options), timeout=HUNG)
    for (before, at, end), (theirs, there_at, there_end) in zip(again, there, strict=True):
        assert at == there_at and end == there_end
        for own, other in zip(before, theirs, strict=True):
            assert own.keys() == other.keys()
            assert all(np.array_equal(own[name], other[name]) for name in own)
    for shape in ((1, 4), (4, 1), (2, 1)):
        here = run_ranks_once(shape[0] * shape[1], loaded, (kind, folder, shape, options), timeout=HUNG)
        assert all(at == there[0][1] for _, at, _ in here)
        assert all(end == here[0][2] for _, _, end in here)
        for got, expected in zip(
            everything([s for s, _, _ in here]), everything([s for s, _, _ in there]), strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
        for got, expected in zip(here[0][0], there[0][0], strict=True):
            assert np.array_equal(got[frozen_name(kind)], expected[frozen_name(kind)])


def by_name(rank: int, size: int, kind: str, folder: str, steps: int) -> tuple[bytes, bytes]:
    mesh = mesh_of(2, 2)
    net, optimizer = made(mesh, kind)
    train(rank, net, optimizer, range(steps))
    model_state, state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    train(rank, net, optimizer, range(steps, steps + 3))
    other, resumed = made(mesh, kind, lr=1e-4)
    train(rank, other, resumed, range(100, 100 + steps))
    model_state, state = get_state_dict(other, resumed)
    found = {"model": model_state, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(other, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    train(rank, other, resumed, range(steps, steps + 3))
    return values(net), values(other)


@adam_first
@pytest.mark.parametrize("steps", [15, pytest.param(4, marks=pytest.mark.slow)])
def test_dcp_by_name(kind: str, steps: int, tmp_path: Any) -> None:
    for one, other in run_ranks_once(4, by_name, (kind, str(tmp_path), steps), timeout=HUNG):
        assert one == other


def saved_by_dcp(rank: int, size: int, kind: str, folder: str, shape: tuple[int, int], options: dict[str, Any]) -> Any:
    net, optimizer = made(mesh_of(*shape), kind, **options)
    train(rank, net, optimizer, range(16))
    model_state, state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    before, at = tensors(optimizer), values(net)
    train(rank, net, optimizer, range(16, 20))
    return before, at, values(net)


def loaded_by_dcp(rank: int, size: int, kind: str, folder: str, shape: tuple[int, int], options: dict[str, Any]) -> Any:
    net, optimizer = made(mesh_of(*shape), kind, **options)
    onebit.make_room(folder, net, optimizer)
    model_state, state = get_state_dict(net, optimizer)
    found = {"model": model_state, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    before, at = tensors(optimizer), values(net)
    train(rank, net, optimizer, range(16, 20))
    return before, at, values(net)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_dcp_into_a_new_optimizer_of_a_mesh(shape: tuple[int, int], tmp_path: Any) -> None:
    common = ("OneBitAdam", str(tmp_path))
    there = run_ranks_once(4, saved_by_dcp, (*common, (2, 2), {"reply": 1}), timeout=HUNG)
    here = run_ranks_once(shape[0] * shape[1], loaded_by_dcp, (*common, shape, {"reply": 1}), timeout=HUNG)
    assert all(at == there[0][1] and end == here[0][2] for _, at, end in here)
    if shape == (2, 2):
        assert here[0][2] == there[0][2]
    for got, expected in zip(everything([s for s, _, _ in here]), everything([s for s, _, _ in there]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def other_reply(rank: int, size: int, folder: str, shape: tuple[int, int]) -> Any:
    """Saved with one bit by parts of different sizes, of which some serve nothing of a parameter."""
    mesh = mesh_of(*shape)
    net = sharded(model(11), mesh)
    options = {**OPTIONS, "reply": 1}
    optimizer = build("OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), **options)
    onebit.attach(net, optimizer)
    train(rank, net, optimizer, range(15))
    onebit.save(folder, net, optimizer)
    before = tensors(optimizer)
    found = []
    for reply in (1, "direct"):
        other = build(
            "OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), **{**OPTIONS, "reply": reply}
        )
        onebit.load(folder, net, other)
        found.append(tensors(other))
    own = optimizer.state_dict()
    alone = build("OneBitAdam", net.parameters(), process_group=mesh.get_group("replicate"), **{**OPTIONS, "reply": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone.load_state_dict(own)  # a rank's own state keeps all there is, as each of the others loads its own
    found.append(tensors(alone))
    return before, found, [str(w.message) for w in caught]


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_another_reply_loses_nothing(shape: tuple[int, int], tmp_path: Any) -> None:
    runs = run_ranks_once(4, other_reply, (str(tmp_path), shape))
    expected = everything([before for before, _, _ in runs])
    for k in range(3):
        for got, wanted in zip(everything([found[k] for _, found, _ in runs]), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())
    assert all(warned == [] for _, _, warned in runs)


def of_one_replica(rank: int, size: int, folder: str) -> list[str]:
    """Of all replicas the state of the first: what it has left out is not everyone's."""
    mesh = mesh_of(2, 1)
    net, optimizer = made(mesh, "OneBitAdam", reply=1)
    train(rank, net, optimizer, range(14))
    state = optimizer.state_dict()
    path = f"{folder}/{rank}"
    parts = {
        p: {name: v.to_local() if hasattr(v, "to_local") else v for name, v in own.items()}
        for p, own in state["state"].items()
    }
    torch.save(parts, path)
    torch.distributed.barrier()
    saved = {"state": torch.load(f"{folder}/0", weights_only=True), "param_groups": state["param_groups"]}
    texts = []
    for reply in ("direct", 1):
        options = {**OPTIONS, "reply": reply, "process_group": mesh.get_group("replicate")}
        other = build("OneBitAdam", net.parameters(), **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.load_state_dict(saved)
        texts.append("".join(str(w.message) for w in caught))
    return texts


def test_one_replicas_residuals_are_not_everyones(tmp_path: Any) -> None:
    first, second = run_ranks_once(2, of_one_replica, (str(tmp_path),))
    assert first == ["", ""]
    assert all("start from zero" in text for text in second)


def to_whole(rank: int, size: int, folder: str, nodes: bool) -> Any:
    net = model(WIDTH)
    node = transport_for(None).split(rank // 2) if nodes else None
    optimizer = build("OneBitAdam", net.parameters(), node_group=node, **OPTIONS)
    onebit.load(folder, net, optimizer)
    train(rank, net, optimizer, range(16, 20))
    return bits(net.parameters())


@pytest.mark.slow
def test_a_sharded_state_loads_into_whole_parameters_of_one_level_and_two(tmp_path: Any) -> None:
    run_ranks_once(4, saved, ("OneBitAdam", str(tmp_path), (2, 2), {}), timeout=HUNG)
    for ranks, nodes in ((4, True), (2, False)):
        ends = run_ranks_once(ranks, to_whole, (str(tmp_path), nodes))
        assert ends == [ends[0]] * ranks


def saved_whole(rank: int, size: int, folder: str) -> str:
    net = model(WIDTH)
    optimizer = build("OneBitAdam", net.parameters(), **OPTIONS)
    train(rank, net, optimizer, range(14))
    onebit.save(folder, net, optimizer)
    other, resumed = made(mesh_of(1, 2), "OneBitAdam")
    try:
        onebit.load(folder, other, resumed)
    except ValueError as error:
        return str(error)
    return "no error"


def test_whole_parameters_of_stage_2_do_not_load_into_shards(tmp_path: Any) -> None:
    for text in run_ranks_once(2, saved_whole, (str(tmp_path),)):
        assert "one of whole parameters in stage 2" in text


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 64, 65, 130, 190])
@pytest.mark.parametrize("per_element", [1, 2])
def test_a_message_by_element_and_back(numel: int, per_element: int) -> None:
    source = torch.Generator().manual_seed(numel)
    lengths = lengths_of(numel, 64)
    blocks, room = len(lengths), int(lengths.sum())
    ones = torch.randint(0, 2, (per_element * room,), generator=source)
    scales = torch.rand((blocks, 2) if per_element == 2 else (blocks,), generator=source) + 0.1
    if per_element == 2:
        scales = scales.sort(-1).values
    form = packed(ones)
    assert torch.equal(unpacked(form), ones.to(torch.uint8))
    assert np.array_equal(form.numpy(), np.packbits(ones.numpy().astype(np.uint8), bitorder="little"))
    values = decoded(form, scales, per_element, numel, 64)[0]
    expected = of_bits(ones.numpy() == 1, scales.double().numpy().ravel(), per_element, lengths.tolist())[2][:numel]
    assert np.array_equal(values.double().numpy(), expected)
    again: Tensor = decoded(*encoded(values, 64, per_element), per_element, numel, 64)[0]
    assert torch.equal(again, values)
