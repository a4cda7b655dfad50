"""Ranks that no longer hold the same bits: found at the next check, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onebit
from onebit.collectives.agreement import checksums
from onebit.collectives.transport.protocol import Work
from onebit.collectives.transport.torch import TorchTransport
from tests import internals
from tests.checkpoints import Run
from tests.onebit.runs import Case, bits, build, frozen_name, on_ranks, take
from tests.ranks import group

KINDS_STAGES_AND_DTYPES = [
    *(("OneBitAdam", 50, "float32"), ("OneBitLamb", 3, "float32"), ("ZeroOneAdam", 50, "float32")),
    *(("OneBitAdam", 3, "bfloat16"), ("OneBitLamb", 50, "bfloat16"), ("ZeroOneAdam", 3, "bfloat16")),
]
ALWAYS = {"check_every": 1}
CHECK = "comparing the ranks' state (all-gather)"


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    """One bit of one element, without autograd's version counters, as a fault in memory does."""
    words = tensor.data.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    mask = 1 << bit
    words[element] ^= mask - (1 << 8 * tensor.itemsize) if bit == 8 * tensor.itemsize - 1 and bit > 7 else mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_a_checksum_sees_every_flipped_bit(dtype: torch.dtype) -> None:
    numel = 2**16 + 5  # more than a piece
    x = torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(1)).to(dtype)
    before = checksums([x])
    for element in (0, 1, 2**16 - 1, 2**16, numel - 1):
        for bit in range(8 * dtype.itemsize):
            flip(x, bit, element)
            assert checksums([x]) != before, (element, bit)
            flip(x, bit, element)
    assert checksums([x]) == before


def test_a_checksum_sees_what_changed_places_and_is_of_bits_not_of_numbers() -> None:
    x = torch.randn(2**16 + 100, generator=torch.Generator().manual_seed(1))
    before = checksums([x])
    for a, b in [(0, 1), (0, 2**15), (7, 2**16 - 1), (3, 2**16 + 3), (0, 2**16), (2**16, 2**16 + 99)]:
        swapped = x.clone()
        swapped[a], swapped[b] = x[b], x[a]
        assert checksums([swapped]) != before, (a, b)
    zeros = torch.tensor([0.0, -0.0])
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001]).int().view(torch.float32)
    assert nans.isnan().all()
    assert len(set(checksums([*zeros.view(2, 1), *nans.view(3, 1)]).tolist())) == 5
    assert checksums([nans])[0] == checksums([nans.clone()])[0] != checksums([nans[:2]])[0]


def check_now(optimizer: Any) -> str:
    """The error of a check, with check_every=1."""
    try:
        internals.check_ranks(optimizer)
    except onebit.DivergenceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "freeze_step", "dtype"), KINDS_STAGES_AND_DTYPES)
@on_ranks(3)
def test_a_flipped_bit_in_anything_that_ranks_share_is_named_on_every_rank(
    rank: int, kind: str, freeze_step: int, dtype: str
) -> dict[str, str]:
    """A bit of each tensor that ranks share, on rank 1, one after the other. What a rank has of its own may differ."""
    case = Case(kind, dtype=dtype, steps=6, options={"freeze_step": freeze_step, **ALWAYS}, groups=({}, {"lr": 1e-3}))
    optimizer, texts = Run(case, case.steps, rank, group()).optimizer, {}
    assert check_now(optimizer) == ""
    for name, tensor in internals.shared(optimizer):
        if not tensor.numel():
            continue
        if rank == 1:
            flip(tensor, 3, tensor.numel() - 1)
        texts[name] = check_now(optimizer)
        if rank == 1:
            flip(tensor, 3, tensor.numel() - 1)
    for exchange in internals.exchanges(optimizer):
        exchange.residual.value.add_(rank)
    assert check_now(optimizer) == ""
    expected = {"exp_avg", "exp_avg_sq"} if freeze_step == 50 else {frozen_name(kind)}
    expected |= {"exp_avg_sq"} if kind == "OneBitLamb" else set()
    expected |= {"master"} if dtype == "bfloat16" else set()
    for shape in case.shapes:
        names = [name for name in texts if f"shape {shape}" in name]
        assert names[0].startswith("parameter ")
        assert {name.split(" of ")[0] for name in names[1:]} == expected
    assert any("the last message" in name for name in texts) == (freeze_step == 3)
    for name, text in texts.items():
        assert f"{name} has other values on rank 1 than on rank 0. Load the last" in text, text
    return texts


NO_MAJORITY = "No values are held by more than half of the ranks"
FLIPS = [  # ranks, the parameters of which a rank flips a bit, parts of the error
    (2, {1: [0, 1]}, ["on rank 1 than on rank 0", NO_MAJORITY]),
    (4, {1: [0, 1], 3: [0]}, ["on ranks 1, 3 than on rank 0", NO_MAJORITY]),
    (4, {1: [1], 3: [3]}, [
        "parameter 1 of group 0 (shape (33,)) has other values on rank 1 than on rank 0",
        "and 1 more tensors differ on rank 3 (the first is parameter 3 of group 0",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("size", "flips", "says"), FLIPS)
@on_ranks()
def test_all_ranks_that_differ_are_named(rank: int, size: int, flips: dict[int, list[int]], says: list[str]) -> str:
    """Nobody is taken for right without a majority."""
    run = Run(Case(options={"freeze_step": 2, **ALWAYS}), 3, rank, group())
    for parameter in flips.get(rank, []):
        flip(run.params[parameter], 5)
    before, text = bits(run.params), check_now(run.optimizer)
    assert text.startswith("after 3 steps the ranks do not hold the same bits: parameter ")
    assert all(part in text for part in (*says, "Load the last checkpoint")) and text.count(" than on rank 0") == 1
    assert (NO_MAJORITY in text) == (NO_MAJORITY in says) and bits(run.params) == before
    return text


@pytest.mark.parametrize(("every", "expected"), [(3, [3, 6, 9]), (0, [])])
@on_ranks(2)
def test_a_check_comes_last_in_every_so_many_steps(rank: int, every: int, expected: list[int]) -> None:
    """A step that is skipped counts as well. The default is a thousand."""
    seen: list[str] = []

    class Recording(TorchTransport):
        def all_gather(self, out: Tensor, sent: Tensor, phase: str) -> Work:
            seen.append(phase)
            return super().all_gather(out, sent, phase)

    options = {"freeze_step": 4, "check_every": every}
    case = Case(shapes=((5,),), steps=10, options=options, bad=((2, 1, float("nan")),))
    params, checks = case.parameters(), []
    optimizer = case.build(params, Recording(group()))
    for step in range(1, case.steps + 1):
        del seen[:]
        take(case, rank, optimizer, params, step)
        assert CHECK not in seen[:-1]
        checks += [step] * seen.count(CHECK)
    assert checks == expected
    assert internals.options(build("OneBitAdam")).check_every == 1000


def test_one_rank_alone_compares_nothing() -> None:
    assert Run(Case(options=ALWAYS), 3).optimizer.steps == 3
