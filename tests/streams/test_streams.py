"""No run of the product has a fault of streams, each call that orders something is needed, and the recorder sees what
passes write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from onebit.collectives.transport import TorchTransport
from onebit.kernels import cpu
from onebit.kernels.passes import SMALL, Pass
from onebit.kernels.tuning.workload import Workload
from tests.kernels.compare import frozen_bits
from tests.streams import passes, runs
from tests.streams.scenarios import SCENARIOS
from tests.streams.simulated import simulated
from tests.streams.sites import Call, calls


@pytest.fixture(autouse=True, scope="module")
def ranks() -> Iterator[None]:
    with runs.ranks():
        yield


@pytest.fixture(scope="module")
def found(ranks: None) -> dict[str, list[str]]:
    """The faults of every scenario."""
    return {name: runs.clean(name)[0] for name in SCENARIOS}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_read_comes_after_its_write_and_no_memory_serves_two_streams_at_once(
    name: str, found: dict[str, list[str]]
) -> None:
    assert found[name] == []


@pytest.mark.parametrize("call", list(calls()), ids=str)
@pytest.mark.usefixtures("found")
def test_without_a_call_that_orders_there_is_a_fault(call: Call) -> None:
    if runs.why_elsewhere(call):
        assert runs.come_to(call) == []
    else:
        assert runs.found_by(call)


def test_what_a_capture_does_not_allow_is_found() -> None:
    with simulated() as device:
        transport = TorchTransport(dist.new_group([0, 1]))
        device.capturing = True
        transport.all_sum(torch.ones(8), "the first").wait()
        torch.ones(1).tolist()
    first, second = device.recorder.faults
    assert first == "a group is used for the first time in a capture, by all_reduce"
    assert second == "the host waits in a capture: tolist"


class Compared:
    """A backend whose passes are held against what the recorder takes them to write."""

    def __init__(self) -> None:
        self.compared: set[str] = set()

    def run(self, work: Pass) -> None:
        given = {name: value for name, value in passes.fields_of(work) if value is not None}
        before = {name: frozen_bits(value) for name, value in given.items()}
        cpu.run(work)
        changed = {name for name, value in given.items() if frozen_bits(value) != before[name]}
        assert changed == (passes.WRITTEN[work.name] & given.keys()) - {"flags"}  # all gradients are finite
        self.compared.add(work.name)


def test_passes_write_to_what_the_recorder_takes_them_to_write_to() -> None:
    backend = Compared()
    for work in Workload(5000, ranks=2).passes(backend).values():  # type: ignore[arg-type]
        work.run()
    assert backend.compared == passes.WRITTEN.keys() - {each.name for each in SMALL}
