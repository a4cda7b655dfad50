"""Bytes, counted: what an optimizer keeps, what a step makes on its way, what many small parameters send.

python -m tests.onebit.optim.test_memory        prints what the tests bound
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from onebit.collectives.averaging import BUCKET_BYTES
from onebit.collectives.transport import transport_for
from tests import internals
from tests.limits import HUNG
from tests.onebit.runs import OPTIMIZERS, build, kinds, parameters, step_by
from tests.ranks import group, run_ranks, run_ranks_once

SHAPES = ((2048, 1024), (1000, 1024), (512,), (3,))
NUMEL = sum(torch.Size(s).numel() for s in SHAPES)
MOST_STATE = {  # by ranks: with two, messages go directly, there is no server and m is two messages
    8: {"OneBitAdam": 8.7, "OneBitLamb": 12.8, "ZeroOneAdam": 8.85},  # 1/8 for the mask of live elements
    2: {"OneBitAdam": 8.3, "OneBitLamb": 12.6, "ZeroOneAdam": 8.45},
}
MOST_OF_NODES = {"OneBitAdam": 5.1, "OneBitLamb": 9.4, "ZeroOneAdam": 5.1}
MOST_BUFFERS = 0.6
SAVED = {"OneBitAdam": 12, "OneBitLamb": 17, "ZeroOneAdam": 12}
# LAMB's d is a buffer of its own, and stays; 0/1 Adam's mask is a byte an element until it is packed
MOST_AT_FREEZE = {"OneBitAdam": 0.2, "OneBitLamb": 1.01, "ZeroOneAdam": 0.26}
BLOCK = 4 + 32 // 8  # bytes of a scale and of 32 elements


class Made(TorchDispatchMode):
    """The largest storage that any operation made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.most = max(self.most, t.untyped_storage().nbytes())
        return out


def living() -> dict[int, int]:
    """Bytes of every storage that a tensor holds."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not isinstance(t, FakeTensor)]
    storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
    return {s.data_ptr(): s.nbytes() for s in storages}


def measure(rank: int, size: int, kind: str, each: int = 1, **more: Any) -> dict[str, float]:
    """each: ranks a node. more: options."""
    params, source = parameters(*SHAPES), torch.Generator().manual_seed(rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=source)
    transport = transport_for(group())
    node = None if each == 1 else transport.split(rank // each)
    before = living()
    options = {"freeze_step": 2, "chunks": 1, "process_group": transport, "node_group": node, **more}
    optimizer = build(kind, params, **options)
    made = []
    for _ in range(5):
        with Made() as mode:
            optimizer.step()
        made.append(mode.most / (4 * NUMEL))
    kept = sum(n for where, n in living().items() if where not in before) / NUMEL
    [exchange] = [reducer.exchange for reducer in optimizer.run.state.reducers]
    messages = [exchange.sent, *([exchange.received, exchange.reply] if exchange.server_residual else [])]
    messages += [exchange.arriving] if each > 1 else []
    buffers = sum(own.buffer.numel() for own in messages) / NUMEL
    optimizer.synchronize()
    synchronized = sum(n for where, n in living().items() if where not in before) / NUMEL
    found = {"state": kept - buffers, "buffers": buffers, "freeze": made[2], "step": made[4]}
    saved = [v for own in optimizer.state_dict()["state"].values() for v in own.values()]
    return found | {"synchronized": synchronized - kept, "saved": sum(v.nbytes for v in saved) / NUMEL}


@pytest.mark.parametrize(("kind", "ranks"), [("OneBitAdam", 2), ("OneBitLamb", 2), ("ZeroOneAdam", 8)])
def test_bytes_an_element_in_stage_2(kind: str, ranks: int) -> None:
    """torch.optim.AdamW keeps 8. The messages received are state: they hold the momentum."""
    for found in run_ranks(ranks, measure, kind, timeout=HUNG):
        assert 8 < found["state"] <= MOST_STATE[ranks][kind]
        assert 0 < found["buffers"] <= MOST_BUFFERS
        # what the CPU passes work in has 2 MB, whatever the model
        assert found["step"] < 0.2, "a step of stage 2 makes a temporary near the size of the model"
        assert found["freeze"] < MOST_AT_FREEZE[kind], "the freeze makes a temporary near the size of the model"
        assert found["synchronized"] == pytest.approx(4, abs=0.1), "until the next step begins, m alone"
        assert found["saved"] == pytest.approx(SAVED[kind], abs=0.1)


def test_bytes_an_element_of_2_nodes_of_8_ranks() -> None:
    """A rank keeps the residual of its slice alone: less than torch.optim.AdamW's 8."""
    for found in of_nodes("OneBitLamb"):
        assert 4 < found["state"] <= MOST_OF_NODES["OneBitLamb"]
        assert 0 < found["buffers"] <= MOST_BUFFERS / 8 + 0.02
        assert found["step"] * 4 * NUMEL <= BUCKET_BYTES, "averaging over a node makes more than buckets"


