"""What a step on a GPU asks of the host: launches of passes, and operations of torch; counted without a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onebit
from onebit.collectives.transport import LocalTransport
from onebit.kernels import backends
from onebit.kernels.data.wire import Messages
from onebit.kernels.gpu.launch import recorded

STAGE_1 = {"freeze_step": 4}
LOCAL = {"var_freeze_step": 4, "local_step_scaler": 2, "local_step_clipper": 4}
MOST_OPERATIONS = 20  # of torch, in a step


class Unsent(LocalTransport):
    """Rank 0 of eight, whose messages go nowhere: each other rank seems to have sent what it has."""

    size = 8


class Operations(TorchDispatchMode):
    """Counts torch's operations that write memory: on a GPU a launch or a copy each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not func.is_view and func is not torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the CPU get the GPU's passes, and no message is read, as on a GPU."""
    gpu = backends.load("gpu")
    monkeypatch.setattr(backends, "load", lambda name: gpu)
    monkeypatch.setattr(Messages, "check", lambda self, phase: None)
    backends.backend.cache_clear()
    yield
    backends.backend.cache_clear()


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.filterwarnings("ignore:all ranks have the same gradients")
@pytest.mark.parametrize(
    ("name", "options", "kind", "launches"),
    [
        ("OneBitAdam", STAGE_1, "1 bit", 7),
        ("OneBitLamb", STAGE_1, "1 bit", 8),
        ("ZeroOneAdam", {}, "1 bit", 7),
        ("ZeroOneAdam", LOCAL, "local", 4),
    ],
)
def test_passes_are_launched_once_whatever_the_number_of_parameters(
    name: str, options: Mapping[str, Any], kind: str, launches: int
) -> None:
    """Medians over steps: after a full step of 0/1 Adam there is one pass more."""
    for parameters in (3, 30):
        found = []
        params = [torch.nn.Parameter(torch.ones(64)) for _ in range(parameters)]
        optimizer = getattr(onebit, name)(params, lr=1e-3, process_group=Unsent(), **options)
        for step in range(1, 40):
            for p in params:
                p.grad = torch.ones_like(p)
            with recorded() as launched, Operations() as operations:
                optimizer.step()
            if step > 12 and optimizer.setup.algorithm.kind(optimizer.steps) == kind:
                found.append((len(launched), operations.count))
            if not optimizer.compressing:
                for own in optimizer.state.values():
                    own["exp_avg_sq"].fill_(1)  # no pass has run, and a variance of 0 can't be frozen
        passes, operations_of_torch = map(statistics.median, zip(*found, strict=True))
        assert passes == launches and 0 < operations_of_torch <= MOST_OPERATIONS
