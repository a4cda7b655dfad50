"""Paths that a GPU takes, held against stand-ins for what CUDA does. `test_gpu` has them on a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebit
from onebit.kernels.data import upload
from onebit.kernels.data.hyper import Hyper
from onebit.kernels.data.layout import Layout
from onebit.kernels.data.pointers import Pointers
from onebit.optim.gradients import HyperTable
from onebit.parallel import flight


@contextlib.contextmanager
def recording(monkeypatch: pytest.MonkeyPatch, captured: bool = True) -> Any:
    """The copies that are made within. captured: as by a CUDA graph, which copies again at a replay."""
    copies: list[tuple[Tensor, Tensor]] = []
    copy = Tensor.copy_

    def recorded(out: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append((out, source))
        return copy(out, source, non_blocking)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", recorded)
        patch.setattr(upload, "capturing", lambda device: captured)
        yield copies


def replay(copies: list[tuple[Tensor, Tensor]]) -> None:
    for out, source in copies:
        out.copy_(source)


def test_a_graph_and_eager_steps_each_read_their_own_addresses(monkeypatch):
    tensors = {name: [torch.zeros(5)] for name in ("graph", "eager")}
    pointers = Pointers(Layout([5], block_size=64), torch.device("cpu"), torch.float32)
    at = {name: each[0].data_ptr() for name, each in tensors.items()}
    pointers.bind_tensors(tensors["graph"])  # as it was warmed up
    with recording(monkeypatch) as graph:
        pointers.bind_tensors(tensors["graph"])
    for _ in range(2):
        pointers.bind_tensors(tensors["eager"])
        assert pointers.addresses.tolist() == [at["eager"]]
        replay(graph)
        assert pointers.addresses.tolist() == [at["graph"]]


def test_a_graph_and_eager_steps_each_read_their_own_numbers(monkeypatch):
    table = HyperTable(1, torch.device("cpu"))
    graphs, eagers = [Hyper(lr=0.5)], [Hyper(lr=0.25)]
    table.write(graphs, [0.5], None)
    with recording(monkeypatch) as graph:
        table.write(graphs, [0.5], None)
    for _ in range(2):
        assert table.write(eagers, [0.25], None)[0, 0] == 0.25
        replay(graph)
        assert table.values[0, 0] == 0.5


def test_without_a_graph_nothing_is_copied_that_did_not_change(monkeypatch):
    table, rows = HyperTable(1, torch.device("cpu")), [Hyper(lr=0.5)]
    table.write(rows, [0.5], None)
    with recording(monkeypatch, captured=False) as copies:
        table.write(rows, [0.5], None)
    assert not copies


def test_a_rate_that_is_a_tensor_of_the_host_is_read_there(monkeypatch):
    """It is a number like any other: copied with the others, in one pinned copy."""
    results = []
    for lr in (torch.tensor(0.01), 0.01):
        weight = nn.Parameter(torch.linspace(-1, 1, 70))
        optimizer = onebit.OneBitAdam([weight], lr=lr)
        table = optimizer.write_hyper(None)
        assert table[0, 0] == torch.tensor(0.01)
        written = []
        monkeypatch.setattr(Tensor, "__setitem__", lambda *arguments, to=written: to.append(arguments))
        optimizer.write_hyper(None)
        monkeypatch.undo()
        assert not written
        for step in range(3):
            weight.grad = torch.linspace(1, -2, 70) * (step + 1)
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(*results)


class Cuda:
    """Streams and events, of which `log` has what happened."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.current = self.stream("main")

    def stream(self, name: str) -> Any:
        log = self.log
        return SimpleNamespace(
            device=torch.device("cuda", 1),
            cuda_stream=name,
            wait_event=lambda event: log.append(("waits for", event.of)),
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Event:
            def record(self, stream: Any) -> None:
                self.of = stream.cuda_stream

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.log.append(("device", str(device))))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def flown(monkeypatch: pytest.MonkeyPatch, streams: list[str], waits: Any = lambda stream: None) -> list[Any]:
    """What the thread of a flight does, where the gradients of its one chunk come from these streams of backward."""
    cuda = Cuda()
    cuda.install(monkeypatch)
    params = [nn.Parameter(torch.ones(3)) for _ in streams]
    state = onebit.OneBitAdam(params, freeze_step=1).current.states[0]
    chunk = SimpleNamespace(index=0, span=state.layout.all(), slice=state.layout.all())

    def run(compress: Any, **_: Any) -> None:
        cuda.log.append("run")
        compress(chunk)

    undo = SimpleNamespace(chunks=[chunk], save=lambda chunk: cuda.log.append("compress"))
    reducer = SimpleNamespace(
        state=state, exchange=SimpleNamespace(chunks=[chunk], run=run), compress=lambda *arguments: None
    )
    hyper, side = torch.zeros((1, len(Hyper._fields))), cuda.stream("side")
    own = flight.Flight([reducer], [undo], None, None, side, hyper, [], [None], None)  # type: ignore[list-item,arg-type]
    for i, (p, stream) in enumerate(zip(params, streams, strict=True)):
        cuda.current = cuda.stream(stream)
        own.put([(0, i)], [torch.ones_like(p)])
    side.device = torch.device("cpu")  # nothing more is asked of CUDA
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(wait_stream=waits))
    own.finish()
    return cuda.log


def test_a_message_waits_for_every_stream_that_backward_ran_in_on_the_device_of_its_own(monkeypatch):
    log = flown(monkeypatch, ["main", "other", "main"])
    assert log[0] == ("device", "cuda:1")
    before = log[log.index("run") : log.index("compress")]
    assert {each for each in before if each != "run"} == {("waits for", "main"), ("waits for", "other")}


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