def of_nodes(kind: str) -> list[dict[str, float]]:
    return run_ranks_once(16, measure, (kind, 8), timeout=HUNG)


def measure_elastic(rank: int, size: int, elastic: bool, reply: Any) -> float:
    return measure(rank, size, "OneBitAdam", elastic=elastic, reply=reply, chunks=2)["state"]


@pytest.mark.parametrize(("reply", "residuals"), [(1, 4 + 4 / 3), ("direct", 4)])
def test_elastic_keeps_residuals_and_messages_once_more(reply: Any, residuals: float) -> None:
    with_it, without = (run_ranks(3, measure_elastic, elastic, reply)[0] for elastic in (True, False))
    assert residuals < with_it - without < residuals + 0.6


@pytest.mark.parametrize(
    ("kind", "own", "kept"),
    [("OneBitAdam", {}, False), ("OneBitAdam", {"elastic": True}, True), ("OneBitLamb", {}, True)],
)
def test_the_momentum_that_a_step_adds_to_residuals_is_kept_where_it_is_needed(kind: str, own: Any, kept: bool) -> None:
    optimizer = build(kind, freeze_step=1, **own)
    for _ in range(2):
        step_by(optimizer)
    optimizer.synchronize()
    optimizer.begin_step()
    [state] = internals.states(optimizer)
    assert ("folded_momentum" in state) == kept and "exp_avg" not in state


# Many small parameters


def part_of(kind: str, numels: list[int], **options: object) -> Any:
    """Take the first steps and return the part."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(n)) for n in numels]
    optimizer = build(kind, params, freeze_step=1, **options)
    for _ in range(4):
        step_by(optimizer, torch.randn_like)
    (part,) = optimizer.run.state.parts
    return part


@kinds
def test_what_many_parameters_of_10_elements_send_and_keep(kind: str) -> None:
    """8 bytes a parameter and message, where blocks of 2,048 were 260 and fp32 gradients are 40."""
    before = living()
    part = part_of(kind, [10] * 1000)
    assert part.state.layout.elements == 32 * 1000
    assert part.reducer.exchange.sent.buffer.nbytes <= 1000 * BLOCK + 40
    for p in part.state.params:
        before[p.untyped_storage().data_ptr()], p.grad = 0, None
    kept = sum(size for where, size in living().items() if where not in before)
    assert 32 * 1000 * 12 < kept < 32 * 1000 * 24


if __name__ == "__main__":
    for kind in OPTIMIZERS:
        runs = {f"{ranks} ranks": run_ranks(ranks, measure, kind, timeout=HUNG) for ranks in MOST_STATE}
        for where, (found, *_) in {"2 nodes of 8 ranks": of_nodes(kind), **runs}.items():
            words = ", ".join(f"{name} {found[name]:.2f}" for name in ("state", "buffers", "synchronized", "saved"))
            print(f"{kind}, stage 2, {where}: {words} bytes an element")
