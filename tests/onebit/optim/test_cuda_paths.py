"""Paths that a GPU takes, held against stand-ins for what CUDA does. `test_gpu` has them on a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.kernels.data import upload
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.optim import gradients
from onebit.optim import run as run_module
from onebit.optim.gradients import HyperTable
from onebit.parallel import flight
from tests import internals
from tests.onebit.optim.contract import started
from tests.onebit.runs import Case, bits, run


class Graph:
    """Copies that `call` makes, again at a replay. captured: as by a CUDA graph, and not by an eager call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Any, captured: bool = True) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        copy = Tensor.copy_

        def recorded(out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.copies.append((out, source))
            return copy(out, source, non_blocking)

        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", recorded)
            patch.setattr(upload, "capturing", lambda device: captured)
            call()

    def replay(self) -> None:
        for out, source in self.copies:
            out.copy_(source)


def test_a_graph_and_eager_steps_each_read_their_own_addresses(monkeypatch):
    one, other = torch.zeros(5), torch.zeros(5)
    pointers = Pointers(Layout([5], block_size=64), torch.device("cpu"), torch.float32)
    pointers.bind_tensors([one])  # as it was warmed up
    graph = Graph(monkeypatch, lambda: pointers.bind_tensors([one]))
    for _ in range(2):
        pointers.bind_tensors([other])
        assert pointers.addresses.tolist() == [other.data_ptr()]
        graph.replay()
        assert pointers.addresses.tolist() == [one.data_ptr()]


def test_a_graph_and_eager_steps_each_read_their_own_numbers_and_copy_only_what_has_changed(monkeypatch):
    table = HyperTable(torch.device("cpu"))

    def write(lr: float) -> Tensor:
        return table.write([Hyper(lr=lr)], [lr], None)

    write(0.5)
    assert not Graph(monkeypatch, lambda: write(0.5), captured=False).copies
    graph = Graph(monkeypatch, lambda: write(0.5))
    for _ in range(2):
        assert write(0.25)[0, 0] == 0.25
        graph.replay()
        assert table.values[0, 0] == 0.5


def test_a_rate_of_0_takes_the_place_of_one_on_the_device(monkeypatch):
    """The numbers of a group are then what they were, its rate apart: in stage 2 a group that was to stay went on."""
    monkeypatch.setattr(gradients, "on_device", lambda lr: isinstance(lr, Tensor))
    table, row = HyperTable(torch.device("cpu")), Hyper(beta1=0.5)
    for lr, expected in ((torch.tensor(0.25), 0.25), (0.0, 0.0), (torch.tensor(0.5), 0.5), (0.0, 0.0)):
        assert float(table.write([row], [lr], None)[0, 0]) == expected


def test_a_rate_that_is_a_tensor_of_the_host_is_read_there(monkeypatch):
    """It is a number like any other: copied with the others, in one pinned copy."""
    ends, written = [], []
    for lr in (torch.tensor(0.01), 0.01):
        params, optimizer = started(Case(options={"lr": lr}), 0)
        assert internals.hyper(optimizer)[0, 0] == torch.tensor(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "__setitem__", lambda *arguments: written.append(arguments))
            internals.hyper(optimizer)
        run(Case(), 0, optimizer, params, 1, 3)
        ends.append(bits(params))
    assert ends[0] == ends[1] and not written


def test_a_message_waits_for_the_last_event_of_every_stream_that_backward_ran_in(monkeypatch):
    events, waited, current = iter(range(3)), [], iter(["main", "other", "main"])
    mark, wait_for = lambda device, again: next(events), lambda side, event: waited.append(event)
    streams = Mock(current=lambda device: next(current), mark=mark, wait_for=wait_for)
    monkeypatch.setattr(flight, "streams", streams)
    signal = flight.Signal(Mock())
    for _ in range(3):
        signal.mark()
    signal.set()
    signal.wait()
    assert sorted(waited) == [1, 2]


def test_a_compiled_training_step_is_the_same_and_leaves_the_passes_out():
    compiled: list[str] = []

    def recording(module: Any, inputs: Any) -> Any:
        compiled.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    results = []
    for wrap in (lambda function: function, lambda function: torch.compile(function, backend=recording)):
        torch.manual_seed(0)
        model = nn.Linear(9, 5)
        optimizer = onebit.OneBitAdam(model.parameters(), lr=0.01, freeze_step=2)

        @wrap
        def train(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(5):
            train(torch.linspace(-1, step, 18).view(2, 9))
        results.append([p.detach() for p in model.parameters()])
    torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert compiled and not any("exp_avg" in name or "scan" in name for name in compiled)


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam"])
def test_a_step_that_no_graph_can_hold_is_refused_also_if_it_began_before_the_capture(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    params = [torch.nn.Parameter(torch.ones(70))]
    optimizer = getattr(onebit, kind)(params, lr=1e-3)
    params[0].grad = torch.ones(70)
    optimizer.clip_grad_norm_(1.0)
    monkeypatch.setattr(run_module, "capturing", lambda device: True)
    with pytest.raises(ValueError, match="a CUDA graph can't hold this step"):
        optimizer.step()
