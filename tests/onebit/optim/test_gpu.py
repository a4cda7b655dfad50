"""The optimizers on a GPU: the CPU's results, no wait for the device in a step, and a step in a CUDA graph."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.onebit.runs import Case, arrays, bits, freezing_kinds, kinds, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = ((64, 300), (33,), (2,), (4096,))


def on_gpu(case: Case) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cuda()) for p in case.parameters()]


def set_gradients(case: Case, params: list[nn.Parameter], step: int, fresh: bool = True) -> None:
    """fresh: new ones. A graph holds the addresses of those that it was made with."""
    for p, g in zip(params, case.gradients(0, step), strict=True):
        p.grad = g.to(p.device) if fresh else p.grad.copy_(g)


@kinds
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_results_are_those_of_the_cpu(kind: str, scale: str) -> None:
    dtype = "bfloat16" if (scale == "block") == (kind == "OneBitLamb") else "float32"  # each with each scale
    options = {"freeze_step": 4, "scale": scale, "block_size": 2048}
    case = Case(kind, SHAPES, dtype, steps=7, options=options, bad=((6, 0, float("nan")),))
    params, there = case.parameters(), on_gpu(case)
    optimizer, other = case.build(params), case.build(there)
    run(case, 0, optimizer, params, 1, case.steps)
    for step in range(1, case.steps + 1):
        set_gradients(case, there, step)
        other.step()
    assert other.skipped_steps == 1 and other.compressing
    for a, b in zip(arrays(params), arrays([nn.Parameter(p.detach().cpu()) for p in there]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-5)


@kinds
def test_a_model_may_move_after_its_optimizer_was_built(kind: str) -> None:
    masks = [torch.arange(math.prod(shape)).view(shape) % 2 == 0 for shape in SHAPES]
    case = Case(kind, SHAPES, options={"freeze_step": 4, "block_size": 2048}, groups=({"mask": masks},))
    moved, there = case.parameters(), on_gpu(case)
    optimizers = [case.build(params) for params in (moved, there)]
    for p in moved:
        p.data = p.data.cuda()
    for step in range(1, 8):
        for params, optimizer in zip((moved, there), optimizers, strict=True):
            set_gradients(case, params, step)
            optimizer.step()
    assert bits([p.cpu() for p in moved]) == bits([p.cpu() for p in there]) and optimizers[0].compressing


@pytest.mark.parametrize(("kind", "clip"), [("OneBitAdam", True), ("OneBitLamb", False), ("ZeroOneAdam", False)])
def test_no_step_waits_for_the_device(kind: str, clip: bool) -> None:
    case = Case(kind, SHAPES, options={"freeze_step": 4, "block_size": 2048})
    params = on_gpu(case)
    optimizer = case.build(params)
    for step in range(1, 10):
        set_gradients(case, params, step)
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        torch.cuda.set_sync_debug_mode("error" if step not in (1, 2, 5, 6) else "default")  # tuning, the freeze
        try:
            if clip:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.compressing


@freezing_kinds
def test_a_step_of_stage_2_replays_in_a_cuda_graph(kind: str) -> None:
    lr = torch.tensor(1e-2, device="cuda")
    case = Case(kind, SHAPES, options={"freeze_step": 2, "block_size": 2048, "lr": lr})
    params, plain = on_gpu(case), on_gpu(case)
    optimizer = case.build(params)
    other = case.but(options={**case.options, "lr": 1e-2}).build(plain)
    for p in params:
        p.grad = torch.zeros_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(1, 6):
            set_gradients(case, params, step, fresh=False)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    set_gradients(case, params, 6, fresh=False)
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(6, 12):
        lr.fill_(1e-2 / step)
        set_gradients(case, params, step, fresh=False)
        graph.replay()
    for step in range(1, 12):
        other.param_groups[0]["lr"] = 1e-2 / step if step > 5 else 1e-2
        set_gradients(case, plain, step)
        other.step()
    assert bits([p.cpu() for p in params]) == bits([p.cpu() for p in plain])
